"""``typax compare``: how far the tensors of one checkpoint are from those of another."""

import json
import math
from pathlib import Path
from typing import Any

import click
import numpy as np

from typax._structural import dense
from typax._type import ValueType
from typax.cli._common import messages, progress, table
from typax.io import _open
from typax.io._save import chooser
from typax.io._tree import Leaf


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--only", multiple=True, help="Only what a pattern chooses. May be repeated.")
@click.option("--worst", type=click.IntRange(1), help="Show only so many tensors, the worst first.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a picture of the errors (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def compare(a: Path, b: Path, only: tuple[str, ...], worst: int | None, plot: Path | None, as_json: bool) -> None:
    """Compare what the tensors of B stand for with those of A, the exact ones: worst first.

    SQNR is the ratio of the power of A to that of the difference, in dB: 6 dB are one bit. Exit status 1 if a tensor of one
    is not in the other, or of another shape.
    """
    with messages():
        one, two = _open.open_checkpoint(a), _open.open_checkpoint(b)
        chosen = chooser(only) if only else lambda p: True
        left = {p: x for p, x in one.leaves().items() if isinstance(x, Leaf) and chosen(p)}
        right = {p: x for p, x in two.leaves().items() if isinstance(x, Leaf) and chosen(p)}
        rows, wrong = [], []
        wrong += [f"{p} is only in {a}" for p in left if p not in right] + [
            f"{p} is only in {b}" for p in right if p not in left
        ]
        both = [p for p in left if p in right]
        with progress(sum(left[p].nbytes for p in both), "comparing") as done:
            for p in both:
                x, y = left[p], right[p]
                if tuple(x.type.shape) != tuple(y.type.shape):
                    wrong.append(f"{p} has the shape {list(x.type.shape)} in {a} and {list(y.type.shape)} in {b}")
                elif getattr(x.type, "dense_type", None) is None or not isinstance(x.type.dense_type, dict | tuple):
                    rows.append({"path": p, **errors(_array(one, x), _array(two, y))})
                one.release(x)
                two.release(y)
                done(p, x.nbytes)
        rows.sort(key=lambda r: (r["sqnr"], -r["max"]))
        if plot is not None:
            picture(rows, plot, f"{b.name} against {a.name}")
    if as_json:
        click.echo(json.dumps({"rows": [_finite(r) for r in rows], "unlike": wrong}, indent=1))
    elif rows:
        shown = rows[:worst] if worst else rows
        cells = [(r["path"], *(f"{r[k]:.3g}" for k in ("max", "rms", "relative")), f"{r['sqnr']:.1f}") for r in shown]
        table(("path", "max error", "rms error", "rms of A's", "SQNR dB"), cells, right=(1, 2, 3, 4))
    for line in wrong:
        click.echo(line, err=True)
    if not rows and not wrong:
        click.echo("there is nothing to compare", err=True)
    if wrong or not rows:
        raise SystemExit(1)


def _array(ck: Any, leaf: Leaf) -> np.ndarray:
    x = ck.value(leaf)
    return np.asarray(dense(x) if isinstance(leaf.type, ValueType) else x)


def errors(x: Any, y: Any) -> dict[str, float]:
    """The largest and the root mean square difference, this over the latter of ``x``, and the SQNR in dB.

    Entries that are NaN, or the same infinity, in both do not differ.
    """
    x, y = (np.asarray(v, np.float64).reshape(-1) for v in (x, y))
    with np.errstate(invalid="ignore"):
        d = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, y - x)
    if not d.size:
        return {"max": 0.0, "rms": 0.0, "relative": 0.0, "sqnr": math.inf}
    d = np.where(np.isnan(d), np.inf, np.abs(d))
    power, noise = float(np.mean(np.square(x[np.isfinite(x)]))) if np.isfinite(x).any() else 0.0, float(np.mean(d * d))
    sqnr = (
        math.inf if noise == 0 else -math.inf if not math.isfinite(noise) or power == 0 else 10 * math.log10(power / noise)
    )
    relative = 0.0 if noise == 0 else math.sqrt(noise / power) if power else math.inf
    return {"max": float(d.max()), "rms": math.sqrt(noise), "relative": relative, "sqnr": sqnr}


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
    axes.barh([r["path"] for r in reversed(finite)], [r["sqnr"] for r in reversed(finite)])
    axes.set_xlabel("SQNR, dB")
    axes.set_title(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise click.ClickException(f"{path}: {e}") from None
    pyplot.close(figure)
