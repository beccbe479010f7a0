"""Derivatives: forward, reverse, of second order, under checkpoint; with respect to arrays and to values."""

from typing import Any

import jax
import jax.numpy as jnp

from _matrix import row, works_raw
from _matrix.sides import W, X

T = jnp.ones((2, 3)) / 7


def loss(s: Any) -> Any:
    return lambda x, w: jnp.sum(jnp.sin(s.matmul(x, w)))


# --- reverse


@works_raw("grad of an array")
def _(s: Any) -> Any:
    return s.grad(lambda x: jnp.sum(s.dense(s.quantize(x)) ** 2))(s.x)


@works_raw("grad of a value")
def _(s: Any) -> Any:
    return s.grad(lambda q: jnp.sum(s.dense(q) ** 2))(s.q)


@works_raw("value_and_grad of both, under jit")
def _(s: Any) -> Any:
    return s.jit(s.value_and_grad(loss(s), (0, 1)))(s.x, s.w)


@works_raw("grad, has_aux, a value")
def _(s: Any) -> Any:
    g, q = s.grad(lambda x: (jnp.sum(s.matmul(x, s.w)), s.quantize(x)), has_aux=True)(s.x)
    return g, s.dense(q)


@works_raw("vjp of a value")
def _(s: Any) -> Any:
    y, back = s.vjp(s.dense, s.q)
    return y, back(y)


@works_raw("vjp with a hi result")
def _(s: Any) -> Any:
    q, back = s.vjp(s.quantize, s.x)
    return s.dense(q), back(T)


@row("vjp with a hi result, a value as cotangent", error=(ValueError | TypeError, r"expected .*float32\[2,3\]"))
def _(s: Any) -> Any:
    q, back = s.vjp(s.quantize, s.x)
    return back(q)


@works_raw("jacrev of an array")
def _(s: Any) -> Any:
    return s.jacrev(lambda x: s.matmul(x, s.w))(s.x)


@works_raw("grad of scan, hi carry and inputs")
def _(s: Any) -> Any:
    step = lambda c, x: (s.quantize(s.dense(c) + x), jnp.sum(s.dense(c)))
    return s.grad(lambda xs: jnp.sum(s.dense(s.scan(step, s.q, xs)[0]) ** 2))(jnp.stack([X, X]))


@works_raw("grad of fori_loop under jit")
def _(s: Any) -> Any:
    f = lambda x: jnp.sum(s.dense(s.fori_loop(0, 3, lambda i, q: s.quantize(s.dense(q) * 2), s.quantize(x))))
    return s.jit(s.grad(f))(s.x)


@works_raw("grad of cond and switch, values closed over")
def _(s: Any) -> Any:
    f = lambda x: jnp.sum(s.cond(True, lambda x: s.matmul(x, s.w), lambda x: x @ W, x) ** 2)
    g = lambda x: jnp.sum(s.switch(1, [lambda x: x @ W, lambda x: s.matmul(x, s.w)], x) ** 2)
    return s.grad(f)(s.x), s.grad(g)(s.x)


@row("grad of cond, a value made in one branch")
def _(s: Any) -> Any:
    f = lambda p, x: jnp.sum(s.cond(p, lambda x: s.dense(s.quantize(x)), lambda x: 2 * x, x) ** 2)
    return s.grad(f, 1)(True, s.x)


@works_raw("custom_vjp of a function of values")
def _(s: Any) -> Any:
    f = jax.custom_vjp(s.dense)
    f.defvjp(lambda q: (s.dense(q), None), lambda _, g: (3 * g,))
    want = s.grad(lambda q: jnp.sum(s.dense(q)))(s.q)
    got = s.grad(lambda q: jnp.sum(f(q)))(s.q)
    return got, want


@row("custom_vjp, the backward rule returns a value", error=(TypeError | ValueError, r"q8\[2,3\]"))
def _(s: Any) -> Any:
    f = jax.custom_vjp(s.dense)
    f.defvjp(lambda q: (s.dense(q), q), lambda q, g: (q,))
    return s.grad(lambda q: jnp.sum(f(q)))(s.q)


@works_raw("custom_jvp around an op")
def _(s: Any) -> Any:
    f = jax.custom_jvp(lambda x: s.matmul(x, s.w))
    f.defjvp(lambda p, t: (f(*p), t[0] @ W))
    return s.grad(lambda x: jnp.sum(f(x) * 2))(s.x)


# --- forward


@row("jvp of a value")
def _(s: Any) -> Any:
    return s.jvp(s.dense, (s.q,), (T,))


@row("jvp through an op with both operands")
def _(s: Any) -> Any:
    return s.jvp(s.matmul, (s.x, s.w), (T, W))


@works_raw("jvp through an op with a jvp rule")
def _(s: Any) -> Any:
    return s.jvp(s.jvp_dense, (s.q,), (T,))


