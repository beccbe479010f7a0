"""Named axes: parse an annotation, bind its names, substitute them.

    Int8[Array, "*batch n"]       against a type  int8[8@i, 3]     binds   n -> 3 (whole)
    Float32[Array, "*batch n//2"] under these bindings is          float32[8@i, 1]

An axis is a name, an integer or an expression of both (``n//64``, ``2*k``, ``a*b``, ``n+1``).  The one axis rule, bind
and substitute, serves sizes and shardings alike: a name carries its own partition, ``a*b`` that of ``a`` (``b`` must
be whole), ``n//k`` that of ``n`` if each shard divides, ``+`` and ``-`` are for whole axes only.
"""

import ast
import functools
import inspect
import math
import operator
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from typax import _jax


class Axis(NamedTuple):
    """The size of an axis and the mesh axes that partition it (``None``: the axis is whole)."""

    size: int
    part: Any = None


type Bindings = dict[str, Axis]


@dataclass(frozen=True)
class Dim:
    """One axis of an annotation: its text, and the parsed expression (``None`` for the variadic axis)."""

    text: str
    expr: ast.expr | None

    @property
    def name(self) -> str | None:
        return self.expr.id if isinstance(self.expr, ast.Name) else None

    @property
    def leading(self) -> str | None:
        """The name that stands first, whose partition the axis has."""
        node = self.expr
        while isinstance(node, ast.BinOp):
            node = node.left
        return node.id if isinstance(node, ast.Name) else None

    @property
    def size(self) -> int | None:
        """The size, where the annotation gives it."""
        return evaluate(self, {}, "").size if self.expr is not None and not self.names else None

    @property
    def names(self) -> frozenset[str]:
        nodes = ast.walk(self.expr) if self.expr is not None else ()
        return frozenset(n.id for n in nodes if isinstance(n, ast.Name))


@dataclass(frozen=True)
class Axes:
    """The axes of an annotation: whether batch axes may lead, and those that follow."""

    variadic: str | None
    dims: tuple[Dim, ...]

    def __str__(self) -> str:
        lead = (f"*{self.variadic}",) if self.variadic else ()
        return " ".join((*lead, *(d.text for d in self.dims)))

    @property
    def rank(self) -> int:
        return len(self.dims)


@dataclass(frozen=True)
class Pattern:
    """One array annotation: the class of the value, its dtypes (``None``: any) and its axes (``None``: any)."""

    cls: Any
    dtypes: tuple[str, ...] | None
    axes: Axes | None
    text: str

    @property
    def dtype(self) -> Any:
        """The one dtype that is admitted, or ``None``; keys have one for each generator."""
        names = {d.rstrip("_") for d in self.dtypes or ()}  # NumPy's bool is also bool_
        return jnp.dtype(names.pop()) if len(names) == 1 and "prng_key" not in names else None

    @property
    def default_dtype(self) -> Any:
        """The dtype that is meant where none is given: float32 if it is admitted."""
        if self.dtype is not None:
            return self.dtype
        if "prng_key" in (self.dtypes or ()):
            return jax.random.key(0).dtype
        return next(
            (jnp.dtype(d) for d in ("float32", "int32", "uint32", "complex64") if self.admits(d)), jnp.dtype("float32")
        )

    def admits(self, dtype: Any) -> bool:
        return self.dtypes is None or _dtype_name(dtype) in self.dtypes


_ALLOWED = (ast.Name, ast.Constant, ast.BinOp, ast.Load, ast.Mult, ast.FloorDiv, ast.Add, ast.Sub)


def parse(text: str, where: str) -> Axes:
    """Parse jaxtyping's axis notation; `where` names the annotation in errors."""
    variadic, dims = None, []
    for i, word in enumerate(text.split()):
        if word.startswith("*") and word[1:].isidentifier():
            if i:
                raise TypeError(f"{where}: batch axes lead; write *{word[1:]} first in {text!r}")
            variadic = word[1:]
            continue
        if word == "..." or word[0] in "#?_":
            raise TypeError(f"{where}: axis {word!r} in {text!r} is not supported; give the axis a name")
        expr = _expression(word)
        if expr is None:
            raise TypeError(
                f"{where}: cannot read axis {word!r} in {text!r}; an axis is a name, an integer, or an expression "
                "of them with + - * // and without spaces"
            )
        dims.append(Dim(word, expr))
    return Axes(variadic, tuple(dims))


def _expression(word: str) -> ast.expr | None:
    try:
        expr = ast.parse(word, mode="eval").body
    except SyntaxError:
        return None
    return expr if all(isinstance(n, _ALLOWED) for n in ast.walk(expr)) else None


def patterns(annotation: Any, where: str) -> tuple[Pattern, ...]:
    """The alternatives of an annotation; a bare class has no axes of its own."""
    if _is_union(annotation):
        return tuple(p for a in typing.get_args(annotation) for p in patterns(a, where))
    if hasattr(annotation, "array_type") and hasattr(annotation, "dim_str"):
        dtypes = annotation.dtypes if isinstance(annotation.dtypes, tuple) else None
        if dtypes == ("bool", "bool_"):  # two names of one dtype
            dtypes = ("bool",)
        axes = parse(annotation.dim_str, where)
        return (Pattern(annotation.array_type, dtypes, axes, f"{annotation.__name__}"),)
    name = getattr(annotation, "__name__", str(annotation))
    return (Pattern(annotation, None, None, name),)


