"""What the cells of the matrix are expected to be, for each JAX, and how docs/limits.md shows them.

tests/data/matrix.json holds for each row and side one cell, or one for each version where they differ.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from _matrix import ROWS, Row, load

ROOT = Path(__file__).parents[2]
FILE, PAGE = ROOT / "tests" / "data" / "matrix.json", ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- the matrix: written by make matrix -->", "<!-- end of the matrix -->"
SIDES = ("raw", "typax")
TITLES = {
    "jit": "jit and ahead of time",
    "autodiff": "Derivatives",
    "mapping": "vmap",
    "control": "Loops, branches, callbacks",
    "sharding": "Placement (explicit and automatic axes)",
    "shardmap": "shard_map and collectives",
    "arrays": "What arrays do",
    "libraries": "Libraries",
    "processes": "Two processes",
    "types": "Records, factors, other tangents",
}


@functools.cache
def read() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {"versions": [], "rows": {}}


def number(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.split(".") if p.isdigit())


def by_version(cells: Any, versions: list[str]) -> dict[str, str]:
    """The cells that are known: a row that needs what is not installed has none."""
    return dict.fromkeys(versions, cells) if isinstance(cells, str) else cells


def store(cells: dict[str, dict[str, str]], version: str = jax.__version__) -> None:
    """Put the cells of this JAX into the file; a row that needs what is not installed keeps what it had."""
    old, rows = read(), {}
    versions = sorted({*old["versions"], version}, key=number)
    for key in load():
        rows[key] = {}
        for side in SIDES:
            known = by_version(old["rows"].get(key, {}).get(side, {}), old["versions"])
            new = cells.get(side, {}).get(key, "absent")
            if not new.startswith("absent"):
                known = known | {version: new}
            everywhere = len(known) == len(versions) and len(set(known.values())) == 1
            rows[key][side] = known[version] if everywhere else {v: known[v] for v in versions if v in known}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(sides)}" for key, sides in rows.items())
    FILE.parent.mkdir(exist_ok=True)
    read.cache_clear()
    FILE.write_text(f'{{"versions": {json.dumps(versions)},\n"rows": {{\n{lines}\n}}}}\n')


def expected(key: str, side: str, version: str = jax.__version__) -> str:
    """The cell of a row on this JAX; on one that is not in the file, that of the newest one."""
    data = read()
    cells = by_version(data["rows"][key][side], data["versions"])
    return cells.get(version) or cells[max(cells, key=number)]


def verdict(cell: str) -> str:
    """What must not change without being seen: ``works``, ``raises TypeError``, ``WRONG``."""
    return cell.partition(":")[0] if cell.startswith(("raises", "UNCLEAR")) else cell.partition(" ")[0]


# --- the page


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _shown(cells: Any, versions: list[str], said: bool) -> str:
    """A cell of the page: what an error says only where it is typax that says it."""

    def one(cell: str) -> str:
        if not cell.startswith("raises"):
            return cell
        name, _, text = cell.removeprefix("raises ").partition(": ")
        return f"{name}: {text}" if said else name

    if isinstance(cells, str):
        return _escaped(one(cells))
    groups: dict[str, list[str]] = {}
    for v in filter(cells.get, versions):
        groups.setdefault(one(cells[v]), []).append(v)
    if not groups:
        return "not run"
    if len(groups) == 1:
        return _escaped(next(iter(groups)))
    return "; ".join(f"{', '.join(vs)}: {_escaped(text)}" for text, vs in groups.items())


def table(kind: str, data: dict[str, Any]) -> Iterator[str]:
    yield f"### {TITLES[kind]}"
    yield ""
    yield "| call | JAX | typax |"
    yield "| --- | --- | --- |"
    for r in ROWS.values():
        if r.kind == kind and (sides := data["rows"].get(r.key)):
            raw, ours = (_shown(sides[s], data["versions"], s == "typax") for s in SIDES)
            yield f"| {_escaped(r.name)} | {raw} | {ours} |"
    yield ""


def counted(data: dict[str, Any], chosen: Any, side: str = "typax") -> tuple[int, int]:
    """How many of the chosen rows work on every version, and how many there are."""
    rows = [r for r in load().values() if chosen(r)]
    cells = [by_version(data["rows"][r.key][side], data["versions"]) for r in rows if r.key in data["rows"]]
    return sum(set(c.values()) == {"works"} for c in cells), len(cells)


def is_wanted(r: Row) -> bool:
    return r.red and r.error is None


def summary() -> str:
    data = read()
    red = counted(data, is_wanted)
    errors = counted(data, lambda r: r.error is not None)[1]
    rest = counted(data, lambda r: not r.red)
    return (
        f"Of {red[1]} calls that JAX refuses and a user expects to work, {red[0]} work through typax; of {rest[1]} that "
        f"work in JAX, {rest[0]} do. {errors} calls are errors by nature, and say what to write instead. Tried on JAX "
        f"{', '.join(data['versions'])}."
    )


def page() -> str:
    """The part of docs/limits.md between the marks."""
    data = read()
    lines = [summary(), ""]
    for kind in TITLES:
        if any(r.kind == kind for r in load().values()):
            lines += table(kind, data)
    return "\n".join(lines)


def write_page() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{page()}{END}{after}")
