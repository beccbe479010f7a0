"""Quantized arrays of codes and scales that are there already: from another library, or from a file."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from typax import _jax
from typax.quantized import layout, packing, scales
from typax.quantized.encode import Choice, Parts, packed
from typax.quantized.format import Floats, Format, format_of
from typax.quantized.types import build


def from_codes(
    codes: Any,
    scale: Any,
    format: str | Format,
    *,
    axis: Any = -1,
    group: Any = None,
    zero_point: Any = None,
    dtype: Any = "float32",
) -> Any:
    """The quantized array of these codes and scales, which are taken as they are.

    Args:
      codes: one for each entry, of the shape that the value stands for: integers, or floats of the format's own dtype.
      scale: one for each row or group, in the order of the axes (``group`` of an axis cuts it into ``ceil(n / group)``); of
        the format's scale dtype, or numbers that it holds (float32 by rounding); bytes for e8m0. Of a format whose scales
        are quantized, their codes and their scales, one for each group of them, and with an offset that one too.
      format, axis, group: as for `typax.quantize`.
      zero_point: codes that stand for 0, of the shape of the scales.
      dtype: of the array that the value stands for.

    Raises:
      ValueError: if the shapes do not go together, or the format has no such codes, scales or zero points.
    """
    f = format_of(format)
    if zero_point is not None:
        Choice(zero_point=True).check(f, "from_codes")
    codes = jnp.asarray(codes)
    own = jnp.dtype(f.codes.dtype) if isinstance(f.codes, Floats) else None
    if (codes.dtype != own) if own is not None else not jnp.issubdtype(codes.dtype, jnp.integer):
        raise ValueError(f"from_codes: codes of {f.name} are {own or 'integers'}, got {codes.dtype}")
    if group is None and isinstance(axis, int | np.integer):
        group = f.group_of(codes.shape, int(axis))
    groups = layout.groups_of(codes.ndim, axis, group, "from_codes")
    _among(f, codes, "codes", packing.ends(f))
    rows = layout.split(codes, groups, "from_codes")
    outer = len(layout.outer_axes(groups))
    inner, shape = tuple(range(outer, rows.ndim)), rows.shape[:outer]
    if own is None:
        rows = rows.astype(f.storage if f.bits == 8 else jnp.uint8)
    if zero_point is not None:
        _among(f, jnp.asarray(zero_point), "zero points", packing.ends(f))
        zero_point = _shaped(jnp.asarray(zero_point).astype(f.storage if f.bits == 8 else jnp.uint8), shape, "zero points")
    held: Any
    if f.scale.of is not None:
        held = _second_level(f, scale, shape)
    else:
        held = _shaped(_numbers(f, scale), shape, "scales")
    return build(f, groups, codes.shape, Parts(packed(f, rows, zero_point, inner), held, zero_point), jnp.dtype(dtype))


def _numbers(f: Format, scale: Any) -> Any:
    """Scales in the dtype in which they are held."""
    s, dtype = jnp.asarray(scale), f.scale_storage
    if s.dtype == jnp.float8_e8m0fnu:
        s = lax.bitcast_convert_type(s, jnp.uint8)
    if dtype == jnp.uint8 and not jnp.issubdtype(s.dtype, jnp.integer):
        raise ValueError(f"from_codes: scales of {f.name} are bytes e8m0, integers from 0 to 255, got {s.dtype}")
    held = s.astype(dtype)
    wide = jnp.promote_types(s.dtype, jnp.float32) if dtype != jnp.uint8 else s.dtype
    narrower = dtype.itemsize < 4 and s.dtype != dtype and not isinstance(s, _jax.Tracer)
    if narrower and not jnp.array_equal(held.astype(wide), s.astype(wide), equal_nan=dtype != jnp.uint8):
        raise ValueError(f"from_codes: scales of {f.name} are {dtype}, which does not hold all of these {s.dtype}")
    return held


def _second_level(f: Format, scale: Any, shape: tuple[int, ...]) -> Parts:
    """Scales that are quantized: their codes, their scales, and an offset if the format has one."""
    of, many = f.scale.of, 2 + f.scale.offset
    if not isinstance(scale, tuple | list) or len(scale) != many:
        arrays = f"their codes in {of}, their scales{' and an offset' if many == 3 else ''}"
        raise ValueError(f"from_codes: scales of {f.name} are {'three' if many == 3 else 'two'} arrays: {arrays}")
    level, groups = _shaped(jnp.asarray(scale[0]), shape, "scales"), scales.level_groups(f, shape)
    if not isinstance(of.codes, Floats):
        _among(of, level, "scales", packing.ends(of))
        level = level.astype(of.storage if of.bits == 8 else jnp.uint8)
    rows = layout.split(level, groups, "from_codes")
    n = len(layout.outer_axes(groups))
    each = [_shaped(jnp.asarray(s, jnp.float32), rows.shape[:n], "scales of scales") for s in scale[1:]]
    offset = each[1] if many == 3 else None
    return Parts(packed(of, rows, None, tuple(range(n, rows.ndim))), each[0], offset=offset, scale_groups=groups)


def _among(f: Format, x: Any, what: str, ends: tuple[int, int]) -> None:
    """Raise a ValueError if there are others, where the dtype can hold others and numbers are at hand."""
    low, high = ends
    if isinstance(x, _jax.Tracer) or not jnp.issubdtype(x.dtype, jnp.integer) or not x.size:
        return
    held = jnp.iinfo(x.dtype)
    if (held.min < low or held.max > high) and (int(x.min()) < low or int(x.max()) > high):
        raise ValueError(f"from_codes: {what} of {f.name} are from {low} to {high}, got {x.min()} to {x.max()}")


def _shaped(x: Any, shape: tuple[int, ...], what: str) -> Any:
    if x.size == 1 and x.shape != shape:
        return jnp.broadcast_to(x.reshape(()), shape)
    if x.shape != shape:
        raise ValueError(f"from_codes: {what} have the shape {x.shape}, where {shape} is due")
    return x
