"""Products with quantized arrays, on their codes.

    Σ x · number · scale      "float", "bfloat16": a block of codes at a time becomes what it stands for, and meets x

    with integers             a scale lies on kept axes, on contracted ones, or on both:
    kept only                 (codes of x · numbers) · scale · scale of x
    contracted only           (codes of x · scale) · numbers · scale of it
    both                      Σ_G (x_G · numbers_G) · scale_G          a loop over the groups, or over the kept scales if
                                                                       these are fewer: (x · scale_j) · numbers_j

No array of the size of what the operand stands for is made: a block has at most `BLOCK` codes. On CPUs products are made by
one of the ways of `kernels`, if one fits.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from typax._op import Refused
from typax.quantized import kernels, layout, packing, rounding
from typax.quantized.axes import Held, held
from typax.quantized.encode import Choice, encode
from typax.quantized.format import INT8, Floats, Format, Integers, Table
from typax.quantized.types import accumulated, row_group

BLOCK = 1 << 18
"""Codes that are decoded at a time."""


class Rows(NamedTuple):
    """A quantized array as arrays whose axes have labels: of axis ``a``, ``2a`` for groups and ``2a + 1`` within one."""

    format: Format
    words: Any  # packed along the last axis
    scale: Any  # as held
    zero_point: Any
    offset: Any
    labels: tuple[int, ...]  # of the words; the scales have the first of them
    length: int  # codes along the last axis

    @classmethod
    def of(cls, q: Held) -> "Rows":
        labels = (*(2 * a for a in q.outer), *(2 * a + 1 for a in q.inner))
        length = row_group(q.groups) or q.shape[q.inner[-1]]
        scale = q.scale.dense() if isinstance(q.scale, Held) else q.scale
        return cls(q.format, q.codes, scale, q.zero_point, q.offset, labels, length)

    @property
    def outer(self) -> tuple[int, ...]:
        return self.labels[: self.scale.ndim]

    def each(self, f: Any) -> "Rows":
        """``f(array, its labels)`` of each array."""
        words, *rest = (
            None if a is None else f(a, self.labels[: a.ndim])
            for a in (self.words, self.scale, self.zero_point, self.offset)
        )
        return self._replace(words=words, scale=rest[0], zero_point=rest[1], offset=rest[2])

    def window(self, label: int, at: Any, n: int) -> "Rows":
        """``n`` entries of that axis."""
        words, at = kernels.bytes_at(self.words, at)
        cut = lambda a, ls: lax.dynamic_slice_in_dim(a, at, n, ls.index(label)) if label in ls else a
        own = self._replace(words=words).each(cut)
        return own if label != self.labels[-1] else own._replace(length=n)

    def at(self, label: int, at: Any) -> "Rows":
        """One entry of that axis, which has scales."""
        own, k = self.window(label, at, 1), self.labels.index(label)
        own = own.each(lambda a, ls: lax.squeeze(a, (k,)) if label in ls else a)
        return own._replace(labels=(*self.labels[:k], *self.labels[k + 1 :]))

    @property
    def unit(self) -> float:
        """What one of int8 is: of a table the unit in which its numbers are integers, or nearly so."""
        codes = self.format.codes
        return kernels.as_int8(codes)[1] if isinstance(codes, Table) else 1.0

    def numbers(self, dtype: Any) -> Any:
        """The codes as numbers, with the axes of the words; of int8 integers without a zero point, or in `unit`."""
        codes = packing.unpack(self.format, self.words)
        if codes.shape[-1] != self.length:
            codes = codes[..., : self.length]
        if dtype == jnp.int8 and isinstance(self.format.codes, Table):
            return rounding.looked_up(jnp.asarray(kernels.as_int8(self.format.codes)[0]), codes)
        if self.zero_point is not None:
            z = jnp.expand_dims(self.zero_point, tuple(range(self.scale.ndim, codes.ndim)))
            return (codes.astype(jnp.int16) - z.astype(jnp.int16)).astype(dtype)
        if isinstance(self.format.codes, Floats) and codes.dtype == jnp.uint8:
            codes = lax.bitcast_convert_type(codes, self.format.storage)
        return rounding.number(self.format, codes, dtype)

    def values(self, dtype: Any) -> Any:
        """What the codes stand for, with the axes of the words."""
        over = lambda a: jnp.expand_dims(a, tuple(range(self.scale.ndim, self.words.ndim)))
        values = rounding.scaled(self.format.scale.dtype, self.numbers(dtype), over(self.scale))
        return values if self.offset is None else lax.optimization_barrier(values) + over(self.offset).astype(dtype)


def product(
    x: Any, q: Any, contract: tuple[Any, Any], batch: tuple[Any, Any], *, first: bool = True, precision: Any = None,
    activations: Any = "float",
) -> Any:  # fmt: skip
    """``lax.dot_general`` of an array, or of codes, and a quantized one, in float32 (float64 if either has it).

    Axes of the result: batch, kept ones of ``x``, kept ones of ``q``; the latter two swapped unless ``first``.
    """
    q = q if isinstance(q, Held) else held(q)
    wide = accumulated(x.dtype, q.dtype) if activations != "codes" else x.dtype
    if 0 in q.shape:  # nothing is summed, or there is nothing to give
        sides = [(x.astype(jnp.float32) if activations == "codes" else x.astype(wide), contract[0], batch[0])]
        sides.insert(first, (q.dense().astype(sides[0][0].dtype), contract[1], batch[1]))
        (a, ca, ba), (b, cb, bb) = sides
        return lax.dot_general(a, b, ((ca, cb), (ba, bb)), precision=precision)
    groups, rows = q.groups, Rows.of(q)
    if activations not in ("float", "bfloat16", "codes"):
        # a scale that folds into x is no scale of x alone; what are no integers meets what the codes of x stand for
        folds = activations != "dynamic" and any(groups[a] == 1 for a in contract[1])
        if folds or not (is_int8(q) or is_table(q)):
            x, activations = _seen(x.astype(wide), contract[0], activations), "float"
    of_x = dict(zip(contract[0], contract[1], strict=True)) | dict(zip(batch[0], batch[1], strict=True))
    x, labels = _cut(x, groups, of_x, wide)
    pieces = lambda axes: [n for a in axes for n in _pieces(groups, a)]
    own = [n for n in labels if n < 0]
    kept = [a for a in range(len(q.shape)) if a not in (*contract[1], *batch[1])]
    sides = (own, pieces(kept)) if first else (pieces(kept), own)
    wanted = (*pieces(batch[1]), *sides[0], *sides[1])
    way = _Way(wide, precision, activations)
    y = _fast(x, labels, rows, wanted, way)
    if y is None:
        y = _contracted(x, labels, rows, wanted, way)
    return _joined(y, wanted, q.shape, groups)


class _Way(NamedTuple):
    wide: Any
    precision: Any
    activations: Any


def _pieces(groups: Sequence[int], a: int) -> list[int]:
    return ([2 * a] if groups[a] != 0 else []) + ([2 * a + 1] if groups[a] != 1 else [])


def _cut(x: Any, groups: Any, of_x: dict[int, int], wide: Any) -> tuple[Any, tuple[int, ...]]:
    """``x`` with its axes cut as those of the quantized array that they meet, and their labels; its own are negative."""
    x = x.astype(wide)
    mine = tuple(groups[of_x[j]] if j in of_x else 1 for j in range(x.ndim))
    labels = []
    for j in range(x.ndim):
        labels.append(_pieces(groups, of_x[j]) if j in of_x else [-1 - j])
    cut = layout.split(x, tuple(g if g > 1 else 1 for g in mine), "matmul")
    # split puts what is within groups last
    order = [ns[0] for ns in labels] + [ns[1] for ns in labels if len(ns) > 1]
    return cut, tuple(order)


def _joined(y: Any, labels: Sequence[int], shape: Any, groups: Any) -> Any:
    """The pieces of each axis put together, without what filled the last group."""
    sizes, keep, i = [], [], 0
    parts = tuple(jax.typeof(y).sharding.spec)
    new = []
    while i < len(labels):
        a = labels[i] // 2
        two = labels[i] >= 0 and groups[a] > 1
        new.append(parts[i])
        sizes.append(y.shape[i] * (y.shape[i + 1] if two else 1))
        keep.append(shape[a] if two else sizes[-1])
        i += 2 if two else 1
    if len(sizes) < y.ndim:
        y = layout.reshape(y, tuple(sizes), jax.P(*new) if any(p is not None for p in new) else None)
    return y if keep == sizes else y[tuple(map(slice, keep))]


def _contracted(x: Any, labels: tuple[int, ...], rows: Rows, wanted: tuple[int, ...], way: _Way) -> Any:
    if way.activations in ("float", "bfloat16"):
        if way.activations == "float" and not _is_large(rows) and rows.offset is None and {*rows.outer} <= {*wanted}:
            # as one block; then scales are fewer products with results than with codes
            return _times(_einsum(x, labels, rows.numbers(way.wide), rows.labels, wanted, way, way.wide), wanted, rows)
        return _in_blocks(x, labels, rows, wanted, way, _of_floats)
    summed = [n for n in rows.outer if n not in wanted]
    kept = [n for n in rows.outer if n in wanted]
    if summed and (kept or way.activations != "dynamic"):  # along the shorter side; other codes of x are not of x · scale
        size = dict(zip(rows.labels, rows.words.shape, strict=True))
        sides = (summed, kept) if way.activations == "dynamic" else (summed,)
        return _one_by_one(x, labels, rows, wanted, way, min(sides, key=lambda ns: math.prod(size[n] for n in ns))[0])
    if way.activations == "codes":
        y = _in_blocks(x, labels, rows, wanted, way, _integers) * np.float32(rows.unit)
        return _times(y, wanted, rows)
    codes, own = _as_int8(_times(x, labels, rows) if summed else x, _summed(labels, wanted), way.activations)
    y = _in_blocks(codes, labels, rows, wanted, way, _integers)
    own = _expanded(own, [n for n in labels if n in wanted], wanted).astype(way.wide)
    y = y.astype(way.wide) * (own * np.asarray(rows.unit, way.wide))
    return y if summed else _times(y, wanted, rows)


def _summed(labels: Sequence[int], wanted: Sequence[int]) -> list[int]:
    return [i for i, n in enumerate(labels) if n not in wanted]


def _expanded(scale: Any, labels: Sequence[int], wanted: Sequence[int]) -> Any:
    """An array whose axes have these labels, by all that are wanted."""
    at = [wanted.index(n) for n in labels]
    order = sorted(range(len(at)), key=lambda i: at[i])
    return jnp.expand_dims(jnp.transpose(scale, order), tuple(i for i in range(len(wanted)) if i not in at))


def _is_large(rows: Rows) -> bool:
    return rounding.exceeds(rows.words.shape, BLOCK * rows.format.bits // 8)


def large(q: Any) -> bool:
    """Whether products with a quantized array decode it by blocks, here, and not by what its own class may know."""
    return rounding.exceeds(q.shape, BLOCK) and not layout.sharded(*q.components()[:2])


def _fast(x: Any, labels: tuple[int, ...], rows: Rows, wanted: tuple[int, ...], way: _Way) -> Any:
    """By a way of `kernels`, which knows matrices; ``None`` if there is none."""
    both = set(labels) & set(rows.labels)
    summed, kept = ([n for n in rows.labels if (n in wanted) == k] for k in (False, True))
    own = [n for n in labels if n not in both]
    plain = rows.zero_point is None and rows.offset is None and rows.format.scale.dtype != "e8m0"
    if (
        not (plain and _is_large(rows) and rounding.exceeds(x.shape, 0) and x.dtype == jnp.float32)
        or both & set(wanted)
        or layout.sharded(x, rows.words, rows.scale)
    ):
        return None
    outer, width = rows.outer, rows.words.shape[-1] * 8 // rows.format.bits
    folds = bool(outer) and all(n in summed for n in outer)
    if rows.labels == (*outer, summed[-1]) and outer == (summed[0], *kept):
        by = "gnk" if rows.length <= kernels.LONG else ""
    elif (folds or all(n in kept for n in outer)) and (width == rows.length or len(summed) == 1):
        by = {(*kept, *summed): "nk", (*summed, *kept): "kn"}.get(rows.labels, "")
    else:
        by = ""
    weights = kernels.Weights(by, rows.format, False)
    found = kernels.way(weights, way.activations, lambda x, axis: _as_int8(x, [axis], way.activations)) if by else None
    if found is None:
        return None
    size = dict(zip(rows.labels, rows.words.shape, strict=True)) | dict(zip(labels, x.shape, strict=True))
    sizes = lambda ns: [size[n] for n in ns]
    n, k = math.prod(sizes(kept)), math.prod(sizes(summed))

    def fast(x: Any, words: Any, scale: Any) -> Any:
        scale = rounding.decoded(rows.format.scale.dtype, scale)
        if by == "gnk":
            return found(x, words.reshape(words.shape[0], n, -1), scale.reshape(-1, n))
        mine = summed if folds else kept  # the axes of scales come first of these
        full = jnp.broadcast_to(jnp.expand_dims(scale, tuple(range(scale.ndim, len(mine)))), sizes(mine)).reshape(-1)
        words = words.reshape((n, -1) if by == "nk" else (-1, n))
        if not folds:
            return found(x, words, full)
        # x times scales may be smaller than the products that are summed; times the largest code they are not
        top = np.float32(2.0 ** math.floor(math.log2(rows.format.codes.largest)))
        return found(x * (full * top), words, jnp.full(n, 1 / top))

    def slow(x: Any, words: Any, scale: Any) -> Any:
        own = rows._replace(words=words, scale=scale)
        y = _contracted(x.reshape(-1, *sizes(summed)), (-1, *summed), own, (-1, *kept), way)
        return y.reshape(-1, n)

    rows_first = jnp.transpose(x, [labels.index(n) for n in (*own, *summed)]).reshape(-1, k)
    y = kernels.on_cpus(fast, slow)(rows_first, rows.words, rows.scale)
    y = y.reshape(*sizes(own), *sizes(kept))
    return jnp.transpose(y, [[*own, *kept].index(n) for n in wanted])


def _times(y: Any, labels: Sequence[int], rows: Rows) -> Any:
    """``y`` times the scales, of which all axes are among its own."""
    return rounding.scaled(rows.format.scale.dtype, y, _expanded(rows.scale, rows.outer, labels))


# --- a block at a time -------------------------------------------------------------------------------------------------


def _in_blocks(x: Any, labels: Any, rows: Rows, wanted: Any, way: _Way, one: Any) -> Any:
    """``one(x, labels, rows, wanted, way)`` of blocks of the codes, side by side or summed."""
    found = _cut_along(x, labels, rows, wanted) if _is_large(rows) else None
    if found is None:
        return one(x, labels, rows, wanted, way)
    label, step = found
    n = rows.words.shape[rows.labels.index(label)]
    k = labels.index(label) if label in labels else None

    def block(at: Any, new: Any = None) -> Any:
        part = rows.window(label, at, step)
        if k is None:
            return _in_blocks(x, labels, part, wanted, way, one)
        of_x = lax.dynamic_slice_in_dim(x, at, step, k)
        if new is not None:
            there = jnp.expand_dims(jnp.arange(step) >= new, [a for a in range(x.ndim) if a != k])
            of_x = jnp.where(there, of_x, jnp.zeros((), x.dtype))
        return _in_blocks(of_x, labels, part, wanted, way, one)

    if label in wanted:
        return side_by_side(block, n, step, wanted.index(label))
    count, last = -(-n // step), n - step
    # the last block begins earlier, if it would end behind the end; what it has again does not count
    again = lambda i: block(jnp.minimum(i * step, last), i * step - jnp.minimum(i * step, last))
    return added(again if n % step else lambda i: block(i * step), count)


def side_by_side(f: Any, n: int, step: int, axis: int, unit: int = 1) -> Any:
    """``f(0), f(step), ...`` up to ``n``, results of ``step`` units along that axis, put together; the last one begins
    earlier, if it would end behind the end."""
    one = jnp.zeros_like(jax.eval_shape(f, jnp.zeros((), jnp.int32)))  # varying over a mesh as the results do
    y = lax.pad(one, jnp.zeros((), one.dtype), [(0, (n - step) * unit if a == axis else 0, 0) for a in range(one.ndim)])

    def put(i: Any, y: Any) -> Any:
        at = jnp.minimum(i * step, n - step)
        return lax.dynamic_update_slice_in_dim(y, f(at), at * unit, axis)

    return lax.fori_loop(0, -(-n // step), put, y)


def _cut_along(x: Any, labels: Any, rows: Rows, wanted: Any) -> tuple[int, int] | None:
    """The axis along which blocks are cut, and by how much; one that is kept, unless few entries of it are a block."""
    of_words, of_x = jax.typeof(rows.words).sharding.spec, jax.typeof(x).sharding.spec
    codes = math.prod(rows.words.shape) * 8 // rows.format.bits
    best: Any = None
    for i, (label, n) in enumerate(zip(rows.labels, rows.words.shape, strict=True)):
        packed = rows.format.bits < 8 and i == len(rows.labels) - 1
        parted = of_words[i] is not None or (label in labels and of_x[labels.index(label)] is not None)
        if n > 1 and not packed and not parted:
            step = max(1, BLOCK * n // codes)
            best = max(best or (False, 0, 0, 0), (label in wanted and step >= 16, n, -label, step))
    if best is None:
        return None
    _, n, label, step = best
    return -label, -(-n // -(-n // min(step, n - 1)))


def added(f: Any, count: int) -> Any:
    """``f(0) + ... + f(count - 1)``, to which what the sum has lost is added."""
    zero = jnp.zeros_like(jax.eval_shape(f, jnp.zeros((), jnp.int32)))  # varying over a mesh as the results do
    return rounding.total(lax.fori_loop(0, count, lambda i, sums: rounding.added(sums, f(i)), (zero, zero)))


def _one_by_one(x: Any, labels: Any, rows: Rows, wanted: Any, way: _Way, label: int) -> Any:
    """Over an axis that has scales: a sum if it is contracted, else results side by side."""
    i, j = rows.labels.index(label), labels.index(label) if label in labels else None
    n = rows.words.shape[i]
    if jax.typeof(rows.words).sharding.spec[i] is not None or (j is not None and jax.typeof(x).sharding.spec[j] is not None):
        raise Refused("the groups of a sharded axis would be taken one after the other; shard another axis")
    inside = tuple(m for m in wanted if m != label)

    def one(at: Any) -> Any:
        own = rows.at(label, at)
        if j is None:
            return _contracted(x, labels, own, inside, way)
        of_x = lax.dynamic_index_in_dim(x, at, j, keepdims=False)
        return _contracted(of_x, (*labels[:j], *labels[j + 1 :]), own, inside, way)

    if label in wanted:
        return jnp.moveaxis(lax.map(one, jnp.arange(n)), 0, wanted.index(label))
    return added(one, n)


# --- products of one block ------------------------------------------------------------------------------------------


def _einsum(a: Any, la: Any, b: Any, lb: Any, out: Any, way: _Way, dtype: Any) -> Any:
    names = {n: i for i, n in enumerate(sorted({*la, *lb}))}
    of = lambda ls: [names[n] for n in ls]
    return jnp.einsum(a, of(la), b, of(lb), of(out), precision=way.precision, preferred_element_type=dtype)


def _of_floats(x: Any, labels: Any, rows: Rows, wanted: Any, way: _Way) -> Any:
    """As the product of arrays is, with numbers that are what the codes stand for."""
    if way.activations == "float":
        return _einsum(x, labels, rows.values(way.wide), rows.labels, wanted, way, way.wide)
    folds, kept = ([n for n in rows.outer if (n in wanted) == k] for k in (False, True))
    both = bool(folds and kept) or rows.offset is not None
    x = _times(x, labels, rows) if folds and not both else x
    numbers = rows.values(jnp.float32).astype(jnp.bfloat16) if both else rows.numbers(jnp.bfloat16)
    y = _einsum(x.astype(jnp.bfloat16), labels, numbers, rows.labels, wanted, way, jnp.float32).astype(way.wide)
    return y if folds or both else _times(y, wanted, rows)


def _as_int8(x: Any, summed: Sequence[int], activations: Any) -> tuple[Any, Any]:
    """Codes of ``x`` and their scales, one for all that is summed; or by a given scale."""
    groups = tuple(0 if i in summed else 1 for i in range(x.ndim))
    given = {} if activations == "dynamic" else {"scale": np.float32(activations)}
    parts = encode(INT8, x, groups, Choice(), given, "matmul")
    codes = layout.merge(parts.qvalue, groups, (0,) * x.ndim)
    return codes, parts.scale


def _seen(x: Any, summed: Sequence[int], activations: Any) -> Any:
    """What the codes of ``x`` stand for."""
    codes, scale = _as_int8(x, summed, activations)
    return codes.astype(x.dtype) * jnp.expand_dims(scale.astype(x.dtype), tuple(summed))


def _integers(codes: Any, labels: Any, rows: Rows, wanted: Any, way: _Way) -> Any:
    """Σ of products of integers, in int32, in pieces that do not overflow; float32."""
    numbers = rows.numbers(jnp.int8)
    size = dict(zip(labels, codes.shape, strict=True))
    summed = [n for n in labels if n not in wanted]
    if math.prod(size[n] for n in summed) <= kernels.LONG:
        return _einsum(codes, labels, numbers, rows.labels, wanted, way, jnp.int32).astype(jnp.float32)
    n = max(summed, key=lambda n: size[n])
    rest = math.prod(size[m] for m in summed if m != n)
    step, total = max(1, kernels.LONG // rest), None
    for i in range(0, size[n], step):
        piece = lambda a, ls: lax.slice_in_dim(a, i, min(i + step, size[n]), axis=ls.index(n))  # noqa: B023
        y = _einsum(piece(codes, labels), labels, piece(numbers, rows.labels), rows.labels, wanted, way, jnp.int32)
        total = y.astype(jnp.float32) if total is None else total + y.astype(jnp.float32)
    return total


def is_int8(q: Held) -> bool:
    """Whether its codes are integers that fit int8, without a zero point."""
    codes, plain = q.format.codes, q.zero_point is None and q.offset is None
    return plain and isinstance(codes, Integers) and codes.high <= 127


def is_table(q: Held) -> bool:
    """Whether its codes are few numbers, which integers in int8 stand for."""
    plain = q.zero_point is None and q.offset is None
    return plain and isinstance(q.format.codes, Table) and q.format.bits <= 4


def check_activations(activations: Any, where: str) -> None:
    """Raise a ValueError unless that is how activations may meet codes."""
    given = isinstance(activations, float | int | np.floating | np.integer) and not isinstance(activations, bool)
    if activations not in ("float", "dynamic", "bfloat16") and not (given and 0 < activations < np.inf):
        raise ValueError(
            f'{where}: activations={activations!r}; they are "float", "dynamic", "bfloat16", or a scale above 0'
        )
