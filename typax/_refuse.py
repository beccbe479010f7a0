"""What an array does and a value does not: one table, for values and for tracers of them.

    q @ x     q + 1     q == 1     float(q)     q.sum()     q.at[0]     numpy.asarray(q)

Each raises the same error, eagerly and while a program is traced, unless the class of the value defines it, or the type has
an op for it (`_arithmetic`).
"""

import functools
from typing import Any, NoReturn

from typax import _arithmetic, _interpret, _jax

# As JAX names them: tracers forward `__add__` to `_add` of their type.
OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul
    and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert round eq ne lt le gt ge
    contains iter bool int float complex
"""
METHODS = """
    all any argmax argmin argpartition argsort astype byteswap choose clip compress conj conjugate cumprod cumsum diagonal
    dot flatten item max mean min nonzero prod ptp ravel repeat reshape round searchsorted sort squeeze std sum swapaxes
    take tolist trace var view
"""
PROPERTIES = "at flat imag mT real"
NAMES = frozenset((METHODS + PROPERTIES).split())
#: A class that defines one of these itself: the name under which a tracer finds it on its type.
FORWARDED = {f"__{n}__": f"_{n}" for n in f"{OPERATORS} getitem len".split()}


class NoSuchAttribute(TypeError, AttributeError):
    """An attribute of arrays was asked of a value. Also an AttributeError, so that ``hasattr`` is false."""


def not_an_array(value: Any, what: str = "", error: type[TypeError] = TypeError) -> NoReturn:
    run = "typax.lift(f) to run a function of arrays on it"
    if _interpret.lifting.depth:  # not an argument: a global, or made by an op within
        run = "give it to the lifted function as an argument, which stands for an array there"
    raise error(
        f"{what and f'{what}: '}a value of type {_jax.typeof(value)} is not an array and does not become one silently; use "
        f"typax.matmul(x, q) for products, typax.dense(q) for the array that it stands for, or {run}"
    )


def attribute(value: Any, name: str) -> Any:
    """A method or property of arrays, of a value: bound where its type has an op for it.

    Raises:
      NoSuchAttribute: where it has none.
    """
    if (known := _arithmetic.METHODS.get(name)) is not None and known.of(value):
        return functools.partial(known.run, value)
    if (known := _arithmetic.PROPERTIES.get(name)) is not None and known.of(value):
        return known.run(value)
    not_an_array(value, name, NoSuchAttribute)


def _refused(what: str, error: type[TypeError] = TypeError) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        not_an_array(self, what, error)

    return refuse


def _able(what: str, known: _arithmetic.Known | None, error: type[TypeError] = TypeError) -> Any:
    """What the ops of a type make of it, or the refusal."""
    refuse = _refused(what, error)
    if known is None:
        return refuse
    return lambda self, *args, **kwargs: (known.run if known.of(self) else refuse)(self, *args, **kwargs)


def _operators() -> dict[str, Any]:
    return {n: _able(f"__{n}__", _arithmetic.OPERATORS.get(n)) for n in OPERATORS.split()}


def on_values() -> dict[str, Any]:
    """The operators of a value."""
    return {f"__{n}__": f for n, f in _operators().items()}


def on_tracers() -> dict[str, Any]:
    """The operators, methods and properties of a tracer of a value, as attributes of its type."""
    operators = {f"_{n}": staticmethod(f) for n, f in _operators().items()}
    operators |= {"_copy": staticmethod(lambda x: x), "_deepcopy": staticmethod(lambda x, _: x)}
    operators["_setitem"] = staticmethod(_refused("__setitem__"))
    methods = {n: _jax.aval_method(_able(n, _arithmetic.METHODS.get(n))) for n in METHODS.split()}
    able = {n: _able(n, _arithmetic.PROPERTIES.get(n), NoSuchAttribute) for n in PROPERTIES.split()}
    properties = {n: _jax.aval_property(f) for n, f in able.items()}
    return operators | methods | properties | {"__jax_array__": _jax.aval_method(not_an_array)}
