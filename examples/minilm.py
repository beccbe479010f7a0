"""all-MiniLM-L6-v2 in plain JAX: sentences in, unit vectors out, near if the sentences mean the same.

    tokens ─► word + position + segment ─► norm ─► 6 × layer ─► mean over the tokens ─► unit length

    layer:  x ─► attention ─► + x ─► norm ─► up ─► gelu ─► down ─► + ─► norm     (norms after the sums: BERT)

Weights keep the layout of their file, [out, in]. Shapes: B sentences of T tokens, width D = 384, 12 heads of
width 32, feed-forward width 1536, a vocabulary of 30522. All arithmetic is float32.

Source: the model sentence-transformers/all-MiniLM-L6-v2; Devlin et al., "BERT", NAACL 2019.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, reshard
from safetensors.numpy import load_file
from tokenizers import Tokenizer

HEADS = 12
EPS = 1e-12  # of the layer norms
WINDOW = 256  # tokens: what the model was trained on; longer sentences are cut

Params = dict[str, Any]


def encode(params: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Embeddings float32[B, D] of unit length; tokens int32[B, T], mask int32[B, T], 0 where padded."""
    x = embed(params, tokens)
    for p in params["layers"]:
        x = layer(p, x, mask)
    weight = mask.astype(x.dtype)[..., None]
    mean = jnp.sum(x * weight, axis=1) / jnp.sum(weight, axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """[B, T] -> [B, T, D]: each token's word, position and segment (always the first), summed and normed."""
    rows = jax.typeof(tokens).sharding.spec[0]
    words = params["word"][place(tokens, None, None)]  # looked up everywhere: a word may be wanted anywhere
    x = place(whole(words), rows, None, None) + params["position"][: tokens.shape[1]] + params["segment"][0]
    return norm(params["norm"], x)


def layer(p: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    """One transformer layer, [B, T, D] -> [B, T, D]."""
    x = norm(p["attention_norm"], x + whole(attention(p, x, mask)))
    hidden = jax.nn.gelu(linear(p["up"], x), approximate=False)
    return norm(p["norm"], x + whole(linear(p["down"], hidden)))


def attention(p: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Each token gathers from all unpadded tokens of its sentence, [B, T, D] -> [B, T, D]."""
    batch, length, width = x.shape
    heads = (batch, length, HEADS, width // HEADS)
    q, k, v = (linear(p[name], x).reshape(heads) for name in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(np.float32(heads[-1]))
    scores = jnp.where(mask[:, None, None, :] > 0, scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
    return linear(p["output"], mixed.reshape(x.shape))


def linear(p: Params, x: jax.Array) -> jax.Array:
    """[..., in] -> [..., out]."""
    return whole(x) @ p["weight"].T + p["bias"]


def norm(p: Params, x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 over the last axis, then scaled and shifted."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + EPS) * p["scale"] + p["bias"]


# On a mesh with explicit axes, weights may be sharded over their output channels: what `linear` gives is then
# sharded over its last axis, and is made whole where all of it is needed. Elsewhere these two do nothing.


def whole(x: jax.Array) -> jax.Array:
    return place(x, *jax.typeof(x).sharding.spec[:-1], None)


def place(x: jax.Array, *spec: Any) -> jax.Array:
    wanted = PartitionSpec(*spec)
    return x if jax.typeof(x).sharding.spec == wanted else reshard(x, wanted)


def load(folder: Path) -> Params:
    """The parameters in `folder` (model.safetensors, config.json); ValueError if it holds another model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keys = ("model_type", "num_attention_heads", "layer_norm_eps", "hidden_act")
    found = tuple(config[key] for key in keys)
    if found != ("bert", HEADS, EPS, "gelu"):
        raise ValueError(f"{folder} holds another kind of model: {found}")
    file = load_file(folder / "model.safetensors")  # position_ids and the pooler in it are not used

    def get(name: str, **fields: str) -> Params:
        return {field: jnp.asarray(file[f"{name}.{key}"]) for field, key in fields.items()}

    def dense(name: str) -> Params:
        return get(name, weight="weight", bias="bias")

    def layer_norm(name: str) -> Params:
        return get(name, scale="weight", bias="bias")

    def block(name: str) -> Params:
        return {
            **{part: dense(f"{name}.attention.self.{part}") for part in ("query", "key", "value")},
            "output": dense(f"{name}.attention.output.dense"),
            "attention_norm": layer_norm(f"{name}.attention.output.LayerNorm"),
            "up": dense(f"{name}.intermediate.dense"),
            "down": dense(f"{name}.output.dense"),
            "norm": layer_norm(f"{name}.output.LayerNorm"),
        }

    tables = {"word": "word", "position": "position", "segment": "token_type"}
    return {
        **get("embeddings", **{field: f"{key}_embeddings.weight" for field, key in tables.items()}),
        "norm": layer_norm("embeddings.LayerNorm"),
        "layers": [block(f"encoder.layer.{i}") for i in range(config["num_hidden_layers"])],
    }


def tokenize(tokenizer_json: Path, sentences: list[str], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32[B, T] and mask int32[B, T]; T is `length`, else that of the longest, rounded up to 32s."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.enable_truncation(max_length=min(length or WINDOW, WINDOW))
    tokenizer.enable_padding(length=length, pad_to_multiple_of=None if length else 32)
    encoded = tokenizer.encode_batch(sentences)
    ids, mask = ([getattr(e, field) for e in encoded] for field in ("ids", "attention_mask"))
    return np.array(ids, np.int32), np.array(mask, np.int32)
