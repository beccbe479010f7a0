"""Run laws on examples: hypothesis draws and shrinks them, a result tells what held.

profile   examples of each law
plain     the simplest one: sizes that differ, ordinary numbers
batched   the same, stacked
statics   the same, with other statics than the defaults, where the class admits them
edges     sizes of 1, another dtype, NaN
empty     sizes of 0
any       ``max_examples`` more
"""

import os
import re
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import hypothesis
import jax
from hypothesis.errors import HypothesisException, Unsatisfiable, UnsatisfiedAssumption

from typax import _jax
from typax._op import Refused
from typax._type import ValueType
from typax.laws import _draw
from typax.laws._law import Broken, Law, NotApplicable, Values
from typax.laws._subjects import Subject, hidden, pairs, subjects
from typax.laws._values import lowered, types

PROFILES = ("plain", "batched", "statics", "edges", "empty", "any")
SHRINKS = 25  # examples on which a broken law is tried again, to find a small one


@dataclass(frozen=True)
class Cell:
    """What one law says of one subject.

    ``status``, with the sentence ``why`` unless it is a pass, the ``example`` that breaks it, and the ``seconds`` it took.
    ``"no example"``: what is to make examples fails.  Cells of one ``cause`` (the place in one's code that raises) are told
    once.
    """

    law: str
    subject: str
    status: Literal["pass", "fail", "no example", "not applicable"]
    why: str = ""
    example: str = ""
    seconds: float = 0.0
    cause: str = ""


@dataclass
class Result:
    """What laws say of subjects; ``str`` is a table, ``ok`` whether none is broken and each subject keeps one.

    ``cells`` has one `Cell` for each law and subject, ``failures`` those that are broken.
    """

    cells: list[Cell] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        alive = {c.subject for c in self.cells if c.status == "pass"}
        made = all(c.status != "no example" for c in self.cells)
        return bool(self.cells) and made and not self.failures and alive == {c.subject for c in self.cells}

    @property
    def failures(self) -> list[Cell]:
        return [c for c in self.cells if c.status == "fail"]

    def raise_if_broken(self) -> None:
        """Raise `Broken`, with all that is broken or has no examples; without such nothing is raised."""
        if unmade := [c for c in self.cells if c.status == "no example"]:
            raise Broken("\n".join(dict.fromkeys(c.why for c in unmade)))
        if self.failures:
            raise Broken("\n".join(f"{c.law} of {c.subject}: {c.why} (example: {c.example})" for c in self.failures))

    def as_json(self) -> list[dict[str, Any]]:
        """All cells, as dicts."""
        return [vars(c) for c in self.cells]

    def __str__(self) -> str:
        subjects = list(dict.fromkeys(c.subject for c in self.cells))
        by = {(c.law, c.subject): c for c in self.cells}
        laws = list(dict.fromkeys(c.law for c in self.cells))
        mark = {"pass": "pass", "fail": "FAIL", "no example": "?", "not applicable": "-"}
        rows = [["law", *subjects]]
        rows += [[n, *(mark[by[n, s].status] if (n, s) in by else "" for s in subjects)] for n in laws]
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([*lines, *self.reasons()])

    def reasons(self) -> list[str]:
        """A line for each broken law, and for why laws have nothing to say."""
        lines = []
        causes: dict[Any, list[Cell]] = {}  # one cause breaks many laws
        for c in self.cells:
            if c.status in ("fail", "no example"):
                causes.setdefault((c.status, c.cause or (c.subject, c.why)), []).append(c)
        for (status, _), cells in causes.items():
            by: dict[str, list[str]] = {}
            for c in cells:
                by.setdefault(c.subject, []).append(c.law)
            if status == "no example":
                lines += ["", f"?    no example of {', '.join(by)}: {cells[0].why}"]
                continue
            told = "; ".join(f"{', '.join(names)} of {s}" for s, names in by.items())
            lines += ["", f"FAIL {told}: {cells[0].why}", f"     example: {cells[0].example}"]
        skipped = [c for c in self.cells if c.status == "not applicable"]
        reasons = dict.fromkeys((c.subject, c.why) for c in skipped)
        lines += [""] if reasons else []
        for s, why in reasons:
            lines.append(f"-    {', '.join(c.law for c in skipped if (c.subject, c.why) == (s, why))} of {s}: {why}")
        return lines


