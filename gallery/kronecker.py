"""The Kronecker product A ⊗ B: mp × nq from mn + pq numbers.

    x (A ⊗ B):  with x cut to an m × p matrix X it is  Aᵀ X B
    (A ⊗ B)(C ⊗ D) = AC ⊗ BD          (A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ          (A ⊗ B)⁻¹ = A⁻¹ ⊗ B⁻¹

Tangents are pairs of factors.  The size of each axis, ``m*p``, is arithmetic on those of the factors, and it is sharded as
the axis of A is.

In raw hijax: the type with its sizes and shardings, its tangent type, and four primitives with all their rules: about 300
lines.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

import typax


class Kron(typax.Value, name="kron", tangent="componentwise"):
    a: Float[Array, "*batch m n"]
    b: Float[Array, "*batch p q"]

    def dense(self) -> Float[Array, "*batch m*p n*q"]:
        blocks = jnp.einsum("mn,pq->mpnq", self.a, self.b)
        (m, n), (p, q) = self.a.shape, self.b.shape
        return blocks.reshape(m * p, n, q).reshape(m * p, n * q)


@typax.matmul.impl
def _(x: Float[Array, "*b k"], w: Float[Kron, "k n"]) -> Any:
    cut = x.reshape(*x.shape[:-1], w.a.shape[0], w.b.shape[0])
    y = jnp.einsum("...mp,mn,pq->...nq", cut, w.a, w.b)
    return y.reshape(*x.shape[:-1], w.shape[1])


@typax.matmul.impl
def _(v: Float[Kron, "m k"], w: Float[Kron, "k n"]) -> Any:
    if v.a.shape[1] != w.a.shape[0]:
        raise typax.Refused(f"the factors do not fit: {v.a.shape} with {w.a.shape}, {v.b.shape} with {w.b.shape}")
    return Kron(v.a @ w.a, v.b @ w.b)


@typax.transpose.impl
def _(w: Float[Kron, "m n"], *, permutation: Any) -> Any:
    return Kron(w.a.T, w.b.T) if tuple(permutation) == (1, 0) else w


@typax.op(reference=jnp.linalg.inv)
def inv(w: Float[Kron, "n n"]) -> Kron:
    if w.a.shape[0] != w.a.shape[1]:
        raise typax.Refused(f"the factors are not square: {w.a.shape}, {w.b.shape}")
    return Kron(jnp.linalg.inv(w.a), jnp.linalg.inv(w.b))
