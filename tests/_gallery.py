"""What the gallery has, as laws take it."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  the ground that tests stand on, before there is an array
import jax.numpy as jnp

import gallery
from gallery import int3, interval
from typax import laws, quantize

PAGES = sorted(p for p in Path(gallery.__file__).parent.glob("*.py") if p.name != "__init__.py")
ROWS = jnp.sin(jnp.arange(24.0) + 1).reshape(2, 12)
EXAMPLES: dict[Any, Any] = {
    interval.monotone: [((interval.Interval(ROWS, ROWS + 1),), {"f": jnp.tanh})],
    quantize: [((ROWS,), {"format": int3.INT3})],
}
"""Of ops with statics that cannot be made up."""


def subjects() -> Iterator[tuple[str, Any]]:
    """Each page's types and ops; of a format the type that it makes, and the op."""
    for page in PAGES:
        space = importlib.import_module(f"gallery.{page.stem}")
        yield from ((page.stem, s) for s in laws.in_module(space, examples=EXAMPLES))
    first, *others = (quantize(ROWS + k, int3.INT3) for k in range(3))
    for s in laws.subjects(type(first), [quantize], {type(first): [laws.Values(first, tuple(others))], **EXAMPLES}):
        yield "int3", s


def sample() -> Iterator[tuple[str, Any]]:
    """Of each page the type and the first op."""
    seen: set[tuple[str, str]] = set()
    for page, s in subjects():
        if (page, s.kind) not in seen:
            seen.add((page, s.kind))
            yield page, s
