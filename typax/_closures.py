"""What a function holds: its hi values are taken out, so that they are arguments, and put back.

    lambda x: x @ params["w"]        what it closes over
    model, model.encode              a pytree that is called, as a module of Equinox or Flax, and what a method is bound to
    functools.partial(f, params)     arguments that are given
    def f(x, w=w): ...               defaults

A global, and what an object holds that is no pytree, are not seen.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from typax import _jax


class Held(NamedTuple):
    """Pytrees with hi values, by the names that the function has for them, and the function with others in their place."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def held(f: Any, name: str = "", seen: frozenset[int] = frozenset()) -> Held | None:
    """What ``f``, or anything, holds; ``None`` if there is no hi value in it."""
    if id(f) in seen:  # it refers to itself
        return None
    seen |= {id(f)}
    if isinstance(f, types.FunctionType):
        return _of_function(f, seen)
    if isinstance(f, types.MethodType):
        own = held(f.__self__, name, seen)
        return own and own._replace(rebuild=lambda xs: types.MethodType(f.__func__, own.rebuild(xs)))
    if isinstance(f, functools.partial):
        parts = {"func": f.func, "args": f.args, **{f"={k}": v for k, v in f.keywords.items()}}
        found = {k: held(v, k.removeprefix("="), seen) for k, v in parts.items()}

        def again(new: dict[str, Any]) -> Any:
            func, args, *named = (new.get(k, v) for k, v in parts.items())
            return functools.partial(func, *args, **dict(zip(f.keywords, named, strict=True)))

        return _together(found, again)
    try:
        leaves, tree = jax.tree.flatten(f)
    except (TypeError, ValueError):  # a dict whose keys have no order is no pytree
        return None
    if any(map(_jax.is_hi_value, leaves)):
        return Held((name,), (f,), lambda xs: xs[0])
    if len(leaves) == 1 and leaves[0] is f:
        return None
    inside = {i: held(x, name, seen) for i, x in enumerate(leaves) if callable(x)}
    return _together(inside, lambda new: tree.unflatten([new.get(i, x) for i, x in enumerate(leaves)]))


def _of_function(f: types.FunctionType, seen: frozenset[int]) -> Held | None:
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    defaults = dict(zip(names[len(names) - len(f.__defaults__ or ()) :], f.__defaults__ or (), strict=True))
    keywords = f.__kwdefaults__ or {}
    found = {("cell", k): held(c.cell_contents, k, seen) for k, c in cells.items() if _is_filled(c)}
    found |= {("default", k): held(v, k, seen) for k, v in defaults.items()}
    found |= {("keyword", k): held(v, k, seen) for k, v in keywords.items()}

    def again(new: dict[Any, Any]) -> Any:
        closure = tuple(types.CellType(new["cell", k]) if ("cell", k) in new else c for k, c in cells.items())
        given = tuple(new.get(("default", k), v) for k, v in defaults.items())
        g = types.FunctionType(f.__code__, f.__globals__, f.__name__, given or None, closure)
        g.__kwdefaults__ = {k: new.get(("keyword", k), v) for k, v in keywords.items()} or None
        g.__qualname__, g.__module__ = f.__qualname__, f.__module__
        return g

    return _together(found, again)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _together(found: dict[Any, Held | None], again: Callable[[dict[Any, Any]], Any]) -> Held | None:
    parts = {k: h for k, h in found.items() if h is not None}
    if not parts:
        return None

    def rebuild(xs: Sequence[Any]) -> Any:
        it = iter(xs)
        return again({k: h.rebuild([next(it) for _ in h.values]) for k, h in parts.items()})

    return Held(
        tuple(n for h in parts.values() for n in h.names), tuple(v for h in parts.values() for v in h.values), rebuild
    )
