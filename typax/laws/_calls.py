"""An op on an example: its reference on what the operands stand for, its derivative, the bound of its error."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _jax
from typax._policies import retract
from typax._prim import has_tangent
from typax._structural import by_components, close_tangent, component_leaves, from_leaves
from typax._type import ValueType
from typax.laws._law import Call, NotApplicable
from typax.laws._values import (
    _inexact,
    _rounds,
    _wide,
    differentiable,
    lowered,
    meaning,
    moves_by_arrays,
    opened,
    raised,
    rounds,
    spec_of,
    tangent,
)


class ByHand:
    """A function of values made of primitives written by hand, in the place of an op: ``fn``, and its reference or None."""

    within, primitive = 8, None

    def __init__(self, fn: Callable[..., Any], reference: Any = None) -> None:
        self.fn, self.reference = fn, reference
        cls = getattr(fn, "__self__", None)  # of a primitive, by a classmethod
        self.name = cls.__name__ if isinstance(cls, type) else getattr(fn, "__name__", str(fn))
        self.rules: dict[str, Any] = {}

    def __call__(self, *args: Any, **statics: Any) -> Any:
        return self.fn(*args, **statics)


def reference(call: Call) -> Callable[..., Any]:
    """The reference as a function of what the operands stand for. Raises `NotApplicable` if the op has none."""
    op = call.op
    if op.reference is None:
        raise NotApplicable("the op has no reference, so that it means nothing on what its operands stand for")
    statics = call.statics
    if op.primitive is None:
        params = inspect.signature(op.reference).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in params):
            statics = {k: v for k, v in statics.items() if k in {p.name for p in params}}
    return lambda *args: op.reference(*args, **statics)


def allowed(call: Call, result: Any, want: Any) -> list[Any]:
    """How far each result may be from that of the reference, entry by entry."""
    ref, within = reference(call), call.op.within
    sizes = jax.tree.map(_size, meaning(call.args))
    with np.errstate(all="ignore"):
        over = [np.abs(_wide(x)) for x in jax.tree.leaves(ref(*sizes))]
    factor = 8 if callable(within) else within
    bounds = []
    for w, a in zip(jax.tree.leaves(want), over, strict=True):
        info = jnp.finfo(w.dtype) if _inexact(w.dtype) else None
        scale = a if info is None else np.maximum(a, np.abs(_wide(w)))
        bounds.append(np.zeros(w.shape) if info is None else factor * float(info.eps) * scale + 8 * float(info.tiny))
    if callable(within):
        own = jax.tree.leaves(within(result, *call.args, **call.statics))
        if len(own) != len(bounds):
            raise NotApplicable(f"within gives {len(own)} bounds for {len(bounds)} results")
        bounds = [b + _wide(o) for b, o in zip(bounds, own, strict=True)]
    return bounds


def _size(x: Any) -> Any:
    return jnp.abs(x) if _inexact(x.dtype) else x


def on_dense(call: Call) -> Callable[..., Any]:
    """The op, as a function of its operands to what its results stand for."""
    return lambda *args: meaning(call.run(*args))


def result_types(call: Call) -> list[Any]:
    """The types of the results."""
    return list(jax.jit(call.run).trace(*call.args).jaxpr.out_avals)


def mapped(fn: Callable[..., Any], args: Sequence[Any], size: int, axes: Any) -> Callable[..., Any]:
    """``fn``, whose operands are like ``args``, mapped over ``axes`` of them, with its results along their leading axes."""
    outs = jax.jit(fn).trace(*args)
    out_axes = jax.tree.structure(outs.out_info).unflatten([spec_of(t, 0) for t in outs.jaxpr.out_avals])
    return jax.vmap(fn, in_axes=tuple(axes), out_axes=out_axes, axis_size=size)


def derivative(call: Call) -> tuple[Callable[..., Any], list[int], list[Any]]:
    """The op as a function of those operands that have tangents, which these are, and their values."""
    which = differentiable(call.args)
    if rounds([call.args[i] for i in which]) or any(map(_rounds, result_types(call))):
        raise NotApplicable("tangents are rounded, so that derivatives agree only to a step")
    f = on_dense(call)

    def of_some(*some: Any) -> Any:
        full = list(call.args)
        for i, x in zip(which, some, strict=True):
            full[i] = x
        return f(*full)

    return of_some, which, [call.args[i] for i in which]


def forward(f: Callable[..., Any], args: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The inexact tangents of the results; `NotApplicable` where only reverse mode exists."""
    try:
        _, out = jax.jvp(f, tuple(args), tuple(tangents))
    except TypeError as e:
        if "reverse-mode rule only" in str(e):
            raise NotApplicable("the op has a reverse-mode rule only") from None
        raise
    return inexact(out)


