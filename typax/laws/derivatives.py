"""Derivatives are those of the reference, in forward and in reverse mode, by hand or derived."""

import copy
from typing import Any

import jax
import numpy as np

from typax._prim import Cache
from typax.laws._calls import derivative, directional, directions, forward, reference
from typax.laws._law import Broken, Call, NotApplicable, law
from typax.laws._values import (
    close,
    gradients,
    inner,
    meaning,
    near,
    opened,
    same_gradients,
    scalar,
    sliced,
    stacked,
    weights,
)


@law("op", "The tangent of the result is the slope of the reference, measured by differences.", tame=True, smooth=True)
def jvp_differences(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    ts = directions(args)
    want, errors = directional(call, which, ts)
    got = forward(f, args, ts)
    close("the tangent of the result, against differences of the reference,", got, want, errors, "forward mode is wrong")


@law("op", "The gradient predicts the change of the reference, measured by differences.", tame=True, smooth=True)
def vjp_differences(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    total = scalar(f, args)
    for i, (at, x) in enumerate(zip(which, args, strict=True)):
        ts = directions([x], 5 + i)
        slope, errors = directional(call, [at], ts)
        ws = [w for w in weights(jax.eval_shape(f, *args), 3) if w is not None]
        want, _ = inner(ws, slope)
        _, allowed = inner(ws, errors)
        (g,) = gradients(total, args, [i])
        got, size = inner(g, opened(x, ts[0]))
        if abs(got - want) > allowed + 1e-3 * size:
            raise Broken(
                f"along a direction of operand {at} the reference changes by {want:.6g}, its gradient predicts {got:.6g}: "
                "reverse mode is wrong"
            )


@law("op", "Forward and reverse mode are each other's transpose: <c, J t> = <J' c, t>.", tame=True, smooth=True)
def dot_product(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    ts = directions(args, 7)
    pushed = forward(f, args, ts)
    ws = [w for w in weights(jax.eval_shape(f, *args), 3) if w is not None]
    left, size = inner(pushed, ws)
    gs = gradients(scalar(f, args), args, range(len(args)))
    pairs = [inner(g, opened(x, t)) for g, x, t in zip(gs, args, ts, strict=True)]
    right = sum(p for p, _ in pairs)
    eps = max(float(np.finfo(np.float32).eps), *(float(jax.numpy.finfo(p.dtype).eps) for p in pushed))
    if abs(left - right) > max(1e-4, 4 * eps) * max(size, *(s for _, s in pairs)) + 1e-6:
        raise Broken(f"<c, J t> is {left:.6g} but <J' c, t> is {right:.6g}, by operands {which}: one of the modes is wrong")


@law("op", "The linearized op is its derivative, at once, jitted, and after other uses.", tame=True)
def linearize(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    ts = directions(args, 9)
    want = forward(f, args, ts)
    _, linear = jax.linearize(f, *args)
    for apply in (linear, jax.jit(linear), linear):
        got = [x for x in jax.tree.leaves(apply(*ts)) if x.dtype != jax.dtypes.float0]
        got = [x for x in got if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
        close("linearize, against jvp,", got, want, near(got, want), f"stored derivatives by operands {which} are wrong")


@law("op", "The second derivative, of the gradient in a direction, is that of the reference.", tame=True, smooth=True)
def second_derivatives(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    ref = reference(call)

    def plain(*some: Any) -> Any:
        full = list(call.args)
        for i, x in zip(which, some, strict=True):
            full[i] = x
        return ref(*meaning(full))

    ts, every = directions(args, 13), tuple(range(len(args)))
    got, want = (_curvature(scalar(g, args), args, ts, every) for g in (f, plain))
    for i, g, w in zip(which, got, want, strict=True):
        bound = near(g, w, 2048)
        close(f"the gradient by operand {i}, in a direction,", g, w, bound, "derivatives of derivatives are wrong")


def _curvature(total: Any, args: Any, ts: Any, every: Any) -> list[list[Any]]:
    try:
        _, moved = jax.jvp(jax.grad(total, every), tuple(args), tuple(ts))
    except TypeError as e:
        if "reverse-mode rule only" in str(e):
            raise NotApplicable("the op has a reverse-mode rule only") from None
        raise
    return [opened(x, m) for x, m in zip(args, moved, strict=True)]


@law("op", "Each operand has the gradient that it has beside the others; uses of a value add up.", tame=True)
def operand_gradients(op: Any, call: Call) -> None:
    f, which, args = derivative(call)
    one, two = scalar(f, args, 3), scalar(f, args, 4)
    every = range(len(args))
    g1, g2 = gradients(one, args, every), gradients(two, args, every)
    for i in every if len(args) > 1 else ():
        alone = gradients(one, args, [i])
        same_gradients(
            "the gradient by one operand alone", alone, [g1[i]], [which[i]], "it depends on what else is differentiated"
        )
    both = gradients(lambda *xs: one(*xs) + two(*xs), args, every)
    total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(g1, g2, strict=True)]
    same_gradients("the gradient of a value that is used twice", both, total, which, "contributions are not summed")


def without_rules(op: Any) -> Any:
    """The op as it would be if none of its rules were written by hand."""
    plain = copy.copy(op)
    plain.rules, plain.cache = {}, Cache()
    return plain


@law("op", "A rule that is written by hand gives what the derived one gives.", tame=True)
def rules_by_hand(op: Any, call: Call) -> None:
    rules = getattr(op, "rules", {})
    if not rules:
        raise NotApplicable("no rule is written by hand")
    plain = Call(without_rules(op), call.args, call.others, call.statics)
    if rules.keys() & {"jvp", "lin", "vjp", "transpose", "remat"}:
        f, which, args = derivative(call)
        g, _, _ = derivative(plain)
        every = range(len(args))
        ts = directions(args, 11)
        for i in every:
            if rules.keys() & {"jvp", "lin"}:
                some = [t if i == j else jax.tree.map(lambda a: a * 0, t) for j, t in enumerate(ts)] if len(args) > 1 else ts
                got, want = forward(f, args, some), forward(g, args, some)
                close(
                    f"the tangent by operand {which[i]}", got, want, near(got, want), "a rule by hand is not the derivative"
                )
        got, want = (gradients(scalar(h, args), args, every) for h in (f, g))
        same_gradients("the gradient", got, want, which, "a rule by hand is not the derivative")
    if "batch" in rules:
        n = len(call.all)
        many = stacked(call.all)
        got = meaning(jax.vmap(call.run, axis_size=n)(*many))
        want = meaning(jax.vmap(plain.run, axis_size=n)(*many))
        close("the mapped op", got, want, near(got, want), "a batching rule by hand is not the loop")
        for i in range(n):
            each = meaning(plain.run(*sliced(many, i, n)))
            close(
                f"element {i} of the mapped op",
                sliced(got, i, n),
                each,
                near(got, got),
                "a batching rule by hand is not the loop",
            )
