"""From an array to codes and scales: the one way in, whoever asks.

    x -> rows (`layout.split`) -> a scale for each (`scales`) -> codes (`rounding.nearest`) -> bytes (`packing`)

Post-training quantization, the forward pass of quantization-aware training, retraction and the writers of files all come
here, so that they agree in every bit.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from typax.quantized import layout, packing, scales
from typax.quantized.format import Format, Integers
from typax.quantized.layout import Groups
from typax.quantized.rounding import as_float32, entering, flushed, nearest, noise, normal_or_zero, scaled, zero_code
from typax.quantized.scales import over


@dataclass(frozen=True)
class Choice:
    """How scales are chosen.

    ``by``: ``"absmax"``, ``"mse"``, ``"percentile"`` or ``("percentile", 99.9)``; ``zero_point``: whether there is one;
    ``exponents``: how the exponent of a power of two is rounded, one of `scales.EXPONENTS`.
    """

    by: Any = "absmax"
    zero_point: bool = False
    exponents: str = "floor"

    def check(self, format: Format, where: str) -> "Choice":
        if self.percent is None and self.by not in ("absmax", "mse"):
            raise ValueError(
                f'{where}: scale={self.by!r}; it is "absmax", "mse", "percentile", ("percentile", p), or an array of scales'
            )
        if self.percent is not None and not 0 < self.percent <= 100:
            raise ValueError(f"{where}: scale={self.by!r}, but a percentile lies above 0 and is at most 100")
        floats = format.scale.of is None and format.scale.dtype in ("float32", "float16", "bfloat16")
        if self.zero_point and not (isinstance(format.codes, Integers) and floats):
            raise ValueError(f"{where}: {format.name} has no zero point; formats of integers with float scales can have one")
        if self.exponents not in scales.EXPONENTS:
            raise ValueError(f"{where}: exponents={self.exponents!r} is none of {', '.join(map(repr, scales.EXPONENTS))}")
        if self.exponents != "floor" and format.scale.dtype != "e8m0":
            raise ValueError(
                f"{where}: exponents= is for scales that are powers of two, and {format.name} has {format.scale.dtype}"
            )
        return self

    @property
    def percent(self) -> float | None:
        if self.by == "percentile":
            return 99.9
        pair = isinstance(self.by, tuple) and len(self.by) == 2 and self.by[0] == "percentile"
        real = pair and isinstance(self.by[1], int | float | np.integer | np.floating) and not isinstance(self.by[1], bool)
        return float(self.by[1]) if real else None


@dataclass(frozen=True)
class Parts:
    """What a quantized array is made of; ``scale`` may be `Parts`, in ``scale_groups`` of the format's second level."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    offset: Any = None
    scale_groups: Groups = ()


def encode(
    format: Format, x: Any, groups: Groups, choice: Choice, given: dict[str, Any] | None = None, where: str = "quantize"
) -> Parts:
    """Quantize ``x`` in rows of ``groups``.

    ``given`` may hold ``scale`` and ``zero_point`` (of the shape of the scales, or broadcastable to it) and ``key``, for
    stochastic rounding.
    """
    given = given or {}
    x = as_float32(x)
    # reductions are of what enters as it is: XLA would fuse them with what is done to bits, and use no vectors
    floats = format.scale.of is None and jnp.issubdtype(format.scale_storage, jnp.floating)
    if not given and choice == Choice() and isinstance(format.codes, Integers) and floats:
        return _absmax_integers(format, x, groups, where)
    raw = layout.split(x, groups, where)
    inner = tuple(range(len(layout.outer_axes(groups)), raw.ndim))
    rows = flushed(raw)
    bad = scales.spoiled(raw, inner)
    zero = None
    nested: Any = None
    up = "key" in given
    if "scale" in given:
        s, wrong = _given_scale(format, given["scale"], bad.shape, where)
        bad = bad | wrong
        made = scales.of_floats(format, s, inner) if floats else scales.of_powers(s, inner)
        if choice.zero_point:
            zero = _given_zero(format, given, rows, bad, inner, made.scale.astype(jnp.float32), where)
    elif choice.zero_point:
        low, high = _ends(format, rows, x, groups, inner, bad, choice)
        made, zero = scales.between(format, low, high, inner, up)
    else:
        a = jnp.where(
            bad, np.float32(0), flushed(scales.largest(raw, inner) if not up else scales.reaching(format, raw, inner))
        )
        if choice.percent is not None:
            counts = _counts(x.shape, groups)
            a = jnp.where(bad, np.float32(0), scales.percentile(rows, inner, choice.percent, counts))
        if choice.by == "mse":
            plain = format if format.scale.of is None else with_plain_scales(format)
            a = scales.searched(plain, jnp.where(over(bad, inner), np.float32(0), rows), a, inner, choice.exponents)
        if format.scale.of is None:
            made = scales.held(format, a, inner, choice.exponents, up)
        else:
            made, nested = _second_level(format, a, bad, inner, up)
    if nested is None and floats:
        bad = bad | jnp.isinf(made.scale)  # one that float16 does not hold
    units = jnp.where(over(bad, inner), np.float32(0), made.units(rows))
    random = noise(given["key"], rows.shape) if "key" in given else None
    codes = nearest(format, units, None if zero is None else over(zero, inner), random)
    codes = packed(format, codes, zero, inner)
    scale = nested if nested is not None else _spoil(format.scale.dtype, made.scale, bad)
    return Parts(codes, scale, zero)


