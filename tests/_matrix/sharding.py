"""Placement: on a mesh with explicit axes, where the sharding is part of a type, and on one with automatic axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from _matrix import row, works_raw
from _matrix.sides import ROWS8, XS, W, X, mesh


def explicit(name: str, red: bool = True, **how: Any) -> Any:
    """A row under a mesh with one explicit axis of four devices."""

    def add(program: Any) -> None:
        def run(s: Any) -> Any:
            with jax.set_mesh(mesh()):
                return program(s)

        run.__module__ = program.__module__
        row(f"explicit: {name}", red=red, **how)(run)

    return add


def auto(name: str, red: bool = True, **how: Any) -> Any:
    """A row with four devices on an automatic axis, and their mesh."""

    def add(program: Any) -> None:
        def run(s: Any) -> Any:
            with jax.set_mesh(m := mesh(explicit=False)):
                return program(s, m)

        run.__module__ = program.__module__
        row(f"auto: {name}", red=red, **how)(run)

    return add


def rows(s: Any) -> Any:
    return s.quantize(jax.device_put(ROWS8, jax.P("i")))


def seen(s: Any, q: Any) -> Any:
    """The numbers, and the type of what the value stands for, its sharding in it."""
    x = s.dense(q)
    return x, str(jax.typeof(x))


def placed(s: Any, q: Any) -> Any:
    """The numbers, and where they lie: in how many pieces of which shape."""
    x = q if s.is_plain else s.codes(q)
    return s.dense(q), jnp.array([len(x.addressable_shards), *x.addressable_shards[0].data.shape])


# --- explicit


@explicit("quantize, dense, products of rows and columns", red=False)
def _(s: Any) -> Any:
    columns = s.quantize(jax.device_put(W, jax.P(None, "i")))
    y = s.matmul(jnp.array(X), columns)
    return *seen(s, rows(s)), y, str(jax.typeof(y))


@explicit("grad of both operands", red=False)
def _(s: Any) -> Any:
    x = jax.device_put(ROWS8, jax.P("i"))
    out = {"out_sharding": jax.P("i", None)} if s.is_plain else {}
    gx, gw = s.grad(lambda x, w: jnp.sum(s.matmul(x, w, **out) ** 2), (0, 1))(x, s.w)
    if s.is_plain:  # plain JAX refuses to guess where the contraction over rows lands
        return gx, jax.grad(lambda w: jnp.sum((ROWS8 @ w) ** 2))(s.w)
    return gx, gw


@explicit("jit argument and result, vmap, scan of the stack", red=False)
def _(s: Any) -> Any:
    stack = s.quantize(jax.device_put(jnp.stack([ROWS8, -ROWS8]), jax.P(None, "i")))
    f = s.vmap(s.dense, in_axes=s.axis, axis_size=2)
    c, ys = s.scan(lambda c, q: (c + s.dense(q), s.dense(q)), jax.device_put(0 * ROWS8, jax.P("i")), stack, length=2)
    return f(stack), c, ys, *seen(s, s.jit(lambda q: q)(rows(s)))


@explicit("device_put(q, P)")
def _(s: Any) -> Any:
    return seen(s, s.device_put(s.quantize(ROWS8), jax.P("i")))


@explicit("device_put(q, NamedSharding)")
def _(s: Any) -> Any:
    return seen(s, s.device_put(s.quantize(ROWS8), NamedSharding(jax.sharding.get_mesh(), jax.P("i"))))


@explicit("device_put(q)")
def _(s: Any) -> Any:
    return seen(s, s.device_put(rows(s)))


@row("device_put(q, device)")
def _(s: Any) -> Any:
    q = s.device_put(s.q, jax.devices()[1])
    device = (q if s.is_plain else s.codes(q)).devices()
    return s.dense(q), jnp.array([d.id for d in device])


@explicit("device_put(q, a value of shardings)")
def _(s: Any) -> Any:
    ns = lambda *parts: NamedSharding(jax.sharding.get_mesh(), jax.P(*parts))
    given = ns("i") if s.is_plain else s.P("i") if s.name == "typax" else s.build(ns("i"), ns("i"))
    return seen(s, s.device_put(s.quantize(ROWS8), given))


@explicit("device_put under jit")
def _(s: Any) -> Any:
    return seen(s, s.jit(lambda q: s.device_put(q, jax.P("i")))(s.quantize(ROWS8)))


@explicit("grad of device_put")
def _(s: Any) -> Any:
    f = lambda q: jnp.sum(jnp.sin(s.dense(s.device_put(q, jax.P("i")))))
    return s.grad(f)(s.quantize(ROWS8))


@explicit("reshard(q, P)")
def _(s: Any) -> Any:
    return seen(s, s.reshard(s.quantize(ROWS8), jax.P("i"))), seen(s, s.reshard(rows(s), jax.P(None, None)))


@explicit("reshard(q, P) under jit, and its gradient")
def _(s: Any) -> Any:
    g = s.grad(lambda q: jnp.sum(jnp.sin(s.dense(s.reshard(q, jax.P("i"))))))
    return *seen(s, s.jit(lambda q: s.reshard(q, jax.P("i")))(s.quantize(ROWS8))), g(s.quantize(ROWS8))


@explicit("with_sharding_constraint under jit", limit=(TypeError, "assert|reshard"))
def _(s: Any) -> Any:
    constraint = s.reshard if s.is_plain else s.with_sharding_constraint  # for arrays too: an explicit axis is no constraint
    return seen(s, s.jit(lambda q: constraint(q, jax.P("i")))(s.quantize(ROWS8)))


@explicit("jit, in_shardings=P of a value")
def _(s: Any) -> Any:
    x = s.jit(s.dense, in_shardings=jax.P("i"))(rows(s))
    return x, str(jax.typeof(x))


@explicit("jit, out_shardings=P of a value")
def _(s: Any) -> Any:
    return seen(s, s.jit(lambda q: s.quantize(s.dense(q) * 2), out_shardings=jax.P("i"))(rows(s)))


@explicit("jit, in_shardings=NamedSharding of a value")
def _(s: Any) -> Any:
    ns = NamedSharding(jax.sharding.get_mesh(), jax.P("i"))
    x = s.jit(s.dense, in_shardings=ns)(rows(s))
    return x, str(jax.typeof(x))


@explicit("scan over a stack whose leading axis is partitioned", limit=(ValueError, r"typax\.reshard"))
def _(s: Any) -> Any:
    step = lambda c, q: (c + s.dense(q), s.dense(q))
    q = s.quantize(jax.device_put(XS, jax.P() if s.is_plain else jax.P("i")))  # JAX refuses it for arrays too
    return s.scan(step, jnp.zeros((2, 3)), q, length=4)


@explicit("a contraction over a partitioned axis", error=(TypeError, "contract|unsharded|whole|out_sharding"))
def _(s: Any) -> Any:
    return s.matmul(jax.device_put(jnp.ones((2, 8)), jax.P(None, "i")), rows(s))


@explicit("lower and compile on a partitioned value")
def _(s: Any) -> Any:
    return s.jit(lambda q: s.dense(q) * 2).lower(rows(s)).compile()(rows(s))


# --- auto


@auto("lower and compile on a partitioned value")
def _(s: Any, m: Any) -> Any:
    q = s.quantize(jax.device_put(ROWS8, NamedSharding(m, jax.P("i"))))
    return s.jit(lambda q: s.dense(q) * 2).lower(q).compile()(q)


@auto("jit argument and result, grad", red=False)
def _(s: Any, m: Any) -> Any:
    q = s.quantize(jax.device_put(ROWS8, NamedSharding(m, jax.P("i"))))
    return s.jit(s.dense)(q), s.jit(s.grad(lambda q: jnp.sum(jnp.sin(s.dense(q)))))(q), s.dense(s.jit(lambda q: q)(q))


@auto("jit, in_shardings=NamedSharding of a value")
def _(s: Any, m: Any) -> Any:
    ns = NamedSharding(m, jax.P("i"))
    return s.jit(lambda q: s.dense(q) * 2, in_shardings=ns)(s.quantize(jax.device_put(ROWS8, ns)))


@auto("jit, out_shardings=NamedSharding of a value")
def _(s: Any, m: Any) -> Any:
    return placed(s, s.jit(lambda x: s.quantize(x), out_shardings=NamedSharding(m, jax.P("i")))(ROWS8))


@auto("with_sharding_constraint under jit")
def _(s: Any, m: Any) -> Any:
    f = lambda q: s.with_sharding_constraint(q, NamedSharding(m, jax.P("i")))
    return placed(s, s.jit(f)(s.quantize(ROWS8)))


@auto("device_put(q, NamedSharding)")
def _(s: Any, m: Any) -> Any:
    return placed(s, s.device_put(s.quantize(ROWS8), NamedSharding(m, jax.P("i"))))


@works_raw("auto_axes with a value inside")
def _(s: Any) -> Any:
    with jax.set_mesh(mesh()):
        f = jax.sharding.auto_axes(lambda x: s.dense(s.quantize(x)) * 2, out_sharding=jax.P("i"))
        y = s.jit(f)(jax.device_put(ROWS8, jax.P("i")))
        return y, str(jax.typeof(y))
