"""Equinox with values among the leaves of a module.

Equinox's filtered transformations ask ``eqx.is_array`` which leaves are traced, mapped or differentiated.  A value is none:
``eqx.filter_jit`` compiles anew for each, and ``eqx.filter_grad`` leaves its gradient out, without a word.  The functions of
this module are theirs, but ask `is_array` and `is_inexact_array` below, which know values.

    from typax.equinox import filter_jit, filter_value_and_grad, apply_updates, is_inexact_array

    eqx.partition(model, is_inexact_array), eqx.filter(model, is_inexact_array), eqx.combine, eqx.tree_at     as they are
"""

import functools
import json
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from typax import _describe, _jax
from typax._jit import jit
from typax._optimize import apply_updates
from typax._prim import has_tangent
from typax._shapes import moveaxis
from typax._type import ValueType
from typax.io import _save, _tree

try:
    import equinox as eqx
except ImportError as e:
    raise ImportError("typax.equinox needs Equinox: pip install 'typax[libraries]'") from e

__all__ = [
    "apply_updates",
    "filter_grad",
    "filter_jit",
    "filter_value_and_grad",
    "filter_vmap",
    "if_array",
    "is_array",
    "is_inexact_array",
    "tree_deserialise_leaves",
    "tree_serialise_leaves",
]


def is_array(x: Any) -> bool:
    """``eqx.is_array``, and true for values."""
    return eqx.is_array(x) or _jax.is_hi_value(x)


def is_inexact_array(x: Any) -> bool:
    """``eqx.is_inexact_array``, and true for values that have tangents."""
    return eqx.is_inexact_array(x) or (_jax.is_hi_value(x) and has_tangent(_jax.typeof(x)))


