"""Tangents form a vector space that is its own tangent space, and values move along them."""

from typing import Any

import jax
import jax.numpy as jnp

from typax import _jax
from typax._byhand import is_raw
from typax._policies import retract
from typax._prim import has_tangent
from typax._structural import by_components, close_tangent, dense, open_tangent
from typax._type import ValueType
from typax.laws._law import Broken, NotApplicable, Values, law
from typax.laws._values import (
    _inexact,
    _rounds,
    close,
    gradients,
    host,
    inner,
    meaning,
    near,
    opened,
    paired,
    plain_type,
    same_gradients,
    scalar,
    tangent,
    weights,
)


@law(
    "type",
    "The tangent type of a tangent type is itself, and so for cotangents; tangents are of it, and read as they were made.",
    tame=True,
)
def tangent_types(cls: Any, example: Values) -> None:
    ty = _jax.typeof(example.value)
    t, ct = ty.to_tangent_aval(), ty.to_ct_aval()
    if t.to_tangent_aval() != t:
        raise Broken(
            f"tangents of {ty} are {t}, whose own tangents are {t.to_tangent_aval()}: second derivatives have no type"
        )
    if ct.to_tangent_aval() != ct:
        raise Broken(f"cotangents of {ty} are {ct}, whose own tangents are {ct.to_tangent_aval()}: they could not be summed")
    for what, of, made in (("tangent", t, False), ("cotangent", ct, True)):
        got = _jax.typeof(tangent(example.value, 1, made)) if has_tangent(ty) else of
        if plain_type(got) != plain_type(of):
            raise Broken(f"a {what} of {ty} is made of type {got}, but {of} is declared: derivatives are read wrongly")
    if has_tangent(ty) and not is_raw(ty):
        for ct in (False, True):
            _read_as_made(ty, close_tangent(ty, open_tangent(ty, tangent(example.value, 1, ct)), ct), ct)
    if ty.to_tangent_aval() != t:
        raise Broken(f"the tangent type of {ty} is not the same twice: {t} and {ty.to_tangent_aval()}")


def _read_as_made(ty: Any, once: Any, ct: bool) -> None:
    """A tangent may be rounded when it is made; what was rounded stays."""
    leaves = open_tangent(ty, once)
    again = open_tangent(ty, close_tangent(ty, leaves, ct))
    for a, b in zip(map(host, leaves), map(host, again), strict=True):
        size = float(abs(a).max(initial=0))
        if (a.size and not size) or float(abs(a - b).max(initial=0)) > 0.25 * size:
            what = "cotangent" if ct else "tangent"
            raise Broken(f"a {what} of {ty} is read otherwise than it was made: derivatives are scaled, or lost")


def _tangents(v: Any) -> tuple[Any, list[Any]]:
    ty = _jax.typeof(v)
    if not has_tangent(ty):
        raise NotApplicable("values of the type have no tangents")
    ct = ty.to_ct_aval()
    if not _jax.is_hi(ct):
        raise NotApplicable("tangents are arrays, whose addition is JAX's")
    return ct, [tangent(v, seed, ct=True) for seed in (1, 2, 3)]


def _add(ct: Any, a: Any, b: Any) -> Any:
    out = ct.vspace_add(a, b)
    if (got := _jax.typeof(out)) != ct:
        raise Broken(f"the sum of two cotangents of type {ct} is of type {got}: accumulated gradients change their type")
    return out


def _agree(what: str, v: Any, got: Any, want: Any, meaning: str) -> None:
    a, b = opened(v, got), opened(v, want)
    close(what, a, b, near(a, b), meaning)


@law("type", "The zero of cotangents is neutral: zero + t = t = t + zero.", tame=True)
def tangent_zero(cls: Any, example: Values) -> None:
    ct, (t, _, _) = _tangents(example.value)
    zero = ct.vspace_zero()
    if _jax.typeof(zero) != ct:
        raise Broken(f"the zero of {ct} is of type {_jax.typeof(zero)}: unused operands get gradients of another type")
    for what, got in (("zero + t", _add(ct, zero, t)), ("t + zero", _add(ct, t, zero))):
        _agree(what, example.value, got, t, "an unused operand would change a gradient")


@law("type", "Cotangents add in any order.", tame=True)
def tangent_sum(cls: Any, example: Values) -> None:
    ct, (a, b, c) = _tangents(example.value)
    _agree(
        "a + b, against b + a,", example.value, _add(ct, a, b), _add(ct, b, a), "gradients depend on the order of a program"
    )
    if _rounds(_jax.typeof(example.value)):
        return
    left, right = _add(ct, _add(ct, a, b), c), _add(ct, a, _add(ct, b, c))
    _agree("(a + b) + c, against a + (b + c),", example.value, left, right, "gradients depend on the order of a program")


