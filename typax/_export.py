"""Programs with hi values as bytes: `jax.export`, with the types of the values in the program's own description.

    typax.export(f)(x, q)            traced and lowered on the components; called with values, returns values
      .serialize(vjp_order=1)        b"..."
    typax.deserialize(b"...")        the same, in another process: .call(x, q)

In the program that JAX exports, a value is a node of the argument tree whose children are its components and whose auxiliary
data is its type, as JSON (`_describe`): what JAX itself writes of the calling convention carries the types.  Of such a
program JAX knows derivatives with respect to components only.  The derivative with respect to the values is exported beside
it, as a program of its own: it takes the arguments and the cotangents of the results.

A file:  b"typax.export", then little-endian  u16 version = 1,  u16 number n of programs,  u32 CRC-32 of what follows;
then n times  u64 length,  what ``jax.export.Exported.serialize`` writes.  Program k + 1 is the derivative of program k.
"""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax

from typax import _describe, _jax
from typax._prim import Application, Cache, Linear, Mask, close_all, has_tangent
from typax._structural import component_leaves, from_traced, open_tangent
from typax._type import ValueType, by_type, open_vals, with_los

MAGIC, VERSION = b"typax.export", 1
HEAD, LENGTH = struct.Struct("<HHI"), struct.Struct("<Q")
keystr = jax.tree_util.keystr


@jax.tree_util.register_pytree_node_class
class _Opened:
    """A value in a calling convention: its arrays, and its type without shardings."""

    def __init__(self, ty: ValueType, los: Sequence[Any]) -> None:
        self.ty, self.los = ty, tuple(los)

    def tree_flatten(self) -> Any:
        return self.los, self.ty

    @classmethod
    def tree_unflatten(cls, ty: ValueType, los: Any) -> "_Opened":
        return cls(ty, los)


def _type_to_bytes(ty: Any) -> bytes:
    if any(not isinstance(n, int) for lo in ty.lo_ty() for n in lo.shape):
        raise NotImplementedError(f"typax.export: {ty} has an axis of symbolic size, which only arrays may have")
    return json.dumps(_describe.type_to_json(ty)).encode()


jax.export.register_pytree_node_serialization(
    _Opened,
    serialized_name="typax.Value",
    serialize_auxdata=_type_to_bytes,
    deserialize_auxdata=lambda data: _bare(_describe.type_from_json(json.loads(bytes(data)))),
)


def _bare(ty: Any) -> Any:
    """A type without shardings, and without what a trace adds to it."""
    if isinstance(ty, ValueType):
        return ty.with_los([_jax.ShapedArray(a.shape, a.dtype) for a in ty.lo_ty()])
    return _jax.ShapedArray(ty.shape, ty.dtype)


def _los(value: Any) -> list[Any]:
    if not isinstance(_jax.typeof(value), ValueType):
        return [value]
    return [lo for x in component_leaves(value) for lo in _los(x)]


def _open(x: Any) -> Any:
    """A leaf of a result, as JAX exports it."""
    ty = _jax.typeof(x)
    if _jax.is_hi(ty) and not isinstance(ty, ValueType):
        _describe.type_to_json(ty)  # raises a TypeError
    return _Opened(_bare(ty), _los(x)) if isinstance(ty, ValueType) else x


def _close(x: Any) -> Any:
    """What `_open` made, as the value that it was."""
    return x.ty.with_los(map(_jax.typeof, x.los)).raise_val(*x.los) if _is_opened(x) else x


def _is_opened(x: Any) -> bool:
    return isinstance(x, _Opened)


