"""Real libraries: optax, Equinox, Flax NNX and Linen, Orbax. How each is called on a side is said in `on_libraries`."""

import tempfile
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from _matrix import need, row
from _matrix.sides import W, X, fake


def params(s: Any) -> Any:
    return {"q": s.w, "b": jnp.ones(4)}


def loss(s: Any, p: Any) -> Any:
    return jnp.sum(jnp.sin(s.matmul(X, p["q"]) + p["b"]))


def opened(s: Any, p: Any) -> Any:
    """A tree of parameters as arrays."""
    return jax.tree.map(lambda x: s.dense(x) if isinstance(x, s.Q) and not s.is_plain else jnp.asarray(x), p)


def on_libraries(s: Any) -> Any:
    """What a side writes where a library meets its values: the library's own, or what typax has for it."""
    if s.name == "typax":
        import typax

        return SimpleNamespace(
            optimizer=typax.optimizer,
            zeros=typax.tangent_zeros,
            apply=typax.apply_updates,
            eqx=lambda: need("typax.equinox"),
            nnx=lambda: need("typax.flax"),
            orbax=lambda: need("typax.io.orbax"),
        )
    optax = need("optax")

    def apply(p: Any, updates: Any) -> Any:
        p = optax.apply_updates(p, updates)
        return p | {"q": fake(p["q"])} if s.is_plain else p  # a step ends on the grid

    return SimpleNamespace(optimizer=lambda tx: tx, zeros=optax.tree.zeros_like, apply=apply, eqx=lambda: need("equinox"))


def trained(s: Any, transform: Any) -> Any:
    """Two steps of an optimizer."""
    lib, p = on_libraries(s), params(s)
    tx = lib.optimizer(transform)
    state = tx.init(p)
    for _ in range(2):
        g = jax.grad(lambda p: loss(s, p))(p)
        updates, state = tx.update(g, state, p)
        p = lib.apply(p, updates)
    return opened(s, p)


@row("optax.adam, init")
def _(s: Any) -> Any:
    tx = on_libraries(s).optimizer(need("optax").adam(0.1))
    return [x for x in jax.tree.leaves(tx.init(params(s))) if jnp.ndim(x)]


@row("optax.adam, two steps")
def _(s: Any) -> Any:
    return trained(s, need("optax").adam(0.1))


@row("optax.apply_updates")
def _(s: Any) -> Any:
    p = params(s)
    updates = jax.tree.map(lambda g: -0.1 * g, jax.grad(lambda p: loss(s, p))(p))
    need("optax")
    return opened(s, on_libraries(s).apply(p, updates))


@row("optax.adamw, which reads the parameters")
def _(s: Any) -> Any:
    return trained(s, need("optax").adamw(0.1, weight_decay=0.3))


@row("optax.tree.zeros_like of the parameters")
def _(s: Any) -> Any:
    need("optax")
    return opened(s, on_libraries(s).zeros(params(s)))


@row("optax.masked, a frozen value")
def _(s: Any) -> Any:
    optax = need("optax")
    labels = {"q": "frozen", "b": "trained"}
    return trained(s, optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels))


@row("equinox.filter_jit")
def _(s: Any) -> Any:
    need("equinox")
    return on_libraries(s).eqx().filter_jit(lambda t: s.matmul(X, t["q"]) + t["k"])({"q": s.w, "k": 2})


@row("equinox.filter_jit, another value: not traced again")
def _(s: Any) -> Any:
    need("equinox")
    traced = []
    f = on_libraries(s).eqx().filter_jit(lambda t: traced.append(0) or s.matmul(X, t["q"]))
    return f({"q": s.w}), f({"q": s.quantize(2 * W)}), jnp.array(len(traced))


@row("equinox.filter_grad")
def _(s: Any) -> Any:
    need("equinox")
    return on_libraries(s).eqx().filter_grad(lambda p: loss(s, p))(params(s))


@row("equinox.apply_updates")
def _(s: Any) -> Any:
    need("equinox")
    p = params(s)
    g = jax.grad(lambda p: loss(s, p))(p)
    p = on_libraries(s).eqx().apply_updates(p, jax.tree.map(lambda g: -0.1 * g, g))
    return opened(s, p | {"q": fake(p["q"])} if s.is_plain else p)


@row("flax nnx.Optimizer")
def _(s: Any) -> Any:
    nnx, optax = need("flax.nnx"), need("optax")

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.q, self.b = nnx.Param(s.w), nnx.Param(jnp.ones(4))

    model = Model()
    lib = on_libraries(s)
    make = lib.nnx().Optimizer if s.name == "typax" else nnx.Optimizer
    optimizer = make(model, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: loss(s, {"q": m.q[...], "b": m.b[...]}))(model))
    q = model.q[...]
    return (fake(q) if s.is_plain else s.dense(q)), model.b[...]


@row("flax nnx.jit, split and merge")
def _(s: Any) -> Any:
    nnx = need("flax.nnx")

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.q = nnx.Param(s.w)

    model = nnx.merge(*nnx.split(Model()))
    return nnx.jit(lambda m, x: s.matmul(x, m.q[...]))(model, X)


@row("flax linen apply")
def _(s: Any) -> Any:
    linen = need("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return s.matmul(x, self.param("q", lambda _: s.w))

    return Layer().apply({"params": {"q": s.w}}, X)


def kept(s: Any, make: str) -> Any:
    """A tree saved and restored."""
    ocp = need("orbax.checkpoint")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a refused save may still be writing
        if s.name == "typax":
            lib = on_libraries(s).orbax()
            lib.save(f"{folder}/tree", params(s))
            return opened(s, lib.load(f"{folder}/tree"))
        with getattr(ocp, make)() as checkpointer:
            checkpointer.save(f"{folder}/tree", params(s))
            if make == "StandardCheckpointer":
                checkpointer.wait_until_finished()
            return opened(s, checkpointer.restore(f"{folder}/tree"))


@row("orbax StandardCheckpointer: save and restore")
def _(s: Any) -> Any:
    return kept(s, "StandardCheckpointer")


@row("orbax PyTreeCheckpointer: save and restore")
def _(s: Any) -> Any:
    return kept(s, "PyTreeCheckpointer")


@row("flax.serialization.to_bytes")
def _(s: Any) -> Any:
    serialization = need("flax.serialization")
    if s.name == "typax":
        import typax.io

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a refused save may still be writing
            typax.io.save(f"{folder}/tree.safetensors", params(s))
            return opened(s, typax.io.load(f"{folder}/tree.safetensors"))
    return opened(s, serialization.from_bytes(params(s), serialization.to_bytes(params(s))))
