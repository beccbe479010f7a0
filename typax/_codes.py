"""Primitives on int8 codes: what a program written for arrays meets when it runs on `QArray` and `QColumns`.

    x ≈ scale · qvalue       shared: the axis along which values share a scale, the last of a `QArray`, the last but one of
                             `QColumns`; ``scale`` has all axes of the codes but that one

A primitive runs on the codes where the result is of this form again; else it refuses, and its operand becomes dense.  A
product always does: a scale on kept axes multiplies the result, one on contracted axes folds into the other operand, and one
on both makes the kept ones batch axes, along which the other operand is repeated.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from typax import _interpret
from typax._op import Refused, op
from typax.quantized import QArray, QColumns, Quantized, accumulated, along, matmul, times
from typax.quantized.contract import of_integers, product


def _plain(q: Any) -> Any:
    """The codes in the order of the array."""
    return q.qvalue.mT if isinstance(q, QColumns) else q.qvalue


def _shared(q: Any) -> int:
    return q.ndim - (2 if isinstance(q, QColumns) else 1)


def _value(codes: Any, scale: Any, shared: int, dtype: Any) -> Any:
    if shared not in (codes.ndim - 1, codes.ndim - 2):
        raise Refused("values share a scale along one of the last two axes")
    return QArray(codes, scale, dtype=dtype) if shared == codes.ndim - 1 else QColumns(codes.mT, scale, dtype=dtype)


def _read(codes: Any, scale: Any, shared: int, dtype: Any) -> Any:
    """The array that rows read from the codes stand for."""
    return times(codes, jnp.expand_dims(scale, shared), dtype)


def _without(xs: Any, axis: int) -> tuple[Any, ...]:
    return (*xs[:axis], *xs[axis + 1 :])


def _above(axes: Any, axis: int) -> tuple[int, ...]:
    """Axes by their positions once ``axis`` is gone."""
    return tuple(a - (a > axis) for a in axes)


dot_general = op(lax.dot_general_p, name="dot_general")


class _Factor:
    """An operand of a product with a label for each axis: ("b", i) batch, ("c", i) contracted, (side, i) kept."""

    def __init__(self, x: Any, side: str, contract: Any, batch: Any, dtype: Any) -> None:
        hi = isinstance(x, QArray | QColumns)
        self.array = (_plain(x) if hi else x).astype(dtype)
        given = {a: ("b", i) for i, a in enumerate(batch)} | {a: ("c", i) for i, a in enumerate(contract)}
        self.labels = [given.get(a, (side, a)) for a in range(x.ndim)]
        self.scale: Any = x.scale if hi else None
        self.scaled = list(_without(self.labels, _shared(x))) if hi else []
        self.folds = any(kind == "c" for kind, _ in self.scaled)

    def onto(self, x: Any, labels: Sequence[Any]) -> Any:
        """``x``, whose axes have these labels, times the scale."""
        order = sorted(range(len(self.scaled)), key=lambda i: labels.index(self.scaled[i]))
        axes = [labels.index(self.scaled[i]) for i in order]
        return x * along(jnp.transpose(self.scale, order), x, axes)

    def times(self, other: "_Factor") -> None:
        """Multiply by the scale of ``other``; a kept axis of it that the scale varies along becomes one of this operand."""
        new = [n for n in other.scaled if n not in self.labels]
        self.labels = new + self.labels
        self.array = other.onto(jnp.expand_dims(self.array, range(len(new))), self.labels)


def _product(x: Any, y: Any, dimension_numbers: Any, params: dict[str, Any]) -> Any:
    (cx, cy), (bx, by) = dimension_numbers
    wide = accumulated(x.dtype, y.dtype)
    a, b = _Factor(x, "x", cx, bx, wide), _Factor(y, "y", cy, by, wide)
    wanted = [*(("b", i) for i in range(len(bx))), *(n for f in (a, b) for n in f.labels if n[0] not in "bc")]
    for own, other in ((a, b), (b, a)):
        if own.folds:  # the scales sit on contracted axes
            other.times(own)
    both = [n for n in a.labels if n in b.labels]
    contract, batch = [n for n in both if n[0] == "c"], sorted(n for n in both if n[0] != "c")
    labels = batch + [n for f in (a, b) for n in f.labels if n not in both]
    if labels != wanted and params.get("out_sharding") is not None:
        raise Refused("a scale that varies along a contracted and a kept axis needs another layout than asked for")
    numbers: Any = [[list(map(f.labels.index, ns)) for f in (a, b)] for ns in (contract, batch)]
    shared = {"precision": params.get("precision"), "out_sharding": params.get("out_sharding")}
    z = lax.dot_general(a.array, b.array, numbers, **shared)
    for f in (a, b):
        if f.scale is not None and not f.folds:  # they sit on axes of the result
            z = f.onto(z, labels)
    if labels != wanted:
        z = jnp.transpose(z, tuple(map(labels.index, wanted)))
    dtype = params.get("preferred_element_type")
    return z.astype(jnp.result_type(x.dtype, y.dtype) if dtype is None else dtype)


@dot_general.impl
def _(x: Float[Array, "*b"], w: QArray | QColumns, *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, dimension_numbers, params)


@dot_general.impl
def _(w: QArray | QColumns, x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(w, x, dimension_numbers, params)


@dot_general.impl
def _(v: QArray | QColumns, w: QArray | QColumns, *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(v, w, dimension_numbers, params)


def _any_product(x: Any, w: Any, first: bool, dimension_numbers: Any, params: dict[str, Any]) -> Any:
    """Of an array and a quantized one of any format."""
    if params.get("out_sharding") is not None:
        raise Refused("the sharding of the result follows from those of the operands")
    contract, batch = dimension_numbers
    if not first:
        contract, batch = contract[::-1], batch[::-1]
    y = product(x, w, contract, batch, first=first, precision=params.get("precision"))
    dtype = params.get("preferred_element_type")
    return y.astype(jnp.result_type(x.dtype, w.dtype) if dtype is None else dtype)


@dot_general.impl
def _(x: Float[Array, "*b"], w: Quantized, *, dimension_numbers: Any, **params: Any) -> Any:
    return _any_product(x, w, True, dimension_numbers, params)


@dot_general.impl
def _(w: Quantized, x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    return _any_product(x, w, False, dimension_numbers, params)


@dot_general.impl
def _(v: Quantized, w: Quantized, *, dimension_numbers: Any, **params: Any) -> Any:
    if params.get("out_sharding") is not None:
        raise Refused("the sharding of the result follows from those of the operands")
    contract, batch = dimension_numbers
    y = of_integers(v, w, contract, batch)
    dtype = params.get("preferred_element_type")
    return y.astype(jnp.result_type(v.dtype, w.dtype) if dtype is None else dtype)


transpose = op(lax.transpose_p, name="transpose")


@transpose.impl
def _(q: QArray | QColumns, *, permutation: Any) -> Any:
    k, n, perm = _shared(q), _plain(q).ndim, tuple(permutation)
    if perm.index(k) != k and set(perm[-2:]) != {n - 2, n - 1}:
        raise Refused("the axis that shares a scale stays, or changes places with the other of the last two")
    scale = jnp.transpose(q.scale, _above([a for a in perm if a != k], k))
    return _value(jnp.transpose(_plain(q), perm), scale, perm.index(k), q.dtype)


reshape = op(lax.reshape_p, name="reshape")


@reshape.impl
def _(q: QArray | QColumns, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    # the axes that lead are merged and split; from the shared one on they stay
    shape, k = _plain(q).shape, _shared(q)
    new = len(new_sizes) - (len(shape) - k)
    if dimensions is not None or sharding is not None or new < 0 or tuple(new_sizes[new:]) != shape[k:]:
        raise Refused("only axes before the one that shares a scale are merged or split")
    return _value(_plain(q).reshape(new_sizes), q.scale.reshape(_without(new_sizes, new)), new, q.dtype)


broadcast_in_dim = op(lax.broadcast_in_dim_p, name="broadcast_in_dim")


@broadcast_in_dim.impl
def _(q: QArray | QColumns, *, shape: Any, broadcast_dimensions: Any, sharding: Any) -> Any:
    k = _shared(q)
    new = broadcast_dimensions[k]
    if sharding is not None or shape[new] != _plain(q).shape[k]:
        raise Refused("the axis that shares a scale keeps its size")
    codes = lax.broadcast_in_dim(_plain(q), shape, broadcast_dimensions)
    of_scale = _above(_without(broadcast_dimensions, k), new)
    return _value(codes, lax.broadcast_in_dim(q.scale, _without(shape, new), of_scale), new, q.dtype)


squeeze = op(lax.squeeze_p, name="squeeze")


@squeeze.impl
def _(q: QArray | QColumns, *, dimensions: Any) -> Any:
    k = _shared(q)
    if k in dimensions:
        raise Refused("the axis that shares a scale stays")
    codes, scale = lax.squeeze(_plain(q), dimensions), lax.squeeze(q.scale, _above(dimensions, k))
    new = k - sum(d < k for d in dimensions)
    return _read(codes, scale, new, q.dtype) if codes.ndim == 1 else _value(codes, scale, new, q.dtype)


slice_ = op(lax.slice_p, name="slice")


@slice_.impl
def _(q: QArray | QColumns, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    k = _shared(q)
    bounds = [start_indices, limit_indices, strides or (1,) * _plain(q).ndim]
    codes = lax.slice(_plain(q), *bounds)
    return _value(codes, lax.slice(q.scale, *(_without(b, k) for b in bounds)), k, q.dtype)


dynamic_slice = op(lax.dynamic_slice_p, name="dynamic_slice")


@dynamic_slice.impl
def _(q: QArray | QColumns, *starts: Integer[Array, ""], slice_sizes: Any) -> Any:
    k = _shared(q)
    codes = lax.dynamic_slice(_plain(q), starts, slice_sizes)
    return _value(codes, lax.dynamic_slice(q.scale, _without(starts, k), _without(slice_sizes, k)), k, q.dtype)


gather = op(lax.gather_p, name="gather")


@gather.impl
def _(
    q: QArray | QColumns, index: Integer[Array, "*b i"], *, dimension_numbers: Any, slice_sizes: Any, **params: Any
) -> Any:
    d, k, of_index = dimension_numbers, _shared(q), index
    if k in d.start_index_map:  # an index that cannot move along the shared axis, since all of it is read
        if slice_sizes[k] != _plain(q).shape[k] or params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            raise Refused("an index along the axis that shares a scale reads single elements")
        of_index = jnp.delete(index, d.start_index_map.index(k), axis=-1)
    if k in (*d.collapsed_slice_dims, *d.operand_batching_dims):
        raise Refused("the axis that shares a scale stays")
    kept = [a for a in range(_plain(q).ndim) if a not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    new = d.offset_dims[kept.index(k)]
    of_scale = lax.GatherDimensionNumbers(
        offset_dims=_above([o for o in d.offset_dims if o != new], new),
        collapsed_slice_dims=_above(d.collapsed_slice_dims, k),
        start_index_map=_above([a for a in d.start_index_map if a != k], k),
        operand_batching_dims=_above(d.operand_batching_dims, k),
        start_indices_batching_dims=d.start_indices_batching_dims,
    )
    # out of bounds: the code 1 times a scale that is what to fill with
    fill = params.pop("fill_value", None)
    fills = (1, jnp.nan if fill is None else fill)
    codes = lax.gather_p.bind(_plain(q), index, dimension_numbers=d, slice_sizes=slice_sizes, fill_value=fills[0], **params)
    sizes = _without(slice_sizes, k)
    scale = lax.gather_p.bind(
        q.scale, of_index, dimension_numbers=of_scale, slice_sizes=sizes, fill_value=fills[1], **params
    )
    if math.prod(sizes) == 1:  # single rows, as an embedding lookup reads them
        return _read(codes, scale, new, q.dtype)
    return _value(codes, scale, new, q.dtype)


concatenate = op(lax.concatenate_p, name="concatenate")


@concatenate.impl
def _(*qs: QArray | QColumns, dimension: Any) -> Any:
    k = _shared(qs[0])
    if dimension == k or any(_shared(q) != k for q in qs):
        raise Refused("parts with scales of their own are joined along other axes than the one that shares a scale")
    scale = lax.concatenate([q.scale for q in qs], *_above([dimension], k))
    return _value(lax.concatenate([_plain(q) for q in qs], dimension), scale, k, qs[0].dtype)


stack, unstack = op(lax.stack_p, name="stack"), op(lax.unstack_p, name="unstack")


@stack.impl
def _(*qs: QArray | QColumns, axis: Any) -> Any:
    k = _shared(qs[0])
    if any(_shared(q) != k for q in qs):
        raise Refused("the values share scales along different axes")
    scale = jnp.stack([q.scale for q in qs], axis - (axis > k))
    return _value(jnp.stack([_plain(q) for q in qs], axis), scale, k + (axis <= k), qs[0].dtype)


@unstack.impl
def _(q: QArray | QColumns, *, axis: Any) -> Any:
    k = _shared(q)
    if axis == k:
        raise Refused("the axis that shares a scale stays")
    parts = zip(jnp.unstack(_plain(q), axis=axis), jnp.unstack(q.scale, axis=axis - (axis > k)), strict=True)
    make = _read if _plain(q).ndim == 2 else _value
    return [make(codes, scale, k - (axis < k), q.dtype) for codes, scale in parts]


split = op(lax.split_p, name="split")


@split.impl
def _(q: QArray | QColumns, *, sizes: Any, axis: Any) -> Any:
    k = _shared(q)
    codes = lax.split(_plain(q), sizes, axis)
    scales = [q.scale] * len(sizes) if axis == k else lax.split(q.scale, sizes, *_above([axis], k))
    return [_value(c, s, k, q.dtype) for c, s in zip(codes, scales, strict=True)]


rev = op(lax.rev_p, name="rev")


@rev.impl
def _(q: QArray | QColumns, *, dimensions: Any) -> Any:
    k = _shared(q)
    scale = lax.rev(q.scale, _above([d for d in dimensions if d != k], k))
    return _value(lax.rev(_plain(q), dimensions), scale, k, q.dtype)


convert_element_type = op(lax.convert_element_type_p, name="convert_element_type")


@convert_element_type.impl
def _(q: QArray | QColumns, *, new_dtype: Any, weak_type: Any, sharding: Any) -> Any:
    # The codes stay: a wider type shows what the narrower one has rounded.
    if not jnp.issubdtype(new_dtype, jnp.floating) or sharding is not None:
        raise Refused("only another float type is a parameter of the type")
    return type(q)(q.qvalue, q.scale, dtype=new_dtype)


neg = op(lax.neg_p, name="neg")


@neg.impl
def _(q: QArray | QColumns) -> Any:
    return type(q)(q.qvalue, -q.scale, dtype=q.dtype)  # the code -128 has no opposite


mul, div = op(lax.mul_p, name="mul"), op(lax.div_p, name="div")


def _rescaled(q: Any, scale: Any) -> Any:
    if q.dtype == jnp.float64:
        raise Refused("a float32 scale does not hold the product with a float64 number")
    return type(q)(q.qvalue, scale, dtype=q.dtype)


@mul.impl
def _(q: QArray | QColumns, c: Float[Array, ""], **_: Any) -> Any:
    return _rescaled(q, q.scale * c.astype(jnp.float32))


@mul.impl
def _(c: Float[Array, ""], q: QArray | QColumns, **_: Any) -> Any:
    return _rescaled(q, q.scale * c.astype(jnp.float32))


@div.impl
def _(q: QArray | QColumns, c: Float[Array, ""], **_: Any) -> Any:
    return _rescaled(q, q.scale / c.astype(jnp.float32))


select_n = op(lax.select_n_p, name="select_n")


@select_n.impl
def _(which: Bool[Array, ""] | Integer[Array, ""], *qs: QArray | QColumns) -> Any:
    # one value or another; element by element they have no common scale
    if any(type(q) is not type(qs[0]) for q in qs):
        raise Refused("the cases share scales along different axes")
    codes, scale = (lax.select_n(which, *(getattr(q, n) for q in qs)) for n in ("qvalue", "scale"))
    return type(qs[0])(codes, scale, dtype=qs[0].dtype)


class _AsMatmul:
    """Products that spell a matmul run by its implementations, where `dot_general` has none for the operands."""

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
        x, y = operands
        (contract, batch) = params["dimension_numbers"]
        n, dtype = len(batch[0]), params.get("preferred_element_type")
        lead = tuple(range(n))
        spelled = contract == ((x.ndim - 1,), (max(y.ndim - 2, 0),)) and batch == (lead, lead)
        plain = (x.ndim, y.ndim) == (n + 2, n + 2) if n else y.ndim <= 2
        kept = dtype is None or jnp.result_type(x.dtype, y.dtype) == dtype
        asked = params.get("out_sharding") is not None or params.get("precision") is not None
        if not (spelled and plain and kept) or asked:
            return NotImplemented
        return matmul.run_equation(operands, {}, options)


_interpret.registry[lax.dot_general_p].append(_AsMatmul())
