"""Values in another shape: their axes permuted, added, taken away, merged and split, as those of arrays are.

    transpose(q8[12,10])          q8t[10,12]            reshape(q4g4t[12,10], (3, 4, 10))   q4t[3,4,10]
    expand_dims(q8[12,10], -1)    q8<axis=(-2)>[...]    squeeze(q8[1,12,10])                q8[12,10]

Of batch axes every value knows; of named ones a type has ops of the primitives, or not (`_natively`).
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from typax import _interpret, _jax
from typax._indexing import _type as _type_of
from typax._indexing import along_named, any_axis, batch_sizes, index, on_each
from typax._moves import broadcast_batch, permute_batch, unshare
from typax._structural import pack_open


def expand_dims(a: Any, axis: int | Sequence[int]) -> Any:
    """``jnp.expand_dims`` for values: new axes of size 1."""
    if not _jax.is_hi_value(a):
        return jnp.expand_dims(a, axis)
    value = pack_open(a)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    ty = _type_of("expand_dims", value)
    places = sorted(any_axis("expand_dims", ty, k, extra=len(axes))[0] for k in axes)
    for k in places:
        ty = _jax.typeof(value)
        if k > len(batch_sizes(ty)):
            value = along_named("typax.expand_dims", k, lambda x, k=k: jnp.expand_dims(x, k), value)
        else:
            value = broadcast_batch(value, 1, k)
    return value


def squeeze(a: Any, axis: int | Sequence[int] | None = None) -> Any:
    """``jnp.squeeze`` for values: axes of size 1 are taken away; ``axis=None`` means all of them that are batch axes."""
    if not _jax.is_hi_value(a):
        return jnp.squeeze(a, axis)
    ty = _type_of("squeeze", a)
    sizes = batch_sizes(ty)
    if axis is None:
        axis = [k for k, n in enumerate(sizes) if n == 1]
    axes = {any_axis("squeeze", ty, k)[0] for k in ((axis,) if isinstance(axis, int) else axis)}
    if wrong := [k for k in axes if ty.shape[k] != 1]:
        raise ValueError(f"typax.squeeze: axis {wrong[0]} of {ty} has size {ty.shape[wrong[0]]}")
    if all(k < len(sizes) for k in axes):
        return index(a, tuple(0 if k in axes else slice(None) for k in range(len(sizes))))
    own = tuple(sorted(axes))
    return along_named("typax.squeeze", own, lambda x: jnp.squeeze(x, own), a)


def moveaxis(a: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Any:
    """``jnp.moveaxis`` for values: axes in another order, as `transpose` takes them."""
    if not _jax.is_hi_value(a):
        return jnp.moveaxis(a, source, destination)
    ty = _type_of("moveaxis", a)
    src, dst = (
        [any_axis("moveaxis", ty, k)[0] for k in ((ks,) if isinstance(ks, int) else ks)] for ks in (source, destination)
    )
    if len(src) != len(dst):
        raise ValueError(f"typax.moveaxis: {len(src)} axes go to {len(dst)} places")
    order = [k for k in range(ty.ndim) if k not in src]
    for d, s in sorted(zip(dst, src, strict=True)):
        order.insert(d, s)
    return transpose(a, order)


def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """``jnp.swapaxes`` for values: axes in another order, as `transpose` takes them."""
    if not _jax.is_hi_value(a):
        return jnp.swapaxes(a, axis1, axis2)
    ty = _type_of("swapaxes", a)
    i, j = (any_axis("swapaxes", ty, k)[0] for k in (axis1, axis2))
    order = list(range(ty.ndim))
    order[i], order[j] = j, i
    return transpose(a, order)


def transpose(a: Any, axes: Sequence[int] | None = None) -> Any:
    """``jnp.transpose`` for values: batch axes in any order, and others if the type has an op of ``lax.transpose``.

    Raises:
      TypeError: for named axes, if the type has no op that moves them so.
      ValueError: if ``axes`` is no permutation.
    """
    if not _jax.is_hi_value(a):
        return jnp.transpose(a, axes)
    ty = _type_of("transpose", a)
    perm = tuple(reversed(range(ty.ndim))) if axes is None else tuple(any_axis("transpose", ty, k)[0] for k in axes)
    if sorted(perm) != list(range(ty.ndim)):
        raise ValueError(f"typax.transpose: {list(axes or ())} is no permutation of the axes of {ty}")
    n = ty.n_batch if ty.has_own_axes else ty.ndim
    if perm[n:] == tuple(range(n, ty.ndim)):
        return permute_batch(pack_open(a), perm)
    try:
        return _interpret.run(_jax.transpose_p, [pack_open(a)], permutation=perm)
    except TypeError as e:
        raise TypeError(f"{ty} cannot be permuted by {perm}: only its batch axes (the first {n}) can, and {e}") from None


def reshape(a: Any, shape: int | Sequence[int]) -> Any:
    """``jnp.reshape`` for values, in row-major order: batch axes merged and split, others if the type has an op for it.

    Raises:
      TypeError: if the sizes do not fit, or for named axes if the type has no op that merges and splits them so.
    """
    if not _jax.is_hi_value(a):
        return jnp.reshape(a, shape)
    ty = _type_of("reshape", a)
    own = tuple(ty.shape)
    new = tuple(map(operator.index, (shape,) if isinstance(shape, int | np.integer) else shape))
    rest = math.prod(k for k in new if k != -1)
    if new.count(-1) == 1 and rest and math.prod(own) % rest == 0:
        new = tuple(math.prod(own) // rest if k == -1 else k for k in new)
    if any(k < 0 for k in new) or math.prod(new) != math.prod(own):
        raise TypeError(f"typax.reshape: {ty} has {math.prod(own)} entries, which do not make the shape {list(new)}")
    if new == own:
        return a
    named = ty.ndim - len(batch_sizes(ty))
    if ty.has_own_axes and len(new) >= named and new[len(new) - named :] == own[ty.ndim - named :] and math.prod(own):
        batch, n = new[: len(new) - named], ty.ndim - named
        return _reshaped(a, ("reshape", batch), lambda x: jnp.reshape(x, (*batch, *x.shape[n:])), len(batch) - n)
    return along_named("typax.reshape", new, lambda x: jnp.reshape(x, new), a)


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
    ty = _type_of(kind[0], value)
    masks = ((True,) * (ty.n_batch + grown),) * len(ty.leaves) if ty.has_own_axes else ty.masks
    one = lambda xs, _: _reshaped(xs[0], kind, fn, grown)
    return on_each(kind, [value], lambda _, xs, a: one(xs, a), masks, one)
