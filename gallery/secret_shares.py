"""Additive secret shares modulo 2³²: two parties hold a and b, each of them uniform noise, and x = a + b mod 2³².

    [x] + [y] = (a + c, b + d)          k · [x] = (k a, k b)          [x] + k = (a + k, b)          x W = (a W, b W)

A share of a result comes from that share of each operand alone: nothing is opened until `typax.dense` is called, and a
jaxpr shows where that is.  Integers have no tangents.

In raw hijax: the type, and five primitives with typing and batching rules: about 200 lines.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Key, UInt32

import typax


class Shares(typax.Value, name="shares"):
    a: UInt32[Array, "*batch"]
    b: UInt32[Array, "*batch"]

    def dense(self) -> Int32[Array, "*batch"]:
        return (self.a + self.b).astype(jnp.int32)


@typax.op(reference=lambda x, key: x)
def share(x: Int32[Array, "*b"], key: Key[Array, ""]) -> Shares:
    noise = jax.random.bits(key, x.shape, jnp.uint32)
    return Shares(noise, x.astype(jnp.uint32) - noise)


add, multiply = typax.op(jnp.add, name="add"), typax.op(jnp.multiply, name="multiply")


@add.impl
def _(x: Shares, y: Shares) -> Shares:
    return Shares(x.a + y.a, x.b + y.b)


@add.impl
def _(x: Shares, k: Int32[Array, "*b"]) -> Shares:
    return Shares(x.a + k.astype(jnp.uint32), x.b + jnp.zeros_like(k, jnp.uint32))


@multiply.impl
def _(x: Shares, k: Int32[Array, "*b"]) -> Shares:
    return Shares(x.a * k.astype(jnp.uint32), x.b * k.astype(jnp.uint32))


@typax.matmul.impl
def _(x: Int32[Shares, "*b k"], w: Int32[Array, "k n"]) -> Any:
    return Shares(x.a @ w.astype(jnp.uint32), x.b @ w.astype(jnp.uint32))
