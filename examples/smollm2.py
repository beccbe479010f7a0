"""SmolLM2-135M-Instruct in plain JAX: tokens in, the logits of the next token out.

    tokens ─► table ─► 30 × layer ─► norm ─► table, turned round ─► logits

    layer:  x ─► norm ─► attention ─► + x ─► norm ─► (silu(gate) · up) ─► down ─► +          (norms before: Llama)

Weights keep the layout of their file, [out, in], and are stacked over the layers, along which `lax.scan` goes.  Shapes:
B sequences of T tokens, width D = 576, 9 heads of queries of width 64 that share 3 of keys and values, feed-forward width
1536, a vocabulary of V = 49152.  A cache holds keys and values [layers, B, S, 3, 64] of up to S tokens; what is asked for
at position p attends to all in it up to p.  All arithmetic is float32.

Source: the model HuggingFaceTB/SmolLM2-135M-Instruct; Touvron et al., "LLaMA", 2023; Su et al., "RoFormer", 2021, of which
a GGUF file has the neighbouring pairs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import typax

Params = dict[str, Any]
Cache = dict[str, jax.Array]


class Config(NamedTuple):
    """The sizes of a model of this architecture."""

    layers: int
    heads: int
    shared: int  # heads of keys and values
    width: int  # of a head
    base: float  # of the rotations' periods
    eps: float  # of the norms


def forward(config: Config, params: Params, tokens: jax.Array, cache: Cache, at: Any, last: bool = False) -> Any:
    """Logits float32[B, T, V] after each of the tokens int32[B, T], the first at position ``at``, and the new cache.

    With ``last``, those after the last token only, [B, 1, V].
    """
    x = params["table"][tokens]

    def layer(x: jax.Array, of: Any) -> Any:
        p, cache = of
        mixed, cache = attention(config, p, norm(config, p["attention_norm"], x), cache, at)
        x = x + mixed
        h = norm(config, p["norm"], x)
        return x + linear(p["down"], jax.nn.silu(linear(p["gate"], h)) * linear(p["up"], h)), cache

    x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
    return linear(params["table"], norm(config, params["norm"], x[:, -1:] if last else x)), cache


def attention(config: Config, p: Params, x: jax.Array, cache: Cache, at: Any) -> tuple[jax.Array, Cache]:
    """Each token gathers from those before it and itself, [B, T, D] -> [B, T, D]; their keys and values join the cache."""
    batch, length, _ = x.shape
    each = config.heads // config.shared
    split = lambda y, heads: y.reshape(batch, length, heads, config.width)
    places = at + jnp.arange(length)
    q = rotated(config, split(linear(p["query"], x), config.heads), places)
    new = {"key": rotated(config, split(linear(p["key"], x), config.shared), places)}
    new["value"] = split(linear(p["value"], x), config.shared)
    cache = {name: jax.lax.dynamic_update_slice_in_dim(cache[name], new[name], at, axis=1) for name in new}
    q = q.reshape(batch, length, config.shared, each, config.width)
    scores = jnp.einsum("btgeh,bsgh->bgets", q, cache["key"]) / np.sqrt(np.float32(config.width))
    seen = jnp.arange(cache["key"].shape[1]) <= places[:, None]
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bgets,bsgh->btgeh", jax.nn.softmax(scores, axis=-1), cache["value"])
    return linear(p["output"], mixed.reshape(batch, length, -1)), cache


def linear(weight: Any, x: jax.Array) -> jax.Array:
    """[..., in] -> [..., out]."""
    return jnp.einsum("...k,nk->...n", x, weight)


def norm(config: Config, p: Params, x: jax.Array) -> jax.Array:
    """Mean square 1 over the last axis, then scaled."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + np.float32(config.eps)) * p["scale"]


def rotated(config: Config, x: jax.Array, places: jax.Array) -> jax.Array:
    """Pair i of each head of x[B, T, heads, width] turned by the place over base^(2i / width)."""
    speed = np.float32(config.base) ** -(np.arange(0, config.width, 2, dtype=np.float32) / np.float32(config.width))
    angle = places.astype(jnp.float32)[:, None, None] * speed
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def empty(config: Config, batch: int, size: int) -> Cache:
    """A cache of up to ``size`` tokens."""
    shape = (config.layers, batch, size, config.shared, config.width)
    return {"key": jnp.zeros(shape, jnp.float32), "value": jnp.zeros(shape, jnp.float32)}


def greedy(config: Config, params: Params, logits: jax.Array, cache: Cache, at: Any, steps: int) -> jax.Array:
    """The likeliest tokens int32[B, steps], one after the other: the first of ``logits``[B, 1, V], at position ``at``."""

    def step(carry: Any, _: None) -> Any:
        logits, cache, at = carry
        token = jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
        return (*forward(config, params, token[:, None], cache, at), at + 1), token

    _, tokens = jax.lax.scan(step, (logits, cache, jnp.asarray(at, jnp.int32)), None, length=steps)
    return tokens.T


def losses(config: Config, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each token int32[B, T] but the first: minus the logarithm of its probability, and the likeliest token there."""
    logits, _ = forward(config, params, tokens, empty(config, *tokens.shape), 0)
    chosen = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits[:, :-1], axis=-1) - chosen, jnp.argmax(logits[:, :-1], axis=-1)


# --- from the file ------------------------------------------------------------------------------------------------


def load(model: typax.io.Gguf) -> tuple[Config, Params]:
    """The sizes and the parameters in a GGUF file, blocks of ggml as they are; ValueError if it holds another model."""
    told, tensors = model.metadata, model.tensors
    if (architecture := told.get("general.architecture")) != "llama" or "output.weight" in tensors:
        raise ValueError(f"another kind of model: {architecture}, with a table of its own for the logits or not")
    heads, width = told["llama.attention.head_count"], told["llama.embedding_length"]
    config = Config(
        told["llama.block_count"],
        heads,
        told["llama.attention.head_count_kv"],
        width // heads,
        told["llama.rope.freq_base"],
        told["llama.attention.layer_norm_rms_epsilon"],
    )
    if told["llama.rope.dimension_count"] != config.width:
        raise ValueError("another kind of model: only a part of each head is rotated")

    def stacked(name: str) -> Any:
        each = [tensors[f"blk.{i}.{name}.weight"] for i in range(config.layers)]
        return typax.stack(each)

    parts = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
    parts |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    norms = {"attention_norm": "attn_norm", "norm": "ffn_norm"}
    layers = {name: stacked(key) for name, key in parts.items()}
    layers |= {name: {"scale": stacked(key)} for name, key in norms.items()}
    table, last = tensors["token_embd.weight"], tensors["output_norm.weight"]
    return config, {"table": table, "norm": {"scale": last}, "layers": layers}


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes: pairs of GPT-2's bytes, digits one by one; ValueError if it has another."""
    if (kind := (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise ValueError(f"another tokenizer: {kind}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3])
    return made


def asked(question: str) -> str:
    """A question as the model was taught to be asked."""
    said = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [("system", said), ("user", question)]
    return "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns) + "<|im_start|>assistant\n"
