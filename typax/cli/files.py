"""``typax inspect``, ``quantize`` and ``convert``: checkpoints from one form to another, a tensor at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

from typax._describe import show
from typax._recipe import quantize_tree
from typax._structural import dense
from typax._type import ValueType
from typax.cli._common import messages, progress, size, table
from typax.io import _open
from typax.io._save import chooser, save_leaves
from typax.io._tree import Leaf


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--depth", type=click.IntRange(1), help="Sum up what is deeper in the tree than so many names.")
@click.option("--only", multiple=True, help="Only what a pattern chooses, as layers.0 or *.weight. May be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def inspect(file: Path, depth: int | None, only: tuple[str, ...], as_json: bool) -> None:
    """What is in a checkpoint: types, shapes, bytes.

    FILE is a safetensors or GGUF file, an index, or a folder of Hugging Face's layout.
    """
    with messages():
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
    cells = [(r["path"], r["type"], f"{r['numbers']:,}", size(r["bytes"]), _bits(r)) for r in rows]
    table(("path", "type", "numbers", "bytes", "bits each"), cells, right=(2, 3, 4))
    click.echo(f"{len(leaves)} leaves, {numbers:,} numbers, {size(total)}")


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


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--recipe", default="int8", show_default=True, help="A format's name, or a TOML file of rules.")
@click.option("--shard-bytes", type=click.IntRange(1), help="Write a folder of files of about this many bytes.")
@click.option("--dry-run", is_flag=True, help="Only show what would become of each tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print what became of each tensor as JSON.")
def quantize(source: Path, target: Path, recipe: str, shard_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Quantize a checkpoint by a recipe.

    IN is a safetensors or GGUF file or a folder of Hugging Face's layout; OUT becomes a safetensors file. Memory holds about
    one tensor and its result.
    """
    with messages():
        ck = _open.open_checkpoint(source)
        leaves = {p: x for p, x in ck.leaves().items() if isinstance(x, Leaf)}
        planned, report = quantize_tree({p: x.type for p, x in leaves.items()}, recipe)
        treat = {t.path: t for t in report.changed}
        if not dry_run:
            make = lambda path, x: quantize_tree({path: x}, recipe)[0][path] if path in treat else x
            _write(ck, target, lambda p, _: planned[p], make, shard_bytes)
    if as_json:
        rows = [t.__dict__ for t in report.leaves]
        click.echo(json.dumps({"leaves": rows, "unmatched": report.unmatched}, indent=1))
    else:
        click.echo(str(report))


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--dense", "dtype", help="Write what each value stands for, in this dtype (or 'same').")
@click.option("--shard-bytes", type=click.IntRange(1), help="Write a folder of files of about this many bytes.")
def convert(source: Path, target: Path, dtype: str | None, shard_bytes: int | None) -> None:
    """Write a checkpoint as a safetensors file, with the same types and bits, or dense.

    IN is a safetensors or GGUF file or a folder of Hugging Face's layout.
    """
    with messages():
        ck = _open.open_checkpoint(source)
        to = jnp.dtype(dtype) if dtype not in (None, "same") else None

        def types(_: str, x: Leaf) -> Any:
            floats = isinstance(x.type, ValueType) or jnp.issubdtype(x.type.dtype, jnp.floating)
            return jax.ShapeDtypeStruct(x.type.shape, to or x.type.dtype) if dtype is not None and floats else x.type

        n = _write(ck, target, types, lambda _, x: _dense(x, to) if dtype is not None else x, shard_bytes)
    click.echo(f"{target}: {size(n)}")


def _dense(x: Any, to: Any) -> Any:
    if isinstance(jax.typeof(x), ValueType):
        x = dense(x)
    return x.astype(to) if to is not None and jnp.issubdtype(x.dtype, jnp.floating) else x


def _write(ck: Any, target: Path, types: Any, make: Callable[[str, Any], Any], shard_bytes: int | None) -> int:
    """Write the leaves of a checkpoint anew, each when its turn comes; gives the bytes of all."""
    told, leaves = ck.retyped(types)
    sources = {p: x for p, x in ck.leaves().items() if isinstance(x, Leaf)}
    with progress(sum(x.nbytes for x in sources.values()), target.name) as done:

        def value(i: int) -> Any:
            path = leaves[i].path
            x = make(path, ck.value(sources[path]))
            ck.release(sources[path])
            done(path, sources[path].nbytes)
            return x

        save_leaves(target, told, leaves, value, shard_bytes=shard_bytes)
    return sum(leaf.nbytes for leaf in leaves)
