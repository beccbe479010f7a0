"""A value is its lowered arrays, and a type is its declaration."""

import copy
import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp

from typax import _jax
from typax._byhand import is_raw
from typax._type import ValueType, dense_type
from typax.laws._law import Broken, NotApplicable, Values, law
from typax.laws._values import host, lowered, meaning, raised, same, show, types


@law("type", "A value that is lowered and raised again is the same value.")
def raise_lower(cls: Any, example: Values) -> None:
    v = example.value
    ty = _jax.typeof(v)
    back = raised(ty, lowered(v))
    if type(back) is not type(v):
        raise Broken(f"raise_val gives a {type(back).__name__}, not a {type(v).__name__}: jit would return another class")
    same("raise_val(*lower_val(v))", back, v, "a value would change by passing through jit")


@law("type", "The arrays to which a value lowers are of the types that its type lowers to.")
def lowered_types(cls: Any, example: Values) -> None:
    v = example.value
    ty = _jax.typeof(v)
    declared, arrays = ty.lo_ty(), lowered(v)
    if len(declared) != len(arrays):
        raise Broken(f"lo_ty has {len(declared)} arrays but lower_val gives {len(arrays)}: programs would be mis-wired")
    for i, (want, x) in enumerate(zip(declared, arrays, strict=True)):
        got = _jax.typeof(x)
        if (want.shape, want.dtype) != (got.shape, got.dtype) or _jax.partition(want) != _jax.partition(got):
            raise Broken(f"array {i} is declared as {want} but is {got}: compiled programs would read it wrongly")


@law("type", "Values of one declaration, of the same array types and statics, have equal types with equal hashes.")
def equality(cls: Any, example: Values) -> None:
    ty = _jax.typeof(example.value)
    for other in (_jax.typeof(x) for x in (*example.others, raised(ty, lowered(example.value)))):
        if ty != other or other != ty:
            raise Broken(
                f"the types of two values alike, {ty} and {other}, differ: every call of a jitted function compiles"
            )
        if hash(ty) != hash(other):
            raise Broken(f"equal types {ty} have the hashes {hash(ty)} and {hash(other)}: caches do not find them")


@law("type", "Types that differ in a static, in an array type or in their class are not equal.")
def inequality(cls: Any, example: Values) -> None:
    ty = _jax.typeof(example.value)
    if ty == object() or any(ty == a for a in ty.lo_ty()):
        raise Broken(f"{ty} equals something that is no type of {cls.__name__}: programs would take one for the other")
    found = False
    for other in other_types(ty):
        found = True
        if ty == other or other == ty:
            raise Broken(
                f"{ty} equals {other}, which differs in {_difference(ty, other)}: a jitted function would run what was "
                "compiled for the other"
            )
    if not found:
        raise NotApplicable("no other type of the class is known")


def _difference(a: Any, b: Any) -> str:
    if a.decl is not b.decl:
        return "its class"
    return "statics" if a.statics != b.statics else f"array types ({show(a.lo_ty())} and {show(b.lo_ty())})"


def _possible(ty: Any) -> bool:
    """Whether there are values of a type: its components and statics go together."""
    try:
        ty.check()
    except (TypeError, ValueError):
        return False
    return True


def other_types(ty: Any) -> list[Any]:
    """Types that are near ``ty``, but another."""
    if not isinstance(ty, ValueType):
        return []
    out = [*_twins(ty)]
    out += [ty.with_statics(**{s.name: o}) for s, v in zip(ty.decl.statics, ty.statics, strict=True) for o in _other(v)]
    for i, leaf in enumerate(ty.leaves):
        if isinstance(leaf, _jax.ShapedArray):
            near = [_jax.ShapedArray((*leaf.shape[:-1], leaf.shape[-1] + 1), leaf.dtype)] if leaf.shape else []
            dtype = jnp.float16 if leaf.dtype != jnp.float16 else jnp.float32
            out += [
                ty.with_leaves([*ty.leaves[:i], a, *ty.leaves[i + 1 :]])
                for a in (*near, leaf.update(dtype=jnp.dtype(dtype)))
            ]
    return out


