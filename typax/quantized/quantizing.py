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
    """The op `quantize`: an `Op` that takes the format by position; scales, zero points and a key by keyword."""

    def __call__(
        self,
        *args: Any,
        format: Any = "int8",
        scale: Any = "absmax",
        zero_point: Any = False,
        key: Any = None,
        **statics: Any,
    ) -> Any:
        if len(args) == 2 and isinstance(args[1], str | Format):
            args, format = args[:1], args[1]
        given = {}
        if not isinstance(scale, str | tuple):
            given["scale"], scale = scale, "absmax"
        if not isinstance(zero_point, bool):
            if "scale" not in given:
                raise ValueError("quantize: a zero point is given together with its scale; give scale=, an array, as well")
            given["zero_point"], zero_point = zero_point, True
        if key is not None:
            given["key"] = key
        more = (given,) if given else ()
        return super().__call__(*args, *more, format=format_of(format), scale=scale, zero_point=zero_point, **statics)


def _identity(x: Any, *_: Any) -> Any:
    return x


def _step(q: Any, *operands: Any, **_: Any) -> Any:
    """How far each entry may be from what it was made of: half the largest gap of its codes; no bound for given scales."""
    f = jax.typeof(q).of_format
    most = jnp.inf if len(operands) > 1 else 2.0 * f.codes.gap if f.scale.dtype == "e8m0" else f.codes.gap / 2
    return in_units(q) * most


quantize = Quantize(_identity, "quantize", _step)
quantize.__doc__ = """Quantize a float array; differentiates as the identity (the straight-through estimator).

Args:
  x: float, of any shape ``[*batch, n]``.
  format: the name of one of `typax.quantized.formats`, or a `typax.quantized.Format`.
  axis: the axis or axes along which values share a scale, ``None`` for all: of a matrix ``[k, n]``, ``-1`` is one scale for
    each row, ``0`` one for each column.
  group: how many values along ``axis`` share one; ``None`` is all, or what the format says.  With several axes, one number
    for all of them or a tuple.  The last group may be smaller.
  zero_point: whether the codes are shifted so that their range is that of the values (integers only); or the zero points,
    beside given scales.
  scale: ``"absmax"``, ``"mse"`` (the least squared error), ``"percentile"`` (99.9) or ``("percentile", p)``; or the scales,
    an array that broadcasts to one for each group.
  key: a key for stochastic rounding; without one ties go to the even code.
  exponents: how those of ``mxfp`` scales are rounded: ``"floor"`` (OCP MX v1.0), ``"even"``, ``"ceil"`` or ``"rceil"``.

Raises:
  ValueError: for a format, axis, group, scale or zero point that is none, or that do not go together.
  TypeError: for an operand that is no float array, or groups that do not divide the shards of an axis.
"""


@quantize.impl
def _(x: Float[Array, "*batch n"], *, format: Format, axis: Any = -1, group: Any = None, scale: Any = "absmax",
      zero_point: bool = False, exponents: str = "floor") -> Any:  # fmt: skip
    return _quantize(x, {}, format, axis, group, Choice(scale, zero_point, exponents))


@quantize.impl
def _(x: Float[Array, "*batch n"], given: dict, *, format: Format, axis: Any = -1, group: Any = None, scale: Any = "absmax",
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
