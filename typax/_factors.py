"""Axes of low-rank arrays, and products by any of them: an axis is one of either factor, or, in stacks, of both.

    w[a, b, ...] = Σ_r left[those of left, r] · right[those of right, r]         own: of each axis, 0 both, 1 left, 2 right

    move, cut, reverse an axis             that of the factors that have it
    join along an axis of both             each with its own; of left: of ranks r and s, one of rank r + s
    x · w                                  with one factor, then with the other

What comes of it is a value again where the axes lie as a class has them, stacks first: `LowRank`, `Rank1` [m, n],
`LowRankToHeads` [d, h, k], `LowRankFromHeads` [h, k, d].  What has axes of one factor alone, rows of a lookup, is an array.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from typax import _rows as rows
from typax._codes import dot_general, swapped
from typax._convolutions import ragged_dot_general
from typax._op import Refused
from typax.lowrank import LowRank, LowRankFromHeads, LowRankToHeads, Rank1, has_dense_tangents, joined, like, matrices
from typax.quantized.axes import matched

BOTH, LEFT, RIGHT = 0, 1, 2
_CLASSES: dict[tuple[int, ...], Any] = {(1, 2, 2): LowRankToHeads, (1, 1, 2): LowRankFromHeads}
type Factored = LowRank | Rank1 | LowRankToHeads | LowRankFromHeads


class Pair(NamedTuple):
    """The factors, each with the axes that it has in the order of the array, then r; and the values that they are of."""

    left: Any
    right: Any
    own: tuple[int, ...]
    of: tuple[Any, ...]

    def factor(self, side: int) -> Any:
        return self.left if side == LEFT else self.right

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = {a: n for side in (RIGHT, LEFT) for a, n in zip(self.axes(side), self.factor(side).shape, strict=False)}
        return tuple(sizes[a] for a in range(len(self.own)))

    def axes(self, side: int) -> list[int]:
        """Those that a factor has."""
        return [a for a, o in enumerate(self.own) if o in (BOTH, side)]

    def each(self, f: Callable[[Any, list[int]], Any], own: Sequence[int] | None = None) -> "Pair":
        """``f`` of each factor and the axes that it has."""
        left, right = f(self.left, self.axes(LEFT)), f(self.right, self.axes(RIGHT))
        return Pair(left, right, self.own if own is None else tuple(own), self.of)

    def along(self, a: int, f: Callable[[Any, int], Any]) -> "Pair":
        """``f`` of each factor that has an axis, and where it has it."""
        return self.each(lambda x, axes: f(x, axes.index(a)) if a in axes else x)

    def dense(self) -> Any:
        labels = [[*self.axes(side), len(self.own)] for side in (LEFT, RIGHT)]
        return jnp.einsum(self.left, labels[0], self.right, labels[1], list(range(len(self.own))))

    def value(self) -> Any:
        stack = self.own.count(BOTH)
        kept = self.own[stack:]
        if len(set(kept)) < 2 and BOTH not in kept:
            return self.dense()
        left, right = self.left, self.right
        if kept[0] == RIGHT:
            left, right, kept = right, left, tuple(LEFT + RIGHT - o for o in kept)
        right = jnp.moveaxis(right, -1, stack)
        if kept == (LEFT, RIGHT):
            return like(left, right, *self.of)
        if kept not in _CLASSES:
            raise Refused("axes of stacks come first, then those of one factor, then those of the other, three in all")
        if any(map(has_dense_tangents, self.of)):
            raise Refused("tangents of what projects to heads or from them are pairs of factors")
        return _CLASSES[kept](left, right)


def pair(w: Any) -> Pair:
    if isinstance(w, LowRankToHeads):
        kept, left, right = (LEFT, RIGHT, RIGHT), w.left, jnp.moveaxis(w.right, -3, -1)
    elif isinstance(w, LowRankFromHeads):
        kept, left, right = (LEFT, LEFT, RIGHT), w.left, w.right.mT
    else:
        left, right = matrices(w)
        kept, right = (LEFT, RIGHT), right.mT
    return Pair(left, right, (BOTH,) * (w.ndim - len(kept)) + kept, (w,))


# --- axes moved ------------------------------------------------------------------------------------------------------


@rows.transpose.impl
def _(w: Factored, *, permutation: Any) -> Any:
    p = pair(w)

    def permuted(x: Any, axes: list[int]) -> Any:
        return jnp.transpose(x, [*(axes.index(a) for a in permutation if a in axes), len(axes)])

    return p.each(permuted, [p.own[a] for a in permutation]).value()


@rows.reshape.impl
def _(w: Factored, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    if dimensions is not None or sharding is not None:
        raise Refused("the factors have shardings and an order of their own")
    p, own = pair(w), list[int]()
    for old, new in matched(p.shape, new_sizes):
        owners = {p.own[a] for a in old if p.shape[a] != 1}
        if len(owners) > 1:
            raise Refused(f"of {list(p.shape)} as {list(new_sizes)}, axes of different factors would be merged")
        own += [owners.pop() if owners else own[-1] if own else BOTH] * len(new)
    return _sized(p, tuple(new_sizes), own).value()


def _sized(p: Pair, shape: Sequence[int], own: Sequence[int]) -> Pair:
    """The axes of each factor as those of the new shape that it has."""
    left, right = (
        x.reshape(*(n for n, o in zip(shape, own, strict=True) if o in (BOTH, side)), x.shape[-1])
        for side, x in ((LEFT, p.left), (RIGHT, p.right))
    )
    return Pair(left, right, tuple(own), p.of)


@rows.squeeze.impl
def _(w: Factored, *, dimensions: Any) -> Any:
    return _dropped(pair(w), dimensions).value()


def _dropped(p: Pair, dimensions: Sequence[int]) -> Pair:
    kept = [o for a, o in enumerate(p.own) if a not in dimensions]
    return p.each(lambda x, axes: lax.squeeze(x, [axes.index(a) for a in axes if a in dimensions]), kept)


@rows.broadcast_in_dim.impl
def _(w: Factored, *, shape: Any, broadcast_dimensions: Any, sharding: Any) -> Any:
    if sharding is not None:
        raise Refused("the factors have shardings of their own")
    p, own = pair(w), list[int]()
    for a in range(len(shape)):  # what is new is of stacks, if it comes first, else repeated in one factor
        old = p.own[broadcast_dimensions.index(a)] if a in broadcast_dimensions else None
        own.append(old if old is not None else LEFT if any(own) else BOTH)

    def repeated(side: int, x: Any) -> Any:
        has = [a for a, o in enumerate(own) if o in (BOTH, side)]
        at = [has.index(broadcast_dimensions[a]) for a in p.axes(side)]
        return lax.broadcast_in_dim(x, (*(shape[a] for a in has), x.shape[-1]), (*at, len(has)))

    return Pair(repeated(LEFT, p.left), repeated(RIGHT, p.right), tuple(own), p.of).value()


@rows.rev.impl
def _(w: Factored, *, dimensions: Any) -> Any:
    p = pair(w)
    for a in dimensions:
        p = p.along(a, lambda x, k: lax.rev(x, (k,)))
    return p.value()


# --- parts -----------------------------------------------------------------------------------------------------------


def _cut(p: Pair, a: int, start: int, stop: int, step: int = 1) -> Pair:
    return p.along(a, lambda x, k: lax.slice_in_dim(x, start, stop, step, k))


@rows.slice_.impl
def _(w: Factored, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    p = pair(w)
    for a, at in enumerate(zip(start_indices, limit_indices, strides or (1,) * w.ndim, strict=True)):
        p = _cut(p, a, *at)
    return p.value()


@rows.split.impl
def _(w: Factored, *, sizes: Any, axis: Any) -> Any:
    p = pair(w)
    return [_cut(p, axis, end - n, end).value() for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


@rows.unstack.impl
def _(w: Factored, *, axis: Any) -> Any:
    p = pair(w)
    return [_dropped(_cut(p, axis, i, i + 1), (axis,)).value() for i in range(w.shape[axis])]


@rows.dynamic_slice.impl
def _(w: Factored, *starts: Integer[Array, ""], slice_sizes: Any) -> Any:
    p = pair(w)
    for a, (start, n) in enumerate(zip(starts, slice_sizes, strict=True)):
        if n != w.shape[a]:
            p = p.along(a, lambda x, k, start=start, n=n: lax.dynamic_slice_in_dim(x, start, n, k))
    return p.value()


@rows.gather.impl
def _(w: Factored, index: Integer[Array, "*b i"], *, dimension_numbers: Any, slice_sizes: Any, mode: Any, fill_value: Any,
      **params: Any) -> Any:  # fmt: skip
    d, p = dimension_numbers, pair(w)
    whole = [a for a, n in enumerate(slice_sizes) if n == w.shape[a] != 1]
    read, mapped = [a for a in d.start_index_map if a not in whole], d.operand_batching_dims
    gone = {*read, *mapped}
    if any(n != (1 if a in gone else w.shape[a]) for a, n in enumerate(slice_sizes)) or {*d.collapsed_slice_dims} - gone:
        raise Refused("lookups are of single entries of an axis")
    last = jnp.asarray([w.shape[a] - slice_sizes[a] for a in d.start_index_map], index.dtype)
    inside = jnp.all((index >= 0) & (index <= last), -1)
    index, many = jnp.clip(index, 0, last), index.ndim - 1

    def found(x: Any, axes: list[int]) -> Any:  # axes of the index come first
        if gone.isdisjoint(axes):
            return x
        its = [i for i, a in enumerate(mapped) if a in axes]
        numbers = lax.GatherDimensionNumbers(
            offset_dims=tuple(range(many, many + sum(a not in gone for a in axes) + 1)),
            collapsed_slice_dims=tuple(k for k, a in enumerate(axes) if a in read),
            start_index_map=tuple(axes.index(a) for a in read if a in axes),
            operand_batching_dims=tuple(axes.index(mapped[i]) for i in its),
            start_indices_batching_dims=tuple(d.start_indices_batching_dims[i] for i in its),
        )
        columns = np.array([i for i, a in enumerate(d.start_index_map) if a in read and a in axes], int)
        sizes = (*(1 if a in gone else x.shape[k] for k, a in enumerate(axes)), x.shape[-1])
        return lax.gather(x, index[..., columns], numbers, sizes, mode="clip")

    sides = {p.own[a] for a in gone}
    side = BOTH if BOTH in sides or len(sides) > 1 else sides.pop()
    q = p.each(found, [*[side] * many, *(o for a, o in enumerate(p.own) if a not in gone)])
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    fill_value = jnp.nan if fill_value is None else fill_value
    order, single = _read_order(d, w.ndim, gone, many)
    if p.own.count(BOTH) <= max(gone, default=-1) or order[:many] != list(range(many)):  # rows, of one matrix or of many
        y = jnp.expand_dims(jnp.transpose(q.dense(), order), single)
        return jnp.where(jnp.expand_dims(inside, d.offset_dims), y, jnp.asarray(fill_value, y.dtype)) if fills else y
    if fills and not np.isnan(fill_value):
        raise Refused(f"what lies outside is {fill_value}, which is no number times another")
    if fills:
        there = inside.reshape(*inside.shape, *(1,) * (q.left.ndim - many))
        q = q._replace(left=jnp.where(there, q.left, jnp.asarray(jnp.nan, q.left.dtype)))
    shape, own = list(q.shape), list(q.own)
    for k in single:
        shape.insert(k, 1)
        own.insert(k, own[k - 1] if k else BOTH)
    return _sized(q, shape, own).value()


def _read_order(d: Any, ndim: int, gone: set[int], many: int) -> tuple[list[int], list[int]]:
    """The order of the axes of a lookup, those of the index first; and where it has others, of size 1."""
    left = [a for a in range(ndim) if a not in d.collapsed_slice_dims and a not in d.operand_batching_dims]
    kept = [a for a in left if a not in gone]
    rest, order, single = iter(range(many)), list[int](), list[int]()
    for k in range(many + len(left)):
        if k not in d.offset_dims:
            order.append(next(rest))
        elif (a := left[d.offset_dims.index(k)]) in gone:
            single.append(k)
        else:
            order.append(many + kept.index(a))
    return order, single


# --- several ---------------------------------------------------------------------------------------------------------


def _ranked(x: Any, before: int, rank: int) -> Any:
    """A factor among zeros, of a larger rank."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(before, rank - before - x.shape[-1])])


