"""Products with quantized arrays, on their codes.

    Σ x · scale · number      a scale lies on kept axes, on contracted ones, or on both:

    kept only                 (x · numbers) · scale                    one product
    contracted only           (x · scale) · numbers                    one product
    both                      Σ_G (x_G · numbers_G) · scale_G          a loop over the groups, or over the kept scales if
                                                                       these are fewer: (x · scale_j) · numbers_j

Numbers are decoded a block at a time, so that no array of the size of what the operand stands for is made: a loop over the
leading axis of the codes, in blocks of at most `BLOCK` of them; on CPUs by one of the ways of `kernels`, if one fits.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from typax._op import Refused
from typax._structural import dense
from typax._type import ValueType
from typax.quantized import kernels, layout, packing, rounding
from typax.quantized.encode import Choice, encode
from typax.quantized.format import INT8, Format, Integers, Table
from typax.quantized.types import accumulated, all_groups, row_group

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
    def of(cls, q: Any) -> "Rows":
        ty = q._type
        groups = all_groups(ty)
        inner = layout.inner_axes(groups)
        labels = (*(2 * a for a in layout.outer_axes(groups)), *(2 * a + 1 for a in inner))
        length = row_group(groups) or ty.shape[inner[-1]]
        scale = dense(q.scale) if isinstance(ty.leaves[1], ValueType) else q.scale
        found = {n: getattr(q, n, None) for n in ("zero_point", "offset")}
        return cls(ty.of_format, q.qvalue, scale, found["zero_point"], found["offset"], labels, length)

    @property
    def outer(self) -> tuple[int, ...]:
        return self.labels[: self.scale.ndim]

    def each(self, f: Any) -> "Rows":
        """``f`` of each array."""
        words, *rest = (None if a is None else f(a) for a in (self.words, self.scale, self.zero_point, self.offset))
        return self._replace(words=words, scale=rest[0], zero_point=rest[1], offset=rest[2])

    def leading(self, label: int) -> "Rows":
        """That axis, which has scales, first."""
        k = self.labels.index(label)
        moved = self.each(lambda a: jnp.moveaxis(a, k, 0))
        return moved._replace(labels=(label, *self.labels[:k], *self.labels[k + 1 :]))

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
            return jnp.take(jnp.asarray(kernels.as_int8(self.format.codes)[0]), codes.astype(jnp.int32))
        if self.zero_point is not None:
            z = jnp.expand_dims(self.zero_point, tuple(range(self.scale.ndim, codes.ndim)))
            return (codes.astype(jnp.int16) - z.astype(jnp.int16)).astype(dtype)
        return rounding.number(self.format, codes, dtype)


def product(
    x: Any, q: Any, contract: tuple[Any, Any], batch: tuple[Any, Any], *, first: bool = True, precision: Any = None,
    activations: Any = "float",
) -> Any:  # fmt: skip
    """``lax.dot_general`` of an array, or of codes, and a quantized one, in float32 (float64 if either has it).

    Axes of the result: batch, kept ones of ``x``, kept ones of ``q``; the latter two swapped unless ``first``.
    """
    wide = accumulated(x.dtype, q.dtype) if activations != "codes" else x.dtype
    if 0 in q.shape:  # nothing is summed, or there is nothing to give
        sides = [(x.astype(jnp.float32) if activations == "codes" else x.astype(wide), contract[0], batch[0])]
        sides.insert(first, (dense(q).astype(sides[0][0].dtype), contract[1], batch[1]))
        (a, ca, ba), (b, cb, bb) = sides
        return lax.dot_general(a, b, ((ca, cb), (ba, bb)), precision=precision)
    groups, rows = all_groups(q._type), Rows.of(q)
    of_x = dict(zip(contract[0], contract[1], strict=True)) | dict(zip(batch[0], batch[1], strict=True))
    x, labels = _cut(x, groups, of_x, wide)
    pieces = lambda axes: [n for a in axes for n in _pieces(groups, a)]
    own = [n for n in labels if n < 0]
    kept = [a for a in range(q.ndim) if a not in (*contract[1], *batch[1])]
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
    summed = [n for n in rows.outer if n not in wanted]
    kept = [n for n in rows.outer if n in wanted]
    size = dict(zip(rows.labels, rows.words.shape, strict=True))
    if rows.offset is not None:
        raise Refused("an offset beside the scale")
    if summed and kept:  # a loop along the shorter side
        over = min((summed, kept), key=lambda ns: math.prod(size[n] for n in ns))
        return _loop(x, labels, rows, wanted, way, over[0])
    if (
        _is_large(rows)
        and way.activations in ("float", "bfloat16")
        and rows.outer
        and not layout.sharded(x, rows.words, rows.scale)
    ):
        return _loop(x, labels, rows, wanted, way, max(rows.outer, key=lambda n: size[n]))
    return _contracted_block(x, labels, rows, wanted, way)


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
    weights = kernels.Weights(by, rows.format, False, not folds)
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
        return found(x * full, words, None) if folds else found(x, words, full)

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
    order = sorted(range(rows.scale.ndim), key=lambda i: labels.index(rows.labels[i]))
    at = [labels.index(rows.labels[i]) for i in order]
    scale = jnp.transpose(rows.scale, order)
    scale = jnp.expand_dims(scale, tuple(i for i in range(y.ndim) if i not in at))
    return rounding.scaled(rows.format.scale.dtype, y, scale)


def _loop(x: Any, labels: Any, rows: Rows, wanted: Any, way: _Way, label: int) -> Any:
    """Over an axis that has scales: a sum if it is contracted, else results side by side."""
    rows = rows.leading(label)
    n = rows.words.shape[0]
    per = math.prod(rows.words.shape[1:]) * 8 // rows.format.bits
    alone = any(m in wanted for m in rows.outer) and any(m not in wanted for m in rows.outer)
    step = 1 if alone else layout.divisor(n, BLOCK // per if per else n)
    in_x = label in labels
    k = labels.index(label) if in_x else 0
    inside = tuple(m for m in wanted if m != label)
    if n == 0 or (step == n and not alone):
        return _contracted_block(x, labels, rows, wanted, way)
    parts = [jax.typeof(rows.words).sharding.spec[0], jax.typeof(x).sharding.spec[k] if in_x else None]
    if parts != [None, None]:
        raise Refused("the groups of a sharded axis would be taken one after the other; shard another axis")

    def block(x: Any, rows: Rows) -> Any:
        if step == 1:
            one = rows.each(lambda a: a[0])._replace(labels=rows.labels[1:])
            lab = tuple(m for m in labels if m != label)
            return _contracted(x[0] if in_x else x, lab if in_x else labels, one, inside, way)
        moved = (label, *(m for m in labels if m != label)) if in_x else labels
        return _contracted_block(x, moved, rows, (label, *inside) if label in wanted else wanted, way)

    spec = lambda a: jax.P(None, *jax.typeof(a).sharding.spec) if layout.sharded(a) else None
    cut = lambda a: layout.reshape(a, (n // step, step, *a.shape[1:]), spec(a))
    blocks = rows.each(cut)
    arrays = [a for a in (blocks.words, blocks.scale, blocks.zero_point) if a is not None]

    def again(parts: Sequence[Any]) -> Rows:
        words, scale, *zero = parts
        return rows._replace(words=words, scale=scale, zero_point=zero[0] if zero else None)

    xs = cut(jnp.moveaxis(x, k, 0)) if in_x else None
    if label in wanted:
        ys = lax.map(lambda p: block(p[0] if in_x else x, again(p[1])), (xs, arrays))
        ys = ys.reshape(n, *ys.shape[2:]) if step > 1 else ys
        return jnp.moveaxis(ys, 0, wanted.index(label))
    first = jax.eval_shape(lambda p: block(p[0][0], again([a[0] for a in p[1]])), (xs, arrays))
    add = lambda total, p: (total + block(p[0], again(p[1])), None)
    return lax.scan(add, jnp.zeros_like(first), (xs, arrays))[0]  # varying over a mesh as the blocks do


def _contracted_block(x: Any, labels: Any, rows: Rows, wanted: Any, way: _Way) -> Any:
    if any(n not in wanted for n in rows.outer):
        if way.activations == "codes":
            raise Refused("codes meet scales that lie along the contracted axis only")
        return _dot(_times(x, labels, rows), labels, rows, wanted, way)
    return _times(_dot(x, labels, rows, wanted, way), wanted, rows)


# --- products of one block ------------------------------------------------------------------------------------------


def _einsum(a: Any, la: Any, b: Any, lb: Any, out: Any, way: _Way, dtype: Any) -> Any:
    names = {n: i for i, n in enumerate(sorted({*la, *lb}))}
    of = lambda ls: [names[n] for n in ls]
    return jnp.einsum(a, of(la), b, of(lb), of(out), precision=way.precision, preferred_element_type=dtype)


def _dot(x: Any, labels: Any, rows: Rows, wanted: Any, way: _Way) -> Any:
    """Σ x · numbers, without scales."""
    if way.activations == "float":
        return _einsum(x, labels, rows.numbers(way.wide), rows.labels, wanted, way, way.wide)
    if way.activations == "bfloat16":
        numbers = rows.numbers(jnp.bfloat16)
        y = _einsum(x.astype(jnp.bfloat16), labels, numbers, rows.labels, wanted, way, jnp.float32)
        return y.astype(way.wide)
    if way.activations == "codes":
        return _integers(x, labels, rows, wanted, way)
    summed = [i for i, n in enumerate(labels) if n not in wanted]
    codes, scale = _as_int8(x, summed, way.activations)
    y = _integers(codes, labels, rows, wanted, way)
    rest = [n for n in labels if n in wanted]
    at = [wanted.index(n) for n in rest]
    order = sorted(range(len(at)), key=lambda i: at[i])
    scale = jnp.expand_dims(jnp.transpose(scale, order), tuple(i for i in range(y.ndim) if i not in at))
    return y.astype(way.wide) * (scale.astype(way.wide) * np.asarray(rows.unit, way.wide))


def _as_int8(x: Any, summed: Sequence[int], activations: Any) -> tuple[Any, Any]:
    """Codes of ``x`` and their scales, one for all that is summed; or by a given scale."""
    groups = tuple(0 if i in summed else 1 for i in range(x.ndim))
    given = {} if activations == "dynamic" else {"scale": np.float32(activations)}
    parts = encode(INT8, x, groups, Choice(), given, "matmul")
    codes = layout.merge(parts.qvalue, groups, (0,) * x.ndim)
    return codes, parts.scale


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


def of_integers(a: Any, b: Any, contract: tuple[Any, Any], batch: tuple[Any, Any]) -> Any:
    """The product of two quantized arrays of integers, summed as integers; the scales of ``a`` lie on kept axes."""
    for q in (a, b):
        if not _is_int8(q._type):
            made = "has a zero point" if q._type.extra == "z" else "is made of other numbers"
            raise Refused(f"two quantized arrays meet as integers in int8, and {q._type} {made}; use typax.dense of it")
    groups = all_groups(a._type)
    if any(groups[i] != 0 for i in contract[0]):
        raise Refused(f"{a._type} has scales along the contracted axis, where only the second operand can have them")
    rows = Rows.of(a)
    codes = layout.merge(rows.numbers(jnp.int8), groups, (0,) * a._type.n_batch + a._type.padding)
    y = product(codes, b, contract, batch, activations="codes")
    scale = rounding.decoded(rows.format.scale.dtype, rows.scale)
    inside = tuple(1 if g == 0 else g for g in groups)  # one for each entry of the kept axes
    kept = [i for i in range(a.ndim) if i not in (*contract[0], *batch[0])]
    order = [*batch[0], *kept]
    outer = layout.outer_axes(groups)
    full = jnp.expand_dims(scale, tuple(i for i in range(a.ndim) if i not in outer))
    for i, g in enumerate(inside):
        if g == 1:  # nor can an axis that is sharded be repeated
            continue
        full = jnp.repeat(full, g, axis=i)[tuple(slice(a.shape[i]) if k == i else slice(None) for k in range(a.ndim))]
    full = jnp.squeeze(jnp.transpose(full, (*order, *contract[0])), tuple(range(len(order), a.ndim)))
    return y * jnp.expand_dims(full, tuple(range(full.ndim, y.ndim))).astype(y.dtype)


def _is_int8(ty: Any) -> bool:
    """Whether its codes are integers that fit int8, without a zero point."""
    return isinstance(ty.of_format.codes, Integers) and not ty.extra and ty.of_format.codes.high <= 127


def _in_table(ty: Any) -> bool:
    """Whether its codes are few numbers, which integers in int8 stand for."""
    codes = ty.of_format.codes
    return isinstance(codes, Table) and not ty.extra and ty.of_format.bits <= 4


def check_activations(activations: Any, q: Any, where: str) -> None:
    """Raise a ValueError unless activations can be quantized so for products with ``q``."""
    ty = q._type
    known = activations in ("float", "dynamic", "bfloat16") or (isinstance(activations, float) and activations > 0)
    if not known:
        raise ValueError(
            f'{where}: activations={activations!r}; they are "float", "dynamic", "bfloat16", or a scale above 0'
        )
    if activations not in ("float", "bfloat16") and not (_is_int8(ty) or _in_table(ty)):
        raise ValueError(
            f"{where}: activations={activations!r} needs weights that are integers in int8 or numbers of a table, without a "
            f'zero point, not {ty}; use "bfloat16" or "float"'
        )