@row("linearize")
def _(s: Any) -> Any:
    y, f = s.linearize(s.dense, s.q)
    return y, f(T)


@row("linear_transpose of an op")
def _(s: Any) -> Any:
    return s.linear_transpose(s.jvp_dense, s.q)(T)


@row("jacrev of a value")
def _(s: Any) -> Any:
    return s.jacrev(lambda w: s.matmul(s.x, w))(s.w)


@row("jacfwd of a value")
def _(s: Any) -> Any:
    return s.jacfwd(lambda w: s.matmul(s.x, w))(s.w)


@row("jacfwd of an array")
def _(s: Any) -> Any:
    return s.jacfwd(lambda x: s.matmul(x, s.w))(s.x)


@row("jacrev with a hi result")
def _(s: Any) -> Any:
    return s.jacrev(s.quantize)(s.x)


@row("hessian of an array")
def _(s: Any) -> Any:
    return s.hessian(lambda x: loss(s)(x, s.w))(s.x)


@row("hessian of a value")
def _(s: Any) -> Any:
    return s.hessian(lambda w: loss(s)(s.x, w))(s.w)


@row("forward over reverse")
def _(s: Any) -> Any:
    return s.jvp(s.grad(lambda x: loss(s)(x, s.w)), (s.x,), (T,))


# --- checkpoint


@row("checkpoint")
def _(s: Any) -> Any:
    return s.grad(s.checkpoint(loss(s)))(s.x, s.w)


@row("checkpoint under jit, of a value")
def _(s: Any) -> Any:
    return s.jit(s.grad(s.checkpoint(loss(s)), 1))(s.x, s.w)


@row("checkpoint, dots_saveable")
def _(s: Any) -> Any:
    return s.grad(s.checkpoint(loss(s), policy=jax.checkpoint_policies.dots_saveable))(s.x, s.w)


@row("checkpoint, everything_saveable")
def _(s: Any) -> Any:
    return s.grad(s.checkpoint(loss(s), policy=jax.checkpoint_policies.everything_saveable))(s.x, s.w)


@row("checkpoint, a value inside")
def _(s: Any) -> Any:
    return s.grad(s.checkpoint(lambda x: jnp.sum(s.dense(s.quantize(jnp.sin(x))) ** 2)))(s.x)


@row("checkpoint_name on a value under jit")
def _(s: Any) -> Any:
    return s.jit(lambda q: s.dense(s.checkpoint_name(q, "q")))(s.q)


@row("save_only_these_names on a value")
def _(s: Any) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("q")
    f = lambda x: jnp.sum(s.dense(s.checkpoint_name(s.quantize(jnp.sin(x)), "q")) ** 2)
    return s.grad(s.checkpoint(f, policy=policy))(s.x)


@row("residuals of a checkpoint: no value is saved", want=lambda: jnp.array(0))
def _(s: Any) -> Any:
    f = s.checkpoint(lambda x: jnp.sum(jnp.sin(s.matmul(s.dense(s.quantize(x)), s.w))))
    _, back = s.vjp(f, s.x)
    held = [x for x in jax.tree.leaves(back) if isinstance(x, s.Q) and x is not s.w]
    s.jit(s.grad(f))(s.x)
    return jnp.array(sum(jax.typeof(x) == jax.typeof(s.q) for x in held))


@row("grad of scan, hi inputs, jit and checkpoint")
def _(s: Any) -> Any:
    body = s.checkpoint(lambda c, q: (c * jnp.sum(jnp.sin(s.dense(q) * c)), None))
    return s.jit(s.grad(lambda c: s.scan(body, c, s.stack, length=4)[0]))(0.5)


# --- no tangents, and tangents of the type itself


@row("stop_gradient of a value")
def _(s: Any) -> Any:
    f = lambda q: jnp.sum(s.dense(s.stop_gradient(q)) * s.dense(q))
    return s.dense(s.stop_gradient(s.q)), s.grad(f)(s.q), s.jit(s.grad(f))(s.q)


@row("tangents of the type itself: cotangents are added")
def _(s: Any) -> Any:
    q = s.self_quantize(s.x)
    return s.self_dense(s.grad(lambda q: jnp.sum(s.self_dense(q)) + 2 * jnp.sum(s.self_dense(q)))(q))


@row("tangents of the type itself: of an argument not used")
def _(s: Any) -> Any:
    q = s.self_quantize(s.x)
    return s.self_dense(s.grad(lambda q, x: jnp.sum(x))(q, s.x))


@row("tangents of the type itself: a gradient step")
def _(s: Any) -> Any:
    q = s.self_quantize(s.x)
    g = s.grad(lambda q: jnp.sum(s.self_dense(q)))(q)
    return s.self_dense(s.step(q, g, 0.1))
