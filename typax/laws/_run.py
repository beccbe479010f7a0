"""Run laws on examples: hypothesis draws and shrinks them, a result tells what held.

profile   examples of each law
plain     the simplest one: sizes that differ, ordinary numbers
batched   the same, stacked
statics   the same, with other statics than the defaults, where the class admits them
edges     sizes of 1, another dtype, NaN
empty     sizes of 0
any       ``max_examples`` more
"""

import functools
import re
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import hypothesis
import jax
from hypothesis.errors import HypothesisException, Unsatisfiable, UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from typax import _jax
from typax._op import Op, Refused
from typax.laws import _draw
from typax.laws._calls import ByHand
from typax.laws._law import LAWS, Broken, Call, Law, NotApplicable, Values
from typax.laws._values import lowered, types

PROFILES = ("plain", "batched", "statics", "edges", "empty", "any")
SHRINKS = 25  # examples on which a broken law is tried again, to find a small one


@dataclass(frozen=True)
class Subject:
    """What a law is checked on: a class, or an op with one of its implementations; and how its examples are drawn.

    ``kind`` is ``"type"`` or ``"op"``, ``name`` that of its column, ``what`` the class or op; ``draw`` makes a strategy of
    examples, ``given`` holds those that are not drawn.
    """

    kind: Literal["type", "op"]
    name: str
    what: Any
    draw: Callable[[_draw._Options], Any]
    given: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Cell:
    """What one law says of one subject.

    ``status``, with the sentence ``why`` unless it is a pass, the ``example`` that breaks it, and the ``seconds`` it took.
    """

    law: str
    subject: str
    status: Literal["pass", "fail", "not applicable"]
    why: str = ""
    example: str = ""
    seconds: float = 0.0


@dataclass
class Result:
    """What laws say of subjects; ``str`` is a table, ``ok`` whether none is broken and each subject keeps one.

    ``cells`` has one `Cell` for each law and subject, ``failures`` those that are broken.
    """

    cells: list[Cell] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        alive = {c.subject for c in self.cells if c.status == "pass"}
        return bool(self.cells) and not self.failures and alive == {c.subject for c in self.cells}

    @property
    def failures(self) -> list[Cell]:
        return [c for c in self.cells if c.status == "fail"]

    def raise_if_broken(self) -> None:
        """Raise `Broken`, with all that is broken, unless `ok`."""
        if self.failures:
            raise Broken("\n".join(f"{c.law} of {c.subject}: {c.why} (example: {c.example})" for c in self.failures))

    def as_json(self) -> list[dict[str, Any]]:
        """All cells, as dicts."""
        return [vars(c) for c in self.cells]

    def __str__(self) -> str:
        subjects = list(dict.fromkeys(c.subject for c in self.cells))
        by = {(c.law, c.subject): c for c in self.cells}
        laws = list(dict.fromkeys(c.law for c in self.cells))
        mark = {"pass": "pass", "fail": "FAIL", "not applicable": "-"}
        rows = [["law", *subjects]]
        rows += [[n, *(mark[by[n, s].status] if (n, s) in by else "" for s in subjects)] for n in laws]
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([*lines, *self.reasons()])

    def reasons(self) -> list[str]:
        """A line for each broken law, and for why laws have nothing to say."""
        lines = []
        for c in self.failures:
            lines += ["", f"FAIL {c.law} of {c.subject}: {c.why}", f"     example: {c.example}"]
        skipped = [c for c in self.cells if c.status == "not applicable"]
        reasons = dict.fromkeys((c.subject, c.why) for c in skipped)
        lines += [""] if reasons else []
        for s, why in reasons:
            lines.append(f"-    {', '.join(c.law for c in skipped if (c.subject, c.why) == (s, why))} of {s}: {why}")
        return lines


# --- subjects ------------------------------------------------------------------------------------------------------


def subjects(cls: Any = None, ops: Sequence[Any] = (), examples: Any = None) -> list[Subject]:
    """What is checked: the class, and each implementation of each op that takes or gives a value of it.

    ``examples`` are as `check` takes them.
    """
    given = examples if isinstance(examples, Mapping) else {} if examples is None else {cls: examples}
    makers = tuple((k, v) for k, v in given.items() if isinstance(k, type) and callable(v) and not _is_strategy(v))
    given = {k: v for k, v in given.items() if (k, v) not in makers}
    out = [] if cls is None else [_type_subject(cls, given.get(cls), makers)]
    for item in ops:
        if (hand := _by_hand(item)) is not None:
            out.append(_hand_subject(hand, given))
            continue
        op, impls = (item, item.impls) if isinstance(item, Op) else (item[0], [item[1]])
        if op in given:
            out.append(_op_subject(op, None, given[op], cls, makers))
            continue
        mine = [i for i in impls if cls is None or len(impls) == 1 or concerns(i, cls)]
        out += [_op_subject(op, i, None, cls, makers) for i in mine]
    return out


