"""Types as plain data, for files: what a type says, in JSON, and back.

    q8[2@i,3]   <->   {"class": "typax.quantized:QArray", "statics": {"dtype": {"dtype": "float32"}},
                       "components": [{"array": "int8", "shape": [2, 3]}, {"array": "float32", "shape": [2]}]}

Shardings are left out: they belong to the machine, not to the value.  A name in a file is looked up among the classes that
exist, value classes first of all, and never imported or called by what the file says; so that a class must be defined before
a file of its values is read.
"""

import dataclasses
import enum
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _axes, _jax
from typax._type import ValueType
from typax._value import Value


def type_to_json(ty: Any) -> dict[str, Any]:
    """A type as JSON data.

    Raises:
      TypeError: for a type written by hand, a class that cannot be found again by its name, or a static that is no number,
        string, dtype, tuple, enum, partition spec, value class, frozen dataclass of these, or of a class with ``to_json``
        (which may return ``NotImplemented``) and ``from_json``.
    """
    if isinstance(ty, ValueType):
        cls = ty.decl.cls
        parts = [_tree_to_json(t.unflatten(own)) for t, own in _split(ty)]
        out: dict[str, Any] = {"class": class_name(cls)}
        if ty.decl.statics:
            pairs = zip(ty.decl.statics, ty.statics, strict=True)
            out["statics"] = {s.name: static_to_json(v, f"static {s.name} of {ty}") for s, v in pairs}
        out["components"] = parts
        if ty.masks != ty._default_masks():
            out["masks"] = [[int(x) for x in m] for m in ty.masks]
        return out
    if _jax.is_hi(ty):
        raise TypeError(f"{ty} is of a type written by hand, which says nothing of how it is kept; keep its arrays instead")
    return {"array": _name(ty.dtype), "shape": list(ty.shape)}


def type_from_json(data: Any) -> Any:
    """The type that `type_to_json` described.

    Raises:
      ValueError: if the data describes no type of a class that exists here.
    """
    told = _object(data, "a type")
    if "array" in told:
        return jax.ShapeDtypeStruct(_shape(told.get("shape")), dtype_of(told["array"]))
    cls = find_class(told.get("class"))
    decl = cls._declaration
    statics = _object(told.get("statics", {}), f"the statics of {cls.__name__}")
    names = [s.name for s in decl.statics]
    if set(statics) != set(names):
        raise ValueError(f"{cls.__name__} has the statics {names}, not {sorted(statics)}")
    parts = told.get("components")
    if not isinstance(parts, list) or len(parts) != len(decl.components):
        raise ValueError(f"{cls.__name__} has the components {[c.name for c in decl.components]}, not {brief(parts)}")
    leaves, tree = jax.tree.flatten(tuple(map(_tree_from_json, parts)))
    avals = [a if isinstance(a, ValueType) else _jax.ShapedArray(a.shape, a.dtype) for a in leaves]
    masks = told.get("masks")
    if masks is not None:
        masks = tuple(tuple(bool(x) for x in m) for m in _rows(masks, len(leaves)))
    values = tuple(static_from_json(statics[n]) for n in names)
    try:
        return cls._hitype(decl, avals, tree, values, masks).check()
    except (TypeError, LookupError) as e:
        raise ValueError(str(e)) from None


def _split(ty: ValueType) -> Iterator[tuple[Any, list[Any]]]:
    it = iter(ty.leaves)
    for t in ty.tree.children():
        yield t, [next(it) for _ in range(t.num_leaves)]


def _tree_to_json(x: Any) -> Any:
    """A component: a type, or a nest of them."""
    if isinstance(x, tuple | list) and type(x) in (tuple, list):
        return {type(x).__name__: [_tree_to_json(v) for v in x]}
    if type(x) is dict:
        return {"dict": [[static_to_json(k, "a key"), _tree_to_json(v)] for k, v in x.items()]}
    return type_to_json(x)


