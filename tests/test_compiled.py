"""What is compiled of a program on hi values is what is compiled of the program that is written on their components."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import typax

pytestmark = pytest.mark.core

x, y, b = jnp.ones((8, 32)), jnp.ones((8, 16)), jnp.ones(64)
w1 = typax.quantize(jnp.cos(jnp.arange(32 * 64.0)).reshape(32, 64))
w2 = typax.quantize(jnp.sin(jnp.arange(64 * 16.0)).reshape(64, 16))
(q1, s1), (q2, s2) = (w.components()[:2] for w in (w1, w2))


def normal(text: str) -> str:
    """An optimized HLO module without names and where things come from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"^HloModule.*$|\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text, flags=re.M)
    text = re.sub(r"(?<=[(,] )?[\w.]+: (?=\w+\[)", "", text)  # the parameters that a computation's first line names
    names: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda m: names.setdefault(m.group(), f"%{len(names)}"), text)


def ops(text: str) -> Counter[str]:
    """How often each kind of instruction occurs, with its type."""
    return Counter(re.findall(r"= (\S+ [\w\-]+)\(", text))


def instructions(text: str) -> Counter[str]:
    """How often each instruction occurs, whatever its operands are called: two that are independent may change places."""
    return Counter(re.sub(r"%\d+", "%", line).strip() for line in text.splitlines())


def same_program(hi, lo, in_order: bool) -> None:
    got, want = hi.compile(), lo.compile()
    a, b = normal(got.as_text()), normal(want.as_text())
    assert ops(a) == ops(b) and sum(ops(a).values()) > 10
    assert instructions(a) == instructions(b)
    assert a == b or not in_order
    memory, of_hand = (c.memory_analysis().temp_size_in_bytes for c in (got, want))
    assert memory == of_hand if in_order else memory <= of_hand  # it depends on the order


def product(x, q, s):
    return (x * s[None, :]) @ q.astype(jnp.float32)


def mlp(x, w1, b, w2):
    return typax.matmul(jax.nn.gelu(typax.matmul(x, w1) + b), w2)


def test_a_forward_pass():
    by_hand = lambda x, q1, s1, b, q2, s2: product(jax.nn.gelu(product(x, q1, s1) + b), q2, s2)
    same_program(typax.jit(mlp).lower(x, w1, b, w2), jax.jit(by_hand).lower(x, q1, s1, b, q2, s2), in_order=True)


def test_a_training_step():
    loss = lambda out, y: jnp.mean((out - y) ** 2)

    def step(y, x, w1, b, w2):
        g1, gb, g2 = jax.grad(lambda *ws: loss(mlp(x, *ws), y), (0, 1, 2))(w1, b, w2)
        return typax.quantize(typax.dense(w1) - 0.1 * g1), b - 0.1 * gb, typax.quantize(typax.dense(w2) - 0.1 * g2)

    def by_hand(y, x, q1, s1, b, q2, s2):
        h, gelu = jax.vjp(lambda u, b: jax.nn.gelu(u + b), product(x, q1, s1), b)
        _, mean = jax.vjp(lambda out: loss(out, y), product(h, q2, s2))
        (g,) = mean(jnp.float32(1))
        gu, gb = gelu(jax.lax.dot_general(g, q2.astype(jnp.float32), (((1,), (1,)), ((), ()))) * s2)
        moved = lambda q, s, x, g: q.astype(jnp.float32) * s[:, None] - 0.1 * jnp.matmul(x.T, g)
        new = [typax.quantize(v).components()[:2] for v in (moved(q1, s1, x, gu), moved(q2, s2, h, g))]
        return *new[0], b - 0.1 * gb, *new[1]

    hi, lo = typax.jit(step).lower(y, x, w1, b, w2), jax.jit(by_hand).lower(y, x, q1, s1, b, q2, s2)
    same_program(hi, lo, in_order=False)


def test_the_backward_pass_keeps_codes():
    for operands in ("x", "x and w"):
        f = (lambda x: mlp(x, w1, b, w2)) if operands == "x" else (lambda x, v, w: mlp(x, v, b, w))
        args = (x,) if operands == "x" else (x, w1, w2)
        _, vjp = jax.vjp(f, *args)
        kept = [jax.typeof(r) for r in jax.tree.leaves(vjp)]
        assert {str(t) for t in kept if not isinstance(t, jax.core.ShapedArray)} == {"q8[32,64]", "q8[64,16]"}, operands
        assert not any(t.shape in (w1.shape, w2.shape) for t in kept if isinstance(t, jax.core.ShapedArray)), operands
