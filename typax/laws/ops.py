"""An op is its reference, to within a bound, however it is called."""

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from typax import _jax
from typax.laws._calls import ByHand, allowed, derivative, reference, result_types
from typax.laws._law import Broken, Call, NotApplicable, law
from typax.laws._values import (
    _inexact,
    _wide,
    close,
    gradients,
    lowered,
    meaning,
    near,
    plain_type,
    same_gradients,
    scalar,
    show,
)


@law("op", "The result is of the type that is declared, and its arrays are of the types that this lowers to.")
def result_type(op: Any, call: Call) -> None:
    out = call.run(*call.args)
    produced = jax.tree.map(_jax.typeof, out)
    for d, p, x in zip(result_types(call), jax.tree.leaves(produced), jax.tree.leaves(out), strict=True):
        if plain_type(d) != plain_type(p):
            raise Broken(
                f"traced, the result is of type {d}, but it is of type {p}: programs compiled for it would be wrong"
            )
        for lo, a in zip(d.lo_ty() if _jax.is_hi(d) else [d], lowered(x), strict=True):
            if (tuple(lo.shape), lo.dtype) != (tuple(a.shape), a.dtype):
                raise Broken(f"an array of the result {d} is {_jax.typeof(a)}, not {lo}: it would be read wrongly")
    try:
        want = jax.tree.leaves(jax.eval_shape(reference(call), *meaning(call.args)))
        got = jax.tree.leaves(jax.tree.map(_jax.typeof, meaning(out)))
    except NotApplicable:  # nothing is said of what it stands for
        return
    if len(got) != len(want):
        raise Broken(
            f"the results stand for {len(got)} arrays, but the reference gives {len(want)}: it means something else"
        )
    for w, g in zip(want, got, strict=True):
        if (tuple(w.shape), w.dtype) != (tuple(g.shape), g.dtype):
            raise Broken(f"the result stands for {g}, but the reference gives {w}: it means something else")


@law("op", "The result stands for what the reference gives on what the operands stand for, within the op's bound.")
def agrees_with_reference(op: Any, call: Call) -> None:
    ref = reference(call)
    dense = meaning(call.args)
    want = ref(*dense)
    out = call.run(*call.args)
    got = meaning(out)
    bounds = allowed(call, out, want)
    close("the result, against the reference,", got, want, bounds, "the implementation computes something else")
    numbers = [_wide(x) for x in jax.tree.leaves(dense) if _inexact(x.dtype)]
    if any(np.isnan(x).any() for x in numbers) and not any(np.isinf(x).any() for x in numbers):
        for g, w in zip(map(_wide, jax.tree.leaves(got)), map(_wide, jax.tree.leaves(want)), strict=True):
            if (np.isnan(w) & np.isfinite(g)).any():
                raise Broken("the reference gives NaN where the result is a number: an error upstream would be hidden")


@law("op", "Under jit the op gives what it gives without, and a second call neither traces nor compiles.")
def jit_is_eager(op: Any, call: Call) -> None:
    want = [meaning(call.run(*args)) for args in call.all]
    with nullcontext() if isinstance(op, ByHand) else jax.no_tracing():
        for args in call.all:
            call.run(*args)
    traces = 0

    def counted(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return call.run(*args)

    f = jax.jit(counted)
    for args, w in zip(call.all, want, strict=True):
        got = meaning(f(*args))
        close("the result under jit", got, w, near(got, w, 16), "compiled programs compute something else")
    if traces != 1:
        raise Broken(
            f"a jitted function of {show(jax.tree.map(_jax.typeof, call.args))} is traced {traces} times: it compiles anew"
        )


@law("op", "A checkpointed op has the results, and gradients, that it has without.", tame=True)
def remat(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    total = scalar(f, args)
    every = range(len(args))
    want = gradients(total, args, every)
    for what, wrap in (("", lambda g: g), (" and jitted", jax.jit)):
        got = gradients(wrap(jax.checkpoint(total)), args, every)
        same_gradients(f"the gradient of the op checkpointed{what},", got, want, which, "saving memory changes a program")


@law("op", "Where some results are not used, those that are stay as they are.")
def dead_code(op: Any, call: Call) -> None:
    want = jax.tree.leaves(call.run(*call.args))
    if not want:
        raise NotApplicable("the op has no results")
    flat, tree = jax.tree.flatten(call.args)
    for i, w in enumerate(want):
        jaxpr = jax.jit(lambda *xs, i=i: jax.tree.leaves(call.run(*tree.unflatten(xs)))[i]).trace(*flat).jaxpr
        small, used = _jax.dce(jaxpr)
        (got,) = _jax.eval_jaxpr_fun(small)(*(x for x, u in zip(flat, used, strict=True) if u))
        alone, whole = meaning(got), meaning(w)
        close(f"result {i} alone", alone, whole, near(alone, whole, 16), "dead code changes what is alive")
