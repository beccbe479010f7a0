"""`Value`: a class statement makes a hi type.

    class QArray(typax.Value, name="q8"):
        qvalue: Int8[Array, "*batch n"]
        scale: Float32[Array, "*batch"]

        def dense(self) -> Float32[Array, "*batch n"]:
            return self.qvalue.astype(jnp.float32) * self.scale[..., None]

The statement is read once, into a `Declaration`; from then on values are built, checked and traced by what it says.
"""

import copy
import inspect
import sys
from collections import ChainMap
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from typax import _axes, _build, _jax, _policies, _refuse
from typax._axes import static_key
from typax._declaration import MISSING, Component, Declaration, Static
from typax._declare import ValueMeta, declare
from typax._indexing import index
from typax._op import Op
from typax._prim import opens_by_leaves
from typax._shapes import transpose
from typax._spec import Pspec, of_class
from typax._structural import (
    Opened,
    as_operand,
    component_leaves,
    dense,
    from_leaves,
    is_open,
    over_axes,
    pack_open,
)
from typax._type import ValueType, typing_tree


def _opens(name: str) -> Any:
    def get(tracer: Any) -> Any:
        ty = _jax.typeof(tracer)
        if Opened.here():
            return dict(zip((c.name for c in ty.decl.components), ty.tree.unflatten(component_leaves(tracer)), strict=True))[
                name
            ]
        raise TypeError(
            f"{ty.decl.cls.__name__}.{name}: a value of type {ty} is closed while a program is traced; open it with "
            f"v.components(), or write an op (typax.op), in whose body the components of operands are open"
        )

    return _jax.aval_property(get)


