"""Products of float rows with codes, as CPUs do them fast: the codes stay 8 bits wide, or become so a block at a time.

    x = 2^-k · Σ_i 256^i · d_i                each row of x in fixed point: digits of int8, and an exponent for the row
    Σ x · c = 2^-k · Σ_i 256^i · Σ d_i · c    one product of int8 with int8, summed in int32, which has all digits as rows

Float accuracy, ``"float"``: three digits hold 23 bits below the largest of a row, four hold 31. How many a row needs is told
by the largest magnitude over a usual one (`spread`): at most 16, three; at most 4096, four; else, and where there is NaN or
an infinity, the codes are converted to float32, a block of them at a time. The error of a sum is at most that of the fixed
point, 2^-23 · max |x| · Σ |c| (2^-31 with four digits), beside a few roundings of the result.

    ways           weights, as they lie in memory                  how
    `by_digits`    [n, k] or [k, n], a scale for each n or none    above
                   [g, n, k/g], a scale for each g and n           above, group after group, summed in float32
    `by_codes`     these                                           as by one digit: rows of x are quantized
    `by_blocks`    [n, k], [g, n, k/g]                             as bfloat16, a block of n, or of g, at a time
    `converted`    all                                             as float32, a block of n, of g, or of k at a time

Codes of 4 bits are not put side by side: of bytes b, ``b << 4`` and ``b & 0xF0`` are the even and the odd codes times 16,
and the activations are taken in that order, all even ones first. XLA multiplies int8 with int8, and bfloat16 with bfloat16,
in the wide registers of CPUs, but only from two rows on: fewer than `ROWS` are filled up.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from typax.quantized import layout, rounding
from typax.quantized.format import Floats, Format, Integers, Table

ROWS = 2
"""The fewest rows that XLA multiplies in wide registers."""
BLOCK = 1 << 20
"""Codes that are converted at a time, to two bytes each."""
FEW = 256
"""Rows up to which a product is faster with its operands exchanged."""
SOME = 8
"""Groups whose products are made at a time."""
REGISTER = 64
"""Bytes."""
TALL = 1024
"""Products of more rows than this are made a block at a time, so that their sums in int32 stay in the cache."""
LONG = 1 << 16
"""Products of 8-bit integers that are summed in int32: 2^16 · 2^14 does not overflow."""
PLAIN, WIDE = 16.0, 4096.0
"""The `spread` of rows up to which three digits do, and four."""
AT_ONCE = 32
"""Of more than this XLA makes one number in steps of its own, which take as long to compile as what they are made of."""
BELOW = np.float32(2.0**-7)
"""What makes numbers below 1 of int8, as weights often are: products with large rows are then no larger than their sums."""
LITTLE = 1 << 26
"""Products of so many terms take no longer with four digits than with three, beside what a call takes."""
MANY = 256
"""Of so many terms the roundings of a fixed point cancel as well as those of a float sum."""


# --- codes of a byte -------------------------------------------------------------------------------------------------


def integers(format: Format, zero_point: bool) -> Callable[[Any], tuple[Any, float]] | None:
    """What makes int8 [..., per, w] of words [..., w], all first codes of them and then the others; and the unit."""
    codes = format.codes
    if zero_point:
        return None
    if isinstance(codes, Integers) and codes.low < 0 and format.bits == 8:
        return lambda words: (words[..., None, :], 1.0)
    if format.bits != 4:
        return None
    if isinstance(codes, Integers) and codes.low < 0:
        return lambda b: (_int8(_halves(format, b, lambda low: low << np.uint8(4)) & np.uint8(0xF0)), 1 / 16)
    if isinstance(codes, Table):
        numbers, unit = as_int8(codes)
        return lambda b: (_of_table(format, b, numbers), unit)
    return None


def bfloats(format: Format, zero_point: bool) -> Callable[[Any], tuple[Any, float]] | None:
    """What makes bfloat16 [..., per, w] of words [..., w], or integers that are such, as `integers` does."""
    codes = format.codes
    if isinstance(codes, Floats) and codes.dtype == "float8_e4m3fn":
        return lambda words: (_e4m3(words[..., None, :]), 1.0)
    if isinstance(codes, Table) and format.bits == 4:
        numbers = np.asarray(all_numbers(codes), np.float32).astype(jnp.bfloat16).view(np.uint16)
        return lambda b: (_bfloat16(_of_table(format, b, numbers)), 1.0)
    return integers(format, zero_point)


def as_int8(table: Table) -> tuple[np.ndarray, float]:
    """The numbers of a table as int8 and their unit: a power of two that holds them all, else the largest over 127."""
    numbers = np.asarray(all_numbers(table), np.float64)
    for shift in range(7):
        if (numbers * 2.0**shift == np.rint(numbers * 2.0**shift)).all() and table.largest * 2.0**shift <= 127:
            return (numbers * 2.0**shift).astype(np.int8), 2.0**-shift
    return np.rint(numbers * (127 / table.largest)).astype(np.int8), table.largest / 127


def all_numbers(table: Table) -> list[float]:
    """The numbers of all codes of 4 bits, those with a sign bit too; of more bits those of the table."""
    found = [*table.values, *(-v for v in table.values)] if table.signed else list(table.values)
    return found + [found[0]] * (16 - len(found))


def _halves(format: Format, b: Any, of_low: Callable[[Any], Any]) -> Any:
    """Of bytes [..., w], [..., 2, w]: those of the first codes and those of the second, the lower four bits moved."""
    is_low = lax.broadcasted_iota(jnp.int32, (2, 1), 0) == (0 if format.order == "low" else 1)
    b = b[..., None, :]
    return jnp.where(is_low, of_low(b), b)


def _of_table(format: Format, b: Any, numbers: np.ndarray) -> Any:
    return _chosen(_halves(format, b, lambda low: low << np.uint8(4)), numbers, 4)


def _int8(b: Any) -> Any:
    return lax.bitcast_convert_type(b, jnp.int8)


def _bytes(words: Any) -> Any:
    """Words that are no floats: XLA makes float16 of all that it moves as float8."""
    return lax.bitcast_convert_type(words, jnp.uint8) if jnp.issubdtype(words.dtype, jnp.floating) else words


def bytes_at(words: Any, at: Any) -> tuple[Any, Any]:
    """The same where an index in a loop reads them, and that index: else a copy of all is made before the loop."""
    if not jnp.issubdtype(words.dtype, jnp.floating):
        return words, at
    words, at = lax.optimization_barrier((words, at))
    return _bytes(words), at


def _bfloat16(b: Any) -> Any:
    return lax.bitcast_convert_type(b, jnp.bfloat16)


def _rounded(x: Any) -> Any:
    """float32 as bfloat16, by bits, which vectorize; what is halfway goes to the larger magnitude."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + np.uint32(0x8000)
    return _bfloat16((bits >> np.uint32(16)).astype(jnp.uint16))