@law("type", "A value moved by zero stays where it is; rounding it once more changes nothing.", tame=True)
def retract_zero(cls: Any, example: Values) -> None:
    v = example.value
    ty = _jax.typeof(v)
    if not isinstance(ty, ValueType):
        raise NotApplicable("a type written by hand does not say how its values move")
    if not has_tangent(ty) or _moves(ty) is False:
        raise NotApplicable("values of the type have no tangents, or no from_dense by which they would move")
    first = _by_zero(v)
    if (got := _jax.typeof(first)) != ty:
        raise Broken(f"retract(v, 0) is of type {got}, not {ty}: an update changes the type of a parameter")
    again = _by_zero(first)
    here, there, last = (jax.tree.leaves(meaning(x)) for x in (v, first, again))
    close(
        "retract(v, 0) of what retract(v, 0) gave", last, there, near(last, there, 8), "parameters drift without gradients"
    )
    half = [0.5 * float(jnp.max(jnp.abs(x), initial=0)) if _inexact(x.dtype) else 0.0 for x in here]
    close("retract(v, 0)", there, here, half, "an update by zero loses the parameter")


def _moves(ty: Any) -> bool:
    if by_components(ty):
        return all(_moves(leaf) for leaf in ty.leaves if isinstance(leaf, ValueType))
    return hasattr(ty.decl.cls, "from_dense") or not has_tangent(ty)


def _by_zero(v: Any) -> Any:
    ty = _jax.typeof(v)
    zero = jax.tree.map(jnp.zeros_like, opened(v, tangent(v, 0)))
    return retract(v, close_tangent(ty, zero))


@law("type", "The gradient of what does not depend on a value is zero; that of a value used twice is the sum.", tame=True)
def fan_out(cls: Any, example: Values) -> None:
    v = example.value
    if not has_tangent(_jax.typeof(v)):
        raise NotApplicable("values of the type have no tangents")
    unused = jax.grad(lambda v: jnp.float32(1.0))(v)
    if any(host(x).any() for x in opened(v, unused)):
        raise Broken("the gradient of a constant is not zero: unused parameters would move")
    if _rounds(_jax.typeof(v)):
        raise NotApplicable("tangents are rounded, so that a sum of gradients is not the gradient of the sum")
    leaves = jax.tree.leaves(meaning(v))
    ws = [weights(leaves, s) for s in (1, 2)]

    def total(v: Any, weights: Any) -> Any:
        pairs = zip(jax.tree.leaves(meaning(v)), weights, strict=True)
        return sum((paired(x, w).astype("float32") for x, w in pairs if w is not None), jnp.float32(0))

    if all(w is None for w in ws[0]):
        raise NotApplicable("the value stands for nothing that can be differentiated")
    both = [None if a is None else a + b for a, b in zip(*ws, strict=True)]
    got = gradients(lambda v: total(v, ws[0]) + total(v, ws[1]), [v], [0])
    want = gradients(lambda v: total(v, both), [v], [0])
    same_gradients("the gradient of a value that is used twice", got, want, [0], "contributions are not summed")


@law("type", "The derivative of dense agrees in forward and in reverse mode.", tame=True, smooth=True)
def dense_derivative(cls: Any, example: Values) -> None:
    v = example.value
    ty = _jax.typeof(v)
    if not isinstance(ty, ValueType) or ty.decl.is_record or not has_tangent(ty):
        raise NotApplicable("a record, a type written by hand or without tangents: there is nothing to differentiate")
    t = tangent(v, 1)
    _, pushed = jax.jvp(dense, (v,), (t,))
    c = jax.tree.leaves(weights([pushed], 2))[0]
    total = scalar(dense, [v], 2)
    (g,) = gradients(total, [v], [0])
    (left, size), (right, _) = inner([pushed], [c]), inner(opened(v, t), g)
    if abs(left - right) > 1e-3 * size + 1e-9 and not _rounds(ty):
        raise Broken(f"<J t, c> is {left} but <t, J' c> is {right}: a gradient step would go in another direction")
    if not by_components(ty) and not _jax.is_hi(ty.to_tangent_aval()):
        close("the tangent of dense(v)", [pushed], [t], near([pushed], [t], 4), "a dense tangent is a change of dense(v)")
