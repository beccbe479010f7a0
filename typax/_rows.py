"""Primitives on quantized arrays of any format and layout, where the result is rows with one scale each again.

    transpose      codes and scales by the same permutation: what shares a scale stays last
    slice          kept axes anywhere, axes in groups on their borders, packed ones between bytes
    lookups        rows along a kept leading axis, as arrays
    scaling        the scales, if they are float32

Else an implementation refuses, and says with which numbers; then `typax.lift` makes the operand dense, or raises.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from typax._codes import concatenate, convert_element_type, dynamic_slice, gather, mul, neg, slice_, transpose
from typax._op import Refused
from typax._structural import dense
from typax.quantized import layout
from typax.quantized.encode import Parts
from typax.quantized.types import Quantized, all_groups, build

Groups = tuple[int, ...]


def _parts(q: Any) -> Parts:
    scale = q.scale
    if isinstance(scale, Quantized):
        inner: Any = scale
        nested = _parts(inner)
        scale = Parts(nested.qvalue, nested.scale, nested.zero_point, nested.offset, all_groups(jax.typeof(inner)))
    return Parts(q.qvalue, scale, getattr(q, "zero_point", None), getattr(q, "offset", None))


def _made(q: Any, groups: Groups, shape: tuple[int, ...], parts: Parts, dtype: Any = None) -> Any:
    return build(q._type.of_format, groups, shape, parts, dtype or q.dtype)


def _each(q: Any, codes: Any, scales: Any) -> Parts:
    """The parts by two functions: of the codes, and of all that has an entry for each scale."""
    old = _parts(q)
    if isinstance(old.scale, Parts):
        raise Refused(f"the scales of {q._type} are quantized themselves")
    zero, offset = (None if a is None else scales(a) for a in (old.zero_point, old.offset))
    return Parts(codes(old.qvalue), scales(old.scale), zero, offset)


def _flat(parts: Parts, codes: Any, scales: Any, nested: Any) -> Parts:
    scale = nested(parts.scale) if isinstance(parts.scale, Parts) else scales(parts.scale)
    zero, offset = (None if a is None else scales(a) for a in (parts.zero_point, parts.offset))
    return Parts(codes(parts.qvalue), scale, zero, offset, parts.scale_groups)


def _permuted(format: Any, parts: Parts, groups: Groups, perm: tuple[int, ...], shown: Any) -> Parts:
    outer, inner = layout.outer_axes(groups), layout.inner_axes(groups)
    of_outer = [outer.index(a) for a in perm if groups[a] != 0]
    of_inner = [len(outer) + inner.index(a) for a in perm if groups[a] != 1]
    if format.bits < 8 and of_inner and of_inner[-1] != len(outer) + len(inner) - 1:
        raise Refused(f"{shown} has codes packed along axis {inner[-1]}, which stays the last of those that share a scale")

    def below(scale: Parts) -> Parts:
        kept = scale.scale_groups
        done = _permuted(format.scale.of, scale, kept, tuple(of_outer), shown)
        return Parts(done.qvalue, done.scale, done.zero_point, done.offset, tuple(kept[i] for i in of_outer))

    return _flat(parts, lambda a: jnp.transpose(a, (*of_outer, *of_inner)), lambda a: jnp.transpose(a, of_outer), below)


@transpose.impl
def _(q: Quantized, *, permutation: Any) -> Any:
    groups, perm = all_groups(q._type), tuple(permutation)
    parts = _permuted(q._type.of_format, _parts(q), groups, perm, q._type)
    return _made(q, tuple(groups[a] for a in perm), tuple(q.shape[a] for a in perm), parts)


@slice_.impl
def _(q: Quantized, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    groups, f = all_groups(q._type), q._type.of_format
    strides = strides or (1,) * q.ndim
    outer, inner = layout.outer_axes(groups), layout.inner_axes(groups)
    of_outer, of_inner = [], []
    for a, (i, j, s, g) in enumerate(zip(start_indices, limit_indices, strides, groups, strict=True)):
        n, at = q.shape[a], f"{i}:{j}" + (f":{s}" if s != 1 else "")
        packed = f.bits < 8 and a == inner[-1]
        border = g if g > 1 else f.per if g == 0 and packed else 1
        if (i % border or (j % border and j != n) or s != 1) and border > 1:
            what = f"groups of {g}" if g > 1 else f"packs of {f.per} codes"
            raise Refused(f"a slice {at} along axis {a} of {q._type} does not start and end between {what}")
        if g != 0:
            of_outer.append(slice(i // g, -(-j // g), s))
        if g > 1:
            of_inner.append(slice(None))
        elif g == 0:
            size = f.per * f.bits // 8 if packed else 1
            of_inner.append(slice(i // border * size, -(-j // border) * size, s))
    shape = tuple(len(range(*t)) for t in zip(start_indices, limit_indices, strides, strict=True))
    parts = _each(q, lambda a: a[(*of_outer, *of_inner)], lambda a: a[tuple(of_outer)])
    assert len(outer) == len(of_outer)
    return _made(q, groups, shape, parts)


@dynamic_slice.impl
def _(q: Quantized, *starts: Integer[Array, ""], slice_sizes: Any) -> Any:
    groups = all_groups(q._type)
    for a, (g, n, m) in enumerate(zip(groups, q.shape, slice_sizes, strict=True)):
        if g != 1 and n != m:
            raise Refused(f"a dynamic slice of {m} along axis {a} of {q._type}, of {n}, may end within a group")
    kept = [a for a in layout.outer_axes(groups) if groups[a] == 1]

    def cut(array: Any) -> Any:
        for at, a in enumerate(layout.outer_axes(groups)):
            if a in kept:
                array = lax.dynamic_slice_in_dim(array, starts[a], slice_sizes[a], axis=at)
        return array

    return _made(q, groups, tuple(slice_sizes), _each(q, cut, cut))


@gather.impl
def _(q: Quantized, index: Integer[Array, "*b i"], *, dimension_numbers: Any, slice_sizes: Any, **params: Any) -> Any:
    d, groups, n = dimension_numbers, all_groups(q._type), index.ndim - 1
    rows = d.collapsed_slice_dims == (0,) == d.start_index_map and tuple(slice_sizes[1:]) == tuple(q.shape[1:])
    if not rows or d.operand_batching_dims or groups[0] != 1 or d.offset_dims != tuple(range(n, n + q.ndim - 1)):
        raise Refused(f"lookups in {q._type} are of rows along its first axis, where that has scales of its own")
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    at = index[..., 0]
    codes = lambda a: jnp.take(a, at, axis=0, mode="clip")
    inside = (at >= 0) & (at < q.shape[0])

    def scales(a: Any) -> Any:
        taken = codes(a)
        if not fills or a.dtype == jnp.int8:
            return taken
        there = jnp.expand_dims(inside, tuple(range(n, taken.ndim)))
        return jnp.where(there, taken, jnp.asarray(255 if a.dtype == jnp.uint8 else jnp.nan, a.dtype))

    if fills and q._type.extra == "z" and q.scale.dtype == jnp.uint8:
        raise Refused("lookups that fill, beside a zero point")
    return dense(_made(q, (*(1,) * n, *groups[1:]), (*at.shape, *q.shape[1:]), _each(q, codes, scales)))


@concatenate.impl
def _(*qs: Quantized, dimension: Any) -> Any:
    first: Any = qs[0]
    groups = all_groups(first._type)
    alike = all(
        q._type.of_format == first._type.of_format and all_groups(q._type) == groups and q._type.extra == first._type.extra
        for q in qs
    )
    if not alike or groups[dimension] != 1:
        raise Refused("parts of one format and layout are joined along axes that have scales of their own")
    at = layout.outer_axes(groups).index(dimension)
    each = [_each(q, lambda a: a, lambda a: a) for q in qs]
    join = lambda name: jnp.concatenate([getattr(p, name) for p in each], axis=at)
    zero, offset = (join(n) if getattr(each[0], n) is not None else None for n in ("zero_point", "offset"))
    shape = list(first.shape)
    shape[dimension] = sum(q.shape[dimension] for q in qs)
    return _made(first, groups, tuple(shape), Parts(join("qvalue"), join("scale"), zero, offset))


@convert_element_type.impl
def _(q: Quantized, *, new_dtype: Any, weak_type: Any, sharding: Any) -> Any:
    if not jnp.issubdtype(new_dtype, jnp.floating) or sharding is not None:
        raise Refused("only another float type is a parameter of the type")
    return _made(q, all_groups(q._type), q.shape, _parts(q), new_dtype)


def _scaled(q: Any, f: Any) -> Any:
    if q.dtype == jnp.float64 or isinstance(q.scale, Quantized) or q.scale.dtype != jnp.float32 or q._type.extra == "m":
        raise Refused(f"the scales of {q._type} do not hold the product")
    old = _parts(q)
    return _made(q, all_groups(q._type), q.shape, Parts(old.qvalue, f(old.scale), old.zero_point))


@neg.impl
def _(q: Quantized) -> Any:
    return _scaled(q, lambda s: -s)


@mul.impl
def _(q: Quantized, c: Float[Array, ""], **_: Any) -> Any:
    return _scaled(q, lambda s: s * c.astype(jnp.float32))


@mul.impl
def _(c: Float[Array, ""], q: Quantized, **_: Any) -> Any:
    return _scaled(q, lambda s: s * c.astype(jnp.float32))
