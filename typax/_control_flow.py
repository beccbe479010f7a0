"""Loops, branches and maps over values: JAX's own, told what it cannot read off a hi type.

    scan          the number of steps is read off hi inputs too
    map           the same, and batches of steps
    cond, switch, while_loop, fori_loop     values that an op's body holds open are packed; under ``jax.disable_jit`` too
    associative_scan                        the log-depth recursion of Blelloch, on stacks of values

Everything else is JAX's: on arrays these are its functions, and derivatives, batching and effects are its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from typax import _jax
from typax._byhand import axes_type, has_axes, is_raw, own_spec, undeclared
from typax._indexing import batch_sizes, concatenate, index, stack, take
from typax._shapes import merge_axes, split_axis
from typax._structural import pack_open
from typax._type import ValueType


def _packed(tree: Any) -> Any:
    return jax.tree.map(pack_open, tree)


def _hi_leaves(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if _jax.is_hi_value(x)]


# --- vmap ------------------------------------------------------------------------------------------------------------


def vmap(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> Callable[..., Any]:
    """``jax.vmap``, whose signature it has, also for values of types written by hand.

    Such a value is mapped along its leading axis by ``0``, and the size of that axis is read off its type.
    """

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _packed((args, kwargs))
        axes, size = in_axes, axis_size
        if any(is_raw(_jax.typeof(x)) for x in _hi_leaves((args, kwargs))):
            given = tuple(in_axes) if isinstance(in_axes, list) else in_axes
            full = jax.tree.broadcast(given, args, is_leaf=lambda a: a is None)
            # a leaf that is not mapped has None, which is no leaf of a pytree
            flat = jax.tree.leaves(full, is_leaf=lambda a: a is None)
            leaves, tree = jax.tree.flatten(args)
            own = [a if a is None else own_spec(_jax.typeof(x), a) for x, a in zip(leaves, flat, strict=True)]
            axes = tree.unflatten(own)
            raw = [_jax.typeof(x) for x, a in zip(leaves, flat, strict=True) if a is not None]
            size = size or next((n for t in raw if is_raw(t) and (n := _raw_size(t)) is not None), None)
        run = jax.vmap(fun, axes, out_axes, axis_name=axis_name, axis_size=size, spmd_axis_name=spmd_axis_name)
        return run(*args, **kwargs)

    return mapped


def _raw_size(ty: Any) -> int | None:
    """The size of the leading axis of a type written by hand."""
    shape = axes_type(ty).shape if has_axes(ty) else next((a.shape for a in ty.lo_ty()), ())
    return int(shape[0]) if shape else None


# --- loops -------------------------------------------------------------------------------------------------------------


def _leading_size(x: Any) -> int:
    """The size of the leading axis of a hi value."""
    ty = _jax.typeof(x)
    size = _raw_size(ty) if is_raw(ty) else next(iter(batch_sizes(ty)), None)
    if size is None:
        raise TypeError(f"a loop over {ty}: it has no batch axis to be sliced along; stack values with typax.stack")
    return size


def _length(xs: Any, length: Any) -> Any:
    """The number of steps: as given, or of the leading axis of hi inputs."""
    sizes = {_leading_size(x): x for x in _hi_leaves(xs)}
    given = {x.shape[0]: x for x in jax.tree.leaves(xs) if not _jax.is_hi_value(x) and getattr(x, "ndim", 0)}
    if length is not None:
        sizes.setdefault(int(length), None)
    have = {**given, **sizes}
    if len(have) > 1:
        tell = ", ".join(f"{_jax.typeof(x)} has {n} steps" if x is not None else f"length is {n}" for n, x in have.items())
        raise ValueError(f"a loop takes inputs of one length: {tell}")
    for x in _hi_leaves(xs):
        ty = _jax.typeof(x)
        if isinstance(ty, ValueType) and ty.has_own_axes and ty.batch and ty.batch[0].part is not None:
            raise ValueError(
                f"a loop over {ty}: its leading axis is partitioned by {ty.batch[0].part!r}; make it whole with "
                "typax.reshard, or map over it with jax.vmap"
            )
    return next(iter(sizes), length)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: Any = 1,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """``lax.scan``, whose signature it has, over arrays and values.

    Raises:
      ValueError: if inputs differ in length, or a leading axis is partitioned.
      TypeError: if the carry changes its type, or a component of an input is shared along the leading axis.
    """
    init, xs = _packed((init, xs))
    length = _length(xs, length)
    if jax.config.jax_disable_jit and _hi_leaves((init, xs)):
        return _step_by_step(f, init, xs, length, reverse)
    return lax.scan(f, init, xs, length, reverse, unroll, **kwargs)


def _step_by_step(f: Any, carry: Any, xs: Any, length: int | None, reverse: bool) -> tuple[Any, Any]:
    n: int = jax.tree.leaves(xs)[0].shape[0] if length is None else length
    ys = []
    for i in reversed(range(n)) if reverse else range(n):
        carry, y = f(carry, jax.tree.map(functools.partial(_at, i), xs))
        ys.append(y)
    if not ys:
        raise ValueError("typax.scan under jax.disable_jit takes at least one step: the types of its results are not known")
    return carry, jax.tree.map(lambda *y: stack(y), *(reversed(ys) if reverse else ys))


def _at(i: int, x: Any) -> Any:
    return take(x, i, axis=0) if _jax.is_hi_value(x) else x[i]


def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """``lax.map``, whose signature it has: ``f`` of each entry along the leading axis, ``batch_size`` at a time.

    Raises:
      ValueError: as `scan` does.
    """
    xs = _packed(xs)
    if batch_size is None:
        return scan(lambda _, x: ((), f(x)), (), xs)[1] if _hi_leaves(xs) else lax.map(f, xs)
    if not _hi_leaves(xs) and not any(_jax.is_hi(t) for t in jax.jit(vmap(f)).trace(xs).jaxpr.out_avals):
        return lax.map(f, xs, batch_size=batch_size)
    n = _length(xs, None) or jax.tree.leaves(xs)[0].shape[0]  # for arrays alone scan would find it
    rounds = n // batch_size
    cut = rounds * batch_size
    parts = []
    if rounds:
        of_leaf = lambda x: split_axis(_between(x, 0, cut), rounds)
        _, ys = scan(lambda _, x: ((), vmap(f)(x)), (), jax.tree.map(of_leaf, xs))
        parts.append(jax.tree.map(merge_axes, ys))
    if cut < n:
        parts.append(vmap(f)(jax.tree.map(lambda x: _between(x, cut, n), xs)))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *ys: concatenate(ys), *parts)


def _between(x: Any, start: int, stop: int, step: int = 1) -> Any:
    if not _jax.is_hi_value(x):
        return x[start:stop:step]
    return index(x, slice(start, stop, step))


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """``lax.while_loop``, whose signature it has, with arrays and values in its carry."""
    init_val = _packed(init_val)
    if jax.config.jax_disable_jit and _hi_leaves(init_val):
        while cond_fun(init_val):
            init_val = body_fun(init_val)
        return init_val
    return lax.while_loop(cond_fun, body_fun, init_val)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any, **kwargs: Any) -> Any:
    """``lax.fori_loop``, whose signature it has, with arrays and values in its carry."""
    return lax.fori_loop(lower, upper, body_fun, _packed(init_val), **kwargs)


# --- branches ------------------------------------------------------------------------------------------------------------


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any, **kwargs: Any) -> Any:
    """``lax.cond``, whose signature it has, on arrays and values.

    Where ``jax.vmap`` maps the predicate, both branches run, and each result is chosen by its components.
    """
    return lax.cond(pred, true_fun, false_fun, *_packed(operands), **_packed(kwargs))


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, **kwargs: Any) -> Any:
    """``lax.switch``, whose signature it has, on arrays and values; see `cond`."""
    return lax.switch(index, branches, *_packed(operands), **_packed(kwargs))


# --- associative scan --------------------------------------------------------------------------------------------------


def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """``lax.associative_scan``, whose signature it has, over stacks of values.

    ``fn`` is applied to stacks, as for arrays; wrap a function of single values in ``jax.vmap``.

    Raises:
      TypeError: if ``axis`` is a named axis of a value.
      ValueError: if the stacks differ in length.
    """
    if not _hi_leaves(elems):
        return lax.associative_scan(fn, elems, reverse, axis)
    elems = _packed(elems)
    leaves, tree = jax.tree.flatten(elems)
    if raw := [x for x in leaves if is_raw(_jax.typeof(x))]:
        raise undeclared("associative_scan", _jax.typeof(raw[0]), "scan its arrays")
    sizes = {_jax.typeof(x).shape[axis] for x in leaves}
    if len(sizes) != 1:
        tys = ", ".join(str(_jax.typeof(x)) for x in leaves)
        raise ValueError(f"typax.associative_scan takes stacks of one length, got {tys}")
    (n,) = sizes

    def cut(xs: Sequence[Any], start: int, stop: int | None, step: int = 1) -> list[Any]:
        def one(x: Any) -> Any:
            k = axis % _jax.typeof(x).ndim
            return index(x, (*[slice(None)] * k, slice(start, stop, step)))

        return [one(x) for x in xs]

    def reorder(xs: Sequence[Any], order: Sequence[int]) -> list[Any]:
        return [take(x, jnp.array(order), axis) for x in xs]

    def combine(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        out = fn(tree.unflatten(a), tree.unflatten(b))
        if jax.tree.structure(out) != tree:
            raise TypeError(f"typax.associative_scan: fn gives {jax.tree.structure(out)} where it takes {tree}")
        return jax.tree.leaves(out)

    def joined(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return [concatenate([x, y], axis) for x, y in zip(a, b, strict=True)]

    def prefixes(xs: list[Any], n: int) -> list[Any]:
        if n < 2:
            return xs
        pairs = n // 2
        # prefixes that end at odd places, then those at even ones, from the odd ones before
        odd = prefixes(combine(cut(xs, 0, 2 * pairs, 2), cut(xs, 1, None, 2)), pairs)
        first, rest = cut(xs, 0, 1), cut(xs, 2, None, 2)
        evens = n - pairs
        even = joined(first, combine(cut(odd, 0, evens - 1), rest)) if evens > 1 else first
        order = [i // 2 if i % 2 == 0 else evens + i // 2 for i in range(n)]
        return reorder(joined(even, odd), order)

    if n == 0:
        return elems
    backwards = range(n - 1, -1, -1)
    out = prefixes(reorder(leaves, backwards) if reverse else leaves, n)
    return tree.unflatten(reorder(out, backwards) if reverse else out)
