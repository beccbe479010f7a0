"""Runs the documentation: the Python blocks of a Markdown page, in order, as one program.

    ```python
    print(1 + 1)
    ```

    ```text
    2
    ```

The blocks of a page share one namespace, in an interpreter of their own. A ``text`` (or ``output``) block
directly after a ``python`` block is what that block prints. Comments directly before a block say more:

    <!-- not run: needs a TPU -->   the block is left out; there must be a reason
    <!-- raises: TypeError -->      the block raises that; its output closes with "TypeError: message"
    <!-- jax >= 0.12 -->            the block, Python or output, counts only there; also < <= > == !=

Expected outputs for several versions of JAX follow one another, each under its comment. ``console``, ``sh``
and ``bash`` blocks are not run, but each ``make`` target that a page names has to exist.

    python tests/_docs.py README.md        runs one page, and prints what is wrong with it
"""

import contextlib
import difflib
import importlib.metadata
import io
import operator
import re
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OUTPUT, SHELL = ("text", "output"), ("console", "sh", "bash")
MISSPELT = {"py", "python3", "py3", "pycon", "ipython", "jax"}  # would look like code that runs
FENCE = re.compile(r"^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
VERSION = re.compile(r"^jax\s*(<=|>=|==|!=|<|>)\s*(\d+(?:\.\d+)*)$")
COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


class DocError(Exception):
    """A page that cannot be read as meant; the message starts with file:line."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its fence, and what the comments before it say."""

    language: str
    text: str
    line: int
    not_run: str | None = None
    raises: str | None = None
    jax: tuple[str, str] | None = None
    follows: bool = False  # nothing but blank lines and comments since the block before it

    def counts(self, jax_version: str) -> bool:
        """Whether the block counts on this version, compared to the depth that its comment is written in."""
        if self.jax is None:
            return True
        compare, written = COMPARE[self.jax[0]], numbers(self.jax[1])
        return compare(numbers(jax_version)[: len(written)], written)


@dataclass
class Example:
    """A Python block with the outputs that it may be expected to give."""

    code: Block
    outputs: list[Block] = field(default_factory=list)


def numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    assert match, version
    return tuple(map(int, match[0].split(".")))


def blocks(markdown: str, name: str) -> list[Block]:
    """The fenced blocks of a page; ``name`` is its name in messages."""
    found: list[Block] = []
    marks: dict = {}
    follows = False
    lines = enumerate(markdown.splitlines(), 1)
    for number, line in lines:
        if fence := FENCE.match(line):
            text = _fenced(lines, fence, f"{name}:{number}")
            language = (fence["info"].split() or [""])[0].strip("{}").lower()
            if language in MISSPELT:
                raise DocError(f"{name}:{number}: a {language!r} block is not run: call it python, or text")
            found.append(Block(language, text, number, follows=follows, **marks))
            marks, follows = {}, True
        elif line.lstrip().startswith("<!--"):
            start, comment = number, line
            while "-->" not in comment:
                number, line = next(lines, (0, None))
                if line is None:
                    raise DocError(f"{name}:{start}: this comment does not end")
                comment += " " + line.strip()
            comment = comment.strip().removeprefix("<!--").partition("-->")[0].strip()
            marks |= _mark(comment, f"{name}:{start}")
        elif line.strip():
            if marks:
                raise DocError(f"{name}:{number}: the comment above belongs to a block, and none follows it")
            follows = False
    if marks:
        raise DocError(f"{name}: the last comment belongs to a block, and none follows it")
    return found


def _fenced(lines: Iterator[tuple[int, str]], fence: re.Match, where: str) -> str:
    indent, mark = len(fence["indent"]), fence["fence"]
    text = []
    for _, line in lines:
        closing = line.strip()
        if closing and not closing.strip(mark[0]) and len(closing) >= len(mark):
            return "\n".join(text)
        text.append(line[min(indent, len(line) - len(line.lstrip())) :])
    raise DocError(f"{where}: this block does not end")


def _mark(comment: str, where: str) -> dict:
    word, _, rest = (part.strip() for part in comment.partition(":"))
    if word == "not run":
        if not rest:
            raise DocError(f"{where}: say why the block is not run: <!-- not run: reason -->")
        return {"not_run": rest}
    if word == "raises":
        if not rest.isidentifier():
            raise DocError(f"{where}: name one exception: <!-- raises: TypeError -->")
        return {"raises": rest}
    if version := VERSION.match(comment):
        return {"jax": (version[1], version[2])}
    if re.match(r"(not.?run|raises|jax)\b", comment, re.IGNORECASE):
        raise DocError(f"{where}: not understood: <!-- {comment} -->")
    return {}


def examples(page: list[Block], name: str) -> list[Example]:
    """The Python blocks, each with the outputs directly after it: several if versions tell them apart."""
    found: list[Example] = []
    previous: Example | None = None
    for block in page:
        if block.language == "python":
            found.append(previous := Example(block))
        elif previous and block.follows and block.language in OUTPUT and _another(previous.outputs, block):
            previous.outputs.append(block)
        elif block.jax or block.raises or block.not_run:
            raise DocError(f"{name}:{block.line}: a comment on a block that is neither Python nor its output")
        else:
            previous = None
    return found


def _another(outputs: list[Block], block: Block) -> bool:
    return not outputs or (outputs[-1].jax is not None and block.jax is not None)


def make_targets(markdown: str, name: str) -> list[tuple[str, int]]:
    """The targets that a page tells its reader to make, in shell blocks and in `make code`; their lines."""
    shell = {
        number
        for block in blocks(markdown, name)
        if block.language in SHELL
        for number in range(block.line + 1, block.line + 1 + len(block.text.splitlines()))
    }
    return [
        (target, number)
        for number, line in enumerate(markdown.splitlines(), 1)
        for command in ([line] if number in shell else re.findall(r"`(make [^`]*)`", line))
        for target in re.findall(r"(?:^|[$;&`]\s*|^\s+)make ([a-z][\w-]*)", command)
    ]


def run(markdown: str, name: str, jax_version: str) -> list[str]:
    """Runs a page: what is wrong with it, by file:line. An exception ends it, a wrong output does not."""
    module = types.ModuleType("page_" + re.sub(r"\W", "_", Path(name).stem))
    module.__file__ = name  # tracebacks and inspect.getsource then quote the page
    sys.modules[module.__name__] = module  # where typing looks up the names in annotations
    wrong = []
    for example in examples(blocks(markdown, name), name):
        code = example.code
        if code.not_run or not code.counts(jax_version):
            continue
        where, printed = f"{name}:{code.line}", io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * code.line + code.text, name, "exec"), module.__dict__)
                if jax := sys.modules.get("jax"):
                    jax.effects_barrier()  # jax.debug.print may lag
        except Exception as error:
            if type(error).__name__ != code.raises:
                return [*wrong, f"{_line(error, name, code)}: the block raises\n{_trace(error)}"]
            print(f"{type(error).__name__}: {error}", file=printed)
        else:
            if code.raises:
                wrong.append(f"{where}: the block does not raise {code.raises}")
        for output in example.outputs:
            if output.counts(jax_version) and (diff := _diff(output.text, printed.getvalue())):
                wrong.append(f"{name}:{output.line}: the block above prints something else\n{diff}")
    return wrong


def _line(error: Exception, name: str, code: Block) -> str:
    """file:line of the innermost line of the page that the exception went through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
    if isinstance(error, SyntaxError) and error.filename == name:
        lines.append(error.lineno)
    return f"{name}:{lines[-1] if lines else code.line}"


def _trace(error: Exception) -> str:
    tail = error.__traceback__ and error.__traceback__.tb_next  # without the frame of run itself
    return "".join(traceback.format_exception(type(error), error, tail))


def _diff(expected: str, printed: str) -> str:
    def tidy(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    diff = difflib.unified_diff(tidy(expected), tidy(printed), "on the page", "printed", lineterm="", n=2)
    return "\n".join(diff)


def main(page: str) -> int:
    text = Path(page).read_text(encoding="utf-8")
    try:
        wrong = run(text, page, importlib.metadata.version("jax"))
    except DocError as error:
        wrong = [str(error)]
    print(*wrong, sep="\n\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
