"""Diagonal plus low rank, Σ = diag(d) + U Uᵀ: an n × n covariance of factors, in n (r + 1) numbers and O(n r²) time.

With the r × r capacitance C = I + Uᵀ D⁻¹ U (Woodbury 1950; the matrix determinant lemma):

    Σ⁻¹ y = D⁻¹ y - D⁻¹ U C⁻¹ Uᵀ D⁻¹ y              log det Σ = log det C + Σᵢ log dᵢ

Tangents are those of d and U.  `solve` has no reference but its implementation, so that it is differentiated through that
for y too: the gradients of a Gaussian log-likelihood never hold an n × n array.

In raw hijax: the type, its tangent type, and three primitives whose derivatives are worked out by hand: about 300 lines.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

import typax


class DiagonalPlusLowRank(typax.Value, name="dlr", tangent="componentwise"):
    d: Float[Array, "*batch n"]
    u: Float[Array, "*batch n r"]

    def dense(self) -> Float[Array, "*batch n n"]:
        return jnp.diag(self.d) + self.u @ self.u.T


def capacitance(s: Any) -> Any:
    return jnp.eye(s.u.shape[1], dtype=s.u.dtype) + s.u.T @ (s.u / s.d[:, None])


@typax.matmul.impl
def _(x: Float[Array, "*b n"], s: Float[DiagonalPlusLowRank, "n n"]) -> Any:
    return x * s.d + (x @ s.u) @ s.u.T


@typax.op(reference=None)
def solve(s: Float32[DiagonalPlusLowRank, "n n"], y: Float32[Array, "n"]) -> Any:
    z = y / s.d
    return z - (s.u @ jnp.linalg.solve(capacitance(s), s.u.T @ z)) / s.d


@typax.op(reference=lambda s: jnp.linalg.slogdet(s)[1])
def logdet(s: Float[DiagonalPlusLowRank, "n n"]) -> Any:
    return jnp.linalg.slogdet(capacitance(s))[1] + jnp.sum(jnp.log(jnp.abs(s.d)))


def log_likelihood(s: Any, y: Any) -> Any:
    """Of ``y`` under the normal distribution with mean 0 and covariance ``s``."""
    return -0.5 * (y @ solve(s, y) + logdet(s) + len(y) * jnp.log(2 * jnp.pi))