def _absmax_integers(format: Format, x: Any, groups: Groups, where: str) -> Parts:
    """The same for integers in units of their largest: of a scale that is infinite all codes are 0.

    Rows are not put together before there are codes, which are a quarter as large.
    """
    cut, order = layout.cut(x, groups, where)
    outer = len(layout.outer_axes(groups))
    inner = order[outer:]
    bad = scales.spoiled(cut, inner)
    # below the least scale whatever is subnormal counts as 0
    made = scales.held(format, jnp.where(bad, np.float32(jnp.inf), scales.largest(cut, inner)), inner)
    codes = nearest(format, made.units(normal_or_zero(cut)))
    if order != sorted(order):
        codes = layout.turned(lax.optimization_barrier(codes), order)  # else four times as much is moved
    scale = _spoil(
        format.scale.dtype, made.scale, jnp.isinf(made.scale)
    )  # that of a bad row, or one that float16 does not hold
    return Parts(packed(format, codes, None, tuple(range(outer, codes.ndim))), scale)


def _spoil(kind: str, scale: Any, bad: Any) -> Any:
    return (
        jnp.where(bad, np.uint8(255), scale) if kind == "e8m0" else jnp.where(bad, jnp.asarray(jnp.nan, scale.dtype), scale)
    )


def packed(format: Format, codes: Any, zero: Any, inner: tuple[int, ...]) -> Any:
    """Rows of codes as bytes, filled up to a whole number of them."""
    if format.bits == 8 or not inner:
        return codes
    missing = -codes.shape[-1] % format.per
    if missing:
        pads = [(0, 0)] * (codes.ndim - 1) + [(0, missing)]
        codes = jnp.pad(codes, pads, constant_values=zero_code(format))
    return packing.pack(format, codes)


def with_plain_scales(format: Format) -> Format:
    """The format with float32 scales in place of quantized ones."""
    return Format(f"{format.name}, plainly", f"{format.shown}_plain", format.codes, format.bits, format.order)


def _given_scale(format: Format, scale: Any, shape: tuple[int, ...], where: str) -> tuple[Any, Any]:
    if format.scale.of is not None:
        raise ValueError(
            f"{where}: scales of {format.name} are codes of {format.scale.of.name}, and cannot be given as numbers; codes "
            "and scales that are there already make a value by typax.quantized.from_codes"
        )
    s = jnp.asarray(scale)
    if not jnp.issubdtype(s.dtype, jnp.floating) and not jnp.issubdtype(s.dtype, jnp.integer):
        raise TypeError(f"{where}: a scale is a real number, got {s.dtype}")
    s = entering(_fitting(s, shape, "scale", where))
    wrong = ~scales.no_infinity(s)
    return jnp.where(wrong, np.float32(1), s), wrong


def _fitting(a: Any, shape: tuple[int, ...], name: str, where: str) -> Any:
    try:
        return jnp.broadcast_to(a, shape)
    except ValueError:
        raise ValueError(
            f"{where}: {name} has shape {a.shape}, which does not broadcast to that of the scales, {shape}"
        ) from None


