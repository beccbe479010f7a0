"""The structural ops that keep what a value stands for: its axes moved, stacked, sharded otherwise.

JAX asks for them where it moves a batch axis (`jax.vmap`, loops under it); each acts on every component, and on the array
that the value stands for, in the same way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from typax import _jax, _repairs
from typax._byhand import has_axes, is_raw, own_spec, tangent_axis
from typax._prim import Application, Linear, Mask
from typax._spec import on_mesh
from typax._structural import Derived, by_components, from_traced, made, over_components, over_views
from typax._type import ValueType, lo_axes


def _on_leaves(kind: str, ty: ValueType, fn: Any, masks: Any, on_view: Any, **shown: Any) -> Application:
    """An application that acts on each leaf, and on what the value stands for, in the same way."""
    leaves = jax.jit(fn).trace(*ty.leaves).jaxpr.out_avals
    out = type(ty)(ty.decl, leaves, ty.tree, ty.statics, masks)
    if by_components(ty):
        rule = over_components(kind, (ty,), (out,), fn)
    else:
        rule = over_views(kind, (ty,), (out,), lambda x: [on_view(x)])
    app = Derived(kind, (ty,), (out,), fn, rule)
    app.shown = shown
    return app


def permute_batch(value: Any, perm: Sequence[int]) -> Any:
    """Permute the batch axes of a value: ``jax.vmap`` asks so for a hi result at another axis than the first."""
    ty = _jax.typeof(value)
    if is_raw(ty):
        if list(perm) != sorted(perm):
            raise TypeError(f"cannot permute {ty} by {tuple(perm)}: a type written by hand has its leading axis only")
        return value
    if not isinstance(ty, ValueType):
        return jax.numpy.transpose(value, tuple(perm))
    perms, masks = ty.permuted(perm)

    def fn(*leaves: Any) -> list[Any]:
        return [permute_batch(x, p) for x, p in zip(leaves, perms, strict=True)]

    def make() -> Application:
        return _on_leaves("transpose", ty, fn, masks, lambda x: jax.numpy.transpose(x, perm), permutation=tuple(perm))

    (out,) = made(("transpose", tuple(perm)), ty, make).apply([value])
    return out


class RawBroadcast(Application):
    """A stack of ``size`` copies of a value of a type written by hand, by what the type says of its leading axis."""

    name = "broadcast"

    def __init__(self, ty: Any, size: int, spec: Any) -> None:
        spec = own_spec(ty, spec)
        self.shown, self.in_tys, self.out_tys = {"size": size}, (ty,), (ty.inc_rank(size, spec),)
        axes = lo_axes(self.out_tys[0], spec, size)
        self.axis: Any = tangent_axis(self.out_tys[0], spec, size) if has_axes(ty) else None

        def fn(*los: Any) -> list[Any]:
            return [x if k is None else _repairs.broadcast(x, size, k, None) for x, k in zip(los, axes, strict=True)]

        self.lo, self.deps, self.effects = from_traced(self.name, jax.jit(fn).trace(*ty.lo_ty()))

    def _linear(self, fn: Callable[[Any], Any]) -> Linear:
        if self.axis is None:
            raise NotImplementedError(f"the stack of copies of {self.in_tys[0]} that vmap makes has no derivative")
        return Linear((), lambda _, leaves: [fn(x) for x in leaves])

    def pushforward(self, nonzero: Mask) -> Linear:
        return self._linear(lambda x: _repairs.broadcast(x, self.shown["size"], self.axis, None))

    def pullback(self, nonzero: Mask) -> Linear:
        return self._linear(lambda x: x.sum(self.axis))

    def transposed(self, linear: Mask) -> Linear:
        return self.pullback(linear)


def broadcast_batch(value: Any, size: int, axis: int, mesh_axis: Any = None) -> Any:
    """A stack of ``size`` copies of a value along a new batch axis: ``jax.vmap`` asks so for what it did not map."""
    ty = _jax.typeof(value)
    if is_raw(ty):
        (out,) = made(("broadcast", size, axis), ty, lambda: RawBroadcast(ty, size, axis)).apply([value])
        return out
    if not isinstance(ty, ValueType):
        return _repairs.broadcast(value, size, axis, mesh_axis)
    axes, masks = ty.broadcasted(axis)

    def fn(*leaves: Any) -> list[Any]:
        return [broadcast_batch(x, size, k, mesh_axis) for x, k in zip(leaves, axes, strict=True)]

    def make() -> Application:
        on_view = lambda x: broadcast_batch(x, size, axis, mesh_axis)
        return _on_leaves("broadcast", ty, fn, masks, on_view, size=size, axis=axis)

    (out,) = made(("broadcast", size, axis, mesh_axis), ty, make).apply([value])
    return out


def unshare(value: Any) -> Any:
    """A stack in which every component has all batch axes: what was shared along one is repeated.

    Raises:
      TypeError: if ``value`` is neither an array nor a value of a declared type.
    """
    ty = _jax.typeof(value)
    if not isinstance(ty, ValueType) or not ty.has_own_axes or all(all(m) for m in ty.masks):
        return value
    whole = tuple((True,) * ty.n_batch for _ in ty.masks)

    def fn(*leaves: Any) -> list[Any]:
        out = []
        for x, m in zip(leaves, ty.masks, strict=True):
            for k, axis in enumerate(ty.batch):
                if not m[k]:
                    x = broadcast_batch(x, axis.size, k, axis.part)
            out.append(x)
        return out

    def make() -> Application:
        return _on_leaves("unshare", ty, fn, whole, lambda x: x)  # what it stands for has all batch axes already

    (out,) = made("unshare", ty, make).apply([value])
    return out


def reshard(value: Any, sharding: Any) -> Any:
    """``jax.sharding.reshard`` for values of declared types: each component moves as the whole does (explicit mode).

    Args:
      value: an array or a value, or a pytree of them.
      sharding: ``Cls.P(...)``, or for a type that stands for an array the ``jax.P`` or ``NamedSharding`` of that array.

    Raises:
      TypeError: if the spec is one of another class.
    """
    if not jax.tree_util.all_leaves([value]):
        full = jax.tree.broadcast(sharding, value) if jax.tree_util.all_leaves([sharding]) else sharding
        return jax.tree.map(reshard, value, full)
    if not isinstance(ty := _jax.typeof(value), ValueType):
        return jax.sharding.reshard(value, sharding)
    spec, mesh = ty.partition_spec(sharding)

    def fn(*leaves: Any) -> list[Any]:
        return [reshard(x, on_mesh(s, mesh)) for x, s in zip(leaves, spec.leaves, strict=True)]

    def make() -> Application:
        return _on_leaves("reshard", ty, fn, ty.masks, lambda x: reshard(x, on_mesh(spec.dense, mesh)), sharding=spec)

    (out,) = made(("reshard", spec, mesh), ty, make).apply([value])
    return out


def rebatch(value: Any, size: int, src: Any, dst: Any, mesh_axis: Any = None) -> Any:
    """A value mapped by ``src`` as one mapped by ``dst``: unmapped components are stacked. ``None`` if it cannot be done."""
    declared = isinstance(ty := _jax.typeof(value), ValueType)
    if declared:
        src, dst = ty.mapping(src), ty.mapping(dst)
    if src == dst or (is_raw(ty) and None not in (src, dst) and own_spec(ty, dst) == src):
        return value
    if isinstance(src, int) and isinstance(dst, int) and not declared:
        return jax.numpy.moveaxis(value, src, dst)
    if src is None:
        return broadcast_batch(value, size, dst, mesh_axis) if isinstance(dst, int) else None
    if not declared or dst is None:
        return None
    old, masks = ty.leaf_specs(src), ty.masks
    if not ty.has_own_axes:
        new = ty.leaf_specs(dst)
    else:  # one batch axis, which some components lack
        if not isinstance(dst, int) or not all(s is None or s == sum(m[:dst]) for s, m in zip(old, ty.masks, strict=True)):
            return None
        new = [sum(m[:dst]) for m in ty.masks]
        masks = tuple((*m[:dst], True, *m[dst + 1 :]) for m in ty.masks)
    pairs = list(zip(old, new, strict=True))
    if any(b is None and a is not None for a, b in pairs):
        return None

    def fn(*leaves: Any) -> list[Any]:
        return [rebatch(x, size, a, b, mesh_axis) for x, (a, b) in zip(leaves, pairs, strict=True)]

    def make() -> Application:
        return _on_leaves("rebatch", ty, fn, masks, lambda x: x)  # what it stands for has all batch axes already

    (out,) = made(("rebatch", size, src, dst, mesh_axis), ty, make).apply([value])
    return out


_repairs.broadcast_hi, _repairs.rebatch_hi = broadcast_batch, rebatch
