"""The scale of each group: from a statistic of its values to what is held.

    s = max(a · fl(1/q), 2^-126)           a: the largest magnitude, or what the search found;  q: the largest code
    s = 2^(floor(log2 a) - emax)           e8m0 (OCP MX v1.0, section 6.3); other ways to round the exponent: `EXPONENTS`
    s = g · e4m3(a/6 / g)                  nvfp4, with g = max a / (448 · 6)

A group that holds NaN or an infinity has scale NaN and codes 0: it stands for NaN as a whole, and no other group does.
Reductions of XLA:CPU drop NaN in large arrays, so it is looked for by a sum of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from typax.quantized.format import Floats, Format, Integers
from typax.quantized.rounding import TINY, by_reciprocal, nearest, number, scaled, times_power

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


def held(format: Format, a: Any, inner: Sequence[int], exponents: str = "floor") -> Held:
    """Scales for groups whose largest magnitude is ``a``, without those of a second level."""
    kind, q = format.scale.dtype, format.codes.largest
    if kind == "e8m0":
        e = shared_exponent(format, a, exponents)
        return Held((e + 127).astype(jnp.uint8), lambda rows: times_power(rows, -over(e, inner)))
    if kind == "float8_e4m3fn":
        s8 = jnp.clip(divided(a, np.float32(q)), np.float32(2.0**-6), np.float32(448)).astype(jnp.float8_e4m3fn)
        r = 1 / s8.astype(jnp.float32)
        return Held(s8, lambda rows: rows * over(r, inner))
    return of_floats(format, a * np.float32(1 / q), inner, below=2.0**128 / q)


def of_floats(format: Format, s: Any, inner: Sequence[int], below: float = math.inf) -> Held:
    """Scales that are floats, finite ones below a number: rounded to the dtype in which they are held, and not below its
    normal numbers."""
    dtype = jnp.dtype(format.scale.dtype)
    s = jnp.maximum(s, np.float32(jnp.finfo(dtype).tiny) if dtype != jnp.float32 else TINY)
    if dtype != jnp.float32:
        info = jnp.finfo(dtype)
        s = lax.reduce_precision(s, info.nexp, info.nmant)
    if below <= 2.0**126:  # no reciprocal is subnormal
        # else one is divided by the scale for each number, where scales lie beside each other
        return Held(s.astype(dtype), lambda rows: rows * over(lax.optimization_barrier(1 / s), inner))
    return Held(s.astype(dtype), lambda rows: by_reciprocal(rows, over(s, inner)))


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
    """Bits of the fraction of a code."""
    return int(jnp.finfo(format.codes.dtype).nmant) if isinstance(format.codes, Floats) else 1


# --- two levels ------------------------------------------------------------------------------------------------------


def two_levels(format: Format, a: Any, inner: Sequence[int]) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Scales in float8 with one float32 scale for all of them: ``s8``, ``g`` and what makes units."""
    q = np.float32(format.codes.largest)
    most = np.float32(448)
    g = jnp.maximum(divided(jnp.max(a, initial=0.0), most * q), TINY)
    s8 = jnp.clip(divided(divided(a, q), g), np.float32(2.0**-6), most).astype(jnp.float8_e4m3fn)
    r = (1 / g) / s8.astype(jnp.float32)
    return s8, g, lambda rows: rows * over(r, inner)


# --- what the scale is made of ---------------------------------------------------------------------------------------


def percentile(rows: Any, inner: Sequence[int], at: float, counts: Any) -> Any:
    """The magnitude below which ``at`` percent of each row lie; ``counts`` are those of a row that are no padding."""
    n = int(np.prod([rows.shape[i] for i in inner]))
    flat = jnp.abs(rows).reshape(*rows.shape[: rows.ndim - len(inner)], n)
    ordered = jnp.sort(flat, axis=-1)  # padding is zeros, which come first
    place = jnp.ceil(counts * np.float32(at / 100)).astype(jnp.int32)
    place = jnp.clip(n - counts.astype(jnp.int32) + place - 1, 0, n - 1)
    return jnp.take_along_axis(ordered, place[..., None], axis=-1)[..., 0]


def searched(format: Format, rows: Any, a: Any, inner: Sequence[int], exponents: str) -> Any:
    """The multiple of the largest magnitude ``a``, out of `SHRINKS`, with the least squared error."""
    rows = lax.optimization_barrier(rows)  # whatever is fused with it, the sums are the same

    def error(shrink: Any) -> Any:
        made = held(format, a * shrink, inner, exponents)
        codes = nearest(format, made.units(rows))
        back = scaled(format.scale.dtype, number(format, codes), over(made.scale, inner))
        return jnp.sum(jnp.square(rows - lax.optimization_barrier(back)), axis=tuple(inner))

    return _least(error, a)


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


def between(format: Format, low: Any, high: Any) -> tuple[Any, Any]:
    """Scale and zero point for groups of values from ``low`` <= 0 to ``high`` >= 0."""
    codes = format.codes
    assert isinstance(codes, Integers)
    steps = codes.high - codes.low
    s = jnp.maximum((high * np.float32(0.5) - low * np.float32(0.5)) * np.float32(2 / steps), TINY)
    return s, zero_point(format, low, s)


def zero_point(format: Format, low: Any, s: Any) -> Any:
    """The code of 0, where ``low`` has the least code."""
    codes = format.codes
    assert isinstance(codes, Integers)
    z = jnp.clip(jnp.round(by_reciprocal(-low, s)), 0, codes.high - codes.low) + codes.low
    return z.astype(jnp.int8 if codes.low < 0 else jnp.uint8)


def no_infinity(s: Any) -> Any:
    """Whether a given scale is one."""
    return (s >= 0) & (s < jnp.inf)
