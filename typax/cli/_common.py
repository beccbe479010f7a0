"""What the commands on files share: messages in place of stack traces, tables, progress."""

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table

from typax.io._save import INDEX, PICKLES
from typax.io._tree import Leaf


class Commands(click.Group):
    """Commands of which a mistake is a line on stderr, and Ctrl-C is no news."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise SystemExit(130) from None
        except click.ClickException as e:
            vars(e)["message"] = printable(e.message)
            raise
        except BrokenPipeError:
            raise  # by click, without a word
        except OSError as e:
            raise click.ClickException(printable(f"{e.filename}: {e.strerror}" if e.filename else e)) from None
        except (ValueError, TypeError, ImportError, NotImplementedError, OverflowError) as e:
            raise click.ClickException(printable(" ".join(str(e).split("\n")))) from None
        except MemoryError:
            raise click.ClickException("there is not enough memory") from None


def printable(text: Any) -> str:
    """A text of one line, in which what would move a terminal's cursor, or change its colours, is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def named(path: str) -> str:
    """The name of a tensor, as it is printed."""
    return printable(path) or "''"


FORCE = click.option("-f", "--force", is_flag=True, help="Overwrite what is there.")


def may_write(target: Path, force: bool) -> None:
    """Raise unless a file, or a checkpoint in a folder, may be written there, if what is there is to be overwritten."""
    taken = (target / INDEX).exists() if target.is_dir() else target.exists()
    if taken and not force:
        raise click.ClickException(f"{target} is there already: give --force to overwrite it")


OTHERS = (
    *PICKLES, ".npz", ".npy", ".h5", ".hdf5", ".msgpack", ".onnx", ".pb", ".tflite", ".json", ".toml", ".yaml", ".txt",
    ".py", ".zip", ".tar", ".gz",
)  # fmt: skip
"""Names' ends that tell of another kind of file than safetensors."""


def may_be_safetensors(target: Path, shard_bytes: int | None) -> None:
    """Raise unless the name is one for a safetensors file, or for a folder of several."""
    if target.suffix.lower() in OTHERS:
        raise click.UsageError(f"{target} would be a safetensors file: let it end with .safetensors, not {target.suffix}")
    if shard_bytes is None and target.is_dir():
        raise click.UsageError(
            f"{target} is a folder, and one file is written: name it, or give --shard-bytes to write files into the folder"
        )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on a terminal, columns with spaces between in a pipe."""
    rows = [[printable(c) for c in row] for row in rows]
    if sys.stdout.isatty():
        drawn = rich.table.Table(box=rich.box.SIMPLE)
        for i, h in enumerate(headings):
            drawn.add_column(h, justify="right" if i in right else "left", overflow="fold")
        for row in rows:
            drawn.add_row(*(rich.markup.escape(c) for c in row))
        rich.console.Console().print(drawn)
        return
    everything = [headings, *rows]
    widths = [max(len(r[i]) for r in everything) for i in range(len(headings))]
    for row in everything:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        click.echo("  ".join(cells).rstrip())


@contextlib.contextmanager
def progress(total: int, doing: str) -> Iterator[Any]:
    """A bar with bytes and rate on stderr; what is given is called with what is done and its bytes."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=total)

        def done(what: str, n: int) -> None:
            bar.update(task, description=rich.markup.escape(named(what)), advance=n)

        yield done


PART = 2**25
"""Bytes of a large tensor, and of the rows of one that are quantized at a time where they have scales of their own."""


def taken(ck: Any, leaf: Leaf) -> Any:
    """The value of a leaf, and the file's memory of it let go of before there is a result."""
    if leaf.nbytes > PART:
        gc.collect()  # else JAX lets go of the arrays of NumPy that it uses as they are one tensor later
    x = ck.value(leaf)
    ck.release(leaf)
    return x


def size(n: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"
