"""A model on hi weights against the same model on the arrays that these stand for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import typax
from typax import Receipt, dense, lift

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiled once, run once


COLUMNS = {"format": "int8", "axis": -2}  # weights are [in, out]


def normal(i: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5


def as_dense(tree: Any) -> Any:
    return jax.tree.map(dense, tree)


def near(got: Any, want: Any, tol: float) -> None:
    """Leaf by leaf: no further off than ``tol`` times the largest entry."""
    got, want = as_dense(got), as_dense(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if jnp.issubdtype(b.dtype, jnp.floating):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, rtol=0, atol=tol * max(1.0, np.abs(b).max(initial=0)), err_msg=str(path))


def lossy(f: Callable[..., Any], *args: Any) -> Callable[[Any], Any]:
    """What ``f`` gives and the gradient of a sum of its results, in one program."""

    def loss(params: Any) -> Any:
        out = f(params, *args)
        return sum(jnp.sum(jnp.sin(x.astype("float32"))) for x in jax.tree.leaves(out)), out

    return jax.jit(jax.grad(loss, has_aux=True, allow_int=True), compiler_options=QUICK)


def same(f: Callable[..., Any], small: Any, *args: Any, tol: float = 2e-5) -> tuple[Receipt, Any]:
    """``f`` lifted makes nothing dense, and gives the results and gradients of ``f`` on the dense parameters: the receipt,
    and these results."""
    receipt = typax.explain(f)(small, *args)
    assert receipt.densified == [], str(receipt)
    assert any(x.ran == "native" and x.flops for x in receipt.lines)
    want = lossy(f, *args)(as_dense(small))
    near(lossy(lift(f, "error"), *args)(small), want, tol)
    return receipt, want[1]


def products(receipt: Receipt) -> int:
    """How many products ran natively."""
    return sum(x.ran == "native" and x.flops > 0 for x in receipt.lines)