def _chosen(b: Any, numbers: np.ndarray, shift: int) -> Any:
    """The numbers, 16 of four bits from ``shift`` on, or 8 of three, by a tree of selections."""
    found: list[Any] = [numbers.dtype.type(n) for n in numbers]
    for i in range(len(numbers).bit_length() - 1):
        one = b & b.dtype.type(1 << (shift + i)) != 0
        found = [jnp.where(one, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _e4m3(words: Any) -> Any:
    """Bytes of float8_e4m3fn as bfloat16, of which it is a part: bits move.

    The bits of a float are a concave function of its value, linear from one power of two to the next. So those of a normal
    number, 16 · e + 120 · 2^7, are below the lines through the subnormal ones, and these are where the lines cross.
    """
    b = words.astype(jnp.uint16)
    e = b & np.uint16(0x7F)
    lines = [(e << np.uint16(i + 4)) + np.uint16(15360 - 128 * i) for i in range(4)]
    t = jnp.minimum(jnp.minimum(*lines[:2]), jnp.minimum(*lines[2:]))
    t = jnp.minimum(t, np.uint16(0) - e)  # of zero, which no line meets
    t = jnp.where(e == np.uint16(0x7F), np.uint16(0x7FC0), t)
    return _bfloat16(t | (b << np.uint16(8)) & np.uint16(0x8000))


# --- activations -----------------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Rows in fixed point: ``of`` int8 [digits, m, k], the lowest first, times 256^i · unit · scale; or codes, one digit.

    Scales are float32 [m], powers of two for digits; or [g, m], where codes meet groups.
    """

    of: Any
    scale: Any
    unit: float = 1.0

    def together(self, sums: Any, scale: Any, own: Any) -> Any:
        """Of the sums of each digit, int32, and scales that broadcast to them, the result in float32."""
        y = sums[-1].astype(jnp.float32)
        for s in sums[-2::-1]:
            y = y * np.float32(256) + s.astype(jnp.float32)
        return (y if self.unit == 1 else y * np.float32(self.unit)) * scale * own


def spread(x: Any) -> tuple[Any, Any]:
    """Of rows [m, k], the largest magnitude, and its ratio to a usual one: NaN or infinite where the row is not finite.

    Usual is the square of the mean root of what is not zero, on which few large ones bear little: one that is 10^6 times the
    other 511 makes it 2000 times larger for their mean and 9 times for this. Of fewer than `MANY` it counts less.
    """
    # nothing is shared between the reductions: each is then one with what it is of
    largest, count = jnp.max(jnp.abs(x), 1), jnp.sum(jnp.abs(jnp.sign(x)), 1)
    mean = jnp.sum(jnp.sqrt(jnp.maximum(x, -x)), 1) / jnp.maximum(count, 1)
    usual = jnp.square(mean * jnp.minimum(count * np.float32(1 / MANY), 1))
    ratio = jnp.where(largest == 0, np.float32(1), largest / usual)
    return largest, jnp.where(usual < jnp.inf, ratio, jnp.nan)


def digits(x: Any, largest: Any, count: int) -> Digits:
    """Rows [m, k] of finite float32, of these largest magnitudes, in so many digits."""
    # the largest that digits can hold is 127/128 of a power of two, and a little more; that of a row is half of it, a float
    e = jnp.maximum(rounding.exponent(largest * np.float32(1 + 2.0**-7)), -125)
    whole = jnp.round(rounding.times_power(x, 8 * count - 2 - e[:, None])).astype(jnp.int32)
    # a byte has a sign: what is above it is rounded, that is, raised by half of its unit, and so on upwards
    shifts = lax.broadcasted_iota(jnp.int32, (count, 1, 1), 0) * 8
    halves = 0x00808080 & ((1 << shifts) - 1)
    return Digits(((whole + halves) >> shifts).astype(jnp.int8), rounding.power(e - 1), 2.0 ** (3 - 8 * count))


def in_order(x: Any, per: int, words: int) -> Any:
    """The last axis, filled up to what so many words hold, as `integers` gives codes: [..., per, words]."""
    if x.shape[-1] < words * per:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, words * per - x.shape[-1])])
    return jnp.swapaxes(x.reshape(*x.shape[:-1], words, per), -1, -2)


def in_memory(codes: Any) -> Any:
    """Made as they are, the last axis the fastest."""
    return lax.optimization_barrier(with_layout_constraint(codes, Layout(tuple(range(codes.ndim)))))


def laid_out(codes: Any, rank: int) -> Any:
    """[..., per, w] with all but the first axes as one, in memory: what makes them runs along w, and so fills registers."""
    if codes.ndim > rank + 1 or codes.shape[-2] > 1:
        codes = in_memory(codes)
    return codes.reshape(*codes.shape[: rank - 1], -1)


def filled(x: Any, axis: int = 0) -> Any:
    """At least `ROWS` rows."""
    pads = [(0, max(0, ROWS - n) if a == axis else 0) for a, n in enumerate(x.shape)]
    return jnp.pad(x, pads) if pads[axis][1] else x


# --- products --------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """How codes lie: ``by`` is "nk", "kn" or "gnk"; scales are of [n], or [g, n]."""

    by: str
    format: Format
    zero_point: bool

    @property
    def per(self) -> int:
        return 8 // self.format.bits


def whole(x: Any, codes: Any, by: str, dtype: Any = jnp.int32) -> Any:
    """Σ x · codes of int8 or bfloat16 [m, k] and [n, k] or [k, n]; long sums of integers would overflow, see `summed`.

    XLA packs the second operand of a product anew, which takes longer than products of few rows: that is then what is few.
    """
    m, axis = x.shape[0], 1 if by == "nk" else 0
    x = x if x.dtype == jnp.float32 else filled(x)
    of = lambda a, b, axes: lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype)
    if by == "kn":  # else a transpose of codes becomes one of the product's, which XLA makes in int32
        codes = in_memory(codes)
    if by == "nk" and m <= FEW:
        return of(codes, x, ((1,), (1,)))[:, :m].T
    return of(x, codes, ((1,), (axis,)))[:m]


def summed(d: Digits, codes: Any, scale: Any, unit: float, by: str) -> Any:
    """The product of rows of digits with int8 codes, float32 [m, n], in pieces whose sums do not overflow."""
    count, m, k = d.of.shape
    axis, total = (1 if by == "nk" else 0), None
    for i in range(0, k, LONG):
        part = lambda a, axis: a if k <= LONG else lax.slice_in_dim(a, i, min(i + LONG, k), axis=axis)  # noqa: B023
        sums = whole(part(d.of, 2).reshape(count * m, -1), part(codes, axis), by).reshape(count, m, -1)
        y = d.together(sums, scale * np.float32(unit), d.scale[:, None])
        total = y if total is None else total + y
    return total


def block_of(n: int, most: int) -> int:
    """A number of rows that is at most ``most``, or 16, and fills registers: the largest that divides ``n``, or one
    larger, of which the last block has some rows again."""
    if n <= most:
        return n
    most = max(16, most // 16 * 16)
    found = max((b for b in range(16, most + 1, 16) if n % b == 0), default=0)
    return found if 2 * found >= most else min(n, -(-n // -(-n // most) // 16) * 16, most)


def side_by_side(f: Callable[..., Any], n: int, block: int, arrays: Sequence[Any], axis: int) -> Any:
    """``f`` of arrays that are cut along an axis, of length n, into blocks; its results [m, block] put together.

    The last block begins earlier, if it would end behind the end, as slices do.
    """
    if block >= n:
        return f(_bytes(arrays[0]), *arrays[1:])

    def cut(at: Any) -> Any:
        words, at = bytes_at(arrays[0], at)
        return (lax.dynamic_slice_in_dim(a, at, block, axis) for a in (words, *arrays[1:]))

    one = jax.eval_shape(lambda: f(*cut(np.uint32(0))))
    # unsigned, else each index is first looked at for a sign
    step = lambda p: (p[0] + np.uint32(block), lax.dynamic_update_slice_in_dim(p[1], f(*cut(p[0])), p[0], 1))
    none = jnp.repeat(jnp.zeros_like(one), -(-n // block), axis=1)[:, :n]  # varying as results do
    return lax.while_loop(lambda p: p[0] < n, step, (np.uint32(0), none))[1]


def way(weights: Weights, activations: Any, as_int8: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any] | None:
    """The product of float32 [m, k] with words and scales on CPUs; ``None`` if there is none.

    ``as_int8(x, axis)`` quantizes activations that are neither ``"float"`` nor ``"bfloat16"``.
    """
    int8 = integers(weights.format, weights.zero_point)
    packed_rows = weights.by == "kn" and weights.per > 1
    if activations == "bfloat16":
        fits = bfloats(weights.format, weights.zero_point) is not None and weights.by != "kn"
        return (lambda x, words, scale: by_blocks(x, words, scale, weights)) if fits else None
    if int8 is None or packed_rows:
        return None
    if activations != "float":
        return lambda x, words, scale: by_codes(x, words, scale, weights, as_int8)
    if not isinstance(weights.format.codes, Integers):
        return None

    def to_float_accuracy(x: Any, words: Any, scale: Any) -> Any:
        m, k = x.shape
        # of groups there are sums for each; those of rows that lie along k are all there at a time
        pays = {"nk": True, "kn": m < 512 or k >= 3 * MANY, "gnk": 4 * m * words.shape[0] <= k}
        return (by_digits if k >= MANY and pays[weights.by] else converted)(x, words, scale, weights)

    return to_float_accuracy


def on_cpus(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``fast`` on CPUs and ``plain`` elsewhere, functions of rows [m, k] and of other arrays that give [m, n].

    Its derivatives are those of ``plain``.  Mapped over an axis, rows are so many rows more; where the other arrays are
    mapped, one after the other.
    """
    rows = jax.custom_batching.custom_vmap(fast)

    @rows.def_vmap
    def _(size: int, mapped: Sequence[bool], x: Any, *others: Any) -> tuple[Any, bool]:
        if not any(mapped[1:]):
            return rows(x.reshape(size * x.shape[1], x.shape[2]), *others).reshape(size, x.shape[1], -1), True
        args = (x, *others)
        own = tuple(a for a, m in zip(args, mapped, strict=True) if m)

        def one(own: tuple[Any, ...]) -> Any:
            it = iter(own)
            return rows(*(next(it) if m else a for a, m in zip(args, mapped, strict=True)))

        return lax.map(one, own), True

    @jax.custom_jvp
    def f(*arrays: Any) -> Any:
        return lax.platform_dependent(*arrays, cpu=rows, default=plain)

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(plain, primals, tangents)

    return f


def by_codes(x: Any, words: Any, scale: Any, weights: Weights, as_int8: Any) -> Any:
    """The product of rows that are quantized to int8, each by a scale of its own, where there are groups one for each."""
    if weights.by != "gnk":
        codes, own = as_int8(x, 1)
        return of_digits(Digits(codes[None], own), words, scale, weights)
    codes, own = as_int8(x.reshape(x.shape[0], words.shape[0], -1), 2)
    return of_digits(Digits(codes.reshape(1, *x.shape), own.T), words, scale, weights)


def by_digits(x: Any, words: Any, scale: Any, weights: Weights) -> Any:
    """The product of float32 [m, k] with integers, to float accuracy: float32 [m, n]."""
    m = x.shape[0]
    largest, ratio = spread(x)
    little = weights.by != "gnk" and (m <= ROWS or m * words.size * weights.per <= LITTLE)
    counts = {WIDE: 4} if little else {PLAIN: 3, WIDE: 4}
    which: Any = sum((~(ratio <= np.float32(most))).astype(jnp.int32) for most in counts)
    if m > AT_ONCE and m % AT_ONCE == 0:
        which = lax.optimization_barrier(jnp.max(which.reshape(-1, AT_ONCE), 1))
    ways = [lambda count=count: of_digits(digits(x, largest, count), words, scale, weights) for count in counts.values()]
    return lax.switch(jnp.max(which), [*ways, lambda: converted(x, words, scale, weights)])


def of_digits(d: Digits, words: Any, scale: Any, weights: Weights) -> Any:
    """The product of rows of digits with integers."""
    int8: Any = integers(weights.format, weights.zero_point)
    if weights.by == "gnk":
        return _of_groups(d, words, scale, weights, int8)
    n = words.shape[0 if weights.by == "nk" else 1]
    if weights.by == "nk":
        d = d._replace(of=in_order(d.of, weights.per, words.shape[1]).reshape(*d.of.shape[:2], -1))

    def block(words: Any, scale: Any) -> Any:
        codes, unit = int8(words)
        return summed(d, laid_out(codes, 2), scale, unit, weights.by)

    rows, k = math.prod(d.of.shape[:2]), d.of.shape[2]
    whole = weights.by == "kn" or (weights.per == 1 and rows <= TALL)
    return side_by_side(
        block, n, n if whole else block_of(n, min(2 * BLOCK // k, max(128, BLOCK // rows))), (words, scale), 0
    )


def _of_groups(d: Digits, words: Any, scale: Any, weights: Weights, int8: Any) -> Any:
    """Some groups after others: the sums of integers times scales, in float32; of digits what the sum has lost beside it.

    In here rows come last, [n, m]. Codes of groups too short to fill a register are those of several n in one row, which
    meet rows of x that are zero for all but one of them.
    """
    groups, n, w = words.shape
    count, m, k = d.of.shape
    join = REGISTER // w if weights.per > 1 and REGISTER % w == 0 and n % (REGISTER // w) == 0 else 1
    rows = join * count * m
    some = layout.divisor(
        groups, max(1, min(SOME, groups // 2, 4 * BLOCK // (n * w * weights.per), BLOCK // (n * count * m)))
    )
    cut = lambda a, *shape: a.reshape(groups // some, some, *shape)
    x = jnp.moveaxis(in_order(d.of.reshape(count * m, groups, k // groups), weights.per, w), 1, 0)
    alone = jnp.eye(join, dtype=jnp.int8)[:, None, None, :, None]
    x = filled((x[:, None, :, :, None, :] * alone).reshape(groups, rows, -1), 1)

    def product(p: Any) -> Any:
        x, own, words, scale = p
        codes, unit = int8(words)
        sums = lax.dot_general(
            laid_out(codes, 3), x, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32
        )[:, :, :rows].reshape(some, n, count, m)  # fmt: skip
        scale = scale * np.float32(unit)
        owns = [d.scale] * some if own is None else list(own)
        each = zip(sums, scale, owns, strict=True)
        # a sum of terms: of a reduction XLA makes a step of its own
        return functools.reduce(operator.add, (d.together(jnp.moveaxis(s, 1, 0), c[:, None], o) for s, c, o in each))

    def step(sums: Any, p: Any) -> Any:
        b = product(p)
        if d.unit == 1:
            return (sums[0] + b, sums[1]), None
        return rounding.added(sums, lax.optimization_barrier(b)), None

    own = cut(d.scale, m) if d.scale.ndim > 1 else None
    each = (cut(x, *x.shape[1:]), own, cut(words, n // join, join * w), cut(scale, n))
    zero = jnp.zeros_like(jax.eval_shape(lambda p: product(jax.tree.map(lambda a: a[0], p)), each))  # varying as results do
    return rounding.total(lax.scan(step, (zero, zero), each)[0]).T


def converted(x: Any, words: Any, scale: Any, weights: Weights) -> Any:
    """The product in float32, of codes that are converted a block at a time."""
    int8: Any = integers(weights.format, weights.zero_point)
    if weights.by == "kn":
        return _converted_rows(x, words) * (scale / BELOW)
    return _of_blocks(x, words, scale, weights, int8, jnp.float32, BLOCK // 4)


def _converted_rows(x: Any, words: Any) -> Any:
    k, n = words.shape
    step = min(k, max(16, BLOCK // 4 // n))

    def add(total: Any, i: Any) -> Any:
        at = jnp.minimum(i * step, k - step)  # what the last block has again does not count
        rows = lax.dynamic_slice_in_dim(x, at, step, 1)
        rows = jnp.where(jnp.arange(step) >= i * step - at, rows, np.float32(0)) if k % step else rows
        return total + jnp.matmul(rows, lax.dynamic_slice_in_dim(words, at, step, 0).astype(jnp.float32) * BELOW), None

    zero = jnp.zeros_like(jax.eval_shape(lambda x, w: jnp.matmul(x[:, :1], w[:1].astype(jnp.float32)), x, words))
    return lax.scan(add, zero, jnp.arange(-(-k // step)))[0]


def by_blocks(x: Any, words: Any, scale: Any, weights: Weights) -> Any:
    """The product of both as bfloat16, summed in float32: float32 [m, n]."""
    decode: Any = bfloats(weights.format, weights.zero_point)
    return _of_blocks(x, words, scale, weights, decode, jnp.bfloat16, BLOCK)


def _of_blocks(x: Any, words: Any, scale: Any, weights: Weights, decode: Any, dtype: Any, most: int) -> Any:
    """At most so many codes at a time in ``dtype``: a block of n, [n, k], or of groups, of which sums are added up."""
    if weights.by == "gnk":
        return _of_blocks_of_groups(x, words, scale, weights, decode, dtype, 4 * most)
    n, width = words.shape
    m, k = x.shape
    x = in_order(x.astype(dtype), weights.per, width).reshape(m, -1)

    def block(words: Any, scale: Any) -> Any:
        codes, unit = decode(words)
        if dtype == jnp.float32:
            codes, unit = codes.astype(dtype) * BELOW, unit / BELOW
        return whole(x, laid_out(codes.astype(dtype), 2), "nk", jnp.float32) * (scale * np.float32(unit))

    return side_by_side(block, n, block_of(n, min(most // k, -(-n // 4))), (words, scale), 0)


def _of_blocks_of_groups(x: Any, words: Any, scale: Any, weights: Weights, decode: Any, dtype: Any, most: int) -> Any:
    """Scales are multiplied into what is converted."""
    groups, n, width = words.shape
    m, k = x.shape
    some = layout.divisor(groups, max(1, min(groups // 4, most * groups // (n * k))))
    cut = lambda a: a.reshape(groups // some, some, *a.shape[1:])
    x = in_order(x.reshape(m, groups, k // groups).astype(dtype), weights.per, width)

    def add(y: Any, p: Any) -> Any:
        x, words, scale = p
        codes, unit = decode(words)
        codes = codes.astype(jnp.float32) * (scale * np.float32(unit))[..., None, None]
        codes = jnp.moveaxis(_rounded(codes) if dtype == jnp.bfloat16 else codes, 0, 1)
        return y + whole(x, laid_out(codes, 2), "nk", jnp.float32), None

    each = (jnp.moveaxis(x.reshape(m, groups // some, -1), 1, 0), cut(words), cut(scale))
    one = jax.eval_shape(lambda p: add(0, jax.tree.map(lambda a: a[0], p))[0], each)
    return lax.scan(add, jnp.zeros_like(one), each)[0]  # varying as results do