def _tree_from_json(data: Any) -> Any:
    told = _object(data, "a component")
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in told:
            return make(_tree_from_json(v) for v in _list(told[kind]))
    if "dict" in told:
        return {static_from_json(k): _tree_from_json(v) for k, v in _rows(told["dict"], None, 2)}
    return type_from_json(told)


def show(ty: Any) -> str:
    """A type as messages show it; of an array, or its type without shardings, ``float32[2,3]``; of all else, its class."""
    if isinstance(ty, ValueType):
        return str(ty)
    return f"{ty.dtype}[{','.join(map(str, ty.shape))}]" if hasattr(ty, "dtype") else type(ty).__name__


# --- statics --------------------------------------------------------------------------------------------------


def static_to_json(v: Any, what: str) -> Any:
    """A static, or a key, as JSON data; ``what`` names it in errors."""
    cls: Any = type(v)
    if v is None or type(v) in (bool, int, str):
        return v
    if type(v) is float:
        return {"float": v.hex() if math.isfinite(v) else str(v)}
    if type(v) is jax.P:
        return {"P": [static_to_json(x, what) for x in v]}
    if type(v) is tuple:
        return {"tuple": [static_to_json(x, what) for x in v]}
    if isinstance(v, enum.Enum):
        return {"enum": _global_name(cls, what), "name": v.name}
    if isinstance(v, type) and issubclass(v, Value):
        return {"class": class_name(v)}
    if (
        isinstance(v, np.dtype)
        or (callable(v) and hasattr(v, "dtype"))
        or (isinstance(v, type) and issubclass(v, np.generic))
    ):
        return {"dtype": str(_axes.dtype_of(v))}
    if hasattr(cls, "from_json") and (own := cls.to_json(v)) is not NotImplemented:
        return {"object": _global_name(cls, what), "json": own}
    if _is_frozen(cls):
        fields = {f.name: static_to_json(getattr(v, f.name), what) for f in dataclasses.fields(cls) if f.init}
        return {"dataclass": _global_name(cls, what), "fields": fields}
    raise TypeError(
        f"{what} is {v!r}, which has no form in a file; use numbers, strings, dtypes, tuples, enums or frozen dataclasses"
    )


def static_from_json(data: Any) -> Any:
    """The static that `static_to_json` described; raises a ValueError if it is none."""
    if data is None or type(data) in (bool, int, str):
        return data
    told = _object(data, "a static")
    kinds = {"float", "P", "tuple", "enum", "class", "dtype", "dataclass", "object"} & told.keys()
    if len(kinds) != 1:
        raise ValueError(f"{brief(data)} describes no static")
    (kind,) = kinds
    x = told[kind]
    if kind == "tuple":
        return tuple(map(static_from_json, _list(x)))
    if kind == "P":
        return jax.P(*map(static_from_json, _list(x)))
    if not isinstance(x, str):
        raise ValueError(f"{brief(data)} describes no static")
    if kind == "float":
        return float.fromhex(x)
    if kind == "class":
        return find_class(x)
    if kind == "dtype":
        return dtype_of(x)
    found = find_global(x)
    if kind == "enum":
        if not (isinstance(found, type) and issubclass(found, enum.Enum)) or told.get("name") not in found.__members__:
            raise ValueError(f"{brief(data)} is no member of an enum that exists here")
        return found[told["name"]]
    if kind == "object":
        if not isinstance(found, type) or not hasattr(found, "from_json"):
            raise ValueError(f"{brief(x)} has no from_json")
        return _made(x, found.from_json, told.get("json"))  # type: ignore[attr-defined]
    if not _is_frozen(found):
        raise ValueError(f"{brief(x)} is no frozen dataclass")
    fields = {k: static_from_json(v) for k, v in _object(told.get("fields"), "fields").items()}
    return _made(x, lambda f: found(**f), fields)


def _made(name: str, make: Any, of: Any) -> Any:
    try:
        return make(of)
    except Exception as e:  # whatever a class says of data that may be anything
        raise ValueError(f"{name} is not made of {brief(of)}: {type(e).__name__}: {e}") from None


def _is_frozen(cls: Any) -> bool:
    return isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


