"""Values taken apart and compared: lowered arrays, stacks and slices, what is stood for, tangents, and bounds of error."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _jax
from typax._byhand import is_raw, own_spec
from typax._prim import has_tangent
from typax._structural import by_components, close_tangent, component_leaves, dense, open_tangent, tangent_views
from typax._type import ValueType, lo_axes, record_view
from typax.laws._law import Broken, NotApplicable

# --- lowered arrays ------------------------------------------------------------------------------------------------


def lowered(value: Any) -> list[Any]:
    """The arrays that a value, or each leaf of a pytree of values, is made of."""
    return [lo for x in jax.tree.leaves(value) for lo in _lowered(x)]


def _lowered(x: Any) -> list[Any]:
    ty = _jax.typeof(x)
    return list(ty.lower_val(x)) if _jax.is_hi(ty) else [x]


def raised(ty: Any, los: Sequence[Any]) -> Any:
    return ty.raise_val(*los) if _jax.is_hi(ty) else los[0]


def host(x: Any) -> np.ndarray:
    """An array on the host; random keys as their bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(jax.device_get(x))


def types(tree: Any) -> Any:
    return jax.tree.map(_jax.typeof, tree)


def plain_type(ty: Any) -> Any:
    """A type without what does not count between equal types: weak types, and the mesh of what is whole."""
    if isinstance(ty, ValueType):
        return ty.normalize()
    return ty if _jax.is_hi(ty) else (tuple(ty.shape), ty.dtype, _jax.partition(ty))


def same_types(what: str, got: Any, want: Any, meaning: str) -> None:
    a, b = jax.tree.map(lambda t: plain_type(_jax.typeof(t)), (got, want), is_leaf=lambda x: False)
    if jax.tree.structure(got) != jax.tree.structure(want) or a != b:
        names = show(types(got)), show(types(want))
        how = f"{names[0]}, not {names[1]}" if names[0] != names[1] else f"{names[0]}, which does not equal the one it had"
        raise Broken(f"{what} is of type {how}: {meaning}")


