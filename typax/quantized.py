"""Row-wise int8: ``x ≈ scale · qvalue``, one scale per row.

Definition.  With ``a = max |x|`` over a row, ``scale = max(a · fl(1/127), 2^-126)`` and
``qvalue = rint(x · fl(1/scale))``, ties to even.  A row of zeros has codes 0 and dequantizes to zeros.  A row that holds
NaN or an infinity has scale NaN and codes 0: it dequantizes to NaN, and no other row does.

The scale is written as a product with the rounded reciprocal since XLA rewrites a division so; in this form eager, jitted
and NumPy results are the same bits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from typax._op import op
from typax._value import Value


def accumulated(*dtypes: Any) -> Any:
    """The dtype in which products of numbers of these dtypes are made and summed: float32, or float64 if one has it."""
    return jnp.dtype("float64" if jnp.dtype("float64") in map(jnp.dtype, dtypes) else "float32")


def times(codes: Any, scale: Any, dtype: Any) -> Any:
    """``codes · scale`` in ``dtype``, multiplied in float32 or float64."""
    wide = accumulated(dtype)
    return (codes.astype(wide) * scale.astype(wide)).astype(dtype)


class QArray(Value, name="q8"):
    """Row-wise int8: x ≈ scale · qvalue.

    Components: ``qvalue``, int8 of the shape that the value stands for; ``scale``, float32, one for each row (all but the
    last axis).  ``dtype`` is that of the array it stands for.
    """

    qvalue: Int8[Array, "*batch n"]
    scale: Float32[Array, "*batch"]
    dtype: Any = jnp.dtype("float32")

    def dense(self) -> Float[Array, "*batch n"]:
        return times(self.qvalue, self.scale[..., None], self.dtype)

    @classmethod
    def from_dense(cls, x, dtype=None):
        """Quantize; what `typax.retract` and quantized tangents are made by."""
        return cls(*_round(x), dtype=dtype or x.dtype)


class QColumns(Value, name="q8t"):
    """`QArray` with the last two axes swapped: codes ``qvalue``, int8, one ``scale`` a column; ``dtype`` as there."""

    qvalue: Int8[Array, "*batch n k"]
    scale: Float32[Array, "*batch k"]
    dtype: Any = jnp.dtype("float32")

    def dense(self) -> Float[Array, "*batch n k"]:
        return times(self.qvalue, self.scale[..., None, :], self.dtype)


def _identity(x: Any) -> Any:
    return x


def _half_a_step(q: Any, _: Any) -> Any:
    return q.components()[1][..., None] / 2


@op(reference=_identity, within=_half_a_step)
def quantize(x: Float[Array, "*batch n"]) -> QArray:
    """Quantize a float array to int8 with one scale per row (along the last axis).

    Differentiates as the identity (the straight-through estimator).
    """
    return QArray(*_round(x), dtype=x.dtype)


def _round(x: Any) -> tuple[Any, Any]:
    """The codes and the scales."""
    x32 = lax.reduce_precision(x, 8, 7) if x.dtype == jnp.bfloat16 else x
    x32 = x32.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(x32), axis=-1, initial=0.0)
    # Large reductions of XLA:CPU drop NaN: look for it by a sum, and for infinities in the maximum.
    bad = jnp.isnan(jnp.sum(x32 * 0.0, axis=-1))
    scale = jnp.maximum(absmax * jnp.float32(1 / 127), jnp.float32(2.0**-126))
    codes = jnp.round(jnp.clip(x32 * (1 / scale)[..., None], -127, 127))
    codes = jnp.where(bad[..., None], jnp.float32(0), codes).astype(jnp.int8)
    return codes, jnp.where(bad, jnp.float32(jnp.nan), scale)


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
