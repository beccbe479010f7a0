"""A tree of values as named tensors and a description, and back.

    {"layers": [{"w": q8[4,3]}], "step": 7}
        tensors      layers.0.w.qvalue  int8[4,3]      layers.0.w.scale  float32[4]
        description  {"dict": [["layers", {"list": [{"dict": [["w", {"leaf": {…}}]]}]}], ["step", {"value": 7}]]}

Names are the path of a value in the tree, with dots, and of a component in the value. Kept in the description: dicts, lists,
tuples, named tuples, ``None``, numbers, strings, arrays, values. Of other nodes (a model's classes) only the children are
kept: such a tree is loaded into one of the same structure.

Some dtypes are not the format's: numbers of less than a byte are packed, the first in the lowest bits; keys of random
numbers are their words; complex128 is pairs of float64; other dtypes of one byte are kept as uint8.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from typax import _describe, _jax
from typax._describe import brief
from typax._paths import dotted
from typax._type import ValueType
from typax.io._safetensors import NAMES, Planned
from typax.quantized import packing
from typax.quantized.format import unsigned

VERSION = 1
DEPTH = 300
"""How deep a tree may be nested; JSON is read to about twice as many brackets each."""


# --- one array ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """An array, or a component of a value: its dtype and shape, and its name in the file."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def planned(self) -> Planned:
        """What the file holds of it."""
        dtype, shape = self.dtype, self.shape
        if is_key(dtype):
            words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            return Planned(np.dtype("u4"), tuple(words.shape))
        if bits := _bits(dtype):
            return Planned(np.dtype("u1"), (math.ceil(math.prod(shape) * bits / 8),))
        if dtype == np.dtype("c16"):
            return Planned(np.dtype("f8"), (*shape, 2))
        return Planned(np.dtype(dtype if np.dtype(dtype) in NAMES else "u1"), shape)

    def stored(self, x: Any) -> np.ndarray:
        """The array as the file holds it."""
        if is_key(self.dtype):
            return np.asarray(jax.random.key_data(x))
        x, want = np.ascontiguousarray(np.asarray(x).astype(self.dtype, copy=False)), self.planned  # as bytes go here
        return pack(x, bits) if (bits := _bits(self.dtype)) else x.reshape(-1).view(want.dtype).reshape(want.shape)

    def restored(self, raw: np.ndarray) -> np.ndarray:
        """The array that the file holds so; of keys, their words."""
        if is_key(self.dtype):
            return raw
        dtype = np.dtype(self.dtype)
        flat = unpack(raw, bits, math.prod(self.shape)) if (bits := _bits(dtype)) else raw.reshape(-1)
        return flat.view(dtype).reshape(self.shape)


def is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _bits(dtype: Any) -> int:
    """The bits of a number, of dtypes that are packed; else 0."""
    name = np.dtype(dtype).name
    if np.dtype(dtype).itemsize != 1 or name in ("bool", "int8", "uint8"):
        return 0
    told = ml_dtypes.finfo(dtype) if name.startswith("float") else ml_dtypes.iinfo(dtype)
    return told.bits if told.bits in (1, 2, 4) else 0


def pack(x: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of 1, 2 or 4 bits, as bytes: the first in the lowest bits."""
    codes, format = x.reshape(-1).view(np.uint8), unsigned(bits)
    return np.asarray(packing.pack(format, np.pad(codes, (0, -codes.size % format.per))))


def unpack(raw: np.ndarray, bits: int, n: int) -> np.ndarray:
    """The ``n`` codes that `pack` put into bytes."""
    return np.asarray(packing.unpack(unsigned(bits), raw.reshape(-1)))[:n]


# --- a tree ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """An array or a value of a tree: its path, its type, its arrays in the file, and how to make it of them."""

    path: str
    type: Any
    arrays: tuple[Kept, ...]
    numpy: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(a.planned.nbytes for a in self.arrays)


class Names:
    """Names that are given once each."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def new(self, *parts: str) -> str:
        base = name = ".".join(p for p in parts if p).encode("utf-8", "replace").decode("utf-8") or "value"
        n = 2
        while name in self.taken or name == "__metadata__":
            name, n = f"{base}~{n}", n + 1
        self.taken.add(name)
        return name


def describe(tree: Any) -> tuple[Any, list[Leaf], list[Any]]:
    """The description of a tree, its leaves that are arrays or values (or types of such), and these."""
    names, leaves, found = Names(), [], []

    def walk(x: Any, path: str, depth: int = 0) -> Any:
        kind = type(x)
        if depth > DEPTH:
            raise ValueError(f"the tree is deeper than {DEPTH} nodes, or holds itself, at {path[:40]}…")
        if x is None or kind in (bool, int, float, str):
            return {"value": _describe.static_to_json(x, path)}
        if kind is dict:
            return {
                "dict": [
                    [_describe.static_to_json(k, f"a key of {path or 'the tree'}"), walk(v, _join(path, k), depth + 1)]
                    for k, v in x.items()
                ]
            }
        if kind in (list, tuple):
            return {kind.__name__: [walk(v, _join(path, i), depth + 1) for i, v in enumerate(x)]}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            fields = zip(kind._fields, x, strict=True)  # type: ignore[attr-defined]
            return {"namedtuple": [[k, walk(v, _join(path, k), depth + 1)] for k, v in fields], "class": _name(kind)}
        if (leaf := leaf_of(x, path, names)) is not None:
            leaves.append(leaf)
            found.append(x)
            return leaf_to_json(leaf)
        children, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
        if len(children) == 1 and children[0][1] is x:
            raise TypeError(f"{path or 'the tree'}: {kind.__name__} {x!r} is neither an array, a value nor a node of a tree")
        named = [(dotted(k), v) for k, v in children]
        return {"node": [[k, walk(v, _join(path, k), depth + 1)] for k, v in named], "class": _name(kind)}

    return walk(tree, ""), leaves, found


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def leaf_of(x: Any, path: str, names: Names) -> Leaf | None:
    """A leaf for an array, a value, or the type of one; else ``None``."""
    if isinstance(x, np.ndarray | np.generic):
        dtype = x.dtype.newbyteorder("=")
        if not _describe.has_dtype(dtype):
            raise TypeError(f"{path or 'the tree'}: an array of dtype {dtype} has no form in a file")
        return Leaf(path, jax.ShapeDtypeStruct(x.shape, dtype), (Kept(names.new(path), dtype, x.shape),), numpy=True)
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | _jax.ShapedArray) and not isinstance(x, _jax.Tracer):
        return Leaf(path, jax.ShapeDtypeStruct(x.shape, x.dtype), (Kept(names.new(path), x.dtype, x.shape),))
    if isinstance(x, _jax.Tracer):
        raise TypeError(
            f"{path or 'the tree'}: a file is written outside of jit, grad and the like, where {x} has no values"
        )
    ty = x if isinstance(x, ValueType) else _jax.typeof(x) if _jax.is_hi_value(x) else None
    if ty is None:
        return None
    if not isinstance(ty, ValueType):
        raise TypeError(f"{path or 'the tree'}: {ty} is of a type written by hand; keep its arrays instead")
    kept = zip(component_paths(ty), ty.lo_ty(), strict=True)
    return Leaf(path, ty, tuple(Kept(names.new(path, p), a.dtype, tuple(a.shape)) for p, a in kept))


