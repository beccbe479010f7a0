"""Real libraries: optax, Equinox, Flax NNX and Linen, Orbax."""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from _matrix import need, row
from _matrix.sides import W, X


def params(s: Any) -> Any:
    return {"q": s.w, "b": jnp.ones(4)}


def loss(s: Any, p: Any) -> Any:
    return jnp.sum(jnp.sin(s.matmul(X, p["q"]) + p["b"]))


def opened(s: Any, p: Any) -> Any:
    """A tree of parameters as arrays."""
    return jax.tree.map(lambda x: s.dense(x) if isinstance(x, s.Q) and not s.is_plain else x, p)


def trained(s: Any, transform: Any) -> Any:
    """Two steps of an optimizer."""
    p = params(s)
    state = s.init(transform, p)
    for _ in range(2):
        g = jax.grad(lambda p: loss(s, p))(p)
        p, state = s.stepped(transform, p, g, state)
    return opened(s, p)


@row("optax.adam")
def _(s: Any) -> Any:
    return trained(s, need("optax").adam(0.1))


@row("optax.sgd and apply_updates")
def _(s: Any) -> Any:
    return trained(s, need("optax").sgd(0.1))


@row("optax.adamw, which reads the parameters")
def _(s: Any) -> Any:
    return trained(s, need("optax").adamw(0.1, weight_decay=0.3))


@row("optax.tree zeros_like of the parameters")
def _(s: Any) -> Any:
    zeros = s.zeros(params(s))
    return opened(s, zeros)


@row("optax.masked and frozen parameters")
def _(s: Any) -> Any:
    optax = need("optax")
    labels = {"q": "frozen", "b": "trained"}
    return trained(s, optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels))


@row("equinox.filter_jit")
def _(s: Any) -> Any:
    eqx = need("equinox")
    traced = []
    f = s.filter_jit(lambda t: traced.append(0) or s.matmul(X, t["q"]) + t["k"])
    del eqx
    return f({"q": s.w, "k": 2}), f({"q": s.quantize(2 * W), "k": 2}), jnp.array(len(traced))


@row("equinox.filter_grad")
def _(s: Any) -> Any:
    need("equinox")
    return s.filter_grad(lambda p: loss(s, p))(params(s))


@row("equinox.apply_updates")
def _(s: Any) -> Any:
    need("equinox")
    p = params(s)
    g = jax.grad(lambda p: loss(s, p))(p)
    return opened(s, s.eqx_apply_updates(p, jax.tree.map(lambda g: -0.1 * g, g)))


@row("flax nnx.Optimizer")
def _(s: Any) -> Any:
    nnx, optax = need("flax.nnx"), need("optax")

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.q, self.b = nnx.Param(s.w), nnx.Param(jnp.ones(4))

    model = Model()
    return s.nnx_trained(nnx, optax.adam(0.1), model, lambda m: loss(s, {"q": m.q[...], "b": m.b[...]}))


@row("flax nnx.jit, split and merge")
def _(s: Any) -> Any:
    nnx = need("flax.nnx")

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.q = nnx.Param(s.w)

    graph, state = nnx.split(Model())
    model = nnx.merge(graph, state)
    return nnx.jit(lambda m, x: s.matmul(x, m.q[...]))(model, X)


@row("flax linen apply")
def _(s: Any) -> Any:
    linen = need("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return s.matmul(x, self.param("q", lambda _: s.w))

    return Layer().apply({"params": {"q": s.w}}, X)


@row("orbax StandardCheckpointer")
def _(s: Any) -> Any:
    ocp = need("orbax.checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        return opened(s, s.orbax(ocp, ocp.StandardCheckpointer(), folder, params(s)))


@row("orbax PyTreeCheckpointer")
def _(s: Any) -> Any:
    ocp = need("orbax.checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        return opened(s, s.orbax(ocp, ocp.PyTreeCheckpointer(), folder, params(s)))


@row("flax.serialization.to_bytes")
def _(s: Any) -> Any:
    serialization = need("flax.serialization")
    return opened(s, s.flax_bytes(serialization, params(s)))
