"""scan, map, loops and branches, eagerly and under jit; selections, barriers, callbacks, solvers."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from _matrix import row
from _matrix.sides import XS, X


def double(s: Any) -> Any:
    return lambda q: s.quantize(s.dense(q) * 2)


def wide(s: Any) -> Any:
    return lambda q: s.quantize(s.dense(q).T)


def total(s: Any) -> Any:
    return lambda c, q: (c + jnp.sum(s.dense(q)), None)


def both(name: str, raw_jit: bool = True, raw_eager: bool = True, **how: Any) -> Any:
    """A row for the call as it is, and one for the call under jit."""

    def add(program: Any) -> None:
        def named(run: Any, f: Any) -> Any:
            f.__module__ = run.__module__
            return f

        row(f"{name} [eager]", red=not raw_eager, **how)(named(program, lambda s: program(s, lambda f: f)))
        row(f"{name} [jit]", red=not raw_jit, **how)(named(program, lambda s: program(s, s.jit)))

    return add


# --- scan and loops


@both("scan, hi carry, inputs and outputs")
def _(s: Any, jit: Any) -> Any:
    step = lambda c, x: (s.quantize(s.dense(c) + x["x"]), s.quantize(2 * x["x"] + s.dense(x["q"])))
    c, ys = jit(lambda c, xs: s.scan(step, c, xs))(s.q, {"x": XS, "q": s.stack})
    return s.dense(c), s.dense(ys)


@both("scan, length given, reverse, unroll")
def _(s: Any, jit: Any) -> Any:
    return jit(lambda q: s.scan(total(s), 0.0, q, length=4, reverse=True, unroll=2)[0])(s.stack)


@both("scan of hi inputs without length", raw_jit=False, raw_eager=False)
def _(s: Any, jit: Any) -> Any:
    return jit(lambda q: s.scan(total(s), 0.0, q)[0])(s.stack)


@both("scan of a wrong length", False, False, error=(TypeError | ValueError, "length|size|is 4"))
def _(s: Any, jit: Any) -> Any:
    return jit(lambda q: s.scan(total(s), 0.0, q, length=7)[0])(s.stack)


@both("scan whose carry changes type", False, False, error=(TypeError, r"q8\[3,2\]"))
def _(s: Any, jit: Any) -> Any:
    return jit(lambda q: s.scan(lambda c, _: (wide(s)(c), None), q, None, length=2)[0])(s.q)


@both("scan under disable_jit", raw_jit=False, raw_eager=False)
def _(s: Any, jit: Any) -> Any:
    with jax.disable_jit():
        return jit(lambda q: s.scan(total(s), 0.0, q, length=4)[0])(s.stack)


@both("fori_loop and while_loop, hi carry")
def _(s: Any, jit: Any) -> Any:
    f = lambda q: s.fori_loop(0, 3, lambda i, q: double(s)(q), q)
    g = lambda q: s.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, double(s)(c[1])), (0, q))[1]
    return s.dense(jit(f)(s.q)), s.dense(jit(g)(s.q))


@both("map over values", raw_jit=False, raw_eager=False)
def _(s: Any, jit: Any) -> Any:
    return jit(lambda q: s.map(s.dense, q))(s.stack), s.dense(jit(lambda q: s.map(double(s), q))(s.stack))


@both("map with batch_size, hi result", raw_jit=False, raw_eager=False)
def _(s: Any, jit: Any) -> Any:
    return s.dense(jit(lambda x: s.map(s.quantize, x, batch_size=2))(XS))


@both("associative_scan of values", raw_jit=False, raw_eager=False)
def _(s: Any, jit: Any) -> Any:
    combine = lambda a, b: s.quantize(jnp.maximum(s.dense(a), s.dense(b)))  # acts on stacks of values
    return s.dense(jit(lambda q: s.associative_scan(combine, q))(s.stack))


# --- branches


@both("cond, hi operand, array result")
def _(s: Any, jit: Any) -> Any:
    f = jit(lambda p, q: s.cond(p, s.dense, lambda q: -s.dense(q), q))
    return f(True, s.q), f(False, s.q)


@both("cond, hi result", raw_jit=False)
def _(s: Any, jit: Any) -> Any:
    f = jit(lambda p, x: s.cond(p, s.quantize, lambda x: s.quantize(2 * x), x))
    return s.dense(f(True, X)), s.dense(f(False, X))


@both("cond hands a value through", raw_jit=False)
def _(s: Any, jit: Any) -> Any:
    f = jit(lambda p, q: s.cond(p, lambda q: q, double(s), q))
    return s.dense(f(True, s.q)), s.dense(f(False, s.q))


@both("switch, hi result", raw_jit=False)
def _(s: Any, jit: Any) -> Any:
    f = jit(lambda i, q: s.switch(i, [lambda q: q, double(s), lambda q: double(s)(double(s)(q))], q))
    return [s.dense(f(i, s.q)) for i in range(3)]


@both("cond whose branches differ in type", False, False, error=(TypeError, r"q8\[3,2\]"))
def _(s: Any, jit: Any) -> Any:
    return jit(lambda p, q: s.cond(p, lambda q: q, wide(s), q))(True, s.q)


@row("eval_shape of cond with a hi result", want=lambda: "q8[2,3]")
def _(s: Any) -> Any:
    out = s.jit(lambda p, q: s.cond(p, lambda q: q, double(s), q)).trace(True, s.q)
    return jax.eval_shape(lambda p, q: s.cond(p, lambda q: q, double(s), q), True, s.q) and out.jaxpr.out_avals[0]


# --- selection, barriers


@row("select between values")
def _(s: Any) -> Any:
    if s.name == "typax":  # the predicate of a selection is one for each value: where
        return [s.dense(s.where(jnp.array(p), s.q, double(s)(s.q))) for p in (True, False)]
    pick = lambda p: s.select(jnp.full((2, 3), p) if s.is_plain else jnp.array(p), s.q, double(s)(s.q))
    return [s.dense(pick(p)) for p in (True, False)]


MASK = jnp.array([True, False, True, False])[:, None, None]


@row("where, a mask of the batch axes")
def _(s: Any) -> Any:
    return s.dense(s.where(MASK, s.stack, s.quantize(-XS)))


@row("grad of where of values")
def _(s: Any) -> Any:
    return s.grad(lambda a, b: jnp.sum(s.dense(s.where(MASK, a, b)) ** 2), (0, 1))(s.stack, s.quantize(-XS))


@both("optimization_barrier", raw_jit=False, raw_eager=False)
def _(s: Any, jit: Any) -> Any:
    return s.dense(jit(lambda q: s.optimization_barrier(q))(s.q))


# --- the host


def _on_host(s: Any) -> Any:
    """What makes a value dense in a callback."""
    if s.is_plain:
        return lambda q: np.asarray(q)
    return lambda q: np.asarray(s.codes(q)) * np.asarray(s.steps(q))[..., None]


def _through_host(s: Any, callback: Any) -> Any:
    """What a callback makes dense."""
    return s.jit(lambda q: callback(_on_host(s), jax.ShapeDtypeStruct((2, 3), jnp.float32), q))(s.q)


@row("pure_callback with a hi argument")
def _(s: Any) -> Any:
    return _through_host(s, s.pure_callback)


@row("io_callback with a hi argument")
def _(s: Any) -> Any:
    return _through_host(s, s.io_callback)


def printed(call: Any) -> str:
    """What a call prints."""
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        call()
        jax.effects_barrier()
    sys.stdout.flush()
    return text.getvalue()


@both("debug.print of a value", raw_jit=False, raw_eager=False, want=lambda: "True True")
def _(s: Any, jit: Any) -> Any:
    text = printed(lambda: jit(lambda q: s.debug_print("value {q}", q=q))(s.q))
    return f"{text.startswith('value ')} {'-106' in text and '127' in text}"


@row("debug.callback with a value under jit")
def _(s: Any) -> Any:
    seen = []
    host = _on_host(s)
    s.jit(lambda q: s.debug_callback(lambda q: seen.append(host(q)), q))(s.q)
    jax.effects_barrier()
    return jnp.asarray(seen[0])


# --- solvers


@row("custom_root and custom_linear_solve, a value closed over")
def _(s: Any) -> Any:
    eye = s.quantize(jnp.diag(jnp.array([2.0, 4.0])))
    mv = lambda x: s.matmul(x[None], eye)[0]
    solve = lambda mv, b: b / mv(jnp.ones(2))
    x = s.jit(lambda b: lax.custom_linear_solve(mv, b, solve, symmetric=True))(jnp.array([1.0, 2.0]))
    root = lambda b: lax.custom_root(
        lambda x: mv(x) - b, jnp.zeros(2), lambda f, x: b / mv(jnp.ones(2)), lambda g, y: y / g(jnp.ones(2))
    )
    return x, s.jit(root)(jnp.array([1.0, 2.0])), s.grad(lambda b: jnp.sum(root(b)))(jnp.array([1.0, 2.0]))
