"""Products of two quantized arrays.

    Σ a · b  =  Σ (s_a · codes) · (s_b · codes)      summed as integers, in int32, where scales leave the sums alone:

    no scale of a along the sum       s_a · (Σ codes · codes) · s_b, group after group of b
    none of b                         the same with the operands exchanged
    groups of both, g and h           Σ over pieces of the larger group, each of which has one scale of one of them
    anything else                     a block of the smaller operand at a time, as floats, meets the codes of the other

What are no integers: floats of 8 bits, tables whose numbers are no integers in any unit (nf4), and codes with a zero point.
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from typax.quantized import axes, contract, layout, rounding
from typax.quantized.axes import Held
from typax.quantized.types import accumulated

type Axes = tuple[Any, Any]


def of_pair(a: Held, b: Held, summed: Axes, batch: Axes) -> Any:
    """``lax.dot_general`` of two quantized arrays, by the axes that are summed and the batch axes of each, in float32."""
    there = 0 not in (*a.shape, *b.shape)
    if not (there and _whole(a) and _whole(b) and accumulated(a.dtype, b.dtype) == jnp.float32):
        return _of_floats(a, b, summed, batch)
    both = [(i, j) for i, j in zip(*summed, strict=True) if a.groups[i] and b.groups[j]]
    of_a, of_b = ([q.groups[i] for i in over if q.groups[i]] for q, over in zip((a, b), summed, strict=True))
    if 1 in (*of_a, *of_b):  # each of its entries has a scale
        return _of_floats(a, b, summed, batch)
    if not of_a:
        return _of_integers(a, b, summed, batch)
    if not of_b:
        y = _of_integers(b, a, summed[::-1], batch[::-1])
        n, last = len(batch[0]), len(b.shape) - len(summed[1])
        return jnp.transpose(y, (*range(n), *range(last, y.ndim), *range(n, last)))
    if not both or layout.sharded(a.codes, b.codes):
        return _of_floats(a, b, summed, batch)
    (i, j), *_ = both
    g, h = a.groups[i], b.groups[j]
    if max(g, h) % min(g, h):
        return _of_floats(a, b, summed, batch)
    a, b = (replace(q, scale=q.scale.dense()) if isinstance(q.scale, Held) else q for q in (a, b))
    count = -(-a.shape[i] // max(g, h))
    piece = lambda q, k, at: _piece(_filled(q, k, count * max(g, h)), k, at, max(g, h))
    one = lambda at: of_pair(piece(a, i, at), piece(b, j, at), summed, batch)
    return contract.added(one, count)


def _whole(q: Held) -> bool:
    """Whether codes are integers in some unit."""
    exact = contract.is_table(q) and math.frexp(contract.Rows.of(q).unit)[0] == 0.5
    return exact or contract.is_int8(q)


def _filled(q: Held, a: int, n: int) -> Held:
    """An axis in groups up to a size that they divide: groups of zeros."""
    g, k = q.groups[a], q.outer.index(a)
    more = n // g - -(-q.shape[a] // g)
    pad = lambda y: lax.pad(y, jnp.zeros((), y.dtype), [(0, more if i == k else 0, 0) for i in range(y.ndim)])
    q = q.each(pad, pad) if more else q
    return replace(q, **q.with_axis(a, n, g))


def _piece(q: Held, a: int, at: Any, n: int) -> Held:
    """The entries ``at · n`` to ``(at + 1) · n`` of an axis in groups; of one group, an axis that shares a scale."""
    r, k = n // q.groups[a], q.outer.index(a)
    part = q.on_outer(a, lambda y, k: axes.window(y, k, at * r, r), n)
    if r > 1:
        return part
    return part.each(lambda y: axes.drop(y, k), lambda y: axes.drop(y, k), **part.with_axis(a, n, 0))


def _of_integers(a: Held, b: Held, summed: Axes, batch: Axes) -> Any:
    """As integers; the scales of ``a`` lie on kept axes."""
    rows, groups = contract.Rows.of(a), a.groups
    codes = layout.merge(rows.numbers(jnp.int8), groups, layout.pads(a.shape, groups))
    y = contract.product(codes, b, summed, batch, activations="codes")
    scale = rounding.decoded(rows.format.scale.dtype, rows.scale) * jnp.float32(rows.unit)
    order = [*batch[0], *(i for i in range(len(a.shape)) if i not in (*summed[0], *batch[0]))]
    full = jnp.expand_dims(scale, tuple(i for i in range(len(a.shape)) if i not in a.outer))
    for i, g in enumerate(groups):
        if g > 1:  # nor can an axis that is sharded be repeated
            full = lax.slice_in_dim(jnp.repeat(full, g, axis=i), 0, a.shape[i], axis=i)
    full = jnp.squeeze(jnp.transpose(full, (*order, *summed[0])), tuple(range(len(order), len(a.shape))))
    return y * jnp.expand_dims(full, tuple(range(full.ndim, y.ndim))).astype(y.dtype)


def _of_floats(a: Held, b: Held, summed: Axes, batch: Axes) -> Any:
    """A block of the smaller one at a time becomes floats."""
    first = math.prod(a.shape) <= math.prod(b.shape)
    (x, q), sides = ((a, b), (summed, batch)) if first else ((b, a), (summed[::-1], batch[::-1]))
    product = lambda x: contract.product(x, q, *sides, first=first)
    kept = [i for i in range(len(x.shape)) if i not in (*sides[0][0], *sides[1][0])]
    if not rounding.exceeds(x.shape, contract.BLOCK) or not kept or layout.sharded(x.codes):
        return product(x.dense())
    k = max(kept, key=lambda i: x.shape[i])
    unit = max(x.groups[k], 1)
    n = -(-x.shape[k] // unit)  # units, of which one block has `step`
    step = min(max(1, contract.BLOCK * x.shape[k] // (unit * math.prod(x.shape))), n)

    def block(at: Any) -> Any:
        if unit == 1:
            return product(axes.window(x, k, at, step).dense())
        return product(x.on_outer(k, lambda y, a: axes.window(y, a, at, step), step * unit).dense())

    # axes of the result: batch, kept ones of `a`, kept ones of `b`
    axis = len(batch[0]) + kept.index(k) + (0 if first else len(q.shape) - len(sides[0][1]) - len(batch[0]))
    return lax.slice_in_dim(contract.side_by_side(block, n, step, axis, unit), 0, x.shape[k], axis=axis)
