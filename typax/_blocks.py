"""Lookups in blocks of ggml, and products of a few rows with them.

    x [.., k] · w [n, k]      y[n] = Σ over lanes of Σ over blocks of decode(w[n, block])[lane] · x[block, lane]

A loop decodes a block, multiplies and adds, so that no dense array of a weight is there; the inner sum keeps the lanes,
which a vector unit holds.  That pays for the one row of a step of generation.  With more rows the blocks would be decoded
once for each: then an implementation refuses, and `typax.lift` decodes the weight once, which it says.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from typax._codes import dot_general
from typax._op import Refused
from typax._rows import gather
from typax._structural import dense
from typax.quantized.ggml import Ggml, decode

ROWS = 4
"""How many rows of the other operand are few."""


@dot_general.impl
def _(x: Float[Array, "*b"], w: Ggml, *, dimension_numbers: Any, **params: Any) -> Any:
    ((own, other), (batch, _)) = dimension_numbers
    rows = x.size // math.prod(x.shape[a] for a in own) if x.size else 0
    if w.ndim != 2 or other != (1,) or batch or params.get("out_sharding") is not None:
        raise Refused(f"products contract the last axis of {w._type}, a matrix")
    if not 0 < rows <= ROWS:
        raise Refused(f"{rows} rows times {w._type} are products with the dense array: at most {ROWS} are few")
    x = jnp.moveaxis(x, own[0], -1)
    few = x.astype(jnp.float32).reshape(rows, w.blocks.shape[-2], -1)
    lanes = [jnp.sum(decode(w.kind, w.blocks) * row, axis=-2) for row in few]
    out = jnp.stack([jnp.sum(lane, axis=-1) for lane in lanes]).reshape(*x.shape[:-1], w.shape[0])
    dtype = params.get("preferred_element_type")
    return out.astype(jnp.result_type(x.dtype, w.dtype) if dtype is None else dtype)


@gather.impl
def _(w: Ggml, index: Integer[Array, "*b i"], *, dimension_numbers: Any, slice_sizes: Any, **params: Any) -> Any:
    d, n = dimension_numbers, index.ndim - 1
    rows = d.collapsed_slice_dims == (0,) == d.start_index_map and tuple(slice_sizes[1:]) == tuple(w.shape[1:])
    if not rows or w.ndim < 2 or d.operand_batching_dims or d.offset_dims != tuple(range(n, n + w.ndim - 1)):
        raise Refused(f"lookups in {w._type} are of rows along its first axis")
    at = index[..., 0]
    found = dense(Ggml(jnp.take(w.blocks, at, axis=0, mode="clip"), w.kind, w.values, dtype=w.dtype))
    if params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    inside = jnp.expand_dims((at >= 0) & (at < w.shape[0]), tuple(range(n, found.ndim)))
    fill = params.get("fill_value")
    return jnp.where(inside, found, jnp.asarray(jnp.nan if fill is None else fill, found.dtype))
