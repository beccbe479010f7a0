"""Hi types written by hand (`typax.hijax`), as declared types and ops see them.

Such a type says how its values become arrays, and no more.  Its axes and dtype are those of its tangents, if these are
arrays; it is mapped along its leading axis by the spec that it names itself; and which axis of an array a spec maps is
read off the type's own change of rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

from typax import _jax


def is_raw(aval: Any) -> bool:
    """Whether a type is a hi type written by hand (`typax.hijax`)."""
    return _jax.is_hi(aval) and not getattr(aval, "is_declared", False)


def undeclared(name: str, aval: Any, instead: str) -> TypeError:
    """The error of what typax does with declared types only."""
    return TypeError(f"typax.{name}: {aval} is no declared type (a class of typax.Value); {instead}")


def has_axes(aval: Any) -> bool:
    """Whether a type written by hand has axes and a dtype: those of its tangents, if these are arrays."""
    try:
        tangent = aval.to_tangent_aval()
    except NotImplementedError:
        return False
    return not _jax.is_hi(tangent) and tangent.dtype != _jax.float0


def axes_type(aval: Any) -> Any:
    """The type that has the axes and the dtype of ``aval``: for a type written by hand, that of its tangents."""
    if not is_raw(aval):
        return aval
    if not has_axes(aval):
        raise TypeError(
            f"{aval} has no axes and no dtype, since its tangents are no arrays; annotate the class of its values alone"
        )
    return aval.to_tangent_aval()


def own_spec(aval: Any, spec: Any) -> Any:
    """A mapping spec as ``aval`` takes it: a type written by hand has its own for its leading axis."""
    if not isinstance(spec, int) or not is_raw(aval):
        return spec
    try:
        leading = aval.leading_axis_spec()
    except NotImplementedError:
        raise NotImplementedError(
            f"{aval} is to be mapped along its leading axis: implement {type(aval).__name__}.leading_axis_spec"
        ) from None
    if isinstance(leading, int):  # it knows axes by number
        return spec
    if spec != 0:
        raise TypeError(f"{aval} can be mapped along its leading axis only ({leading!r}), not along axis {spec}")
    return leading


def tangent_axis(aval: Any, spec: Any, size: int) -> Any:
    """The axis along which the tangent of a value is mapped that is mapped by ``spec``."""
    if spec is None or not is_raw(aval) or _jax.is_hi(aval.to_tangent_aval()):
        return spec
    return mapped_axes(aval, spec, size, lambda t: [t.to_tangent_aval()])[0]


def mapped_axes(aval: Any, spec: Any, size: int, arrays: Callable[[Any], Sequence[Any]]) -> list[int | None]:
    """Read off a type's own rank change where its arrays have the mapped axis: it is given a size that no axis has."""
    have = [tuple(a.shape) for a in arrays(aval)]
    mark = 1 + max((n for shape in have for n in shape), default=0)
    marked = [tuple(a.shape) for a in arrays(aval.dec_rank(size, spec).inc_rank(mark, spec))]
    for shape, new in zip(have, marked, strict=True):
        if shape != tuple(size if n == mark else n for n in new):
            raise TypeError(f"{aval}: dec_rank and inc_rank along {spec!r} are not each other's inverse")
    return [new.index(mark) if mark in new else None for new in marked]
