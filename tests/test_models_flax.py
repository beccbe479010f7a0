"""Models made of Flax's own layers, NNX and Linen, with int8 weights: one line puts them in, `lift` runs them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _models import as_dense, near, products, same
from jax import lax

from typax import QArray, explain, lift, quantize_tree
from typax.quantized import QColumns

nnx = pytest.importorskip("flax.nnx")

import flax.linen as nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")

VOCABULARY, WIDTH, HEADS = 16, 8, 2
TOKENS = jnp.array([[1, 2, 3], [5, 6, 7]])


# --- NNX ---------------------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs: Any, dtype: Any = None) -> None:
        of = {"dtype": dtype, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **of)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, **of) for _ in range(2)])
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, **of), nnx.Linear(2 * WIDTH, WIDTH, **of)

    def __call__(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: Any, dtype: Any = None) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dtype) for _ in range(1)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def test_a_transformer_in_nnx():
    model = Transformer(nnx.Rngs(0))
    small, report = quantize_tree(model)  # the module itself
    assert len(report.changed) == 7 and type(small.blocks[0].up.kernel[...]) is QColumns
    graph, state = nnx.split(small)
    receipt, want = same(lambda state, tokens: nnx.merge(graph, state)(tokens), state, TOKENS)
    assert products(receipt) == 7 and receipt.held < 0.4 * receipt.stood_for
    near(nnx.jit(lift(lambda model, tokens: model(tokens), "error"))(small, TOKENS), want, 2e-5)
    step = lambda state: nnx.grad(lambda m: jnp.sum(m(TOKENS) ** 2))(nnx.merge(graph, state))
    assert explain(step)(state).densified == []  # a program that differentiates


def test_a_transformer_in_low_precision():
    model = Transformer(nnx.Rngs(0), jnp.bfloat16)  # parameters are float32: each is cast where it is used
    graph, state = nnx.split(quantize_tree(model)[0])
    call = lambda state, tokens: nnx.merge(graph, state)(tokens)
    assert explain(call)(state, TOKENS).densified == []
    wide = nnx.split(Transformer(nnx.Rngs(0)))[0]
    exact = jax.jit(lambda state: nnx.merge(wide, state)(TOKENS))(as_dense(state))
    got, want = jax.jit(lift(call, "error"))(state, TOKENS), jax.jit(call)(as_dense(state), TOKENS)
    assert got.dtype == want.dtype == jnp.bfloat16
    off = lambda y: float(jnp.sqrt(jnp.mean((y.astype("float32") - exact) ** 2)))
    assert off(got) <= 1.25 * off(want)  # no further from float32 than the program in bfloat16 on arrays


class Deep(nnx.Module):
    """Layers that are stacked, and scanned."""

    def __init__(self, rngs: Any) -> None:
        make = nnx.vmap(lambda r: nnx.Linear(WIDTH, WIDTH, rngs=r), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        step = nnx.remat(lambda x, layer: x + jnp.tanh(layer(x)))
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_stacked_layers_in_nnx():
    graph, state = nnx.split(quantize_tree(Deep(nnx.Rngs(0)))[0])
    receipt, _ = same(lambda state, x: nnx.merge(graph, state)(x), state, jnp.ones((2, WIDTH)) / 2)
    assert [x.times for x in receipt.lines] == [3]


class Decoder(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, rngs=rngs)
        self.attention.init_cache((1, 6, WIDTH))

    def __call__(self, token):
        x = self.embed(token[None, None])
        return self.embed.attend(x + self.attention(x))[0, 0]


def test_a_decoder_with_a_cache_in_nnx():
    small, report = quantize_tree(Decoder(nnx.Rngs(0)))
    assert {t.path: t.why for t in report.left}["attention.cached_key"] == "it is called cached_key"
    graph, cache, params = nnx.split(small, nnx.Cache, ...)

    def decode(params, first):
        def step(carry, _):
            cache, token = carry
            model = nnx.merge(graph, cache, params)
            logits = model(token)
            return (nnx.split(model, nnx.Cache, ...)[1], jnp.argmax(logits).astype("int32")), logits

        return lax.scan(step, (cache, first), length=5)[1]

    assert {x.times for x in same(decode, params, jnp.int32(3))[0].lines} == {5}


def test_adapters_of_nnx():
    layer = nnx.LoRA(WIDTH, 2, 6, base_module=nnx.Linear(WIDTH, 6, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    layer.lora_b[...] = jnp.cos(jnp.arange(12.0)).reshape(2, 6)
    small, _ = quantize_tree(layer, [("base_module", "int8")])
    x = jnp.sin(jnp.arange(16.0)).reshape(2, WIDTH)
    graph, adapters, base = nnx.split(small, nnx.LoRAParam, ...)
    call = lambda adapters, base: nnx.merge(graph, adapters, base)(x)
    assert type(base["base_module"]["kernel"][...]) is QColumns
    receipt = explain(lambda a: call(a, base))(adapters)  # what it closes over is an argument too
    assert products(receipt) == 1 and receipt.densified == []
    step = jax.jit(jax.grad(lambda a: jnp.sum(lift(call, "error")(a, base) ** 2)))
    near(step(adapters), jax.jit(jax.grad(lambda a: jnp.sum(call(a, as_dense(base)) ** 2)))(adapters), 1e-5)


# --- Linen -------------------------------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class LinenTransformer(nn.Module):
    """Of layers that are stacked, scanned, and made anew in the backward pass."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH)
        stack = nn.scan(nn.remat(LinenBlock), {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=2)
        x, _ = stack()(embed(tokens), nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def test_a_transformer_in_linen():
    model = LinenTransformer()
    params, report = quantize_tree(model.init(jax.random.key(0), TOKENS))
    assert len(report.changed) == 7 and type(params["params"]["Embed_0"]["embedding"]) is QArray
    receipt, _ = same(model.apply, params, TOKENS)
    assert sum(x.times for x in receipt.lines if x.ran == "native" and x.flops) == 13


def test_other_layers_of_flax():
    x = jax.random.normal(jax.random.key(1), (2, 3, WIDTH))
    layers = {
        "cells": nn.RNN(nn.OptimizedLSTMCell(4)),
        "einsum": nn.Einsum((WIDTH, 2, 4), "btd,dhk->bthk"),
    }
    for layer in layers.values():
        params, report = quantize_tree(layer.init(jax.random.key(0), x))
        assert report.changed
        same(layer.apply, params, x)
