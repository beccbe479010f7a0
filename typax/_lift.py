"""`lift`: a program that knows nothing of hi types runs on hi values.

The program is traced on what its arguments stand for (types only: no dense array is made), and its jaxpr is evaluated on the
hi values themselves: an equation with a hi operand runs by the op whose reference is the primitive at hand.  Where no op
fits, the operand becomes dense, which is announced, and never done silently.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from typax import _interpret, _jax
from typax._structural import pack_open
from typax._type import dense_type


@dataclass
class Receipt(_interpret.Policy):
    """What ran natively and what became dense, filled while a lifted program is traced.

    `natives` and `densifications` have a line for each equation: the primitive with the types of its operands. `fallback` is
    that of the `lift` that fills it.
    """

    fallback: str = "announce"
    natives: list[str] = field(default_factory=list)
    densifications: list[str] = field(default_factory=list)

    def native(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        self.natives.append(f"{eqn.primitive.name}({', '.join(str(_jax.typeof(x)) for x in operands)})")

    def densified(self, eqn: Any, operand: Any) -> None:
        ty = _jax.typeof(operand)
        line = f"{eqn.primitive.name} makes {ty} dense ({dense_type(ty).size * dense_type(ty).dtype.itemsize} bytes)"
        if self.fallback == "error":
            raise TypeError(
                f"typax.lift: {line}: no op with the reference {eqn.primitive.name} has an implementation for it; add "
                f'one, or lift with fallback="allow"'
            )
        if self.fallback == "announce" and line not in self.densifications:
            warnings.warn(f"typax.lift: {line}", stacklevel=2)
        self.densifications.append(line)


def lift[F: Callable[..., Any]](
    f: F, fallback: Literal["error", "announce", "allow"] = "announce", receipt: Receipt | None = None
) -> F:
    """``f`` on arguments that hold hi values anywhere in their pytrees.

    Args:
      f: a JAX-traceable function. Arguments that are not arrays (functions, strings, Python numbers) are static.
      fallback: where no op fits, ``"error"`` raises a TypeError, ``"announce"`` makes the operand dense and warns,
        ``"allow"`` makes it dense.
      receipt: filled, while the program is traced, with what ran how.

    Raises:
      TypeError: for an argument whose type stands for no single array.
    """
    if fallback not in ("error", "announce", "allow"):
        raise ValueError(f'typax.lift: fallback must be "error", "announce" or "allow", got {fallback!r}')

    @functools.wraps(f)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        flat, tree = jax.tree.flatten((args, kwargs))
        flat = [pack_open(x) for x in flat]
        places = [i for i, x in enumerate(flat) if isinstance(x, np.ndarray | jax.Array) or _jax.is_hi_value(x)]
        avals = [dense_type(_jax.typeof(flat[i])) for i in places]
        if wrong := [flat[i] for i, a in zip(places, avals, strict=True) if not isinstance(a, _jax.ShapedArray)]:
            raise TypeError(f"typax.lift: {_jax.typeof(wrong[0])} stands for no single array; pass its components")
        out_tree = None

        def on_arrays(*xs: Any) -> list[Any]:
            nonlocal out_tree
            full = list(flat)
            for i, x in zip(places, xs, strict=True):
                full[i] = x
            a, k = tree.unflatten(full)
            out, out_tree = jax.tree.flatten(f(*a, **k))
            return out

        jaxpr = jax.jit(on_arrays).trace(*avals).jaxpr
        policy = receipt if receipt is not None else Receipt()
        policy.fallback = fallback
        out = _interpret.evaluate(jaxpr, [flat[i] for i in places], policy)
        assert out_tree is not None
        return out_tree.unflatten(out)

    return lifted  # type: ignore[return-value]
