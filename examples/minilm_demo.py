"""The sentence encoder of minilm.py, on 256 sentences: what it gives, what it weighs and how long it takes.

python -m examples.minilm_demo               everything
python -m examples.minilm_demo --sharded     only the part on 8 virtual devices
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from scipy.stats import rankdata

import typax
from examples import assets, minilm, quality, results

BATCH = 32
ROUNDS = 3  # of the timing
DEVICES = 8
MODULE = "examples.minilm_demo"
PICTURE = results.README.parent / "build" / "minilm.png"
DESCRIPTION = "A sentence encoder on 256 sentences: what it gives, weighs and takes."

console = Console()


class Batch(NamedTuple):
    where: np.ndarray  # int[N], the places of its sentences among all: of its first N rows
    tokens: Any  # int32[B, T]
    mask: Any  # int32[B, T]


class Program(NamedTuple):
    """An encoder and the parameters it runs on."""

    name: str
    encode: Callable[[Any, Any, Any], jax.Array]
    params: Any


def progress[T](things: Sequence[T], doing: str) -> Iterable[T]:
    """A bar on a terminal, a line elsewhere."""
    if not console.is_terminal:
        console.print(f"{doing} ...", markup=False)
        return things
    return track(things, doing, console=console, transient=True)


# --- data ---------------------------------------------------------------------------------------------------


def batches(tokenizer_json: Path, sentences: list[str]) -> list[Batch]:
    """Sentences of similar length together, so that little is padding and few shapes are compiled.

    The last batch is filled up with the first of its sentences.
    """
    _, mask = minilm.tokenize(tokenizer_json, sentences)
    order = np.argsort(mask.sum(axis=1), kind="stable")
    groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    return [Batch(g, *minilm.tokenize(tokenizer_json, [sentences[i] for i in np.resize(g, BATCH)])) for g in groups]


def embed(program: Program, data: Iterable[Batch]) -> np.ndarray:
    """Embeddings float32[N, D], in the order of the sentences."""
    found = [(where, program.encode(program.params, tokens, mask)) for where, tokens, mask in data]
    places = np.concatenate([where for where, _ in found])
    rows = np.concatenate([np.asarray(part)[: len(where)] for where, part in found])
    return rows[np.argsort(places)]


# --- measures -----------------------------------------------------------------------------------------------


def race(programs: list[Program], data: list[Batch], rounds: int = ROUNDS) -> list[float]:
    """Warm time of a pass over `data`, as a ratio to the first program's.

    It is the median over rounds; in each, every program runs once, so that a busy machine slows all alike.
    """
    seconds = []
    for _ in progress(range(rounds), "Timing"):
        row = []
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready([program.encode(program.params, *batch[1:]) for batch in data])
            row.append(time.perf_counter() - start)
        seconds.append(row)
    return [median(row[i] / row[0] for row in seconds) for i in range(len(programs))]


def size(params: Any) -> int:
    """Bytes of all parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


# --- reports ------------------------------------------------------------------------------------------------


def typed_part(jaxpr: Any) -> str:
    """A jaxpr as JAX prints it, without the equations that have arrays only."""
    lines = str(jaxpr).splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r" {4}[a-z]+:.* = ", line)]
    shown, skipped = lines[: starts[0]], 0
    ends = [*starts[1:], len(lines) - 1]
    for eqn, start, end in zip(jaxpr.eqns, starts, ends, strict=True):
        if any(isinstance(v.aval, typax.ValueType) for v in (*eqn.invars, *eqn.outvars)):
            shown += [f"    ...  ({skipped} equations on arrays)"] * bool(skipped) + lines[start:end]
            skipped = 0
        else:
            skipped += 1
    return "\n".join([*shown, *[f"    ...  ({skipped} equations on arrays)"] * bool(skipped), lines[-1]])


def show_layer(program: Program, batch: Batch, layer: Callable[..., Any] = minilm.layer) -> None:
    """What the jaxpr of the first layer does with typed weights."""
    width = program.params["norm"]["scale"].shape[0]
    x = jax.ShapeDtypeStruct((*batch.tokens.shape, width), np.float32)
    console.print(f"\n[bold]One layer, {program.name}[/bold]")
    jaxpr = jax.make_jaxpr(layer)(program.params["layers"][0], x, batch.mask)
    console.print(typed_part(jaxpr), markup=False, highlight=False, soft_wrap=True)


def show_receipt(receipt: typax.Receipt) -> None:
    """How often each primitive met each typed weight, and what became of the weight."""
    kinds = {True: Counter[tuple[str, str]](), False: Counter[tuple[str, str]]()}
    for native, lines in ((True, receipt.natives), (False, receipt.densified)):
        for line in lines:
            kinds[native][re.match(r"\w+", line)[0], re.search(r"q8\w*\[[^]]*\]", line)[0]] += 1  # type: ignore[index]
    caption = "of all programs traced, one for each padded length"
    table = Table("primitive", "weight", title="Equations on int8 weights", caption=caption)
    for heading in ("native", "made dense"):
        table.add_column(heading, justify="right")
    for kind in sorted(kinds[True] | kinds[False]):
        table.add_row(kind[0], escape(kind[1]), str(kinds[True][kind]), str(kinds[False][kind]))
    table.add_row("all", "", str(kinds[True].total()), str(kinds[False].total()), style="bold")
    console.print(table)


