"""Quantized arrays by the axes of what they stand for: how codes and scales move when axes do.

    axis a of size n        codes                                    scales, zero points, offsets
    kept, group 1           an outer axis of n                       the same
    in groups of g          an outer axis of n/g, an inner one of g  the outer one
    shared, group 0         an inner axis of n                       nothing

Codes have their outer axes first, then the inner ones, both in the order of the array (`layout`).  So what is done to an
axis of the array is done to the outer axis, of all of them alike, or to the inner one, of the codes.  Scales that are
quantized themselves have axes of their own: the functions here take them as they take the whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from typax._op import Refused
from typax._type import ValueType
from typax.quantized import layout, packing
from typax.quantized.encode import Parts, packed
from typax.quantized.format import Floats, Format, Table
from typax.quantized.layout import Groups
from typax.quantized.rounding import zero_code
from typax.quantized.types import accumulated, all_groups, build, decode, row_group


@dataclass(frozen=True, eq=False)
class Held:
    """A quantized array, opened: ``codes`` in rows, and what has an entry for each of them.

    ``scale`` is an array or a `Held`; ``zero_point`` and ``offset`` are arrays or None; ``loose``: codes of less than a byte
    are unpacked, so that the last inner axis can be worked on as any other.
    """

    format: Format
    groups: Groups
    shape: tuple[int, ...]
    dtype: Any
    codes: Any
    scale: Any
    zero_point: Any = None
    offset: Any = None
    loose: bool = False

    @property
    def outer(self) -> list[int]:
        return layout.outer_axes(self.groups)

    @property
    def inner(self) -> list[int]:
        return layout.inner_axes(self.groups)

    def each(self, codes: Callable[[Any], Any], others: Callable[[Any], Any], **to: Any) -> "Held":
        """By two functions: one of the codes, one of all that has the outer axes only; ``to`` are other fields."""
        zero, offset = (None if x is None else others(x) for x in (self.zero_point, self.offset))
        return replace(self, codes=codes(self.codes), scale=others(self.scale), zero_point=zero, offset=offset, **to)

    def with_axis(self, a: int, n: int, group: int) -> dict[str, Any]:
        """The fields that say so of axis ``a``."""
        put = lambda xs, x: (*xs[:a], x, *xs[a + 1 :])
        return {"shape": put(self.shape, n), "groups": put(self.groups, group)}

    def on_outer(self, a: int, f: Callable[[Any, int], Any], n: int) -> "Held":
        """``f(array, axis)`` along the outer axis of ``a``, which has the size ``n`` then."""
        k = self.outer.index(a)
        g = self.groups[a]
        return self.each(lambda x: f(x, k), lambda x: f(x, k), **self.with_axis(a, n, g))

    def on_inner(self, a: int, f: Callable[[Any, int], Any], n: int, group: int = 0) -> "Held":
        """``f(codes, axis)`` along the inner axis of ``a``."""
        x = self.unpacked() if a == self.inner[-1] else self
        k = len(x.outer) + x.inner.index(a)
        return replace(x, codes=f(x.codes, k), **x.with_axis(a, n, group))

    def unpacked(self) -> "Held":
        if self.loose or self.format.bits == 8 or not self.inner:
            return replace(self, loose=True)
        codes = packing.unpack(self.format, self.codes)
        length = row_group(self.groups) or self.shape[self.inner[-1]]
        return replace(self, codes=codes[..., :length], loose=True)

    def parts(self) -> Parts:
        if not self.inner:
            raise Refused(f"no values of {self.shown} would share a scale")
        codes = self.codes
        if self.loose and self.format.bits < 8:
            codes = packed(self.format, codes, None, tuple(range(len(self.outer), codes.ndim)))
        scale = self.scale
        if isinstance(scale, Held):
            scale = replace_parts(scale)
        return Parts(codes, scale, self.zero_point, self.offset)

    def value(self) -> Any:
        """The value of these parts; an array where each entry has a scale of its own, which is no larger than the scales."""
        if not self.inner:
            return self.dense()
        return build(self.format, self.groups, self.shape, self.parts(), self.dtype)

    def dense(self) -> Any:
        """The array that it stands for."""
        x, wide = self.unpacked(), accumulated(self.dtype)
        scale = x.scale.dense() if isinstance(x.scale, Held) else x.scale
        rows = decode(x.format, x.codes, scale, x.zero_point, x.offset, wide)
        return layout.merge(rows, x.groups, layout.pads(x.shape, x.groups)).astype(self.dtype)

    @property
    def shown(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return f"{self.format.shown}[{sizes}] by groups ({','.join(str(g) if g else 'all' for g in self.groups)})"


def replace_parts(scale: Held) -> Parts:
    return replace(scale.parts(), scale_groups=scale.groups)


def held(q: Any, ty: Any = None) -> Held:
    """A quantized array by its axes; inside of an implementation, where its components are at hand."""
    ty = ty or jax.typeof(q)
    scale = held(q.scale, ty.leaves[1]) if isinstance(ty.leaves[1], ValueType) else q.scale
    zero, offset = getattr(q, "zero_point", None), getattr(q, "offset", None)
    return Held(ty.of_format, all_groups(ty), tuple(ty.shape), ty.dtype, q.qvalue, scale, zero, offset)


def alike(xs: Sequence[Held]) -> None:
    """Refuse parts that differ in their format, or in what there is beside codes and scales."""
    kinds = {(x.format, x.zero_point is None, x.offset is None, isinstance(x.scale, Held) or x.scale.dtype) for x in xs}
    if len(kinds) > 1:
        raise Refused("the values are of several formats: " + ", ".join(sorted({x.format.shown for x in xs})))


def together(f: Callable[..., Any], xs: Sequence[Held], **to: Any) -> Held:
    """``f`` of the codes of all, of the scales of all, ..., where these are alike."""
    alike(xs)
    pick = lambda name: None if getattr(xs[0], name) is None else f(*(getattr(x, name) for x in xs))
    return replace(xs[0], codes=f(*(x.codes for x in xs)), scale=pick("scale"), zero_point=pick("zero_point"),
                   offset=pick("offset"), **to)  # fmt: skip


# --- parts of an axis ------------------------------------------------------------------------------------------------


def cut(x: Any, a: int, start: int, stop: int, step: int = 1) -> Any:
    """``x[start:stop:step]`` along axis ``a``."""
    if not isinstance(x, Held):
        return lax.slice_in_dim(x, start, stop, step, a)
    size, g = x.shape[a], x.groups[a]
    n = len(range(start, stop, step))
    if (start, stop, step) == (0, size, 1):
        return x
    if n == 0:
        start, stop, step = 0, 0, 1
    if g == 0:
        return x.on_inner(a, lambda y, k: cut(y, k, start, stop, step), n)
    if g > 1 and n == 1:
        return _single(x, a, start)
    if g > 1 and (start % g or (stop % g and stop != size) or step != 1):
        at = f"{start}:{stop}" + (f":{step}" if step != 1 else "")
        fine = math.gcd(g, start, stop if stop != size else 0) if step == 1 else 1
        other = f"; those of typax.requantize(..., group={fine}) would be cut there" if fine > 1 else ""
        raise Refused(f"a slice {at} along axis {a} of {x.shown} does not start and end between groups of {g}{other}")
    return x.on_outer(a, lambda y, k: cut(y, k, start // g, -(-stop // g), step), n)


def window(x: Any, a: int, start: Any, n: int) -> Any:
    """``n`` entries of axis ``a``, from a traced ``start`` on."""
    if not isinstance(x, Held):
        return lax.dynamic_slice_in_dim(x, start, n, a)
    size, g = x.shape[a], x.groups[a]
    if n in (0, size):
        return x if n == size else cut(x, a, 0, 0)
    if g == 0:
        return x.on_inner(a, lambda y, k: window(y, k, start, n), n)
    if g == 1:
        return x.on_outer(a, lambda y, k: window(y, k, start, n), n)
    if n != 1:
        raise Refused(f"a dynamic slice of {n} along axis {a} of {x.shown} may start within a group of {g}")
    return _single(x, a, jnp.clip(start, 0, size - 1))


def _single(x: Held, a: int, at: Any) -> Held:
    """One entry of an axis in groups: the first of a group of the same size, which is not full."""
    g = x.groups[a]
    one = x.on_outer(a, lambda y, k: window(y, k, at // g, 1), 1)
    fill = lambda y, k: _filled(lax.dynamic_slice_in_dim(y, at % g, 1, k), k, g - 1, zero_code(x.format))
    return one.on_inner(a, fill, 1, g)


def _filled(y: Any, k: int, n: int, code: Any) -> Any:
    pads = [(0, n if i == k else 0, 0) for i in range(y.ndim)]
    return lax.pad(y, jnp.asarray(code, y.dtype), pads)


def reverse(x: Any, a: int) -> Any:
    """Axis ``a`` backwards."""
    if not isinstance(x, Held):
        return lax.rev(x, (a,))
    x = _whole(x, a)
    n, g = x.shape[a], x.groups[a]
    if g > 1 and n % g:
        raise Refused(f"axis {a} of {x.shown} is not a whole number of groups of {g}: backwards, the first one is not full")
    if g != 1:
        x = x.on_inner(a, reverse, n, g)
    return x if g == 0 else x.on_outer(a, reverse, n)


def join(xs: Sequence[Any], a: int) -> Any:
    """Side by side along axis ``a``."""
    if not isinstance(xs[0], Held):
        return lax.concatenate(xs, a)
    alike(xs)
    xs = [x for x in xs if x.shape[a] != 0] or xs[:1]  # no entries are of any groups
    if len(xs) == 1:
        return xs[0]
    if all(x.groups[a] > x.shape[a] for x in xs):
        alone = lambda y, k: drop(cut(y, k, 0, 1), k)
        xs = [x.on_inner(a, alone, 1, 1) if x.shape[a] == 1 else _whole(x, a) for x in xs]
    whole = {x.groups[a] or x.shape[a] for x in xs} if any(x.groups[a] != 1 for x in xs) else {1}
    if len(whole) > 1:
        raise Refused(f"along axis {a}, {' and '.join(x.shown for x in xs)} share scales in pieces of several sizes")
    (g,) = whole
    xs = [_in_groups(x, a) for x in xs]
    if short := [x for x in xs[:-1] if g > 1 and x.shape[a] % g]:
        raise Refused(f"the last group of {g} along axis {a} of {short[0].shown} is not full, and others would follow it")
    if len({x.groups for x in xs}) > 1:
        raise Refused(f"{' and '.join(x.shown for x in xs)} share scales differently")
    if len({x.loose for x in xs}) > 1:
        xs = [x.unpacked() for x in xs]
    k = xs[0].outer.index(a)
    return together(lambda *ys: join(ys, k), xs, **xs[0].with_axis(a, sum(x.shape[a] for x in xs), g))


def _in_groups(x: Held, a: int) -> Held:
    """A shared axis as one group of its size; one of a single entry has a scale of its own."""
    if x.groups[a] != 0:
        return x
    n, k = x.shape[a], sum(b < a for b in x.outer)
    x = x.on_inner(a, drop, n) if n == 1 else x
    return x.each(lambda y: insert(y, k), lambda y: insert(y, k), **x.with_axis(a, n, n))


def _whole(x: Held, a: int) -> Held:
    """An axis of one group only that is not full, as one of a full group."""
    n, g = x.shape[a], x.groups[a]
    return x.on_inner(a, lambda y, k: cut(y, k, 0, n), n, n) if 1 < n < g else x


# --- axes ------------------------------------------------------------------------------------------------------------


def permute(x: Any, perm: Sequence[int]) -> Any:
    """The axes in another order."""
    if not isinstance(x, Held):
        return lax.transpose(x, tuple(perm))
    outer, inner = x.outer, x.inner
    of_outer = [outer.index(a) for a in perm if x.groups[a] != 0]
    of_inner = [inner.index(a) for a in perm if x.groups[a] != 1]
    if of_inner and of_inner[-1] != len(inner) - 1:
        x = x.unpacked()
    of_codes = (*of_outer, *(len(outer) + i for i in of_inner))
    put = lambda xs: tuple(xs[a] for a in perm)
    return x.each(lambda y: permute(y, of_codes), lambda y: permute(y, of_outer), shape=put(x.shape), groups=put(x.groups))


def insert(x: Any, a: int) -> Any:
    """A new axis of size 1, with scales of its own."""
    if not isinstance(x, Held):
        return jnp.expand_dims(x, a)
    k = sum(g != 0 for g in x.groups[:a])
    put = lambda xs: (*xs[:a], 1, *xs[a:])
    return x.each(lambda y: insert(y, k), lambda y: insert(y, k), shape=put(x.shape), groups=put(x.groups))


def drop(x: Any, a: int) -> Any:
    """Without axis ``a``, of size 1."""
    if not isinstance(x, Held):
        return lax.squeeze(x, (a,))
    g = x.groups[a]
    away = lambda xs: (*xs[:a], *xs[a + 1 :])
    if g != 1:
        x = x.on_inner(a, lambda y, k: drop(cut(y, k, 0, 1), k), 1, g)
    to = {"shape": away(x.shape), "groups": away(x.groups)}
    if g == 0:
        return replace(x, **to)
    k = x.outer.index(a)
    return x.each(lambda y: drop(y, k), lambda y: drop(y, k), **to)


def broadcast(x: Any, shape: Sequence[int], dims: Sequence[int], spec: Any = None) -> Any:
    """As ``lax.broadcast_in_dim``; new axes have scales of their own."""
    shape = tuple(shape)
    if not isinstance(x, Held):
        return lax.broadcast_in_dim(x, shape, tuple(dims), out_sharding=_over(spec))
    groups = [1] * len(shape)
    for a, d in enumerate(dims):
        groups[d] = x.groups[a]
        if shape[d] != x.shape[a]:
            if groups[d] > 1:
                raise Refused(f"axis {a} of {x.shown} is a part of a group of {groups[d]}")
            x = x.unpacked() if groups[d] == 0 else x
    new = replace(x, shape=shape, groups=tuple(groups))
    outer = [new.outer.index(dims[a]) for a in x.outer]
    inner = [len(new.outer) + new.inner.index(dims[a]) for a in x.inner]
    sizes, (of_outer, of_codes) = _outer_shape(new), _parted(new, spec)
    rows = [*sizes, *x.codes.shape[len(x.outer) :]]
    for a, d in enumerate(dims):
        if groups[d] == 0 and shape[d] != x.shape[a]:
            rows[len(new.outer) + new.inner.index(d)] = shape[d]
    return new.each(
        lambda y: broadcast(y, rows, [*outer, *inner], of_codes),
        lambda y: broadcast(y, sizes, outer, of_outer),
    )


def _over(spec: Any) -> Any:
    return None if spec is None else jax.P(*spec)


def _outer_shape(x: Held) -> tuple[int, ...]:
    """The shape of the scales."""
    return tuple(-(-x.shape[a] // x.groups[a]) for a in x.outer)


def _parted(x: Held, spec: Any) -> tuple[Any, Any]:
    """The partitions of the scales and of the codes of a value that is partitioned by ``spec``."""
    if spec is None:
        return None, None
    spec = (*spec, *(None,) * (len(x.shape) - len(spec)))
    outer = [spec[a] for a in x.outer]
    return outer, [*outer, *(spec[a] if x.groups[a] == 0 else None for a in x.inner)]


# --- reshape ---------------------------------------------------------------------------------------------------------


def reshape(x: Any, shape: Sequence[int], spec: Any = None) -> Any:
    """Axes merged and split.

    An axis is a number of pieces that vary (outer), of a size that shares a scale (inner); written so, one after the other,
    the pieces are those of the new axes, each of which has its outer ones first.
    """
    shape = tuple(shape)
    if not isinstance(x, Held):
        return layout.reshape(x, shape, _over(spec))
    if shape == x.shape:
        return x
    runs = matched(x.shape, shape)
    for a in (a for old, new in runs if len(old) > 1 or len(new) > 1 for a in old):
        x = _whole(x, a)
    groups = tuple(g for old, new in runs for g in _regrouped(x, old, [shape[j] for j in new], shape))
    new = replace(x, shape=shape, groups=groups)
    last = lambda y: row_group(y.groups) or y.shape[y.inner[-1]]
    if not (x.inner and new.inner and last(x) == last(new)):
        x = x.unpacked()
        new = replace(x, shape=shape, groups=groups)
    sizes = _outer_shape(new)
    rows = [*sizes, *(groups[a] or shape[a] for a in new.inner)]
    if not new.loose:  # packed rows stay as long as they are
        rows[-1] = x.codes.shape[-1]
    of_outer, of_codes = _parted(new, spec)
    return new.each(lambda y: reshape(y, rows, of_codes), lambda y: reshape(y, sizes, of_outer))


def matched(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of old axes and of new ones of the same size, as short as can be."""
    runs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            run = [i], [j]
        elif i < len(old) and old[i] == 1:
            run = [i], []
        elif j < len(new) and new[j] == 1:
            run = [], [j]
        elif i == len(old) or j == len(new):
            raise Refused("an empty array")
        else:
            run = [i], [j]
            while (a := math.prod(old[k] for k in run[0])) != (b := math.prod(new[k] for k in run[1])):
                side, k = (run[0], i + len(run[0])) if a < b else (run[1], j + len(run[1]))
                if k >= len(old if a < b else new):
                    raise Refused("an empty array")
                side.append(k)
        runs.append(run)
        i, j = i + len(run[0]), j + len(run[1])
    return runs


