"""What the commands on files share: messages in place of stack traces, tables, progress."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table

from typax.io import FileError


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """A user's mistake is one line on stderr, and exit status 1."""
    try:
        yield
    except FileError as e:
        raise click.ClickException(str(e)) from None
    except (ValueError, TypeError, ImportError) as e:
        if isinstance(e, click.ClickException):
            raise
        raise click.ClickException(str(e)) from None
    except OSError as e:
        if isinstance(e, BrokenPipeError):
            raise
        raise click.ClickException(f"{e.filename}: {e.strerror}" if e.filename else str(e)) from None


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on a terminal, columns with spaces between in a pipe."""
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
            bar.update(task, description=rich.markup.escape(what), advance=n)

        yield done


def size(n: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"
