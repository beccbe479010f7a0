"""Sharded values are whole values: types say where arrays lie, and each device sees its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from typax import _jax
from typax._byhand import is_raw
from typax._moves import reshard
from typax._structural import dense
from typax._type import ValueType
from typax.laws._calls import derivative, result_types
from typax.laws._law import Broken, Call, NotApplicable, Values, law
from typax.laws._values import close, gradients, lowered, meaning, near, same_gradients, scalar, stacked

_EXPLICIT = jax.sharding.AxisType.Explicit


@contextmanager
def devices() -> Iterator[None]:
    """An explicit mesh of two axes, ``i`` and ``j``, of two devices each."""
    if len(jax.devices()) < 4:
        raise NotApplicable(
            "it takes 4 devices; on a CPU, start Python with XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    with jax.set_mesh(jax.make_mesh((2, 2), ("i", "j"), axis_types=(_EXPLICIT, _EXPLICIT), devices=jax.devices()[:4])):
        yield


def placements(ndim: int) -> list[tuple[Any, ...]]:
    """By rows, by columns, by both; by none."""
    if ndim == 0:
        return [()]
    rest = (None,) * (ndim - 1)
    return [("i", *rest), (*rest, "i"), *([("i", *rest[1:], "j")] if ndim > 1 else [])]


def placed(x: Any, parts: tuple[Any, ...]) -> Any:
    """A value partitioned as the array that it stands for would be. Raises a TypeError where it cannot be."""
    ty = _jax.typeof(x)
    if isinstance(ty, ValueType):
        try:
            return reshard(x, _each_by(ty, parts[0] if parts else None) if ty.decl.is_record else jax.P(*parts))
        except ValueError as e:  # an axis of odd size
            raise TypeError(str(e)) from None
    if _jax.is_hi(ty):
        raise TypeError(f"a value of type {ty} stands for no single array that could be placed")
    if any(p is not None and n % 2 for n, p in zip(ty.shape, parts, strict=True)):
        raise TypeError(f"axes of {ty} are not shared evenly by two devices")
    return jax.device_put(x, jax.P(*parts))


def _each_by(ty: Any, part: Any) -> Any:
    """The partition spec of a record whose components all are partitioned by their first axes, where they have one."""

    def of(a: Any) -> Any:
        if not isinstance(a, ValueType):
            return jax.P(part) if a.ndim else jax.P()
        return _each_by(a, part) if a.decl.is_record else a.decl.cls.P(part) if a.n_batch else a.decl.cls.P()

    return ty.decl.cls.P(part) if ty.has_own_axes else ty.decl.cls.P(*map(of, ty.leaves))


def _where(x: Any, what: str) -> None:
    """Raise `Broken` unless the arrays of a value lie where its type says."""
    ty = _jax.typeof(x)
    for i, (want, a) in enumerate(zip(ty.lo_ty() if _jax.is_hi(ty) else [ty], lowered(x), strict=True)):
        spec = a.sharding.spec
        real = (*spec, *(None,) * (a.ndim - len(spec)))
        if real != _jax.partition(want):
            raise Broken(
                f"{what} is of type {ty}, so that its array {i} is {want}, but it lies as {real}: data moves unseen"
            )


@law("type", "The arrays of a sharded value lie where its type says, and it stands for what it stood for.", even=True)
def sharded_values(cls: Any, example: Values) -> None:
    v, found, refused = example.value, 0, ""
    want = meaning(v)
    with devices():
        record = isinstance(_jax.typeof(v), ValueType) and _jax.typeof(v).decl.is_record
        ndim = 0 if record else getattr(_jax.typeof(v), "ndim", 0)
        for parts in [("i",)] if record else placements(ndim):
            try:
                w = placed(v, parts)
            except TypeError as e:
                refused = str(e)
                continue
            _where(w, f"a value placed by {parts}")
            try:
                out = meaning(w)
            except TypeError as e:  # what dense does (sort, say) JAX refuses along a sharded axis
                refused = str(e).splitlines()[0]
                continue
            found += 1
            for x in jax.tree.leaves(out):
                _where(x, f"dense of a value placed by {parts}")
            if ndim and _jax.partition(_jax.typeof(out)) != tuple(parts):
                raise Broken(f"dense of a value placed by {parts} is of type {_jax.typeof(out)}: the sharding is lost")
            _where(jax.jit(lambda x: x)(w), f"jit of the identity of a value placed by {parts}")
            close(f"dense of a value placed by {parts}", out, want, near(out, want, 4), "sharding changes what a value is")
    if not found:
        raise NotApplicable(f"it cannot be sharded: {refused}")


@law(
    "op",
    "The arrays of a result lie where its type says, and a sharded call gives what a whole one gives.",
    tame=True,
    even=True,
)
def sharded_calls(op: Any, call: Call) -> None:
    want, found, refused = meaning(call.run(*call.args)), 0, ""
    with devices():
        for k, x in enumerate(call.args):
            leaves = jax.tree.leaves(x)
            if len(leaves) != 1 or leaves[0] is not x:
                continue
            for parts in placements(getattr(_jax.typeof(x), "ndim", 0)):
                try:
                    args = [placed(a, parts) if i == k else a for i, a in enumerate(call.args)]
                    out = call.run(*args)
                except (TypeError, _jax.ShardingTypeError) as e:
                    refused = str(e).splitlines()[0]
                    continue
                found += 1
                for r in jax.tree.leaves(out):
                    _where(r, f"the result, with operand {k} placed by {parts},")
                traced = jax.jit(call.run).trace(*args).jaxpr.out_avals
                for a, r in zip(traced, jax.tree.leaves(out), strict=True):
                    for lo, x in zip(a.lo_ty() if _jax.is_hi(a) else [a], lowered(r), strict=True):
                        if _jax.partition(lo) != _jax.partition(_jax.typeof(x)):
                            raise Broken(
                                f"traced, the result is {a}, but its arrays are {_jax.typeof(x)}: data moves unseen"
                            )
                got = meaning(out)
                close(
                    f"the result, with operand {k} placed by {parts},", got, want, near(got, want, 64), "sharding changes it"
                )
    if not found:
        raise NotApplicable(f"no sharded call is admitted: {refused}" if refused else "no operand can be sharded")


@law("type", "In a shard_map each device sees its part of a value, and gradients come back whole.", tame=True, even=True)
def shard_map(cls: Any, example: Values) -> None:
    v = example.value
    ty = _jax.typeof(v)
    if not isinstance(ty, ValueType) or ty.decl.is_record:
        raise NotApplicable("a record, or a type written by hand: its partition spec does not follow")
    if not ty.n_batch:
        raise NotApplicable("the value has no batch axis that devices could share")
    want = meaning(v)
    spec = cls.P("i")
    with devices():
        try:
            w = reshard(v, spec)
        except ValueError as e:
            raise NotApplicable(str(e)) from None
        f = jax.jit(jax.shard_map(_seen(spec), in_specs=spec, out_specs=jax.P("i")))
        got = f(w)
        close("dense in a shard_map", got, want, near(got, want, 4), "devices see other parts than their own")
        same = jax.jit(jax.shard_map(lambda v: v, in_specs=spec, out_specs=spec))(w)
        if _jax.typeof(same).normalize() != _jax.typeof(w).normalize():
            raise Broken(f"a value of type {_jax.typeof(w)} comes out of a shard_map as {_jax.typeof(same)}")
        close(
            "the identity in a shard_map", meaning(same), want, near(want, want, 4), "devices see other parts than their own"
        )
        if not _jax.is_hi(ty.to_tangent_aval()) and ty.to_tangent_aval().dtype != _jax.float0:
            total = lambda g: jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(g(v).astype("float32")))))
            a, b = total(f)(w), total(dense)(v)
            close(
                "the gradient through a shard_map", a, b, near(a, b, 16), "devices do not see their own part of a gradient"
            )


def _seen(spec: Any) -> Any:
    """``dense`` on each device, where the type of each array says that it differs from device to device."""

    def body(v: Any) -> Any:
        ty = _jax.typeof(v)
        for k, (a, part) in enumerate(zip(ty.lo_ty(), spec.to_lo(), strict=True)):
            if tuple(part) and "i" in part and "i" not in _jax.varying(a):
                raise Broken(
                    f"in a shard_map array {k} of {ty} is {a}, as if each device had the same: gradients are summed"
                )
        return dense(v)

    return body


@law(
    "op", "In a shard_map over stacked operands the op is the loop over them, and so is its gradient.", tame=True, even=True
)
def shard_map_calls(op: Any, call: Call) -> None:
    rows = [*call.all, call.args][:4]
    n, args = len(rows), stacked(rows)
    each = jax.vmap(call.run, axis_size=n)
    if any(map(is_raw, [*map(_jax.typeof, jax.tree.leaves(args)), *result_types(call)])):
        raise NotApplicable("the partition spec of a type written by hand does not follow")
    want = meaning(each(*args))
    with devices():
        try:
            specs = jax.tree.map(lambda x: _by_rows(_jax.typeof(x)), args)
            outs = jax.jit(each).trace(*args)
            out_specs = jax.tree.structure(outs.out_info).unflatten(map(_by_rows, outs.jaxpr.out_avals))
            placed_args = jax.tree.map(
                lambda x, s: reshard(x, s) if _jax.is_hi_value(x) else jax.device_put(x, s), args, specs
            )
        except (TypeError, ValueError) as e:
            raise NotApplicable(f"its stacks cannot be shared by devices: {e}") from None
        inner = lambda *xs: jax.vmap(call.run)(*xs)
        f = jax.jit(jax.shard_map(inner, in_specs=tuple(specs), out_specs=out_specs))
        got = meaning(f(*placed_args))
        close("the op in a shard_map", got, want, near(got, want, 64), "devices see other parts than their own")
        try:
            _, which, _ = derivative(call)
            total, whole = scalar(f, placed_args), scalar(each, args)
        except NotApplicable:
            return
        got, want = gradients(total, placed_args, which), gradients(whole, args, which)
        same_gradients("the gradient through a shard_map", got, want, which, "devices do not see their part of a gradient")


def _by_rows(ty: Any) -> Any:
    """The partition spec of a stack, by its leading axis."""
    if not _jax.is_hi(ty):
        return jax.P("i")
    if not isinstance(ty, ValueType):
        raise TypeError(f"the partition spec of {ty}, written by hand, does not follow")
    if not ty.has_own_axes:
        return ty.decl.cls.P(*map(_by_rows, ty.leaves))
    return ty.decl.cls.P("i", **{c.name: _by_rows(a) for c, a in ty.fields if _jax.is_hi(a)})
