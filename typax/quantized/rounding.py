"""From numbers to codes and back: ``code = nearest(x · fl(1/scale))``, ``number(code)``.

What a compiler may do with a program must not change a code, so each step is one that XLA keeps:

* a quotient x/s is written x · fl(1/s), since XLA rewrites it so, and a scale a · fl(1/q), for the same reason;
* no sum follows a product without a clip or a barrier between them, else they are fused, and rounded once instead of twice;
* exponents are read off bits (log2 and exp2 are inexact even at powers of two), and so are subnormal numbers, which count as
  zeros of their sign: hardware flushes them, in some operations and not in others;
* bfloat16 is rounded on entry, since a producer that is fused with this one may give more bits.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from typax.quantized.format import Floats, Format, Integers, Table

TINY = np.float32(2.0**-126)
"""The smallest scale: the smallest normal float32."""


MAGIC = np.float32(1.5 * 2.0**23)
"""Of x + MAGIC, where |x| <= 2^22, the lowest bits are those of the integer nearest to x, ties to even."""


def exceeds(shape: Sequence[Any], most: int) -> bool:
    """Whether an array has more entries; of one with a symbolic size it is not known."""
    return all(isinstance(n, int) for n in shape) and math.prod(shape) > most


def as_float32(x: Any) -> Any:
    """Each number rounded once."""
    if x.dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, 8, 7)
    return x.astype(jnp.float32)


def flushed(x: Any) -> Any:
    """float32 with subnormal numbers as zeros of their sign."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    zero = lax.bitcast_convert_type(bits & np.uint32(0x80000000), jnp.float32)
    return jnp.where(bits & np.uint32(0x7F800000) == 0, zero, x)


def normal_or_zero(x: Any) -> Any:
    """float32 with 0 for what is subnormal, infinite or NaN."""
    magnitude = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)
    return jnp.where(magnitude - np.uint32(0x00800000) < np.uint32(0x7F000000), x, np.float32(0))


def entering(x: Any) -> Any:
    """As float32, each number rounded once, subnormal ones to zeros."""
    return flushed(as_float32(x))


def exponent(x: Any) -> Any:
    """floor(log2 x) of positive float32, int32; below the normal ones -127."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> 23) & 0xFF) - 127


def power(e: Any) -> Any:
    """2^e, float32, for integers from -126 to 127."""
    return lax.bitcast_convert_type((e + 127) << 23, jnp.float32)


def times_power(x: Any, e: Any) -> Any:
    """x · 2^e by two powers of two, so that neither is subnormal; each product is exact."""
    half = e >> 1
    return (x * power(half).astype(x.dtype)) * power(e - half).astype(x.dtype)


def added(sums: tuple[Any, Any], b: Any) -> tuple[Any, Any]:
    """A sum and what it has lost, with ``b`` added: Knuth's a + b = s + lost."""
    a, lost = sums
    s = a + b
    rest = s - a
    return s, lost + ((a - (s - rest)) + (b - rest))


def total(sums: tuple[Any, Any]) -> Any:
    """The sum with what it has lost."""
    y, lost = sums
    return jnp.where(jnp.isfinite(lost), y + lost, y)


def by_reciprocal(x: Any, scale: Any) -> Any:
    """x · fl(1/scale); a huge scale, of which the reciprocal would be subnormal, is first made smaller with x."""
    less = jnp.where(scale > np.float32(2.0**100), np.float32(2.0**-32), np.float32(1))
    return (x * less) * (1 / (scale * less))


# --- number -> code ------------------------------------------------------------------------------------------------


def nearest(format: Format, y: Any, zero_point: Any = None, noise: Any = None) -> Any:
    """The codes of numbers in units of the scale, saturated; unpacked, of the format's storage dtype.

    Args:
      y: float32, without NaN.
      zero_point: the code of 0, of the codes' dtype.
      noise: float32 in [0, 1): rounds up where the remainder is larger (stochastic rounding), so that numbers that codes
        stand for stay; ties to even without.
    """
    codes = format.codes
    if isinstance(codes, Integers):
        low, high = (-codes.high if codes.low < 0 else 0, codes.high) if zero_point is None else (codes.low, codes.high)
        span = max(abs(low), high) if zero_point is None else high - low
        y = jnp.clip(y, low if zero_point is None else -span, span)
        if zero_point is None and noise is None:  # the clip keeps the product before it and this sum apart
            bits = lax.bitcast_convert_type(y + MAGIC, jnp.int32)
            return bits.astype(jnp.int8 if codes.low < 0 else jnp.uint8)
        y = jnp.round(y) if noise is None else _up_by(y, noise)
        if zero_point is not None:
            y = y + zero_point.astype(jnp.float32)
        y = jnp.clip(y, low, high)
        return y.astype(jnp.int8) if codes.low < 0 else y.astype(jnp.uint8)
    if isinstance(codes, Floats):
        dtype = jnp.dtype(codes.dtype)
        y = jnp.clip(y, -codes.largest, codes.largest)
        if noise is not None:
            info = jnp.finfo(dtype)
            e = jnp.maximum(exponent(jnp.abs(y)), int(info.minexp)) - int(info.nmant)
            steps = _up_by(jnp.abs(times_power(y, -e)), noise)
            y = jnp.copysign(jnp.minimum(times_power(steps, e), codes.largest), y)
        return y.astype(dtype)
    return _in_table(codes, y, noise)


