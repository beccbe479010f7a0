"""Values on their way to the host: what a callback is given, what it gives back, and what is printed.

A value crosses as its arrays, without a derivative (JAX's callbacks have none), and is put together again on the other side,
over NumPy arrays: a callback computes with NumPy, since operations of JAX in one may wait for each other forever.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback as _io_callback

from typax import _jax
from typax._prim import Application
from typax._structural import from_leaves, from_traced, made, pack_open
from typax._type import ValueType, by_type


class Lowered(Application):
    """The arrays that a value is made of."""

    name = "lower"

    def __init__(self, ty: Any) -> None:
        los = tuple(ty.lo_ty())
        self.shown, self.in_tys, self.out_tys = {}, (ty,), los
        self.lo, self.deps, self.effects = from_traced("lower", jax.jit(lambda *xs: list(xs)).trace(*los))


@jax.tree_util.register_pytree_node_class
class Carried:
    """A value as its arrays, for JAX to carry to the host."""

    def __init__(self, ty: Any, los: Any) -> None:
        self.ty, self.los = ty, list(los)

    def tree_flatten(self) -> Any:
        return self.los, self.ty

    @classmethod
    def tree_unflatten(cls, ty: Any, los: Any) -> "Carried":
        return cls(ty, los)

    def value(self) -> Any:
        return self.ty.raise_val(*map(np.asarray, self.los))

    def __repr__(self) -> str:
        return str(self.ty) if any(isinstance(x, _jax.Tracer) for x in self.los) else repr(self.value())

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _carry(tree: Any) -> Any:
    def one(x: Any) -> Any:
        x = pack_open(x)
        if not _jax.is_hi_value(x):
            return x
        ty = _jax.typeof(x)
        return Carried(ty, made("lower", ty, lambda: Lowered(ty)).apply([jax.lax.stop_gradient(x)]))

    return jax.tree.map(one, tree)


def _arrived(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.value() if isinstance(x, Carried) else x, tree, is_leaf=lambda x: isinstance(x, Carried))


def debug_print(fmt: str, *args: Any, ordered: bool = False, **kwargs: Any) -> None:
    """``jax.debug.print``, whose signature it has, of arrays and values: a value is printed as its ``repr``."""
    jax.debug.print(fmt, *_carry(args), ordered=ordered, **_carry(kwargs))


def debug_callback(callback: Callable[..., Any], *args: Any, ordered: bool = False, **kwargs: Any) -> None:
    """``jax.debug.callback``, whose signature it has, on arrays and values."""

    def on_host(args: Any, kwargs: Any) -> None:
        callback(*_arrived(args), **_arrived(kwargs))

    jax.debug.callback(on_host, _carry(args), _carry(kwargs), ordered=ordered)


def pure_callback(callback: Callable[..., Any], result_shape_dtypes: Any, *args: Any, **kwargs: Any) -> Any:
    """``jax.pure_callback``, whose signature it has, on arrays and values.

    ``result_shape_dtypes`` may hold the types of values (``QArray.type((2, 3))``); the callback gives such values for them.

    Raises:
      TypeError: on the host, if the callback gives another type.
    """
    return _called(jax.pure_callback, callback, result_shape_dtypes, args, kwargs, ("sharding", "vmap_method"))


def io_callback(callback: Callable[..., Any], result_shape_dtypes: Any, *args: Any, **kwargs: Any) -> Any:
    """``jax.experimental.io_callback``, whose signature it has, on arrays and values; results as for `pure_callback`."""
    return _called(_io_callback, callback, result_shape_dtypes, args, kwargs, ("sharding", "ordered"))


def _called(call: Any, callback: Any, results: Any, args: Any, kwargs: dict[str, Any], own: tuple[str, ...]) -> Any:
    options = {k: kwargs.pop(k) for k in own if k in kwargs}
    wanted, tree = jax.tree.flatten(results)
    tys = [_jax.typeof(t) if _jax.is_hi_value(t) else t for t in wanted]
    shapes = [Carried(t, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in t.lo_ty()]) if _jax.is_hi(t) else t for t in tys]

    def on_host(args: Any, kwargs: Any) -> Any:
        out = tree.flatten_up_to(callback(*_arrived(args), **_arrived(kwargs)))
        return [_departs(x, t) if _jax.is_hi(t) else x for x, t in zip(out, tys, strict=True)]

    got = call(on_host, shapes, _carry(args), _carry(kwargs), **options)
    return tree.unflatten([_built(t, x.los) if isinstance(x, Carried) else x for x, t in zip(got, tys, strict=True)])


def _departs(x: Any, ty: Any) -> Carried:
    given = _jax.typeof(x) if _jax.is_hi_value(x) else None
    stacked = given is not None and getattr(given, "decl", None) is getattr(ty, "decl", ...) and given.ndim > ty.ndim
    if given != ty and not stacked:
        raise TypeError(f"a callback gives {given or type(x).__name__} where {ty} was announced")
    return Carried(ty, (ty if given is None else given).lower_val(x))


def _built(ty: Any, los: Any) -> Any:
    if not isinstance(ty, ValueType):
        return los[0] if not _jax.is_hi(ty) else ty.raise_val(*los)
    return from_leaves(ty, [_built(leaf, own) for leaf, own in by_type(ty.leaves, los)])
