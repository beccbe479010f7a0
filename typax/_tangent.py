"""Tangent policies: what a small change of a value is.

dense          an array, of the shape and dtype that the value stands for (the default)
componentwise  a record of the tangents of the components (the default of a record)
itself         a value of the same class, by its classmethod ``from_dense``
none           nothing: the value is a constant for differentiation

This is the contract; `_policies` has the four.
"""

from typing import Any


class Tangent:
    """A policy: what a small change of a value is. Subclass it, and give an instance to the class keyword ``tangent=``.

    `name` is for messages; `by_components` says whether derivatives are taken with respect to the components, rather than
    to what the value stands for.
    A tangent (or cotangent) type that is a hi type needs `zero` and `add`; these are asked of the policy of *its* class.
    """

    name = "custom"
    by_components = False

    def check(self, cls: Any) -> None:
        """Called at the class statement. Raise a TypeError if the class cannot have this policy."""

    def tangent_type(self, ty: Any) -> Any:
        """The type of tangents of a value of type ``ty``."""
        raise NotImplementedError(f"the tangent policy {self.name!r} does not define tangent_type")

    def cotangent_type(self, ty: Any) -> Any:
        """The type of cotangents; the tangent type's own cotangent form unless a policy says otherwise."""
        t = self.tangent_type(ty)
        return t if t == ty else t.to_ct_aval()

    def open(self, ty: Any, t: Any) -> Any:
        """The array of the shape that a value stands for, from ``t``, a tangent or cotangent of type ``ty``."""
        return t

    def close(self, ty: Any, array: Any) -> Any:
        """The tangent or cotangent of type ``ty``, from an array of the shape that the value stands for."""
        return array

    def tangent_spec(self, spec: Any) -> Any:
        """The partition spec of a tangent of a value that is partitioned by ``spec``, a ``Cls.P(...)``."""
        return spec.dense

    def cotangent_spec(self, spec: Any) -> Any:
        """The partition spec of a cotangent of such a value."""
        return self.tangent_spec(spec).to_ct_spec()

    def zero(self, ty: Any) -> Any:
        """The zero of the tangent type ``ty``."""
        raise TypeError(f"{ty} is not a tangent type: the tangent policy {self.name!r} of its class defines no zero")

    def add(self, ty: Any, x: Any, y: Any) -> Any:
        """The sum of two tangents of type ``ty``."""
        raise TypeError(f"{ty} is not a tangent type: the tangent policy {self.name!r} of its class defines no addition")

    def retract(self, ty: Any, value: Any, t: Any) -> Any:
        """The value of type ``ty`` that lies in the direction of the tangent ``t`` from ``value``."""
        raise TypeError(f"values of type {ty} cannot be moved: the tangent policy {self.name!r} defines no retract")
