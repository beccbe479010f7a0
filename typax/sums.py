"""Sums that stay sums: ``base + scale · delta``, whose product with x is two products.

    x @ (base + scale · delta) = x @ base + scale · (x @ delta)

With a `LowRank` delta this is low-rank adaptation (LoRA, Hu et al. 2021, arXiv:2106.09685, where ``scale`` is α/r); with a
quantized base, QLoRA (Dettmers et al. 2023, arXiv:2305.14314).  Each part keeps its own tangents: factors for the low-rank
part, a dense array for a quantized base, nothing for a base of a class with ``tangent="none"``.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from typax import _interpret, _jax
from typax import _rows as rows
from typax._codes import dot_general, told
from typax._convolutions import ragged_dot_general
from typax._op import Refused
from typax._structural import dense, pack_open
from typax._type import ValueType
from typax._value import Value
from typax.lowrank import LowRank, outer
from typax.quantized import Quantized, matmul


class Sum(Value, name="sum", tangent="componentwise"):
    """The sum ``base + scale · delta`` of two values that stand for matrices of one shape.

    Components: ``base`` and ``delta``, each an array or a value, float ``[*batch, m, n]``; the dtype is that of ``base``.
    Static: ``scale``, a number.
    """

    base: Float[Array, "*batch m n"] | Float[Value, "*batch m n"]
    delta: Float[Array, "*batch m n"] | Float[Value, "*batch m n"]
    scale: float = 1.0
    _dense_of_stacks = True

    def dense(self) -> Float[Array, "*batch m n"]:
        return _add(self, dense(self.base), dense(self.delta))


def _add(w: Sum, base: Any, delta: Any) -> Any:
    return base + w.scale * delta.astype(base.dtype)


def _part(primitive: Any, *operands: Any, given: Any = None, **params: Any) -> Any:
    """What is made of a part: by its op, or of the array that it is.  ``given``: keywords for the ops that have them.

    Raises:
      Refused: if no op can.
    """
    operands = tuple(map(pack_open, operands))
    if not any(map(_jax.is_hi_value, operands)):
        return primitive.bind(*operands, **params)
    return _made(primitive.name, operands, _interpret.native(primitive, operands, params, given or {}))


def _matmul(x: Any, y: Any, activations: Any) -> Any:
    x, y = pack_open(x), pack_open(y)
    if not any(map(_jax.is_hi_value, (x, y))):
        return x @ y
    return _made("matmul", (x, y), matmul.run_equation((x, y), {}, told(activations)))


def _made(name: str, operands: Sequence[Any], out: Any) -> Any:
    if isinstance(out, _interpret.Declined):
        raise Refused(out.why)
    if out is NotImplemented:
        parts = " and ".join(str(t) for t in map(_jax.typeof, operands) if _jax.is_hi(t))
        raise Refused(f"no op for {name} takes {parts}, a part of a sum")
    return out


@matmul.impl
def _(x: Float[Array, "*b m"], w: Float[Sum, "m n"], *, activations: Any = "float") -> Any:
    return _both_added(w, lambda part: _matmul(x, part, activations))


@matmul.impl
def _(w: Float[Sum, "m n"], x: Float[Array, "*b n k"] | Float[Array, "n"], *, activations: Any = "float") -> Any:
    return _both_added(w, lambda part: _matmul(part, x, activations))


@dot_general.impl
def _(x: Float[Array, "*b"], w: Sum, *, activations: Any = "float", **params: Any) -> Any:
    return _both_added(w, lambda part: _part(lax.dot_general_p, x, part, given=told(activations), **params))


@dot_general.impl
def _(w: Sum, x: Float[Array, "*b"], *, activations: Any = "float", **params: Any) -> Any:
    return _both_added(w, lambda part: _part(lax.dot_general_p, part, x, given=told(activations), **params))


@ragged_dot_general.impl
def _(x: Float[Array, "*b"], w: Sum, sizes: Integer[Array, "g"], **params: Any) -> Any:
    return _both_added(w, lambda part: _part(_jax.ragged_dot_general_p, x, part, sizes, **params))


def _both_added(w: Sum, f: Any) -> Any:
    return _add(w, f(w.base), f(w.delta))


# --- programs that add one up: w + c · (a @ b)


class _Adding:
    """A matrix plus or minus a low-rank one is a sum of the two."""

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
        w, delta = operands
        if self.sign == 1 and not _is_a(delta, LowRank):
            w, delta = delta, w
        if not (_is_a(delta, LowRank) and _is_a(w, Quantized | LowRank | Sum) and w.shape == delta.shape):
            return NotImplemented
        return Sum.from_components(w, delta, scale=float(self.sign))


_interpret.registry.setdefault(lax.add_p, []).append(_Adding(1))
_interpret.registry.setdefault(lax.sub_p, []).append(_Adding(-1))


def _is_a(x: Any, cls: Any) -> bool:
    ty = _jax.typeof(x)
    return isinstance(ty, ValueType) and issubclass(ty.decl.cls, cls)


def _keep_product(eqn: Any, operands: Any, base: Any) -> Any:
    """The product of two arrays as a `LowRank`, if that is smaller than it, for a value that it will be added to."""
    a, b = operands
    plain = a.ndim == b.ndim == 2 and eqn.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    asked = eqn.params["precision"] is not None or eqn.params.get("out_sharding") is not None
    kept = a.dtype == b.dtype == eqn.outvars[0].aval.dtype and jnp.issubdtype(a.dtype, jnp.floating)
    fits = _is_a(base, Quantized | LowRank | Sum)
    small = a.size + b.size < a.shape[0] * b.shape[-1]
    return outer(a, b, tangent="componentwise") if plain and kept and fits and small and not asked else NotImplemented


_interpret.keep_product = _keep_product


# --- what is linear is done to both parts


def _both(w: Sum, f: Any) -> Any:
    return _summed(w, f(w.base), f(w.delta))


def _summed(w: Sum, base: Any, delta: Any) -> Any:
    """What is made of both parts, as a sum; a vector, or rows of a lookup, are one array."""
    was = any(isinstance(x, Value) for x in (w.base, w.delta))
    is_array = not any(isinstance(x, Value) for x in (base, delta)) and was
    return _add(w, base, delta) if is_array or base.ndim < 2 else Sum(base, delta, w.scale)


def _linear(on: Any) -> None:
    def implementation(w: Sum, **params: Any) -> Any:
        return _both(w, lambda x: _part(on.primitive, x, **params))

    on.impl(implementation)


for _op in (rows.transpose, rows.reshape, rows.squeeze, rows.broadcast_in_dim, rows.slice_, rows.rev, rows.neg):
    _linear(_op)


def _in_parts(on: Any) -> None:
    def implementation(w: Sum, **params: Any) -> Any:
        return [
            _summed(w, *parts) for parts in zip(*(_part(on.primitive, x, **params) for x in (w.base, w.delta)), strict=True)
        ]

    on.impl(implementation)


for _op in (rows.split, rows.unstack):
    _in_parts(_op)


def _all(f: Any, ws: tuple[Sum, ...]) -> Any:
    if len({w.scale for w in ws}) > 1:
        raise Refused("the sums have different scales")
    return Sum(f(*(w.base for w in ws)), f(*(w.delta for w in ws)), ws[0].scale)


@rows.concatenate.impl
def _(*ws: Sum, dimension: Any) -> Any:
    return _all(lambda *xs: _part(lax.concatenate_p, *xs, dimension=dimension), ws)


@rows.stack.impl
def _(*ws: Sum, axis: Any) -> Any:
    return _all(lambda *xs: _part(lax.stack_p, *xs, axis=axis), ws)


@rows.select_n.impl
def _(which: Bool[Array, ""] | Integer[Array, ""], *ws: Sum) -> Any:
    return _all(lambda *xs: _part(lax.select_n_p, which, *xs), ws)


@rows.dynamic_slice.impl
def _(w: Sum, *starts: Integer[Array, ""], slice_sizes: Any) -> Any:
    return _both(w, lambda x: _part(lax.dynamic_slice_p, x, *starts, slice_sizes=slice_sizes))


@rows.gather.impl
def _(w: Sum, index: Integer[Array, "*b i"], **params: Any) -> Any:
    if params["fill_value"] is not None and not np.isnan(params["fill_value"]):
        raise Refused("what fills would be added up")
    return _both(w, lambda x: _part(lax.gather_p, x, index, **params))


@rows.convert_element_type.impl
def _(w: Sum, **params: Any) -> Any:
    return Sum(_part(lax.convert_element_type_p, w.base, **params), w.delta, w.scale)  # the dtype is that of the base


@rows.mul.impl
def _(w: Sum, c: Float[Array, "*b"], *, along: Any = None, **params: Any) -> Any:
    return _both(w, lambda x: _part(lax.mul_p, x, c, given={"along": along}, **params))


@rows.mul.impl
def _(c: Float[Array, "*b"], w: Sum, *, along: Any = None, **params: Any) -> Any:
    return _both(w, lambda x: _part(lax.mul_p, c, x, given={"along": along}, **params))


@rows.div.impl
def _(w: Sum, c: Float[Array, "*b"], *, along: Any = None, **params: Any) -> Any:
    return _both(w, lambda x: _part(lax.div_p, x, c, given={"along": along}, **params))
