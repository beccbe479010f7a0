"""Convolutions with quantized kernels, and products by ragged groups of rows with quantized experts, on the codes.

Σ x · scale · number          a scale varies with what is kept (output channel, expert), with what is summed, or with both:

kept only                     (x · numbers) · scale         a kernel with a scale for each output channel; in its gradient
summed only                   (x · scale) · numbers         with respect to x the output channels are what is summed
both                          Σ_G (x_G · numbers_G) · scale_G      over groups of input channels, and over taps
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from typax import _jax
from typax._op import Refused, op
from typax.quantized import Quantized, axes, layout, rounding
from typax.quantized.axes import Held, held
from typax.quantized.types import accumulated

conv_general_dilated = op(lax.conv_general_dilated_p, name="conv_general_dilated")
ragged_dot_general = op(_jax.ragged_dot_general_p, name="ragged_dot_general")


def _numbers(w: Held, dtype: Any) -> Any:
    """The codes as numbers, by the axes of the array."""
    if w.offset is not None:
        raise Refused(f"an offset beside the scale of {w.shown}")
    w = w.unpacked()
    rows = w.codes
    if w.zero_point is not None:
        zero = jnp.expand_dims(w.zero_point, tuple(range(w.zero_point.ndim, rows.ndim)))
        rows = (rows.astype(jnp.int32) - zero.astype(jnp.int32)).astype(dtype)
    else:
        rows = rounding.number(w.format, rows, dtype)
    return layout.merge(rows, w.groups, layout.pads(w.shape, w.groups))


def _scales(w: Held) -> Any:
    """The scales as they are held, with an axis of size 1 where a whole axis shares one."""
    scale = w.scale.dense() if isinstance(w.scale, Held) else w.scale
    return jnp.expand_dims(scale, [a for a, g in enumerate(w.groups) if g == 0])


def _repeated(w: Held, scale: Any, a: int) -> Any:
    """Scales for each entry of axis ``a``."""
    return scale if w.groups[a] < 2 else lax.slice_in_dim(jnp.repeat(scale, w.groups[a], axis=a), 0, w.shape[a], axis=a)


def _varies(w: Held, among: Sequence[int]) -> list[int]:
    return [a for a in among if w.groups[a] and -(-w.shape[a] // w.groups[a]) > 1]


def _over_groups(x: Any, axis: int, w: Held, a: int, product: Any) -> Any:
    """Σ of products of groups along axis ``a``, which meets ``axis`` of ``x``."""
    n, g = w.shape[a], w.groups[a]
    if g == 1:
        raise Refused(
            f"axis {a} of {w.shown} is summed, but each of its entries has a scale, and so have those of other axes; share "
            f"scales along it: typax.requantize(w, ..., axis={a})"
        )
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, -n % g if k == axis else 0, 0) for k in range(x.ndim)])
    whole = replace(w, **w.with_axis(a, n + -n % g, g))

    def one(i: Any) -> Any:
        piece = whole.on_outer(a, lambda y, k: axes.window(y, k, i, 1), g)
        return product(lax.dynamic_slice_in_dim(x, i * g, g, axis), piece)

    first = one(0)
    return lax.fori_loop(1, -(-n // g), lambda i, y: y + one(i), first)


@conv_general_dilated.impl
def _(x: Float[Array, "*b"], w: Quantized, *, dimension_numbers: Any, padding: Any, preferred_element_type: Any = None,
      out_sharding: Any = None, **params: Any) -> Any:  # fmt: skip
    kernel = held(w)
    if out_sharding is not None:
        raise Refused("the sharding of the result follows from those of the operands")
    y = _by_taps(x.astype(accumulated(x.dtype, w.dtype)), kernel, dimension_numbers, tuple(padding), params)
    return y.astype(jnp.result_type(x.dtype, w.dtype) if preferred_element_type is None else preferred_element_type)


def _by_taps(x: Any, w: Held, d: Any, padding: Any, params: dict[str, Any]) -> Any:
    """Taps that have scales of their own, one after the other: the window of one starts later, and ends earlier."""
    taps = d.rhs_spec[2:]
    found = _varies(w, taps)
    if not found:
        return _by_channels(x, w, d, padding, params)
    a, k = found[0], taps.index(found[0])
    n, g, wide, total = w.shape[a], w.groups[a], params["rhs_dilation"][k], None
    for start in range(0, n, g):
        stop = min(start + g, n)
        low, high = padding[k]
        own = (*padding[:k], (low - start * wide, high - (n - stop) * wide), *padding[k + 1 :])
        y = _by_taps(x, axes.cut(w, a, start, stop), d, own, params)
        total = y if total is None else total + y
    return total


def _by_channels(x: Any, w: Held, d: Any, padding: Any, params: dict[str, Any]) -> Any:
    out, summed, *_ = d.rhs_spec
    feature, parts = d.lhs_spec[1], params["feature_group_count"]
    run = lambda x, w: lax.conv_general_dilated(
        x, _numbers(w, x.dtype), padding=padding, dimension_numbers=d, preferred_element_type=x.dtype, **params
    )
    by_out, by_in = _varies(w, [out]), _varies(w, [summed])
    if not by_in:
        scale = _repeated(w, _scales(w), out).reshape(-1)
        return _times(run(x, w), w, scale, d.out_spec[1])
    per = w.shape[out] // parts  # output channels that see the same input channels
    if not by_out or w.groups[out] % per == 0:
        scale = _repeated(w, _scales(w), summed)
        scale = _repeated(w, scale, out) if by_out else scale
        scale = jnp.moveaxis(scale, (out, summed), (0, 1)).reshape(-1, w.shape[summed])
        scale = jnp.broadcast_to(scale[:: per if by_out else 1], (parts, w.shape[summed])).reshape(-1)
        return run(_times(x, w, scale, feature), w)
    if parts > 1:
        raise Refused(f"{w.shown} has scales for input and for output channels of {parts} feature groups")
    return _over_groups(x, feature, w, summed, lambda x, w: _by_channels(x, w, d, padding, params))


def _times(y: Any, w: Held, scale: Any, axis: int) -> Any:
    """``y`` times the scales along an axis of it, or a single one."""
    return rounding.scaled(_kind(w), y, jnp.expand_dims(scale, tuple(k for k in range(y.ndim) if k != axis)))


def _kind(w: Held) -> str:
    """What scales are held as, once they are an array."""
    return "float32" if isinstance(w.scale, Held) else w.format.scale.dtype


@ragged_dot_general.impl
def _(x: Float[Array, "*b"], w: Quantized, sizes: Integer[Array, "g"], *, ragged_dot_dimension_numbers: Any,
      preferred_element_type: Any = None, **params: Any) -> Any:  # fmt: skip
    d, experts = ragged_dot_dimension_numbers, held(w)
    (contract, batch), ragged = d.dot_dimension_numbers, tuple(d.lhs_ragged_dimensions)
    plain = tuple(map(len, (*contract, *batch, d.rhs_group_dimensions, ragged))) == (1, 1, 0, 0, 1, 1)
    if not plain or ragged == tuple(contract[0]) or any(v is not None for k, v in params.items() if k != "precision"):
        raise Refused("only groups of rows of the array, one for each of the quantized matrices, run on the codes")
    wide = accumulated(x.dtype, w.dtype)
    y = _ragged(x.astype(wide), experts, sizes, d, params.get("precision"))
    return y.astype(jnp.result_type(x.dtype, w.dtype) if preferred_element_type is None else preferred_element_type)


def _ragged(x: Any, w: Held, sizes: Any, d: Any, precision: Any) -> Any:
    ((of_x,), (summed,)), _ = d.dot_dimension_numbers
    (expert,), (rows,) = d.rhs_group_dimensions, d.lhs_ragged_dimensions
    (out,) = (a for a in range(3) if a not in (summed, expert))
    by_out, by_in = _varies(w, [out]), _varies(w, [summed])
    if by_out and by_in:
        return _over_groups(x, of_x, w, summed, lambda x, w: _ragged(x, w, sizes, d, precision))
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[rows], dtype=ends.dtype)
    of_row = jnp.minimum(jnp.searchsorted(ends, row, side="right"), w.shape[expert] - 1)
    scale = _repeated(w, _repeated(w, _repeated(w, _scales(w), expert), summed), out)
    scale = jnp.broadcast_to(scale, [w.shape[a] if a == expert else n for a, n in enumerate(scale.shape)])
    scale = jnp.moveaxis(scale, (expert, summed, out), (0, 1, 2))[of_row]  # [rows, summed, out]
    run = lambda x: lax.ragged_dot_general(
        x, _numbers(w, x.dtype), sizes, d, precision=precision, preferred_element_type=x.dtype
    )
    if by_in:
        scale = scale[:, :, 0]
        return run(rounding.scaled(_kind(w), x, scale if rows == 0 else scale.T))
    y = run(x)
    there = row < ends[-1]  # rows of no expert are zeros, whatever the scales
    return jnp.where(there[:, None], rounding.scaled(_kind(w), y, scale[:, 0, :]), 0)
