"""`quantize`: the op that makes quantized arrays; on what values stand for it is the identity."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from typax._op import Op
from typax.quantized import layout
from typax.quantized.encode import Choice, encode
from typax.quantized.format import Format, format_of
from typax.quantized.types import build, in_units


class Quantize(Op):
    """The op `quantize`: an `Op` that takes the format by position, and arrays of scales, zero points and a key by keyword."""

    def __call__(self, x: Any, format: Any = "int8", *, scale: Any = "absmax", zero_point: Any = False, key: Any = None,
                 **statics: Any) -> Any:  # fmt: skip
        given = {}
        if not isinstance(scale, str | tuple):
            given["scale"], scale = scale, "absmax"
        if not isinstance(zero_point, bool):
            if "scale" not in given:
                raise ValueError("quantize: a zero point is given together with its scale; give scale=, an array, as well")
            given["zero_point"], zero_point = zero_point, True
        if key is not None:
            given["key"] = key
        values = [x, given] if given else [x]
        return super().__call__(*values, format=format_of(format), scale=scale, zero_point=zero_point, **statics)


def _identity(x: Any, *_: Any) -> Any:
    return x


def _step(q: Any, *operands: Any, **_: Any) -> Any:
    """How far each entry may be from what it was made of: half the largest gap of its codes; no bound for given scales."""
    f = jax.typeof(q).of_format
    most = jnp.inf if len(operands) > 1 else 2.0 * f.codes.gap if f.scale.dtype == "e8m0" else f.codes.gap / 2
    return in_units(q) * most


quantize = Quantize(_identity, "quantize", _step)


@quantize.impl
def _(x: Float[Array, "*b"], *, format: Format, axis: Any = -1, group: Any = None, scale: Any = "absmax",
      zero_point: bool = False, exponents: str = "floor") -> Any:  # fmt: skip
    return _quantize(x, {}, format, axis, group, Choice(scale, zero_point, exponents))


@quantize.impl
def _(x: Float[Array, "*b"], given: dict, *, format: Format, axis: Any = -1, group: Any = None, scale: Any = "absmax",
      zero_point: bool = False, exponents: str = "floor") -> Any:  # fmt: skip
    return _quantize(x, given, format, axis, group, Choice(scale, zero_point, exponents))


def _quantize(x: Any, given: Any, format: Format, axis: Any, group: Any, choice: Choice) -> Any:
    choice = choice.check(format, "quantize")
    if group is None and isinstance(axis, int):
        group = format.group
    groups = layout.groups_of(x.ndim, axis, group, "quantize")
    if not layout.inner_axes(groups):
        raise ValueError(f"quantize: axis={axis}, group={group}: values share no scale; name an axis, or a group above 1")
    return build(format, groups, x.shape, encode(format, x, groups, choice, given), x.dtype)
