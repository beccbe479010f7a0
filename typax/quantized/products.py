"""Products with quantized arrays, on their codes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from typax._op import Refused, op
from typax.quantized.axes import held
from typax.quantized.contract import check_activations, large, product
from typax.quantized.pairs import of_pair
from typax.quantized.types import QArray, Quantized, accumulated

matmul = op(jnp.matmul, name="matmul")
matmul.__doc__ = """What ``jnp.matmul`` is for arrays; on a `QArray` and an array it runs on the codes.

The result has the promoted dtype of what the operands stand for. Add your type with ``@typax.matmul.impl``.

``activations`` says how an array meets codes: ``"float"``, to float accuracy; ``"bfloat16"``, both as bfloat16, summed in
float32; ``"dynamic"``, quantized to int8 with one scale for each row of it, summed as integers; or a number, the scale.

Raises:
  TypeError: if no implementation fits the operands, or a sharded axis is contracted.
"""


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[QArray, "k n"], *, activations: Any = "float") -> Any:
    if activations != "float" or large(w):
        return _general(x, w, activations)
    # one scale per row of w: it sits on the contracted axis and folds into x
    wide = x.astype(accumulated(x.dtype, w.dtype))
    return _matmul(wide * along(w.scale, wide, [x.ndim - 1]), w.qvalue, x, w)


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[QArray, "k"], *, activations: Any = "float") -> Any:
    if activations != "float" or large(w):
        return _general(x, w, activations)
    return _matmul(x, w.qvalue, x, w, w.scale)


@matmul.impl
def _(w: Float[QArray, "*c k"], x: Float[Array, "k"], *, activations: Any = "float") -> Any:
    if activations != "float" or large(w):
        return _general(w, x, activations)
    # one scale per element of the result
    return _matmul(w.qvalue, x, x, w, w.scale)


@matmul.impl
def _(w: Float[QArray, "m k"], x: Float[Array, "*b k n"], *, activations: Any = "float") -> Any:
    if activations != "float" or large(w):
        return _general(w, x, activations)
    # one scale per row of the result
    return _matmul(w.qvalue, x, x, w, w.scale[:, None])


@matmul.impl
def _(w: Float[QArray, "k"], x: Float[Array, "*b k n"], *, activations: Any = "float") -> Any:
    if activations != "float" or large(w):
        return _general(w, x, activations)
    return _matmul(w.qvalue, x, x, w, w.scale)


def along(scale: Any, x: Any, axes: Sequence[int]) -> Any:
    """Scales that lie along ``axes`` of ``x``, ready to multiply it: partitioned as ``x`` is, which is to stay so."""
    own, of_x = jax.typeof(scale).sharding.spec, jax.typeof(x).sharding.spec
    parts = [own[i] if x.shape[k] == 1 else of_x[k] for i, k in enumerate(axes)]
    if any(p is not None for p in own) and list(own) != parts:
        scale = jax.sharding.reshard(scale, jax.P(*parts))
    return jnp.expand_dims(scale, [k for k in range(x.ndim) if k not in axes]).astype(x.dtype)


def _matmul(a: Any, b: Any, x: Any, w: Any, scale: Any = None) -> Any:
    wide = accumulated(x.dtype, w.dtype)
    y = jnp.matmul(a.astype(wide), b.astype(wide))
    if scale is not None:
        y = y * jnp.expand_dims(scale, range(y.ndim - scale.ndim)).astype(wide)
    return y.astype(jnp.result_type(x.dtype, w.dtype))


# --- any format and layout


@matmul.impl
def _(x: Float[Array, "*b k"], w: Float[Quantized, "k n"] | Float[Quantized, "k"], *, activations: Any = "float") -> Any:
    return _general(x, w, activations)


@matmul.impl
def _(w: Float[Quantized, "m k"], x: Float[Array, "*b k n"], *, activations: Any = "float") -> Any:
    return _general(w, x, activations)


@matmul.impl
def _(w: Float[Quantized, "*c k"], x: Float[Array, "k"], *, activations: Any = "float") -> Any:
    return _general(w, x, activations)


@matmul.impl
def _(w: Float[Quantized, "k"], x: Float[Array, "*b k n"], *, activations: Any = "float") -> Any:
    return _general(w, x, activations)


@matmul.impl
def _(x: Float[Array, "*b c m k"], w: Float[Quantized, "*b c k n"], *, activations: Any = "float") -> Any:
    return _general(x, w, activations)


@matmul.impl
def _(w: Float[Quantized, "*b c m k"], x: Float[Array, "*b c k n"], *, activations: Any = "float") -> Any:
    return _general(w, x, activations)


@matmul.impl
def _(a: Float[Quantized, "*a"], b: Float[Quantized, "*b"]) -> Any:
    if a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        raise Refused(f"matmul of {a._type} and {b._type}: {a.shape[-1]} entries meet {b.shape[max(b.ndim - 2, 0)]}")
    if a.ndim > 2 and b.ndim > 2 and a.shape[:-2] != b.shape[:-2]:
        raise Refused(f"matmul of {a._type} and {b._type}, stacks of several shapes; apply it to each with jax.vmap")
    return _ordered(of_pair(held(a), held(b), *_numbers(a, b)), a, b)


def _general(a: Any, b: Any, activations: Any) -> Any:
    """The product of an array and a quantized one, in either order; leading axes are one's own or those of both."""
    first = isinstance(b, Quantized)
    x, w = (a, b) if first else (b, a)
    check_activations(activations, "matmul")
    contract, batch = _numbers(a, b)
    if not first:
        contract = contract[::-1]
    return _ordered(product(x, w, contract, batch, first=first, activations=activations), a, b)


def _numbers(a: Any, b: Any) -> tuple[Any, Any]:
    """The axes that are summed, and the batch axes, of both."""
    lead = tuple(range(min(a.ndim, b.ndim) - 2 if min(a.ndim, b.ndim) > 2 else 0))
    return ((a.ndim - 1,), (max(b.ndim - 2, 0),)), (lead, lead)


def _ordered(y: Any, a: Any, b: Any) -> Any:
    if min(a.ndim, b.ndim) < 3 and b.ndim > 2:  # leading axes of the second operand come before the rows of the first
        y = jnp.moveaxis(y, range(a.ndim - 1), range(y.ndim - a.ndim, y.ndim - 1))
    return y.astype(jnp.result_type(a.dtype, b.dtype))
