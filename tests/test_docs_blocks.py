"""The documentation is true: every Python block of README.md and docs/ runs and prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import _docs
import pytest
from _docs import DocError, blocks, examples, make_targets, run

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("README.md"), *ROOT.glob("CONTRIBUTING.md"), *sorted(ROOT.glob("docs/**/*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.core
@pages
def test_page(page, tmp_path):
    """In an interpreter of its own, with JAX's defaults and the devices that conftest asks for, in a folder of its own."""
    env = {**os.environ, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    done = subprocess.run(
        [sys.executable, _docs.__file__, str(page)], cwd=tmp_path, text=True, capture_output=True, timeout=600, env=env
    )
    if done.returncode:
        pytest.fail(done.stderr.strip().replace(f"{ROOT}/", ""), pytrace=False)


@pages
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-zA-Z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = [
        f"{page.relative_to(ROOT)}:{line}: the Makefile has no target {target!r}"
        for target, line in make_targets(page.read_text(), page.name)
        if target not in targets
    ]
    assert not missing, "\n".join(missing)


LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")


def headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pages
def test_links_lead_somewhere(page):
    broken = []
    for path, anchor in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert not broken


def test_the_index_lists_every_page():
    linked = {path for path, _ in LINK.findall((ROOT / "docs/index.md").read_text())}
    assert {p.name for p in ROOT.glob("docs/*.md")} <= linked | {"index.md"}


# --- the reader of pages itself ------------------------------------------------------------------------


def page(text: str) -> str:
    """A page, written here with ''' for its fences."""
    return dedent(text).strip("\n").replace("'''", "```")


def wrong(text: str, jax_version: str = "0.12.0.1") -> list[str]:
    return run(page(text), "a-page.md", jax_version)


def test_blocks_share_a_namespace_and_typing_finds_its_names():
    assert not wrong("""
        '''python
        import typing
        x = 1
        class A: y: "B"
        class B: pass
        '''
        Prose.
        '''python
        print(x, typing.get_type_hints(A)["y"].__name__)
        '''

        '''text
        1 B
        '''
        """)


def test_a_wrong_output_is_named_and_the_page_goes_on():
    found = wrong("""
        '''python
        print("a\\nb")
        '''
        '''text
        a
        c
        '''
        '''python
        print(2)
        '''
        '''output
        3
        '''
        """)
    assert [message.partition(": ")[0] for message in found] == ["a-page.md:4", "a-page.md:11"]
    assert "-c\n+b" in found[0]
    assert "-3\n+2" in found[1]


def test_trailing_blanks_do_not_matter_and_leading_ones_do():
    assert not wrong("'''python\nprint('a  \\n\\nb\\n\\n')\n'''\n'''text\na\n\nb\n'''")
    assert wrong("'''python\nprint(' a')\n'''\n'''text\na\n'''")


def test_nothing_printed_is_not_something():
    assert wrong("'''python\nx = 1\n'''\n'''text\n1\n'''")


def test_text_after_prose_is_not_an_output():
    assert not wrong("'''python\nprint(1)\n'''\nIn contrast:\n'''text\n2\n'''")


def test_an_exception_is_named_by_its_own_line_and_ends_the_page():
    (found,) = wrong("""
        '''python
        def f():
            return 1 / 0
        '''
        '''python

        f()
        '''
        '''python
        print(1)
        '''
        '''text
        2
        '''
        """)
    assert found.startswith("a-page.md:3: the block raises\n")
    assert "ZeroDivisionError" in found


def test_a_syntax_error_is_named_by_its_line():
    (found,) = wrong("'''python\nx = 1\nx = = 1\n'''")
    assert found.startswith("a-page.md:3: ")


RAISES = """
    <!-- raises: ValueError -->
    '''python
    print(1)
    {statement}
    '''

    '''text
    1
    ValueError: no
    '''
    """


def test_an_expected_exception_is_output():
    assert not wrong(RAISES.format(statement="raise ValueError('no')"))
    assert "+ValueError: yes" in wrong(RAISES.format(statement="raise ValueError('yes')"))[0]
    assert "raises" in wrong(RAISES.format(statement="raise TypeError('no')"))[0]
    assert wrong(RAISES.format(statement="pass"))[0] == "a-page.md:2: the block does not raise ValueError"


VERSIONS = """
    '''python
    print(1)
    '''

    <!-- jax < 0.12 -->
    '''text
    0
    '''

    <!-- jax >= 0.12 -->
    '''text
    1
    '''

    '''text
    Not an output any more.
    '''
    """


@pytest.mark.parametrize("version, bad", [("0.11.2", 1), ("0.12", 0), ("0.12.0.1", 0), ("0.13.0.dev1", 0)])
def test_outputs_by_version(version, bad):
    assert len(wrong(VERSIONS, version)) == bad


def test_versions_compare_to_the_depth_written():
    (block,) = blocks(page("<!-- jax == 0.12 -->\n'''text\n'''"), "p")
    assert block.counts("0.12.0.1")
    assert not block.counts("0.11.2")


def test_a_block_with_a_reason_is_not_run():
    assert not wrong("<!-- not run: needs a TPU,\n  of which there is none -->\n\n'''python\n1 / 0\n'''")
    (example,) = examples(blocks(page("<!-- not run: a TPU -->\n'''python\n'''"), "p"), "p")
    assert example.code.not_run == "a TPU"


def test_an_ordinary_comment_is_nothing():
    assert wrong("<!-- a remark: not run -->\n'''python\n1 / 0\n'''")


@pytest.mark.parametrize(
    "text, message",
    [
        ("<!-- not run: -->\n'''python\n'''", "p:1: say why"),
        ("<!-- not run -->\n'''python\n'''", "p:1: say why"),
        ("<!-- not-run: why -->\n'''python\n'''", "p:1: not understood"),
        ("<!-- jax 0.12 -->\n'''text\n'''", "p:1: not understood"),
        ("<!-- raises: -->\n'''python\n'''", "p:1: name one exception"),
        ("<!-- jax < 0.12 -->\nProse.\n'''text\n'''", "p:2: the comment above"),
        ("<!-- jax < 0.12 -->", "p: the last comment"),
        ("<!-- jax", "p:1: this comment does not end"),
        ("Prose.\n'''python\nx", "p:2: this block does not end"),
        ("'''python\n'''\nProse.\n<!-- jax < 0.12 -->\n'''text\n'''", "p:5: a comment on a block that is"),
        ("<!-- raises: ValueError -->\n'''console\n'''", "p:2: a comment on a block that is"),
        ("'''py\n'''", "p:1: a 'py' block is not run"),
    ],
)
def test_what_cannot_be_read_as_meant_is_refused(text, message):
    with pytest.raises(DocError, match=re.escape(message)):
        examples(blocks(page(text), "p"), "p")


def test_fences_nest_and_indent():
    found = blocks("* item:\n\n  ```python\n  if 1:\n      x\n  ```\n\n~~~~text\n```python\n~~~\n~~~~\n", "p")
    assert [(b.language, b.text, b.line) for b in found] == [
        ("python", "if 1:\n    x", 3),
        ("text", "```python\n~~~", 8),
    ]


def test_make_targets():
    text = page("""
        Then `make test ARGS="-k x"`, to make sure, or `make` alone.
        '''console
        $ git clone x && make demo
        make lint
        '''
        '''text
        make nothing
        '''
        """)
    assert make_targets(text, "p") == [("test", 1), ("demo", 3), ("lint", 4)]


def test_a_page_in_its_interpreter(tmp_path):
    devices = "'''python\nimport jax\nprint(jax.device_count())\n'''\n'''text\n8\n'''"
    (tmp_path / "good.md").write_text(page(devices))
    (tmp_path / "bad.md").write_text(page("'''python\nassert False, 'so'\n'''"))
    test_page(tmp_path / "good.md", tmp_path)
    with pytest.raises(pytest.fail.Exception, match=r"bad\.md:2: the block raises[\s\S]*AssertionError: so"):
        test_page(tmp_path / "bad.md", tmp_path)
