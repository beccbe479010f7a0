"""Read a class statement into a `Declaration`."""

import typing
from collections import ChainMap
from collections.abc import Sequence
from typing import Any, ClassVar, dataclass_transform

import jax

from typax import _axes, _jax, _policies
from typax._declaration import MISSING, Component, Declaration, Static
from typax._tangent import Tangent
from typax._type import ValueType, typing_tree


@dataclass_transform(frozen_default=True, eq_default=False)
class ValueMeta(type):
    """Makes ``isinstance(tracer, QArray)`` true, as it is for ``jax.Array``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, _jax.Tracer):
            aval = instance.aval
            return isinstance(aval, ValueType) and issubclass(aval.decl.cls, cls)
        return super().__instancecheck__(instance)


def declare(root: Any, cls: Any, name: str, tangent: Any, names: Any) -> Declaration:
    """What the class statement of ``cls`` says; ``root`` is the base class of all value classes."""
    who = cls.__name__
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base is not root and isinstance(base, ValueMeta):
            own = _axes.resolve(base, ChainMap({who: cls}, names), who)
            if taken := [n for n in own if n in hints and _is_class_var(hints[n]) and not _is_class_var(own[n])]:
                raise TypeError(
                    f"{who}: a field cannot be named {taken[0]}, a class variable of its base; choose another name"
                )
            hints |= own
    components, statics = [], []
    for field, hint in hints.items():
        if _is_class_var(hint):
            continue
        if field != "dtype" and hasattr(root, field):
            raise TypeError(f"{who}: a field cannot be named {field}, which Value defines; choose another name")
        if _is_component(hint):
            pats = _axes.patterns(hint, f"{who}.{field}")
            if len({str(p.axes) for p in pats}) > 1:
                raise TypeError(f"{who}.{field}: the alternatives of a component have the same axes")
            if _has_default(cls, field):
                raise TypeError(f"{who}.{field}: a component has no default; make one in a classmethod that builds a value")
            components.append(Component(field, pats))
        else:
            statics.append(Static(field, getattr(cls, field, MISSING)))
    if not components:
        raise TypeError(f'{who} has no components; annotate one, for instance  x: Float[Array, "n"]')
    bases = (b._declaration.dense for b in cls.__mro__[1:] if "_declaration" in vars(b))
    stands_for, dtype_from, body = None, None, cls.__dict__.get("dense") or next(bases, None)
    if body is not None:
        stands_for, dtype_from = _stands_for(cls, body, names, components, statics)
    _bound(who, components, stands_for, {s.name for s in statics})
    return Declaration(
        cls, name, tuple(components), tuple(statics), tuple(h for h in hints if _is_field(h, components, statics)),
        _policy(cls, tangent, record=body is None), stands_for, dtype_from, body,
    )  # fmt: skip


def _is_class_var(hint: Any) -> bool:
    return typing.get_origin(hint) is ClassVar or hint is ClassVar


def _has_default(cls: Any, field: str) -> bool:
    found = next((vars(b)[field] for b in cls.__mro__ if field in vars(b)), None)
    return found is not None and not hasattr(found, "__get__")


def _bound(who: str, components: Sequence[Component], stands_for: Any, statics: set[str]) -> None:
    """Every name in an expression, and in what a value stands for, is an axis of a component or a static."""
    known = statics | {d.name for c in components if c.axes for d in c.axes.dims if d.name}
    places = [(f"{who}.{c.name}", c.axes) for c in components] + [(f"{who}.dense", stands_for and stands_for.axes)]
    for where, axes in places:
        for d in axes.dims if axes else ():
            if unknown := sorted(d.names - known):
                raise TypeError(
                    f"{where}: axis {d.text!r}: no component has an axis {unknown[0]!r} and no static is named so; add "
                    f"one, for instance  {unknown[0]}: int"
                )


def _policy(cls: Any, tangent: Any, record: bool) -> Tangent:
    if tangent is None:
        return _policies.componentwise if record else _policies.dense_tangent
    policy = _policies.shipped.get(tangent) if isinstance(tangent, str) else tangent
    if not isinstance(policy, Tangent):
        named = ", ".join(map(repr, _policies.shipped))
        raise TypeError(f"{cls.__name__}: tangent={tangent!r} is none of {named}, nor an instance of a typax.Tangent")
    if record and not (policy.by_components or isinstance(policy, _policies.NoTangent)):
        raise TypeError(
            f"{cls.__name__}: a record stands for no single array, so its tangents are componentwise, not {policy.name!r}; "
            "give the class a dense method, or leave out tangent="
        )
    return policy


def _is_field(name: str, components: Sequence[Component], statics: Sequence[Static]) -> bool:
    return any(f.name == name for f in (*components, *statics))


def _is_component(hint: Any) -> bool:
    if hasattr(hint, "array_type") and hasattr(hint, "dim_str"):
        return True
    args = typing.get_args(hint)
    if typing_tree(hint):
        return any(a is Any or _is_component(a) for a in args)
    if args:
        return any(map(_is_component, args))
    return hint is jax.Array or isinstance(hint, ValueMeta) or _jax.is_hi_class(hint)


def _stands_for(cls: Any, body: Any, names: Any, components: Any, statics: Any) -> tuple[_axes.Pattern, str | None]:
    who = f"{cls.__name__}.dense"
    hint = _axes.resolve(body, names, who).get("return")
    if hint is None:
        raise TypeError(f'{who} needs a return annotation, for instance  -> Float32[Array, "*batch n"]')
    (pattern,) = _axes.patterns(hint, who)
    if pattern.axes is None:
        raise TypeError(f"{who}: the return annotation must give the axes, for instance Float32[Array, '*batch n']")
    if pattern.dtype is not None:
        return pattern, None
    if any(s.name == "dtype" for s in statics):
        return pattern, "dtype"
    for c in components:
        if c.patterns[0].dtypes == pattern.dtypes and c.axes is not None:
            return pattern, c.name
    raise TypeError(
        f"{who}: {pattern.text} leaves the dtype open; add a static field  dtype: Any, or a component with the same dtypes"
    )
