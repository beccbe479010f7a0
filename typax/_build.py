"""From what is given to a type: what the constructor, ``from_components`` and ``Cls.type`` make of their arguments.

QArray(codes, scale, dtype="bfloat16")      components and statics     ->  q8<bfloat16>[2,3]
QArray.type((2, 3), jnp.bfloat16)           an array type              ->  q8<bfloat16>[2,3]
Tup.type(f32[2], QArray.type((2, 3)))       types of components        ->  Tup{f32[2],q8[2,3]}
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _axes, _jax
from typax._axes import static_key
from typax._declaration import MISSING, Component, Declaration
from typax._prim import Cache
from typax._spec import twice
from typax._type import ValueType, typing_tree


def signature(decl: Declaration) -> inspect.Signature:
    """Of the constructor: components and statics in the order of the class statement."""
    defaults = {s.name: s.default for s in decl.statics}
    params, with_default = [], ""
    for n in decl.order:
        default = defaults.get(n, MISSING)
        if default is MISSING and with_default:
            raise TypeError(
                f"{decl.cls.__name__}: field {n} has no default but follows {with_default}, which has one; put the fields "
                f"with defaults last"
            )
        with_default = n if default is not MISSING else with_default
        kw = {} if default is MISSING else {"default": default}
        params.append(inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, **kw))
    return inspect.Signature(params)


def declared(cls: Any) -> Declaration:
    if "_declaration" not in vars(cls):
        raise TypeError(f"typax.{cls.__name__} is the base class of hi values; subclass it, with annotated components")
    return cls._declaration


def arguments(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a value by name, the statics as the type keeps them."""
    decl = declared(cls)
    try:
        bound = cls.__signature__.bind(*args, **kwargs)
    except TypeError as e:
        raise TypeError(f"{cls.__name__}: {e}; its fields are {', '.join(decl.order)}") from None
    bound.apply_defaults()
    given = dict(bound.arguments)
    given.update((s.name, static_value(cls, s.name, given[s.name])) for s in decl.statics)
    return given


def static_value(cls: Any, name: str, v: Any) -> Any:
    """A static as the type keeps it: hashable, a dtype as such, the size of an axis as an int."""
    try:
        hash(v)
    except TypeError:
        raise TypeError(
            f"{cls.__name__}: static {name} must be hashable, got {type(v).__name__}; annotate it as an array "
            f"(for instance Float[Array, 'n']) if it is a component"
        ) from None
    decl = cls._declaration
    if name == "dtype":
        return _static_dtype(cls, v)
    if name not in decl.axis_names:
        return v
    try:
        if isinstance(v, bool | np.bool_):
            raise TypeError
        return operator.index(v)
    except TypeError:
        raise TypeError(
            f"{cls.__name__}: static {name} is the size of an axis or part of one, so it must be an integer, got {v!r}"
        ) from None


def _static_dtype(cls: Any, v: Any) -> Any:
    decl = cls._declaration
    try:
        dtype = _axes.dtype_of(v)
    except TypeError:
        raise TypeError(f"{cls.__name__}: dtype must be a dtype, got {v!r}") from None
    if decl.dtype_from == "dtype" and not decl.stands_for.admits(dtype):
        raise TypeError(f"{cls.__name__}: dtype {dtype} is none of those that dense stands for, {decl.stands_for.text}")
    return dtype


def component(cls: Any, c: Component, x: Any) -> Any:
    if typing_tree(c.patterns[0].cls):
        return jax.tree.map(lambda v: v if _jax.is_hi_value(v) else _array(cls, c, v), x)
    return _array(cls, c, x)


_NUMBERS = ((bool, jnp.bool), (int, jnp.integer), (float, jnp.floating), (complex, jnp.complexfloating))  # each in the next


def _array(cls: Any, c: Component, x: Any) -> Any:
    if any(type(x) is t for t, _ in _NUMBERS):
        return _scalar(cls, c, x)
    if isinstance(x, jax.Array) or _jax.is_hi_value(x):
        return x
    if not isinstance(x, np.ndarray | np.generic):
        raise TypeError(f"{cls.__name__}: component {c} must be an array or a hi value, got {type(x).__name__}")
    if not any(p.admits(x.dtype) for p in c.patterns):
        raise TypeError(f"{cls.__name__}: component {c} does not admit {x.dtype}[{','.join(map(str, x.shape))}]")
    return jnp.asarray(x)


def _scalar(cls: Any, c: Component, x: Any) -> Any:
    """A Python number takes the component's dtype, if that has numbers of its kind."""
    dtype = c.patterns[0].dtype
    if dtype is not None:
        held = [jnp.issubdtype(dtype, t) for _, t in _NUMBERS]
        if not any(held[[type(x) is t for t, _ in _NUMBERS].index(True) :]):
            raise TypeError(f"{cls.__name__}: component {c} does not admit the {type(x).__name__} {x!r}")
    try:
        return jnp.asarray(x, dtype=dtype)
    except OverflowError:
        raise ValueError(f"{cls.__name__}: component {c} cannot hold {x!r}") from None


