"""Row-wise int8: ``x ≈ scale · qvalue``, one scale per row.

Definition.  With ``a = max |x|`` over a row, ``scale = max(a · fl(1/127), 2^-126)`` and
``qvalue = rint(x · fl(1/scale))``, ties to even.  A row of zeros has codes 0 and dequantizes to zeros.  A row that holds
NaN or an infinity has scale NaN and codes 0: it dequantizes to NaN, and no other row does.

The scale is written as a product with the rounded reciprocal since XLA rewrites a division so; in this form eager, jitted
and NumPy results are the same bits.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int8

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

    @classmethod
    def from_dense(cls, x, dtype=None):
        """Quantize; what `typax.retract` and quantized tangents are made by."""
        return cls(*_round(x), dtype=dtype or x.dtype)


def _identity(x: Any) -> Any:
    return x


@op(reference=_identity)
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
    return _matmul(x.astype(jnp.float32) * _along(w.scale, x.ndim - 1, x.ndim), w.qvalue.astype(jnp.float32), x, w)


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[QArray, "k"]) -> Any:
    return _matmul(x.astype(jnp.float32), w.qvalue.astype(jnp.float32) * w.scale, x, w)


@matmul.impl
def _(w: Float[QArray, "*c k"], x: Float[Array, "k"]) -> Any:
    # one scale per element of the result
    return _matmul(w.qvalue.astype(jnp.float32), x.astype(jnp.float32), x, w, w.scale)


@matmul.impl
def _(w: Float[QArray, "m k"], x: Float[Array, "*b k n"]) -> Any:
    # one scale per row of the result
    return _matmul(w.qvalue.astype(jnp.float32), x.astype(jnp.float32), x, w, w.scale[:, None])


@matmul.impl
def _(w: Float[QArray, "k"], x: Float[Array, "*b k n"]) -> Any:
    return _matmul(w.qvalue.astype(jnp.float32) * w.scale, x.astype(jnp.float32), x, w)


def _matmul(a: Any, b: Any, x: Any, w: Any, scale: Any = None) -> Any:
    y = jnp.matmul(a, b)
    if scale is not None:
        y = y * jnp.expand_dims(scale, tuple(range(y.ndim - scale.ndim)))
    return y.astype(jnp.result_type(x.dtype, w.dtype))


def _along(scale: Any, axis: int, ndim: int) -> Any:
    """A vector of scales along one of ``ndim`` axes."""
    return jnp.expand_dims(scale, tuple(k for k in range(ndim) if k != axis))


dot_general = op(lax.dot_general_p, name="dot_general")
dot_general.__doc__ = """The op of ``lax.dot_general_p``, by which `typax.lift` and derivatives run products natively.

Of a matrix of int8 codes (`QArray` or its transpose) with an array, one contracted axis and no batch axes. Its keywords are
the primitive's parameters.
"""


class QColumns(Value, name="q8t"):
    """The transpose of a matrix `QArray`: codes ``qvalue``, int8, one ``scale`` a column; ``dtype`` as in `QArray`."""

    qvalue: Int8[Array, "n k"]
    scale: Float32[Array, "k"]
    dtype: Any = jnp.dtype("float32")

    def dense(self) -> Float[Array, "n k"]:
        return (self.qvalue.astype(jnp.float32) * self.scale[None, :]).astype(self.dtype)


def _product(x: Any, w: Any, scaled: int, dimension_numbers: Any, params: dict[str, Any], left: bool) -> Any:
    """``x`` times the matrix ``w`` whose axis ``scaled`` has the scales; ``left``: ``w`` is the left operand."""
    contract, (bx, bw) = dimension_numbers
    if len(contract[0]) != 1 or bx or bw:
        raise Refused("only one contracted axis and no batch axes run on the codes")
    (cw,), (cx,) = contract if left else contract[::-1]
    x32, q = x.astype(jnp.float32), w.qvalue.astype(jnp.float32)
    if cw == scaled:  # the scales sit on the contracted axis and fold into x
        x32 = x32 * _along(w.scale, cx, x.ndim)
    shared = {"precision": params.get("precision"), "out_sharding": params.get("out_sharding")}
    a, b = (q, x32) if left else (x32, q)
    y = lax.dot_general(a, b, (contract, ((), ())), **shared)
    if cw != scaled:  # they sit on the kept axis, the first of the result or the last
        y = y * _along(w.scale, 0 if left else y.ndim - 1, y.ndim)
    wanted = params.get("preferred_element_type")
    return y.astype(jnp.result_type(x.dtype, w.dtype) if wanted is None else wanted)


@dot_general.impl
def _(x: Float[Array, "*b"], w: Float[QArray, "k n"], *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, 0, dimension_numbers, params, left=False)


@dot_general.impl
def _(w: Float[QArray, "k n"], x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, 0, dimension_numbers, params, left=True)


@dot_general.impl
def _(x: Float[Array, "*b"], w: QColumns, *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, 1, dimension_numbers, params, left=False)


@dot_general.impl
def _(w: QColumns, x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, 1, dimension_numbers, params, left=True)


transpose = op(lax.transpose_p, name="transpose")
transpose.__doc__ = (
    """The op of ``lax.transpose_p``: a matrix `QArray` becomes one with a scale for each column, and back."""
)


@transpose.impl
def _(q: Float[QArray, "k n"], *, permutation: Any) -> Any:
    return QColumns(q.qvalue.T, q.scale, dtype=q.dtype) if tuple(permutation) == (1, 0) else q


@transpose.impl
def _(q: QColumns, *, permutation: Any) -> Any:
    return QArray(q.qvalue.T, q.scale, dtype=q.dtype) if tuple(permutation) == (1, 0) else q


gather = op(lax.gather_p, name="gather")
gather.__doc__ = (
    """The op of ``lax.gather_p``: rows of a matrix `QArray`, whole, by their numbers; the result is an array."""
)


@gather.impl
def _(q: Float[QArray, "k n"], index: Int[Array, "*b 1"], *, dimension_numbers: Any, slice_sizes: Any, **params: Any) -> Any:
    # whole rows, as an embedding lookup reads them
    d, n = dimension_numbers, q.qvalue.shape[1]
    whole = slice_sizes == (1, n) and d.collapsed_slice_dims == (0,) and d.start_index_map == (0,)
    if not whole or d.offset_dims != (index.ndim - 1,) or d.operand_batching_dims:
        raise Refused("only whole rows are read from the codes")
    codes = lax.gather_p.bind(q.qvalue, index, dimension_numbers=d, slice_sizes=slice_sizes, **params)
    rows = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    scale = lax.gather_p.bind(q.scale, index, dimension_numbers=rows, slice_sizes=(1,), **params)
    return (codes.astype(jnp.float32) * scale[..., None]).astype(q.dtype)
