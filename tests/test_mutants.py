"""The laws find what is wrong: a sample of the generated mutants, and the page that tells of all of them."""

import re

import _mutate
import _shipped


def sample(found):
    """One mutant for each mutation, each of another type or op as far as there are some."""
    out = {}
    for m in found:
        others = {n.of for k, n in out.items() if k != m.mutation}
        if m.mutation not in out or (out[m.mutation].of in others and m.of not in others):
            out[m.mutation] = m
    return list(out.values())


def test_mutants_are_found_and_the_page_speaks_of_all():
    mark = "<!-- mutants: made by a program -->"
    found = _mutate.mutants()
    _, _, table = _mutate.PAGE.read_text().partition(mark)
    table = table.partition("<!-- end of mutants -->")[0]
    assert {m.of for m in found} == _shipped.named(mark), "docs/laws.md is stale: run `make mutants`"
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| ([^|]*)\| ([^|]*)\|$", table, re.M)
    assert {m: int(n) for m, n, _, _ in rows} == _mutate.counts(found), "docs/laws.md is stale: run `make mutants`"
    for mutation, count, by, alive in rows:
        survivors = alive.partition(":")[0].split(",") if alive.strip() else []
        assert int(count) == sum(map(int, re.findall(r"` (\d+)", by))) + len(survivors)
        assert (mutation in _mutate.EQUIVALENT) == bool(survivors) and "NO REASON" not in alive
    for mutant in sample(found):
        cell = _mutate.found_by(mutant, fully=False)
        if mutant.mutation in _mutate.EQUIVALENT:
            assert cell is None, (mutant.name, cell)
        else:
            assert cell is not None and cell.status == "fail" and "\n" not in cell.why, mutant.name