def build_type(cls: Any, leaves: Sequence[Any], tree: Any, given: Mapping[str, Any]) -> ValueType:
    statics = tuple(given[s.name] for s in cls._declaration.statics)
    return cls._hitype(cls._declaration, [_jax.typeof(x) for x in leaves], tree, statics).check()


# --- Cls.type ----------------------------------------------------------------------------------------------------


def record_type(cls: Any, components: tuple[Any, ...], statics: dict[str, Any]) -> ValueType:
    decl = cls._declaration
    if len(decl.components) == 1 and typing_tree(decl.components[0].patterns[0].cls):
        components = (components,)
    given = arguments(cls, components, statics)
    leaves, tree = jax.tree.flatten(tuple(given[c.name] for c in decl.components))
    if wrong := [x for x in leaves if not isinstance(x, _jax.AbstractValue)]:
        raise TypeError(
            f"{cls.__name__}.type: a record's type is made of the types of its components (jax.typeof), not of {wrong[0]!r}"
        )
    return cls._hitype(decl, leaves, tree, tuple(given[s.name] for s in decl.statics)).check()


_types = Cache()


def type_for(cls: Any, shape: tuple[int, ...], dtype: Any, sharding: Any, given: dict[str, Any]) -> ValueType:
    try:
        key = (cls, static_key(shape), dtype, sharding, static_key(tuple(given.items())), _jax.trace_key())
        hash(key)
    except TypeError:
        return _type_for(cls, shape, dtype, sharding, given)
    return _types.get(key, lambda: _type_for(cls, shape, dtype, sharding, given))


def _type_for(cls: Any, shape: tuple[int, ...], dtype: Any, sharding: Any, given: dict[str, Any]) -> ValueType:
    decl, who = cls._declaration, f"{cls.__name__}.type"
    axes = decl.stands_for.axes
    lead = len(shape) - axes.rank
    if lead < 0 or (lead and not axes.variadic):
        raise TypeError(f"{who}: shape {shape} does not fit the axes {str(axes)!r}")
    statics = {s.name: given.get(s.name, s.default) for s in decl.statics}
    if unknown := given.keys() - statics.keys() - decl.axis_names:
        names = sorted({*statics, *decl.axis_names})
        raise TypeError(f"{who}: no axis or static is named {', '.join(sorted(unknown))}; they are {', '.join(names)}")
    if "dtype" in statics and dtype is not None:
        statics["dtype"] = dtype
    if missing := [n for n, v in statics.items() if v is MISSING]:
        raise TypeError(f"{who} needs the static {', '.join(missing)}")
    statics = {n: static_value(cls, n, v) for n, v in statics.items()}
    asked = getattr(sharding, "spec", sharding if isinstance(sharding, jax.P) else ())
    if name := twice(tuple(asked)):
        raise TypeError(f"{who}: {asked} has two axes on the mesh axis {name!r}")
    wanted = _axes.dtype_of(dtype if dtype is not None else statics.get("dtype", decl.stands_for.default_dtype))
    like = jax.jit(lambda x: x).trace(jax.ShapeDtypeStruct(shape, wanted, sharding=sharding)).jaxpr.out_avals[0]
    parts = _axes.of_type(like)
    if any(p is not None and a.part is None for p, a in zip(asked, parts, strict=False)):
        raise TypeError(f"{who}: {sharding} names mesh axes that are not explicit, of which a type says nothing")
    env = {n: _axes.Axis(static_value(cls, n, v)) for n, v in (statics | given).items() if n in decl.axis_names}
    for dim, axis in zip(axes.dims, parts[lead:], strict=True):
        if dim.name is not None:
            if dim.name in given and env[dim.name].size != axis.size:
                raise TypeError(
                    f"{who}: axis {dim.name!r} is {axis.size} in the shape {shape} but {env[dim.name].size} is given"
                )
            env[dim.name] = axis
    if hidden := sorted(decl.axis_names - env.keys()):
        raise TypeError(f"{who}: the shape {shape} does not show the axis {', '.join(hidden)}; give it, {hidden[0]}=...")
    leaves = []
    for c in decl.components:
        if c.axes is None or c.patterns[0].cls is not jax.Array:
            raise TypeError(f"{who}: component {c} has no array axes; build the type of a value instead")
        own = parts[:lead] if c.axes.variadic else ()
        own += tuple(_axes.evaluate(d, env, who) for d in c.axes.dims)
        p = c.patterns[0]
        cdtype = p.dtype or (wanted if p.admits(wanted) else p.default_dtype)
        leaves.append(_jax.array_type(tuple(a.size for a in own), cdtype, like, tuple(a.part for a in own)))
    tree = jax.tree.structure(tuple(range(len(leaves))))
    ty = cls._hitype(decl, leaves, tree, tuple(statics.values())).check()
    got = ty.dense_type
    if got.shape != like.shape or got.dtype != like.dtype or _jax.partition(got) != _jax.partition(like):
        raise TypeError(f"{who}: no {cls.__name__} with these axes and statics stands for {like}; {ty} stands for {got}")
    return ty
