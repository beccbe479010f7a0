"""Primitives along the batch axes of any value, component by component, where its type has no op for them.

w[2]  w[i]        slice or dynamic_slice, then squeeze        of a stack w[5,8,8]: of each component
w[ids]  a, b = w  gather, unstack, split
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from typax import _interpret, _jax
from typax._indexing import batch_sizes, dynamic_slice, index, split, take
from typax._type import ValueType


class _OnStack:
    """What a function makes of a value with batch axes, of its type and the other operands."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
        v, *rest = operands
        ty = _jax.typeof(v)
        if not isinstance(ty, ValueType) or not ty.batch or any(_jax.is_hi(_jax.typeof(x)) for x in rest):
            return NotImplemented
        return self.fn(v, len(batch_sizes(ty)), *rest, **params)


def _on(primitive: Any) -> Callable[[Callable[..., Any]], None]:
    def add(fn: Callable[..., Any]) -> None:
        _interpret.by_components[primitive] = _OnStack(fn)

    return add


def _whole(v: Any, n: int, sizes: Sequence[int]) -> bool:
    """Whether these are the sizes of the axes behind the ``n`` batch axes."""
    return tuple(sizes[n:]) == tuple(v.shape[n:])


@_on(lax.slice_p)
def _(v: Any, n: int, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * v.ndim
    if any(start_indices[n:]) or not _whole(v, n, limit_indices) or any(s != 1 for s in steps[n:]):
        return NotImplemented
    return index(v, tuple(map(slice, start_indices[:n], limit_indices[:n], steps[:n])))


@_on(lax.squeeze_p)
def _(v: Any, n: int, *, dimensions: Any) -> Any:
    if any(a >= n for a in dimensions):
        return NotImplemented
    return index(v, tuple(0 if a in dimensions else slice(None) for a in range(n)))


@_on(lax.dynamic_slice_p)
def _(v: Any, n: int, *starts: Any, slice_sizes: Any) -> Any:
    return dynamic_slice(v, starts, slice_sizes) if _whole(v, n, slice_sizes) else NotImplemented


@_on(lax.unstack_p)
def _(v: Any, n: int, *, axis: Any) -> Any:
    if axis >= n:
        return NotImplemented
    return [index(v, (*(slice(None),) * axis, i)) for i in range(v.shape[axis])]


@_on(lax.split_p)
def _(v: Any, n: int, *, sizes: Any, axis: Any) -> Any:
    if axis >= n:
        return NotImplemented
    return split(v, list(itertools.accumulate(sizes))[:-1], axis)


@_on(lax.gather_p)
def _(v: Any, n: int, at: Any, *, dimension_numbers: Any, slice_sizes: Any, mode: Any, **_: Any) -> Any:
    d = dimension_numbers
    if len(d.start_index_map) != 1 or d.collapsed_slice_dims != d.start_index_map or d.operand_batching_dims:
        return NotImplemented
    (axis,), k = d.start_index_map, at.ndim - 1
    offsets = (*range(axis), *range(axis + k, v.ndim - 1 + k))
    sizes = (*v.shape[:axis], 1, *v.shape[axis + 1 :])
    if axis >= n or tuple(slice_sizes) != sizes or tuple(d.offset_dims) != offsets:
        return NotImplemented
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        return _interpret.Declined("entries out of range are filled, and no components stand for what fills them")
    return take(v, jnp.squeeze(at, -1), axis, mode="clip")
