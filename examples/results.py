"""Tables of results: on the terminal, and as the README has them, which `make demo` compares with what it found.

    <!-- make demo: NAME -->      begins a table of README.md
    <!-- end of NAME -->          ends it

A number that depends on the machine is in a column whose heading ends with a star.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

README = Path(__file__).resolve().parent.parent / "README.md"
MINILM = ("weights", "MB", "mean cosine", "min cosine", "WordSim-353", "time*", "from the file")
SMOLLM2 = ("weights", "MB", "perplexity", "same next token", "same 64 tokens", "tokens/s*", "speed*")


def show(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """Print a table."""
    table = Table(title=title, caption=caption)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as the README has it."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, rule, *rows))


def written(name: str, readme: Path = README) -> str:
    """The table of this name in the README; ValueError if there is none."""
    found = re.search(_marked(name), readme.read_text(encoding="utf-8"), re.DOTALL)
    if not found:
        raise ValueError(f"{readme.name} has no table between <!-- make demo: {name} --> and <!-- end of {name} -->")
    return found[2].strip()


def write(name: str, table: str, readme: Path = README) -> None:
    """Put a table into the README."""
    written(name, readme)
    text = readme.read_text(encoding="utf-8")
    readme.write_text(re.sub(_marked(name), lambda m: f"{m[1]}\n{table}\n{m[3]}", text, flags=re.DOTALL), encoding="utf-8")


def differences(table: str, other: str) -> list[str]:
    """Where a table says otherwise than another: cells of columns without a star, each as a sentence."""
    new, old = ([[c.strip() for c in line.strip("| ").split(" | ")] for line in t.splitlines()] for t in (table, other))
    if new[0] != old[0]:
        return [f"its columns are {', '.join(old[0])}, not {', '.join(new[0])}"]
    have = {row[0]: row for row in old[2:]}
    lines = [f"it has no row {row[0]}" for row in new[2:] if row[0] not in have]
    for row in new[2:]:
        for heading, cell, was in zip(new[0], row, have.get(row[0], row), strict=True):
            if cell != was and not heading.endswith("*"):
                lines.append(f"{row[0]}, {heading}: {was} there, {cell} here")
    return lines


def _marked(name: str) -> str:
    return rf"(<!-- make demo: {re.escape(name)} -->)\n(.*?)(<!-- end of {re.escape(name)} -->)"