@functools.lru_cache(maxsize=64)
def _twin(cls: Any) -> Any:
    """Another class of the same declaration."""
    # it is not to be found by the name of the class in a file
    names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.<twin>"}
    return type(cls)(cls.__name__, (cls,), names, name=cls._declaration.name)


def _twins(ty: Any) -> list[Any]:
    try:
        twin = _twin(ty.decl.cls)
    except TypeError:  # a class that cannot be subclassed
        return []
    return [twin._hitype(twin._declaration, ty.leaves, ty.tree, ty.statics, ty.masks)]


def _other(v: Any) -> list[Any]:
    match v:
        case bool():
            return [not v]
        case int() | float():
            return [v + 1]
        case str():
            return [v + "'"]
        case jnp.dtype():
            return [jnp.dtype("float16" if v != jnp.float16 else "float32")]
    return []


@law("type", "Equal types print alike, others do not, and no address of memory is printed.")
def printing(cls: Any, example: Values) -> None:
    ty = _jax.typeof(example.value)
    text = str(ty)
    if not text or re.search(r"0x[0-9a-f]{4,}", text):
        raise Broken(f"the type prints as {text!r}: jaxprs could not be compared")
    for again in (_jax.typeof(x) for x in (*example.others, raised(ty, lowered(example.value)))):
        if str(again) != text:
            raise Broken(f"equal types print as {text} and {again}: jaxprs could not be compared")
    if isinstance(ty, ValueType):
        for s, v in zip(ty.decl.statics, ty.statics, strict=True):
            for o in _other(v):
                other = ty.with_statics(**{s.name: o})
                if _possible(other) and str(other) == text:
                    raise Broken(
                        f"types that differ in the static {s.name} both print as {text}: errors would not tell them apart"
                    )
        if ty.leaves and str(ty.inc_rank(3, 0)) == text:
            raise Broken(f"a stack of {text} prints as {text} too: errors would not tell them apart")
    if not isinstance(repr(example.value), str):
        raise Broken("repr(v) is no string")


@law("type", "A pickled or copied value is the same value.")
def pickle_and_copy(cls: Any, example: Values) -> None:
    v = example.value
    copies = {"copy.copy(v)": copy.copy(v), "copy.deepcopy(v)": copy.deepcopy(v), "jax.device_get(v)": jax.device_get(v)}
    for what, other in copies.items():
        _same_host(what, other, v)
    try:
        data = pickle.dumps(v)
    except (pickle.PicklingError, AttributeError) as e:
        if "local object" in str(e) or "not the same object" in str(e) or "not found" in str(e) or "lookup" in str(e):
            raise NotApplicable(f"pickle does not find the class: {e}") from None
        raise
    _same_host("pickle.loads(pickle.dumps(v))", pickle.loads(data), v)


def _same_host(what: str, got: Any, want: Any) -> None:
    if type(got) is not type(want):
        raise Broken(f"{what} is a {type(got).__name__}: it does not survive a checkpoint")
    same(what, got, want, "it does not survive a checkpoint")


@law(
    "type", "What a value stands for is of the declared shape and dtype, and that of a stack is the stack of those of each."
)
def dense_declared(cls: Any, example: Values) -> None:
    v = example.value
    ty = _jax.typeof(v)
    got = meaning(v)
    want = got if is_raw(ty) else dense_type(ty)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if (tuple(g.shape), g.dtype) != (tuple(w.shape), w.dtype):
            raise Broken(f"dense(v) of {ty} is {_jax.typeof(g)}, but {w} is declared: shapes would lie")
    if isinstance(ty, ValueType) and not ty.decl.is_record:
        if (tuple(v.shape), v.dtype) != (tuple(got.shape), got.dtype):
            raise Broken(f"v.shape and v.dtype say {v.shape} {v.dtype}, dense(v) is {_jax.typeof(got)}")
        body = ty.decl.dense
        if not ty.n_batch and body is not None:
            direct = body(v)
            if (tuple(direct.shape), direct.dtype) != (tuple(want.shape), want.dtype):
                raise Broken(f"the body of dense gives {_jax.typeof(direct)}, but {want} is declared: shapes would lie")
    again = meaning(raised(ty, lowered(v)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        if host(a).tobytes() != host(b).tobytes():
            raise Broken(f"dense(v) of {show(types(v))} is not the same twice")
