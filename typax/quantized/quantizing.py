"""`quantize` and `requantize`: the ops that make quantized arrays; on what values stand for they are the identity.

    requantize(q, format)  =  quantize(dense(q), format)        bit for bit

An axis along which new scales are kept is gone along in blocks of about `BLOCK` values, so that no more than a block is an
array of floats at a time.  Where there is none, or all scales depend on all values (a second level of them), the whole is
decoded.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from typax import _jax
from typax._op import Op
from typax.quantized import axes, layout
from typax.quantized.axes import Held, held
from typax.quantized.encode import Choice, Parts, encode
from typax.quantized.format import Format, format_of
from typax.quantized.rounding import exceeds
from typax.quantized.types import Quantized, build, in_units


class Quantize(Op):
    """The op `quantize`: an `Op` that takes the format by position; scales, zero points and a key by keyword."""

    @property
    def __signature__(self) -> inspect.Signature:
        def quantize(x, format="int8", *, axis=-1, group=None, zero_point=False, scale="absmax", key=None, exponents=None):
            """How it is called."""

        return inspect.signature(quantize)

    def __call__(
        self,
        *args: Any,
        format: Any = "int8",
        scale: Any = "absmax",
        zero_point: Any = False,
        key: Any = None,
        exponents: Any = None,
        **statics: Any,
    ) -> Any:
        if len(args) == 2 and not isinstance(args[1], dict):  # which are the operands that are given
            args, format = args[:1], args[1]
        if args and self is quantize and isinstance(args[0], Quantized):
            raise TypeError(f"quantize: {jax.typeof(args[0])} is quantized already; use typax.requantize")
        if args and self is requantize and hasattr(args[0], "dtype") and not _jax.is_hi(jax.typeof(args[0])):
            raise TypeError(f"requantize: {jax.typeof(args[0])} is not quantized; use typax.quantize")
        given, format = {}, format_of(format)
        if isinstance(scale, list) and any(isinstance(x, str) for x in scale):
            scale = tuple(scale)
        if not isinstance(scale, str | tuple | bool | None):
            given["scale"], scale = scale, "absmax"
        if zero_point is None:
            raise ValueError("quantize: zero_point=None; it is True, False, or the zero points of scales that are given")
        if not isinstance(zero_point, bool):
            if "scale" not in given:
                raise ValueError("quantize: a zero point is given together with its scale; give scale=, an array, as well")
            given["zero_point"], zero_point = zero_point, True
        if key is not None:
            given["key"] = _key(key, self is quantize)
        if exponents is None:  # which leaves nothing to saturate, where that would be a bias
            exponents = "rceil" if key is not None and format.scale.dtype == "e8m0" else "floor"
        for name in ("axis", "group"):
            if isinstance(statics.get(name), list):
                statics[name] = tuple(statics[name])
        statics |= {"format": format, "scale": scale, "zero_point": zero_point, "exponents": exponents}
        return super().__call__(*args, *((given,) if given else ()), **statics)


def _key(key: Any, once: bool) -> Any:
    dtype, ndim = getattr(key, "dtype", None), getattr(key, "ndim", None)
    if dtype is None or (ndim if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype != jnp.uint32 or ndim != 1):
        said = f"{dtype}{list(key.shape)}" if hasattr(key, "shape") else repr(key)
        raise TypeError(f"{'quantize' if once else 'requantize'}: key={said} is not one key; use jax.random.key(0)")
    return key


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
  group: how many values along ``axis`` share one; ``None`` is all, or, along one axis, what the format says: blocks of
    ``mx`` and ``nv`` formats are filled up, others are no longer than the axis.  With several axes, one number for all of
    them or a tuple.  The last group may be smaller.
  zero_point: whether the codes are shifted so that their range is that of the values (integers only); or the zero points,
    beside given scales.
  scale: ``"absmax"``, ``"mse"`` (the least squared error), ``"percentile"`` (99.9) or ``("percentile", p)``; or the scales,
    an array that broadcasts to one for each group.
  key: a key for stochastic rounding, with scales that are rounded up, so that its mean is ``x``; without one ties go to the
    even code.
  exponents: how those of ``mxfp`` scales are rounded: ``"floor"`` (OCP MX v1.0), ``"even"``, ``"ceil"`` or ``"rceil"``;
    ``None`` is ``"floor"``, or ``"rceil"`` with a key.

Raises:
  ValueError: for a format, axis, group, scale or zero point that is none, or that do not go together.
  TypeError: for an operand that is no float array, a scale that is no real number, a key that is none, or groups that do not
    divide the shards of an axis.
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
    groups = _groups(x.shape, format, axis, group, choice, "quantize")
    return build(format, groups, x.shape, encode(format, x, groups, choice, given), x.dtype)


def _groups(shape: Sequence[Any], format: Format, axis: Any, group: Any, choice: Choice, where: str) -> layout.Groups:
    choice.check(format, where)
    if group is None and isinstance(axis, int | np.integer):
        group = format.group_of(shape, int(axis))
    groups = layout.groups_of(len(shape), axis, group, where)
    if not layout.inner_axes(groups):
        raise ValueError(f"{where}: axis={axis}, group={group}: values share no scale; name an axis, or a group above 1")
    return groups


# --- again -----------------------------------------------------------------------------------------------------------

BLOCK = 1 << 16
"""Values that are decoded at a time."""

requantize = Quantize(_identity, "requantize", _step)
requantize.__doc__ = """Quantize what a quantized array stands for otherwise; differentiates as the identity.