def _as_spec(x: Any) -> Any:
    """A leaf of the arguments to export for: a value, an array, a number, or a type of one."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    ty = x if isinstance(x, _jax.AbstractValue) else _jax.typeof(x)
    if isinstance(ty, ValueType):
        return _Opened(_bare(ty), list(map(_struct, ty.lo_ty())))
    if _jax.is_hi(ty):
        _describe.type_to_json(ty)  # raises a TypeError
    return _struct(ty)


def _struct(aval: Any) -> Any:
    sharding = None if _jax.mesh_of(aval).empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def export(f: Callable[..., Any], *, platforms: Sequence[str] | None = None) -> Callable[..., "Exported"]:
    """``jax.export.export`` for functions of values: ``typax.export(f)(*args, **kwargs)`` gives an `Exported`.

    Args:
      f: a function, jitted or not, of trees of arrays and values, with such results.
      platforms: as of ``jax.export.export``.

    The arguments are values and arrays, or types: ``Cls.type(...)``, ``jax.ShapeDtypeStruct`` (also of symbolic shape).

    Raises:
      TypeError: for a value of a type written by hand (`typax.hijax`), or with statics that have no form in a file.
    """
    name = getattr(f, "__name__", "exported")

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_close, (args, kwargs), is_leaf=_is_opened)
        return jax.tree.map(_open, f(*args, **kwargs))

    run.__name__ = run.__qualname__ = name

    def of(*args: Any, **kwargs: Any) -> Exported:
        specs = jax.tree.map(_as_spec, (args, kwargs))
        made = jax.export.export(jax.jit(run), platforms=platforms)(*specs[0], **specs[1])
        return Exported(made, lambda: export(_derivative(f, *specs), platforms=platforms))

    return of


def _derivative(f: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """The derivative of a function, of the leaves of its arguments and the cotangents of the results that have some, to the
    cotangents of the leaves that have some."""
    tree = jax.tree.structure((args, kwargs), is_leaf=_is_opened)

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = tree.unflatten(leaves)
        return [x for x in jax.tree.leaves(f(*args, **kwargs)) if has_tangent(_jax.typeof(x))]

    def derivative(*given: Any) -> list[Any]:
        leaves, cts = given[: tree.num_leaves], given[tree.num_leaves :]
        moved = [has_tangent(_jax.typeof(x)) for x in leaves]

        def of_moved(*some: Any) -> list[Any]:
            it = iter(some)
            return flat(*(next(it) if m else x for x, m in zip(leaves, moved, strict=True)))

        _, vjp = jax.vjp(of_moved, *(x for x, m in zip(leaves, moved, strict=True) if m))
        return list(vjp(list(cts)))

    derivative.__name__ = derivative.__qualname__ = f"{getattr(f, '__name__', 'exported')}_vjp"
    return derivative


class Exported:
    """A program that takes and returns values: made by `typax.export`, or read by `typax.deserialize`.

    ``exported`` is what ``jax.export`` made: it takes and returns components. `in_types` is the tree ``(args, kwargs)`` of
    the types of the arguments, and `out_types` that of the results; without shardings, which the arguments bring.
    """

    def __init__(self, exported: Any, derivative: Callable[[], Any] | None) -> None:
        self.exported, self._make_derivative = exported, derivative
        self._calls = Cache(64)

    @cached_property
    def in_types(self) -> Any:
        return self._types(self.exported.in_tree, self.exported.in_avals)

    @cached_property
    def out_types(self) -> Any:
        return self._types(self.exported.out_tree, self.exported.out_avals)

    @staticmethod
    def _types(tree: Any, avals: Any) -> Any:
        opened = tree.unflatten([_jax.ShapedArray(a.shape, a.dtype) for a in avals])
        return jax.tree.map(lambda x: x.ty if _is_opened(x) else x, opened, is_leaf=_is_opened)

    def __repr__(self) -> str:
        (args, kwargs), outs = self.in_types, self.out_types
        shown = [*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())]
        return (
            f"Exported({self.exported.fun_name}: ({', '.join(shown)}) -> {outs}, for {', '.join(self.exported.platforms)})"
        )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The results for these arguments. May be traced, and differentiated in reverse mode if it has a `vjp`.

        Raises:
          TypeError: if the arguments are not of the types that the program was exported for.
        """
        leaves = self._checked((args, kwargs))
        return jax.tree.structure(self.out_types).unflatten(self._apply(leaves))

    def _checked(self, given: Any) -> list[Any]:
        name = f"the exported program {self.exported.fun_name}"
        leaves, tree = jax.tree_util.tree_flatten_with_path(given)
        if tree != (want := jax.tree.structure(self.in_types)):
            raise TypeError(f"{name} takes arguments of the structure {want}, not {tree}")
        for (path, x), ty in zip(leaves, jax.tree.leaves(self.in_types), strict=True):
            try:
                got = _jax.typeof(x)
            except TypeError:
                raise TypeError(f"{name} takes {_where(path)} of type {ty}, not {x!r}") from None
            if not _agrees(ty, got):
                raise TypeError(f"{name} takes {_where(path)} of type {ty}, not {got}; export it for that type, too")
        return [x for _, x in leaves]

    def _apply(self, leaves: Sequence[Any]) -> list[Any]:
        tys = tuple(map(_jax.typeof, leaves))
        with _jax.without_anonymous_axes():
            call = self._calls.get((tys, _jax.trace_key()), lambda: _Call(self, tys))
        return call.apply(leaves)

    def has_vjp(self) -> bool:
        """Whether the program can be differentiated."""
        return self._make_derivative is not None

    @cached_property
    def _derivative(self) -> "Exported":
        if self._make_derivative is None:
            raise NotImplementedError(
                f"the exported program {self.exported.fun_name} was written without its derivative; write it by "
                "serialize(vjp_order=1)"
            )
        made = self._make_derivative()
        if isinstance(made, Exported):
            return made
        moved = [t for t in jax.tree.leaves(self.out_types) if has_tangent(t)]
        return made(*jax.tree.leaves(self.in_types), *(t.to_ct_aval() for t in moved))

    def vjp(self) -> "Exported":
        """The derivative as a program: it takes the leaves of the arguments, then the cotangents of those leaves of the
        results that have tangents, and returns the list of the cotangents of those arguments that have."""
        return self._derivative

    def serialize(self, vjp_order: int = 0) -> bytes:
        """The program as bytes, for `typax.deserialize`.

        Args:
          vjp_order: how often it can be differentiated afterwards.

        Raises:
          ImportError: without flatbuffers, which the extra ``typax[export]`` brings.
        """
        program, parts = self, [self._bytes()]
        for _ in range(vjp_order):
            program = program.vjp()
            parts.append(program._bytes())
        body = b"".join(LENGTH.pack(len(p)) + p for p in parts)
        return MAGIC + HEAD.pack(VERSION, len(parts), zlib.crc32(body)) + body

    def _bytes(self) -> bytes:
        try:
            return bytes(self.exported.serialize(vjp_order=0))
        except ImportError as e:
            raise ImportError("programs as bytes need flatbuffers: pip install 'typax[export]'") from e


