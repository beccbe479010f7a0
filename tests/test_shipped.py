"""All that is shipped keeps all laws, and the page says which have nothing to say of what, and why.

Here the types and one op of each kind are checked; ``make laws`` checks all.
"""

import _shipped
import pytest

import typax.laws as laws

CORE = {"QArray", "Sum", "Tup", "LowRank", "quantize(Array)", "matmul(Float[Array, '*b k'], Float[QArray, 'k n'])"}
SILENT, TOLD = _shipped.not_applicable(), _shipped.named(_shipped.BEGIN)
SUBJECTS = _shipped.subjects()


@pytest.mark.parametrize(
    "subject",
    [pytest.param(s, id=s.name, marks=[pytest.mark.core] * (s.name in CORE)) for s in _shipped.sample(SUBJECTS)],
)
def test_all_laws(subject):
    cells = _shipped.cells(subject)
    broken = [f"{c.law}: {c.why} ({c.example})" for c in cells if c.status == "fail"]
    assert not broken, broken
    silent = {(c.law, c.subject) for c in cells if c.status == "not applicable" and "typax[export]" not in c.why}
    told = {(law, of) for law, of in SILENT if of == subject.name}
    assert silent == told, "docs/laws.md is stale: run `make laws`"


def test_the_page_speaks_of_all_that_there_is():
    names = {s.name: s.kind for s in SUBJECTS}
    assert names.keys() == TOLD, "docs/laws.md is stale: run `make laws`"
    for law, of in SILENT:
        assert laws.LAWS[law].kind == names[of]
