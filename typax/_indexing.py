"""Stacks of values: joined, chosen from, indexed along their batch axes, as arrays are.

    stack([q8[2,3], q8[2,3]])        q8[2,2,3]         q8[4,2,3][1]            q8[2,3]
    concatenate([q8[2,3], q8[5,3]])  q8[7,3]           q8[4,2,3][::2, 0]       q8[2,3]
    where(mask[2,1], q8[2,3], ...)   q8[2,3]           take(q8[4,2,3], [3, 1])  q8[2,2,3]

A batch axis leads in every component, so that each function acts on each component, and on the array that the value stands
for, in the same way: that is its reference, and its derivatives are the reference's.  A named axis (the row that shares a
scale) is part of what a value is, and is not cut.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from typax import _jax, _repairs
from typax._byhand import undeclared
from typax._moves import broadcast_batch, permute_batch, unshare
from typax._prim import Application
from typax._structural import Derived, by_components, leaf_types, made, over_components, over_views, pack_open
from typax._type import ValueType

type Masks = tuple[tuple[bool, ...], ...]


def _type(name: str, value: Any) -> Any:
    """The type of a value, or ``None`` of an array."""
    ty = _jax.typeof(value)
    if isinstance(ty, ValueType):
        return ty
    if _jax.is_hi(ty):
        raise undeclared(name, ty, "apply its own primitives")
    return None


def _remedy(ty: ValueType, what: str) -> str:
    n = len(batch_sizes(ty))
    able = f"its batch axes are the first {n}" if n else "it has no batch axis"
    return (
        f"{what} along a named axis of {ty} would change what the value is ({able}); do it to typax.dense(v), or to v in a "
        "function of arrays that typax.lift runs on values, if its ops know how"
    )


def batch_sizes(ty: ValueType) -> tuple[int, ...]:
    """The sizes of the batch axes; of a record whose components have no axes of their own, those that all share."""
    return tuple(a.size for a in ty.batch) if ty.has_own_axes else ty.shape


def _batch_axis(name: str, ty: ValueType, axis: int, extra: int = 0) -> int:
    """``axis`` as the position of a batch axis."""
    axis = operator.index(axis)
    rank, n = ty.ndim + extra, len(batch_sizes(ty)) + extra
    if not -rank <= axis < rank:
        raise ValueError(f"typax.{name}: axis {axis} is out of bounds for {ty}" + (" and a new axis" if extra else ""))
    axis %= rank
    if axis >= n:
        raise TypeError(_remedy(ty, f"typax.{name}"))
    return axis


def on_each(
    kind: Any,
    values: Sequence[Any],
    fn: Callable[[int, Sequence[Any], Sequence[Any]], Any],
    masks: Masks,
    on_view: Callable[[Sequence[Any], Sequence[Any]], Any],
    arrays: Sequence[Any] = (),
    **shown: Any,
) -> Any:
    """One value of several of a class, leaf by leaf: ``fn(leaf's number, its leaves, arrays)``; ``on_view`` is the same of
    what they stand for."""
    ty = _jax.typeof(values[0])
    in_tys = (*map(_jax.typeof, values), *map(_jax.typeof, arrays))
    k, n = len(values), len(ty.leaves)

    def on_leaves(*flat: Any) -> list[Any]:
        rest = flat[k * n :]
        return [fn(j, flat[j : k * n : n], rest) for j in range(n)]

    def make() -> Application:
        try:
            out_leaves = jax.jit(on_leaves).trace(*(a for t in in_tys for a in leaf_types(t))).jaxpr.out_avals
        except _jax.ShardingTypeError as e:
            raise TypeError(f"typax.{kind[0]} of {ty}: {e}; make the axis whole first, with typax.reshard(v, spec)") from e
        out = type(ty)(ty.decl, out_leaves, ty.tree, ty.statics, masks).check()
        if by_components(ty):
            rule = over_components(kind[0], in_tys, (out,), on_leaves)
        else:
            rule = over_views(kind[0], in_tys, (out,), lambda *xs: [on_view(xs[:k], xs[k:])])
        app = Derived(kind[0], in_tys, (out,), on_leaves, rule)
        app.shown = shown
        return app

    (result,) = made((kind, in_tys[1:]), ty, make).apply([*values, *arrays])
    return result


def _alike(name: str, values: Sequence[Any], but: int | None = None) -> list[Any]:
    """The values, each component with all batch axes, if they are of one type (but for the size along a batch axis)."""
    values = [unshare(pack_open(v)) for v in values]
    tys = [_type(name, v) for v in values]

    def like(ty: Any) -> Any:
        return ty if but is None or not isinstance(ty, ValueType) else ty.dec_rank(batch_sizes(ty)[but], but)

    for v, t in zip(values, tys, strict=True):
        if t is None or like(t) != like(tys[0]):
            kinds = sorted({str(_jax.typeof(x)) for x in (values[0], v)})
            raise TypeError(
                f"typax.{name} takes values of one type, got {' and '.join(kinds)}; typax.dense(v) of each gives arrays"
            )
    return values


def _has_values(xs: Any) -> bool:
    return any(map(_jax.is_hi_value, xs))


# --- joined --------------------------------------------------------------------------------------------------------


def stack(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """``jnp.stack`` for values: of one type, joined along a new batch axis.

    Raises:
      TypeError: if the values are of several types, or if the new axis would not come before the named axes.
    """
    if _jax.is_hi_value(arrays):
        arrays = [arrays[i] for i in range(len(arrays))]
    if not _has_values(arrays):
        return jnp.stack(arrays, axis, **kwargs)
    values = _alike("stack", arrays)
    ty = _jax.typeof(values[0])
    axis = _batch_axis("stack", ty, axis, extra=1)
    axes, masks = ty.broadcasted(axis)
    return on_each(
        ("stack", axis),
        values,
        lambda j, xs, _: stack(xs, axes[j]),
        masks,
        lambda xs, _: jnp.stack(xs, axis),
        axis=axis,
    )


def concatenate(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """``jnp.concatenate`` for values: joined along a batch axis.

    Raises:
      TypeError: if the values differ in more than the size of this axis, or if it is a named axis.
    """
    if _jax.is_hi_value(arrays):
        arrays = [arrays[i] for i in range(len(arrays))]
    if not _has_values(arrays):
        return jnp.concatenate(arrays, axis, **kwargs)
    declared = next((t for t in map(_jax.typeof, arrays) if isinstance(t, ValueType)), None)
    if declared is None:
        _type("concatenate", next(x for x in arrays if _jax.is_hi_value(x)))
    assert declared is not None
    axis = _batch_axis("concatenate", declared, axis)
    values = _alike("concatenate", arrays, axis)
    return on_each(
        ("concatenate", axis),
        values,
        lambda _, xs, __: concatenate(xs, axis),
        _jax.typeof(values[0]).masks,
        lambda xs, _: jnp.concatenate(xs, axis),
        dimension=axis,
    )


# --- chosen --------------------------------------------------------------------------------------------------------


def select_n(which: Any, *cases: Any) -> Any:
    """``lax.select_n`` for values: the case of number ``which``, a scalar."""
    if not _has_values(cases):
        return jax.lax.select_n(which, *cases)
    values = _alike("select_n", cases)
    ty = _jax.typeof(values[0])
    one = lambda xs, arrays: select_n(arrays[0], *xs)
    return on_each(("select_n",), values, lambda _, xs, a: one(xs, a), ty.masks, one, [which])


def _select_rows(which: Any, *cases: Any) -> Any:
    """For each entry of the leading axis the case of its number."""
    return jax.vmap(select_n)(which, *cases)


_repairs.select_hi = _select_rows


def where(condition: Any, x: Any = None, y: Any = None, /, **kwargs: Any) -> Any:
    """``jnp.where`` for values of one type: ``condition`` broadcasts against their batch axes, so that it has size 1 along
    named axes (``mask[:, None]`` to choose rows).

    Raises:
      TypeError: if the values are of several types, or if the condition is not constant along a named axis.
    """
    if not _has_values((x, y)):
        return jnp.where(condition, x, y, **kwargs)
    values = _alike("where", (x, y))
    ty, condition = _jax.typeof(values[0]), jnp.asarray(condition).astype(bool)
    if not condition.ndim:
        return select_n(condition, values[1], values[0])
    if ty.decl.is_record and not ty.has_own_axes:
        pick = lambda xs, a: where(a[0], *xs)
        return on_each(("where",), values, lambda _, xs, a: pick(xs, a), ty.masks, pick, [condition])
    n, named = len(ty.batch), ty.ndim - len(ty.batch)
    sizes = (1,) * (ty.ndim - condition.ndim) + condition.shape
    batch = batch_sizes(ty)
    if len(sizes) > ty.ndim or any(s != 1 for s in sizes[n:]):
        raise TypeError(
            f"typax.where: a condition of shape {list(condition.shape)} tells apart what lies along a named axis of {ty}; "
            f"it broadcasts to the batch axes, {[*batch, *(1,) * named]}"
        )
    if any(s not in (1, b) for s, b in zip(sizes, batch, strict=False)):
        raise TypeError(f"typax.where: a condition of shape {list(condition.shape)} does not broadcast to {ty}")
    mask = condition.reshape(sizes[:n])

    def choose(xs: Sequence[Any], arrays: Sequence[Any]) -> Any:
        (mask,) = arrays
        rank = _jax.typeof(xs[0]).ndim
        return where(mask.reshape(*mask.shape, *(1,) * (rank - n)), *xs)

    return on_each(("where",), values, lambda _, xs, a: choose(xs, a), ty.masks, choose, [mask])


# --- indexed -------------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """An index that is an operand: a number or an array known when the program runs."""

    number: int


def _parse(ty: ValueType, index: Any) -> tuple[list[Any], list[Any]]:
    """An index into the batch axes, one entry for each axis of the value and each new one; and the arrays in it."""
    entries: list[Any] = []
    for e in index if isinstance(index, tuple) else (index,):
        if isinstance(e, list):
            e = np.asarray(e)
        if getattr(e, "dtype", None) == np.bool_ or isinstance(e, bool):
            if isinstance(e, _jax.Tracer) or not np.ndim(e):
                raise TypeError(
                    f"{ty} is indexed by a mask with known entries only; typax.where(mask, v, other) takes a traced one"
                )
            entries += np.nonzero(np.asarray(e))
        else:
            entries.append(e)
    taken = sum(e is not None and e is not Ellipsis for e in entries)
    if taken > ty.ndim or sum(e is Ellipsis for e in entries) > 1:
        raise IndexError(f"too many indices for {ty}: {taken} where it has {ty.ndim} axes")
    spot = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries[spot : spot + 1] = [slice(None)] * (ty.ndim - taken)
    out, arrays, axis, sizes = [], [], 0, batch_sizes(ty)
    for e in entries:
        if e is None:
            if axis > len(sizes):
                raise TypeError(f"a new axis of {ty} comes before its named axes, as the first of {len(sizes) + 1}")
            out.append(None)
            continue
        if axis >= len(sizes):
            if not (isinstance(e, slice) and e == slice(None)):
                raise TypeError(_remedy(ty, "indexing"))
            axis += 1
            continue
        if isinstance(e, slice):
            if any(isinstance(s, _jax.Tracer) for s in (e.start, e.stop, e.step)):
                raise TypeError(
                    f"a slice of {ty} has static bounds; for a moving window use typax.take(v, start + jnp.arange(n), axis)"
                )
            out.append(e)
        elif isinstance(e, int) or (isinstance(e, np.integer) and not isinstance(e, _jax.Tracer)):
            if not -sizes[axis] <= e < sizes[axis]:
                raise IndexError(f"index {e} is out of bounds for axis {axis} of {ty}, of size {sizes[axis]}")
            out.append(int(e) % sizes[axis])
        elif hasattr(e, "dtype") and jnp.issubdtype(e.dtype, jnp.integer):
            out.append(_Slot(len(arrays)))
            arrays.append(jnp.asarray(e))
        else:
            raise TypeError(f"{ty} is indexed by integers, slices, integer arrays, None and ..., not by {e!r}")
        axis += 1
    return out, arrays


def index(value: Any, at: Any) -> Any:
    """``value[at]``: along batch axes, by integers (traced ones too), slices, integer arrays, ``None`` and ``...``.

    Raises:
      TypeError: for an index into a named axis, or by a mask that is not known when the program is traced.
      IndexError: for too many indices, or a Python integer that is out of bounds; a traced one is clamped, as for arrays.
    """
    value = pack_open(value)
    ty = _type("index", value)
    if ty is None:
        return value[at]
    entries, arrays = _parse(ty, at)
    if not entries or all(isinstance(e, slice) and e == slice(None) for e in entries):
        return value
    simple = all(isinstance(e, int | slice) or (isinstance(e, _Slot) and not arrays[e.number].ndim) for e in entries)
    if not simple:
        value = unshare(value)
        ty = _jax.typeof(value)
    key = tuple((e.start, e.stop, e.step) if isinstance(e, slice) else e for e in entries)

    def full(arrays: Sequence[Any]) -> list[Any]:
        return [arrays[e.number] if isinstance(e, _Slot) else e for e in entries]

    if not ty.has_own_axes:
        masks: Masks = ty.masks
        own = lambda j, arrays: tuple(full(arrays))
    elif simple:
        kept = [k for k, e in enumerate(entries) if isinstance(e, slice)]
        masks = tuple((*(m[k] for k in kept), *m[len(entries) :]) for m in ty.masks)
        own = lambda j, arrays: tuple(e for e, m in zip(full(arrays), ty.masks[j], strict=False) if m)
    else:
        shape = jax.eval_shape(lambda x, *arrays: x[tuple(full(arrays))], _shaped(batch_sizes(ty)), *arrays).shape
        masks = ((True,) * len(shape),) * len(ty.leaves)
        own = lambda j, arrays: tuple(full(arrays))

    def of_leaf(j: int, xs: Sequence[Any], arrays: Sequence[Any]) -> Any:
        at = own(j, arrays)
        return index(xs[0], at) if at else xs[0]

    def of_view(xs: Sequence[Any], arrays: Sequence[Any]) -> Any:
        return xs[0][tuple(full(arrays))]

    shown = {"at": _show_index(entries)}
    return on_each(("index", key), [value], of_leaf, masks, of_view, arrays, **shown)


def _shaped(shape: Sequence[int]) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.int8)


def _show_index(entries: Sequence[Any]) -> str:
    def one(e: Any) -> str:
        if isinstance(e, slice):
            a, b, c = ("" if s is None else str(s) for s in (e.start, e.stop, e.step))
            return f"{a}:{b}" + (f":{c}" if c else "")
        return "i" if isinstance(e, _Slot) else str(e)

    return ",".join(map(one, entries))


def take(a: Any, indices: Any, axis: int | None = None, **kwargs: Any) -> Any:
    """``jnp.take`` for values, along a batch axis.

    An index out of range fills each component as it fills an array of its dtype (NaN, the least integer, True), so that what
    is stood for is NaN where a float of the type, such as a scale, makes it so; ``mode="clip"`` or ``"wrap"`` fills nothing.

    Raises:
      TypeError: without an axis, or for a named axis.
    """
    if not _jax.is_hi_value(a):
        return jnp.take(a, indices, axis, **kwargs)
    value = unshare(pack_open(a))
    ty = _type("take", value)
    if axis is None:
        raise TypeError(f"typax.take of {ty} takes an axis: a value is not flattened")
    axis, indices = _batch_axis("take", ty, axis), jnp.asarray(indices)
    n, rank = len(batch_sizes(ty)) - 1 + indices.ndim, len(ty.leaves)
    masks = ((True,) * n,) * rank if ty.has_own_axes else ty.masks
    pick = lambda xs, arrays: take(xs[0], arrays[0], axis, **kwargs)
    key = ("take", axis, tuple(sorted(kwargs.items())))
    return on_each(key, [value], lambda _, xs, a: pick(xs, a), masks, pick, [indices], axis=axis)


# --- their axes ------------------------------------------------------------------------------------------------------


def expand_dims(a: Any, axis: int | Sequence[int]) -> Any:
    """``jnp.expand_dims`` for values: new batch axes of size 1."""
    if not _jax.is_hi_value(a):
        return jnp.expand_dims(a, axis)
    value = pack_open(a)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    ty = _type("expand_dims", value)
    for k in sorted(_batch_axis("expand_dims", ty, k, extra=len(axes)) for k in axes):
        value = broadcast_batch(value, 1, k)
    return value


def squeeze(a: Any, axis: int | Sequence[int] | None = None) -> Any:
    """``jnp.squeeze`` for values: batch axes of size 1 are taken away; ``axis=None`` means all of them."""
    if not _jax.is_hi_value(a):
        return jnp.squeeze(a, axis)
    ty = _type("squeeze", a)
    sizes = batch_sizes(ty)
    if axis is None:
        axis = [k for k, n in enumerate(sizes) if n == 1]
    axes = {_batch_axis("squeeze", ty, k) for k in ((axis,) if isinstance(axis, int) else axis)}
    if wrong := [k for k in axes if sizes[k] != 1]:
        raise ValueError(f"typax.squeeze: axis {wrong[0]} of {ty} has size {sizes[wrong[0]]}")
    return index(a, tuple(0 if k in axes else slice(None) for k in range(len(sizes))))


def moveaxis(a: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Any:
    """``jnp.moveaxis`` for values: batch axes in another order."""
    if not _jax.is_hi_value(a):
        return jnp.moveaxis(a, source, destination)
    ty = _type("moveaxis", a)
    src, dst = (
        [_batch_axis("moveaxis", ty, k) for k in ((ks,) if isinstance(ks, int) else ks)] for ks in (source, destination)
    )
    if len(src) != len(dst):
        raise ValueError(f"typax.moveaxis: {len(src)} axes go to {len(dst)} places")
    order = [k for k in range(ty.ndim) if k not in src]
    for d, s in sorted(zip(dst, src, strict=True)):
        order.insert(d, s)
    return permute_batch(pack_open(a), order)


def split_axis(value: Any, rows: int) -> Any:
    """The leading axis, of size n, as two: of size ``rows`` and n / rows."""
    return _reshaped(value, ("split_axis", rows), lambda x: jnp.reshape(x, (rows, x.shape[0] // rows, *x.shape[1:])), 1)


def merge_axes(value: Any) -> Any:
    """The two leading axes as one."""
    return _reshaped(value, ("merge_axes",), lambda x: jnp.reshape(x, (-1, *x.shape[2:])), -1)


def _reshaped(value: Any, kind: Any, fn: Callable[[Any], Any], grown: int) -> Any:
    if not _jax.is_hi_value(value):
        return fn(value)
    value = unshare(pack_open(value))
    ty = _type(kind[0], value)
    masks = ((True,) * (ty.n_batch + grown),) * len(ty.leaves) if ty.has_own_axes else ty.masks
    one = lambda xs, _: _reshaped(xs[0], kind, fn, grown)
    return on_each(kind, [value], lambda _, xs, a: one(xs, a), masks, one)
