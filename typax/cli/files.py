"""``typax inspect``, ``quantize`` and ``convert``: checkpoints from one form to another, a tensor at a time."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from click.shell_completion import CompletionItem

from typax._describe import show
from typax._recipe import quantize_tree, quantizer, rules_of
from typax._rows import concatenate
from typax._structural import dense
from typax._type import ValueType
from typax.cli._common import FORCE, PART, may_be_safetensors, may_write, named, printable, progress, size, table, taken
from typax.io import _open
from typax.io._save import chooser, save_leaves
from typax.io._tree import Leaf
from typax.io.gguf import GgufCheckpoint, save_each, type_of
from typax.quantized.format import formats
from typax.quantized.ggml import BLOCKS, Ggml
from typax.quantized.types import QuantizedType, all_groups


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--depth", type=click.IntRange(1), help="Sum up what is deeper in the tree than so many names.")
@click.option("--only", multiple=True, help="Only what a pattern chooses, as layers.0 or *.weight. May be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def inspect(file: Path, depth: int | None, only: tuple[str, ...], as_json: bool) -> None:
    """What is in a checkpoint: types, shapes, bytes.

    FILE is a safetensors or GGUF file, an index, or a folder of Hugging Face's layout.
    """
    ck = _open.open_checkpoint(file)
    leaves = {p: x for p, x in ck.leaves().items() if not only or chooser(only)(p)}
    if only and not leaves:
        raise click.ClickException(f"{file}: no path is chosen by {', '.join(only)}")
    rows = [_row(p, x) for p, x in leaves.items()]
    if as_json:
        click.echo(json.dumps({"file": str(file), "leaves": rows, "metadata": ck.shown_metadata()}, indent=1))
        return
    total, numbers = sum(r["bytes"] for r in rows), sum(r["numbers"] for r in rows)
    if depth is not None:
        rows = _summed(rows, depth)
    cells = [(named(r["path"]), r["type"], f"{r['numbers']:,}", size(r["bytes"]), _bits(r)) for r in rows]
    table(("path", "type", "numbers", "bytes", "bits each"), cells, right=(2, 3, 4))
    click.echo(f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}, {numbers:,} numbers, {size(total)}")


def _row(path: str, x: Any) -> dict[str, Any]:
    if not isinstance(x, Leaf):
        return {"path": path, "type": repr(x), "shape": [], "numbers": 0, "bytes": 0}
    ty = x.type
    return {"path": path, "type": show(ty), "shape": list(ty.shape), "numbers": ty.size, "bytes": x.nbytes}


def _bits(row: dict[str, Any]) -> str:
    return f"{8 * row['bytes'] / row['numbers']:.2f}" if row["numbers"] else ""


def _summed(rows: list[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for r in rows:
        path = ".".join(r["path"].split(".")[:depth])
        into = out.setdefault(path, {"path": path, "types": {}, "numbers": 0, "bytes": 0})
        kind = r["type"].partition("[")[0]
        into["types"][kind] = into["types"].get(kind, 0) + 1
        into["numbers"] += r["numbers"]
        into["bytes"] += r["bytes"]
    return [r | {"type": ", ".join(f"{n} {k}" for k, n in r["types"].items())} for r in out.values()]


def _formats(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Formats that begin so; if none does, files of rules."""
    return [CompletionItem(f) for f in formats() if f.startswith(begun)] or [CompletionItem(begun, type="file")]


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--recipe", default="int8", show_default=True, help="A format's name, or a TOML file of rules.", shell_complete=_formats
)
@click.option("--again", is_flag=True, help="Also what is quantized already, made dense first.")
@click.option("--shard-bytes", type=click.IntRange(1), help="Write a folder of files of about this many bytes.")
@click.option("--dry-run", is_flag=True, help="Only show what would become of each tensor.")
@FORCE
@click.option("--json", "as_json", is_flag=True, help="Print what became of each tensor as JSON.")
def quantize(
    source: Path, target: Path, recipe: str, again: bool, shard_bytes: int | None, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Quantize a checkpoint by a recipe.

    IN is a safetensors or GGUF file or a folder of Hugging Face's layout. OUT becomes one safetensors file, whatever IN is;
    with --shard-bytes, a folder of several and their index. Memory holds about one tensor and its result.
    """
    if target.suffix.lower() == ".gguf":
        raise click.UsageError("quantize writes safetensors files: for GGUF there is convert --blocks")
    try:
        rules_of(recipe)
    except ValueError as e:
        raise (click.ClickException if recipe.endswith(".toml") else click.UsageError)(str(e)) from None
    if not dry_run:
        may_be_safetensors(target, shard_bytes)
        may_write(target, force)
    ck = _open.open_checkpoint(source)
    leaves = {p: x for p, x in ck.leaves().items() if isinstance(x, Leaf)}
    types = {p: _array_type(x.type) if again and _stands_for_floats(x.type) else x.type for p, x in leaves.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype float64")  # told below, of each tensor
        planned, report = quantize_tree(types, recipe)
    if report.leaves and all(t.rule is None for t in report.leaves) and not dry_run:
        some = ", ".join(named(t.path) for t in report.leaves[:5])
        raise click.ClickException(
            f"no rule of {recipe} matches a path of {source}, which has {some}, …: nothing is written"
        )
    treat, one = {t.path for t in report.changed}, quantizer(recipe, types)

    def make(path: str, x: Any) -> Any:
        return _in_parts(planned[path], lambda x: one(path, x), _narrow(path, _dense(x))) if path in treat else x

    if not dry_run:
        _write(ck, target, lambda p, x: planned[p] if p in treat else x.type, make, shard_bytes)
    if as_json:
        rows = [t.__dict__ for t in report.leaves]
        click.echo(json.dumps({"leaves": rows, "unmatched": report.unmatched}, indent=1))
    else:
        click.echo(str(replace(report, leaves=tuple(replace(t, path=named(t.path)) for t in report.leaves))))


def _narrow(path: str, x: Any) -> Any:
    """An array as JAX holds it: float32 in place of float64, unless that is enabled."""
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        click.echo(f"{named(path)} is float64, and quantized as float32: set JAX_ENABLE_X64=1 for more", err=True)
        return _cast(path, x, jnp.dtype("float32"))
    return x


def _stands_for_floats(ty: Any) -> bool:
    return isinstance(ty, ValueType) and hasattr(ty, "dtype") and jnp.issubdtype(ty.dtype, jnp.floating)


def _array_type(ty: Any) -> Any:
    return jax.ShapeDtypeStruct(ty.shape, ty.dtype)


def _in_parts(ty: Any, quantized: Callable[[Any], Any], x: Any) -> Any:
    """A quantized array, some rows after the others if no scale is shared among rows: the same, in less memory."""
    rows = isinstance(ty, QuantizedType) and all_groups(ty)[0] == 1 and x.nbytes > PART and x.shape[0] > 1
    if not rows or any(a.shape[:1] != x.shape[:1] for a in ty.lo_ty()):
        return quantized(x)
    step = max(1, PART * x.shape[0] // x.nbytes)
    return concatenate(*(quantized(x[i : i + step]) for i in range(0, x.shape[0], step)), dimension=0)


FLOATS = ("same", "float32", "bfloat16", "float16", "float64")


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--dense", "dtype", type=click.Choice(FLOATS), help="Write what each value stands for, in this dtype (or its own)."
)
@click.option(
    "--blocks", type=click.Choice([k for k in BLOCKS if not k.endswith("_K")]), help="Matrices as such blocks of ggml."
)
@click.option("--architecture", help="What a GGUF file says of the model, if IN does not.")
@click.option("--shard-bytes", type=click.IntRange(1), help="Write a folder of files of about this many bytes.")
@FORCE
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def convert(
    source: Path,
    target: Path,
    dtype: str | None,
    blocks: str | None,
    architecture: str | None,
    shard_bytes: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint as a safetensors file, with the same types and bits, or dense; as GGUF if OUT ends with .gguf.

    IN is a safetensors or GGUF file or a folder of Hugging Face's layout. A GGUF file holds arrays and blocks of ggml: give
    --dense or --blocks for other values. With --shard-bytes, OUT is a folder of safetensors files and their index. Memory
    holds about one tensor and its result.
    """
    gguf = target.suffix.lower() == ".gguf"
    if not gguf and (blocks or architecture):
        raise click.UsageError("--blocks and --architecture are for GGUF files: let OUT end with .gguf")
    if gguf and shard_bytes:
        raise click.UsageError("a GGUF file is one file: --shard-bytes is for safetensors")
    if not gguf:
        may_be_safetensors(target, shard_bytes)
    may_write(target, force)
    ck = _open.open_checkpoint(source)
    to = jnp.dtype(dtype) if dtype not in (None, "same") else None

    def types(_: str, x: Leaf) -> Any:
        floats = isinstance(x.type, ValueType) or jnp.issubdtype(x.type.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.type.shape, to or x.type.dtype) if dtype is not None and floats else x.type

    made = lambda p, x: _cast(p, _dense(x), to) if dtype is not None else x
    if gguf:
        n = _write_gguf(ck, target, types, made, blocks, architecture)
    else:
        n = _write(ck, target, types, made, shard_bytes)
    click.echo(json.dumps({"file": str(target), "bytes": n}) if as_json else printable(f"{target}: {size(n)}"))


def _write_gguf(
    ck: Any, target: Path, types: Any, make: Callable[[str, Any], Any], blocks: str | None, architecture: str | None
) -> int:
    """Write the leaves of a checkpoint as a GGUF file; gives its bytes."""
    known = isinstance(ck, GgufCheckpoint)
    metadata, kinds = (dict(ck.metadata), ck.kinds) if known else ({}, {})
    if architecture is not None:
        metadata["general.architecture"] = architecture
    if "general.architecture" not in metadata:
        raise click.UsageError("a GGUF file says what model it holds: give --architecture")
    leaves = {p: x for p, x in ck.leaves().items() if isinstance(x, Leaf)}
    if left := [p for p, x in ck.leaves().items() if x is not None and p not in leaves]:
        click.echo(f"left out, since GGUF holds arrays: {', '.join(map(named, left))}", err=True)
    planned = {p: types(p, x) for p, x in leaves.items()}
    if blocks:
        planned = {p: _in_blocks(ty, blocks) for p, ty in planned.items()}
    with progress(sum(x.nbytes for x in leaves.values()), target.name) as done:

        def value(path: str) -> Any:
            x = taken(ck, leaves[path])
            x = make(path, x)
            done(path, leaves[path].nbytes)
            return _dense(x) if blocks and not isinstance(x, Ggml) else x

        save_each(target, planned, value, metadata, kinds)
    return target.stat().st_size


def _in_blocks(ty: Any, blocks: str) -> Any:
    """The type in blocks, of matrices whose rows are whole ones."""
    floats = _stands_for_floats(ty) if isinstance(ty, ValueType) else jnp.issubdtype(ty.dtype, jnp.floating)
    if not floats or ty.shape[-1:] == () or len(ty.shape) < 2 or ty.shape[-1] % BLOCKS[blocks].values:
        return ty
    return ty if isinstance(ty, ValueType) and ty.decl.cls is Ggml else type_of(blocks, tuple(ty.shape))


def _dense(x: Any) -> Any:
    return dense(x) if isinstance(jax.typeof(x), ValueType) else x


def _cast(path: str, x: Any, to: Any) -> Any:
    """An array in another dtype, if it is of floats.

    Raises:
      ValueError: if a number would become infinite.
    """
    if to is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if to.itemsize == 8 and not jax.config.jax_enable_x64:
        return np.asarray(x).astype(to)  # which JAX does not hold: NumPy does
    if jnp.finfo(to).max < jnp.finfo(x.dtype).max:
        largest = np.float64(_largest(x))
        if np.isinf(largest.astype(to)):
            raise ValueError(
                f"{named(path)} has a number of magnitude {largest:.3g}, and {to} ends at {float(jnp.finfo(to).max):.3g}: "
                f"give --dense {'float64' if largest > np.finfo(np.float32).max else 'float32'}"
            )
    return x.astype(to)


def _largest(x: Any) -> Any:
    """The largest magnitude of the finite entries."""
    if isinstance(x, np.ndarray):
        flat = x.reshape(-1)
        parts = (flat[i : i + PART // 8] for i in range(0, flat.size, PART // 8))
        return max((np.max(np.abs(p), where=np.isfinite(p), initial=0) for p in parts), default=0)
    return _largest_of(x)


@jax.jit
def _largest_of(x: Any) -> Any:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)


def _write(ck: Any, target: Path, types: Any, make: Callable[[str, Any], Any], shard_bytes: int | None) -> int:
    """Write the leaves of a checkpoint anew, each when its turn comes; gives the bytes of all."""
    told, leaves = ck.retyped(types)
    sources = {p: x for p, x in ck.leaves().items() if isinstance(x, Leaf)}
    with progress(sum(x.nbytes for x in sources.values()), target.name) as done:

        def value(i: int) -> Any:
            path = leaves[i].path
            x = make(path, taken(ck, sources[path]))
            done(path, sources[path].nbytes)
            return x

        save_leaves(target, told, leaves, value, shard_bytes=shard_bytes)
    return sum(leaf.nbytes for leaf in leaves)
