"""jit: arguments, results, closures, donation, ahead of time; what is traced again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from _matrix import row, works_raw
from _matrix.sides import X, fake


@works_raw("argument")
def _(s: Any) -> Any:
    return s.jit(s.dense)(s.q)


@works_raw("result")
def _(s: Any) -> Any:
    return s.dense(s.jit(s.quantize)(s.x))


@works_raw("value inside, closed over")
def _(s: Any) -> Any:
    return s.jit(lambda x: s.matmul(x, s.w) + s.matmul(s.dense(s.quantize(x)), s.w))(s.x)


@works_raw("a tree of values, by keyword")
def _(s: Any) -> Any:
    f = s.jit(lambda tree, *, w: {"y": s.matmul(s.dense(tree["q"]), w), "q": tree["q"]})
    out = f({"q": s.q}, w=s.w)
    return out["y"], s.dense(out["q"])


@works_raw("nested jit, a partial, a method")
def _(s: Any) -> Any:
    class Layer:
        w = s.w

        @functools.partial(s.jit, static_argnums=0)
        def call(self, x):
            return s.matmul(x, self.w)

    inner = s.jit(functools.partial(s.matmul, s.x))
    return s.jit(lambda w: inner(w))(s.w), Layer().call(s.x)


@works_raw("donated argument")
def _(s: Any) -> Any:
    q = s.quantize(s.x + 1)
    return s.dense(s.jit(lambda q: s.quantize(s.dense(q) * 2), donate_argnums=0)(q))


@works_raw("static keyword beside a value")
def _(s: Any) -> Any:
    return s.jit(lambda q, *, k: s.dense(q) * k, static_argnames="k")(s.q, k=3)


@works_raw("values of one type are not traced again", want=lambda: jnp.array(1))
def _(s: Any) -> Any:
    traced = []
    f = s.jit(lambda q: traced.append(q) or s.dense(q))
    for k in range(1, 4):
        f(s.quantize(s.x * k))
    return jnp.array(len(traced))


@works_raw("lower and compile, array result")
def _(s: Any) -> Any:
    return s.jit(s.matmul).lower(s.x, s.w).compile()(s.x, s.w)


@row("lower and compile, hi result")
def _(s: Any) -> Any:
    f = lambda q: s.quantize(s.dense(q) * 2)
    return s.dense(s.jit(f).lower(s.q).compile()(s.q))


@works_raw("lower and trace a type in place of a value")
def _(s: Any) -> Any:
    return s.jit(s.dense).lower(s.typeof(s.q)).compile()(s.q), jnp.zeros(s.jit(s.dense).trace(s.typeof(s.q)).out_info.shape)


@works_raw("eval_shape", want=lambda: jnp.zeros((2, 4)))
def _(s: Any) -> Any:
    out = jax.eval_shape(lambda x: s.matmul(x, s.w), s.x)
    jax.eval_shape(s.dense, s.q)
    return jnp.zeros(out.shape, out.dtype)


@works_raw("make_jaxpr shows the type", want=lambda: "q8[2,3]")
def _(s: Any) -> Any:
    return jax.make_jaxpr(s.quantize)(s.x).jaxpr.outvars[0].aval


@row("static_argnums, a value", error=(TypeError | ValueError, "hash|static"), want=lambda: [fake(X), fake(-X)])
def _(s: Any) -> Any:
    f = s.jit(lambda q: s.dense(q) * 1, static_argnums=0)
    return f(s.q), f(s.quantize(-X))


@row("compiled call with another type", error=(TypeError, "called with"))
def _(s: Any) -> Any:
    return s.jit(s.dense).lower(s.q).compile()(s.w)


@row("build a value from tracers", error=(TypeError, "from_components"))
def _(s: Any) -> Any:
    return s.jit(lambda c, k: s.dense(s.build(c, k)))(s.codes(s.q), s.steps(s.q))


@row("build a value from tracers, under grad", error=(TypeError, "from_components"))
def _(s: Any) -> Any:
    return jax.grad(lambda k: jnp.sum(s.dense(s.build(s.codes(s.q), k))))(s.steps(s.q))


@row("build a value from tracers, under vmap", error=(TypeError, "from_components"))
def _(s: Any) -> Any:
    return jax.vmap(lambda c, k: s.dense(s.build(c, k)))(s.codes(s.q), s.steps(s.q))


@row("the type of a value built from tracers", error=(TypeError, "from_components"))
def _(s: Any) -> Any:
    return s.jit(lambda c, k: jnp.zeros(jax.typeof(s.build(c, k)).shape))(s.codes(s.q), s.steps(s.q))