def deserialize(data: bytes) -> Exported:
    """The program that `Exported.serialize` wrote.

    The classes of its values have to be defined in this process; nothing is imported or executed by what the bytes say.

    Raises:
      ValueError: if these are not the bytes of such a program, whole and of a version that this typax reads, or if they
        speak of a class of values that does not exist here.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"typax.deserialize takes bytes, not {type(data).__name__}")
    parts = _parts(bytes(data))
    program: Exported | None = None
    for part in reversed(parts):
        try:
            read = jax.export.deserialize(bytearray(part))
        except ImportError as e:
            raise ImportError("programs as bytes need flatbuffers: pip install 'typax[export]'") from e
        except Exception as e:
            raise ValueError(f"typax.deserialize: JAX cannot read the program: {e}") from e
        program = Exported(read, None if program is None else lambda p=program: p)
    assert program is not None
    return program


def _parts(data: bytes) -> list[bytes]:
    start = len(MAGIC) + HEAD.size
    if not data.startswith(MAGIC):
        raise ValueError("typax.deserialize: these are not the bytes of a program that typax.export made")
    if len(data) >= start:
        version, n, crc = HEAD.unpack_from(data, len(MAGIC))
        if version != VERSION:
            raise ValueError(f"typax.deserialize: a file of version {version}; this typax reads version {VERSION}")
        parts, at = [], start
        while len(parts) < n and at + LENGTH.size <= len(data):
            (size,) = LENGTH.unpack_from(data, at)
            parts.append(data[at + LENGTH.size : at + LENGTH.size + size])
            at += LENGTH.size + size
        if n and len(parts) == n and at == len(data) and zlib.crc32(data[start:]) == crc:
            return parts
    raise ValueError("typax.deserialize: the file is damaged, or not whole")


def _agrees(want: Any, got: Any) -> bool:
    if isinstance(want, ValueType) or _jax.is_hi(got):
        return isinstance(got, ValueType) and _bare(got) == want
    # JAX itself compares sizes with symbolic ones
    sizes = zip(want.shape, got.shape, strict=False)
    same = all(not isinstance(n, int) or n == m for n, m in sizes)
    return want.dtype == got.dtype and len(want.shape) == len(got.shape) and same


def _where(path: Any) -> str:
    """What a path in ``(args, kwargs)`` is called."""
    (kind, first), rest = (path[0].idx, path[1]), path[2:]
    return (f"argument {first.idx}" if kind == 0 else f"argument {first.key!r}") + keystr(rest)


class _Call(Application):
    """A program at given types of the leaves of its arguments, whose shardings those of the results follow."""

    def __init__(self, program: Exported, in_tys: Sequence[Any]) -> None:
        self.program, self.name, self.shown = program, "exported", {"name": program.exported.fun_name}
        self.in_tys = tuple(in_tys)
        tree, exported = jax.tree.structure(program.in_types), program.exported

        def run(*los: Any) -> list[Any]:
            own = by_type(jax.tree.leaves(program.in_types), los)
            opened = [_Opened(t, xs) if isinstance(t, ValueType) else xs[0] for t, xs in own]
            args, kwargs = tree.unflatten(opened)
            return jax.tree.leaves(exported.call(*args, **kwargs))

        traced = jax.jit(run).trace(*(lo for t in in_tys for lo in t.lo_ty()))
        outs = by_type(jax.tree.leaves(program.out_types), traced.jaxpr.out_avals)
        self.out_tys = tuple(with_los(t, own) for t, own in outs)
        self.lo, self.deps, self.effects = from_traced(self.name, traced)

    def run(self, args: Sequence[Any]) -> list[Any]:
        return open_vals(self.out_tys, self.lo(*self.lower(args)))

    def pushforward(self, nonzero: Mask) -> Linear:
        raise NotImplementedError(
            f"the exported program {self.program.exported.fun_name} is differentiated in reverse mode only, by jax.grad"
        )

    def pullback(self, nonzero: Mask) -> Linear:
        derivative = self.program.vjp()

        def pull(primals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
            cts = close_all(self.out_tys, leaves, ct=True)
            live = [c for t, c in zip(self.out_tys, cts, strict=True) if has_tangent(t)]
            grads = iter(derivative._apply([*primals, *live]))
            own = [(t, next(grads) if has_tangent(t) else None) for t in self.in_tys]
            return [x for (t, g), m in zip(own, nonzero, strict=True) if m for x in open_tangent(t, g)]

        return Linear(tuple(range(len(self.in_tys))), pull)

    def transposed(self, linear: Mask) -> Linear:
        return self.pushforward(linear)
