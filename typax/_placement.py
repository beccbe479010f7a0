"""Where values live: on devices, on a mesh, inside a ``shard_map``.

    device_put(q, jax.P("i"))                 the spec of the array that q stands for, or QArray.P("i")
    shard_map(f, in_specs=P("i"), ...)(q)     made into the spec of q's class: each component is cut as the whole is

Each component moves as the whole does, by the one axis rule.  Under a trace these are ops, whose derivatives are those of
JAX's function on what the value stands for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from typax import _jax
from typax._byhand import is_raw, undeclared
from typax._indexing import on_each
from typax._prim import Cache
from typax._spec import OnMesh, Pspec, on_mesh
from typax._structural import pack_open
from typax._type import ValueType


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, jax.P | _jax.HiPspec | jax.sharding.Sharding | jax.Device | OnMesh)


def _leaf_shardings(ty: ValueType, where: Any) -> tuple[list[Any], Any]:
    """What each component leaf, and what the value stands for, is given for ``where``."""
    if not (isinstance(where, jax.P | _jax.HiPspec) or hasattr(where, "spec")):  # a device, or nothing
        return [where] * len(ty.leaves), where
    spec, mesh = ty.partition_spec(where)
    return [on_mesh(s, mesh) for s in spec.leaves], on_mesh(spec.dense, mesh)


def _class_spec(ty: ValueType, spec: Any) -> Pspec:
    own, _ = ty.partition_spec(spec)
    own.by_user = True
    return own


def _placed(name: str, fn: Callable[[Any, Any], Any], value: Any, where: Any) -> Any:
    """``fn(component, its sharding)`` of each component, as one op."""
    ty = _jax.typeof(value)
    if not isinstance(ty, ValueType):
        raise undeclared(name, ty, "place its arrays")
    leaves, dense = _leaf_shardings(ty, where)
    key = (name, *leaves, dense)
    return on_each(key, [value], lambda j, xs, _: fn(xs[0], leaves[j]), ty.masks, lambda xs, _: fn(xs[0], dense))


def _by_leaf(name: str, fn: Callable[[Any, Any], Any], x: Any, where: Any) -> Any:
    """``fn`` of the leaves of a pytree that are arrays all at once, and of each value among them."""
    full = where if _is_spec(where) and jax.tree_util.all_leaves([x]) else jax.tree.broadcast(where, x, is_leaf=_is_spec)
    leaves, tree = jax.tree.flatten(x)
    given = jax.tree.leaves(full, is_leaf=_is_spec)
    return tree.unflatten([fn(pack_open(v), s) for v, s in zip(leaves, given, strict=True)])


def device_put(x: Any, device: Any = None, **kwargs: Any) -> Any:
    """``jax.device_put``, whose signature it has, for arrays and values.

    For a value ``device`` is a device, a sharding or ``jax.P`` of the array that it stands for, or a spec of its class.

    Raises:
      TypeError: if the spec does not fit the value.
    """
    if not any(map(_jax.is_hi_value, jax.tree.leaves(x))):
        return jax.device_put(x, device, **kwargs)

    def put(v: Any, where: Any) -> Any:
        if not _jax.is_hi_value(v):
            return jax.device_put(v, where, **kwargs)
        if isinstance(v, _jax.Tracer) or not _jax.trace_is_clean() or not isinstance(ty := _jax.typeof(v), ValueType):
            return _placed("device_put", put, v, where)
        leaves = [put(c, s) for c, s in zip(v._leaves, _leaf_shardings(ty, where)[0], strict=True)]
        return ty.with_leaves(list(map(_jax.typeof, leaves))).check().of_leaves(leaves)

    return _by_leaf("device_put", put, x, device)


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """``lax.with_sharding_constraint``, whose signature it has, for arrays and values.

    Raises:
      TypeError: on explicit mesh axes, where it is a check, if a component is partitioned otherwise.
    """
    if not any(map(_jax.is_hi_value, jax.tree.leaves(x))):
        return jax.lax.with_sharding_constraint(x, shardings)

    def constrain(v: Any, where: Any) -> Any:
        if not _jax.is_hi_value(v):
            return jax.lax.with_sharding_constraint(v, where)
        try:
            return _placed("with_sharding_constraint", constrain, v, where)
        except AssertionError as e:
            raise TypeError(f"typax.with_sharding_constraint of {_jax.typeof(v)}: {e}; move it with typax.reshard") from e

    return _by_leaf("with_sharding_constraint", constrain, x, shardings)


# --- shard_map -------------------------------------------------------------------------------------------------------


class _PlainOutSpecs(Exception):
    """The body gives hi values where its specs are plain: the specs of their classes, now that these are known."""

    def __init__(self, specs: Any) -> None:
        super().__init__()
        self.specs = specs


def shard_map(f: Callable[..., Any], /, *, out_specs: Any, in_specs: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """``jax.shard_map``, whose signature it has, for arrays and values, eagerly too.

    Where an operand or a result is a value, its spec is ``Cls.P(...)`` or the ``jax.P`` of the array that it stands for.

    Raises:
      TypeError: if a spec does not fit a value.
    """
    compiled = Cache(256)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        args = jax.tree.map(pack_open, args)
        leaves, tree = jax.tree.flatten(args)
        tys = tuple(map(_jax.typeof, leaves))
        own = _own_specs(in_specs, args, tys)
        specs = {} if own is None else {"in_specs": own}
        given = any(isinstance(s, _jax.HiPspec) for s in jax.tree.leaves(out_specs, is_leaf=_is_spec))
        if not given and not any(map(_jax.is_hi, tys)):
            try:
                return jax.shard_map(_checked(f, out_specs), out_specs=out_specs, **specs, **kwargs)(*args)
            except _PlainOutSpecs:
                pass
        with _jax.without_anonymous_axes():
            key = (tree, tys, _jax.trace_key())
            run = compiled.get(key, lambda: _Jitted(f, out_specs, specs | kwargs))
        return run(*args)

    return mapped


class _Jitted:
    """A mapped function under ``jax.jit``, in which alone hi values cross its boundary."""

    def __init__(self, f: Callable[..., Any], out_specs: Any, kwargs: dict[str, Any]) -> None:
        self.f, self.kwargs = f, kwargs
        self.run = self._with(out_specs)

    def _with(self, out_specs: Any) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(_checked(self.f, out_specs), out_specs=out_specs, **self.kwargs))

    def __call__(self, *args: Any) -> Any:
        try:
            return self.run(*args)
        except _PlainOutSpecs as known:
            self.run = self._with(known.specs)
            return self.run(*args)


def _own_specs(in_specs: Any, args: Any, tys: Sequence[Any]) -> Any:
    """The specs of the operands, those of values made from their classes."""
    if in_specs is None or not any(map(_jax.is_hi, tys)):
        return in_specs
    full = jax.tree.broadcast(tuple(in_specs) if isinstance(in_specs, list) else in_specs, args, is_leaf=_is_spec)
    flat, tree = jax.tree.flatten(full, is_leaf=_is_spec)
    pairs = list(zip(tys, flat, strict=True))
    if wrong := [t for t, s in pairs if is_raw(t) and isinstance(s, jax.P)]:
        raise TypeError(f"typax.shard_map: {wrong[0]} is a hi type written by hand, whose in_specs is a HiPspec of its own")
    return tree.unflatten([_class_spec(t, s) if isinstance(t, ValueType) and isinstance(s, jax.P) else s for t, s in pairs])


def _checked(f: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """``f``, which says so if it gives values where the specs are plain."""

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        out = jax.tree.map(pack_open, f(*args))
        tys = [_jax.typeof(x) for x in jax.tree.leaves(out)]
        if any(isinstance(t, ValueType) for t in tys):
            given = jax.tree.leaves(jax.tree.broadcast(out_specs, out, is_leaf=_is_spec), is_leaf=_is_spec)
            plain = [isinstance(t, ValueType) and isinstance(s, jax.P) for t, s in zip(tys, given, strict=True)]
            if any(plain):
                own = [_class_spec(t, s) if p else s for t, s, p in zip(tys, given, plain, strict=True)]
                raise _PlainOutSpecs(jax.tree.unflatten(jax.tree.structure(out), own))
        return out

    return run
