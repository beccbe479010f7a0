"""What quantizing does to an array, and training that sees it.

error(x, format)     how far dense(quantize(x)) is from x
fake(x, format)      dense(quantize(x)): the very values that are stored, with the derivative of x
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from typax import _jax
from typax._op import op
from typax._structural import dense
from typax.quantized.quantizing import quantize
from typax.quantized.rounding import exponent, times_power
from typax.quantized.types import Quantized, limits_of


class Error(NamedTuple):
    """Largest and root mean square error; signal to quantization noise, in dB; shares of values that are saturated, and of
    values that are not zero and stand for zero."""

    max: float
    rms: float
    sqnr: float
    saturated: float
    zeroed: float


@op(reference=None)
def limits(q: Quantized) -> Any:
    """The least and the largest number that each entry of a quantized array could stand for: two float32 arrays of its
    shape."""
    return limits_of(q)


def error(x: Any, format: Any = "int8", **how: Any) -> Error:
    """What `typax.quantize` with these arguments makes of an array; entries that are NaN or infinite are left out.

    Raises:
      ValueError, TypeError: as `typax.quantize`.
      TypeError: if ``x`` is traced, since it gives numbers.
    """
    if isinstance(x, _jax.Tracer):
        raise TypeError("typax.quantized.error gives numbers, and its array is traced; call it outside of jit and vmap")
    q = quantize(x, format, **how)
    low, high = limits(q)
    x = jnp.asarray(x, jnp.float32)
    d = dense(q).astype(jnp.float32)
    counts = jnp.isfinite(x) & jnp.isfinite(d)
    n = max(int(jnp.sum(counts)), 1)
    x, d = jnp.where(counts, x, 0), jnp.where(counts, d, 0)
    slack = 1 + 2.0**-20  # a largest value may be that much beyond, by rounding
    beyond = (x > high * slack) & (x > 0) | (x < low * slack) & (x < 0)
    share = lambda a: float(jnp.sum(a & counts)) / n
    saturated, zeroed = share(beyond), share((d == 0) & (x != 0))
    unit = exponent(jnp.max(jnp.abs(x), initial=0.0))  # squares of tiny numbers are 0, of huge ones infinite
    x, d = times_power(x, -unit), times_power(d, -unit)
    power, noise = (float(jnp.sum(jnp.square(a))) for a in (x, x - d))
    sqnr = 10 * math.log10(power / noise) if noise and power else math.inf if power else 0.0
    most = float(jnp.max(jnp.abs(x - d), initial=0.0))
    return Error(math.ldexp(most, int(unit)), math.ldexp((noise / n) ** 0.5, int(unit)), sqnr, saturated, zeroed)


def fake(x: Any, format: Any = "int8", *, gradient: str = "straight", **how: Any) -> Any:
    """Quantize and make dense again: what training is to see of weights that will be stored so, bit by bit.

    ``gradient``: ``"straight"``, the derivative is that of the identity; ``"clipped"``, it is zero for values beyond the
    range of their codes, which there are where scales are given, searched or percentiles.

    Raises:
      ValueError: for another ``gradient``, and as `typax.quantize`.
    """
    if gradient not in ("straight", "clipped"):
        raise ValueError(f'typax.quantized.fake: gradient={gradient!r}; it is "straight" or "clipped"')
    if gradient == "clipped":
        still = jax.lax.stop_gradient(x)
        low, high = limits(quantize(still, format, **how))
        wide = still.astype(jnp.float32)
        x = jnp.where((wide >= low) & (wide <= high), x, still)
    return dense(quantize(x, format, **how))
