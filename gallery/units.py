"""Quantities with units: a product has the product of the units, a sum needs equal ones, all at trace time.

A cotangent of x pairs with a tangent of x to a plain number, so that its unit is the inverse one: the gradient of a pure
number with respect to a length is in 1/m.  A tangent has the unit of the value.

In raw hijax: the type, its lowering and printing, and for each of the four ops a primitive with typing, jvp, transpose and
batching rules; the inverse unit threaded by hand through each transpose; about 300 lines.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import typax


class Unit(tuple):
    """Powers of metre, second and kilogram: ``Unit((1, -1, 0))`` is m s^-1."""

    def __str__(self) -> str:
        return " ".join(n if p == 1 else f"{n}^{p}" for n, p in zip(("m", "s", "kg"), self, strict=True) if p) or "1"


class Dual(typax.Itself):
    def cotangent_type(self, ty: Any) -> Any:
        return ty.with_statics(unit=Unit(-p for p in ty.static("unit")))


class Quantity(typax.Value, name="quantity", tangent=Dual()):
    magnitude: Float[Array, "*batch"]
    unit: Unit = Unit((0, 0, 0))

    def dense(self) -> Float[Array, "*batch"]:
        return self.magnitude

    @classmethod
    def from_dense(cls, x: Any, unit: Unit) -> Any:
        return cls(x, unit)


METRE, SECOND, KILOGRAM = (Unit(int(i == k) for i in range(3)) for k in range(3))
multiply = typax.op(jnp.multiply, name="multiply")
divide = typax.op(jnp.divide, name="divide")
add = typax.op(jnp.add, name="add")


@multiply.impl
def _(a: Quantity, b: Quantity) -> Quantity:
    return Quantity(a.magnitude * b.magnitude, Unit(p + q for p, q in zip(a.unit, b.unit, strict=True)))


@divide.impl
def _(a: Quantity, b: Quantity) -> Quantity:
    return Quantity(a.magnitude / b.magnitude, Unit(p - q for p, q in zip(a.unit, b.unit, strict=True)))


@add.impl
def _(a: Quantity, b: Quantity) -> Quantity:
    if a.unit != b.unit:
        raise typax.Refused(f"cannot add {a.unit} and {b.unit}: {jax.typeof(a)} + {jax.typeof(b)}")
    return Quantity(a.magnitude + b.magnitude, a.unit)