def show_quality(title: str, programs: list[Program], data: list[Batch]) -> list[np.ndarray]:
    """A row for each program: bytes, nearness to the first one's embeddings, warm time as a ratio to its.

    Gives the embeddings, float32[N, D] for each program.
    """
    vectors = [embed(program, progress(data, f"Embedding with {program.name}")) for program in programs]
    ratios = race(programs, data[:4])
    headings = ("MB", "mean cos", "min cos", "rank corr", "max diff", "time")
    caption = (
        "cos: of each embedding to the first program's; rank corr, max diff: of the similarities of all "
        "pairs; time: warm, as a ratio to the first program's"
    )
    table = Table("program", title=title, caption=caption)
    for heading in headings:
        table.add_column(heading, justify="right")
    for program, rows, ratio in zip(programs, vectors, ratios, strict=True):
        q = quality.compare(vectors[0], rows)
        cells = (f"{size(program.params) / 1e6:.1f}", *(f"{x:.5f}" for x in q), f"{ratio:.2f}")
        table.add_row(program.name, *cells)
    console.print(table)
    return vectors


INT4 = {"format": "int4", "group": 32}
RECIPES: dict[str, Any] = {
    "int8": "int8",
    "int4, groups of 32": [("*", INT4)],
    "nf4": "nf4",
    "mxfp4": "mxfp4",
    "table int8, rest int4": [("word", "int8"), ("*", INT4)],
}


def related(program: Program, tokenizer_json: Path, words: list[tuple[str, str, float]]) -> float:
    """Spearman's correlation of the cosines of pairs of words with how related people find them."""
    each = list(dict.fromkeys(w for a, b, _ in words for w in (a, b)))
    rows = quality.unit(embed(program, batches(tokenizer_json, each)))
    at = {w: i for i, w in enumerate(each)}
    cosines = [rows[at[a]] @ rows[at[b]] for a, b, _ in words]
    return float(np.corrcoef(rankdata(cosines), rankdata([mean for *_, mean in words]))[0, 1])


def show_formats(folder: Path, params: Any, data: list[Batch], base: np.ndarray, picture: Path) -> list[tuple[str, ...]]:
    """Each recipe's bytes against its error; what is read back embeds the same, bit for bit. The rows of the table.

    base float32[N, D] are the embeddings with the parameters as they are.
    """
    try:
        words = assets.words()
    except assets.AssetError as error:
        words = None
        console.print(f"Without WordSim-353: {error}", highlight=False, soft_wrap=True, markup=False)
    programs = [Program("float32", jax.jit(minilm.encode), params)]
    for name, recipe in RECIPES.items():
        small, _ = typax.quantize_tree(params, recipe)
        programs.append(Program(name, jax.jit(typax.lift(minilm.encode, fallback="allow")), small))
    rows, found = [], []
    for i, program in enumerate(programs):
        vectors = (
            embed(program, progress(data, f"Embedding with {program.name} ({i + 1} of {len(programs)})")) if i else base
        )
        q = quality.compare(base, vectors)
        score = f"{related(program, folder / 'tokenizer.json', words):.3f}" if words else ""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "model.safetensors")
            typax.io.save(path, program.params)
            again = Program(program.name, program.encode, typax.io.load(path))
        same = "the same" if np.array_equal(embed(again, data[:1]), embed(program, data[:1])) else "OTHER"
        rows.append(
            (program.name, f"{size(program.params) / 1e6:.1f}", f"{q.mean_cosine:.4f}", f"{q.min_cosine:.4f}", score)
        )
        found.append((program.name, size(program.params), 1 - q.mean_cosine, same))
    ratios = race(programs, data[:2])
    rows = [(*row, f"{ratio:.2f}", same) for row, ratio, (*_, same) in zip(rows, ratios, found, strict=True)]
    caption = (
        "cosine: to the embeddings of 256 sentences in float32; WordSim-353: correlation of ranks with people's; time: "
        "warm, as a ratio to float32's; from the file: what is saved and read back embeds the same, bit for bit"
    )
    results.show(console, "MiniLM, 22.6 million parameters", results.MINILM, rows, caption)
    draw([f[:3] for f in found[1:]], picture)
    return rows