The result is that of ``typax.quantize(typax.dense(q), ...)``, whose arguments it takes, in every bit.  No dense array is
made, but a block of one at a time, unless all values share a scale, or scales or a key are given.

Raises:
  ValueError, TypeError: as `typax.quantize`, and for an array, which is not quantized yet.
"""


@requantize.impl
def _(q: Float[Quantized, "*batch n"], *, format: Format, axis: Any = -1, group: Any = None, scale: Any = "absmax",
      zero_point: bool = False, exponents: str = "floor") -> Any:  # fmt: skip
    return _requantize(q, {}, format, axis, group, Choice(scale, zero_point, exponents))


@requantize.impl
def _(q: Float[Quantized, "*batch n"], given: dict, *, format: Format, axis: Any = -1, group: Any = None,
      scale: Any = "absmax", zero_point: bool = False, exponents: str = "floor") -> Any:  # fmt: skip
    return _requantize(q, given, format, axis, group, Choice(scale, zero_point, exponents))


def _requantize(q: Any, given: Any, format: Format, axis: Any, group: Any, choice: Choice) -> Any:
    groups = _groups(q.shape, format, axis, group, choice, "requantize")
    x = held(q)
    found = None if given or format.scale.of is not None or layout.sharded(x.codes) else _blocks(x, groups)
    if found is None:
        parts = encode(format, x.dense(), groups, choice, given, "requantize")
        return build(format, groups, x.shape, parts, x.dtype)
    a, step = found
    n, old, new = x.shape[a], x.groups[a], max(groups[a], 1)

    def block(i: Any) -> Any:
        if old > 1:
            piece = x.on_outer(a, lambda y, k: axes.window(y, k, i * (step // old), step // old), step)
        else:
            piece = axes.window(x, a, i * step, step)
        parts = encode(format, piece.dense(), groups, choice, {}, "requantize")
        return parts.qvalue, parts.scale, parts.zero_point

    k = layout.outer_axes(groups).index(a)
    together = lambda y: jnp.moveaxis(y, 0, k).reshape(*y.shape[1 : k + 1], n // new, *y.shape[k + 2 :])
    return build(format, groups, x.shape, Parts(*jax.tree.map(together, lax.map(block, jnp.arange(n // step)))), x.dtype)


def _blocks(x: Held, groups: layout.Groups) -> tuple[int, int] | None:
    """An axis to go along, and by how many entries, in whole groups before and after; ``None`` if there is none."""
    if not exceeds(x.shape, BLOCK):
        return None
    size, best = math.prod(x.shape), None
    for a, (n, old, new) in enumerate(zip(x.shape, x.groups, groups, strict=True)):
        unit = math.lcm(max(old, 1), max(new, 1))
        nested = isinstance(x.scale, Held) and old and x.scale.groups[x.outer.index(a)] > 1
        if new == 0 or nested or n % unit:
            continue
        step = unit * layout.divisor(n // unit, BLOCK * n // (unit * size))
        if step < n and (best is None or step * x.shape[best[0]] < best[1] * n):
            best = a, step
    return best
