"""An interval [lo, hi] of numbers, and arithmetic that contains every result: f(x) ∈ f([lo, hi]) for all x in it.

    [a, b] + [c, d] = [a + c, b + d]          [a, b] · [c, d] = [min, max] of the four products
    [m - r, m + r] @ W = [mW - r|W|, mW + r|W|]          monotone f: [f(a), f(b)]

This is interval bound propagation (Gowal et al. 2018, arXiv:1810.12715): the bounds of a network, and their gradients, which
train it to be robust.  An interval stands for no single array, so that it is a record.  Bounds hold up to float rounding.

In raw hijax: the record type and its tangent type, and four primitives with all their rules: about 250 lines.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

import typax


class Interval(typax.Value, name="interval"):
    lo: Float[Array, "*batch"]
    hi: Float[Array, "*batch"]


@typax.op(reference=None)
def around(x: Float[Array, "*b"], radius: Float[Array, ""]) -> Interval:
    return Interval(x - radius, x + radius)


@typax.op(reference=None)
def add(x: Interval, y: Interval) -> Interval:
    return Interval(x.lo + y.lo, x.hi + y.hi)


@typax.op(reference=None)
def multiply(x: Interval, y: Interval) -> Interval:
    products = jnp.stack([x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi])
    return Interval(jnp.min(products, axis=0), jnp.max(products, axis=0))


@typax.op(reference=None)
def matmul(x: Interval, w: Float[Array, "k n"]) -> Interval:
    middle, radius = (x.lo + x.hi) / 2 @ w, (x.hi - x.lo) / 2 @ jnp.abs(w)
    return Interval(middle - radius, middle + radius)


@typax.op(reference=None)
def monotone(x: Interval, *, f: Any) -> Interval:
    return Interval(f(x.lo), f(x.hi))
