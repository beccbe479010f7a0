"""What training sees of weights is what is stored, and what is quantized again is what the dense array gives: bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import typax
from typax.quantized import fake, formats, quantizing

X = (np.random.default_rng(0).normal(size=(6, 64)) * np.logspace(-3, 3, 6)[:, None]).astype(np.float32)
X[1, 3], X[2, 5], X[3] = np.nan, np.inf, 0
HOW = {name: {} for name in formats()} | {
    "uint4": {"zero_point": True, "axis": 0}, "int4": {"group": 10, "scale": "mse"},
    "mxfp4": {"axis": 0, "exponents": "even"},
}  # fmt: skip


def bits(x):
    x = np.ascontiguousarray(x)
    return x.view(f"uint{8 * x.itemsize}")


def leaves(q):
    return [y for x in q.components() for y in (leaves(x) if isinstance(x, typax.Value) else [x]) if hasattr(y, "dtype")]


@pytest.mark.parametrize("name", HOW)
def test_the_forward_pass_sees_what_is_stored(name):
    """Under jit, behind a producer that is fused with it, differentiated: the bits of dense(quantize(x))."""
    how = HOW[name]
    for dtype in (jnp.float32, jnp.bfloat16):
        w = jnp.asarray(X, dtype)
        stored = bits(typax.dense(typax.quantize(w * 1, name, **how)))
        step = jax.jit(lambda w: jax.value_and_grad(lambda w: ((y := fake(w * 1, name, **how)).sum(), y), has_aux=True)(w))
        (_, seen), gradient = step(w)
        np.testing.assert_array_equal(bits(seen), stored)
        np.testing.assert_array_equal(gradient, jnp.ones_like(w))


@pytest.mark.parametrize("source", ["int8", "nf4_double"])
def test_quantized_again(source, monkeypatch):
    monkeypatch.setattr(quantizing, "BLOCK", 64)
    q = typax.quantize(X, source)
    d = typax.dense(q)
    for name, how in HOW.items():
        got, want = typax.requantize(q, name, **how), typax.quantize(d, name, **how)
        assert jax.typeof(got) == jax.typeof(want)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b), name)


def test_no_dense_array_is_made_of_it():
    w = np.random.default_rng(1).normal(size=(1024, 512)).astype(np.float32)
    q = typax.quantize(w, "nf4")
    for how in ({"group": 32}, {"axis": 0, "group": 32}, {"axis": 0}):
        compiled = typax.jit(lambda q, how=how: typax.requantize(q, "int4", **how)).lower(q).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < w.nbytes / 2
    gradient = jax.grad(lambda q: jnp.sum(typax.dense(typax.requantize(q, "int4")) * w))(q)
    np.testing.assert_array_equal(gradient, w)
    with pytest.raises(ValueError, match="requantize: axis=3"):
        typax.requantize(q, "int8", axis=3)
    with pytest.raises(TypeError, match="requantize has no implementation for"):
        typax.requantize(typax.outer(jnp.ones(3), jnp.ones(2)), "int8")