# --- running -------------------------------------------------------------------------------------------------------


def check_cell(law: Law, subject: Subject, max_examples: int = 2, profiles: Sequence[str] = PROFILES) -> Cell:
    """Check one law on one subject, with examples of these kinds."""
    start = time.perf_counter()
    run = _Run(law, subject)
    status, why, example, cause = "not applicable", "", "", ""
    try:
        if subject.given is not None:
            for x in subject.given:
                run(x)
        else:
            for profile in profiles:
                run.drawn(profile, max_examples)
    except Broken as e:
        status, why, example, cause = "fail", str(e), run.last, getattr(e, "cause", "")
    except _draw.Unmade as e:
        status, why, cause = "no example", f"an example cannot be made: {e}", str(e).split(" makes none of ")[0]
    except Exception as e:  # of what the user gave to make examples
        status, why = "no example", f"an example cannot be made: {type(e).__name__}: {one_line(e)}"
    else:
        if run.held:
            status = "pass"
        else:
            why = run.reason or "no example fits"
    return Cell(law.name, subject.name, status, why, example, time.perf_counter() - start, cause)


class _Run:
    def __init__(self, law: Law, subject: Subject) -> None:
        self.law, self.subject = law, subject
        self.held, self.reason, self.last = 0, "", ""
        self.seen: dict[str, Broken | None] = {}
        self.broken = 0

    def __call__(self, example: Any) -> None:
        shown = describe(example)
        if shown not in self.seen:
            if self.broken and len(self.seen) - self.broken > SHRINKS:
                raise UnsatisfiedAssumption("enough examples tried")
            self.seen[shown] = self._outcome(example)
            self.broken = self.broken or (len(self.seen) if self.seen[shown] is not None else 0)
        if (e := self.seen[shown]) is not None:
            self.last = shown
            told = Broken(f"{e}{self._advice(example)}")
            told.cause = e.cause
            raise told

    def _advice(self, example: Any) -> str:
        """What to do where components that were drawn one by one may not fit each other."""
        tys = jax.tree.leaves(types(example.value if isinstance(example, Values) else example.args))
        drawn = [t.decl.cls for t in tys if isinstance(t, ValueType)] if self.subject.given is None else []
        names = [c.__name__ for c in drawn if hidden(c) and c not in self.subject.made]
        return (
            f"; if not all components fit each other, say how values are made: examples={{{names[0]}: op}}" if names else ""
        )

    def _outcome(self, example: Any) -> Broken | None:
        try:
            self.law.check(self.subject.what, example)
        except (NotApplicable, NotImplementedError, Refused) as e:
            self.reason = self.reason or one_line(e)
        except Broken as e:
            return e
        except HypothesisException:
            raise
        except Exception as e:
            return _raised(e, example)
        else:
            self.held += 1
        return None

    def drawn(self, profile: str, max_examples: int) -> None:
        o = _draw._Options(profile, self.law.tame, self.law.smooth, self.law.even)
        if (max_examples == 0 and profile == "any") or o in self.subject.without:
            return
        settings = hypothesis.settings(
            max_examples=max_examples if profile == "any" else 1,
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            verbosity=hypothesis.Verbosity.quiet,
            suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        )

        def law_holds(example: Any) -> None:
            self(example)

        try:
            settings(hypothesis.given(self.subject.draw(o))(law_holds))()
        except NotApplicable as e:
            self.reason = self.reason or one_line(e)
        except Unsatisfiable:
            self.subject.without.add(o)
            self.reason = self.reason or "no example that fits the declaration was found; give some: examples=..."


_OURS = {"typax", "jax", "jaxlib", "numpy", "hypothesis", *sys.stdlib_module_names}