class Value(metaclass=ValueMeta):
    """Base class of hi values. Subclass it with annotated components, statics and a ``dense`` method.

    Class keywords: ``name`` is how the type prints (default: the class name in lower case); ``tangent`` is what a small
    change of a value is: ``"dense"`` (the default), ``"componentwise"``, ``"itself"``, ``"none"``, or a `typax.Tangent`;
    ``hitype`` is a subclass of `typax.ValueType` that replaces what is derived for the type (printing, mapping, sharding).

    A component is annotated in jaxtyping's notation, by another value class, or as ``tuple[Any, ...]``; any other
    annotated field is a static parameter of the type and must be hashable.  The return annotation of ``dense`` says what a
    value stands for.  A class without ``dense`` is a record: it stands for the dict of what its components stand for, with
    componentwise tangents.  Methods and properties are ops, in which components are open.

    A value has the `shape`, `ndim`, `size` and ``dtype`` of what it stands for; `nbytes` are those of its components.

    Raises:
      TypeError: at the class statement, if the declaration cannot be understood or contradicts itself; when a value is
        built, if the components do not fit it.
    """

    _declaration: ClassVar[Declaration]
    _hitype: ClassVar[type[ValueType]]
    _base_hitype: ClassVar[type[ValueType]]
    _tangent_class: ClassVar[Any]

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        tangent: Any = None,
        hitype: type[ValueType] | None = None,
        _components: tuple[Component, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        names = _axes.scope(sys._getframe(1))
        name = name or cls.__name__.lower()
        if _components is None:
            cls._declaration = declare(Value, cls, name, tangent, names)
            _install_from_dense(cls)
        else:
            order = tuple(c.name for c in _components)
            cls._declaration = Declaration(cls, name, _components, (), order, tangent, None, None, None)
        decl = cls._declaration
        decl.tangent.check(cls)
        props = {c.name: _opens(c.name) for c in decl.components}
        statics = {s.name: _static_property(s.name) for s in decl.statics if s.name != "dtype"}
        methods = {"components": _jax.aval_method(cls.components), "dense": _jax.aval_method(dense)}
        methods |= {"transpose": _jax.aval_method(cls.transpose), "T": _jax.aval_property(lambda x: x.transpose())}
        methods |= {"_getitem": staticmethod(cls.__getitem__), "_len": staticmethod(cls.__len__)}
        if hitype is not None and not (isinstance(hitype, type) and issubclass(hitype, ValueType)):
            raise TypeError(f"{cls.__name__}: hitype={hitype!r} is no subclass of typax.ValueType")
        inherited = next((b._base_hitype for b in cls.__mro__[1:] if "_base_hitype" in vars(b)), ValueType)
        base: Any = hitype or inherited
        cls._base_hitype = base
        space = _refuse.on_tracers() | props | statics | methods | _install_methods(cls, names)
        cls._hitype = type(f"{cls.__name__}Type", (base,), space)
        cls.dense = lambda self: dense(self)  # type: ignore[attr-defined]
        cls.__signature__ = _build.signature(decl)  # type: ignore[attr-defined]
        _jax.register(cls, _type_of, as_operand)
        if opens_by_leaves(cls._hitype):
            own_init = None if cls.__init__ is Value.__init__ else ValueType.of_leaves
            _jax.register_node(cls, "_leaves", "_type", own_init)
        if _components is None and decl.tangent.by_components:
            cls._tangent_class = _companion(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "_leaves" in kwargs:  # a call in C++ closes a value
            vars(self).update(kwargs)
            kwargs["_type"].finish(self)
            return
        cls = type(self)
        given = _build.arguments(cls, args, kwargs)
        decl = cls._declaration
        comps = [_build.component(cls, c, given[c.name]) for c in decl.components]
        leaves, tree = jax.tree.flatten(tuple(comps))
        if any(isinstance(x, _jax.Tracer) or is_open(x) for x in leaves) and not Opened.here():
            raise TypeError(
                f"{cls.__name__}(...) with traced components: a value is built in traced code by "
                f"{cls.__name__}.from_components(...)"
            )
        ty = _build.build_type(cls, leaves, tree, given)
        fields = vars(self)
        fields.update(_type=ty, _leaves=tuple(leaves), **given)
        fields.update(zip((c.name for c in decl.components), comps, strict=True))

    @classmethod
    def from_components(cls, *components: Any, **statics: Any) -> Self:
        """Build a value in traced code; takes what the constructor takes."""
        given = _build.arguments(cls, components, statics)
        comps = [_build.component(cls, c, given[c.name]) for c in cls._declaration.components]
        leaves, tree = jax.tree.flatten(tuple(comps))
        leaves = [pack_open(x) for x in leaves]
        return from_leaves(_build.build_type(cls, leaves, tree, given), leaves)

    def components(self) -> Any:
        """The components, in the order of the class statement: one alone, or a tuple."""
        leaves = component_leaves(self)
        comps = _jax.typeof(self).tree.unflatten(leaves)
        return comps[0] if len(comps) == 1 else tuple(comps)

    @classmethod
    def type(cls, *args: Any, **kwargs: Any) -> ValueType:
        """The type of a value that stands for an array; of a record, from the types of its components.

        ``Cls.type(shape, dtype=None, *, sharding=None, **axes_and_statics)``: ``sharding`` is that of the array; axes that
        the shape does not show, and statics, go by keyword.  ``Record.type(*component_types, **statics)``.

        Raises:
          TypeError: for a keyword that is no axis or static, or if no value stands for such an array.
        """
        if _build.declared(cls).is_record:
            return _build.record_type(cls, args, kwargs)
        return cls._array_type(*args, **kwargs)

    @classmethod
    def P(cls, *batch: Any, **named: Any) -> Pspec:
        """A partition spec for ``jax.shard_map`` and `typax.reshard`, from the names of mesh axes.

        ``QArray.P("i")`` partitions the first batch axis; ``QArray.P(None, n="i")`` a named axis, after as many positions as
        there are batch axes. A record takes one spec for each component: ``Tup.P(jax.P("i"), QArray.P("i"))``.

        Raises:
          TypeError: for an axis that the class does not have, or one that cannot be partitioned.
        """
        spec = of_class(_build.declared(cls), batch, named)
        spec.by_user = True
        return spec

    @classmethod
    def _array_type(
        cls, shape: Sequence[int], dtype: Any = None, *, sharding: Any = None, **axes_and_statics: Any
    ) -> ValueType:
        return _build.type_for(cls, tuple(shape), dtype, sharding, axes_and_statics)

    def __setattr__(self, name: str, _: Any) -> None:
        raise AttributeError(f"{type(self).__name__} values are immutable; build a new one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} values are immutable; {name} cannot be deleted")

    def __repr__(self) -> str:
        decl = type(self)._declaration
        with np.printoptions(threshold=100, edgeitems=2):
            return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in decl.order)})"

    def __reduce__(self) -> Any:
        # dtypes pickle, treedefs and types do not: rebuild from host components and statics
        host = tuple(jax.tree.map(_to_host, getattr(self, c.name)) for c in self._declaration.components)
        return _rebuild, (type(self), host, self._type.statics, self._type.masks)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self._type.of_leaves([_copied(x, memo) for x in self._leaves])

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if not _jax.in_device_get():
            _refuse.not_an_array(self, "numpy.asarray")
        return self._type.of_leaves([jax.device_get(x) for x in self._leaves])

    __array_priority__ = 1000  # an operator with a NumPy array on its left is the value's
    __jax_array__ = property(lambda self: lambda: _refuse.not_an_array(self))
    __hash__ = object.__hash__

    def __getitem__(self, at: Any) -> Any:
        """Index by integers, slices, integer arrays, ``None``, ``...``; named axes if the type has an op that reads so."""
        return index(self, at)

    def __len__(self) -> int:
        shape = _jax.typeof(self).shape
        if not shape:
            raise TypeError(f"a value of type {_jax.typeof(self)} has no axis, so that it has no length")
        return int(shape[0])

    def transpose(self, *permutation: Any) -> Any:
        """Permute the axes; batch axes freely, and others if the type implements ``typax.transpose``."""
        return _transpose(self, *permutation)

    T = property(lambda self: self.transpose(), doc="The transpose, of a type that implements ``typax.transpose``.")

    # Everything an array tells about itself, a value tells about what it stands for.
    shape = property(lambda self: self._type.shape)
    ndim = property(lambda self: self._type.ndim)
    size = property(lambda self: self._type.size)
    nbytes = property(lambda self: self._type.nbytes)

    @property
    def sharding(self) -> Any:
        """Of the array that it stands for: on the devices where its components are."""
        want = self._type.sharding
        (first, *rest) = {x.sharding for x in self._type.lower_val(self)}
        if isinstance(first, jax.sharding.NamedSharding) and set(first.mesh.axis_types) == {jax.sharding.AxisType.Explicit}:
            return jax.sharding.NamedSharding(first.mesh, want.spec)
        if rest or (first.num_devices > 1 and not first.is_fully_replicated):
            raise AttributeError(
                f"{type(self).__name__}: the mesh axes are not explicit, so only the components have shardings"
            )
        return first

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__
        if "_type" in fields and any(c.name == name for c in self._declaration.components) and name not in fields:
            self._type.fill(self)
            return fields[name]
        if name == "dtype":
            return self._type.dtype
        if name in _refuse.NAMES:
            return _refuse.attribute(self, name)
        if isinstance(found := getattr(type(self), name, None), property) and found.fget is not None:
            return found.fget(self)  # it raised an AttributeError of its own: let that be seen
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def block_until_ready(self) -> Self:
        """Wait until every component has been computed."""
        jax.block_until_ready(self._leaves)
        return self

    locals().update(_refuse.on_values())

    @classmethod
    def _show_type(cls, ty: ValueType, short_dtypes: bool = False) -> str:
        """How the type prints in jaxprs."""
        decl = ty.decl
        pairs = zip(decl.statics, ty.statics, strict=True)
        extra = [_show_static(s, v) for s, v in pairs if not _same(s, v)]
        extra += [] if decl.is_record else _open_dtypes(ty)  # a record's components are printed
        own = f"<{','.join(extra)}>" if extra else ""
        if decl.is_record:
            named = not any(typing_tree(c.patterns[0].cls) for c in decl.components[:1]) or len(decl.components) > 1
            parts = [(f"{c.name}:" if named else "") + a.str_short(short_dtypes) for c, a in ty.fields]
            return f"{decl.name}{own}{{{','.join(parts)}}}"
        dt = ty.dense_type
        vary = ",".join(sorted(_jax.varying(dt)))
        return f"{decl.name}{own}[{_axes.show(_axes.of_type(dt))}]" + (f"{{V:{vary}}}" if vary else "")