def _up_by(y: Any, noise: Any) -> Any:
    """The integer below, or above where the remainder, which is exact, is larger than ``noise``."""
    below = jnp.floor(y)
    return below + (y - below > noise).astype(jnp.float32)


def _in_table(table: Table, y: Any, noise: Any) -> Any:
    values = np.asarray(table.values, np.float32)
    y = jnp.clip(y, -table.largest if table.signed else values[0], values[-1])
    t = jnp.abs(y) if table.signed else y
    if noise is not None:
        at = _count(t, values[1:], ">=")
        low, high = values[:-1], values[1:]
        at = jnp.minimum(at, len(low) - 1)
        part = (t - jnp.take(low, at)) * jnp.take(1 / (high - low), at)
        code = at + (jnp.minimum(part, 1) > noise).astype(jnp.int32)
    else:
        middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        code = _count(t, middles, ">" if table.ties == "lower" else "even")
    code = code.astype(jnp.uint8)
    if table.signed:
        sign = lax.bitcast_convert_type(y, jnp.uint32) >> 31
        code = code | (sign.astype(jnp.uint8) << (len(values) - 1).bit_length())
    return code


def _count(t: Any, edges: np.ndarray, ties: str) -> Any:
    """How many edges lie below ``t``; an edge that is met counts by ``ties``: never, always, or to the even count."""
    if len(edges) > 32:
        found = lambda side: jnp.searchsorted(edges, t, side=side, method="scan_unrolled").astype(jnp.int32)
        if ties == "even":
            below = found("left")
            return jnp.where(below & 1 == 1, found("right"), below)
        return found("left" if ties == ">" else "right")
    total = jnp.zeros(t.shape, jnp.int32)
    for i, edge in enumerate(edges):
        above = t >= edge if ties == ">=" or (ties == "even" and i % 2) else t > edge
        total = total + above.astype(jnp.int32)
    return total


def zero_code(format: Format) -> Any:
    """The code of the number 0, where there is no zero point."""
    return np.uint8(format.codes.zero) if isinstance(format.codes, Table) else 0


# --- code -> number ------------------------------------------------------------------------------------------------


def number(format: Format, codes: Any, dtype: Any = jnp.float32) -> Any:
    """What codes (unpacked) stand for, in units of the scale; exact in float32."""
    if not isinstance(format.codes, Table):
        return codes.astype(dtype)
    table = format.codes
    values = np.asarray(table.values, np.float32)
    bits = (len(values) - 1).bit_length()
    if len(values) > 32:
        magnitudes = codes & np.uint8((1 << bits) - 1) if table.signed else codes
        found = looked_up(jnp.asarray(values, dtype), magnitudes)
    else:
        found = _select(codes, [jnp.asarray(v, dtype) for v in values], bits)
    if table.signed:
        found = jnp.where((codes >> np.uint8(bits)) & np.uint8(1) == 1, -found, found)
    return found


def looked_up(values: Any, codes: Any) -> Any:
    """values[codes], partitioned as the codes are."""
    codes, parts = codes.astype(jnp.int32), jax.typeof(codes).sharding.spec
    if any(part is not None for part in parts):
        return values.at[codes].get(out_sharding=jax.P(*parts))
    return jnp.take(values, codes)


def _select(codes: Any, values: Any, bits: int) -> Any:
    """values[codes] by a tree of selections, which vectorizes where a lookup does not."""
    if len(values) == 1:
        return values[0]
    half = 1 << (bits - 1)
    low = _select(codes, values[:half], bits - 1)
    if len(values) <= half:
        return low
    high = _select(codes, values[half:], bits - 1)
    return jnp.where((codes >> np.uint8(bits - 1)) & np.uint8(1) == 1, high, low)


def decoded(dtype: str, scale: Any) -> Any:
    """Scales as they are held, as float32; of bytes e8m0 see `scaled`."""
    if dtype != "e8m0":
        return scale.astype(jnp.float32)
    return scaled(dtype, jnp.ones(scale.shape, jnp.float32), scale)


def scaled(dtype: str, numbers: Any, scale: Any) -> Any:
    """numbers · scale, for scales as they are held; float32, or float64 if the numbers are."""
    if dtype != "e8m0":
        return numbers * scale.astype(numbers.dtype)
    return jnp.where(scale == np.uint8(255), jnp.nan, times_power(numbers, scale.astype(jnp.int32) - 127))


def noise(key: Any, shape: tuple[int, ...]) -> Any:
    """Uniform in [0, 1)."""
    return jax.random.uniform(key, shape, jnp.float32)
