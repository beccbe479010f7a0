"""Models of arrays alone, with hi weights: experts, a decoder with a cache, adapters, norms of weights, convolutions."""

import jax
import jax.numpy as jnp
import pytest
from _models import COLUMNS, as_dense, lossy, near, normal, products, same
from jax import lax

import typax
from typax import Sum, explain, lift, outer, quantize, quantize_tree

pytestmark = pytest.mark.core

D, F, E, T, VOCABULARY, HEADS, LAYERS = 8, 12, 3, 4, 11, 2, 2


X = normal(0, T, D)


def by_einsum(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, p["up"]))
    return jnp.einsum("tef,efd,te->td", hidden, p["down"], gates)


def by_lookup(p, x):
    gates, which = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    hidden = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, p["up"][which]))
    return jnp.einsum("tkf,tkfd,tk->td", hidden, p["down"][which], gates)


def by_branches(p, x):
    expert = lambda e: lambda x: jax.nn.silu(x @ p["up"][e]) @ p["down"][e]
    return lax.map(lambda x: lax.switch(jnp.argmax(x @ p["router"]), [expert(e) for e in range(E)], x), x)


def in_groups(p, x):
    which = jnp.argmax(x @ p["router"], axis=-1)
    order, sizes = jnp.argsort(which), jnp.bincount(which, length=E)
    hidden = jax.nn.silu(lax.ragged_dot(x[order], p["up"], sizes))
    return jnp.zeros_like(x).at[order].set(lax.ragged_dot(hidden, p["down"], sizes))


EXPERTS = {"einsum": by_einsum, "lookup": by_lookup, "branches": by_branches, "groups": in_groups}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_of_experts(name):
    params = {"router": normal(1, D, E), "up": normal(2, E, D, F), "down": normal(3, E, F, D)}
    small, report = quantize_tree(params, [("router", None), ("*", COLUMNS)])
    assert len(report.changed) == 2
    same(EXPERTS[name], small, X)


def decode(p, first, length=4):
    """Tokens one after another; keys and values are kept."""

    def step(carry, t):
        token, kept = carry

        def layer(x, parts):
            w, keys, values = parts
            h = x * lax.rsqrt(jnp.mean(x * x) + 1e-5)
            heads = lambda y: y.reshape(1, HEADS, -1)
            keys = lax.dynamic_update_slice(keys, heads(h @ w["k"]), (t, 0, 0))
            values = lax.dynamic_update_slice(values, heads(h @ w["v"]), (t, 0, 0))
            scores = jnp.where(jnp.arange(length) <= t, jnp.einsum("xhd,thd->ht", heads(h @ w["q"]), keys), -1e9)
            x = x + jnp.einsum("ht,thd->hd", jax.nn.softmax(scores), values).reshape(-1) @ w["o"]
            return x + jax.nn.silu(x @ w["up"]) @ w["down"], (keys, values)

        x, kept = lax.scan(layer, p["embed"][token], (p["layers"], *kept))
        logits = x @ p["embed"].T
        return (jnp.argmax(logits).astype("int32"), kept), logits

    cache = jnp.zeros((LAYERS, length, HEADS, D // HEADS))
    return lax.scan(step, (first, (cache, cache)), jnp.arange(length))[1]


def test_a_decoder_with_a_cache():
    sizes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, F), "down": (F, D)}
    layers = {k: normal(i, LAYERS, *s) for i, (k, s) in enumerate(sizes.items())}
    small, _ = quantize_tree({"embed": normal(9, VOCABULARY, D), "layers": layers}, [("embed", "int8"), ("*", COLUMNS)])
    receipt, _ = same(decode, small, jnp.int32(3))
    assert sum(x.times for x in receipt.lines if x.ran == "native" and x.flops) == 4 * (LAYERS * len(sizes) + 1)


def test_adapters():
    base, a, b = quantize(normal(1, D, F)), normal(2, D, 2), normal(3, 2, F)
    beside = lambda p, x: x @ p["w"] + (x @ p["a"]) @ p["b"]
    assert products(same(beside, {"w": base, "a": a, "b": b}, X)[0]) == 1
    frozen = lambda ab, w, x: beside({"w": lax.stop_gradient(w), "a": ab[0], "b": ab[1]}, x)
    near(lossy(lift(frozen, "error"), base, X)((a, b)), lossy(frozen, as_dense(base), X)((a, b)), 1e-5)
    told = lift(beside, "error", activations="dynamic")({"w": base, "a": a, "b": b}, X)
    near(told, typax.matmul(X, base, activations="dynamic") + X @ a @ b, 1e-5)
    # one value: as two products, and with gradients for its factors alone
    w = Sum(base, outer(a, b), 0.5)
    merged = lambda w, x: jnp.tanh(x @ w)
    receipt = explain(merged)(w, X)
    assert receipt.densified == [] and products(receipt) == 1
    told = lift(merged, "error", activations="dynamic")(w, X)
    near(told, jnp.tanh(typax.matmul(X, base, activations="dynamic") + 0.5 * (X @ a @ b)), 1e-5)
    got, out = lossy(lift(merged, "error"), X)(w)
    want, expected = lossy(lambda ab, x: merged(as_dense(base) + 0.5 * (ab[0] @ ab[1]), x), X)((a, b))
    near((got.delta.left, got.delta.right, out), (*want, expected), 1e-5)


def test_norms_and_gates_of_weights():
    w, rows, gain = quantize(normal(1, D, F)), jnp.cos(jnp.arange(D * 1.0)), 1 + jnp.cos(jnp.arange(F * 1.0))
    same(lambda p, x: x @ (p["w"] * p["rows"][:, None]), {"w": w, "rows": rows}, X)
    same(lambda p, x: x @ (p["w"] / (2 + p["rows"])[:, None]).astype("float32"), {"w": w, "rows": rows}, X)
    same(lambda p, x: x @ (p["gain"] * p["w"]), {"w": quantize(normal(1, F, D)).T, "gain": gain}, X)
    same(lambda p, x: x @ (p["w"] * p["rows"]), {"w": w, "rows": rows[:, None]}, X)
    grouped = quantize(normal(1, D, F), "int4", group=4)
    same(lambda p, x: x @ (p["w"] * p["rows"][:, None]), {"w": grouped, "rows": rows}, X)
    near(lift(jnp.kron, "allow")(X, w), jnp.kron(X, as_dense(w)), 1e-5)  # the weight itself is repeated
    across = lambda p, x: x @ (p["w"] * p["gain"])
    assert explain(across)({"w": w, "gain": gain}, X).densified  # along the axis that shares a scale


def test_a_convolutional_network():
    def network(p, x):
        x = jax.nn.relu(lax.conv_general_dilated(x, p["first"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x.reshape(len(x), -1) @ p["head"] + p["bias"]

    params = {"first": normal(0, 3, 3, 2, 4), "head": normal(1, 16, 5), "bias": jnp.ones(5)}
    small, _ = quantize_tree(params, [("first", {"format": "int8", "axis": (0, 1, 2)}), ("head", COLUMNS), ("bias", None)])
    x = jax.random.normal(jax.random.key(2), (2, 8, 8, 2))
    assert products(same(network, small, x)[0]) == 2
    step = lambda p, x: jax.grad(lambda p: jnp.sum(network(p, x) ** 2))(p)
    assert [line for line in explain(step)(small, x).densified if "conv" in line or "dot" in line] == []
