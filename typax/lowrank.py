"""Low-rank matrices: ``w = left · right``, m × n from r (m + n) numbers, and never written out.

    x @ (left · right) = (x @ left) @ right                 r (m + n) multiplications a row, not m n
    (left · right).T = right.T · left.T
    (a · b) @ (c · d) = a · ((b @ c) @ d)                    low rank again

What a small change of such a matrix is can be answered twice, and the class says how.  The low-rank matrices are not closed
under addition, so that in the space of all matrices the tangent is a dense m × n array; in the space of the factors it is a
pair of factors, and then no derivative is larger than the factors are.

             tangents of the factors    dense tangents
    rank r   `LowRank`                  `DenseLowRank`
    rank 1   `FactoredRank1`            `Rank1`
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from typax import _rows as rows
from typax._codes import dot_general
from typax._op import Refused, op
from typax._value import Value
from typax.quantized import matmul


class LowRank(Value, name="lr", tangent="componentwise"):
    """The matrix ``left · right``; its tangents and gradients are pairs of factors.

    Components: ``left``, float ``[*batch, m, r]``; ``right``, of the same dtype, ``[*batch, r, n]``.
    """

    left: Float[Array, "*batch m r"]
    right: Float[Array, "*batch r n"]

    def dense(self) -> Float[Array, "*batch m n"]:
        return self.left @ self.right


class DenseLowRank(LowRank, name="lrd", tangent="dense"):
    """A `LowRank` whose tangents are dense: a gradient with respect to the value is an m × n array."""


class Rank1(Value, name="r1"):
    """The matrix ``col ⊗ row``; its tangents are dense.

    Components: ``col``, float ``[*batch, m]``; ``row``, of the same dtype, ``[*batch, n]``.
    """

    col: Float[Array, "*batch m"]
    row: Float[Array, "*batch n"]

    def dense(self) -> Float[Array, "*batch m n"]:
        return self.col[:, None] * self.row[None, :]


class FactoredRank1(Rank1, name="r1f", tangent="componentwise"):
    """A `Rank1` whose tangents and gradients are pairs of vectors."""


# --- in and out

_CLASSES = {
    (1, "dense"): Rank1, (1, "componentwise"): FactoredRank1,
    (2, "dense"): DenseLowRank, (2, "componentwise"): LowRank,
}  # fmt: skip


def outer(left: Any, right: Any, *, tangent: str | None = None) -> Any:
    """``left · right`` as one value: of vectors ``[m]``, ``[n]`` a `Rank1`, of matrices ``[m, r]``, ``[r, n]`` a `LowRank`.

    Args:
      tangent: ``"dense"`` or ``"componentwise"``; by default that of the class.  Gradients with respect to the factors stay
        as small as they are with ``"componentwise"`` only: a dense cotangent is m × n.

    Raises:
      TypeError: if the factors do not fit.
      ValueError: for another ``tangent``.
    """
    if tangent not in (None, "dense", "componentwise"):
        raise ValueError(f'typax.outer: tangent must be "dense" or "componentwise", got {tangent!r}')
    left, right = jnp.asarray(left), jnp.asarray(right)
    n = left.ndim
    fits = n == right.ndim and (n == 1 or (n == 2 and left.shape[1] == right.shape[0]))
    if not fits or left.dtype != right.dtype or not jnp.issubdtype(left.dtype, jnp.floating):
        a, b = jax.typeof(left), jax.typeof(right)
        raise TypeError(
            f"typax.outer takes vectors [m], [n] or matrices [m, r], [r, n], of one float dtype, got {a} and {b}; map it "
            "over stacks of them with jax.vmap"
        )
    return _outer(left, right, tangent=tangent)


def _product(left: Any, right: Any) -> Any:
    return jnp.outer(left, right) if left.ndim == 1 else left @ right


_outer = op(_product, name="outer")


@_outer.impl
def _(left: Float[Array, "m"], right: Float[Array, "n"], *, tangent: str | None = None) -> Any:
    return _CLASSES[1, tangent or "dense"](left, right)


@_outer.impl
def _(left: Float[Array, "m r"], right: Float[Array, "r n"], *, tangent: str | None = None) -> Any:
    return _CLASSES[2, tangent or "componentwise"](left, right)


@op(reference=None)
def factors(w: LowRank | Rank1) -> Any:
    """The two factors: of a `LowRank` ``[m, r]`` and ``[r, n]``, of a `Rank1` the vectors ``[m]`` and ``[n]``.

    They are no function of the matrix (``(c · left) (right / c)`` is the same one), so that differentiating this needs
    componentwise tangents.
    """
    return w.components()


def _matrices(w: Any) -> tuple[Any, Any]:
    """The factors as matrices."""
    return (w.col[..., None], w.row[..., None, :]) if isinstance(w, Rank1) else (w.left, w.right)


def _like(left: Any, right: Any, *operands: Any) -> Any:
    """A value of these factors with tangents as the operands have them: dense if those of any are."""
    dense = any(isinstance(w, DenseLowRank) or (isinstance(w, Rank1) and not isinstance(w, FactoredRank1)) for w in operands)
    tangent = "dense" if dense else "componentwise"
    if all(isinstance(w, Rank1) for w in operands):
        return _CLASSES[1, tangent](left[..., 0], right[..., 0, :])
    return _CLASSES[2, tangent](left, right)


# --- arithmetic that never builds the matrix


@matmul.impl
def _(x: Float[Array, "*b m"], w: Float[LowRank, "m n"] | Float[Rank1, "m n"]) -> Any:
    left, right = _matrices(w)
    return (x @ left) @ right


@matmul.impl
def _(w: Float[LowRank, "m n"] | Float[Rank1, "m n"], x: Float[Array, "*b n k"] | Float[Array, "n"]) -> Any:
    left, right = _matrices(w)
    return left @ (right @ x)


@matmul.impl
def _(a: Float[LowRank, "m k"] | Float[Rank1, "m k"], b: Float[LowRank, "k n"] | Float[Rank1, "k n"]) -> Any:
    (left, inner), (outer_, right) = _matrices(a), _matrices(b)
    return _joined(left, inner @ outer_, right, a, b)


def _joined(left: Any, core: Any, right: Any, a: Any, b: Any) -> Any:
    """left · core · right: the core goes to the side that keeps the rank small."""
    if core.shape[0] <= core.shape[1]:
        return _like(left, core @ right, a, b)
    return _like(left @ core, right, a, b)


@dot_general.impl
def _(x: Float[Array, "*b"], w: LowRank | Rank1, *, dimension_numbers: Any, **params: Any) -> Any:
    (cx,), (cw,) = _one_axis(dimension_numbers)
    first, second = _towards(w, cw)
    y = lax.dot_general(x, first, (((cx,), (0,)), ((), ())), **_early(params))
    return lax.dot_general(y, second, (((y.ndim - 1,), (0,)), ((), ())), **params)


@dot_general.impl
def _(w: LowRank | Rank1, x: Float[Array, "*b"], *, dimension_numbers: Any, **params: Any) -> Any:
    (cw,), (cx,) = _one_axis(dimension_numbers)
    first, second = _towards(w, cw)
    y = lax.dot_general(first, x, (((0,), (cx,)), ((), ())), **_early(params))
    return lax.dot_general(second, y, (((0,), (0,)), ((), ())), **params)


@dot_general.impl
def _(a: LowRank | Rank1, b: LowRank | Rank1, *, dimension_numbers: Any, **params: Any) -> Any:
    (ca,), (cb,) = _one_axis(dimension_numbers)
    if params.get("out_sharding") is not None:
        raise Refused("the factors of the result have shardings of their own")
    (a1, a2), (b1, b2) = _towards(a, ca), _towards(b, cb)
    y = _joined(a2.T, a1.T @ b1, b2, a, b)
    wanted = params.get("preferred_element_type")
    if wanted is not None and wanted != y.dtype:
        raise Refused("the factors keep their dtype")
    return y


def _one_axis(dimension_numbers: Any) -> Any:
    contract, batch = dimension_numbers
    if batch != ((), ()) or len(contract[0]) != 1:
        raise Refused("only one contracted axis and no batch axes run on the factors")
    return contract


def _towards(w: Any, axis: int) -> tuple[Any, Any]:
    """The factor that has the contracted axis, ``[axis, r]``, and the other one, ``[r, other]``."""
    left, right = _matrices(w)
    return (left, right) if axis == 0 else (right.T, left.T)


def _early(params: dict[str, Any]) -> dict[str, Any]:
    """What concerns the first of the two products."""
    return {k: v for k, v in params.items() if k != "out_sharding"}


# --- axes: those of stacks are axes of both factors, rows of the first, columns of the second


@rows.transpose.impl
def _(w: LowRank | Rank1, *, permutation: Any) -> Any:
    n, perm = w.ndim, tuple(permutation)
    left, right = _matrices(w)
    if set(perm[-2:]) != {n - 2, n - 1}:
        raise Refused("rows and columns stay the last two axes")
    left, right = (jnp.transpose(x, (*perm[:-2], n - 2, n - 1)) for x in (left, right))
    return _like(left, right, w) if perm[-1] == n - 1 else _like(right.mT, left.mT, w)


@rows.slice_.impl
def _(w: LowRank | Rank1, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    at = [slice(*bounds) for bounds in zip(start_indices, limit_indices, strides or (1,) * w.ndim, strict=True)]
    left, right = _matrices(w)
    return _like(left[tuple(at[:-1])], right[(*at[:-2], slice(None), at[-1])], w)


@rows.dynamic_slice.impl
def _(w: LowRank | Rank1, *starts: Integer[Array, ""], slice_sizes: Any) -> Any:
    left, right = _matrices(w)
    zero, r, sizes = jnp.zeros_like(starts[0]), left.shape[-1], tuple(slice_sizes)
    left = lax.dynamic_slice(left, (*starts[:-1], zero.astype(starts[-1].dtype)), (*sizes[:-1], r))
    right = lax.dynamic_slice(right, (*starts[:-2], zero.astype(starts[-1].dtype), starts[-1]), (*sizes[:-2], r, sizes[-1]))
    return _like(left, right, w)


@rows.rev.impl
def _(w: LowRank | Rank1, *, dimensions: Any) -> Any:
    n, (left, right) = w.ndim, _matrices(w)
    of = lambda x, own: lax.rev(x, [a for a in dimensions if a < n - 2 or a == own])
    return _like(of(left, n - 2), of(right, n - 1), w)


@rows.squeeze.impl
def _(w: LowRank | Rank1, *, dimensions: Any) -> Any:
    left, right = _matrices(w)
    if w.ndim - len(dimensions) < 2:  # a row, or a column
        return lax.squeeze(left @ right, dimensions)
    if any(a >= w.ndim - 2 for a in dimensions):
        raise Refused("rows and columns stay the last two axes")
    return _like(lax.squeeze(left, dimensions), lax.squeeze(right, dimensions), w)


@rows.reshape.impl
def _(w: LowRank | Rank1, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    lead = tuple(new_sizes[:-2])
    if dimensions is not None or sharding is not None or tuple(new_sizes[-2:]) != w.shape[-2:]:
        raise Refused("rows and columns stay the last two axes")
    left, right = (x.reshape(*lead, *x.shape[-2:]) for x in _matrices(w))
    return _like(left, right, w)


@rows.broadcast_in_dim.impl
def _(w: LowRank | Rank1, *, shape: Any, broadcast_dimensions: Any, sharding: Any) -> Any:
    n, shape, dims = len(shape), tuple(shape), tuple(broadcast_dimensions)
    if sharding is not None or dims[-2:] != (n - 2, n - 1) or shape[-2:] != w.shape[-2:]:
        raise Refused("rows and columns stay the last two axes")
    left, right = (lax.broadcast_in_dim(x, (*shape[:-2], *x.shape[-2:]), dims) for x in _matrices(w))
    return _like(left, right, w)


@rows.gather.impl
def _(w: LowRank | Rank1, index: Integer[Array, "*b i"], *, dimension_numbers: Any, slice_sizes: Any, **params: Any) -> Any:
    d = dimension_numbers
    if w.ndim > 2 or d.start_index_map != (0,) or slice_sizes[1] != w.shape[1] or d.operand_batching_dims:
        raise Refused("lookups are of rows of one matrix")
    left, right = _matrices(w)
    found = lax.gather_p.bind(left, index, dimension_numbers=d, slice_sizes=(slice_sizes[0], left.shape[1]), **params)
    return jnp.moveaxis(jnp.tensordot(found, right, ((d.offset_dims[-1],), (0,))), -1, d.offset_dims[-1])


# --- numbers: of the first factor


@rows.convert_element_type.impl
def _(w: LowRank | Rank1, *, new_dtype: Any, weak_type: Any, sharding: Any) -> Any:
    if not jnp.issubdtype(new_dtype, jnp.floating) or sharding is not None:
        raise Refused("the factors are floats")
    left, right = _matrices(w)
    return _like(left.astype(new_dtype), right.astype(new_dtype), w)


@rows.neg.impl
def _(w: LowRank | Rank1) -> Any:
    left, right = _matrices(w)
    return _like(-left, right, w)


def _scaled(w: Any, c: Any, f: Any, along: Any) -> Any:
    """By a number, or by one for each row, or column, or matrix: by an array that is the same along others."""
    left, right = _matrices(w)
    if not c.ndim:
        return _like(f(left, c), right, w)
    one = lambda a: lax.slice_in_dim(c, 0, 1, axis=a)
    if w.ndim - 1 in (along or ()):
        return _like(f(left, one(w.ndim - 1)), right, w)
    if w.ndim - 2 in (along or ()):
        return _like(left, f(right, one(w.ndim - 2)), w)
    raise Refused("an array that is not the same along rows or columns does not scale the factors")


@rows.mul.impl
def _(w: LowRank | Rank1, c: Float[Array, "*b"], *, along: Any = None, **_: Any) -> Any:
    return _scaled(w, c, jnp.multiply, along)


@rows.mul.impl
def _(c: Float[Array, "*b"], w: LowRank | Rank1, *, along: Any = None, **_: Any) -> Any:
    return _scaled(w, c, jnp.multiply, along)


@rows.div.impl
def _(w: LowRank | Rank1, c: Float[Array, "*b"], *, along: Any = None, **_: Any) -> Any:
    return _scaled(w, c, jnp.divide, along)