def dtype_of(d: Any) -> Any:
    """``d`` as a dtype; those of keys are none of NumPy's."""
    return d if jnp.issubdtype(d, jax.dtypes.extended) else jnp.dtype(d)


def _dtype_name(dtype: Any) -> str:
    return "prng_key" if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).name


def evaluate(dim: Dim, env: Mapping[str, Axis], where: str) -> Axis:
    """The size and partition of one axis under bindings."""

    def ev(node: ast.expr) -> Axis:
        match node:
            case ast.Constant(value=int(v)):
                return Axis(v)
            case ast.Name(id=name):
                if name not in env:
                    raise TypeError(f"{where}: axis {name!r} of {dim.text!r} is not bound by any component or static")
                return env[name]
            case ast.BinOp(left=left, op=op, right=right):
                rounds = any(isinstance(n, ast.Add | ast.Sub) for n in ast.walk(left))  # (n+1)//2 is meant to round down
                return _combine(op, ev(left), ev(right), f"{where}: axis {dim.text!r}", rounds)
        raise TypeError(f"{where}: cannot evaluate axis {dim.text!r}")

    assert dim.expr is not None
    return ev(dim.expr)


def _combine(op: ast.operator, a: Axis, b: Axis, where: str, rounds: bool) -> Axis:
    if b.part is not None:
        raise TypeError(f"{where}: the second operand of an expression must not be sharded, got {b.size}@{b.part}")
    match op:
        case ast.Mult():
            return Axis(a.size * b.size, a.part)
        case ast.FloorDiv():
            if b.size <= 0:
                raise TypeError(f"{where}: cannot divide an axis of size {a.size} by {b.size}")
            shards = _shards(a)
            if a.size % b.size and shards == 1 and not rounds:
                raise TypeError(f"{where}: {a.size} is not a multiple of {b.size}")
            if a.size % shards or (shards > 1 and (a.size // shards) % b.size):
                raise TypeError(
                    f"{where}: each of the {shards} shards of size {a.size // shards} must be a multiple of {b.size}"
                )
            return Axis(a.size // b.size, a.part)
    if a.part is not None:
        raise TypeError(f"{where}: + and - are defined on unsharded axes only, got {a.size}@{a.part}")
    return Axis(a.size + b.size if isinstance(op, ast.Add) else a.size - b.size)


def _shards(a: Axis) -> int:
    if a.part is None:
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    names = a.part if isinstance(a.part, tuple) else (a.part,)
    return math.prod(mesh.shape[n] for n in names if n in mesh.shape)


def of_type(aval: Any) -> tuple[Axis, ...]:
    """The axes of an array type."""
    return tuple(map(Axis, aval.shape, _jax.partition(aval)))


def show(axes: tuple[Axis, ...]) -> str:
    """Axes as jaxprs print them: ``8@i,3``."""
    return ",".join(f"{a.size}" if a.part is None else f"{a.size}@{_show_part(a.part)}" for a in axes)


def _show_part(part: Any) -> str:
    return f"({','.join(part)})" if isinstance(part, tuple) else str(part)


def static_key(v: Any) -> Any:
    """What tells statics apart: ``2``, ``2.0`` and ``True`` are equal in Python, ``0.0`` and ``-0.0`` too."""
    if isinstance(v, float):
        return type(v), float(v).hex()
    if isinstance(v, complex):
        return type(v), v.real.hex(), v.imag.hex()
    if isinstance(v, tuple):
        return (type(v), *map(static_key, v))
    if isinstance(v, frozenset):
        return type(v), frozenset(map(static_key, v))
    return type(v), v


def scope(frame: Any) -> Mapping[str, Any]:
    """The names in sight of a statement: those of its function and of the functions around it, innermost first."""
    maps, here, inner = [], frame.f_globals, frame.f_code.co_qualname
    while frame is not None:
        around = frame.f_code.co_qualname
        if frame.f_globals is here and (not maps or inner.startswith(f"{around}.<locals>.")) and around != "<module>":
            maps.append(frame.f_locals)
        frame = frame.f_back
    return ChainMap(*maps)


def resolve(owner: Any, names: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The annotations of a class or function, evaluated: those postponed to strings are looked up in its module and in
    ``names``, the place of its definition."""
    notes = dict(inspect.get_annotations(owner))
    module = vars(sys.modules.get(owner.__module__, types.ModuleType("")))
    space = module | getattr(owner, "__globals__", {})
    for key, note in notes.items():
        if isinstance(note, str):
            try:
                notes[key] = eval(note, space, names)
            except Exception as e:
                raise TypeError(f"{where}: cannot evaluate the annotation {key}: {note} ({e})") from e
        notes[key] = unaliased(notes[key])
    return notes


def unaliased(hint: Any) -> Any:
    """What the name of a ``type`` statement stands for, in unions too."""
    if isinstance(hint, typing.TypeAliasType):
        return unaliased(hint.__value__)
    return functools.reduce(operator.or_, map(unaliased, typing.get_args(hint))) if _is_union(hint) else hint


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
