"""Products with quantized arrays, on their codes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from typax._op import op
from typax.quantized.types import QArray, accumulated

matmul = op(jnp.matmul, name="matmul")
matmul.__doc__ = """What ``jnp.matmul`` is for arrays; on a `QArray` and an array it runs on the codes.

The result has the promoted dtype of what the operands stand for. Add your type with ``@typax.matmul.impl``.

Raises:
  TypeError: if no implementation fits the operands, or a sharded axis is contracted.
"""


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[QArray, "k n"]) -> Any:
    # one scale per row of w: it sits on the contracted axis and folds into x
    wide = x.astype(accumulated(x.dtype, w.dtype))
    return _matmul(wide * along(w.scale, wide, [x.ndim - 1]), w.qvalue, x, w)


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[QArray, "k"]) -> Any:
    return _matmul(x, w.qvalue, x, w, w.scale)


@matmul.impl
def _(w: Float[QArray, "*c k"], x: Float[Array, "k"]) -> Any:
    # one scale per element of the result
    return _matmul(w.qvalue, x, x, w, w.scale)


@matmul.impl
def _(w: Float[QArray, "m k"], x: Float[Array, "*b k n"]) -> Any:
    # one scale per row of the result
    return _matmul(w.qvalue, x, x, w, w.scale[:, None])


@matmul.impl
def _(w: Float[QArray, "k"], x: Float[Array, "*b k n"]) -> Any:
    return _matmul(w.qvalue, x, x, w, w.scale)


def along(scale: Any, x: Any, axes: Sequence[int]) -> Any:
    """Scales that lie along ``axes`` of ``x``, ready to multiply it: partitioned as ``x`` is, which is to stay so."""
    own, of_x = jax.typeof(scale).sharding.spec, jax.typeof(x).sharding.spec
    parts = [own[i] if x.shape[k] == 1 else of_x[k] for i, k in enumerate(axes)]
    if any(p is not None for p in own) and list(own) != parts:
        scale = jax.sharding.reshard(scale, jax.P(*parts))
    return jnp.expand_dims(scale, [k for k in range(x.ndim) if k not in axes]).astype(x.dtype)


def _matmul(a: Any, b: Any, x: Any, w: Any, scale: Any = None) -> Any:
    wide = accumulated(x.dtype, w.dtype)
    y = jnp.matmul(a.astype(wide), b.astype(wide))
    if scale is not None:
        y = y * jnp.expand_dims(scale, range(y.ndim - scale.ndim)).astype(wide)
    return y.astype(jnp.result_type(x.dtype, w.dtype))
