"""The typax side: what the rows need beside the shipped types."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

import typax


class Own(typax.Value, name="s8", tangent="itself"):
    """Row-wise int8 whose tangents are of that type."""

    qvalue: Int8[Array, "*batch n"]
    scale: Float32[Array, "*batch"]

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.qvalue.astype(jnp.float32) * self.scale[..., None]

    @classmethod
    def from_dense(cls, x: Any) -> Any:
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / 127, 1e-30)
        return cls(jnp.round(x / scale[..., None]).astype(jnp.int8), scale)


self_quantize = Own.from_dense


@typax.op(reference=lambda x: 2 * x)
def twice(q: Float[typax.QArray, "*b n"]) -> Any:
    """Twice what a value stands for: an op without rules of its own."""
    return typax.dense(q) * 2


def factored(left: Any, right: Any) -> Any:
    """left ⊗ right, with tangents of its factors."""
    return typax.outer(left, right, tangent="componentwise")


def opened(w: Any) -> Any:
    """Its factors; a tangent is a record of theirs."""
    return w.components()