def _by_hand(item: Any) -> ByHand | None:
    fn, ref = item if isinstance(item, tuple) else (item, None)
    return None if isinstance(fn, Op) else ByHand(fn, ref)


def _hand_subject(op: ByHand, given: Any) -> Subject:
    if (examples := given.get(op.fn)) is None:
        raise TypeError(f"{op.name} is written by hand, so that no examples follow; give some: examples={{fn: [...]}}")
    return _op_subject(op, None, examples, None, ())


def concerns(impl: Any, cls: Any) -> bool:
    """Whether an implementation takes a value of the class."""
    return any(isinstance(p.cls, type) and issubclass(p.cls, cls) for ps in impl.operands for p in ps)


def _is_strategy(x: Any) -> bool:
    return isinstance(x, SearchStrategy)


def _type_subject(cls: Any, examples: Any, makers: Any) -> Subject:
    if examples is None:
        if not hasattr(cls, "_declaration"):
            raise TypeError(f"{cls.__name__} is written by hand, so that no examples follow; give some: examples=[...]")
        return Subject("type", cls.__name__, cls, lambda o: _draw.examples_of(cls, o._replace(makers=makers), {}))
    if _is_strategy(examples):
        return Subject("type", cls.__name__, cls, lambda o: examples.map(_as_values))
    return Subject("type", cls.__name__, cls, lambda o: None, tuple(map(_as_values, examples)))


def _as_values(x: Any) -> Values:
    return x if isinstance(x, Values) else Values(x, (x, x))


def _op_subject(op: Any, impl: Any, examples: Any, owner: Any, makers: Any) -> Subject:
    if examples is None:
        name = op.name
        if len(op.impls) > 1:
            short = [_short(i) for i in op.impls]
            name += _short(impl) if short.count(_short(impl)) == 1 else str(impl)
        return Subject("op", name, op, lambda o: _draw.calls_of(op, impl, o._replace(makers=makers), {}, owner))
    as_call = functools.partial(_as_call, op)
    if _is_strategy(examples):
        return Subject("op", op.name, op, lambda o: examples.map(as_call))
    return Subject("op", op.name, op, lambda o: None, tuple(map(as_call, examples)))


def _short(impl: Any) -> str:
    """The classes of the operands."""
    return "(" + ", ".join("|".join(getattr(p.cls, "__name__", str(p.cls)) for p in ps) for ps in impl.operands) + ")"


def _as_call(op: Any, x: Any) -> Call:
    if isinstance(x, Call):
        return replace(x, op=op)
    args, statics = x if len(x) == 2 and isinstance(x[0], tuple) and isinstance(x[1], dict) else (x, {})
    return Call(op, tuple(args), (tuple(args), tuple(args)), statics)


# --- running -------------------------------------------------------------------------------------------------------


def check_cell(law: Law, subject: Subject, max_examples: int = 2, profiles: Sequence[str] = PROFILES) -> Cell:
    """Check one law on one subject, with examples of these kinds."""
    start = time.perf_counter()
    run = _Run(law, subject)
    status, why, example = "not applicable", "", ""
    try:
        if subject.given is not None:
            for x in subject.given:
                run(x)
        else:
            for profile in profiles:
                run.drawn(profile, max_examples)
    except Broken as e:
        status, why, example = "fail", str(e), run.last
    except Exception as e:  # of what the user gave to make examples
        status, why = "fail", f"an example cannot be made: {type(e).__name__}: {one_line(e)}"
    else:
        if run.held:
            status = "pass"
        else:
            why = run.reason or "no example fits"
    return Cell(law.name, subject.name, status, why, example, time.perf_counter() - start)


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
            raise Broken(str(e))

    def _outcome(self, example: Any) -> Broken | None:
        try:
            self.law.check(self.subject.what, example)
        except (NotApplicable, NotImplementedError, Refused) as e:
            self.reason = one_line(e)
        except Broken as e:
            return e
        except HypothesisException:
            raise
        except Exception as e:
            return Broken(f"it raises {type(e).__name__}: {one_line(e)}")
        else:
            self.held += 1
        return None

    def drawn(self, profile: str, max_examples: int) -> None:
        o = _draw._Options(profile, self.law.tame, self.law.smooth, self.law.even)
        if max_examples == 0 and profile == "any":
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
            self.reason = one_line(e)
        except Unsatisfiable:
            self.reason = self.reason or "no example that fits the declaration was found; give some: examples=..."


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


def pairs(subjects: Sequence[Subject], laws: Sequence[str] | str | None = None) -> Iterator[tuple[Law, Subject]]:
    """The laws that are of each subject's kind."""
    names = list(LAWS) if laws is None else [laws] if isinstance(laws, str) else list(laws)
    if unknown := [n for n in names if n not in LAWS]:
        raise ValueError(f"no law is called {', '.join(unknown)}; the laws are {', '.join(LAWS)}")
    for s in subjects:
        yield from ((LAWS[n], s) for n in names if LAWS[n].kind == s.kind)
