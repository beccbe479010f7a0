"""Quantized arrays of codes and scales that are there already: from another library, or from a file."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from typax import _jax
from typax.quantized import layout, packing
from typax.quantized.encode import Parts, packed
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
        the format's scale dtype, or one that it holds exactly. Of a format whose scales are quantized, a pair: their codes,
        and their scale.
      format, axis, group: as for `typax.quantize`.
      zero_point: codes that stand for 0, of the shape of the scales.
      dtype: of the array that the value stands for.

    Raises:
      ValueError: if the shapes do not go together, or there are codes that the format has not.
    """
    f = format_of(format)
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
        level = jnp.asarray(scale[0])
        held = Parts(
            _shaped(level, shape, "scales"), jnp.asarray(scale[1], jnp.float32).reshape(()), scale_groups=(0,) * outer
        )
    else:
        held = _shaped(jnp.asarray(scale).astype(f.scale_storage), shape, "scales")
    return build(f, groups, codes.shape, Parts(packed(f, rows, zero_point, inner), held, zero_point), jnp.dtype(dtype))


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
