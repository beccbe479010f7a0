"""A tuple as one value: heterogeneous, nested, with a type that is the tuple of the types of its elements.

    t = tup(jnp.arange(3.0), quantize(x))           Tup{float32[3],q8[2,3]}
    a, q = t;  t[0];  t[-1];  t[:1];  len(t)        under every transformation

Its tangent is the tuple of the elements' tangents.  Elements may be mapped differently: ``in_axes=typax.Axes(0, None)``; and
partitioned differently: ``Tup.P(jax.P("i"), typax.QArray.P())``.  A tuple with named fields is any class without `dense`:

    class State(typax.Value):
        params: typax.QArray
        step: Int32[Array, ""]
"""

from collections.abc import Iterator
from typing import Any

from typax._value import Value


class Tup(Value, name="Tup"):
    """A tuple of arrays and values, itself a value. Made by `tup`; `elts` are its elements."""

    elts: tuple[Any, ...]

    def __getitem__(self, index: int | slice) -> Any:
        elts = self.components()
        return tup(*elts[index]) if isinstance(index, slice) else elts[index]

    def __len__(self) -> int:
        return len(self.components())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.components())


def tup(*elts: Any) -> Tup:
    """The tuple of these arrays, numbers and values, as one value.

    Raises:
      TypeError: for an element that is neither.
    """
    return Tup.from_components(elts)