def _given_zero(format: Format, given: Any, rows: Any, bad: Any, inner: Any, s: Any, where: str) -> Any:
    if "zero_point" not in given:
        low = jnp.where(bad, np.float32(0), jnp.minimum(jnp.min(rows, axis=inner, initial=0.0), 0))
        return scales.zero_point(format, low, s)
    codes: Any = format.codes
    z = _fitting(jnp.asarray(given["zero_point"]), bad.shape, "zero_point", where)
    if not jnp.issubdtype(z.dtype, jnp.integer):
        raise TypeError(f"{where}: a zero point is a code, an integer, got {z.dtype}")
    return jnp.clip(z, codes.low, codes.high).astype(jnp.int8 if codes.low < 0 else jnp.uint8)


def _ends(format: Format, rows: Any, x: Any, groups: Groups, inner: Any, bad: Any, choice: Choice) -> tuple[Any, Any]:
    """The least and the largest value of each row, at most and at least 0."""
    low = jnp.where(bad, np.float32(0), jnp.min(rows, axis=inner, initial=0.0))
    high = jnp.where(bad, np.float32(0), jnp.max(rows, axis=inner, initial=0.0))
    if choice.percent is not None:
        counts = _counts(x.shape, groups)
        low = -scales.percentile(jnp.minimum(rows, 0), inner, choice.percent, counts)
        high = scales.percentile(jnp.maximum(rows, 0), inner, choice.percent, counts)
        low, high = (jnp.where(bad, np.float32(0), e) for e in (low, high))
    if choice.by == "mse":
        span = jnp.maximum(-low, high)
        clean = lax.optimization_barrier(jnp.where(over(bad, inner), np.float32(0), rows))

        def error(shrink: Any) -> Any:
            made, z = scales.between(format, low * shrink, high * shrink, inner)
            codes = nearest(format, made.units(clean), over(z, inner))
            numbers = codes.astype(jnp.float32) - over(z, inner).astype(jnp.float32)
            return scales.squared(clean, scaled(format.scale.dtype, numbers, over(made.scale, inner)), span, inner)

        low, high = scales.searched_between(error, low, high)
    return low, high


def _counts(shape: tuple[int, ...], groups: Groups) -> np.ndarray:
    """How many values of each row are no padding, along axes where that is not the same for all."""
    counts = np.ones((), np.int64)
    for n, g in zip(shape, groups, strict=True):
        if g < 2:
            counts = counts * n if g == 0 else counts[..., None]
        else:
            counts = counts[..., None] * np.minimum(n - g * np.arange(-(-n // g)), g)
    return counts


def _second_level(format: Format, a: Any, bad: Any, inner: tuple[int, ...], up: bool) -> tuple[scales.Held, Parts]:
    """Scales that are quantized themselves: what makes units of them, and their parts."""
    of, group = format.scale.of, format.scale.group
    if group is None:
        s8, g, units = scales.two_levels(format, a, inner, up)
        return scales.Held(s8, units), Parts(_spoil("", s8, bad), g, scale_groups=(0,) * a.ndim)
    if not a.ndim:
        raise ValueError(f"quantize: scales of {format.name} are quantized in groups, but there is one scale only")
    made = scales.of_floats(with_plain_scales(format), a * np.float32(1 / format.codes.largest), inner)
    rest, mean = made.scale, None
    if format.scale.offset:
        kept = lax.optimization_barrier(rest)  # whatever is fused with it, the sum is the same
        mean = lax.optimization_barrier(_mean(kept)) if 0 not in kept.shape else np.float32(0)
        rest = kept - mean
    groups = scales.level_groups(format, a.shape)
    parts = encode(of, jnp.where(bad, np.float32(np.nan), rest), groups, Choice(), None, "the scales")
    offset = None if mean is None else jnp.broadcast_to(mean, parts.scale.shape)
    return made, replace(parts, offset=offset, scale_groups=groups)


def _mean(x: Any) -> Any:
    """The mean of numbers from 0 on. The sum of huge ones would be infinite: it is of them times a power of two."""
    # what becomes 0 is no part of such a mean
    less = jnp.where(jnp.max(x) > 2.0**64, np.float32(2.0**-64), np.float32(1))
    return jnp.mean(lax.optimization_barrier(x * less)) / less
