"""Every row of the matrix gives the cell that tests/data/matrix.json expects, through typax and through raw JAX.

A cell that changed is to be looked at, then written by ``make matrix``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from _matrix import _table, cell, load, processes
from _matrix.sides import SIDES

ROWS = load()


@pytest.fixture(scope="module")
def sides():
    return SIDES["typax"](), SIDES["plain"]()


def in_this_process() -> Iterator[Any]:
    """The rows, of which those run on the older JAX that are quick and tell most: errors, jit, control flow under jit."""
    for key, r in ROWS.items():
        if r.kind != "processes":
            core = r.error or r.limit or r.kind == "jit" or (r.kind == "control" and "[jit]" in key)
            yield pytest.param(key, marks=[pytest.mark.core] if core else [], id=key)


@pytest.mark.parametrize("key", list(in_this_process()))
def test_a_call_through_typax(key, sides):
    got = cell(ROWS[key], *sides)
    if got.startswith("absent"):
        pytest.skip(f"{got.partition(' ')[2]} is not installed")
    want = _table.expected(key, "typax")
    assert _table.verdict(got) == _table.verdict(want), f"{key}: {got}; expected: {want}. make matrix writes what is so"


def test_calls_of_two_processes():
    """They are given values over the devices of both, and each writes its part of a checkpoint."""
    changed = {}
    for key, got in processes.cells("typax").items():
        want = _table.expected(key, "typax")
        if _table.verdict(got) != _table.verdict(want):
            changed[key] = f"{got}; expected: {want}"
    assert not changed


def test_calls_that_raw_jax_refuses():
    """A change says that JAX closed a hole, so that a workaround may go."""
    program = [sys.executable, str(_table.ROOT / "scripts" / "matrix.py"), "--side", "raw", "--json", "--refused"]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    changed = {}
    for key, got in json.loads(done.stdout.splitlines()[-1]).items():
        want = _table.expected(key, "raw")
        if _table.verdict(got) != _table.verdict(want) and not got.startswith("absent"):
            changed[key] = f"{got}; expected: {want}"
    assert not changed


def test_the_page_shows_what_is_expected():
    text = _table.PAGE.read_text()
    assert text.partition(_table.BEGIN)[2].partition(_table.END)[0] == f"\n{_table.page()}", "make matrix writes it"


def test_no_call_through_typax_is_wrong_and_every_error_says_what_to_do():
    data = _table.read()
    assert data["rows"].keys() == ROWS.keys()
    for key, sides in data["rows"].items():
        for got in _table.by_version(sides["typax"], data["versions"]).values():
            assert got == "works" or (got.startswith("raises") and (ROWS[key].error or ROWS[key].limit)), f"{key}: {got}"
