"""The scale of each group: from a statistic of its values to what is held.

    s = max(a · fl(1/q), 2^-126)           a: the largest magnitude, or what the search found;  q: the largest code
    s = 2^(floor(log2 a) - emax)           e8m0 (OCP MX v1.0, section 6.3); other ways to round the exponent: `EXPONENTS`
    s = g · e4m3(a/6 / g)                  nvfp4, with g = max a / (448 · 6)

With a key, for stochastic rounding, scales are rounded up, so that nothing saturates, which would be a bias.

A group that holds NaN or an infinity has scale NaN and codes 0: it stands for NaN as a whole, and no other group does.
Reductions of XLA:CPU drop NaN in large arrays, so it is looked for by a sum of its own.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from typax.quantized.format import Format, Integers, Table
from typax.quantized.rounding import TINY, by_reciprocal, exponent, nearest, number, scaled, times_power

EXPONENTS = ("floor", "even", "ceil", "rceil")
SHRINKS = tuple(np.float32(1 - i / 64) for i in range(40))
"""What a search multiplies the largest magnitude by."""


class Held(NamedTuple):
    """Scales as they are held, and what makes numbers in their units of values (both without the bad groups)."""

    scale: Any
    units: Callable[[Any], Any]  # of rows; scales have axes for those of a row


def spoiled(rows: Any, inner: Sequence[int]) -> Any:
    """The rows that hold NaN or an infinity: of these alone x - x is not 0."""
    return jnp.isnan(jnp.sum(rows - rows, axis=tuple(inner)))


def over(scale: Any, inner: Sequence[int]) -> Any:
    """Scales with axes for those of a row."""
    return jnp.expand_dims(scale, tuple(inner))


def largest(rows: Any, inner: Sequence[int]) -> Any:
    return jnp.max(jnp.abs(rows), axis=tuple(inner), initial=0.0)


def reaching(format: Format, rows: Any, inner: Sequence[int]) -> Any:
    """What to take for the largest magnitude so that no value saturates: tables may end at other numbers below."""
    codes = format.codes
    if not isinstance(codes, Table) or codes.signed or codes.values[0] in (0, -codes.values[-1]):
        return largest(rows, inner)
    ends = (
        (jnp.max(rows, axis=tuple(inner), initial=0.0), codes.values[-1]),
        (jnp.min(rows, axis=tuple(inner), initial=0.0), codes.values[0]),
    )
    return jnp.maximum(*(end * np.float32(codes.largest / most) for end, most in ends))


def held(format: Format, a: Any, inner: Sequence[int], exponents: str = "floor", up: bool = False) -> Held:
    """Scales for groups whose largest magnitude is ``a``, without those of a second level; ``up``: rounded up."""
    kind, q = format.scale.dtype, format.codes.largest
    if kind == "e8m0":
        return _in_bytes(shared_exponent(format, a, exponents), inner)
    if kind == "float8_e4m3fn":
        return of_floats(format, divided(a, np.float32(q)), inner, 448.0, up)
    return of_floats(format, a * np.float32(1 / q), inner, 2.0**128 / q, up)


def of_floats(format: Format, s: Any, inner: Sequence[int], below: float = math.inf, up: bool = False) -> Held:
    """Scales that are floats, finite ones below a number: rounded to the dtype in which they are held, and not below its
    normal numbers."""
    dtype = jnp.dtype(format.scale.dtype)
    s = jnp.maximum(s, np.float32(jnp.finfo(dtype).tiny) if dtype != jnp.float32 else TINY)
    if dtype == jnp.float8_e4m3fn:
        s = to_e4m3(s, up).astype(jnp.float32)
    elif dtype != jnp.float32:
        info = jnp.finfo(dtype)
        exact, s = s, lax.reduce_precision(s, info.nexp, info.nmant)
        if up:  # to the next one of that many bits
            above = lax.bitcast_convert_type(s, jnp.int32) + np.int32(1 << (23 - info.nmant))
            s = jnp.where(
                s < exact, lax.reduce_precision(lax.bitcast_convert_type(above, jnp.float32), info.nexp, info.nmant), s
            )
    if below <= 2.0**126:  # no reciprocal is subnormal
        # else one is divided by the scale for each number, where scales lie beside each other
        return Held(s.astype(dtype), lambda rows: rows * over(lax.optimization_barrier(1 / s), inner))
    return Held(s.astype(dtype), lambda rows: by_reciprocal(rows, over(s, inner)))


def to_e4m3(s: Any, up: bool = False) -> Any:
    """Scales from 2^-6 to 448 in float8."""
    s = jnp.clip(s, np.float32(2.0**-6), np.float32(448))
    near = s.astype(jnp.float8_e4m3fn)
    if not up:
        return near
    bits = lax.bitcast_convert_type(near, jnp.uint8)
    return lax.bitcast_convert_type(bits + (near.astype(jnp.float32) < s).astype(jnp.uint8), jnp.float8_e4m3fn)


def of_powers(s: Any, inner: Sequence[int]) -> Held:
    """Given scales as bytes e8m0, rounded up to powers of two."""
    bits = lax.bitcast_convert_type(s, jnp.int32)
    return _in_bytes(jnp.minimum(((bits + 0x7FFFFF) >> 23) - 127, 127), inner)


def _in_bytes(e: Any, inner: Sequence[int]) -> Held:
    return Held((e + 127).astype(jnp.uint8), lambda rows: times_power(rows, -over(e, inner)))


def divided(a: Any, by: Any) -> Any:
    """a / by, rounded once: XLA would multiply by the reciprocal of a constant, or of what is broadcast."""
    return a / lax.optimization_barrier(jnp.broadcast_to(by, a.shape))


def shared_exponent(format: Format, a: Any, exponents: str) -> Any:
    """The exponent of a power of two for groups whose largest magnitude is ``a``, int32 from -127 to 127."""
    if exponents not in EXPONENTS:
        raise ValueError(f"exponents={exponents!r} is none of {', '.join(map(repr, EXPONENTS))}")
    q = np.float32(format.codes.largest)
    emax = int(np.floor(np.log2(q)))
    if exponents == "rceil":
        a = divided(a, q)
        emax = 0
    bits = lax.bitcast_convert_type(a, jnp.int32)
    if exponents == "even":  # round to the precision of the codes first
        kept = _mantissa(format)
        bits = bits + (1 << (22 - kept))
    e = ((bits >> 23) & 0xFF) - 127 - emax
    if exponents in ("ceil", "rceil"):
        e = e + (bits & 0x7FFFFF != 0).astype(jnp.int32)
    return jnp.clip(jnp.where(a == 0, -127, e), -127, 127)


def _mantissa(format: Format) -> int:
    """Bits of the fraction of the largest codes, those from 2^emax on, which are ``gap`` apart."""
    return max(math.frexp(format.codes.largest)[1] - math.frexp(format.codes.gap)[1], 0)


# --- two levels ------------------------------------------------------------------------------------------------------


def level_groups(format: Format, shape: tuple[Any, ...]) -> tuple[int, ...]:
    """The groups of scales that are quantized, which have this shape: fewer than a group are all of one."""
    group = format.scale.group
    if group is None:
        return (0,) * len(shape)
    whole = isinstance(shape[-1], int) and shape[-1] < group
    return (*(1,) * (len(shape) - 1), 0 if whole else group)


def two_levels(format: Format, a: Any, inner: Sequence[int], up: bool = False) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Scales in float8 with one float32 scale for all of them: ``s8``, ``g`` and what makes units."""
    q = np.float32(format.codes.largest)
    g = jnp.maximum(divided(jnp.max(a, initial=0.0), np.float32(448) * q), TINY)
    s8 = to_e4m3(divided(divided(a, q), g), up)
    r = (1 / g) / s8.astype(jnp.float32)
    return s8, g, lambda rows: rows * over(r, inner)


