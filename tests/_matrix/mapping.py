"""vmap: along which axis, what is not mapped, under and over the other transformations."""

from typing import Any

import jax
import jax.numpy as jnp

from _matrix import row, works_raw
from _matrix.sides import XS, W, X

P4 = jnp.array([True, False, True, True])


def double(s: Any) -> Any:
    return lambda q: s.quantize(s.dense(q) * 2)


def hi(s: Any, f: Any, **how: Any) -> Any:
    """vmap of a function with one hi operand, as raw JAX wants it."""
    return s.vmap(f, in_axes=s.axis, axis_size=4, **how)


# --- a spec, and the size


@works_raw("hi argument, a spec and axis_size")
def _(s: Any) -> Any:
    return hi(s, s.dense)(s.stack)


@works_raw("hi result, a spec")
def _(s: Any) -> Any:
    return s.dense(s.vmap(s.quantize, out_axes=s.axis)(XS))


@works_raw("an array and a value, both mapped")
def _(s: Any) -> Any:
    return s.vmap(lambda x, q: x + s.dense(q), in_axes=(0, s.axis))(XS, s.stack)


@works_raw("a value closed over, a value not mapped")
def _(s: Any) -> Any:
    return s.vmap(lambda x: s.matmul(x, s.w))(XS), s.vmap(s.matmul, in_axes=(0, None))(XS, s.w)


@works_raw("nested")
def _(s: Any) -> Any:
    f = s.vmap(lambda x: hi(s, lambda q: x + s.dense(q))(s.stack))
    return f(jnp.arange(3.0))


@works_raw("of jit and of grad, under jit")
def _(s: Any) -> Any:
    g = s.grad(lambda q: jnp.sum(jnp.sin(s.dense(q))))
    return hi(s, s.jit(s.dense))(s.stack), s.jit(hi(s, g))(s.stack)


@works_raw("grad of vmap")
def _(s: Any) -> Any:
    return s.grad(lambda q: jnp.sum(jnp.sin(hi(s, s.dense)(q))))(s.stack)


@row("hi result, out_axes=0 by default")
def _(s: Any) -> Any:
    return s.dense(s.vmap(s.quantize)(XS))


@row("hi argument without axis_size")
def _(s: Any) -> Any:
    return s.vmap(s.dense, in_axes=s.axis)(s.stack)


@row("hi argument, in_axes=0")
def _(s: Any) -> Any:
    return s.vmap(s.dense, in_axes=0)(s.stack)


@row("a dict with hi leaves, in_axes=0")
def _(s: Any) -> Any:
    return s.vmap(lambda t: t["x"] + s.dense(t["q"]), in_axes=0)({"x": XS, "q": s.stack})


@row("hi argument and result along axis 1")
def _(s: Any) -> Any:
    return s.dense(s.vmap(double(s), in_axes=1, out_axes=1)(s.stack))


@row("hi result that is not mapped: a spec broadcasts it")
def _(s: Any) -> Any:
    return s.dense(s.vmap(lambda x: s.q, out_axes=s.axis)(jnp.zeros(4)))


@row("a value closed over is the result: a spec broadcasts it")
def _(s: Any) -> Any:
    f = s.vmap(lambda q: (s.dense(q), s.q), in_axes=s.axis, axis_size=4, out_axes=(0, s.axis))
    y, q = f(s.stack)
    return y, s.dense(q)


@row("hi result not mapped, out_axes=None")
def _(s: Any) -> Any:
    return s.dense(s.vmap(lambda x: s.q, out_axes=None)(jnp.zeros(4)))


@row("wrong axis_size", error=(TypeError | ValueError, "axis_size|size 4|size 3|is 4|4, not 3"))
def _(s: Any) -> Any:
    return s.vmap(s.dense, in_axes=s.axis, axis_size=3)(s.stack)


@row("mapped hi result, out_axes=None", error=(TypeError | ValueError, "None"))
def _(s: Any) -> Any:
    return s.vmap(s.quantize, out_axes=None)(XS)


@row("along an axis that is no batch axis", error=(TypeError, "only batch axes"))
def _(s: Any) -> Any:
    return s.vmap(s.dense, in_axes=2)(s.stack)


# --- over control flow


@row("of scan, hi carry")
def _(s: Any) -> Any:
    f = lambda q, xs: s.scan(lambda c, x: (s.quantize(s.dense(c) + x), None), q, xs)[0]
    return s.dense(s.vmap(f, in_axes=(s.axis, None), out_axes=s.axis)(s.stack, jnp.arange(1.0, 3)))


@row("of scan, hi carry that starts unmapped")
def _(s: Any) -> Any:
    f = lambda xs: s.scan(lambda c, x: (s.quantize(s.dense(c) + x), None), s.q, xs)[0]
    return s.dense(s.vmap(f, out_axes=s.axis)(jnp.arange(8.0).reshape(4, 2)))


