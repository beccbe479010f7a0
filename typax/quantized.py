"""Row-wise int8: ``x ≈ scale · qvalue``, one scale per row.

Definition.  With ``a = max |x|`` over a row, ``scale = max(a · fl(1/127), 2^-126)`` and
``qvalue = rint(x · fl(1/scale))``, ties to even.  A row of zeros has codes 0 and dequantizes to zeros.  A row that holds
NaN or an infinity has scale NaN and codes 0: it dequantizes to NaN, and no other row does.

The scale is written as a product with the rounded reciprocal since XLA rewrites a division so; in this form eager, jitted
and NumPy results are the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from typax._op import Refused, op
from typax._value import Value


class QArray(Value, name="q8"):
    """Row-wise int8: x ≈ scale · qvalue.

    Components: ``qvalue``, int8 of the shape that the value stands for; ``scale``, float32, one for each row (all but the
    last axis).  ``dtype`` is that of the array it stands for.
    """

    qvalue: Int8[Array, "*batch n"]
    scale: Float32[Array, "*batch"]
    dtype: Any = jnp.dtype("float32")

    def dense(self) -> Float[Array, "*batch n"]:
        return (self.qvalue.astype(jnp.float32) * self.scale[..., None]).astype(self.dtype)


def _identity(x: Any) -> Any:
    return x


@op(reference=_identity)
def quantize(x: Float[Array, "*batch n"]) -> QArray:
    """Quantize a float array to int8 with one scale per row (along the last axis).

    Differentiates as the identity (the straight-through estimator).
    """
    x32 = lax.reduce_precision(x, 8, 7) if x.dtype == jnp.bfloat16 else x
    x32 = x32.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(x32), axis=-1, initial=0.0)
    # Large reductions of XLA:CPU drop NaN: look for it by a sum, and for infinities in the maximum.
    bad = jnp.isnan(jnp.sum(x32 * 0.0, axis=-1))
    scale = jnp.maximum(absmax * jnp.float32(1 / 127), jnp.float32(2.0**-126))
    codes = jnp.round(jnp.clip(x32 * (1 / scale)[..., None], -127, 127))
    codes = jnp.where(bad[..., None], jnp.float32(0), codes).astype(jnp.int8)
    return QArray(codes, jnp.where(bad, jnp.float32(jnp.nan), scale), dtype=x.dtype)


matmul = op(jnp.matmul, name="matmul")


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[QArray, "k n"]) -> Any:
    # one scale per row of w: it sits on the contracted axis and folds into x
    out = jnp.result_type(x.dtype, w.dtype)
    y = jnp.matmul(x.astype(jnp.float32) * w.scale, w.qvalue.astype(jnp.float32))
    return y.astype(out)


@matmul.impl
def _(w: Float[QArray, "m k"], x: Float[Array, "k n"]) -> Any:
    # one scale per row of the result
    out = jnp.result_type(x.dtype, w.dtype)
    y = jnp.matmul(w.qvalue.astype(jnp.float32), x.astype(jnp.float32)) * w.scale[:, None]
    return y.astype(out)


dot_general = op(lax.dot_general_p, name="dot_general")


@dot_general.impl
def _(x: Float[Array, "*b"], w: Float[QArray, "k n"], *, dimension_numbers: Any, **params: Any) -> Any:
    ((cx,), (cw,)), (bx, bw) = _one_axis(dimension_numbers)
    q = w.qvalue.astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    if cw == 0:  # the scaled axis is contracted
        x32 = x32 * jnp.expand_dims(w.scale, tuple(range(1, x.ndim - cx)))
    y = lax.dot_general(x32, q, (((cx,), (cw,)), (bx, bw)), **_shared(params))
    if cw == 1:
        y = y * w.scale
    return y.astype(_result_dtype(x, w, params))


@dot_general.impl
def _(w: Float[QArray, "k n"], x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    ((cw,), (cx,)), (bw, bx) = _one_axis(dimension_numbers)
    q = w.qvalue.astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    if cw == 0:
        x32 = x32 * jnp.expand_dims(w.scale, tuple(range(1, x.ndim - cx)))
    y = lax.dot_general(q, x32, (((cw,), (cx,)), (bw, bx)), **_shared(params))
    if cw == 1:
        y = y * jnp.expand_dims(w.scale, tuple(range(1, y.ndim)))
    return y.astype(_result_dtype(x, w, params))


def _one_axis(dimension_numbers: Any) -> Any:
    contract, batch = dimension_numbers
    if len(contract[0]) != 1 or batch[0] or batch[1]:
        raise Refused("only one contracted axis and no batch axes run on the codes")
    return (tuple(contract[0]), tuple(contract[1])), batch


def _shared(params: dict[str, Any]) -> dict[str, Any]:
    return {"precision": params.get("precision"), "out_sharding": params.get("out_sharding")}


def _result_dtype(x: Any, w: Any, params: dict[str, Any]) -> Any:
    wanted = params.get("preferred_element_type")
    return jax.numpy.result_type(x.dtype, w.dtype) if wanted is None else wanted
