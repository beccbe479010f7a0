"""Products of quantized arrays by any axes, as a program written for arrays has them.

    x ≈ scale · qvalue       shared: the axis along which values share a scale, the last of a `QArray`, the last but one of
                             `QColumns`; ``scale`` has all axes of the codes but that one

A scale on kept axes multiplies the result, one on contracted axes folds into the other operand, and one on both makes the
kept ones batch axes, along which the other operand is repeated.  Other layouts: `quantized.contract`.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from typax import _interpret, _jax
from typax._natively import traced
from typax._op import Op, Refused
from typax._structural import pack_open
from typax._type import dense_type
from typax.quantized import QArray, QColumns, Quantized, accumulated, along, matmul
from typax.quantized.axes import held
from typax.quantized.contract import check_activations, large, product
from typax.quantized.pairs import of_pair


def _plain(q: Any) -> Any:
    """The codes in the order of the array."""
    return q.qvalue.mT if isinstance(q, QColumns) else q.qvalue


def _shared(q: Any) -> int:
    return q.ndim - (2 if isinstance(q, QColumns) else 1)


def _without(xs: Any, axis: int) -> tuple[Any, ...]:
    return (*xs[:axis], *xs[axis + 1 :])


class DotGeneral(Op):
    """The op `dot_general`, called as ``lax.dot_general`` is."""

    @property
    def __signature__(self) -> inspect.Signature:
        def dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=None,
            preferred_element_type=None,
            *,
            out_sharding=None,
            activations="float",
        ):
            """How it is called."""

        return inspect.signature(dot_general)

    def __call__(
        self, lhs: Any, rhs: Any, dimension_numbers: Any = None, *args: Any, activations: Any = "float", **params: Any
    ) -> Any:
        own = told(activations)
        if {"precision", "preferred_element_type", "out_sharding"} <= params.keys():  # those of the primitive, from lift
            return super().__call__(lhs, rhs, dimension_numbers=dimension_numbers, **params, **own)
        if not any(map(_jax.is_hi_value, (lhs, rhs))):
            return lax.dot_general(lhs, rhs, dimension_numbers, *args, **params)
        numbers: Any = tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
        f = lambda x, y: [lax.dot_general(x, y, numbers, *args, **params)]
        types = [_jax.typeof(pack_open(x)) for x in (lhs, rhs)]
        (eqn,) = traced("dot_general", (numbers, args, tuple(sorted(params.items()))), f, types).eqns
        return super().__call__(lhs, rhs, **eqn.params, **own)


def told(activations: Any) -> dict[str, Any]:
    """The keyword that tells an op how activations meet codes, if that is not as it would."""
    return {} if isinstance(activations, str) and activations == "float" else {"activations": activations}


dot_general = DotGeneral(lax.dot_general_p, "dot_general")
dot_general.__doc__ = """``lax.dot_general`` with quantized arrays, and other values that have an implementation.

Args:
  lhs, rhs: arrays or values.
  dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
  precision, preferred_element_type, out_sharding: as ``lax.dot_general`` has them.
  activations: as of `typax.matmul`.

Raises:
  TypeError: if no implementation takes the operands, or as ``lax.dot_general``.
  ValueError: for activations that are none.
