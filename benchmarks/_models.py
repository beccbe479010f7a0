"""Models made of the layers of Flax, of Equinox, and of arrays, for `benchmarks.lift`."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

WORDS, WIDTH, HEADS, LAYERS = 512, 256, 4, 4
TOKENS = jnp.arange(8 * 64).reshape(8, 64) % WORDS
COLUMNS: Any = {"format": "int8", "axis": -2}


class Model(NamedTuple):
    f: Callable[..., Any]  # of the parameters and the other arguments
    params: Any
    args: tuple[Any, ...]
    recipe: Any = "int8"


def normal(i: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5


def flax_nnx() -> Model:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attention(self.norms[0](x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

        def __call__(self, tokens: Any) -> Any:
            x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.embed.attend(x)

    graph, state = nnx.split(Transformer(nnx.Rngs(0)))
    return Model(lambda state, tokens: nnx.merge(graph, state)(tokens), state, (TOKENS,))


def flax_linen() -> Model:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))), None

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(WORDS, WIDTH)
            stack = nn.scan(nn.remat(Block), {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=LAYERS)
            x, _ = stack()(embed(tokens), nn.make_causal_mask(tokens))
            return embed.attend(x)

    model = Transformer()
    return Model(model.apply, model.init(jax.random.key(0), TOKENS), (TOKENS,))


def equinox() -> Model:
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3 * LAYERS + 1)
    embed = eqx.nn.Embedding(WORDS, WIDTH, key=keys[-1])
    of = lambda i: keys[3 * i : 3 * i + 3]
    blocks = [
        (
            eqx.nn.MultiheadAttention(HEADS, WIDTH, key=of(i)[0]),
            eqx.nn.Linear(WIDTH, 4 * WIDTH, key=of(i)[1]),
            eqx.nn.Linear(4 * WIDTH, WIDTH, key=of(i)[2]),
        )
        for i in range(LAYERS)
    ]
    arrays, still = eqx.partition((embed, blocks), eqx.is_array)

    def f(arrays: Any, tokens: Any) -> Any:
        embed, blocks = eqx.combine(arrays, still)

        def one(tokens: Any) -> Any:
            x = jax.vmap(embed)(tokens)
            for attention, up, down in blocks:
                x = x + attention(x, x, x, inference=True)
                x = x + jax.vmap(lambda x: down(jax.nn.gelu(up(x))))(x)  # noqa: B023
            return x

        return jax.vmap(one)(tokens)

    return Model(f, arrays, (TOKENS,))


def convolutions() -> Model:
    sizes = (3, 32, 64, 128)
    params = [normal(i, 3, 3, m, n) for i, (m, n) in enumerate(itertools.pairwise(sizes))]

    def f(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return x

    return Model(f, params, (normal(9, 8, 64, 64, 3),), [("*", {"format": "int8", "axis": (0, 1, 2)})])


def experts() -> Model:
    params = {"up": normal(0, 8, WIDTH, 2 * WIDTH), "down": normal(1, 8, 2 * WIDTH, WIDTH), "router": normal(2, WIDTH, 8)}

    def f(p: Any, x: Any) -> Any:
        gates, which = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        weight = jnp.einsum("tk,tke->te", gates, jax.nn.one_hot(which, 8, dtype=x.dtype))
        hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, p["up"]))
        return jnp.einsum("etd,te->td", jnp.einsum("etf,efd->etd", hidden, p["down"]), weight)

    return Model(f, params, (normal(3, 128, WIDTH),), [("router", None), ("*", COLUMNS)])


def decoder() -> Model:
    """One token after another, with what was attended to kept: 32 of them."""
    n, of = 32, lambda i, *s: normal(i, LAYERS, *s)
    names = ("q", "k", "v", "o")
    square = {name: of(i, WIDTH, WIDTH) for i, name in enumerate(names)}
    params = {"embed": normal(9, WORDS, WIDTH), "layers": {**square, "up": of(4, WIDTH, 1024), "down": of(5, 1024, WIDTH)}}

    def f(p: Any, first: Any) -> Any:
        def step(carry: Any, t: Any) -> Any:
            token, kept = carry

            def layer(x: Any, parts: Any) -> Any:
                w, keys, values = parts
                h = x * lax.rsqrt(jnp.mean(x * x) + 1e-5)
                heads = lambda y: y.reshape(HEADS, -1)
                keys = lax.dynamic_update_index_in_dim(keys, heads(h @ w["k"]), t, 0)
                values = lax.dynamic_update_index_in_dim(values, heads(h @ w["v"]), t, 0)
                scores = jnp.einsum("hd,thd->ht", heads(h @ w["q"]), keys)
                scores = jax.nn.softmax(jnp.where(jnp.arange(n) <= t, scores, -1e9))
                x = x + jnp.einsum("ht,thd->hd", scores, values).reshape(-1) @ w["o"]
                return x + jax.nn.silu(x @ w["up"]) @ w["down"], (keys, values)

            x, kept = lax.scan(layer, p["embed"][token], (p["layers"], *kept))
            logits = p["embed"] @ x
            return (jnp.argmax(logits).astype(jnp.int32), kept), logits

        cache = jnp.zeros((LAYERS, n, HEADS, WIDTH // HEADS))
        return lax.scan(step, (first, (cache, cache)), jnp.arange(n))[1]

    return Model(f, params, (jnp.int32(3),), [("embed", "int8"), ("*", COLUMNS)])


MODELS: dict[str, Callable[[], Model]] = {
    "Flax NNX transformer": flax_nnx,
    "Flax Linen, scanned": flax_linen,
    "Equinox transformer": equinox,
    "convolutions": convolutions,
    "mixture of experts": experts,
    "decoder with a cache": decoder,
}
