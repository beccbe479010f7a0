"""The shipped tangent policies, and `retract`.

policy         tangent of v               zero, sum              v moved by t
dense          t: array like dense(v)     of arrays              from_dense(dense(v) + t)
componentwise  a record (dv1, ..., dvn)   of each component      (v1 + dv1, ..., vn + dvn)
itself         a value of v's class       from_dense(0), from_dense(dense(s) + dense(t))
none           nothing                                           v
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from typax import _jax
from typax._prim import has_tangent
from typax._spec import Pspec, by_policy
from typax._structural import component_leaves, dense, from_leaves
from typax._tangent import Tangent
from typax._type import ValueType


def retract(value: Any, tangent: Any) -> Any:
    """``value`` moved by ``tangent``: the update of a parameter, whatever its type.

    For an array this is the sum, in the dtype of ``value``.  For a value of a declared type it is what its tangent policy
    says: with dense tangents ``from_dense(dense(value) + tangent)``, with componentwise ones each component moved.

    Raises:
      TypeError: if the tangent is not one of the value's, or the class has no ``from_dense`` where that is needed.
    """
    ty = _jax.typeof(value)
    want, got = ty.to_tangent_aval(), _jax.typeof(tangent)
    if not _is_tangent(want, got):
        raise TypeError(f"typax.retract: tangents of {ty} are of type {want}, not {got}")
    if isinstance(ty, ValueType):
        return ty.decl.tangent.retract(ty, value, tangent)
    if _jax.is_hi(ty):
        raise TypeError(f"typax.retract: {ty} is not a declared type, so how its values move is not known")
    return (value + tangent).astype(ty.dtype) if has_tangent(ty) else value


def _is_tangent(want: Any, got: Any) -> bool:
    if _jax.is_hi(want) or _jax.is_hi(got):
        return want == got
    return want.shape == got.shape and (want.dtype == _jax.float0) == (got.dtype == _jax.float0)


def from_dense(ty: ValueType, array: Any, what: str) -> Any:
    """The value of type ``ty`` that its class makes of an array."""
    cls = ty.decl.cls
    if not hasattr(cls, "from_dense"):
        raise TypeError(
            f"{what} of {ty} needs a classmethod {cls.__name__}.from_dense(cls, x, **statics), which makes a value of the "
            "array that it stands for"
        )
    out = cls._from_dense(array.astype(ty.dtype), ty)
    if (got := _jax.typeof(out)).normalize() != ty.normalize():
        raise TypeError(f"{cls.__name__}.from_dense gives {got} where {what} needs {ty}")
    return out


class Dense(Tangent):
    """Tangents are arrays of the shape and dtype that the value stands for."""

    name = "dense"

    def check(self, cls: Any) -> None:
        if cls._declaration.is_record:
            raise TypeError(f'{cls.__name__}: a record stands for no single array; its tangents are "componentwise"')

    def tangent_type(self, ty: Any) -> Any:
        return ty.dense_type.to_tangent_aval()

    def zero(self, ty: Any) -> Any:
        raise TypeError(f"{ty} is not a tangent type: tangents of a value of this type are dense arrays")

    def add(self, ty: Any, x: Any, y: Any) -> Any:
        return self.zero(ty)

    def retract(self, ty: Any, value: Any, t: Any) -> Any:
        return from_dense(ty, dense(value) + t, "typax.retract")


class Componentwise(Tangent):
    """Tangents are records of the tangents of the components."""

    name = "componentwise"
    by_components = True

    def check(self, cls: Any) -> None:
        decl = cls._declaration
        fixed = [p.dtypes for c in decl.components for p in c.patterns]
        if not decl.is_record and all(d is not None and not any(map(_inexact, d)) for d in fixed):
            raise TypeError(f"{cls.__name__}: no component has a floating dtype, so that componentwise tangents are empty")

    def tangent_type(self, ty: Any) -> Any:
        return self._record(ty, [a.to_tangent_aval() for a in ty.leaves])

    def cotangent_type(self, ty: Any) -> Any:
        return self._record(ty, [a.to_ct_aval() for a in ty.leaves])

    def _record(self, ty: Any, leaves: list[Any]) -> Any:
        if not any(map(has_tangent, ty.leaves)):
            shape = () if ty.decl.is_record else ty.shape
            return _jax.ShapedArray(shape, np.dtype(_jax.float0))
        own = ty.decl.is_record and ty.admits(leaves)
        decl = ty.decl if own else ty.decl.cls._tangent_class._declaration
        return decl.cls._hitype(decl, leaves, ty.tree, ty.statics if own else (), ty.masks)

    def tangent_spec(self, spec: Any) -> Any:
        return self._spec(spec, [s.to_tangent_spec() for s in spec.leaves])

    def cotangent_spec(self, spec: Any) -> Any:
        return self._spec(spec, [s.to_ct_spec() for s in spec.leaves])

    def _spec(self, spec: Any, leaves: list[Any]) -> Any:
        decl = spec.decl if spec.decl.is_record else spec.decl.cls._tangent_class._declaration
        return Pspec(decl, leaves, f"the tangents of {spec}", by_policy)

    def zero(self, ty: Any) -> Any:
        return from_leaves(ty, [_zero(a) for a in ty.leaves])

    def add(self, ty: Any, x: Any, y: Any) -> Any:
        pairs = zip(ty.leaves, component_leaves(x), component_leaves(y), strict=True)
        return from_leaves(ty, [_jax.add(a, b) if has_tangent(t) else a for t, a, b in pairs])

    def retract(self, ty: Any, value: Any, t: Any) -> Any:
        pairs = zip(component_leaves(value), component_leaves(t), strict=True)
        return from_leaves(ty, [retract(a, b) for a, b in pairs])


def _inexact(dtype: str) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    except TypeError:
        return False


def _zero(aval: Any) -> Any:
    return _jax.zeros(aval) if has_tangent(aval) else np.zeros(aval.shape, _jax.float0)


class Itself(Tangent):
    """Tangents are values of the same class, made by its classmethod ``from_dense(cls, x, **statics)``.

    With `error_feedback` a tangent is a record of such a value and of what it leaves out, so that sums lose nothing: the
    next sum takes the rest along (as in error-feedback SGD, Seide et al. 2014).
    """

    name = "itself"

    def __init__(self, error_feedback: bool = False) -> None:
        self.error_feedback = error_feedback

    def check(self, cls: Any) -> None:
        if cls._declaration.is_record:
            raise TypeError(f'{cls.__name__}: a record stands for no single array; its tangents are "componentwise"')
        if not hasattr(cls, "from_dense"):
            raise TypeError(
                f'{cls.__name__}: tangent="{self.name}" needs a classmethod from_dense(cls, x, **statics), which makes a '
                "value of the array that it stands for; zero and addition follow from it"
            )

    def tangent_type(self, ty: Any) -> Any:
        return feedback_record.type(ty, ty.dense_type) if self.error_feedback else ty

    def tangent_spec(self, spec: Any) -> Any:
        return (
            Pspec(feedback_record._declaration, [spec, spec.dense], f"the tangents of {spec}", by_policy)
            if self.error_feedback
            else spec
        )

    def cotangent_spec(self, spec: Any) -> Any:
        return self.tangent_spec(spec)

    def open(self, ty: Any, t: Any) -> Any:
        if ty.decl.tangent is feedback:
            value, error = component_leaves(t)
            return dense(value) + error
        return dense(t)

    def close(self, ty: Any, array: Any) -> Any:
        if ty.decl.tangent is feedback:
            value = from_dense(ty.leaves[0], array, "a tangent")
            return from_leaves(ty, [value, array - dense(value)])
        return from_dense(ty, array, "a tangent")

    def zero(self, ty: Any) -> Any:
        return self.close(ty, _jax.zeros(ty.dense_type))

    def add(self, ty: Any, x: Any, y: Any) -> Any:
        return self.close(ty, dense(x) + dense(y))

    def retract(self, ty: Any, value: Any, t: Any) -> Any:
        return from_dense(ty, dense(value) + self.open(_jax.typeof(t), t), "typax.retract")


class _Feedback(Componentwise):
    """Of the record (value, error): the sum rounds once and keeps the rest."""

    name = "itself with error feedback"

    def tangent_type(self, ty: Any) -> Any:
        return ty

    cotangent_type = tangent_type

    def tangent_spec(self, spec: Any) -> Any:
        return spec

    cotangent_spec = tangent_spec

    def zero(self, ty: Any) -> Any:
        return itself.close(ty, _jax.zeros(ty.leaves[1]))

    def add(self, ty: Any, x: Any, y: Any) -> Any:
        return itself.close(ty, itself.open(ty, x) + itself.open(ty, y))


feedback_record: Any  # set by _value: the class of the record (value, error)


class NoTangent(Tangent):
    """The value is a constant for differentiation."""

    name = "none"

    def tangent_type(self, ty: Any) -> Any:
        shape = () if ty.decl.is_record else ty.shape
        return _jax.ShapedArray(shape, np.dtype(_jax.float0))

    def cotangent_type(self, ty: Any) -> Any:
        return self.tangent_type(ty)

    def retract(self, ty: Any, value: Any, t: Any) -> Any:
        return value


dense_tangent, componentwise, itself, none, feedback = Dense(), Componentwise(), Itself(), NoTangent(), _Feedback()
shipped = {"dense": dense_tangent, "componentwise": componentwise, "itself": itself, "none": none}
