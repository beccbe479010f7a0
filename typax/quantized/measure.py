"""What quantizing does to an array, and training that sees it.

error(x, format)     how far dense(quantize(x)) is from x
fake(x, format)      dense(quantize(x)): the very values that are stored, with the derivative of x
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from typax._op import op
from typax._structural import dense
from typax.quantized.quantizing import quantize
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
    """
    q = quantize(x, format, **how)
    low, high = limits(q)
    x = jnp.asarray(x, jnp.float32)
    d = dense(q).astype(jnp.float32)
    counts = jnp.isfinite(x) & jnp.isfinite(d)
    n = max(int(jnp.sum(counts)), 1)
    off = jnp.where(counts, x - d, 0)
    power, noise = (float(jnp.sum(jnp.square(jnp.where(counts, a, 0)))) for a in (x, off))
    slack = 1 + 2.0**-20  # a largest value may be that much beyond, by rounding
    beyond = (x > high * slack) & (x > 0) | (x < low * slack) & (x < 0)
    share = lambda a: float(jnp.sum(a & counts)) / n
    sqnr = 10 * float(jnp.log10(power / noise)) if noise and power else float("inf") if power else 0.0
    rms = (noise / n) ** 0.5
    return Error(float(jnp.max(jnp.abs(off), initial=0.0)), rms, sqnr, share(beyond), share((d == 0) & (x != 0)))


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
