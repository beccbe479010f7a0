"""Tangent policies: what a small change of a value is.

dense          an array, of the shape and dtype that the value stands for (the default)
componentwise  a record of the tangents of the components
itself         a value of the same class, by ``from_dense``
none           nothing: the value is a constant for differentiation
"""

from typing import Any


class Tangent:
    """A policy. Subclass it to make your own; the class keyword ``tangent=`` takes an instance.

    A tangent type that is a hi type needs `zero` and `add`, which are called with that type.
    """

    name = "custom"

    def tangent_type(self, ty: Any) -> Any:
        """The type of tangents of a value of type ``ty``."""
        raise NotImplementedError

    def cotangent_type(self, ty: Any) -> Any:
        """The type of cotangents; the tangent type's own cotangent form unless a policy says otherwise."""
        t = self.tangent_type(ty)
        return t if t is ty else t.to_ct_aval()

    def by_components(self, ty: Any) -> bool:
        """Whether derivatives are taken with respect to the components, rather than what the value stands for."""
        return False

    def open(self, ty: Any, t: Any) -> Any:
        """The array of the shape that a value of type ``ty`` stands for, from a tangent of it."""
        return t

    def close(self, ty: Any, array: Any) -> Any:
        """The tangent of a value of type ``ty``, from an array of the shape that the value stands for."""
        return array

    def zero(self, ty: Any) -> Any:
        """The zero of the tangent type ``ty``."""
        raise NotImplementedError(f"{ty} has no zero: its tangent policy {self.name!r} does not define one")

    def add(self, ty: Any, x: Any, y: Any) -> Any:
        """The sum of two tangents of type ``ty``."""
        raise NotImplementedError(f"{ty} has no addition: its tangent policy {self.name!r} does not define one")


class Dense(Tangent):
    name = "dense"

    def tangent_type(self, ty: Any) -> Any:
        return ty.dense_type.to_tangent_aval()

    def zero(self, ty: Any) -> Any:
        raise TypeError(f"{ty} is not a tangent type: tangents of a value of this type are dense arrays")

    add = zero  # type: ignore[assignment]


dense = Dense()
