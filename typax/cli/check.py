"""``typax check``: laws of types and ops.

    typax check mypackage.types              every value class and op of a module
    typax check mypackage.types:QArray       one class, with the ops of its module that take it; or one op
    typax check types.py --json

A matrix of laws and subjects is printed, with reasons.  Exit status: 0 if no law is broken, 1 if one is, 2 if the target
cannot be read, nothing of it could be checked, or examples cannot be made.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import rich.box
import rich.console
import rich.progress
import rich.table

from typax import laws
from typax._op import Op, by_name

_MARK = {"pass": "[green]pass[/]", "fail": "[bold red]FAIL[/]", "no example": "[red]?[/]", "not applicable": "[dim]-[/]"}


@click.command()
@click.argument("target", metavar="MODULE[:NAME]")
@click.option("--op", "ops", multiple=True, help="Check this op of the module too, or only these. May be repeated.")
@click.option("--law", "names", multiple=True, help="Check this law only. May be repeated.")
@click.option("--examples", help="MODULE:NAME of examples, as typax.laws.check takes them.")
@click.option("--max-examples", default=2, show_default=True, help="Examples beside a plain, a stacked and an edge case.")
@click.option("--json", "as_json", is_flag=True, help="Print the cells as JSON.")
def check(
    target: str, ops: tuple[str, ...], names: tuple[str, ...], examples: str | None, max_examples: int, as_json: bool
) -> None:
    """Check a type, and the ops on it, against the laws."""
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):  # read when JAX looks for its devices
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=8".strip()
    sys.path.insert(0, os.getcwd())
    module, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    space = _load(module)
    given = _named(examples) if examples else None
    try:
        found = _subjects(space, name, ops, given)
        todo = list(laws.pairs(found, names or None))
    except (TypeError, ValueError) as e:
        raise click.UsageError(str(e)) from None
    unchecked = [c.__name__ for c in laws.written_by_hand(space) if c not in [s.what for s in found]]
    if unchecked and not name:
        click.echo(
            f"Not checked: {', '.join(unchecked)}, of hi types written by hand, of which no examples follow: give a dict of "
            "classes and lists of their values by --examples MODULE:NAME",
            err=True,
        )
    if not todo:
        raise click.UsageError(f"{target} has no value class and no op")
    result = laws.Result(_run(todo, max_examples))
    if as_json:
        click.echo(json.dumps({"ok": result.ok, "cells": result.as_json()}, indent=1))
    else:
        _show(result)
    if not result.ok:
        raise SystemExit(1 if result.failures else 2)


def _load(module: str) -> Any:
    """The module of a name or of a file; one file is one module, however it is named."""
    try:
        if module.endswith(".py"):
            path = Path(module).resolve()
            return _loaded(path) or _imported(path) or _made(path)
        spec = None if module in sys.modules else importlib.util.find_spec(module)
        origin = spec.origin if spec is not None and spec.has_location else None
        return (_loaded(Path(origin).resolve()) if origin else None) or importlib.import_module(module)
    except Exception as e:  # whatever a module does when it is imported
        told = str(e) if isinstance(e, ImportError | FileNotFoundError) else f"{type(e).__name__}: {e}"
        raise click.UsageError(f"cannot import {module}: {told}") from None


def _loaded(path: Path) -> Any:
    files = ((m, getattr(m, "__file__", None)) for m in list(sys.modules.values()))
    return next((m for m, file in files if isinstance(file, str) and Path(file).resolve() == path), None)


def _imported(path: Path) -> Any:
    """The file, imported by the shortest name by which others may import it."""
    base = path.parent
    while (base / "__init__.py").exists():
        base = base.parent
    roots = [base, *(Path(entry or ".").resolve() for entry in sys.path)]
    parts = [path.relative_to(root).with_suffix("").parts for root in dict.fromkeys(roots) if path.is_relative_to(root)]
    for found in sorted(parts, key=len):
        name = ".".join(found[:-1] if found[-1] == "__init__" else found)
        if all(map(str.isidentifier, name.split("."))):
            try:
                spec = importlib.util.find_spec(name)
            except (ImportError, ValueError):  # the name of something else
                continue
            if spec is not None and spec.origin and Path(spec.origin).resolve() == path:
                return importlib.import_module(name)
    return None


def _made(path: Path) -> Any:
    """The file, under a name that is not that of another module."""
    name = re.sub(r"\W", "_", path.stem)
    while name in sys.modules or importlib.util.find_spec(name) is not None:
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _named(given: str) -> Any:
    module, _, name = given.rpartition(":")
    if not module:
        raise click.UsageError(f"--examples is MODULE:NAME, the module and the name in it, got {given}")
    try:
        return getattr(_load(module), name)
    except AttributeError:
        raise click.UsageError(f"{module} has no {name}") from None


def _subjects(space: Any, name: str, ops: tuple[str, ...], examples: Any) -> list[laws.Subject]:
    if name and name not in vars(space):
        raise click.UsageError(f"{space.__name__} has no {name}")
    named = [_op_named(space, n) for n in ops] if ops else None
    return laws.in_module(space, vars(space)[name] if name else None, named, examples)


def _op_named(space: Any, name: str) -> Any:
    """An op of the module, or another one by its name."""
    alike = [op for op in by_name() if op.name == name.rpartition(".")[2]]
    found = getattr(space, name, alike[0] if alike else None)
    if not isinstance(found, Op):
        raise click.UsageError(f"{space.__name__} has no op {name}, and typax neither")
    return found


def _run(todo: list[tuple[laws.Law, laws.Subject]], max_examples: int) -> list[laws.Cell]:
    console = rich.console.Console(stderr=True)
    cells = []
    with rich.progress.Progress(console=console, transient=True) as progress:
        task = progress.add_task("laws", total=len(todo))
        for i, (law, subject) in enumerate(todo):
            progress.update(task, description=f"{law.name} of {subject.name}")
            with laws.settled():
                cells.append(laws.check_cell(law, subject, max_examples))
            progress.update(task, advance=1)
            if not console.is_terminal:
                console.print(
                    f"{i + 1}/{len(todo)} {law.name} of {subject.name}: {cells[-1].status}", markup=False, soft_wrap=True
                )
    return cells


def _show(result: laws.Result) -> None:
    console = rich.console.Console()
    if not console.is_terminal:
        click.echo(str(result))
        return
    subjects = list(dict.fromkeys(c.subject for c in result.cells))
    by = {(c.law, c.subject): _MARK[c.status] for c in result.cells}
    table = rich.table.Table(box=rich.box.SIMPLE)
    for title in ("law", *subjects):
        table.add_column(title, overflow="fold")
    for law in dict.fromkeys(c.law for c in result.cells):
        table.add_row(law, *(by.get((law, s), "") for s in subjects))
    console.print(table)
    for line in result.reasons():
        console.print(line, markup=False, soft_wrap=True)