def _regrouped(x: Held, old: Sequence[int], sizes: Sequence[int], shape: Any) -> list[int]:
    """The groups of new axes of these sizes, which are made of the axes ``old``."""
    if len(old) == 1 and len(sizes) == 1:
        return [x.groups[old[0]]]
    where = f"{x.shown} as {list(shape)}: "
    pieces: list[tuple[int, bool, bool]] = []  # a size, whether it shares a scale, whether it is of an axis in groups
    for a in old:
        n, g = x.shape[a], x.groups[a]
        if g > 1 and n % g:
            raise Refused(f"{where}axis {a} is not a whole number of groups of {g}")
        pieces += [(n // g, False, True), (g, True, True)] if g > 1 else [(n, g == 0, False)]
    pieces = [p for p in pieces if p[0] != 1]
    groups = []
    for size in sizes:
        need, own, in_groups = size, 1, False
        while need > 1:
            n, shares, of_groups = pieces.pop(0)
            if need % n and n % need:
                raise Refused(f"{where}a piece of {n} is no part of an axis of {size}, nor the other way around")
            if need < n:
                pieces.insert(0, (n // need, shares, of_groups))
                n = need
            if own > 1 and not shares:
                raise Refused(f"{where}an axis of {size} would share scales in pieces of {own} side by side with others")
            own, in_groups = own * n if shares else own, in_groups or of_groups or not shares
            need //= n
        groups.append(1 if own == 1 else own if in_groups else 0)
    return groups


# --- lookups ---------------------------------------------------------------------------------------------------------


def gather(x: Any, index: Any, d: lax.GatherDimensionNumbers, sizes: Sequence[int], **how: Any) -> Any:
    """As ``lax.gather``, with indices in bounds; axes of the index have scales of their own."""
    if not isinstance(x, Held):
        if not (d.start_index_map or d.operand_batching_dims or d.collapsed_slice_dims):
            shape = list(index.shape[:-1])
            for o, n in sorted(zip(d.offset_dims, sizes, strict=True)):
                shape.insert(o, n)
            return lax.broadcast_in_dim(x, shape, d.offset_dims)
        return lax.gather(x, index, d, tuple(sizes), **how)
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    kept = [a for a in range(len(x.shape)) if a not in gone]
    to = dict(zip(kept, d.offset_dims, strict=True))
    groups, shape = [1] * (len(kept) + index.ndim - 1), [0] * (len(kept) + index.ndim - 1)
    for o, n in zip([o for o in range(len(shape)) if o not in to.values()], index.shape[:-1], strict=True):
        shape[o] = n
    moving: set[int] = set()  # shared axes of which a part is read
    for a, (n, m, g) in enumerate(zip(x.shape, sizes, x.groups, strict=True)):
        part = m != n or a in gone
        if part and g > 1 and m != 1:
            raise Refused(f"lookups of {m} along axis {a} of {x.shown} may start within a group of {g}")
        if g > 1 and a in d.operand_batching_dims:
            raise Refused(f"axis {a} of {x.shown} is mapped, but values share scales along it")
        if g != 1 and part:
            moving.add(a)
            if a == x.inner[-1]:
                x = x.unpacked()
        if a in to:
            shape[to[a]], groups[to[a]] = m, 1 if part and g > 1 else g
    outer, inner = x.outer, x.inner
    new = replace(x, shape=tuple(shape), groups=tuple(groups))
    columns_of_outer, columns = [], []  # physical axis, index
    for c, a in enumerate(d.start_index_map):
        i, g = index[..., c], x.groups[a]
        if g == 1:
            columns_of_outer.append((outer.index(a), i))
        elif a in moving:
            k = len(outer) + inner.index(a)
            if g > 1:
                columns_of_outer.append((outer.index(a), i // g))
            columns.append((k, i % g if g > 1 else i))
    in_one = [a for a in inner if a in moving and (a in gone or x.groups[a] > 1)]

    def numbers(with_inner: bool) -> lax.GatherDimensionNumbers:
        n = len(outer)
        lost = [outer.index(a) for a in d.collapsed_slice_dims if x.groups[a] != 0]
        offsets = [new.outer.index(to[a]) for a in outer if a in to]
        chosen = columns_of_outer + (columns if with_inner else [])
        mapped = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
        pairs = [(outer.index(a) if x.groups[a] else n + inner.index(a), i) for a, i in mapped if with_inner or x.groups[a]]
        pairs.sort()
        if with_inner:
            lost += [n + inner.index(a) for a in in_one if a not in d.operand_batching_dims]
            offsets += [len(new.outer) + new.inner.index(to[a]) for a in inner if a not in in_one]
        return lax.GatherDimensionNumbers(
            tuple(offsets), tuple(sorted(lost)), tuple(k for k, _ in chosen), tuple(k for k, _ in pairs),
            tuple(i for _, i in pairs),
        )  # fmt: skip

    def at(with_inner: bool) -> Any:
        chosen = columns_of_outer + (columns if with_inner else [])
        return jnp.stack([i for _, i in chosen], -1) if chosen else jnp.zeros((*index.shape[:-1], 0), index.dtype)

    of_outer = [sizes[a] if x.groups[a] == 1 else 1 if a in moving else -(-x.shape[a] // x.groups[a]) for a in outer]
    rows = zip(inner, x.codes.shape[len(outer) :], strict=True)
    of_rows = [1 if a in in_one else sizes[a] if a in moving else n for a, n in rows]
    return new.each(
        lambda y: gather(y, at(True), numbers(True), [*of_outer, *of_rows], **how),
        lambda y: gather(y, at(False), numbers(False), of_outer, **how),
    )


def unit_code(x: Held) -> Any:
    """The code of 1, with which a scale is any number in float32.

    Raises:
      Refused: if scales are no float32 numbers, or no code stands for 1.
    """
    codes = x.format.codes
    code = 1 if not isinstance(codes, Table) else codes.values.index(1.0) if 1.0 in codes.values else None
    plain = not isinstance(x.scale, Held) and x.scale.dtype == jnp.float32
    if not plain or code is None or accumulated(x.dtype) != jnp.float32:
        raise Refused(f"{x.shown} has no code and scale for any number")
    return code


def filled(x: Held, there: Any, at: Sequence[int], value: Any) -> Held:
    """``value`` where ``there``, whose axes are the axes ``at`` of ``x``, is false."""
    k = [x.outer.index(a) for a in at]

    def where(y: Any, other: Any) -> Any:
        mask = jnp.expand_dims(there, tuple(i for i in range(y.ndim) if i not in k))
        return jnp.where(mask, y, jnp.asarray(other, y.dtype))

    if np.isnan(value):  # a scale makes NaN of any code
        return replace(x, scale=_nan(x, where))
    code = unit_code(x)
    x = x.unpacked()
    zero = None if x.zero_point is None else where(x.zero_point, 0)
    return replace(x, codes=where(x.codes, code), scale=where(x.scale, value), zero_point=zero)


def _nan(x: Held, where: Callable[[Any, Any], Any]) -> Any:
    """The scales, NaN where they are not ``there``."""
    if not isinstance(x.scale, Held):
        return where(x.scale, 255 if x.format.scale.dtype == "e8m0" else jnp.nan)
    if not isinstance(x.scale.format.codes, Floats) or any(g > 1 for g in x.scale.groups):
        raise Refused(f'the scales of {x.shown} have no code for NaN, which fills; mode="clip" fills nothing')
    order = [*x.scale.outer, *x.scale.inner]  # of their axes, in their codes
    codes = where(jnp.transpose(x.scale.codes, [order.index(a) for a in range(len(order))]), jnp.nan)
    return replace(x.scale, codes=jnp.transpose(codes, order))


def select(which: Any, xs: Sequence[Any]) -> Any:
    """The one of that number."""
    if not isinstance(xs[0], Held):
        return lax.select_n(which, *xs)
    return together(lambda *ys: select(which, ys), xs)


# --- scales ----------------------------------------------------------------------------------------------------------


def negated(x: Held) -> Held:
    """Of the opposite sign: that of codes where they have one by itself, so that scales stay as they are, else of scales.

    Raises:
      Refused: if neither has one.
    """
    codes = x.format.codes
    if isinstance(codes, Floats) or (isinstance(codes, Table) and codes.signed):
        return replace(x, codes=_flipped(x))
    if isinstance(x.scale, Held):
        scale: Any = negated(x.scale)
    elif x.format.scale.dtype in ("float32", "float16", "bfloat16"):
        scale = -x.scale
    else:
        raise Refused(f"scales of {x.shown} are {x.format.scale.dtype}, which has no sign, and codes have no bit for it")
    return replace(x, scale=scale, offset=None if x.offset is None else -x.offset)


def _flipped(x: Held) -> Any:
    """The codes, as they lie, with their bits of sign flipped."""
    f, codes = x.format, x.codes
    if isinstance(f.codes, Floats):
        bits = lax.bitcast_convert_type(codes, jnp.uint8)
        still = (bits & np.uint8(0x7F) == 0) & f.codes.dtype.endswith("fnuz")  # which have one 0, and NaN in place of -0
        return lax.bitcast_convert_type(jnp.where(still, bits, bits ^ np.uint8(0x80)), codes.dtype)
    sign = np.uint8(1 << (len(f.codes.values) - 1).bit_length())  # type: ignore[union-attr]
    if x.loose or f.bits == 8 or not x.inner:
        return codes ^ sign
    one = packing.pack(f, np.full(f.per, sign, np.uint8))
    return codes ^ jnp.tile(one, codes.shape[-1] // one.size)


def rescaled(x: Held, f: Callable[[Any], Any]) -> Held:
    """With another factor: ``f`` of the scales, linear.

    Raises:
      Refused: if scales are no float32 numbers, or the product would be float64.
    """
    if accumulated(x.dtype) == jnp.float64:
        raise Refused("a float32 scale does not hold the product with a float64 number")
    if isinstance(x.scale, Held):
        scale = rescaled(x.scale, f)
    elif x.scale.dtype == jnp.float32:
        scale = f(x.scale)
    else:
        raise Refused(f"scales of {x.shown} are {x.format.scale.dtype}, which does not hold every product")
    return replace(x, scale=scale, offset=None if x.offset is None else f(x.offset))