class _Static:
    """What is no array in a result: a node without leaves, equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_node(_Static, lambda x: ((), x), lambda x, _: x)

DONATE = {
    "none": ((), False),
    "all": ((1, 2), True),
    "all-except-first": ((1,), True),
    "warn": ((1, 2), False),
    "warn-except-first": ((1,), False),
}


def filter_jit(fun: Any = None, *, donate: str = "none") -> Callable[..., Any]:
    """``eqx.filter_jit``: arrays and values are traced, all else is static. A call costs what one of `typax.jit` does.

    Args:
      donate: ``"none"``, ``"all"``, ``"all-except-first"``, ``"warn"``, ``"warn-except-first"``, as there.

    Raises:
      ValueError: for another `donate`.
      TypeError: when it is called, if something static is not hashable.
    """
    if fun is None:
        return functools.partial(filter_jit, donate=donate)
    if donate not in DONATE:
        raise ValueError(f"typax.equinox.filter_jit: donate must be one of {', '.join(DONATE)}, not {donate!r}")
    donated, quiet = DONATE[donate]

    def run(static: Any, rest: list[Any], first: list[Any]) -> Any:
        (fun, args, kwargs) = _joined(rest + first, static)
        moving, still = eqx.partition(fun(*args, **kwargs), is_array)
        return moving, _Static(still)

    run.__name__ = run.__qualname__ = getattr(fun, "__name__", type(fun).__name__)
    jitted = jit(run, static_argnums=0, donate_argnums=donated)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        rest, of_rest = _split((fun, args[1:], kwargs))
        first, of_first = _split(args[:1])
        with warnings.catch_warnings():
            if quiet:
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            moving, still = jitted((len(rest), of_rest, of_first), rest, first)
        return eqx.combine(moving, still.value)

    return functools.update_wrapper(wrapper, fun, updated=())


def _split(tree: Any) -> tuple[list[Any], Any]:
    """The leaves that are traced, and the rest, hashable."""
    leaves, structure = jax.tree.flatten(tree)
    traced = tuple(map(is_array, leaves))
    still = tuple(None if t else x for x, t in zip(leaves, traced, strict=True))
    return [x for x, t in zip(leaves, traced, strict=True) if t], (structure, traced, still)


def _filled(leaves: list[Any], static: Any) -> Any:
    structure, traced, still = static
    it = iter(leaves)
    return structure.unflatten([next(it) if t else x for t, x in zip(traced, still, strict=True)])


def _joined(leaves: list[Any], static: Any) -> Any:
    n, of_rest, of_first = static
    fun, rest, kwargs = _filled(leaves[:n], of_rest)
    return fun, (*_filled(leaves[n:], of_first), *rest), kwargs


def filter_value_and_grad(fun: Any = None, *, has_aux: bool = False) -> Callable[..., Any]:
    """``eqx.filter_value_and_grad``: with respect to the floating arrays, and the values that have tangents, of the first
    argument. The gradient has a cotangent in place of each, and ``None`` in place of all else.

    Raises:
      TypeError: when it is called, if there is no positional argument.
    """
    if fun is None:
        return functools.partial(filter_value_and_grad, has_aux=has_aux)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError("typax.equinox: what is differentiated is the first argument, which has to be given by position")
        moving, still = eqx.partition(args[0], is_inexact_array)

        def of_moving(moving: Any) -> Any:
            return fun(eqx.combine(moving, still), *args[1:], **kwargs)

        return jax.value_and_grad(of_moving, has_aux=has_aux)(moving)

    return functools.update_wrapper(wrapper, fun, updated=())


def filter_grad(fun: Any = None, *, has_aux: bool = False) -> Callable[..., Any]:
    """``eqx.filter_grad``: the gradient of `filter_value_and_grad`; with `has_aux`, and what else the function returned."""
    if fun is None:
        return functools.partial(filter_grad, has_aux=has_aux)
    both = filter_value_and_grad(fun, has_aux=has_aux)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value, grad = both(*args, **kwargs)
        return (grad, value[1]) if has_aux else grad

    return functools.update_wrapper(wrapper, fun, updated=())


class if_array(eqx.if_array):
    """``eqx.if_array``: the axis for an array or a value, and ``None`` for all else."""

    def __call__(self, x: Any) -> int | None:
        return self.axis if is_array(x) else None


def filter_vmap(
    fun: Any = None,
    *,
    in_axes: Any = if_array(0),  # noqa: B008, a frozen dataclass
    out_axes: Any = if_array(0),  # noqa: B008
    axis_name: Any = None,
    axis_size: int | None = None,
) -> Callable[..., Any]:
    """``eqx.filter_vmap``: arrays and values are mapped along the axis given, by default the first, and all else is shared.

    A value is mapped along a batch axis.  ``eqx.if_array`` means `if_array` here.

    Args:
      in_axes: a prefix of the tuple of arguments, of integers, ``None``, and functions of a leaf that give one.
      out_axes: the same, of the result.
      axis_name, axis_size: as of ``jax.vmap``.
    """
    if fun is None:
        return functools.partial(filter_vmap, in_axes=in_axes, out_axes=out_axes, axis_name=axis_name, axis_size=axis_size)

    def wrapper(*args: Any) -> Any:
        axes = _axes(in_axes, args)
        mapped, still = eqx.partition(args, jax.tree.map(lambda a: a is not None, axes, is_leaf=_is_none))

        def run(mapped: Any) -> Any:
            out = fun(*eqx.combine(mapped, still))
            axes = _axes(out_axes, out)
            moving, rest = eqx.partition(out, jax.tree.map(lambda a: a is not None, axes, is_leaf=_is_none))
            same, static = eqx.partition(rest, is_array)
            return moving, same, _Static((static, axes))

        moving, same, kept = jax.vmap(run, (axes,), (0, None, None), axis_name=axis_name, axis_size=axis_size)(mapped)
        static, axes = kept.value
        moving = jax.tree.map(lambda x, a: moveaxis(x, 0, a) if a else x, moving, axes)
        return eqx.combine(moving, same, static)

    return functools.update_wrapper(wrapper, fun, updated=())


def _is_none(x: Any) -> bool:
    return x is None


def _axes(spec: Any, tree: Any) -> Any:
    """An axis or ``None`` for each leaf."""

    def resolve(own: Any, part: Any) -> Any:
        if isinstance(own, eqx.if_array):
            own = if_array(own.axis)
        return jax.tree.map(own if callable(own) else lambda _: own, part)

    return jax.tree.map(resolve, spec, tree, is_leaf=_is_none)


# --- files --------------------------------------------------------------------------------------------------------


def tree_serialise_leaves(path_or_file: Any, pytree: Any, filter_spec: Any = None, is_leaf: Any = None) -> None:
    """``eqx.tree_serialise_leaves``, which leaves values out of the file: here they are in it, with their types.

    Raises:
      TypeError: for a value of a type that has no form in a file.
    """
    rest = eqx.default_serialise_filter_spec if filter_spec is None else filter_spec

    def spec(file: Any, x: Any) -> None:
        if not _jax.is_hi_value(x):
            rest(file, x)
            return
        leaf = _leaf(x)
        np.save(file, np.frombuffer(json.dumps(_describe.type_to_json(leaf.type)).encode(), np.uint8))
        for kept, lo in zip(leaf.arrays, leaf.type.lower_val(x), strict=True):
            np.save(file, kept.stored(lo))

    eqx.tree_serialise_leaves(path_or_file, pytree, spec, is_leaf)


def tree_deserialise_leaves(path_or_file: Any, like: Any, filter_spec: Any = None, is_leaf: Any = None) -> Any:
    """``eqx.tree_deserialise_leaves``, for a file of `tree_serialise_leaves`.

    Raises:
      RuntimeError: of Equinox, where the file has another type than ``like``; it says where, and its cause what.
    """
    rest = eqx.default_deserialise_filter_spec if filter_spec is None else filter_spec

    def spec(file: Any, x: Any) -> Any:
        if not _jax.is_hi_value(x):
            return rest(file, x)
        leaf = _leaf(x)
        told = np.load(file)
        want = json.dumps(_describe.type_to_json(leaf.type)).encode()
        if told.dtype != np.uint8 or told.tobytes() != want:
            raise TypeError(f"`like` has {leaf.type} where the file has {_shown(told)}")
        return _save.value_of(leaf, [kept.restored(np.load(file)) for kept in leaf.arrays])

    return eqx.tree_deserialise_leaves(path_or_file, like, spec, is_leaf)


def _leaf(x: Any) -> Any:
    return _tree.leaf_of(x, "the leaf", _tree.Names())


def _shown(told: np.ndarray) -> Any:
    try:
        ty = _describe.type_from_json(json.loads(told.tobytes()))
        return ty if isinstance(ty, ValueType) else "an array"
    except ValueError:
        return "an array"
