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

What attention projects by has three axes, of which one belongs to one factor and two to the other: `LowRankToHeads`,
[d, heads, width], and `LowRankFromHeads`, [heads, width, d].  Products by any axes, and what moves axes: ``typax._factors``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from typax._op import op
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


class LowRankToHeads(Value, name="lr_to_heads", tangent="componentwise"):
    """``w[d, h, k] = Σ_r left[d, r] · right[r, h, k]``: a `LowRank` of ``h · k`` columns, as attention projects by it.

    Components: ``left``, float ``[*batch, d, r]``; ``right``, of the same dtype, ``[*batch, r, h, k]``.
    """

    left: Float[Array, "*batch d r"]
    right: Float[Array, "*batch r h k"]

    def dense(self) -> Float[Array, "*batch d h k"]:
        return jnp.tensordot(self.left, self.right, 1)


class LowRankFromHeads(Value, name="lr_from_heads", tangent="componentwise"):
    """``w[h, k, d] = Σ_r left[h, k, r] · right[r, d]``: a `LowRank` of ``h · k`` rows, as attention projects by it.

    Components: ``left``, float ``[*batch, h, k, r]``; ``right``, of the same dtype, ``[*batch, r, d]``.
    """

    left: Float[Array, "*batch h k r"]
    right: Float[Array, "*batch r d"]

    def dense(self) -> Float[Array, "*batch h k d"]:
        return jnp.tensordot(self.left, self.right, 1)


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


def matrices(w: Any) -> tuple[Any, Any]:
    """The factors as matrices."""
    return (w.col[..., None], w.row[..., None, :]) if isinstance(w, Rank1) else (w.left, w.right)


def has_dense_tangents(w: Any) -> bool:
    """Whether tangents of a value, of any class here, are arrays."""
    return isinstance(w, DenseLowRank) or (isinstance(w, Rank1) and not isinstance(w, FactoredRank1))


def like(left: Any, right: Any, *operands: Any) -> Any:
    """A value of these factors with tangents as the operands have them: dense if those of any are."""
    tangent = "dense" if any(map(has_dense_tangents, operands)) else "componentwise"
    if all(isinstance(w, Rank1) for w in operands) and left.shape[-1] == 1:
        return _CLASSES[1, tangent](left[..., 0], right[..., 0, :])
    return _CLASSES[2, tangent](left, right)


# --- arithmetic that never builds the matrix


@matmul.impl
def _(x: Float[Array, "*b m"], w: Float[LowRank, "m n"] | Float[Rank1, "m n"]) -> Any:
    left, right = matrices(w)
    return (x @ left) @ right


@matmul.impl
def _(w: Float[LowRank, "m n"] | Float[Rank1, "m n"], x: Float[Array, "*b n k"] | Float[Array, "n"]) -> Any:
    left, right = matrices(w)
    return left @ (right @ x)


@matmul.impl
def _(a: Float[LowRank, "m k"] | Float[Rank1, "m k"], b: Float[LowRank, "k n"] | Float[Rank1, "k n"]) -> Any:
    (left, inner), (outer_, right) = matrices(a), matrices(b)
    return joined(left, inner @ outer_, right, a, b)


def joined(left: Any, core: Any, right: Any, a: Any, b: Any) -> Any:
    """left · core · right: the core goes to the side that keeps the rank small."""
    if core.shape[0] <= core.shape[1]:
        return like(left, core @ right, a, b)
    return like(left @ core, right, a, b)
