"""Rows of codes: which values of an array share a scale, and how they lie in memory.

An axis of size n is kept (group 1), shared as a whole (group 0), or cut into groups of g (the last one padded).  Whatever
shares a scale comes last, so that codes are rows with one scale each:

    x [k, n]      groups      codes               scale
    by rows       (1, 0)      [k, n]              [k]
    by columns    (0, 1)      [n, k]              [n]
    128 rows      (128, 1)    [k/128, n, 128]     [k/128, n]
    tiles         (2, 4)      [k/2, n/4, 2, 4]    [k/2, n/4]
    as a whole    (0, 0)      [k, n]              []
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Groups = tuple[int, ...]


def groups_of(ndim: int, axis: Any, group: Any, where: str) -> Groups:
    """The group of each axis, from the axes along which values share a scale and what these are cut into.

    Raises:
      ValueError: for an axis that is not there or given twice, or a group that is no number from 1 on.
    """
    many = isinstance(axis, tuple | list)
    axes = tuple(range(ndim)) if axis is None else tuple(axis) if many else (axis,)
    if not all(map(_whole, axes)):
        raise ValueError(f"{where}: axis={axis!r} is neither the number of an axis, nor a tuple of them, nor None")
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes if ndim}) != len(axes):
        raise ValueError(f"{where}: axis={axis} does not name distinct axes of an array of rank {ndim}")
    sizes = tuple(group) if isinstance(group, tuple | list) else (group,) * len(axes)
    if len(sizes) != len(axes):
        raise ValueError(f"{where}: group={group} has {len(sizes)} entries, but axis={axis} names {len(axes)} axes")
    if not all(g is None or _whole(g) for g in sizes):
        raise ValueError(f"{where}: group={group!r} is neither a whole number, nor a tuple of them, nor None")
    if any(g is not None and g < 1 for g in sizes):
        raise ValueError(f"{where}: group={group}, but a group has at least one value")
    out = [1] * ndim
    for a, g in zip(axes, sizes, strict=True):
        out[a % ndim] = 0 if g is None else int(g)
    return tuple(out)


def _whole(n: Any) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool)


def outer_axes(groups: Groups) -> list[int]:
    """The axes that have scales of their own."""
    return [a for a, g in enumerate(groups) if g != 0]


def inner_axes(groups: Groups) -> list[int]:
    """The axes along which values share a scale."""
    return [a for a, g in enumerate(groups) if g != 1]


def pads(shape: Sequence[int], groups: Groups) -> tuple[int, ...]:
    """How many values the last group of each axis lacks."""
    return tuple(-n % g if g > 1 else 0 for n, g in zip(shape, groups, strict=True))


def split(x: Any, groups: Groups, where: str) -> Any:
    """The rows of an array: the axes that have scales, then those that share one; padded by zeros."""
    return jnp.transpose(*cut(x, groups, where))


def cut(x: Any, groups: Groups, where: str) -> tuple[Any, list[int]]:
    """The same with all axes where they are, and the order that makes them rows.

    Raises:
      TypeError: if a sharded axis is cut into groups that do not divide its shards.
    """
    parts = tuple(jax.typeof(x).sharding.spec)
    for a, (n, g, part) in enumerate(zip(x.shape, groups, parts, strict=True)):
        if part is not None and g > 1:
            whole_groups(jax.typeof(x), a, n, g, part, jax.typeof(x).sharding.mesh, where)
    missing = pads(x.shape, groups)
    if any(missing):
        x = jnp.pad(x, [(0, p) for p in missing])
    shape, places, new = [], [], []
    for n, g, part in zip(x.shape, groups, parts, strict=True):
        places.append(len(shape))
        shape += [n // g, g] if g > 1 else [n]
        new += [part, None] if g > 1 else [part]
    if len(shape) > x.ndim:
        sharded = any(p is not None for p in parts)
        x = reshape(x, tuple(shape), jax.P(*new) if sharded else None)
    return x, [places[a] for a in outer_axes(groups)] + [places[a] + (groups[a] > 1) for a in inner_axes(groups)]


def turned(codes: Any, order: Sequence[int]) -> Any:
    """Bytes in another order of axes. Two at a time, as XLA:CPU makes a copy more of what it has to turn."""
    last = order[-1]
    size = codes.shape[last]
    if sharded(codes) or not isinstance(size, int) or size % 2:
        return jnp.transpose(codes, order)
    pairs = codes.reshape(*codes.shape[:last], size // 2, 2, *codes.shape[last + 1 :])
    places = [a + (a > last) for a in order]
    words = jax.lax.bitcast_convert_type(jnp.transpose(pairs, (*places, last + 1)), jnp.int16)
    return jax.lax.bitcast_convert_type(words, codes.dtype).reshape([codes.shape[a] for a in order])


def reshape(x: Any, shape: tuple[int, ...], spec: Any) -> Any:
    """Reshaped, and partitioned by ``spec`` if there is one."""
    return jax.lax.reshape(x, shape) if spec is None else jax.lax.reshape(x, shape, out_sharding=spec)


def sharded(*arrays: Any) -> bool:
    """Whether an axis of one of them is partitioned."""
    return any(part is not None for a in arrays for part in jax.typeof(a).sharding.spec)


def divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` that is at most ``most``, or 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def whole_groups(what: Any, a: int, n: int, g: int, part: Any, mesh: Any, where: str) -> None:
    """Raise a TypeError if shards of axis ``a``, partitioned by ``part``, are no whole number of groups."""
    shards = 1
    for name in part if isinstance(part, tuple) else (part,):
        shards *= mesh.shape[name]
    if shards > 1 and n % (shards * g):
        size = f"{n // shards}" if n % shards == 0 else f"{n}/{shards}"
        raise TypeError(
            f"{where}: axis {a} of {what} has {shards} shards of {size}, which groups of {g} do not "
            f"divide; use a group that divides {size}, or fewer shards"
        )


def merge(rows: Any, groups: Groups, missing: Sequence[int]) -> Any:
    """The array of which these are the rows: the way back from `split`."""
    outer, inner = outer_axes(groups), inner_axes(groups)
    order, shape, new, parts = [], [], [], tuple(jax.typeof(rows).sharding.spec)
    for a, g in enumerate(groups):
        at = ([outer.index(a)] if g != 0 else []) + ([len(outer) + inner.index(a)] if g != 1 else [])
        order += at
        size = 1
        for i in at:
            size *= rows.shape[i]
        shape.append(size)
        new.append(parts[at[0]])
    x = jnp.transpose(rows, order)
    if len(order) > len(shape):
        x = reshape(x, tuple(shape), jax.P(*new) if any(p is not None for p in new) else None)
    if any(missing):
        x = x[tuple(slice(0, n - p) for n, p in zip(shape, missing, strict=True))]
    return x
