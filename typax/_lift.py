"""`lift`: a program that knows nothing of hi types runs on hi values.

The program is traced on what its arguments stand for (types only: no dense array is made), and its jaxpr is evaluated on the
hi values themselves: an equation with a hi operand runs by the op whose reference is the primitive at hand.  Where no op
fits, the operand becomes dense, which is announced, and never done silently.
"""

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from typax import _control as _control  # the programs inside programs register themselves
from typax import _interpret, _jax, _jaxpr
from typax._axes import static_key
from typax._interpret import Event
from typax._prim import Cache
from typax._structural import pack_open
from typax._type import dense_type


@dataclass
class Receipt:
    """What ran natively and what became dense, when a lifted function last ran or was last traced.

    `natives` holds a line for each equation that an op has run: the primitive with the types of its operands.
    `densifications` holds a line for each operand that became dense, with its place in the program.
    Equations of a loop's body, of branches and of nested calls are in it once, as in the program's jaxpr.
    """

    natives: list[str] = field(default_factory=list)
    densifications: list[str] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Note that an equation ran natively, or what it made dense."""
        if event.dense is None:
            self.natives.append(f"{event.primitive}({', '.join(map(str, event.types))})")
        else:
            self.densifications.append(_line(event))


def _line(event: Event) -> str:
    ty = dense_type(event.dense)
    why = f" {event.why}" if event.why else ""
    at = ""
    if event.place is not None:
        file, line, function = event.place
        at = f", at {os.path.basename(file)}:{line} ({function})"
    return f"{event.primitive} makes {event.dense} dense ({ty.size * ty.dtype.itemsize} bytes){why}{at}"


class _Program:
    """A function traced on what its arguments stand for: the arrays and hi values among their leaves are its operands."""

    out_tree: Any  # known once it is traced

    def __init__(self, f: Callable[..., Any], leaves: list[Any], tree: Any, avals: dict[int, Any]) -> None:
        def on_arrays(*xs: Any) -> list[Any]:
            full = list(leaves)
            for i, x in zip(avals, xs, strict=True):
                full[i] = x
            args, kwargs = tree.unflatten(full)
            out, self.out_tree = jax.tree.flatten(f(*args, **kwargs))
            return out

        on_arrays.__name__ = getattr(f, "__name__", "lifted")
        self.jaxpr = _jaxpr.trace(on_arrays, list(avals.values()))


def lift[F: Callable[..., Any]](
    f: F, fallback: Literal["error", "announce", "allow"] = "announce", receipt: Receipt | None = None
) -> F:
    """``f`` on arguments that hold hi values anywhere in their pytrees.

    ``f`` is traced once for given argument types, as `jax.jit` does: its Python code must depend on nothing else.  What it
    returns may hold hi values, where what it returns is an argument or the result of an op that gives one.

    Args:
      f: a JAX-traceable function. Leaves that are neither arrays, NumPy scalars nor hi values are static (functions,
        strings, Python numbers and bools); ``f`` is traced anew for each, and for each call if they are not hashable.
      fallback: where no op fits, ``"error"`` raises a TypeError, ``"announce"`` makes the operand dense and warns once for
        each place in the program, ``"allow"`` makes it dense.
      receipt: holds, after each run or trace, what ran how.

    Raises:
      TypeError: for an argument whose type stands for no single array.
    """
    if fallback not in ("error", "announce", "allow"):
        raise ValueError(f'typax.lift: fallback must be "error", "announce" or "allow", got {fallback!r}')
    programs, announced = Cache(256), Cache(1024)

    def record(event: Event) -> None:
        if event.place is None and event.dense is not None:  # JAX's own function, lifted: nothing but the call to point at
            event = event._replace(place=_jaxpr.calling_place())
        if receipt is not None:
            receipt.record(event)
        if event.dense is not None and fallback == "error":
            raise TypeError(
                f"typax.lift: {_line(event)}: no op with the reference {event.primitive} has an implementation for it; "
                f'add one, or lift with fallback="allow"'
            )
        if event.dense is not None and fallback == "announce":
            announced.get((event.place, _line(event)), lambda: _announce(event))

    @functools.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [pack_open(x) for x in leaves]
        avals = {i: dense_type(t) for i, t in enumerate(map(_operand_type, leaves)) if t is not None}
        for i, a in avals.items():
            if not isinstance(a, _jax.ShapedArray):
                raise TypeError(f"typax.lift: {_jax.typeof(leaves[i])} stands for no single array; pass its components")
        program = _program(f, programs, leaves, tree, avals)
        if receipt is not None:
            receipt.natives.clear()
            receipt.densifications.clear()
        out = _interpret.evaluate(program.jaxpr, [leaves[i] for i in avals], record)
        return program.out_tree.unflatten(out)

    return lifted  # type: ignore[return-value]


def _operand_type(x: Any) -> Any:
    """The type of a leaf that is an operand; ``None`` for one that is static."""
    if isinstance(x, np.ndarray | np.generic | jax.Array) or _jax.is_hi_value(x):
        try:
            return _jax.typeof(x)
        except TypeError:  # an array of strings or objects
            return None
    return None


def _program(f: Any, programs: Cache, leaves: list[Any], tree: Any, avals: dict[int, Any]) -> _Program:
    statics = [None if i in avals else x for i, x in enumerate(leaves)]
    key = (tree, static_key(tuple(statics)), tuple(avals.items()), _jax.trace_key())
    try:
        if (known := programs.entries.get(key)) is not None:
            return programs.get(key, lambda: known)
    except TypeError:  # a static that is not hashable
        return _Program(f, statics, tree, avals)
    program = _Program(f, statics, tree, avals)
    if _jaxpr.has_tracer_consts(program.jaxpr):  # it closes over a program being traced, which ends before the next call
        return program
    return programs.get(key, lambda: program)


def _announce(event: Event) -> bool:
    message = f"typax.lift: {_line(event)}"
    if event.place is None:
        warnings.warn(message, stacklevel=2)
    else:
        warnings.warn_explicit(message, UserWarning, event.place[0], event.place[1])
    return True
