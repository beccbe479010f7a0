"""Records, values with factors, values in values: other tangents, other axes."""

from typing import Any

import jax
import jax.numpy as jnp

from _matrix import row, works_raw
from _matrix.sides import XS, X

U, V = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0, 3.0])


def loss(s: Any) -> Any:
    return lambda t: jnp.sum(jnp.sin(s.part(t, 0))) + jnp.sum(s.part(t, 1) ** 2)


def parts(s: Any, t: Any) -> Any:
    return s.part(t, 0), s.part(t, 1)


@works_raw("a tuple: made and opened, jit")
def _(s: Any) -> Any:
    return parts(s, s.pair(U, X)), s.jit(lambda a, b: parts(s, s.pair(a, b)))(U, X)


@works_raw("a tuple that holds a value")
def _(s: Any) -> Any:
    t = s.jit(lambda a, q: s.pair(a, q))(U, s.q)
    return s.part(t, 0), s.dense(s.part(t, 1))


@works_raw("a tuple: grad of it is a tuple")
def _(s: Any) -> Any:
    return parts(s, s.grad(loss(s))(s.pair(U, X))), s.grad(lambda u: loss(s)(s.pair(u, X)))(U)


@row("a tuple: jvp and linearize")
def _(s: Any) -> Any:
    t, dt = s.pair(U, X), s.pair(jnp.ones(2), X)
    y, f = s.linearize(loss(s), t)
    return s.jvp(loss(s), (t,), (dt,)), y, f(dt)


@row("a tuple: checkpoint")
def _(s: Any) -> Any:
    return parts(s, s.grad(s.checkpoint(loss(s)))(s.pair(U, X)))


@works_raw("a tuple: vmap, each element along its axis")
def _(s: Any) -> Any:
    t = s.pair(U, XS)
    axes = (s.pair_axes(None, 0),)
    return s.vmap(lambda t: s.part(t, 0)[0] * s.part(t, 1), in_axes=axes, axis_size=4)(t)


@works_raw("a tuple: vmap, a tuple as result")
def _(s: Any) -> Any:
    t = s.vmap(lambda x: s.pair(x, x * 2), out_axes=s.pair_axes(0, 0))(XS)
    return parts(s, t)


@works_raw("a tuple: scan and fori_loop carry")
def _(s: Any) -> Any:
    step = lambda t, x: (s.pair(s.part(t, 0) + 1, s.part(t, 1) + x), None)
    t, _ = s.scan(step, s.pair(U, X), XS)
    body = lambda i, t: s.pair(s.part(t, 1), s.part(t, 0))
    return parts(s, t), parts(s, s.fori_loop(0, 3, body, s.pair(X, 2 * X)))


@row("a tuple: cond result under jit")
def _(s: Any) -> Any:
    f = s.jit(lambda p, a, b: s.cond(p, lambda: s.pair(a, b), lambda: s.pair(b, a)))
    return parts(s, f(True, X, 2 * X)), parts(s, f(False, X, 2 * X))


@row("a tuple: grad of its scan")
def _(s: Any) -> Any:
    step = lambda t, x: (s.pair(jnp.sin(s.part(t, 0)), s.part(t, 1) * x), None)
    return s.jit(s.grad(lambda u: loss(s)(s.scan(step, s.pair(u, X), XS)[0])))(U)


@row("a tuple: jacrev of a function of it")
def _(s: Any) -> Any:
    j = s.jacrev(lambda t: s.part(t, 0) * 2)(s.pair(U, V))
    return j if s.is_plain else tuple(j)


@row("a tuple: stop_gradient")
def _(s: Any) -> Any:
    return parts(s, s.grad(lambda t: loss(s)(s.stop_gradient(t)) + jnp.sum(s.part(t, 0)))(s.pair(U, X)))


@row("a tuple: where, stack and device_put")
def _(s: Any) -> Any:
    a, b = s.pair(U, X), s.pair(2 * U, -X)
    if s.is_plain:
        picked, stacked, put = b, tuple(map(jnp.stack, zip(a, b, strict=True))), a
    else:
        picked, stacked, put = s.where(jnp.array(False), a, b), s.stack_values([a, b]), s.device_put(a)
    return parts(s, picked), parts(s, stacked), parts(s, put)


@row("a tuple: psum in shard_map")
def _(s: Any) -> Any:
    from _matrix.sides import mesh

    with jax.set_mesh(mesh()):
        x = jax.device_put(jnp.arange(8.0), jax.P("i"))
        f = lambda x: s.part(s.psum(s.pair(x, 2 * x), "i"), 1)
        return s.jit(s.shard_map(f, in_specs=jax.P("i"), out_specs=jax.P()))(x)


@works_raw("factors with dense tangents: grad")
def _(s: Any) -> Any:
    w = s.outer(U, V)
    return s.outer_dense(w), s.grad(lambda w: jnp.sum(jnp.sin(s.outer_dense(w))))(w)


@row("factors: grad and hessian of them through the value")
def _(s: Any) -> Any:
    f = lambda u: jnp.sum(jnp.sin(s.outer_dense(s.outer(u, V))))
    return s.grad(f)(U), s.hessian(f)(U)


@row("factors with componentwise tangents: grad and jvp")
def _(s: Any) -> Any:
    f = lambda w: jnp.sum(jnp.sin(s.factored_dense(w)))
    g = s.grad(f)(s.factored(U, V))
    return tuple(s.opened(g)), s.jvp(lambda u: f(s.factored(u, V)), (U,), (jnp.ones(2),))


@row("factors with componentwise tangents: checkpoint, scan, vmap")
def _(s: Any) -> Any:
    f = s.checkpoint(lambda u, v: jnp.sum(jnp.sin(s.factored_dense(s.factored(u, v)))))
    step = lambda w, x: (s.factored(*(c * x for c in s.opened(w))), jnp.sum(s.factored_dense(w)))
    g = s.grad(lambda u: jnp.sum(s.scan(step, s.factored(u, V), jnp.ones(3) * 2)[1]))
    stack = s.vmap(lambda u: s.factored_dense(s.factored(u, V)))(jnp.stack([U, 2 * U]))
    return s.grad(f, (0, 1))(U, V), s.jit(g)(U), stack


@row("factors: vmap of the value")
def _(s: Any) -> Any:
    f = s.vmap(s.outer_dense)
    return f(s.vmap(lambda u: s.outer(u, V))(jnp.stack([U, 2 * U])))


@row("tangents of the type itself: checkpoint, scan")
def _(s: Any) -> Any:
    q = s.self_quantize(X)
    f = s.checkpoint(lambda q: jnp.sum(s.self_dense(q)))
    g = s.grad(lambda q: s.scan(lambda c, x: (c, jnp.sum(s.self_dense(c)) * x), q, jnp.ones(2))[1].sum())
    return s.self_dense(s.grad(f)(q)), s.self_dense(g(q))