def inexact(tree: Any) -> list[Any]:
    found = [x for x in jax.tree.leaves(tree) if _inexact(x.dtype)]
    if not found:
        raise NotApplicable("no result is a number that can be differentiated")
    return found


def directional(call: Call, which: Sequence[int], tangents: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The derivative of the reference in a direction by central differences, and the error to expect of them.

    Raises `NotApplicable` where they do not settle as the step gets smaller: the reference is not smooth there.
    """
    move = dict(zip(which, tangents, strict=True))
    by_op = call.op.reference is None
    if by_op and not all(_moves(_jax.typeof(x)) for i in which for x in _leaves(call.args[i])):
        raise NotApplicable("the op has no reference, and its operands do not move by components")
    f = on_dense(call) if by_op else reference(call)

    def at(h: float) -> list[np.ndarray]:
        args = [_moved(x, move[i], h) if i in move else x for i, x in enumerate(call.args)]
        return [_wide(x) for x in inexact(f(*(args if by_op else map(meaning, args))))]

    if any(a.dtype.itemsize < 4 for a in inexact(jax.eval_shape(f, *call.args if by_op else meaning(call.args)))):
        raise NotApplicable("results of so few digits are too rough for differences")
    slopes, sizes = [], [np.max(np.abs(x), initial=0.0) for x in at(0.0)]
    for h in (2.0**-5, 2.0**-6):
        slopes.append([(a - b) / (2 * h) for a, b in zip(at(h), at(-h), strict=True)])
    errors = []
    for a, b, size in zip(*slopes, sizes, strict=True):
        largest = np.max(np.abs(b), initial=0.0)
        apart = np.abs(a - b)
        if np.any(apart > 0.1 * largest + 1e-3 * size):
            raise NotApplicable("the reference is not smooth at the example")
        errors.append(2 * apart + 2e-3 * largest + 2.0**-12 * size + 1e-6)
    return slopes[1], errors


def _moves(ty: Any) -> bool:
    return by_components(ty) or not _jax.is_hi(ty) or moves_by_arrays(ty)


def _leaves(x: Any) -> list[Any]:
    return jax.tree.leaves(x)


def _moved(x: Any, t: Any, h: float) -> Any:
    """A value moved by ``h t``: by its components, or what it stands for."""
    return jax.tree.map(
        lambda x, t: _move(x, t, h), x, jax.tree.structure(x).unflatten(jax.tree.structure(x).flatten_up_to(t))
    )


def _move(x: Any, t: Any, h: float) -> Any:
    ty = _jax.typeof(x)
    leaves = [a * jnp.asarray(h, a.dtype) for a in opened(x, t)]
    if moves_by_arrays(ty):
        return raised(ty, [a + b for a, b in zip(lowered(x), leaves, strict=True)])
    if by_components(ty):
        x = _unrounded(x)
        return retract(x, close_tangent(_jax.typeof(x), leaves))
    return meaning(x) + leaves[0] if leaves else x


def _unrounded(x: Any) -> Any:
    """A value that moves by components, with arrays for those components whose values would be rounded when they move."""
    ty = _jax.typeof(x)
    rough = [isinstance(a, ValueType) and not by_components(a) and has_tangent(a) for a in ty.leaves]
    if not any(rough):
        return x
    parts = [meaning(c) if r else c for c, r in zip(component_leaves(x), rough, strict=True)]
    new = [_jax.typeof(c) for c in parts]
    if not ty.admits(new):
        raise NotApplicable(f"a value of type {ty} is rounded when it moves")
    return from_leaves(ty.with_leaves(new), parts)


def directions(args: Sequence[Any], seed: int = 1) -> list[Any]:
    return [tangent(x, seed + i) for i, x in enumerate(args)]