# --- what the scale is made of ---------------------------------------------------------------------------------------


def percentile(rows: Any, inner: Sequence[int], at: float, counts: np.ndarray) -> Any:
    """The magnitude that at least ``at`` percent of each row do not exceed; ``counts`` are those of a row that are no
    padding."""
    n = math.prod(rows.shape[i] for i in inner)
    if not isinstance(n, int):
        raise ValueError(
            f"a percentile is counted, and {n} values share a scale, whose number is not known; give it a group"
        )
    flat = jnp.abs(rows).reshape(*rows.shape[: rows.ndim - len(inner)], n)
    ordered = jnp.sort(flat, axis=-1)  # padding is zeros, which come first
    share = Fraction(repr(at)) / 100  # as it is written: 99.9 percent of 1000 are 999, and of a float a little more
    places = {c: max(n - c + math.ceil(c * share) - 1, 0) for c in map(int, np.unique(counts))}
    place = np.vectorize(places.get, otypes=[np.int32])(counts)
    place = jnp.broadcast_to(place, ordered.shape[:-1])
    return jnp.take_along_axis(ordered, place[..., None], axis=-1)[..., 0]


def searched(format: Format, rows: Any, a: Any, inner: Sequence[int], exponents: str) -> Any:
    """The multiple of the largest magnitude ``a``, out of `SHRINKS`, with the least squared error."""
    rows = lax.optimization_barrier(rows)  # whatever is fused with it, the sums are the same

    def error(shrink: Any) -> Any:
        made = held(format, a * shrink, inner, exponents)
        codes = nearest(format, made.units(rows))
        return squared(rows, scaled(format.scale.dtype, number(format, codes), over(made.scale, inner)), a, inner)

    return _least(error, a)


