"""Every public name says what it is, and refers to what there is; the reference builds without a warning."""

import sys
import types

import pytest
from _reference import broken, build, missing, modules

import typax


@pytest.mark.parametrize("module", modules())
def test_docstrings(module):
    pytest.importorskip("pdoc", reason="pdoc is installed with the newest JAX only")
    assert [*missing(module), *broken(module)] == []


def test_it_builds(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc is installed with the newest JAX only")
    build(tmp_path, modules())
    pages = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.html")}
    assert pages == {"index.html", *(f"{m.replace('.', '/')}.html" for m in modules())}
    text = (tmp_path / "typax.html").read_text()
    assert all(f'id="{name}"' in text for name in typax.__all__ if not isinstance(vars(typax)[name], types.ModuleType))


WRONG = '''
import typax

def f(x):
    """Of `x`, not of `y`; see `typax.nowhere`, `typax.Value.nothing`."""

def g(): ...

class T(typax.Value):
    """Has a."""
    a: typax.QArray
    b: int = 0
    def method(self): ...
    def components(self): ...
'''


@pytest.mark.filterwarnings("ignore:Cannot determine where")
def test_what_is_wrong_is_found(monkeypatch):
    pytest.importorskip("pdoc", reason="pdoc is installed with the newest JAX only")
    module = types.ModuleType("typax.wrong", "A page on `typax.Value`, `Value.components`, `f`, `nothing` and ``code``.")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(WRONG, module.__dict__)
    assert missing("typax.wrong") == [f"typax.wrong.{n} has no docstring" for n in ("g", "T.b", "T.method")]
    named = [w.split("`")[1] for w in broken("typax.wrong")]
    assert named == ["nothing", "y", "typax.nowhere", "typax.Value.nothing"]
