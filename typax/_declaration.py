"""What a class statement says: components, statics, what a value stands for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from typax import _axes
from typax._axes import Pattern
from typax._tangent import Tangent


@dataclass(frozen=True)
class Component:
    """A declared component: its alternatives (one for each admitted class), which all have the same axes."""

    name: str
    patterns: tuple[Pattern, ...]

    @property
    def axes(self) -> _axes.Axes | None:
        return self.patterns[0].axes

    def __str__(self) -> str:
        return f"{self.name}: {' | '.join(p.text for p in self.patterns)}"


@dataclass(frozen=True)
class Static:
    """A declared parameter of the type."""

    name: str
    default: Any


class _Missing:
    def __repr__(self) -> str:
        return "<required>"


MISSING = _Missing()


@dataclass(frozen=True, eq=False)
class Declaration:
    """What a class statement says, read once."""

    cls: Any
    name: str
    components: tuple[Component, ...]
    statics: tuple[Static, ...]
    order: tuple[str, ...]
    tangent: Tangent
    stands_for: Pattern | None
    dtype_from: str | None
    dense: Callable[[Any], Any] | None

    @property
    def is_record(self) -> bool:
        return self.stands_for is None

    @cached_property
    def shown_names(self) -> frozenset[str]:
        """The names in the axes of the components."""
        return frozenset(n for c in self.components if c.axes is not None for d in c.axes.dims for n in d.names)

    @cached_property
    def axis_names(self) -> frozenset[str]:
        """The names in the axes of the components and of what a value stands for."""
        axes = self.stands_for.axes if self.stands_for else None
        return self.shown_names | {n for d in (axes.dims if axes else ()) for n in d.names}

    @property
    def stackable(self) -> bool:
        """Whether values may be built stacked: some component declares leading batch axes."""
        return any(c.axes is not None and c.axes.variadic for c in self.components)
