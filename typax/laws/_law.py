"""What a law is: a property of types or of ops that is checked on one example.

    @law("type", "A value that is lowered and raised again is the same value.")
    def raise_lower(cls, example): ...

A law returns if the example keeps it, raises `Broken` with a sentence that says what broke, where, and what it means, or
`NotApplicable` with the reason why it has nothing to say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


class Broken(AssertionError):
    """A law does not hold; the message is one sentence, ``cause`` the place in one's code that raises, if one does."""

    cause: str = ""


class NotApplicable(Exception):
    """A law has nothing to say about an example; the message is the reason."""


@dataclass(frozen=True)
class Law:
    """A named property of types (``kind="type"``) or ops (``kind="op"``): its ``name`` and its ``statement``, a sentence.

    ``check(subject, example)`` takes a class and `Values`, or an op and a `Call`.  ``tame`` laws are checked on finite
    values of ordinary size only; ``smooth`` ones on float32 only; ``even`` ones on axes that two devices can share.
    """

    name: str
    statement: str
    kind: Literal["type", "op"]
    check: Callable[[Any, Any], None]
    tame: bool = False
    smooth: bool = False
    even: bool = False


LAWS: dict[str, Law] = {}
"""All laws by name, in the order of the table."""


def law(kind: Literal["type", "op"], statement: str, **needs: bool) -> Callable[[Callable[[Any, Any], None]], Law]:
    """Make a law of a function and enter it in the table."""

    def enter(check: Callable[[Any, Any], None]) -> Law:
        new = Law(check.__name__.replace("_", "-"), statement, kind, check, **needs)
        assert new.name not in LAWS
        LAWS[new.name] = new
        return new

    return enter


@dataclass(frozen=True)
class Values:
    """An example of a type: a ``value``, and ``others`` of the same type; ``all`` of them."""

    value: Any
    others: tuple[Any, ...]

    @property
    def all(self) -> tuple[Any, ...]:
        return (self.value, *self.others)


@dataclass(frozen=True)
class Call:
    """An example of an op: operands ``args``, ``others`` of the same types (``all`` of them), and statics."""

    op: Any
    args: tuple[Any, ...]
    others: tuple[tuple[Any, ...], ...]
    statics: dict[str, Any]

    @property
    def all(self) -> tuple[tuple[Any, ...], ...]:
        return (self.args, *self.others)

    def run(self, *args: Any) -> Any:
        """The op, on these operands."""
        return self.op(*args, **self.statics)
