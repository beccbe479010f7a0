"""One call of a function of arrays on values: as a program that `typax.lift` runs, of which no operand becomes dense.

    q8t[12,10][4:8]      slice q8t[12,10]                    q8t[4,10]
    q4g4t[12,10][2:6]    TypeError: a slice 2:6 along axis 0 of q4[12,10] by groups (4,1) does not start ...

The function is traced on the arrays that its operands stand for, once for given types, and run by the ops whose references
are the primitives that it is made of.  Where none of them has an implementation that fits, that is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

from typax import _interpret, _jax, _jaxpr
from typax._prim import Cache
from typax._structural import pack_open
from typax._type import dense_type

_programs = Cache(1024)


def traced(name: str, key: Any, f: Callable[..., Any], types: Sequence[Any]) -> Any:
    """The jaxpr of ``f`` on what these types stand for, kept; ``key`` tells apart what ``f`` may be under one name."""

    def trace() -> Any:
        with _interpret.outside():
            return _jaxpr.trace(f, [dense_type(t) for t in types])

    return _programs.get((name, key, tuple(types), _jax.trace_key()), trace)


def natively(
    name: str, key: Any, f: Callable[..., Any], *operands: Any, no_op: Callable[[Any], str] | None = None
) -> list[Any]:
    """The list of what ``f``, a function of arrays to a list of them, gives on these values and arrays.

    ``no_op`` words the error, of a type that has no op for it at all.

    Raises:
      TypeError: if an operand would have to become dense.
    """
    operands = tuple(map(pack_open, operands))
    types = tuple(map(_jax.typeof, operands))
    shown = ", ".join(dict.fromkeys(str(t) for t in types if _jax.is_hi(t)))
    if not all(isinstance(dense_type(t), _jax.ShapedArray) for t in types):
        raise TypeError(f"{name} of {shown}: it stands for no single array; do it to its components")

    def record(e: _interpret.Event) -> None:
        if e.dense is None:
            return
        if not e.why and no_op is not None:
            raise TypeError(no_op(e.dense))
        reason = e.why.removeprefix("since ") or f"no op with the reference {e.primitive} has an implementation for it"
        raise TypeError(f"{name} of {shown}: {reason}; do it to typax.dense(v)")

    return _interpret.evaluate(traced(name, key, f, types), operands, record)


def knows(primitive: Any, *types: Any) -> bool:
    """Whether an op whose reference is this primitive has an implementation for operands of these types."""
    return any(getattr(op, "choose", lambda _: None)(types) for op in _interpret.registry.get(primitive, ()))