def _transpose(value: Any, *permutation: Any) -> Any:
    given: Any = permutation or None
    return transpose(value, given[0] if given and not isinstance(given[0], int) else given)


def _same(s: Static, v: Any) -> bool:
    if s.default is MISSING:
        return False
    return s.default == v if s.name == "dtype" else static_key(s.default) == static_key(v)


def _open_dtypes(ty: ValueType) -> list[str]:
    """What the class leaves open in its components, where it is not the default."""
    out = []
    for c, leaf in ty.fields:
        p = c.patterns[0]
        if len(c.patterns) > 1 and _jax.is_hi(leaf):
            out.append(f"{c.name}:{leaf}")
        elif p.dtypes is not None and p.dtype is None and not _jax.is_hi(leaf) and leaf.dtype != p.default_dtype:
            out.append(f"{leaf.dtype}" if c.name == ty.decl.dtype_from else f"{c.name}:{leaf.dtype}")
    return out


def _show_static(s: Static, v: Any) -> str:
    return str(_axes.dtype_of(v)) if s.name == "dtype" else f"{s.name}={v}"


def _type_of(value: Any) -> ValueType:
    return value._type


class _Key:
    """A key on its way through pickle."""

    def __init__(self, key: Any) -> None:
        self.impl, self.data = str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key))

    def restore(self) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(self.data), impl=self.impl)