def component_paths(ty: ValueType) -> Iterator[str]:
    """A readable name for each array to which a type lowers."""
    numbers: dict[str, int] = {}
    total = [c.name for c, _ in ty.fields]
    for c, leaf in ty.fields:
        name = c.name
        if total.count(name) > 1:
            numbers[name] = numbers.get(name, -1) + 1
            name = f"{name}.{numbers[name]}"
        if isinstance(leaf, ValueType):
            yield from (f"{name}.{p}" for p in component_paths(leaf))
        else:
            yield name


def rebuild(told: Any, make: Callable[[str, Any], Any], node: Callable[[str, list[Any]], Any]) -> Any:
    """The tree of a description; ``make(path, leaf)`` gives each leaf, and ``node`` what has no form of its own here.

    Raises:
      ValueError: if it is no description.
    """

    def walk(told: Any, path: str) -> Any:
        if not isinstance(told, dict):
            raise ValueError(f"at {path or 'the root'} there is {brief(told)} in place of a node")
        match told:
            case {"value": v}:
                return make(path, _describe.static_from_json(v))
            case {"leaf": dict() as leaf}:
                return make(path, leaf_from_json(leaf, path))
            case {"dict": list() as rows} if all(isinstance(r, list) and len(r) == 2 for r in rows):
                keys = [_describe.static_from_json(k) for k, _ in rows]
                return {k: walk(v, _join(path, k)) for k, (_, v) in zip(keys, rows, strict=True)}
            case {"list": list() as xs}:
                return [walk(x, _join(path, i)) for i, x in enumerate(xs)]
            case {"tuple": list() as xs}:
                return tuple(walk(x, _join(path, i)) for i, x in enumerate(xs))
            case {"namedtuple": list() as rows, "class": str() as name} | {
                "node": list() as rows,
                "class": str() as name,
            } if all(isinstance(r, list) and len(r) == 2 and isinstance(r[0], str) for r in rows):
                children = [walk(v, _join(path, k)) for k, v in rows]
                return node(f"{'node' if 'node' in told else 'namedtuple'} {name}", children)
        raise ValueError(f"at {path or 'the root'} there is {brief(told)} in place of a node")

    return walk(told, "")


def retyped(told: Any, types: Callable[[str, Leaf], Any]) -> tuple[Any, list[Leaf]]:
    """The description of the same tree with leaves of other types, and these leaves; paths are those of `rebuild`."""
    names, paths, leaves = Names(), Names(), []

    def walk(told: Any, path: str) -> Any:
        if "leaf" in told:
            path = paths.new(path) if path else path
            leaf = leaf_of(types(path, leaf_from_json(told["leaf"], path)), path, names)
            assert leaf is not None
            leaves.append(leaf)
            return leaf_to_json(leaf)
        if "value" in told:
            paths.new(path)
            return told
        (kind,) = told.keys() - {"class"}
        rows = told[kind]
        if kind in ("list", "tuple"):
            return {kind: [walk(x, _join(path, i)) for i, x in enumerate(rows)]}
        keys = [_describe.static_from_json(k) for k, _ in rows]
        return told | {kind: [[r[0], walk(r[1], _join(path, k))] for k, r in zip(keys, rows, strict=True)]}

    return walk(told, ""), leaves


def leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    told = _describe.type_to_json(leaf.type) | {"tensors": [a.name for a in leaf.arrays]}
    return {"leaf": told | ({"numpy": True} if leaf.numpy else {})}


def leaf_from_json(told: dict[str, Any], path: str) -> Leaf:
    ty, tensors = _describe.type_from_json(told), told.get("tensors")
    los = ty.lo_ty() if isinstance(ty, ValueType) else [ty]
    if not isinstance(tensors, list) or len(tensors) != len(los) or not all(isinstance(t, str) for t in tensors):
        raise ValueError(f"{path}: {brief(tensors)} does not name the {len(los)} arrays of {ty}")
    kept = tuple(Kept(t, a.dtype, tuple(a.shape)) for t, a in zip(tensors, los, strict=True))
    return Leaf(path, ty, kept, numpy=told.get("numpy") is True)
