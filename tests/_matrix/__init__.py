"""The matrix: what a user of hi types calls, once through JAX and types written by hand, once through typax.

    row      one program over a *side*: its values, its ops, and its functions (``s.quantize``, ``s.vmap``, ``s.P``)
    side     plain   dense arrays and JAX's own functions: the oracle
             raw     hi types written by hand on `typax.hijax` alone, and JAX's own functions
             typax   declared types, and the functions of typax where it has one of that name, else JAX's own
    cell     a row on a side: "works", "raises ...", "WRONG ...", "absent ..."

A row works on a side if it returns there what it returns on the plain one, number by number.  A row of ``error=`` is a call
that ought to fail; it is as it should be if that error comes, by class and by the remedy that its message names.
"""

import contextlib
import importlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

KINDS = ("jit", "autodiff", "mapping", "control", "sharding", "shardmap", "arrays", "types", "libraries", "processes")
WIDTH = 110


class Absent(Exception):
    """What the row needs is not installed."""


@dataclass(frozen=True)
class Row:
    kind: str
    name: str
    run: Callable[[Any], Any]
    error: tuple[Any, str] | None = None  # of typax: the class, and what the message says
    want: Callable[[], Any] | None = None  # the oracle where the plain side has none
    limit: tuple[Any, str] | None = None  # a call expected to work that typax refuses: the class, and what it says to do
    red: bool = True  # raw JAX refuses it on some version

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.name}"


ROWS: dict[str, Row] = {}


def row(name: str, **how: Any) -> Callable[[Callable[[Any], Any]], None]:
    """Add a row to the matrix, under the kind that is the name of its module."""

    def add(run: Callable[[Any], Any]) -> None:
        kind = run.__module__.rpartition(".")[2]
        r = Row(kind, name, run, **how)
        assert r.key not in ROWS, f"two rows {r.key}"
        ROWS[r.key] = r

    return add


def works_raw(name: str, **how: Any) -> Any:
    return row(name, red=False, **how)


def need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Absent(module.partition(".")[0]) from None


def alone() -> None:
    """Make ``typax.hijax`` importable without the rest of typax, which repairs JAX: what follows is JAX's own."""
    package: Any = types.ModuleType("typax")
    package.__path__ = [str(Path(__file__).parents[2] / "typax")]
    assert "typax" not in sys.modules
    sys.modules["typax"] = package


def first_line(error: BaseException) -> str:
    text = (str(error).strip() or "(no message)").splitlines()[0]
    text = re.sub(r"0x[0-9a-f]+|/\S+\.py:\d+", "...", re.sub(r"\s+", " ", text))
    return text if len(text) <= WIDTH else text[: WIDTH - 4] + " ..."


def differ(got: Any, want: Any) -> str | None:
    """How a result differs from the oracle's, if it does."""
    gots, wants = jax.tree.leaves(got), jax.tree.leaves(want)
    if not wants or len(gots) != len(wants):
        return f"{len(gots)} results, not {len(wants)}"
    for g, w in zip(gots, wants, strict=True):
        if isinstance(w, str):
            if str(g) != w:
                return f"{g!r}, not {w!r}"
            continue
        if not hasattr(g, "dtype") and not isinstance(g, int | float):
            return f"a {type(g).__name__}, not an array"
        g, w = np.asarray(g), np.asarray(w)
        if g.shape != w.shape:
            return f"shape {g.shape}, not {w.shape}"
        if g.dtype.kind != w.dtype.kind:
            return f"dtype {g.dtype}, not {w.dtype}"
        if not np.allclose(g, w, rtol=2e-5, atol=2e-5, equal_nan=True):
            return f"off by {np.max(np.abs(g.astype(float) - w.astype(float))):.2g}"
    return None


@contextlib.contextmanager
def quickly_compiled() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def cell(r: Row, side: Any, plain: Any, trace: bool = False) -> str:
    """Run a row on a side; nothing here runs for long, so that little is compiled for speed."""
    jax.config.update("jax_numpy_dtype_promotion", "standard" if r.kind == "libraries" else "strict")
    with quickly_compiled(), jax.set_mesh(None):
        try:
            got = jax.block_until_ready(r.run(side))
        except Absent as e:
            return f"absent {e}"
        except Exception as e:
            if trace:
                traceback.print_exc()
            text = f"raises {type(e).__name__}: {first_line(e)}"
            promised = r.error or r.limit
            if side.name == "typax" and promised and not (isinstance(e, promised[0]) and re.search(promised[1], str(e))):
                return f"UNCLEAR {text}"
            return text
        if (r.error and r.want is None) or got is None:
            return "WRONG no error"
        try:
            want = r.want() if r.want else r.run(plain)
        except Exception as e:
            raise AssertionError(f"the oracle of {r.key} fails") from e
    wrong = differ(got, want)
    return f"WRONG {wrong}" if wrong else "works"


def load() -> dict[str, Row]:
    for kind in KINDS:
        importlib.import_module(f"_matrix.{kind}")
    return ROWS


def chosen(words: list[str]) -> Iterator[Row]:
    for r in load().values():
        if not words or any(w in r.key for w in words):
            yield r
