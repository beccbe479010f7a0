"""``typax compare``: how far the tensors of one checkpoint are from those of another."""

import json
import math
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from typax._describe import show
from typax._structural import dense
from typax._type import ValueType
from typax.cli._common import FORCE, may_write, named, printable, progress, table, taken
from typax.io import _open
from typax.io._disk import replacing
from typax.io._save import chooser
from typax.io._tree import Leaf, is_key


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--only", multiple=True, help="Only what a pattern chooses. May be repeated.")
@click.option("--worst", type=click.IntRange(1), help="Show only so many tensors, the worst first.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a picture of the errors (needs matplotlib).")
@FORCE
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def compare(
    a: Path, b: Path, only: tuple[str, ...], worst: int | None, plot: Path | None, force: bool, as_json: bool
) -> None:
    """Compare what the tensors of B stand for with those of A, the exact ones: worst first.

    SQNR is the ratio of the power of A to that of the difference, in dB: 6 dB are one bit. Exit status 1 if a tensor of one
    is not in the other, or of another shape.
    """
    if plot is not None:
        may_write(plot, force)
    one, two = _open.open_checkpoint(a), _open.open_checkpoint(b)
    chosen = chooser(only) if only else lambda p: True
    left, right = ({p: x for p, x in ck.leaves().items() if chosen(p)} for ck in (one, two))
    if only and not (left or right):
        raise click.ClickException(f"no path is chosen by {', '.join(only)}")
    wrong = [f"{named(p)} is only in {a}" for p in left if p not in right]
    wrong += [f"{named(p)} is only in {b}" for p in right if p not in left]
    rows, both = [], [p for p in left if p in right]
    with progress(sum(_bytes(left[p]) for p in both), "comparing") as done:
        for p in both:
            x, y = left[p], right[p]
            if why := _unlike(x, y, a, b):
                wrong.append(f"{named(p)} {why}")
            elif isinstance(x, Leaf):
                rows.append({"path": p, **errors(_array(one, x), _array(two, y))})
            done(p, _bytes(x))
    rows.sort(key=lambda r: (r["sqnr"], -r["max"]))
    if plot is not None:
        picture(rows, plot, f"{b.name} against {a.name}")
    if as_json:
        click.echo(json.dumps({"rows": [_finite(r) for r in rows], "unlike": wrong}, indent=1))
    elif rows:
        worst_first = rows[:worst] if worst else rows
        cells = [
            (named(r["path"]), *(f"{r[k]:.3g}" for k in ("max", "rms", "relative")), f"{r['sqnr']:.1f}") for r in worst_first
        ]
        table(("path", "max error", "rms error", "rms of A's", "SQNR dB"), cells, right=(1, 2, 3, 4))
    for line in wrong:
        click.echo(printable(line), err=True)
    if not rows and not wrong:
        click.echo("there is nothing to compare", err=True)
    if wrong or not rows:
        raise SystemExit(1)


def _bytes(x: Any) -> int:
    return x.nbytes if isinstance(x, Leaf) else 0


def _unlike(x: Any, y: Any, a: Path, b: Path) -> str | None:
    """Why two leaves cannot be compared as arrays; ``None`` if they can, or are the same."""
    if not isinstance(x, Leaf) or not isinstance(y, Leaf):
        told = [show(v.type) if isinstance(v, Leaf) else repr(v) for v in (x, y)]
        return None if x == y else f"is {told[0]} in {a} and {told[1]} in {b}"
    if any(isinstance(getattr(v.type, "dense_type", None), dict | tuple) for v in (x, y)):
        return "stands for several arrays, which are not compared"
    if tuple(x.type.shape) != tuple(y.type.shape):
        return f"has the shape {list(x.type.shape)} in {a} and {list(y.type.shape)} in {b}"
    return None


def _array(ck: Any, leaf: Leaf) -> np.ndarray:
    """What a leaf stands for, flat; complex numbers as pairs, keys of random numbers as their words."""
    x = taken(ck, leaf)
    if isinstance(leaf.type, ValueType):
        x = dense(x)
    if is_key(x.dtype):
        x = jax.random.key_data(x)
    x = np.asarray(x).reshape(-1)
    return x.view(np.dtype(f"f{x.itemsize // 2}")) if np.iscomplexobj(x) else x


PART = 2**21
"""Numbers that are compared at a time."""


def errors(x: Any, y: Any) -> dict[str, float]:
    """The largest and the root mean square difference, this over the latter of ``x``, and the SQNR in dB.

    Entries that are NaN, or the same infinity, in both do not differ.
    """
    x, y = (np.asarray(v).reshape(-1) for v in (x, y))
    if not x.size:
        return {"max": 0.0, "rms": 0.0, "relative": 0.0, "sqnr": math.inf}
    largest, noise, power, finite = 0.0, 0.0, 0.0, 0
    for i in range(0, x.size, PART):
        a, b = (v[i : i + PART].astype(np.float64) for v in (x, y))
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.abs(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, b - a))
            d[np.isnan(d)] = np.inf
            largest, noise = max(largest, float(d.max())), noise + float(np.sum(d * d))
            a = a[np.isfinite(a)]
            power, finite = power + float(np.sum(a * a)), finite + a.size
    noise, power = noise / x.size, power / max(finite, 1)
    sqnr = (
        math.inf if noise == 0 else -math.inf if not math.isfinite(noise) or power == 0 else 10 * math.log10(power / noise)
    )
    relative = 0.0 if noise == 0 else math.sqrt(noise / power) if power else math.inf
    return {"max": largest, "rms": math.sqrt(noise), "relative": relative, "sqnr": sqnr}


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in row.items()}


def picture(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """A bar for each tensor's SQNR, the worst on top."""
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]

        matplotlib.use("Agg")
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install 'typax[plot]'") from None
    finite = [r for r in rows if math.isfinite(r["sqnr"])][:60]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * max(1, len(finite))), layout="constrained")
    axes.barh([named(r["path"]) for r in reversed(finite)], [r["sqnr"] for r in reversed(finite)])
    axes.set_xlabel("SQNR, dB")
    axes.set_title(title)
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise click.UsageError(f"{path}: pictures are not written as {kind}: let it end with .png, .svg or .pdf")
    with replacing(path) as file:
        figure.savefig(file, format=kind)
    pyplot.close(figure)