def _alike(ps: Sequence[Pair]) -> None:
    if len({p.own for p in ps}) > 1:
        raise Refused("factors have different axes")


def _join(ps: Sequence[Pair], a: int) -> Any:
    _alike(ps)
    own, ranks = ps[0].own, [p.left.shape[-1] for p in ps]
    ends = list(itertools.accumulate(ranks))

    def joined_side(side: int) -> Any:
        xs = [p.factor(side) for p in ps]
        if own[a] in (BOTH, side):
            at, rank = ps[0].axes(side).index(a), max(ranks) if own[a] == BOTH else ends[-1]
            starts = [0 if own[a] == BOTH else end - r for r, end in zip(ranks, ends, strict=True)]
            return jnp.concatenate([_ranked(x, s, rank) for x, s in zip(xs, starts, strict=True)], at)
        return jnp.concatenate(xs, -1)

    return Pair(joined_side(LEFT), joined_side(RIGHT), own, tuple(w for p in ps for w in p.of)).value()


@rows.concatenate.impl
def _(*ws: Factored, dimension: Any) -> Any:
    return _join([pair(w) for w in ws], dimension)


@rows.stack.impl
def _(*ws: Factored, axis: Any) -> Any:
    ps = [pair(w) for w in ws]
    own = [*ps[0].own[:axis], LEFT if any(ps[0].own[:axis]) else BOTH, *ps[0].own[axis:]]
    return _join([_sized(p, (*p.shape[:axis], 1, *p.shape[axis:]), own) for p in ps], axis)