def squared(rows: Any, back: Any, a: Any, inner: Sequence[int]) -> Any:
    """The squared error of each row, whose largest magnitude is ``a``, in units of about that: squares of tiny numbers are
    0, of huge ones infinite."""
    off = rows - lax.optimization_barrier(back)
    return jnp.sum(jnp.square(times_power(off, -over(exponent(a), inner))), axis=tuple(inner))


def searched_between(error: Callable[[Any], Any], low: Any, high: Any) -> tuple[Any, Any]:
    """Likewise for the least and the largest value of a group: the multiples of both."""
    best = _least(error, jnp.ones_like(high))
    return low * best, high * best


def _least(error: Callable[[Any], Any], a: Any) -> Any:
    def step(i: Any, best: Any) -> Any:
        shrink = jnp.asarray(SHRINKS)[i]
        e = error(shrink)
        better = e < best[0]
        return jnp.where(better, e, best[0]), jnp.where(better, a * shrink, best[1])

    return lax.fori_loop(1, len(SHRINKS), step, (error(SHRINKS[0]), a))[1]


def between(format: Format, low: Any, high: Any, inner: Sequence[int], up: bool = False) -> tuple[Held, Any]:
    """Scales and zero points for groups of values from ``low`` <= 0 to ``high`` >= 0; ``up``: a step is left for what the
    zero point is rounded by, so that nothing saturates."""
    codes = format.codes
    assert isinstance(codes, Integers)
    steps = codes.high - codes.low
    steps = steps - 1 if up and steps > 1 else steps
    made = of_floats(format, (high * np.float32(0.5) - low * np.float32(0.5)) * np.float32(2 / steps), inner, up=up)
    return made, zero_point(format, low, made.scale.astype(jnp.float32), up)


def zero_point(format: Format, low: Any, s: Any, up: bool = False) -> Any:
    """The code of 0, where ``low`` has the least code, or the one above it."""
    codes = format.codes
    assert isinstance(codes, Integers)
    z = (jnp.ceil if up else jnp.round)(by_reciprocal(-low, s))
    z = jnp.clip(z, 0, codes.high - codes.low) + codes.low
    return z.astype(jnp.int8 if codes.low < 0 else jnp.uint8)


def no_infinity(s: Any) -> Any:
    """Whether a given scale is one."""
    return (s >= 0) & (s < jnp.inf)