def _to_host(x: Any) -> Any:
    if _jax.is_hi_value(x):
        return x
    return _Key(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _from_host(x: Any) -> Any:
    return x if _jax.is_hi_value(x) else x.restore() if isinstance(x, _Key) else jnp.asarray(x)


def _copied(x: Any, memo: Any) -> Any:
    return copy.deepcopy(x, memo) if _jax.is_hi_value(x) else jnp.array(x, copy=True)


def _rebuild(cls: Any, comps: Any, statics: Any, masks: Any) -> Any:
    leaves, tree = jax.tree.flatten(comps)
    leaves = list(map(_from_host, leaves))
    ty = cls._hitype(cls._declaration, list(map(_jax.typeof, leaves)), tree, statics, masks)
    return ty.of_leaves(leaves)


def _static_property(name: str) -> Any:
    return _jax.aval_property(lambda tracer: _jax.typeof(tracer).static(name))


def _companion(cls: Any) -> Any:
    """The record of tangents of the components: as the class has them, of any dtype."""
    components = tuple(
        Component(
            c.name, tuple(_axes.Pattern(p.cls if typing_tree(p.cls) else Any, None, p.axes, c.name) for p in c.patterns)
        )
        for c in cls._declaration.components
    )
    body = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}._tangent_class"}
    name = f"{cls._declaration.name}.tangent"
    policy = _policies.componentwise
    return ValueMeta(f"{cls.__name__}Tangent", (Value,), body, name=name, tangent=policy, _components=components)


def _install_from_dense(cls: Any) -> None:
    """The classmethod ``from_dense``, written for one value, as an op over any batch axes; it stands for its argument."""
    given = cls.__dict__.get("from_dense")
    body = given.__func__ if isinstance(given, classmethod) else given or getattr(cls, "_from_dense_body", None)
    if body is None:
        return
    if cls._declaration.is_record:
        raise TypeError(f"{cls.__name__}.from_dense: a record stands for no single array")
    rank = cls._declaration.stands_for.axes.rank
    accepted = tuple(inspect.signature(body).parameters)[2:]

    def from_dense(x: Any, **statics: Any) -> Any:
        return over_axes(lambda x: body(cls, x, **statics), x.ndim - rank)(x)

    op = Op(_identity, "from_dense")
    op.add(from_dense, {})
    cls._from_dense_body = staticmethod(body)
    cls.from_dense = staticmethod(op)
    cls._from_dense = staticmethod(lambda x, ty: op(x, **{n: ty.static(n) for n in accepted}))


def _identity(x: Any) -> Any:
    return x


def _install_methods(cls: Any, names: Any) -> dict[str, Any]:
    """Make ops of the public methods and properties; what tracers of the type are to have."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base is not Value and isinstance(base, ValueMeta):
            found |= vars(base)
    on_tracers: dict[str, Any] = {}
    for name, member in found.items():
        if name in _refuse.FORWARDED and inspect.isfunction(member):  # a dunder method is no op: it calls ops
            on_tracers[_refuse.FORWARDED[name]] = staticmethod(member)
        elif name.startswith("_") or name in ("dense", "from_dense"):
            continue
        elif isinstance(member, property):
            get = _property(name, member)
            setattr(cls, name, property(get, doc=member.__doc__))
            on_tracers[name] = _jax.aval_property(get)
        elif isinstance(member, Op) or (inspect.isfunction(member) and not hasattr(Value, name)):
            op = member if isinstance(member, Op) else _method(name, member, ChainMap({cls.__name__: cls}, names))
            setattr(cls, name, op)
            on_tracers[name] = _jax.aval_method(op)
        elif inspect.isfunction(member):
            on_tracers[name] = _jax.aval_method(member)
    return on_tracers


def _method(name: str, body: Any, names: Any) -> Op:
    op = Op(None, name)
    op.__doc__ = body.__doc__
    op.add(body, names)
    return op


class _Closed(Exception):
    """Raised where a property asks for a component."""


class _Statics:
    """What a property can know of a value without opening it."""

    def __init__(self, ty: ValueType) -> None:
        self.__dict__.update(_type=ty, **dict(zip((s.name for s in ty.decl.statics), ty.statics, strict=True)))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim", "size", "nbytes", "dtype"):
            return getattr(self._type, name)
        raise _Closed(name)


def _property(name: str, member: property) -> Any:
    """A property that reads statics only is what it returns; one that reads components is an op."""
    op = Op(None, name)
    assert member.fget is not None
    body = member.fget
    op.add(lambda self: body(self), {})

    def get(value: Any) -> Any:
        try:
            return body(_Statics(_jax.typeof(value)))
        except _Closed:
            return op(value)

    return get


class Feedback(Value, name="fed", tangent=_policies.feedback):
    """A tangent with error feedback: a value, and what it leaves out."""

    value: Value
    error: jax.Array


_policies.feedback_record = Feedback
