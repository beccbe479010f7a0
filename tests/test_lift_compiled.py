"""What is compiled of a lifted program is what is compiled of the program that calls the ops itself, on components."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _models import COLUMNS, normal
from test_compiled import instructions, ops
from test_compiled import normal as without_names

import typax
from typax import lift, quantize_tree

pytestmark = pytest.mark.core

D, F, HEADS, T = 16, 32, 2, 8
X = normal(0, T, D)
PARAMS = {
    k: normal(i, *s) for i, (k, s) in enumerate({"qkv": (D, 3 * D), "out": (D, D), "up": (D, F), "down": (F, D)}.items())
}
SMALL, _ = quantize_tree(PARAMS, [("*", COLUMNS)])
COMPONENTS = {k: w.components()[:2] for k, w in SMALL.items()}


def mlp(p, x, product=jnp.matmul):
    return product(jax.nn.gelu(product(x, p["up"])), p["down"])


def attention(p, x, product=jnp.matmul):
    q, k, v = jnp.moveaxis(product(x, p["qkv"]).reshape(T, 3, HEADS, D // HEADS), 1, 0)
    scores = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k) / 2.0)
    return x + product(jnp.einsum("hts,shd->thd", scores, v).reshape(T, D), p["out"])


def block(p, x, product=jnp.matmul):
    return mlp(p, attention(p, x, product), product)


def forward(f):
    return f


def by_x(f):
    return lambda p, x: jax.grad(lambda x: jnp.sum(f(p, x) ** 2))(x)


def by_weights(f):
    return lambda p, x: jax.grad(lambda p: jnp.sum(f(p, x) ** 2))(p)


def compiled(f, *args: Any):
    done = jax.jit(f).lower(*args).compile()
    return without_names(done.as_text()), done.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("transform", [forward, by_x, by_weights], ids=lambda t: t.__name__)
@pytest.mark.parametrize("f", [mlp, attention], ids=lambda f: f.__name__)
def test_the_same_as_by_hand_on_components(f, transform):
    by_hand = lambda p, x: f(p, x, typax.matmul)
    of = lambda k, c: type(SMALL[k]).from_components(*c, dtype=jnp.dtype("float32"))
    on_components = lambda c, x: transform(by_hand)({k: of(k, v) for k, v in c.items()}, x)
    got, want = compiled(transform(lift(f, "error")), SMALL, X), compiled(on_components, COMPONENTS, X)
    assert ops(got[0]) == ops(want[0]) and sum(ops(got[0]).values()) > 8
    assert got[1] == want[1]
    assert instructions(got[0]) == instructions(want[0])


def test_a_model_agrees_with_explicit_ops_up_to_names():
    got = compiled(lift(block, "error"), SMALL, X)
    assert got == compiled(lambda p, x: block(p, x, typax.matmul), SMALL, X)
