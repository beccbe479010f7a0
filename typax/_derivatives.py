"""Jacobians with respect to values and of values: of what their tangents, and what they stand for, are made of.

    jacrev(f)(q)      d dense(f(q)) / dt  at t = 0  of  f(q + t)         t: float32[2,3] for q8[2,3]

A tangent is *attached* to a value: the result is the value, and its derivative in t is the identity.  So each of these is
JAX's own function, of arrays t.  Where a tangent is a record (of factors, of a tuple), t is the pytree of its arrays.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from typax import _jax
from typax._prim import Application, Linear, Mask, has_tangent
from typax._structural import by_components, dense, from_traced, made, pack_open, tangent_views
from typax._type import record_view


class Attached(Application):
    """The value of the first operand, whose tangent is the sum of its own and of the others, which are its parts."""

    name = "attach"

    def __init__(self, ty: Any) -> None:
        self.count = len(parts := _part_types(ty))
        self.shown, self.in_tys, self.out_tys = {}, (ty, *parts), (ty,)
        n = len(ty.lo_ty())
        self.lo, self.deps, self.effects = from_traced(
            "attach", jax.jit(lambda *xs: list(xs[:n])).trace(*ty.lo_ty(), *parts)
        )

    def pushforward(self, nonzero: Mask) -> Linear:
        def push(_: Any, leaves: Sequence[Any]) -> list[Any]:
            it = iter(leaves)
            own = [next(it) for _ in range(self.count)] if nonzero[0] else [None] * self.count
            given = [next(it) if m else None for m in nonzero[1:]]
            terms = [[x for x in pair if x is not None] for pair in zip(own, given, strict=True)]
            zeros = map(_jax.zeros, self.in_tys[1:])
            return [functools.reduce(_jax.add, xs) if xs else z for xs, z in zip(terms, zeros, strict=True)]

        return Linear((), push)

    def pullback(self, nonzero: Mask) -> Linear:
        def pull(_: Any, cts: Sequence[Any]) -> list[Any]:
            return [*(cts if nonzero[0] else ()), *(c for c, m in zip(cts, nonzero[1:], strict=True) if m)]

        return Linear((), pull)

    def transposed(self, linear: Mask) -> Linear:
        return self.pullback(linear)


def _part_types(ty: Any) -> list[Any]:
    """The types of the arrays that a tangent of a value is made of."""
    parts = [v.to_tangent_aval() for v in tangent_views(ty)]
    if hi := [p for p in parts if _jax.is_hi(p)]:
        raise TypeError(f"a Jacobian with respect to {ty}: its tangents are made of {hi[0]}, which is no array")
    return parts


def _as_tree(ty: Any, parts: Iterator[Any]) -> Any:
    """The parts of a tangent in a pytree: an array, or what the components' tangents are made of."""
    if not has_tangent(ty):
        return None
    if by_components(ty):
        return record_view(ty.decl, ty.tree.unflatten([_as_tree(leaf, parts) for leaf in ty.leaves]))
    return next(parts)


def _zeros(x: Any) -> Any:
    if not _jax.is_hi_value(x):
        return x
    ty = _jax.typeof(x)
    return _as_tree(ty, map(_jax.zeros, _part_types(ty)))


def _attached(x: Any, t: Any) -> Any:
    """``x`` with ``t`` as its tangent; an array is ``t`` itself."""
    if not _jax.is_hi_value(x):
        return t
    (out,) = made("attach", ty := _jax.typeof(x), lambda: Attached(ty)).apply([x, *jax.tree.leaves(t)])
    return out


def _of_arrays(transform: Any, fun: Any, argnums: Any, has_aux: bool, kwargs: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def wrapped(*args: Any, **kw: Any) -> Any:
        args = jax.tree.map(pack_open, args)
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        picked = [args[i] for i in nums]

        def of_parts(*parts: Any) -> Any:
            full = list(args)
            for i, x, t in zip(nums, picked, parts, strict=True):
                leaves, tree = jax.tree.flatten(x)
                full[i] = tree.unflatten([_attached(v, p) for v, p in zip(leaves, tree.flatten_up_to(t), strict=True)])
            out = fun(*full, **kw)
            out, aux = out if has_aux else (out, None)
            out = jax.tree.map(dense, out)
            return (out, aux) if has_aux else out

        where = 0 if isinstance(argnums, int) else tuple(range(len(nums)))
        parts = [jax.tree.map(_zeros, x) for x in picked]
        if not jax.tree.leaves(parts):
            tys = ", ".join(str(_jax.typeof(v)) for v in jax.tree.leaves(picked))
            raise TypeError(
                f"a Jacobian with respect to {tys}, which has no tangents; pass typax.dense(v) to differentiate it"
            )
        return transform(of_parts, where, has_aux, **kwargs)(*parts)

    return wrapped


def jacrev(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any) -> Any:
    """``jax.jacrev``, whose signature it has, with respect to arrays and values, and of both.

    Of a value the result is that of what it stands for. With respect to a value whose tangents are an array, it is as for an
    array; for tangents by components, a pytree: a tuple for a `Tup`, a dict by the names of components for other records.

    Raises:
      TypeError: if an argument has no tangents, or such as are no arrays (those of a type written by hand may be anything).
    """
    return _of_arrays(jax.jacrev, fun, argnums, has_aux, kwargs)


def jacfwd(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any) -> Any:
    """``jax.jacfwd``, whose signature it has; arguments, results and errors as for `jacrev`."""
    return _of_arrays(jax.jacfwd, fun, argnums, has_aux, kwargs)


def hessian(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any) -> Any:
    """``jax.hessian``, whose signature it has; arguments, results and errors as for `jacrev`."""
    return _of_arrays(jax.hessian, fun, argnums, has_aux, kwargs)


def stop_gradient(x: Any) -> Any:
    """``lax.stop_gradient`` for arrays and values."""
    return jax.lax.stop_gradient(jax.tree.map(pack_open, x))
