"""Collectives: values that move between the devices of a mesh axis, or the entries of a ``vmap`` with an ``axis_name``.

    all_gather(q, "i")            q8[2,3] on each device  ->  q8[n,2,3] on each: codes and scales travel, not the array
    ppermute, all_to_all          the same, of each component
    psum, pmean                   of records component by component, of values with tangents of their own class rounded
                                  again; a sum of other values is no such value: psum(dense(q))

Derivatives are those of JAX's collective on what the value stands for.
"""

import operator
from typing import Any

import jax
from jax import lax

from typax import _jax
from typax._byhand import undeclared
from typax._indexing import batch_axis, on_each
from typax._moves import unshare
from typax._op import Op
from typax._structural import dense, pack_open
from typax._type import ValueType


def _mapped(x: Any, one: Any) -> Any:
    return jax.tree.map(lambda v: one(pack_open(v)), x)


def _declared(name: str, value: Any) -> ValueType:
    ty = _jax.typeof(value)
    if not isinstance(ty, ValueType):
        raise undeclared(name, ty, "send its arrays")
    return ty


def _key(name: str, axis_name: Any, **params: Any) -> tuple[Any, ...]:
    groups = params.get("axis_index_groups")
    if groups is not None:
        params["axis_index_groups"] = tuple(map(tuple, groups))
    return (name, axis_name, *sorted(params.items()))


def all_gather(x: Any, axis_name: Any, *, axis_index_groups: Any = None, axis: int = 0, tiled: bool = False) -> Any:
    """``lax.all_gather``, whose signature it has: values of all places, stacked along a batch axis, or joined (``tiled``).

    Raises:
      TypeError: if ``axis`` is a named axis of a value.
    """
    params: dict[str, Any] = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def one(v: Any) -> Any:
        if not _jax.is_hi_value(v):
            return lax.all_gather(v, axis_name, axis=axis, **params)
        v = unshare(v)
        ty = _declared("all_gather", v)
        k = batch_axis("all_gather", ty, axis, extra=0 if tiled else 1)
        axes, masks = ([k] * len(ty.leaves), ty.masks) if tiled else ty.broadcasted(k)
        key = _key("all_gather", axis_name, axis=k, **params)
        gather = lambda y, k: all_gather(y, axis_name, axis=k, **params)
        return on_each(key, [v], lambda j, xs, _: gather(xs[0], axes[j]), masks, lambda xs, _: gather(xs[0], k))

    return _mapped(x, one)


def ppermute(x: Any, axis_name: Any, perm: Any) -> Any:
    """``lax.ppermute``, whose signature it has: a place that no pair sends to gets zeros in each component."""
    perm = tuple((operator.index(a), operator.index(b)) for a, b in perm)

    def one(v: Any) -> Any:
        if not _jax.is_hi_value(v):
            return lax.ppermute(v, axis_name, perm)
        ty = _declared("ppermute", v)
        send = lambda xs: ppermute(xs[0], axis_name, perm)
        return on_each(
            _key("ppermute", axis_name, perm=perm), [v], lambda _, xs, __: send(xs), ty.masks, lambda xs, _: send(xs)
        )

    return _mapped(x, one)


def all_to_all(
    x: Any, axis_name: Any, split_axis: int, concat_axis: int, *, axis_index_groups: Any = None, tiled: bool = False
) -> Any:
    """``lax.all_to_all``, whose signature it has, along batch axes.

    Raises:
      TypeError: if one of the axes is a named axis of a value.
    """
    params: dict[str, Any] = {"axis_index_groups": axis_index_groups, "tiled": tiled}

    def one(v: Any) -> Any:
        if not _jax.is_hi_value(v):
            return lax.all_to_all(v, axis_name, split_axis, concat_axis, **params)
        v = unshare(v)
        ty = _declared("all_to_all", v)
        axes = tuple(batch_axis("all_to_all", ty, k) for k in (split_axis, concat_axis))
        swap = lambda xs: all_to_all(xs[0], axis_name, *axes, **params)
        key = _key("all_to_all", axis_name, axes=axes, **params)
        return on_each(key, [v], lambda _, xs, __: swap(xs), ty.masks, lambda xs, _: swap(xs))

    return _mapped(x, one)


def psum(x: Any, axis_name: Any, **kwargs: Any) -> Any:
    """``lax.psum``, whose signature it has, of arrays, and of values whose class defines a sum.

    Raises:
      TypeError: for a value whose sum is no value of its class.
    """
    return _summed("psum", lax.psum, x, axis_name, kwargs)


def pmean(x: Any, axis_name: Any, **kwargs: Any) -> Any:
    """``lax.pmean``, whose signature it has, where `psum` is defined.

    Raises:
      TypeError: for a value whose sum is no value of its class.
    """
    return _summed("pmean", lax.pmean, x, axis_name, kwargs)


def _summed(name: str, fn: Any, x: Any, axis_name: Any, kwargs: dict[str, Any]) -> Any:
    def one(v: Any) -> Any:
        if not _jax.is_hi_value(v):
            return fn(v, axis_name, **kwargs)
        ty = _declared(name, v)
        if ty.decl.is_record and ty.decl.tangent.by_components:
            key = _key(name, axis_name, **kwargs)
            return on_each(key, [v], lambda _, xs, __: one(xs[0]), ty.masks, lambda xs, _: one(xs[0]))
        if ty.to_tangent_aval() != ty:
            raise TypeError(
                f"typax.{name} of {ty}: the sum of such values is not one of them; sum what they stand for, "
                f"{name}(typax.dense(v), {axis_name!r}), and make a value of it"
            )
        total = Op(lambda q: fn(q, axis_name, **kwargs), name)
        total.add(lambda q: _jax.typeof(q).decl.tangent.close(_jax.typeof(q), fn(dense(q), axis_name, **kwargs)), {})
        return total(v)

    return _mapped(x, one)
