"""What values do of what arrays do: multiply, change their dtype and their shape, where their type has ops for it.

    2 * q8[4,3]    q8[4,3]          q4t[12,10] * s[10]     q4t[12,10]       scales are multiplied, codes stay
    q.astype(jnp.bfloat16)          q.reshape(2, 2, 3)     q.mT             as functions of arrays that `lift` runs

A value has an operator or a method of arrays if an op whose reference is its primitive takes the value; any other one raises
what `_refuse` says.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from typax import _jax
from typax._indexing import take
from typax._natively import knows, natively
from typax._shapes import reshape, squeeze, swapaxes


def _one(name: str, f: Callable[..., Any], *operands: Any, key: Any = None) -> Any:
    return natively(name, key, lambda *xs: [f(*xs)], *operands)[0]


def multiply(x: Any, y: Any) -> Any:
    """``x * y`` for values: by a number, or by an array that broadcasts against axes which have scales of their own.

    Raises:
      TypeError: if the type has no op of the product, or none that can.
    """
    return _one("typax.multiply", operator.mul, x, y) if _any_value(x, y) else jnp.multiply(x, y)


def divide(x: Any, y: Any) -> Any:
    """``x / y`` for values, as `multiply`.

    Raises:
      TypeError: if the type has no op of the quotient, or none that can.
    """
    return _one("typax.divide", operator.truediv, x, y) if _any_value(x, y) else jnp.divide(x, y)


def negative(x: Any) -> Any:
    """``-x`` for values.

    Raises:
      TypeError: if the type has no op of it, or none that can.
    """
    return _one("-v", operator.neg, x) if _any_value(x) else jnp.negative(x)


def astype(x: Any, dtype: Any) -> Any:
    """``x.astype(dtype)`` for values: another float that they stand for.

    Raises:
      TypeError: if the type has no op of the conversion, or none that can.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return _one("astype", lambda x: x.astype(dtype), x, key=dtype) if _any_value(x) else jnp.astype(x, dtype)


def _any_value(*xs: Any) -> bool:
    return any(map(_jax.is_hi_value, xs))


class Known(NamedTuple):
    """An operator or method of arrays: the primitive of which a type has an op if it has it, and what it does."""

    primitive: Any
    run: Callable[..., Any]
    others: tuple[Any, ...] = ()  # types of the other operands

    def of(self, value: Any) -> bool:
        """Whether the value has it."""
        return knows(self.primitive, _jax.typeof(value), *self.others)


_NUMBER, _ROWS = (jax.typeof(np.zeros(n, t)) for n, t in (((), np.float32), ((1, 1), np.int32)))


def _reshape(x: Any, *shape: Any) -> Any:
    return reshape(x, shape[0] if len(shape) == 1 else shape)


OPERATORS = {
    "mul": Known(lax.mul_p, multiply, (_NUMBER,)),
    "rmul": Known(lax.mul_p, lambda x, y: multiply(y, x), (_NUMBER,)),
    "truediv": Known(lax.div_p, divide, (_NUMBER,)),
    "neg": Known(lax.neg_p, negative),
}
METHODS = {
    "astype": Known(lax.convert_element_type_p, astype),
    "ravel": Known(lax.reshape_p, lambda x: reshape(x, -1)),
    "reshape": Known(lax.reshape_p, _reshape),
    "squeeze": Known(lax.squeeze_p, squeeze),
    "swapaxes": Known(_jax.transpose_p, swapaxes),
    "take": Known(lax.gather_p, take, (_ROWS,)),
}
PROPERTIES = {"mT": Known(_jax.transpose_p, lambda x: swapaxes(x, -1, -2))}
