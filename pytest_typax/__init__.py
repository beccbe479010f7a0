"""A pytest plugin: one test for each law and subject.

    @pytest.mark.typax_laws(QArray, ops=[quantize, matmul])
    def test_laws(law):
        law()

A law that has nothing to say of a subject is a skipped test, with the reason.  Pytest loads plugins in every session, so
this one stands outside of ``typax`` and imports it only where a test has the mark.
"""

import importlib
from typing import Any

import pytest


def pytest_configure(config: Any) -> None:
    config.addinivalue_line(
        "markers",
        "typax_laws(cls, ops=(), *, laws=None, examples=None, max_examples=2): the fixture `law` is each law of typax.laws "
        "on the type and its ops, as a function to be called",
    )


class Case:
    """One law on one subject."""

    def __init__(self, law: Any, subject: Any, max_examples: int) -> None:
        self.law, self.subject, self.max_examples = law, subject, max_examples

    def __call__(self) -> None:
        """Check it. Raises `typax.laws.Broken`; skips the test where the law has nothing to say."""
        laws = importlib.import_module("typax.laws")
        with laws.settled():
            cell = laws.check_cell(self.law, self.subject, self.max_examples)
        if cell.status in ("fail", "no example"):
            raise laws.Broken(f"{cell.law} of {cell.subject}: {cell.why}\n{self.law.statement}\nexample: {cell.example}")
        if cell.status == "not applicable":
            pytest.skip(f"{cell.law} of {cell.subject}: {cell.why}")


def pytest_generate_tests(metafunc: Any) -> None:
    marks = list(metafunc.definition.iter_markers("typax_laws"))
    if not marks:
        return
    if "law" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: a test marked typax_laws takes the argument `law`")
    laws = importlib.import_module("typax.laws")
    cases, ids = [], []
    for mark in marks:
        case, id = _cases(laws, *mark.args, **mark.kwargs)
        cases += case
        ids += id
    metafunc.parametrize("law", cases, ids=ids)


def _cases(
    library: Any, cls: Any = None, ops: Any = (), *, laws: Any = None, examples: Any = None, max_examples: int = 2
) -> tuple[list[Case], list[str]]:
    pairs = list(library.pairs(library.subjects(cls, ops, examples), laws))
    return [Case(law, s, max_examples) for law, s in pairs], [f"{law.name}-{s.name}" for law, s in pairs]