def draw(found: list[tuple[str, int, float]], picture: Path) -> None:
    """Bytes against error, each a name, bytes, and 1 less the mean cosine; says so if matplotlib is not there."""
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        console.print("No picture is drawn, for which matplotlib is needed: pip install 'typax[plot]'.", markup=False)
        return
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, n, error in found:
        axes.plot(n / 1e6, error, "o")
        axes.annotate(name, (n / 1e6, error), xytext=(6, 4), textcoords="offset points")
    axes.set(yscale="log", xlabel="MB", ylabel="1 - mean cosine to float32", title="all-MiniLM-L6-v2")
    axes.margins(x=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    pyplot.close(figure)
    console.print(f"Bytes against error: {picture}", highlight=False, soft_wrap=True, markup=False)


def show_pairs(base: np.ndarray, vectors: np.ndarray, pairs: list[tuple[int, int]]) -> None:
    """Do sentences that say the same lie together? base and vectors float[N, D], pairs of indices into them."""
    near, before = (quality.unit(v) @ quality.unit(v).T for v in (vectors, base))
    np.fill_diagonal(near, -1)
    hits = sum(int(near[i].argmax() == j) + int(near[j].argmax() == i) for i, j in pairs)
    same, all_pairs = np.mean([near[i, j] for i, j in pairs]), quality.similarities(vectors).mean()
    moved = max(abs(near[i, j] - before[i, j]) for i, j in pairs)
    console.print(
        f"Of {2 * len(pairs)} sentences with a paraphrase, {hits} have it as their nearest of all "
        f"{len(vectors)}; paraphrases have mean cosine {same:.3f}, all pairs {all_pairs:.3f}; "
        f"no pair of paraphrases moved by more than {moved:.4f}."
    )


# --- many devices -------------------------------------------------------------------------------------------


def mesh() -> Mesh:
    """2 groups of devices share the sentences; the 4 of a group share every weight."""
    return jax.make_mesh((2, DEVICES // 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    """Where a parameter lives: linear layers are split by output channels, the word table by columns."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    if names[-1] == "weight":
        return PartitionSpec("model", None)
    if names[-1] == "word":
        return PartitionSpec(None, "model")
    if names[-1] == "bias" and "weight" in names:
        return PartitionSpec("model")
    return PartitionSpec(*[None] * leaf.ndim)


def quantized(params: Any) -> Any:
    """The same tree with its weight matrices and its word table in row-wise int8."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return typax.quantize(leaf) if names[-1] in ("weight", "word") and leaf.ndim == 2 else leaf

    return jax.tree.map_with_path(one, params)


def shard(params: Any, mesh: Mesh) -> Any:
    shardings = jax.tree.map_with_path(lambda path, leaf: NamedSharding(mesh, spec(path, leaf)), params)
    return jax.device_put(params, shardings)


def split(data: list[Batch], mesh: Mesh) -> list[Batch]:
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    return [Batch(where, *jax.device_put((tokens, mask), rows)) for where, tokens, mask in data]


# --- the whole ----------------------------------------------------------------------------------------------


def on_one_device(folder: Path) -> list[tuple[str, ...]]:
    params = minilm.load(folder)
    sentences, pairs = assets.sentences()
    data = batches(folder / "tokenizer.json", sentences)
    programs = [Program("float32", jax.jit(minilm.encode), params)]
    receipt = typax.Receipt()
    encode = jax.jit(typax.lift(minilm.encode, fallback="announce", receipt=receipt))
    programs.append(Program("int8", encode, quantized(params)))
    show_layer(programs[-1], data[0], typax.lift(minilm.layer))
    vectors = show_quality(f"{len(sentences)} sentences", programs, data)
    show_pairs(vectors[0], vectors[-1], pairs)
    show_receipt(receipt)
    return show_formats(folder, params, data, vectors[0], PICTURE)


def on_many_devices(folder: Path) -> None:
    params = minilm.load(folder)
    sentences, _ = assets.sentences()
    data = batches(folder / "tokenizer.json", sentences)
    alone = embed(Program("float32", jax.jit(minilm.encode), params), data)
    devices = mesh()
    with jax.set_mesh(devices):
        program = Program("float32, sharded", jax.jit(minilm.encode), shard(params, devices))
        together = embed(program, progress(split(data, devices), f"Embedding with {program.name}"))
        sharded = quantized(program.params)
        lifted = Program("int8, sharded", jax.jit(typax.lift(minilm.encode)), sharded)
        int8 = embed(lifted, progress(split(data, devices), f"Embedding with {lifted.name}"))
        typed = jax.typeof(sharded["layers"][0]["up"]["weight"])
        kernel = jax.typeof(program.params["layers"][0]["up"]["weight"])
    console.print(
        f"{dict(devices.shape)}: a weight is {kernel.str_short(True)}; "
        f"largest difference to one device {np.abs(alone - together).max():.1e}; "
        f"in int8 it is {typed}, mean cosine {quality.compare(alone, int8)[0]:.5f}."
    )


def run() -> list[tuple[str, ...]]:
    """Everything; the rows of the table of formats. Raises AssetError if the model cannot be had."""
    with console.status("Looking for the model"):
        folder = assets.find(assets.MINILM, say=lambda text: console.print(text, highlight=False, soft_wrap=True))
    rows = on_one_device(folder)
    console.print(f"\n[bold]The same on {DEVICES} devices[/bold]")
    # The number of devices is read when JAX starts, hence a process of its own.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-m", MODULE, "--sharded"], env=environment, check=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=DESCRIPTION)
    parser.add_argument("--sharded", action="store_true", help="only the part on many devices")
    try:
        if parser.parse_args(argv).sharded:
            on_many_devices(assets.find(assets.MINILM))
        else:
            run()
    except assets.AssetError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