@row("of scan, hi inputs")
def _(s: Any) -> Any:
    stack2 = s.quantize(jnp.stack([XS, XS + 1]))
    f = lambda qs: s.scan(lambda c, q: (c + s.dense(q), jnp.sum(s.dense(q))), jnp.zeros((2, 3)), qs, length=4)
    return s.vmap(f, in_axes=s.axis, axis_size=2)(stack2)


@row("of scan, hi outputs")
def _(s: Any) -> Any:
    f = lambda xs: s.scan(lambda c, x: (c, s.quantize(x)), 0.0, xs)[1]
    return s.dense(s.vmap(f, out_axes=s.axis)(jnp.stack([XS, XS + 1])))


@row("of cond under jit, hi operand and result, predicate mapped")
def _(s: Any) -> Any:
    f = lambda p, q: s.cond(p, double(s), lambda q: q, q)
    return s.dense(s.jit(s.vmap(f, in_axes=(0, s.axis), out_axes=s.axis))(P4, s.stack))


@row("of cond, hi operand and result, predicate not mapped")
def _(s: Any) -> Any:
    f = lambda p, q: s.cond(p, double(s), lambda q: q, q)
    return s.dense(s.vmap(f, in_axes=(None, s.axis), out_axes=s.axis, axis_size=4)(True, s.stack))


@row("of cond, hi operand, predicate mapped, array result")
def _(s: Any) -> Any:
    f = lambda p, q: s.cond(p, s.dense, lambda q: -s.dense(q), q)
    return s.vmap(f, in_axes=(0, s.axis))(P4, s.stack)


@row("of while_loop, hi carry")
def _(s: Any) -> Any:
    def f(q):
        return s.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, double(s)(c[1])), (0, q))[1]

    return s.dense(s.vmap(f, in_axes=s.axis, out_axes=s.axis, axis_size=4)(s.stack))


@row("of while_loop, hi carry, predicate mapped")
def _(s: Any) -> Any:
    def f(n, q):
        return s.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, double(s)(c[1])), (0, q))[1]

    return s.dense(s.vmap(f, in_axes=(0, s.axis), out_axes=s.axis)(jnp.arange(4), s.stack))


@row("grad of vmap of cond, predicate mapped")
def _(s: Any) -> Any:
    f = lambda p, q: s.cond(p, double(s), lambda q: q, q)
    g = lambda q: jnp.sum(s.dense(s.vmap(f, in_axes=(0, s.axis), out_axes=s.axis)(P4, q)) ** 2)
    return s.grad(g)(s.stack)


# --- collectives of a mapped axis, ops without a rule


@row("psum of a value", limit=(TypeError | NotImplementedError, r"psum\(.*dense"))
def _(s: Any) -> Any:
    f = lambda q: s.psum(q, "b")
    return s.dense(s.vmap(f, in_axes=s.axis, axis_size=4, axis_name="b", out_axes=None)(s.stack))


@row("all_gather of a value")
def _(s: Any) -> Any:
    f = lambda q: s.dense(s.all_gather(q, "b"))
    return s.vmap(f, in_axes=s.axis, axis_size=4, axis_name="b")(s.stack)


@row("op without a batch rule")
def _(s: Any) -> Any:
    return hi(s, s.plain_op)(s.stack)


@row("op without a batch rule, nothing mapped")
def _(s: Any) -> Any:
    return s.vmap(lambda x: x + s.plain_op(s.q))(XS)


@row("op without a batch rule, jit under vmap, nothing mapped")
def _(s: Any) -> Any:
    return s.vmap(lambda x: x + s.jit(s.plain_op)(s.q))(XS)


@row("op whose batch rule is derived from what it does, grad under jit")
def _(s: Any) -> Any:
    f = s.vmap(lambda q: jnp.sum(s.plain_op(q) ** 2), in_axes=s.axis, axis_size=4)
    return s.jit(f)(s.stack), s.jit(s.grad(lambda q: jnp.sum(f(q))))(s.stack)


@row("op with two operands, every mix of mapped ones")
def _(s: Any) -> Any:
    ws = s.quantize(jnp.stack([W, W + 1, W - 1, 2 * W]))
    both = s.vmap(s.matmul, in_axes=(0, s.axis))(XS, ws)
    one = s.vmap(s.matmul, in_axes=(None, s.axis), axis_size=4)(X, ws)
    return both, one, s.vmap(lambda x, w: s.matmul(x, w), in_axes=(1, None), out_axes=1)(jnp.moveaxis(XS, 0, 1), s.w)


@works_raw("vmap of value_and_grad, a value closed over")
def _(s: Any) -> Any:
    return jax.vmap(s.value_and_grad(lambda x: jnp.sum(jnp.sin(s.matmul(x, s.w)))))(XS)
