"""The types of `_field_raw` declared: what is written is what they are; all rules follow."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

import typax


class Graph(typax.Value, name="graph", tangent="none"):
    source: Int32[Array, "*batch edges"]
    target: Int32[Array, "*batch edges"]
    nodes: int

    def dense(self) -> Float32[Array, "*batch nodes nodes"]:
        return jnp.zeros((self.nodes, self.nodes)).at[self.target, self.source].add(1.0)


@typax.op(reference=jnp.matmul)
def spread(g: Graph, x: Float[Array, "nodes"]) -> Any:
    return jnp.zeros_like(x).at[g.target].add(x[g.source])


class Picture(typax.Value, name="picture"):
    parts: tuple[Any, ...]
    tag: str


@typax.op(reference=None)
def distance(picture: Picture, at: Float[Array, "2"]) -> Any:
    a, b = picture.parts
    match picture.tag:
        case "disc":
            return jnp.sqrt(jnp.sum((at - a) ** 2)) - b
        case "moved":
            return distance(b, at - a)
    return jnp.minimum(distance(a, at), distance(b, at))


class Stored(typax.Value, name="stored"):
    row: Int32[Array, "*batch"]
    file: str
    width: int

    def dense(self) -> Float32[Array, "*batch width"]:
        fetch = lambda row: np.load(self.file)[row]
        out = jax.ShapeDtypeStruct((*self.row.shape, self.width), "float32")
        found = jax.pure_callback(fetch, out, self.row, vmap_method="expand_dims")
        return found + 0.0 * self.row[..., None].astype("float32")  # in a shard_map it differs as the row does


@typax.op(reference=jnp.sum)
def total(v: Stored) -> Any:
    return jnp.sum(typax.dense(v))
