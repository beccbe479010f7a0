"""A block-diagonal matrix: b blocks of m × n, in b·m·n numbers instead of b² m n.

    x @ diag(W₁ … W_b):  x is cut into b pieces, each meets its block
    inverse, determinant, transpose, product: block by block

Tangents are blocks too, so that nothing off the diagonal is ever learned.

In raw hijax: the type, its tangent type, and five primitives with typing, jvp, transpose and batching rules: about 350
lines.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import typax


class BlockDiagonal(typax.Value, name="bd", tangent="componentwise"):
    blocks: Float[Array, "*batch b m n"]

    def dense(self) -> Float[Array, "*batch b*m b*n"]:
        b, m, n = self.blocks.shape
        mine = jnp.eye(b, dtype=bool)[:, None, :, None]
        return jnp.where(mine, self.blocks[:, :, None], 0).reshape(b * m, b, n).reshape(b * m, b * n)


@typax.matmul.impl
def _(x: Float[Array, "*b k"], w: Float[BlockDiagonal, "k n"]) -> Any:
    pieces = x.reshape(*x.shape[:-1], *w.blocks.shape[:2])
    return jnp.einsum("...bm,bmn->...bn", pieces, w.blocks).reshape(*x.shape[:-1], w.shape[1])


@typax.matmul.impl
def _(v: Float[BlockDiagonal, "m k"], w: Float[BlockDiagonal, "k n"]) -> Any:
    if len(v.blocks) != len(w.blocks):
        raise typax.Refused(f"{len(v.blocks)} blocks of {jax.typeof(v)} do not meet {len(w.blocks)} of {jax.typeof(w)}")
    return BlockDiagonal(v.blocks @ w.blocks)


@typax.transpose.impl
def _(w: Float[BlockDiagonal, "m n"], *, permutation: Any) -> Any:
    return BlockDiagonal(w.blocks.mT) if tuple(permutation) == (1, 0) else w


@typax.op(reference=jnp.linalg.inv)
def inv(w: Float[BlockDiagonal, "n n"]) -> BlockDiagonal:
    if w.blocks.shape[1] != w.blocks.shape[2]:
        raise typax.Refused(f"the blocks are not square: {w.blocks.shape}")
    return BlockDiagonal(jnp.linalg.inv(w.blocks))


@typax.op(reference=lambda w: jnp.linalg.slogdet(w)[1])
def logdet(w: Float[BlockDiagonal, "n n"]) -> Any:
    if w.blocks.shape[1] != w.blocks.shape[2]:
        raise typax.Refused(f"the blocks are not square: {w.blocks.shape}")
    return jnp.sum(jnp.linalg.slogdet(w.blocks)[1])
