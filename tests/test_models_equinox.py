"""Models made of Equinox's own layers with int8 weights: one line puts them in, `lift` runs them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _models import as_dense, near, products, same
from jax import lax

import typax
from typax import lift, quantize_tree

eqx = pytest.importorskip("equinox")

import equinox.internal as internal  # noqa: E402

import typax.equinox as teqx  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")

VOCABULARY, WIDTH, HEADS = 16, 8, 2
TOKENS = jnp.array([[1, 2, 3], [5, 6, 7]])
KEYS = jax.random.split(jax.random.key(0), 8)


class Block(eqx.Module):
    attention: Any
    norms: Any
    up: Any
    down: Any
    drop: Any

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=a)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.up, self.down = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=b), eqx.nn.Linear(2 * WIDTH, WIDTH, key=c)
        self.drop = eqx.nn.Dropout(0.1, inference=True)

    def __call__(self, x):
        y, mask = jax.vmap(self.norms[0])(x), jnp.tril(jnp.ones((x.shape[0],) * 2, bool))
        x = x + self.attention(y, y, y, mask=mask)
        return x + self.drop(jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norms[1](y)))))(x))


class Transformer(eqx.Module):
    embed: Any
    blocks: Any
    mix: Any
    head: Any

    def __init__(self) -> None:
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=KEYS[0])
        self.blocks = [Block(k) for k in KEYS[1:2]]
        self.mix = eqx.nn.Conv2d(1, 2, 3, padding=1, key=KEYS[6])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=KEYS[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x + self.mix(x[None]).mean(0))


def arrays_first(f: Any, model: Any) -> tuple[Any, Any]:
    """``f`` as a function of the arrays and values of ``model``, and these: what `jax.jit` takes."""
    moving, still = eqx.partition(model, teqx.is_array)
    return lambda moving, *args: f(eqx.combine(moving, still), *args), moving


def test_a_transformer():
    model = Transformer()
    small, report = quantize_tree(model, [("*.bias", None), ("*", "int8")])
    assert len(report.changed) == 9 and type(small.blocks[0].up.weight) is typax.QArray
    run = lambda model, tokens: jax.vmap(model)(tokens)
    receipt, want = same(*arrays_first(run, small), TOKENS)
    assert products(receipt) == 8
    lifted = lift(run, "error")  # numbers and bools in modules, as of Dropout, are static
    near(jax.jit(lift(small.head))(jnp.ones(WIDTH)), as_dense(small).head(jnp.ones(WIDTH)), 1e-5)  # a model is a function
    loss = lambda model: (jnp.mean((y := lifted(model, TOKENS)) ** 2), y)
    grads, got = teqx.filter_jit(teqx.filter_grad(loss, has_aux=True))(small)
    near(got, want, 2e-5)
    assert grads.head.weight.shape == small.head.weight.shape and bool(jnp.any(grads.head.weight != 0))
    assert grads.blocks[0].drop.p is None


def test_other_layers():
    x = jax.random.normal(KEYS[4], (2, 3, WIDTH))
    twice = lambda m, x: jax.vmap(jax.vmap(m))(x)
    members = eqx.filter_vmap(lambda k: eqx.nn.Linear(WIDTH, WIDTH, key=k))(KEYS[:3])

    def checkpointed(layer, x):
        body = lambda c: (c[0] + 1, jnp.tanh(twice(layer, c[1])))
        return internal.while_loop(lambda c: c[0] < 3, body, (0, x), kind="checkpointed", max_steps=4)[1]

    programs: dict[str, tuple[Any, Any]] = {
        "an ensemble": (members, lambda m, x: eqx.filter_vmap(lambda m: twice(m, x))(m)),
        "layers that are scanned": (members, lambda m, x: lax.scan(lambda h, m: (jnp.tanh(twice(m, h)), None), x, m)[0]),
        "filter_jit and filter_checkpoint": (
            eqx.nn.MLP(WIDTH, 4, 6, 1, key=KEYS[0]),
            lambda m, x: eqx.filter_jit(eqx.filter_checkpoint(twice))(m, x),
        ),
        "a loop that can be differentiated": (eqx.nn.Linear(WIDTH, WIDTH, key=KEYS[0]), checkpointed),
    }
    for model, f in programs.values():
        small, report = quantize_tree(model, [("*.bias", None), ("*", "int8")])
        assert report.changed
        same(*arrays_first(f, small), x)
