"""Bits, eight to a byte: an array of n booleans in ⌈n/8⌉ bytes, with logic and counting on the bytes.

No component shows n, so that it is a static of the type; the bits beyond it are zero.  ``Bits.P(None, n="i")`` cuts n over
devices, in whole bytes.

In raw hijax: the type with its hidden axis, which shard and unshard must rewrite, and five primitives with typing and
batching rules: about 200 lines.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt8

import typax


class Bits(typax.Value, name="bits"):
    packed: UInt8[Array, "*batch m"]
    n: int

    def dense(self) -> Bool[Array, "*batch n"]:
        return jnp.unpackbits(self.packed, axis=-1)[..., : self.n].astype(bool)


@typax.op(reference=lambda x: x)
def pack(x: Bool[Array, "*b n"]) -> Bits:
    return Bits(jnp.packbits(x, axis=-1), x.shape[-1])


@typax.op(reference=jnp.logical_and)
def both(a: Bool[Bits, "*b n"], b: Bool[Bits, "*b n"]) -> Bits:
    return Bits(a.packed & b.packed, a.n)


@typax.op(reference=jnp.logical_xor)
def differ(a: Bool[Bits, "*b n"], b: Bool[Bits, "*b n"]) -> Bits:
    return Bits(a.packed ^ b.packed, a.n)


@typax.op(reference=jnp.logical_not)
def negate(a: Bits) -> Bits:
    return Bits(~a.packed & jnp.packbits(jnp.arange(8 * a.packed.shape[-1]) < a.n), a.n)


@typax.op(reference=lambda a: jnp.sum(a, axis=-1, dtype=jnp.int32))
def count(a: Bits) -> Any:
    return jnp.sum(jax.lax.population_count(a.packed), axis=-1, dtype=jnp.int32)