# --- names ----------------------------------------------------------------------------------------------------


def dtype_of(name: Any) -> Any:
    """The dtype of that name; raises a ValueError if there is none."""
    if isinstance(name, str):
        if name.startswith("key<"):
            for impl in KEYS:
                if str(dtype := key_dtype(impl)) == name:
                    return dtype
        elif name in _DTYPES:
            return _DTYPES[name]
    raise ValueError(f"{brief(name)} is no dtype")


KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
"""The generators of random numbers whose keys have a form in a file."""


def key_dtype(impl: str) -> Any:
    """The dtype of the keys of a generator."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _name(dtype: Any) -> str:
    """Its name in a file: that of what has no tangents is no name of NumPy's."""
    return "float0" if dtype == _jax.float0 else str(dtype)


_DTYPES: dict[str, Any] = {"float0": _jax.float0} | {
    str(jnp.dtype(getattr(jnp, n))): jnp.dtype(getattr(jnp, n))
    for n in ["bool_", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (2, 4, 8, 16, 32, 64)]
    + [n for n in dir(jnp) if n.startswith(("float4_", "float8_"))]
    if hasattr(jnp, n)
}


def has_dtype(dtype: Any) -> bool:
    """Whether a dtype of NumPy's has a name in a file."""
    return str(dtype) in _DTYPES


def key_impl(dtype: Any) -> str:
    """The generator whose keys have this dtype; a StopIteration if it is none of these."""
    return next(impl for impl in KEYS if key_dtype(impl) == dtype)


def class_name(cls: Any) -> str:
    """``module:Class``. Raises a TypeError if another value class has that name too, so that it could not be found again."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = find_class(name)
    except ValueError as e:
        raise TypeError(str(e)) from None
    if found is not cls:
        raise TypeError(f"{name} names another class than the one of this value, which was defined earlier")
    return name


def find_class(name: Any) -> Any:
    """The value class of that name; raises a ValueError unless there is exactly one."""
    if not isinstance(name, str) or ":" not in name:
        raise ValueError(f"{brief(name)} names no value class")
    if isinstance(found := _global(name), type) and issubclass(found, Value):
        return found
    alike = [c for c in _classes(Value) if f"{c.__module__}:{c.__qualname__}" == name]  # made inside a function
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise ValueError(f"there are {len(alike)} value classes {name}; define it once, in a module")
    how = "define it" if name.startswith("__main__:") else f"import {name.split(':')[0]}"
    raise ValueError(f"there is no value class {brief(name)} yet; {how} first")


def _classes(cls: Any) -> Iterator[Any]:
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _classes(sub)


def _global(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    ours = module.partition(".")[0] == "typax"  # which makes classes when it is asked for them; what others do is not known
    for part in path.split("."):
        found = getattr(found, part, None) if ours else inspect.getattr_static(found, part, None)
    return found


def find_global(name: str) -> Any:
    """What a module that is imported already has under ``module:name``; raises a ValueError if there is nothing."""
    if (found := _global(name)) is None:
        raise ValueError(f"there is no {brief(name)} yet; import {name.split(':')[0]} first")
    return found


def _global_name(cls: Any, what: str) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _global(name) is not cls:
        raise TypeError(f"{what} is of the class {name}, which could not be found again by that name; define it in a module")
    return name


# --- data that may be anything ----------------------------------------------------------------------------------


def _object(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{brief(data)} describes not {what}")
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{brief(data)} is no list")
    return data


def _rows(data: Any, n: int | None, width: int | None = None) -> list[list[Any]]:
    rows = [_list(row) for row in _list(data)]
    if (n is not None and len(rows) != n) or (width is not None and any(len(r) != width for r in rows)):
        raise ValueError(f"{brief(data)} has not the form of what it stands for")
    return rows


def _shape(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(n) is int and 0 <= n < 2**63 for n in data):
        raise ValueError(f"{brief(data)} is no shape")
    return tuple(data)


def brief(x: Any) -> str:
    """What a message shows of data that may be anything."""
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."
