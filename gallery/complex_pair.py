"""Complex numbers as a pair of real arrays: a + ib, for accelerators and formats that know real numbers only.

    (a + ib)(c + id) = (ac - bd) + i(ad + bc)            elementwise
    (A + iB)(C + iD) in three real products, not four    matrices (Gauss): with P = AC, Q = BD, S = (A + B)(C + D)
                                                         it is (P - Q) + i(S - P - Q)

Tangents are pairs again: the gradient of a real loss is (∂L/∂a, ∂L/∂b), the conjugate of what `jax.grad` gives for complex
arrays.

In raw hijax: the type and its tangent type, and for each op a primitive with typing, jvp, transpose and batching rules:
about 250 lines.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex64, Float32

import typax


class Pair(typax.Value, name="c", tangent="componentwise"):
    re: Float32[Array, "*batch"]
    im: Float32[Array, "*batch"]

    def dense(self) -> Complex64[Array, "*batch"]:
        return jax.lax.complex(self.re, self.im)

    def magnitude(self):
        return jnp.sqrt(self.re**2 + self.im**2)


@typax.op(reference=lambda z: z)
def split(z: Complex64[Array, "*b"]) -> Pair:
    return Pair(jnp.real(z), jnp.imag(z))


@typax.op(reference=jnp.conj)
def conj(z: Pair) -> Pair:
    return Pair(z.re, -z.im)


multiply = typax.op(jnp.multiply, name="multiply")


@multiply.impl
def _(x: Pair, y: Pair) -> Pair:
    return Pair(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)


@typax.matmul.impl
def _(x: Complex64[Pair, "*b m k"], y: Complex64[Pair, "k n"]) -> Any:
    p, q = x.re @ y.re, x.im @ y.im
    return Pair(p - q, (x.re + x.im) @ (y.re + y.im) - p - q)