def show(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    leaves = [x if isinstance(x, _jax.AbstractValue) else _jax.typeof(x) for x in leaves]
    return ", ".join(map(str, leaves)) if len(leaves) != 1 else str(leaves[0])


def same(what: str, got: Any, want: Any, meaning: str) -> None:
    """Raise `Broken` unless both are of one type and of the same bits (any NaN is like any other)."""
    same_types(what, got, want, meaning)
    for a, b in zip(lowered(got), lowered(want), strict=True):
        a, b = host(a), host(b)
        equal = (a == b) | ((a != a) & (b != b))
        if not equal.all():
            raise Broken(f"{what} differs{where(a, b, ~equal)}: {meaning}")


def where(a: np.ndarray, b: np.ndarray, wrong: np.ndarray) -> str:
    if not wrong.shape:
        return f": got {a}, want {b}"
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f" at {list(at)}: got {a[at]}, want {b[at]}"


def close(what: str, got: Any, want: Any, allowed: Any, meaning: str) -> None:
    """Raise `Broken` unless two pytrees of arrays agree within ``allowed`` (arrays that broadcast to them).

    Where the bound is not finite (the reference overflows or is not a number) all is admitted.
    """
    trees = [jax.tree.leaves(t) for t in (got, want, allowed)]
    for g, w, b in zip(*trees, strict=True):
        g, w = _wide(g), _wide(w)
        if g.shape != w.shape:
            raise Broken(f"{what} has shape {list(g.shape)}, not {list(w.shape)}: {meaning}")
        with np.errstate(all="ignore"):
            alike = (np.abs(g - w) <= b) | (g == w) | ((g != g) & (w != w))
            wrong = ~(alike | ~np.isfinite(np.broadcast_to(b, g.shape)))
        if wrong.any():
            raise Broken(f"{what} differs{where(g, w, wrong)}: {meaning}")


def _wide(x: Any) -> np.ndarray:
    x = host(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def near(got: Any, want: Any, eps: float = 256) -> Any:
    """A bound for two evaluations of one thing: ``eps`` rounding errors of the largest entry."""

    def bound(g: Any, w: Any) -> Any:
        if not _inexact(w.dtype):
            return 0.0
        info, size = jnp.finfo(w.dtype), np.abs(_wide(w))
        return eps * float(info.eps) * np.max(size[np.isfinite(size)], initial=float(info.tiny))

    return jax.tree.map(bound, got, want)


def _inexact(dtype: Any) -> bool:
    return dtype != _jax.float0 and jnp.issubdtype(dtype, jnp.inexact)


# --- what a value stands for ---------------------------------------------------------------------------------------


def meaning(tree: Any) -> Any:
    """Each value of a pytree as the array (for a record the pytree of arrays) that it stands for."""
    return jax.tree.map(_meaning, tree)


def _meaning(x: Any) -> Any:
    ty = _jax.typeof(x)
    if is_raw(ty):
        cls = _class_of(ty)
        if not hasattr(cls, "dense"):
            raise NotApplicable(
                f"a value of type {ty}, written by hand, does not say what it stands for: give {cls.__name__} a method dense"
            )
        return cls.dense(x)
    if not isinstance(ty, ValueType):
        return x
    if ty.decl.is_record:
        return record_view(ty.decl, ty.tree.unflatten([_meaning(c) for c in component_leaves(x)]))
    return dense(x)


_class_of = functools.cache(_jax.value_class)


# --- stacks --------------------------------------------------------------------------------------------------------


def spec_of(ty: Any, axis: int = 0) -> Any:
    """The mapping spec of a type for a new or present leading axis."""
    return own_spec(ty, axis)


def stacked(trees: Sequence[Any], axis: int = 0) -> Any:
    """Pytrees of values of the same types, stacked along a new batch axis of each."""
    return jax.tree.map(lambda *xs: _stacked(xs, axis), *trees)


def _stacked(xs: Sequence[Any], axis: int) -> Any:
    ty = _jax.typeof(xs[0])
    if not _jax.is_hi(ty):
        return jnp.stack([jnp.asarray(x) for x in xs], axis)
    spec = spec_of(ty, axis)
    big = ty.inc_rank(len(xs), spec)
    axes = lo_axes(big, spec, len(xs))
    los = [_lowered(x) for x in xs]
    return big.raise_val(*(jnp.stack(group, k) for group, k in zip(zip(*los, strict=True), axes, strict=True)))  # pyright: ignore[reportArgumentType]


def sliced(tree: Any, i: int, size: int, axis: int = 0) -> Any:
    """Element ``i`` of each value of a stack."""
    return jax.tree.map(lambda x: _sliced(x, i, size, axis), tree)


def _sliced(x: Any, i: int, size: int, axis: int) -> Any:
    ty = _jax.typeof(x)
    if not _jax.is_hi(ty):
        return jax.lax.index_in_dim(x, i, axis, keepdims=False)
    spec = spec_of(ty, axis)
    axes = lo_axes(ty, spec, size)
    los = [x if k is None else jax.lax.index_in_dim(x, i, k, keepdims=False) for x, k in zip(_lowered(x), axes, strict=True)]
    return ty.dec_rank(size, spec).raise_val(*los)


# --- tangents ------------------------------------------------------------------------------------------------------


def differentiable(args: Sequence[Any]) -> list[int]:
    """The operands that have tangents. Raises `NotApplicable` if none has."""
    found = [i for i, x in enumerate(args) if all(map(has_tangent, types(jax.tree.leaves(x)))) and jax.tree.leaves(x)]
    if not found:
        raise NotApplicable("no operand has a tangent")
    return found


def tangent(tree: Any, seed: int, ct: bool = False) -> Any:
    """A tangent (or cotangent) of each value of a pytree, with entries of up to 1."""
    rng = np.random.default_rng(seed)

    def make(x: Any) -> Any:
        ty = _jax.typeof(x)
        if is_raw(ty):
            of = ty.to_ct_aval() if ct else ty.to_tangent_aval()
            los = of.lo_ty() if _jax.is_hi(of) else [of]
            if not all(_inexact(a.dtype) for a in los):
                raise NotApplicable(f"tangents of {ty}, written by hand, are made of {show(los)}")
            return raised(of, [_random(rng, -1, a) for a in los])
        leaves = [_random(rng, -1, v) for v in tangent_views(ty)]
        return close_tangent(ty, leaves, ct)

    return jax.tree.map(make, tree)


def _random(rng: Any, low: float, aval: Any) -> Any:
    """Numbers between ``low`` and ``low + 2``, complex ones in both parts."""
    x = rng.uniform(low, low + 2, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        x = x + 1j * rng.uniform(low, low + 2, aval.shape)
    return jnp.asarray(x, aval.dtype)


def opened(primals: Any, tangents: Any) -> list[Any]:
    """The arrays that the tangents of a pytree of values are made of."""
    flat = jax.tree.leaves(primals)
    return [
        a
        for x, t in zip(flat, jax.tree.structure(primals).flatten_up_to(tangents), strict=True)
        for a in (lowered(t) if is_raw(_jax.typeof(x)) else open_tangent(_jax.typeof(x), t))
    ]


def moves_by_arrays(ty: Any) -> bool:
    """Whether the tangents of a type written by hand are made of the same arrays as its values."""
    if not is_raw(ty) or not _jax.is_hi(t := ty.to_tangent_aval()):
        return False
    a, b = ([(tuple(x.shape), x.dtype) for x in of.lo_ty()] for of in (ty, t))
    return a == b


def rounds(tree: Any) -> bool:
    """Whether a tangent of a value of the pytree is rounded, as quantized ones are."""
    return any(_rounds(t) for t in types(jax.tree.leaves(tree)))


@functools.cache
def _rounds(ty: Any) -> bool:
    """Whether a tangent does not hold the array of which it was made; known by making one."""
    if by_components(ty):
        return any(map(_rounds, ty.leaves))
    if not isinstance(ty, ValueType) or not _jax.is_hi(ty.to_tangent_aval()):
        return False
    (view,) = tangent_views(ty)
    made = _random(np.random.default_rng(0), -1, view)
    (again,), a = open_tangent(ty, close_tangent(ty, [made])), _wide(made)
    return not a.size or float(np.abs(_wide(again) - a).max()) > 4 * float(jnp.finfo(view.dtype).eps)


def inner(a: Sequence[Any], b: Sequence[Any]) -> tuple[float, float]:
    """The real number that lists of arrays give, as `paired`, and that of their absolute values."""
    pairs = [_wide(x) * _wide(y) for x, y in zip(a, b, strict=True)]
    return sum(float(np.sum(p).real) for p in pairs), sum(float(np.sum(np.abs(p))) for p in pairs)


def weights(avals: Any, seed: int) -> list[Any]:
    """Numbers with which a scalar is made of inexact arrays."""
    rng = np.random.default_rng(seed)
    return [_random(rng, 0.5, a) if _inexact(a.dtype) else None for a in jax.tree.leaves(avals)]


def paired(x: Any, y: Any) -> Any:
    """The real number that two arrays give: a sum of products, of complex ones its real part, as JAX pairs cotangents."""
    return jnp.real(jnp.sum(x * y))


def scalar(f: Callable[..., Any], args: Sequence[Any], seed: int = 3) -> Callable[..., Any]:
    """``f`` made a function to a scalar: the weighted sum of the arrays that its results stand for."""
    avals = jax.eval_shape(lambda *a: meaning(f(*a)), *args)
    ws = weights(avals, seed)
    if all(w is None for w in ws):
        raise NotApplicable("no result is a number that can be differentiated")

    def total(*xs: Any) -> Any:
        parts = zip(jax.tree.leaves(meaning(f(*xs))), ws, strict=True)
        return sum(paired(x, w).astype(jnp.float32) for x, w in parts if w is not None)

    return total


def gradients(f: Callable[..., Any], args: Sequence[Any], which: Sequence[int]) -> list[list[Any]]:
    """The gradient of a function to a scalar, for each operand as a list of arrays."""
    gs = jax.grad(f, tuple(which), allow_int=True)(*args)
    return [opened(args[i], g) for i, g in zip(which, gs, strict=True)]


def same_gradients(what: str, got: Sequence[Any], want: Sequence[Any], which: Sequence[int], meaning: str) -> None:
    for i, g, w in zip(which, got, want, strict=True):
        close(f"{what} by operand {i}", g, w, near(g, w), meaning)
