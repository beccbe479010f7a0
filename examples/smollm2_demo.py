"""The language model of smollm2.py on its GGUF file as it is, and quantized anew: what it writes, weighs and takes.

python -m examples.smollm2_demo
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import typax
from examples import assets, novels, results, smollm2

MODULE = "examples.smollm2_demo"
WINDOW = 512  # tokens of a sequence
SEQUENCES = 8  # of the novel
STEPS = 64  # tokens that are written
QUESTION = "Tell me a story about a lighthouse."
INT4 = {"format": "int4", "group": 64, "zero_point": True}
RECIPES: dict[str, Any] = {"int8": "int8", "int4, groups of 64": [("*", INT4)]}

console = Console()


class Program(NamedTuple):
    """The three programs of smollm2.py, compiled, and the parameters they run on."""

    name: str
    params: Any
    start: Callable[..., Any]
    write: Any  # of `jax.jit`
    losses: Callable[..., Any]
    receipts: tuple[typax.Receipt, ...] = ()


class Found(NamedTuple):
    """What a program gives."""

    likeliest: np.ndarray  # int[2, WINDOW - 1]
    perplexity: float | None
    write: Callable[[], Any]  # int[1, STEPS]: compiled, after the prompt


def programs(model: typax.io.Gguf) -> tuple[smollm2.Config, list[Program]]:
    """The model in float32, as its file has it, and by each recipe."""
    config, shipped = smollm2.load(model)
    dense = jax.tree.map(typax.dense, shipped)
    functions = [
        lambda params, tokens, cache: smollm2.forward(config, params, tokens, cache, 0, last=True),
        lambda params, logits, cache, at: smollm2.greedy(config, params, logits, cache, at, STEPS),
        lambda params, tokens: smollm2.losses(config, params, tokens),
    ]
    start, write, losses = map(jax.jit, functions)
    out = [Program("float32", dense, start, write, losses)]
    for name, params in {
        "as in the file": shipped,
        **{name: typax.quantize_tree(dense, recipe)[0] for name, recipe in RECIPES.items()},
    }.items():
        receipts = tuple(typax.Receipt() for _ in functions)
        start, write, losses = [jax.jit(typax.lift(f, "allow", r)) for f, r in zip(functions, receipts, strict=True)]
        out.append(Program(name, params, start, write, losses, receipts))
    return config, out


def measure(config: smollm2.Config, program: Program, prompt: Any, two: Any, text: Any) -> Found:
    """Run a program: on a prompt int32[1, P], on sequences int32[2, T], and on a text int32[N, T] or ``None``."""
    length = prompt.shape[1]
    logits, cache = program.start(program.params, prompt, smollm2.empty(config, 1, length + STEPS))
    given = (program.params, logits, cache, length)
    compiled = program.write.lower(*given).compile()
    likeliest = np.concatenate([np.asarray(program.losses(program.params, row[None])[1]) for row in two])
    perplexity = None
    if text is not None:
        perplexity = float(np.exp(np.mean([program.losses(program.params, row[None])[0] for row in text])))
    return Found(likeliest, perplexity, lambda: compiled(*given))


def race(found: dict[str, Found], rounds: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What each program writes, int[STEPS], and its least seconds.

    In a round each writes once, so that a busy machine slows all alike.
    """
    written, seconds = {}, {name: [] for name in found}
    for _ in range(rounds):
        for name, f in found.items():
            begun = time.perf_counter()
            written[name] = np.asarray(f.write())[0]
            seconds[name].append(time.perf_counter() - begun)
    return written, {name: min(s) for name, s in seconds.items()}


def rows(
    found: dict[str, Found], written: dict[str, np.ndarray], seconds: dict[str, float], sizes: dict[str, int]
) -> list[tuple[str, ...]]:
    """The table's rows; the first program is what the others are compared with."""
    first, base = next(iter(found.items()))
    return [
        (
            name,
            f"{sizes[name] / 1e6:.1f}",
            "" if f.perplexity is None else f"{f.perplexity:.2f}",
            f"{100 * np.mean(f.likeliest == base.likeliest):.1f}%",
            "yes" if np.array_equal(written[name], written[first]) else "no",
            f"{STEPS / seconds[name]:.1f}",
            f"{seconds[first] / seconds[name]:.2f}",
        )
        for name, f in found.items()
    ]


def windows(tokenizer: Any, text: str, count: int) -> jax.Array:
    """The first sequences of a text, int32[count, WINDOW]."""
    ids = tokenizer.encode(text[: 8 * count * WINDOW]).ids
    if len(ids) < count * WINDOW:
        raise ValueError(f"the text has {len(ids)} tokens, not the {count * WINDOW} that are asked for")
    return jnp.asarray(ids[: count * WINDOW], jnp.int32).reshape(count, WINDOW)


def novel(tokenizer: Any, count: int) -> jax.Array | None:
    """The first sequences of the novel, int32[count, WINDOW]; ``None``, and a line that says why, if it cannot be had."""
    try:
        return windows(tokenizer, novels.pride_and_prejudice(say=say), count)
    except assets.AssetError as error:
        say(f"Without perplexity: {error}")
        return None


def say(text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def show_receipt(program: Program) -> None:
    """What ran on the blocks, and what was decoded for a product."""
    for doing, receipt in zip(("the prompt", "a token", "a text"), program.receipts, strict=True):
        dense = f"{len(receipt.densified)} weights decoded for a product" if receipt.densified else "nothing made dense"
        say(f"  {doing}: {len(receipt.natives)} operations on the weights {program.name}, {dense}")


def run(sequences: int, rounds: int = 2) -> list[tuple[str, ...]]:
    """The whole demo; its table's rows. Raises AssetError if the model cannot be had."""
    folder = assets.find(assets.SMOLLM2, say=say)
    (name,) = assets.SMOLLM2.sha256
    say(f"Reading {name} ...")
    model = typax.io.load_gguf(folder / name)
    tokenizer = smollm2.tokenizer(model.metadata)
    two = windows(tokenizer, "\n".join(assets.sentences()[0]), 2)
    text = novel(tokenizer, sequences)
    prompt = jnp.asarray([tokenizer.encode(smollm2.asked(QUESTION)).ids], jnp.int32)
    config, runs = programs(model)
    found: dict[str, Found] = {}
    for i, program in enumerate(runs):
        say(f"Reading with SmolLM2, {program.name} ({i + 1} of {len(runs)}) ...")
        found[program.name] = measure(config, program, prompt, two, text)
        if i == 1:
            show_receipt(program)
    say(f"Writing {STEPS} tokens with each, {rounds} times ...")
    written, seconds = race(found, rounds)
    say(f"\n{QUESTION}\n{tokenizer.decode(written[runs[1].name].tolist())} ...\n")
    table = rows(found, written, seconds, {p.name: sum(x.nbytes for x in jax.tree.leaves(p.params)) for p in runs})
    caption = (
        f"perplexity: of the first {sequences} x {WINDOW} tokens of Pride and Prejudice; same next token: the likeliest "
        f"after each of 2 x {WINDOW} tokens; same {STEPS} tokens: written greedily; speed: tokens/s as a ratio to float32's"
    )
    results.show(console, f"SmolLM2-135M, {sequences} x {WINDOW} tokens", results.SMOLLM2, table, caption)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of 512 tokens, of the novel")
    try:
        run(parser.parse_args(argv).sequences)
    except assets.AssetError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
