"""An array with missing entries: numbers, and a mask of those that are valid.  It stands for the array with NaN where
nothing is known, and computes as that does, but for what a NaN does to derivatives: here they are zero, in every order.

    x + y, x · y    valid where both are                  sum, mean    of the valid entries (`jnp.nansum`, `jnp.nanmean`)
    fill(x, v)      the array with v at the missing entries

In raw hijax: the type and its tangent type (the mask has none), and five primitives with all their rules: about 300 lines.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

import typax


class Masked(typax.Value, name="masked", tangent="componentwise"):
    data: Float[Array, "*batch n"]
    valid: Bool[Array, "*batch n"]

    def dense(self) -> Float[Array, "*batch n"]:
        return jnp.where(self.valid, self.data, jnp.nan)


add, multiply = typax.op(jnp.add, name="add"), typax.op(jnp.multiply, name="multiply")
total, mean = typax.op(jnp.nansum, name="total"), typax.op(jnp.nanmean, name="mean")


@typax.op(reference=lambda x, valid: jnp.where(valid, x, jnp.nan))
def mask(x: Float[Array, "*b n"], valid: Bool[Array, "*b n"]) -> Masked:
    return Masked(jnp.where(valid, x, 0), valid)


@typax.op(reference=lambda x, value: jnp.where(jnp.isnan(x), value, x))
def fill(x: Masked, value: Float[Array, ""]) -> Any:
    return jnp.where(x.valid & ~jnp.isnan(x.data), x.data, value)


@add.impl
def _(x: Masked, y: Masked) -> Masked:
    return Masked(x.data + y.data, x.valid & y.valid)


@multiply.impl
def _(x: Masked, y: Masked) -> Masked:
    return Masked(x.data * y.data, x.valid & y.valid)


@total.impl
def _(x: Masked) -> Any:
    return jnp.nansum(x.data, where=x.valid)


@mean.impl
def _(x: Masked) -> Any:
    return jnp.nanmean(x.data, where=x.valid)