@rows.select_n.impl
def _(which: Bool[Array, ""] | Integer[Array, ""], *ws: Factored) -> Any:
    ps = [pair(w) for w in ws]
    _alike(ps)
    rank = max(p.left.shape[-1] for p in ps)
    left, right = (lax.select_n(which, *(_ranked(p.factor(side), 0, rank) for p in ps)) for side in (LEFT, RIGHT))
    return Pair(left, right, ps[0].own, tuple(ws)).value()


# --- products --------------------------------------------------------------------------------------------------------


def _product(x: Any, w: Any, dimension_numbers: Any, params: dict[str, Any], x_first: bool) -> Any:
    p, n = pair(w), w.ndim
    (cx, cw), (bx, bw) = dimension_numbers
    same = dict(zip((*cx, *bx), (*cw, *bw), strict=True))
    of_x = [same.get(i, n + 1 + i) for i in range(x.ndim)]
    kept = [label for label in of_x if label > n], [a for a in range(n) if a not in (*cw, *bw)]
    wanted = [*bw, *kept[0], *kept[1]] if x_first else [*bw, *kept[1], *kept[0]]
    weight = lambda side: math.prod(p.shape[a] for a in p.axes(side) if a in cw and p.own[a] == side)
    first, second = (LEFT, RIGHT) if weight(LEFT) >= weight(RIGHT) else (RIGHT, LEFT)
    own = {side: [*p.axes(side), n] for side in (LEFT, RIGHT)}
    needed = {*wanted, *own[second]}
    between = [a for a in dict.fromkeys([*bw, *of_x, *own[first]] if x_first else [*bw, *own[first], *of_x]) if a in needed]
    early = {k: v for k, v in params.items() if k != "out_sharding"}  # of the second product
    parts = dict(zip(own[first], jax.typeof(p.factor(first)).sharding.spec, strict=True))
    parts |= {a: s for a, s in zip(of_x, jax.typeof(x).sharding.spec, strict=True) if s is not None}
    if any(parts[a] is not None for a in parts if a not in between):  # summed over: what is left of it is everywhere
        early["out_sharding"] = jax.P(*map(parts.get, between))
    terms: Any = lambda a, of_a, b, of_b: (a, of_a, b, of_b) if x_first else (b, of_b, a, of_a)
    einsum: Any = jnp.einsum  # whose operands alternate with their axes
    y = einsum(*terms(x, of_x, p.factor(first), own[first]), between, **early)
    return einsum(*terms(y, between, p.factor(second), own[second]), wanted, **params)