"""


class _Factor:
    """An operand of a product with a label for each axis: ("b", i) batch, ("c", i) contracted, (side, i) kept."""

    def __init__(self, x: Any, side: str, contract: Any, batch: Any, dtype: Any) -> None:
        hi = isinstance(x, QArray | QColumns)
        self.array = (_plain(x) if hi else x).astype(dtype)
        given = {a: ("b", i) for i, a in enumerate(batch)} | {a: ("c", i) for i, a in enumerate(contract)}
        self.labels = [given.get(a, (side, a)) for a in range(x.ndim)]
        self.scale: Any = x.scale if hi else None
        self.scaled = list(_without(self.labels, _shared(x))) if hi else []
        self.folds = any(kind == "c" for kind, _ in self.scaled)

    def onto(self, x: Any, labels: Sequence[Any]) -> Any:
        """``x``, whose axes have these labels, times the scale."""
        order = sorted(range(len(self.scaled)), key=lambda i: labels.index(self.scaled[i]))
        axes = [labels.index(self.scaled[i]) for i in order]
        return x * along(jnp.transpose(self.scale, order), x, axes)

    def times(self, other: "_Factor") -> None:
        """Multiply by the scale of ``other``; a kept axis of it that the scale varies along becomes one of this operand."""
        new = [n for n in other.scaled if n not in self.labels]
        self.labels = new + self.labels
        self.array = other.onto(jnp.expand_dims(self.array, range(len(new))), self.labels)


def _product(x: Any, y: Any, dimension_numbers: Any, params: dict[str, Any]) -> Any:
    (cx, cy), (bx, by) = dimension_numbers
    wide = accumulated(x.dtype, y.dtype)
    a, b = _Factor(x, "x", cx, bx, wide), _Factor(y, "y", cy, by, wide)
    wanted = [*(("b", i) for i in range(len(bx))), *(n for f in (a, b) for n in f.labels if n[0] not in "bc")]
    for own, other in ((a, b), (b, a)):
        if own.folds:  # the scales sit on contracted axes
            other.times(own)
    both = [n for n in a.labels if n in b.labels]
    contract, batch = [n for n in both if n[0] == "c"], sorted(n for n in both if n[0] != "c")
    labels = batch + [n for f in (a, b) for n in f.labels if n not in both]
    if labels != wanted and params.get("out_sharding") is not None:
        raise Refused("a scale that varies along a contracted and a kept axis needs another layout than asked for")
    numbers: Any = [[list(map(f.labels.index, ns)) for f in (a, b)] for ns in (contract, batch)]
    shared = {"precision": params.get("precision"), "out_sharding": params.get("out_sharding")}
    z = lax.dot_general(a.array, b.array, numbers, **shared)
    for f in (a, b):
        if f.scale is not None and not f.folds:  # they sit on axes of the result
            z = f.onto(z, labels)
    if labels != wanted:
        z = jnp.transpose(z, tuple(map(labels.index, wanted)))
    dtype = params.get("preferred_element_type")
    return z.astype(jnp.result_type(x.dtype, y.dtype) if dtype is None else dtype)


@dot_general.impl
def _(
    x: Float[Array, "*b"], w: QArray | QColumns, *, dimension_numbers: Any, activations: Any = "float", **params: Any
) -> Any:
    if activations != "float" or (large(w) and params.get("out_sharding") is None):
        return _any_product(x, w, True, dimension_numbers, params, activations)
    return _product(x, w, dimension_numbers, params)


@dot_general.impl
def _(
    w: QArray | QColumns, x: Float[Array, "*b"], *, dimension_numbers: Any, activations: Any = "float", **params: Any
) -> Any:
    if activations != "float" or (large(w) and params.get("out_sharding") is None):
        return _any_product(x, w, False, dimension_numbers, params, activations)
    return _product(w, x, dimension_numbers, params)


@dot_general.impl
def _(v: QArray | QColumns, w: QArray | QColumns, *, dimension_numbers: Any, **params: Any) -> Any:
    if params.get("out_sharding") is None:
        return _pair_product(v, w, dimension_numbers, params)
    return _product(v, w, dimension_numbers, params)


def _any_product(
    x: Any, w: Any, first: bool, dimension_numbers: Any, params: dict[str, Any], activations: Any = "float"
) -> Any:
    """Of an array and a quantized one of any format."""
    numbers = dimension_numbers if first else swapped(dimension_numbers)
    placed = _placed(x, w, numbers, params)
    check_activations(activations, "dot_general")
    y = product(x, w, *numbers, first=first, precision=params.get("precision"), activations=activations)
    dtype = params.get("preferred_element_type")
    return placed(y.astype(jnp.result_type(x.dtype, w.dtype) if dtype is None else dtype))


def swapped(dimension_numbers: Any) -> Any:
    """Those of a product whose operands are exchanged."""
    contract, batch = dimension_numbers
    return contract[::-1], batch[::-1]


def _placed(a: Any, b: Any, dimension_numbers: Any, params: dict[str, Any]) -> Any:
    """What puts a product, whose sharding follows from those of its operands, where it is asked for."""
    if (asked := params.get("out_sharding")) is None:
        return lambda y: y
    for x, axes in zip((a, b), dimension_numbers[0], strict=True):
        spec = dense_type(_jax.typeof(x)).sharding.spec
        if wrong := [i for i in axes if spec[i] is not None]:
            raise Refused(
                f"axis {wrong[0]} of {_jax.typeof(x)}, which is summed, is sharded; reshard it, or leave out_sharding to JAX"
            )
    return lambda y: jax.sharding.reshard(y, asked)


@dot_general.impl
def _(x: Float[Array, "*b"], w: Quantized, *, dimension_numbers: Any, activations: Any = "float", **params: Any) -> Any:
    return _any_product(x, w, True, dimension_numbers, params, activations)


@dot_general.impl
def _(w: Quantized, x: Float[Array, "*b"], *, dimension_numbers: Any, activations: Any = "float", **params: Any) -> Any:
    return _any_product(x, w, False, dimension_numbers, params, activations)


@dot_general.impl
def _(v: Quantized, w: Quantized, *, dimension_numbers: Any, **params: Any) -> Any:
    return _pair_product(v, w, dimension_numbers, params)


def _pair_product(v: Any, w: Any, dimension_numbers: Any, params: dict[str, Any]) -> Any:
    """Of two quantized arrays."""
    placed = _placed(v, w, dimension_numbers, params)
    y = of_pair(held(v), held(w), *dimension_numbers)
    dtype = params.get("preferred_element_type")
    return placed(y.astype(jnp.result_type(v.dtype, w.dtype) if dtype is None else dtype))


class _AsMatmul:
    """Products along one axis of each operand run as matmuls, where `dot_general` has no implementation for the operands:

        x · y = x' @ y' = (y'ᵀ @ x'ᵀ)ᵀ        x', y': with the contracted axis last, and next to last

    Values are transposed where no matmul takes them as they are.
    """

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
        x, y = operands
        (cx, cy), batch = params["dimension_numbers"]
        n, dtype = len(batch[0]), params.get("preferred_element_type")
        lead = tuple(range(n))
        plain = all(z.ndim == n + 2 if n else z.ndim <= 2 or not _jax.is_hi(_jax.typeof(z)) for z in operands)
        kept = dtype is None or jnp.result_type(x.dtype, y.dtype) == dtype
        asked = params.get("out_sharding") is not None or params.get("precision") is not None
        if len(cx) != 1 or batch != (lead, lead) or not (plain and kept) or asked:
            return NotImplemented
        ways = [_Matmul(x, y, n, cx[0], cy[0], False)] * (y.ndim <= n + 2)
        ways += [_Matmul(y, x, n, cy[0], cx[0], True)] * (x.ndim <= n + 2)
        return _interpret.first(way.run(options) for way in sorted(ways, key=lambda way: way.moved))


class _Matmul:
    """A product as a matmul of ``a``, of any rank, and ``b``, a vector or a matrix, behind ``n`` batch axes."""

    def __init__(self, a: Any, b: Any, n: int, contract_a: int, contract_b: int, swapped: bool) -> None:
        self.a, self.b, self.n, self.swapped = a, b, n, swapped
        kept = [i for i in range(b.ndim) if i != contract_b]
        self.orders = (
            (*(i for i in range(a.ndim) if i != contract_a), contract_a),
            (*kept[:n], contract_b, *kept[n:]),
        )
        pairs = zip((a, b), self.orders, strict=True)
        self.moved = sum(_jax.is_hi(_jax.typeof(z)) and o != tuple(range(z.ndim)) for z, o in pairs)
        """How many values it transposes."""

    def run(self, options: dict[str, Any]) -> Any:
        moved: list[Any] = []
        for z, order in zip((self.a, self.b), self.orders, strict=True):
            if order != tuple(range(z.ndim)):
                z = transposed(z, order)
            if not _interpret.ran(z):
                return z
            moved.append(z)
        out = matmul.run_equation(moved, {}, options)
        if not (self.swapped and _interpret.ran(out)):
            return out
        rest = self.a.ndim - 1  # the kept axes of `a`, batch axes first; those of `b` come before them
        return transposed(out, (*range(self.n), *range(rest, out.ndim), *range(self.n, rest)))


def transposed(x: Any, order: tuple[int, ...]) -> Any:
    """An array, or a value where an op transposes it."""
    if not _jax.is_hi(_jax.typeof(x)):
        return jnp.transpose(x, order)
    return _interpret.native(lax.transpose_p, [x], {"permutation": order}, {})


_interpret.registry[lax.dot_general_p].append(_AsMatmul())
