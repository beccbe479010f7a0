"""The three sides of the matrix: what a row's names mean on each.

s.quantize(x)  s.dense(q)  s.matmul(x, q)   the ops; vjp rules alone on the raw side
s.jvp_dense(q)                               on the raw side an op with a jvp rule alone
s.plain_op(q)                                on the raw side an op without a rule for vmap
s.self_quantize(x)  s.self_dense(q)          a type whose tangents are of the type itself
s.outer(u, v)  s.outer_dense(w)              two vectors;  s.pair(a, b)  s.part(t, i): a tuple
s.axis  s.P("i")  s.q  s.w  s.stack          how values are mapped and partitioned; examples
s.jit  s.vmap  s.scan  s.device_put ...      the functions of `FUNCTIONS`
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

X = jnp.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]])
W = jnp.arange(12.0).reshape(3, 4) / 12
XS = jnp.stack([X, 2 * X, X - 1, 1.5 - X])
ROWS8 = jnp.arange(24.0).reshape(8, 3) - 7

FUNCTIONS: dict[str, Any] = {
    **{f.__name__: f for f in (jax.jit, jax.vmap, jax.grad, jax.jacrev, jax.jacfwd, jax.hessian, jax.checkpoint)},
    **{f.__name__: f for f in (jax.jvp, jax.vjp, jax.linearize, jax.value_and_grad, jax.device_put)},
    **{f.__name__: f for f in (jax.block_until_ready, jax.shard_map, jax.pure_callback, jax.linear_transpose)},
    **{f.__name__: f for f in (lax.scan, lax.map, lax.cond, lax.switch, lax.while_loop, lax.fori_loop)},
    **{f.__name__: f for f in (lax.associative_scan, lax.all_gather, lax.ppermute, lax.all_to_all, lax.psum)},
    **{f.__name__: f for f in (lax.with_sharding_constraint, lax.stop_gradient, lax.optimization_barrier)},
    **{f.__name__: f for f in (jnp.concatenate, jnp.where, jnp.take)},
    "stack_values": jnp.stack,
    "io_callback": io_callback,
    "reshard": jax.sharding.reshard,
    "select": lax.select,
    "debug_print": jax.debug.print,
    "debug_callback": jax.debug.callback,
    "checkpoint_name": checkpoint_name,
}


def fake(x: Any) -> Any:
    """What int8 codes with one step for each row stand for, with the straight-through gradient."""
    step = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=-1, keepdims=True) / 127
    return x + lax.stop_gradient(jnp.round(x / step) * step - x)


class Side:
    """A name, the functions of JAX, and what is given."""

    def __init__(self, name: str, functions: Any, **given: Any) -> None:
        self.name = name
        self.__dict__.update(FUNCTIONS | functions | given)
        self.x, self.q, self.w, self.stack = X, self.quantize(X), self.quantize(W), self.quantize(XS)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the side {self.name} has no {name}")

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"


def plain() -> Side:
    same = lambda x: x
    ops = {"quantize": fake, "dense": same, "matmul": jnp.matmul, "jvp_dense": same, "plain_op": lambda q: q * 2}
    own = {"self_quantize": fake, "self_dense": same, "step": lambda x, g, rate: fake(x - rate * g)}
    outer = {"outer": jnp.outer, "outer_dense": same}
    outer |= {"factored": lambda u, v: (u, v), "factored_dense": lambda w: jnp.outer(*w), "opened": same}
    pairs = {"pair": lambda *xs: tuple(xs), "part": lambda t, i: t[i], "pair_axes": lambda *axes: axes}
    more = {"dense_of": same, "typeof": jax.typeof, "axis": 0, "P": jax.P, "Q": jax.Array}
    return Side("plain", {}, **ops, **own, **outer, **pairs, **more)


def raw() -> Side:
    from _matrix import by_hand as h

    ops = {"quantize": h.encode, "dense": h.decode, "matmul": h.product, "jvp_dense": h.jvp_decode, "plain_op": h.no_batch}
    own = {"self_quantize": h.self_encode, "self_dense": h.self_decode}
    own["step"] = lambda q, g, rate: jax.tree.map(lambda q, g: q - rate * g, q, g)
    outer = {"outer": h.outer, "outer_dense": h.outer_dense}
    outer |= {"factored": h.outer, "factored_dense": h.outer_dense, "opened": h.factors}
    pairs = {"pair": h.pair, "part": lambda t, i: h.part(t, i=i), "pair_axes": lambda *axes: h.PairSpec(axes)}
    more = {"axis": h.Lead(), "P": lambda *parts: h.CodesP(jax.P(*parts)), "Q": h.Codes, "typeof": jax.typeof}
    parts = {"codes": lambda q: q.code, "steps": lambda q: q.step, "build": h.Codes, "components": ("code", "step")}
    return Side("raw", {}, **ops, **own, **outer, **pairs, **more, **parts)


def typax_() -> Side:
    import typax
    from _matrix import declared as d

    ops = {"quantize": typax.quantize, "dense": typax.dense, "matmul": typax.matmul, "jvp_dense": typax.dense}
    own = {"self_quantize": d.self_quantize, "self_dense": typax.dense, "plain_op": d.twice}
    own["step"] = lambda q, g, rate: typax.retract(q, d.self_quantize(-rate * typax.dense(g)))
    outer = {"outer": typax.outer, "outer_dense": typax.dense}
    outer |= {"factored": d.factored, "factored_dense": typax.dense, "opened": d.opened}
    pairs = {"pair": typax.tup, "part": lambda t, i: t[i], "pair_axes": typax.Axes}
    more = {"axis": 0, "P": typax.QArray.P, "Q": typax.QArray, "typeof": jax.typeof}
    parts = {
        "codes": lambda q: q.qvalue,
        "steps": lambda q: q.scale,
        "build": typax.QArray,
        "components": ("qvalue", "scale"),
    }
    functions = {name: getattr(typax, name) for name in FUNCTIONS if hasattr(typax, name)}
    functions |= {"stack_values": typax.stack}
    functions |= {"debug_print": typax.debug.print, "debug_callback": typax.debug.callback}
    return Side("typax", functions, **ops, **own, **outer, **pairs, **more, **parts)


SIDES = {"plain": plain, "raw": raw, "typax": typax_}


def mesh(explicit: bool = True, n: int = 4, name: str = "i") -> Any:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh((n,), (name,), axis_types=(kind,))


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-6))


__all__ = ["ROWS8", "SIDES", "XS", "Side", "SimpleNamespace", "W", "X", "close", "fake", "mesh"]
