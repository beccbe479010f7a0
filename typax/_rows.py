"""Primitives on quantized arrays of any format and layout, which move codes and scales and make no array.

    transpose, reshape, squeeze, expand_dims, broadcast_in_dim      axes as `quantized.axes` moves them
    slice, dynamic_slice, split, unstack, gather, rev               along kept axes anywhere, along groups on their borders
    concatenate, stack, pad, select_n                               of values of one format that share scales alike
    convert_element_type, neg, mul, div                             what it stands for, and its scales

What these give are quantized arrays, but for vectors, such as the rows of a lookup, which are arrays.  An implementation
that cannot do so refuses, and says with which numbers; then `typax.lift` makes the operand dense, or raises.
"""

import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from typax import _shapes
from typax._op import Op, Refused, op
from typax.quantized import Quantized, axes, layout
from typax.quantized.axes import Held, held


class Transpose(Op):
    """The op `transpose`, called as ``jnp.transpose`` is, or by the keyword of the primitive."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_shapes.transpose)

    def __call__(self, a: Any, axes: Any = None, *, permutation: Any = None) -> Any:
        return _shapes.transpose(a, axes) if permutation is None else super().__call__(a, permutation=tuple(permutation))


transpose = Transpose(lax.transpose_p, "transpose")
transpose.__doc__ = _shapes.transpose.__doc__


@transpose.impl
def _(q: Quantized, *, permutation: Any) -> Any:
    return axes.permute(held(q), permutation).value()


reshape = op(lax.reshape_p, name="reshape")


@reshape.impl
def _(q: Quantized, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    x = held(q)
    x = x if dimensions is None else axes.permute(x, dimensions)
    if len(new_sizes) < 2 and max(x.shape, default=1) == math.prod(x.shape):
        return layout.reshape(x.dense(), tuple(new_sizes), _spec(sharding))
    try:
        return axes.reshape(x, new_sizes, _spec(sharding)).value()
    except Refused:
        if 0 not in x.shape:
            raise
        return layout.reshape(x.dense(), tuple(new_sizes), _spec(sharding))  # of an array without entries none share a scale


def _spec(sharding: Any) -> Any:
    return None if sharding is None else sharding.spec


squeeze = op(lax.squeeze_p, name="squeeze")


@squeeze.impl
def _(q: Quantized, *, dimensions: Any) -> Any:
    return _squeezed(held(q), dimensions)


def _squeezed(x: Held, dimensions: Sequence[int]) -> Any:
    """A value of fewer axes, or the vector that is left."""
    if len(x.shape) - len(dimensions) < 2 or {*x.inner} <= {*dimensions}:
        return lax.squeeze(x.dense(), dimensions)
    for a in sorted(dimensions, reverse=True):
        x = axes.drop(x, a)
    return x.value()


broadcast_in_dim = op(lax.broadcast_in_dim_p, name="broadcast_in_dim")


@broadcast_in_dim.impl
def _(q: Quantized, *, shape: Any, broadcast_dimensions: Any, sharding: Any) -> Any:
    return axes.broadcast(held(q), shape, broadcast_dimensions, _spec(sharding)).value()


rev = op(lax.rev_p, name="rev")


@rev.impl
def _(q: Quantized, *, dimensions: Any) -> Any:
    x = held(q)
    for a in dimensions:
        x = axes.reverse(x, a)
    return x.value()


# --- parts -----------------------------------------------------------------------------------------------------------

slice_ = op(lax.slice_p, name="slice")


@slice_.impl
def _(q: Quantized, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    x = held(q)
    for a, at in enumerate(zip(start_indices, limit_indices, strides or (1,) * q.ndim, strict=True)):
        x = axes.cut(x, a, *at)
    return x.value()


split, unstack = op(lax.split_p, name="split"), op(lax.unstack_p, name="unstack")


@split.impl
def _(q: Quantized, *, sizes: Any, axis: Any) -> Any:
    x, ends = held(q), list(itertools.accumulate(sizes))
    return [axes.cut(x, axis, end - n, end).value() for n, end in zip(sizes, ends, strict=True)]


@unstack.impl
def _(q: Quantized, *, axis: Any) -> Any:
    x = held(q)
    return [_squeezed(axes.cut(x, axis, i, i + 1), (axis,)) for i in range(x.shape[axis])]


dynamic_slice = op(lax.dynamic_slice_p, name="dynamic_slice")


@dynamic_slice.impl
def _(q: Quantized, *starts: Integer[Array, ""], slice_sizes: Any) -> Any:
    x = held(q)
    for a, (start, n) in enumerate(zip(starts, slice_sizes, strict=True)):
        x = axes.window(x, a, start, n)
    return x.value()


gather = op(lax.gather_p, name="gather")


@gather.impl
def _(q: Quantized, index: Integer[Array, "*b i"], *, dimension_numbers: Any, slice_sizes: Any, mode: Any, fill_value: Any,
      **params: Any) -> Any:  # fmt: skip
    d, x = dimension_numbers, held(q)
    last = jnp.asarray([q.shape[a] - slice_sizes[a] for a in d.start_index_map], index.dtype)
    inside = jnp.all((index >= 0) & (index <= last), -1)
    found = axes.gather(x, jnp.clip(index, 0, last), d, slice_sizes, mode="clip", **params)
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    vectors = sum(n > 1 for a, n in enumerate(slice_sizes) if a not in gone) < 2
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    value = jnp.nan if fill_value is None else fill_value
    there = jnp.expand_dims(inside, d.offset_dims)
    if vectors or not found.inner:  # single rows, as an embedding lookup reads them
        rows = found.dense()
        return jnp.where(there, rows, jnp.asarray(value, rows.dtype)) if fills else rows
    if fills:
        kept = [a for a in range(len(found.shape)) if a not in d.offset_dims]
        found = axes.filled(found, inside, kept, value)
    return found.value()


# --- several ---------------------------------------------------------------------------------------------------------

concatenate, stack = op(lax.concatenate_p, name="concatenate"), op(lax.stack_p, name="stack")


@concatenate.impl
def _(*qs: Quantized, dimension: Any) -> Any:
    return axes.join([held(q) for q in qs], dimension).value()


@stack.impl
def _(*qs: Quantized, axis: Any) -> Any:
    return axes.join([axes.insert(held(q), axis) for q in qs], axis).value()


pad = op(lax.pad_p, name="pad")


@pad.impl
def _(q: Quantized, value: Float[Array, ""], *, padding_config: Any) -> Any:
    x = held(q)
    if any(p != (0, 0, 0) and x.groups[a] != 1 for a, p in enumerate(padding_config)):
        raise Refused(f"what fills {x.shown} would share scales with its values; pad axes that have scales of their own")
    code, scale = axes.unit_code(x), value.astype(jnp.float32)
    own = [tuple(padding_config[a]) for a in x.outer]
    fill = lambda y, c: lax.pad(y, jnp.asarray(c, y.dtype), [*own, *[(0, 0, 0)] * (y.ndim - len(own))])
    shape = tuple(int(n + lo + hi + max(n - 1, 0) * i) for n, (lo, hi, i) in zip(x.shape, padding_config, strict=True))
    x = x.unpacked()
    zero = None if x.zero_point is None else fill(x.zero_point, 0)
    return replace(x, shape=shape, codes=fill(x.codes, code), scale=fill(x.scale, scale), zero_point=zero).value()


select_n = op(lax.select_n_p, name="select_n")


@select_n.impl
def _(which: Bool[Array, ""] | Integer[Array, ""], *qs: Quantized) -> Any:
    # one value or another; element by element they have no common scale
    xs = [held(q) for q in qs]
    if len({x.groups for x in xs}) > 1:
        raise Refused(f"{' and '.join(x.shown for x in xs)} share scales differently")
    return axes.select(which, xs).value()


# --- numbers ---------------------------------------------------------------------------------------------------------

convert_element_type = op(lax.convert_element_type_p, name="convert_element_type")


@convert_element_type.impl
def _(q: Quantized, *, new_dtype: Any, weak_type: Any, sharding: Any) -> Any:
    # The codes stay: a wider type shows what the narrower one has rounded.
    if not jnp.issubdtype(new_dtype, jnp.floating) or sharding is not None:
        raise Refused("only another float type is a parameter of the type")
    return replace(held(q), dtype=jnp.dtype(new_dtype)).value()


neg = op(lax.neg_p, name="neg")


@neg.impl
def _(q: Quantized) -> Any:
    return axes.negated(held(q)).value()


mul, div = op(lax.mul_p, name="mul"), op(lax.div_p, name="div")


def _rescaled(q: Any, c: Any, f: Any, along: Any) -> Any:
    """By a number, or by an array that is the same along these axes, all that share scales among them."""
    x, c = held(q), c.astype(jnp.float32)
    if c.ndim:
        if along is None or any(g != 1 and a not in along for a, g in enumerate(x.groups)):
            raise Refused(f"{x.shown} meets an array that is not known to be the same for all values that share a scale")
        c = lax.slice(c, (0,) * c.ndim, [1 if a in along else n for a, n in enumerate(c.shape)])
        c = lax.squeeze(c, [a for a, g in enumerate(x.groups) if g == 0])
        if isinstance(x.scale, Held) and c.size > 1:
            raise Refused(f"the scales of {x.shown} are quantized themselves")
    return axes.rescaled(x, lambda s: f(s, c)).value()


@mul.impl
def _(q: Quantized, c: Float[Array, "*b"], *, along: Any = None, **_: Any) -> Any:
    return _rescaled(q, c, jnp.multiply, along)


@mul.impl
def _(c: Float[Array, "*b"], q: Quantized, *, along: Any = None, **_: Any) -> Any:
    return _rescaled(q, c, jnp.multiply, along)


@div.impl
def _(q: Quantized, c: Float[Array, "*b"], *, along: Any = None, **_: Any) -> Any:
    return _rescaled(q, c, jnp.divide, along)