def _raised(e: Exception, example: Any) -> Broken:
    """What an exception says, where in one's own code it is raised, and what to do if that is known."""
    told, frames = f"it raises {type(e).__name__}: {one_line(e)}", list(traceback.walk_tb(e.__traceback__))
    own = [(f, line) for f, line in frames if f.f_globals.get("__name__", "").partition(".")[0] not in _OURS]
    if not own:
        return Broken(told)
    frame, line = own[-1]
    place = f"{os.path.basename(frame.f_code.co_filename)}:{line} ({frame.f_code.co_name})"
    if type(e).__name__ == "TypePromotionError":
        told += ": laws run under strict promotion of dtypes, so that none widens by accident: write the cast, x.astype(...)"
    else:
        tys = jax.tree.leaves(types(example.value if isinstance(example, Values) else example.args))
        decls = [t.decl for t in tys if isinstance(t, ValueType)]
        codes = {getattr(d.dense, "__code__", None): d for d in decls}
        inside = next((codes[f.f_code] for f, _ in own if f.f_code in codes), None)
        if inside is not None and any(c.axes and c.axes.variadic for c in inside.components):
            axes = [(c.name, " ".join(d.text for d in c.axes.dims) or "no axis") for c in inside.components if c.axes]
            told += f": dense sees one value, without batch axes: {', '.join(f'{n} has {a}' for n, a in axes)}"
    broken = Broken(f"{told}, at {place}")
    broken.cause = f"{type(e).__name__} at {frame.f_code.co_filename}:{line}"
    return broken


def one_line(e: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(e)).strip()
    return text if len(text) <= 300 else text[:297] + "..."


def describe(example: Any) -> str:
    """An example, in full: types and numbers."""
    if isinstance(example, Values):
        return f"{_describe(example.value)}"
    statics = "".join(f", {k}={v!r}" for k, v in example.statics.items())
    return f"({', '.join(map(_describe, example.args))}{statics})"


def _describe(x: Any) -> str:
    arrays = " ".join(re.sub(r"\s+", " ", _show(a)) for a in lowered(x))
    shown = ", ".join(map(str, jax.tree.leaves(types(x))))
    return f"{shown} {arrays}"


def _show(a: Any) -> str:
    if jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    return str(jax.device_get(a))


def check(
    cls: Any = None,
    ops: Sequence[Any] = (),
    *,
    laws: Sequence[str] | str | None = None,
    examples: Any = None,
    max_examples: int = 2,
    progress: Callable[[Cell, int, int], None] | None = None,
) -> Result:
    """Check laws on a type and on ops.

    Args:
      cls: a subclass of `typax.Value`, or a class that is registered as that of a hi type written by hand.
      ops: ops; those implementations are checked that take a value of ``cls``, or all of an op that has one. A pair of an
        op and one of its implementations is checked alone. A function of primitives written by hand stands as
        it is, or as a pair with its reference; it needs ``examples``.
      laws: the names of laws (default: all).
      examples: a strategy or a list of values of ``cls``, or an op that makes its values of arrays; or a dict of such, by
        class and by op. An example of an op is a tuple of operands, or a pair of such a tuple and a dict of statics.
      max_examples: how many examples hypothesis draws of any kind, after one that is plain, one
        stacked, one with statics other than the defaults, one of sizes 1 that holds NaN, and one that is empty.
      progress: called with each cell when it is done, with its number and that of all.

    Returns:
      A `Result`: ``ok``, ``cells``, and as a string a table.

    Raises:
      TypeError: for a class or a function written by hand without examples.
      ValueError: for a law that does not exist.
    """
    todo = list(pairs(subjects(cls, ops, examples), laws))
    result = Result()
    for i, (law, subject) in enumerate(todo):
        with settled():
            result.cells.append(check_cell(law, subject, max_examples))
        if progress is not None:
            progress(result.cells[-1], i + 1, len(todo))
    return result


@contextmanager
def settled() -> Iterator[None]:
    """Strict promotion of dtypes, and no mesh, while laws are checked."""
    with jax.numpy_dtype_promotion("strict"), jax.set_mesh(None) if _jax.trace_is_clean() else typing.cast(Any, None):
        yield
