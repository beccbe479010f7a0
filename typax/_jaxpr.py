"""Jaxprs: traced from a function, read, and bound equation by equation.

Nothing here depends on the version of JAX; what does is in `_jax`.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from typax import _jax


def trace(f: Callable[..., Any], types: Sequence[Any]) -> Any:
    """The jaxpr of ``f`` on arguments of these types, closed: a tracer that ``f`` closes over is one of its constants."""
    traced = jax.jit(f).trace(*types)
    consts = [*traced.jaxpr.consts, *traced._consts]  # pyright: ignore[reportPrivateUsage]
    return traced.jaxpr.with_consts(consts) if traced._consts else traced.jaxpr


def has_tracer_consts(jaxpr: Any) -> bool:
    return any(isinstance(c, _jax.Tracer) for c in jaxpr.consts)


def bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind a primitive with the parameters that an equation of a jaxpr shows."""
    return primitive.bind(*operands, **primitive.get_bind_params(params))


def bind_eqn(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    out = bind(eqn.primitive, operands, eqn.params)
    return list(out) if eqn.primitive.multiple_results else [out]


def application(eqn: Any) -> Any:
    """The op that an equation applies; ``None`` if it is no op of typax."""
    prim = eqn.params.get("_prim")
    return getattr(prim, "app", None)


class Itself:
    """A parameter that is not hashable, told apart by what it is: a `jax.custom_vjp` may have such arguments."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value


def hashable(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation as statics; `opened` undoes it."""

    def closed(v: Any) -> Any:
        try:
            hash(v)
        except TypeError:
            return Itself(v)
        return v

    return {k: closed(v) for k, v in params.items()}


def opened(params: dict[str, Any]) -> dict[str, Any]:
    return {k: v.value if isinstance(v, Itself) else v for k, v in params.items()}


OPTIONS = ("activations", "lifting", "along")
"""Keywords that implementations of a primitive may have beside its parameters: how `typax.lift` is to run it, and of ``mul``
and ``div``, ``along`` which axes the array that a value meets is known to be the same."""


def binder(primitive: Any) -> Callable[..., Any]:
    """A primitive as a function, whose keywords are its parameters."""

    def reference(*xs: Any, **params: Any) -> Any:
        return bind(primitive, xs, opened({k: v for k, v in params.items() if k not in OPTIONS}))

    reference.__name__ = primitive.name
    return reference


_HERE = os.path.dirname(__file__) + os.sep


def place(eqn: Any) -> tuple[str, int, str] | None:
    """The file, line and function of the program that an equation comes from; typax's own frames are left out."""
    for frame in _jax.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_HERE):
            return frame.file_name, frame.start_line, frame.function_name
    return None


def calling_place() -> tuple[str, int, str] | None:
    """The file, line and function that have called typax."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _jax.is_user_file(file) and not file.startswith(_HERE):
            return file, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back
    return None


def with_weak_type(x: Any, aval: Any) -> Any:
    """An array with the dtype and weak type of ``aval``: branches and carries are compared with both."""
    ty = _jax.typeof(x)
    if _jax.is_hi(ty) or _jax.is_hi(aval) or (ty.dtype, ty.weak_type) == (aval.dtype, aval.weak_type):
        return x
    return _jax.convert_element_type(x, aval.dtype, aval.weak_type)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried; the others are sliced."""
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def dependences(jaxpr: Any) -> list[frozenset[int]]:
    """For each result of a lowered jaxpr, the positions of the arguments it depends on (conservatively)."""
    env: dict[Any, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        deps = frozenset().union(*(env.get(v, frozenset()) for v in eqn.invars if not isinstance(v, _jax.Literal)))
        inner = eqn.params.get("jaxpr")
        if inner is not None and eqn.primitive.name in ("jit", "pjit") and len(inner.invars) == len(eqn.invars):
            atoms = [frozenset() if isinstance(v, _jax.Literal) else env.get(v, frozenset()) for v in eqn.invars]
            for var, out in zip(eqn.outvars, dependences(inner), strict=True):
                env[var] = frozenset().union(*(atoms[i] for i in out))
        else:
            env.update(dict.fromkeys(eqn.outvars, deps))
    return [frozenset() if isinstance(v, _jax.Literal) else env.get(v, frozenset()) for v in jaxpr.outvars]


# --- products ---------------------------------------------------------------------------------------------------------


def flops(eqn: Any) -> int:
    """Of an equation that is a product: twice its multiplications. Else 0."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[a] for a in contract)
    if name == "conv_general_dilated":
        kernel, out_axis = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * (math.prod(kernel) // max(1, kernel[out_axis]))
    if name == "ragged_dot_general":
        (contract, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[a] for a in contract)
    return 0


def products(eqn: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The products in an equation and in the programs that it holds, with how often each runs (a while loop once)."""
    if flops(eqn):
        yield eqn, times
        return
    times *= eqn.params["length"] if eqn.primitive is jax.lax.scan_p else 1
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            for e in getattr(inner, "eqns", ()):
                yield from products(e, times)
