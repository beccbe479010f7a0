"""Stacks of values: joined, chosen from, indexed along their batch axes, as arrays are.

    stack([q8[2,3], q8[2,3]])        q8[2,2,3]         q8[4,2,3][1]            q8[2,3]
    concatenate([q8[2,3], q8[5,3]])  q8[7,3]           q8[4,2,3][::2, 0]       q8[2,3]
    where(mask[2,1], q8[2,3], ...)   q8[2,3]           take(q8[4,2,3], [3, 1])  q8[2,2,3]
    split(q8[4,3], 2)                q8[2,3] twice     q8t[4,6][:, 2:4]         q8t[4,2]

A batch axis leads in every component, so that each function acts on each component, and on the array that the value stands
for, in the same way: that is its reference, and its derivatives are the reference's.  A named axis (the row that shares a
scale) is part of what a value is: along it a type says itself what can be done, by ops of the primitives (`_natively`).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from typax import _jax, _repairs
from typax._byhand import undeclared
from typax._moves import unshare
from typax._natively import natively
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
        f"{what} along a named axis of {ty} would change what the value is ({able}), and the type has no op for it; do it "
        "to typax.dense(v)"
    )


def along_named(what: str, key: Any, f: Callable[..., Any], *operands: Any) -> Any:
    """``f``, a function of arrays, along named axes of the values among the operands: by their ops.

    Raises:
      TypeError: if there is no op, or none that can.
    """
    return natively(what, key, lambda *xs: [f(*xs)], *operands, no_op=lambda ty: _remedy(ty, what))[0]


def batch_sizes(ty: ValueType) -> tuple[int, ...]:
    """The sizes of the batch axes; of a record whose components have no axes of their own, those that all share."""
    return tuple(a.size for a in ty.batch) if ty.has_own_axes else ty.shape


def any_axis(name: str, ty: ValueType, axis: int, extra: int = 0) -> tuple[int, bool]:
    """``axis`` as a position, and whether it is that of a named axis."""
    axis, rank = operator.index(axis), ty.ndim + extra
    if not -rank <= axis < rank:
        raise ValueError(f"typax.{name}: axis {axis} is out of bounds for {ty}" + (" and a new axis" if extra else ""))
    return axis % rank, axis % rank >= len(batch_sizes(ty)) + extra


def batch_axis(name: str, ty: ValueType, axis: int, extra: int = 0) -> int:
    """``axis`` as the position of a batch axis."""
    axis, named = any_axis(name, ty, axis, extra)
    if named:
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
    """``jnp.stack`` for values: of one type, joined along a new axis.

    Raises:
      TypeError: if the values are of several types, or if the new axis comes after a named one and their type has no op
        that joins them there.
    """
    if _jax.is_hi_value(arrays):
        arrays = [arrays[i] for i in range(len(arrays))]
    if not _has_values(arrays):
        return jnp.stack(arrays, axis, **kwargs)
    values = _alike("stack", arrays)
    ty = _jax.typeof(values[0])
    axis, named = any_axis("stack", ty, axis, extra=1)
    if named:
        return along_named("typax.stack", axis, lambda *xs: jnp.stack(xs, axis), *values)
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
    """``jnp.concatenate`` for values: joined along an axis.

    Raises:
      TypeError: if the values differ in more than the size of this axis, or if it is a named axis and their type has no op
        that joins them there.
    """
    if _jax.is_hi_value(arrays):
        arrays = [arrays[i] for i in range(len(arrays))]
    if not _has_values(arrays):
        return jnp.concatenate(arrays, axis, **kwargs)
    declared = next((t for t in map(_jax.typeof, arrays) if isinstance(t, ValueType)), None)
    if declared is None:
        _type("concatenate", next(x for x in arrays if _jax.is_hi_value(x)))
    assert declared is not None
    axis, named = any_axis("concatenate", declared, axis)
    if named:
        if not all(isinstance(_jax.typeof(x), ValueType) for x in arrays):
            _alike("concatenate", arrays)
        return along_named("typax.concatenate", axis, lambda *xs: jnp.concatenate(xs, axis), *arrays)
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


def _parse(ty: ValueType, index: Any) -> tuple[list[Any], list[Any], bool]:
    """An index, one entry for each axis of the value and each new one; the arrays in it; whether it reads named axes."""
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
    out, arrays, axis, n, named = [], [], 0, len(batch_sizes(ty)), False
    for e in entries:
        if e is None:
            named |= axis > n
            out.append(None)
            continue
        named |= axis >= n and not (isinstance(e, slice) and e == slice(None))
        if isinstance(e, slice):
            if any(isinstance(s, _jax.Tracer) for s in (e.start, e.stop, e.step)):
                raise TypeError(
                    f"a slice of {ty} has static bounds; for a moving window use typax.take(v, start + jnp.arange(n), axis)"
                )
            out.append(e)
        elif isinstance(e, int) or (isinstance(e, np.integer) and not isinstance(e, _jax.Tracer)):
            size = ty.shape[axis]
            if not -size <= e < size:
                raise IndexError(f"index {e} is out of bounds for axis {axis} of {ty}, of size {size}")
            out.append(int(e) % size)
        elif hasattr(e, "dtype") and jnp.issubdtype(e.dtype, jnp.integer):
            out.append(_Slot(len(arrays)))
            arrays.append(jnp.asarray(e))
        else:
            raise TypeError(f"{ty} is indexed by integers, slices, integer arrays, None and ..., not by {e!r}")
        axis += 1
    if not named:  # none of the batch axes has an entry behind them
        out = out[: len(out) - (ty.ndim - n)]
    return out, arrays, named


def index(value: Any, at: Any) -> Any:
    """``value[at]``: by integers (traced ones too), slices, integer arrays, ``None`` and ``...``.

    Raises:
      TypeError: for an index into a named axis, if the type has no op that reads so; or by a mask that is not known when
        the program is traced.
      IndexError: for too many indices, or a Python integer that is out of bounds; a traced one is clamped, as for arrays.
    """
    value = pack_open(value)
    ty = _type("index", value)
    if ty is None:
        return value[at]
    entries, arrays, named = _parse(ty, at)
    if not entries or all(isinstance(e, slice) and e == slice(None) for e in entries):
        return value
    key = tuple((e.start, e.stop, e.step) if isinstance(e, slice) else e for e in entries)

    def full(arrays: Sequence[Any]) -> list[Any]:
        return [arrays[e.number] if isinstance(e, _Slot) else e for e in entries]

    if named:
        if arrays and any(isinstance(e, slice) and e != slice(None) for e in entries):  # as one lookup they might not fit
            value = index(value, tuple(e if isinstance(e, slice) else slice(None) for e in entries if e is not None))
            entries = [slice(None) if isinstance(e, slice) else e for e in entries]
            return index(value, tuple(full(arrays)))
        read = lambda x, *arrays: x[tuple(full(arrays))]
        return along_named("indexing", key, read, value, *arrays)
    simple = all(isinstance(e, int | slice) or (isinstance(e, _Slot) and not arrays[e.number].ndim) for e in entries)
    if not simple:
        value = unshare(value)
        ty = _jax.typeof(value)
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
    """``jnp.take`` for values, along an axis.

    An index out of range fills each component as it fills an array of its dtype (NaN, the least integer, True), so that what
    is stood for is NaN where a float of the type, such as a scale, makes it so; ``mode="clip"`` or ``"wrap"`` fills nothing.
    Along a named axis it is read and filled by the type's op of ``lax.gather``.

    Raises:
      TypeError: without an axis, or for a named axis if the type has no op that reads so.
    """
    if not _jax.is_hi_value(a):
        return jnp.take(a, indices, axis, **kwargs)
    value = unshare(pack_open(a))
    ty = _type("take", value)
    if axis is None:
        raise TypeError(f"typax.take of {ty} takes an axis: a value is not flattened")
    (axis, named), indices = any_axis("take", ty, axis), jnp.asarray(indices)
    if named:
        key = (axis, tuple(sorted(kwargs.items())))
        return along_named("typax.take", key, lambda x, i: jnp.take(x, i, axis, **kwargs), value, indices)
    n, rank = len(batch_sizes(ty)) - 1 + indices.ndim, len(ty.leaves)
    masks = ((True,) * n,) * rank if ty.has_own_axes else ty.masks
    pick = lambda xs, arrays: take(xs[0], arrays[0], axis, **kwargs)
    key = ("take", axis, tuple(sorted(kwargs.items())))
    return on_each(key, [value], lambda _, xs, a: pick(xs, a), masks, pick, [indices], axis=axis)


def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> list[Any]:
    """``jnp.split`` for values: the list of the parts along an axis.

    Raises:
      TypeError: along a named axis, if the type has no op that cuts it there.
      ValueError: if an axis is not a multiple of the number of parts.
    """
    if not _jax.is_hi_value(ary):
        return jnp.split(ary, indices_or_sections, axis)
    ty = _type("split", ary)
    axis, _ = any_axis("split", ty, axis)
    n, given = ty.shape[axis], indices_or_sections
    if isinstance(given, int | np.integer):
        if given < 1 or n % given:
            raise ValueError(f"typax.split: axis {axis} of {ty} has size {n}, which is no multiple of {given}")
        ends = [n // int(given) * k for k in range(1, int(given))]
    else:
        ends = [int(k) for k in given]
    parts = zip([None, *ends], [*ends, None], strict=True)
    return [index(ary, (*(slice(None),) * axis, slice(*at))) for at in parts]


def dynamic_slice(operand: Any, start_indices: Sequence[Any], slice_sizes: Sequence[int]) -> Any:
    """``lax.dynamic_slice`` for values: a part of this size, which begins at numbers that may be traced, clamped.

    Along an axis in groups the beginning is to be known, as a Python number, unless the part is one entry or the whole axis.

    Raises:
      TypeError: if the type has no op that cuts its named axes there.
    """
    if not _jax.is_hi_value(operand):
        return jax.lax.dynamic_slice(operand, start_indices, slice_sizes)
    value = unshare(pack_open(operand))
    ty, sizes = _type("dynamic_slice", value), tuple(map(operator.index, slice_sizes))
    starts = list(start_indices)
    if len(starts) != ty.ndim or len(sizes) != ty.ndim or any(not 0 <= m <= n for m, n in zip(sizes, ty.shape, strict=True)):
        raise TypeError(
            f"typax.dynamic_slice: {len(starts)} beginnings and the sizes {list(sizes)} are no part of {ty}, of "
            f"shape {list(ty.shape)}"
        )
    for a, (start, m, n) in enumerate(zip(starts, sizes, ty.shape, strict=True)):
        if m == n:
            continue
        known = isinstance(start, int | np.integer) and not isinstance(start, _jax.Tracer)
        if known:
            at = min(max(int(start) + n * (start < 0), 0), n - m)
            value = index(value, (*(slice(None),) * a, slice(at, at + m)))
        elif a < len(batch_sizes(ty)):
            start = jnp.asarray(start)
            at = jnp.clip(jnp.where(start < 0, start + n, start), 0, n - m)
            value = take(value, at + jnp.arange(m, dtype=start.dtype), a, mode="clip")
        else:
            cut = lambda x, i, a=a, m=m: jax.lax.dynamic_slice_in_dim(x, i, m, a)
            value = along_named("typax.dynamic_slice", (a, m), cut, value, jnp.asarray(start))
    return value