@dot_general.impl
def _(x: Float[Array, "*b"], w: Factored, *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, dimension_numbers, params, True)


@dot_general.impl
def _(w: Factored, x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(x, w, swapped(dimension_numbers), params, False)


@dot_general.impl
def _(v: Factored, w: Factored, *, dimension_numbers: Any, **params: Any) -> Any:
    if params.get("out_sharding") is not None:
        raise Refused("the factors of the result have shardings of their own")
    (cv, cw), (bv, bw) = dimension_numbers
    if any(x.own[a] != BOTH for x, axes in ((pair(v), bv), (pair(w), bw)) for a in axes):
        raise Refused("batch axes are those of stacks")
    a, b = _towards(pair(v), cv, bv), _towards(pair(w), cw, bw)
    stack, r, s = list(range(len(bv))), len(bv) + len(cv), len(bv) + len(cv) + 1
    core = jnp.einsum(a[0], [*range(r), r], b[0], [*range(r), s], [*stack, r, s])
    y = joined(a[1], core, jnp.moveaxis(b[1], -1, len(stack)), v, w)
    wanted = params.get("preferred_element_type")
    if wanted is not None and wanted != y.dtype:
        raise Refused("the factors keep their dtype")
    return y


def _towards(p: Pair, contract: Sequence[int], batch: Sequence[int]) -> tuple[Any, Any]:
    """The factor that has the contracted axes, ``[*batch, *contracted, r]``, and the other one, ``[*batch, other, r]``."""
    sides = {p.own[a] for a in contract}
    side = sides.pop() if len(sides) == 1 else BOTH
    other = [a for a in range(len(p.own)) if a not in (*contract, *batch)]
    if side == BOTH or len(other) != 1 or p.own[other[0]] != LEFT + RIGHT - side:
        raise Refused("the contracted axes are those of one factor, and the other has one more")
    ordered = lambda s, axes: jnp.transpose(p.factor(s), [*map(p.axes(s).index, axes), p.factor(s).ndim - 1])
    return ordered(side, [*batch, *contract]), ordered(LEFT + RIGHT - side, [*batch, *other])


@ragged_dot_general.impl
def _(x: Float[Array, "*b"], w: LowRank | Rank1, sizes: Integer[Array, "g"], *, ragged_dot_dimension_numbers: Any,
      **params: Any) -> Any:  # fmt: skip
    d = ragged_dot_dimension_numbers
    (contract, batch), ragged = d.dot_dimension_numbers, tuple(d.lhs_ragged_dimensions)
    plain = tuple(map(len, (*contract, *batch, d.rhs_group_dimensions, ragged))) == (1, 1, 0, 0, 1, 1)
    told = {k: v for k, v in params.items() if v is not None}
    if not plain or ragged == tuple(contract[0]) or tuple(d.rhs_group_dimensions) != (0,) or "group_offset" in told:
        raise Refused("only groups of rows of the array, one for each matrix of a stack, run on the factors")
    left, right = matrices(w)
    first, second = (left, right) if contract[1][0] == 1 else (right.mT, left.mT)
    x = x if contract[0][0] == 1 else x.T
    return lax.ragged_dot(lax.ragged_dot(x, first, sizes, **told), second, sizes, **told)


# --- numbers: of the first factor ------------------------------------------------------------------------------------


@rows.convert_element_type.impl
def _(w: Factored, *, new_dtype: Any, weak_type: Any, sharding: Any) -> Any:
    if not jnp.issubdtype(new_dtype, jnp.floating) or sharding is not None:
        raise Refused("the factors are floats")
    return pair(w).each(lambda x, _: x.astype(new_dtype)).value()


@rows.neg.impl
def _(w: Factored) -> Any:
    p = pair(w)
    return p._replace(left=-p.left).value()


def _scaled(w: Any, c: Any, f: Any, along: Any) -> Any:
    """By a number, or by an array that is the same along all axes of one factor alone: the other one takes it."""
    p = pair(w)
    if not c.ndim:
        return p._replace(left=f(p.left, c)).value()
    for side in (LEFT, RIGHT):
        others = [a for a in range(w.ndim) if a not in p.axes(side)]
        if all(a in (along or ()) for a in others):
            mine = lax.squeeze(lax.slice(c, (0,) * c.ndim, [1 if a in others else n for a, n in enumerate(c.shape)]), others)
            new = f(p.factor(side), mine[..., None])
            return (p._replace(left=new) if side == LEFT else p._replace(right=new)).value()
    raise Refused("an array that is not the same along rows or columns does not scale the factors")


@rows.mul.impl
def _(w: Factored, c: Float[Array, "*b"], *, along: Any = None, **_: Any) -> Any:
    return _scaled(w, c, jnp.multiply, along)


@rows.mul.impl
def _(c: Float[Array, "*b"], w: Factored, *, along: Any = None, **_: Any) -> Any:
    return _scaled(w, c, jnp.multiply, along)


@rows.div.impl
def _(w: Factored, c: Float[Array, "*b"], *, along: Any = None, **_: Any) -> Any:
    return _scaled(w, c, jnp.divide, along)
