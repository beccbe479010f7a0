"""The raw side: types and primitives written by hand on `typax.hijax`, with every optional method that JAX asks a type for.

Rules for derivatives are vjp rules, unless a name says otherwise: that is what JAX's documentation shows.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from _raw import (
    Codes,
    CodesP,
    CodesTy,
    Decode,
    Encode,
    Lead,
    Outer,
    OuterTy,
    PairSpec,
    Product,
    StraightThrough,
    Typed,
    decode,
    encode,
    factors,
    like,
    outer,
    pair,
    part,
    product,
)

from typax.hijax import HiType, linearize_from_jvp, register_hitype, vjp_from_jvp

# --- what the types of _raw leave out: cotangents through shard_map, and products under vmap


def nospec(self, mesh, check_vma, all_names):
    return CodesP(self.lo_ty()[0].nospec(mesh, check_vma, all_names))


CodesTy.nospec = nospec
CodesP.to_tangent_spec = CodesP.to_ct_spec = lambda self: self.spec


class StackedProduct(Typed):
    """x @ q for each of a batch of x, of q, or of both."""

    def result(self, x, q, *, mapped):
        size = x.shape[0] if mapped[0] else q.shape[0]
        return like(x, (size, x.shape[-2], q.shape[-1]), "float32", None, None, None)

    def expand(self, x, q):
        w = q.code.astype(jnp.float32) * q.step[..., None]
        return jnp.matmul(x, w)

    def vjp_fwd(self, nzs_in, x, q):
        return self(x, q), (x, q)

    def vjp_bwd_retval(self, residuals, ct):
        x, q = residuals
        w = decode(q)
        dx, dw = jnp.matmul(ct, jnp.swapaxes(w, -1, -2)), jnp.matmul(jnp.swapaxes(x, -1, -2), ct)
        return (dx if self.mapped[0] else dx.sum(0)), (dw if self.mapped[1] else dw.sum(0))


def batch(self, axis_data, args, dims):
    (x, q), (dx, dq) = args, dims
    if dx is None and dq is None:
        return product(x, q), None
    x = x if dx is None else jnp.moveaxis(x, dx, 0)
    return StackedProduct.on(x, q, mapped=(dx is not None, dq is not None)), 0


Product.batch = batch


# --- other rules


class JvpDecode(Typed):
    """Decode with a jvp rule; the others are derived from it."""

    result, expand, batch = Decode.result, Decode.expand, Decode.batch
    vjp_fwd, vjp_bwd_retval = vjp_from_jvp
    lin, linearized = linearize_from_jvp

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0]


class NoBatch(Typed):
    """Twice what the codes stand for, without a rule for vmap."""

    def result(self, q):
        return like(q, q.shape, "float32", *q.sharding.spec)

    def expand(self, q):
        return q.code.astype("float32") * q.step[..., None] * 2

    def vjp_fwd(self, nzs_in, q):
        return self(q), None

    def vjp_bwd_retval(self, _, ct):
        return (2 * ct,)


jvp_decode, no_batch = JvpDecode.on, NoBatch.on


# --- a type whose tangents are of that type, without vspace_zero and vspace_add


@dataclass(frozen=True)
class Own:
    code: jax.Array
    step: jax.Array


@dataclass(frozen=True)
class OwnTy(HiType):
    inner: CodesTy

    def lo_ty(self):
        return self.inner.lo_ty()

    def lower_val(self, v):
        return [v.code, v.step]

    def raise_val(self, code, step):
        return Own(code, step)

    def to_tangent_aval(self):
        return self

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return self.inner.str_short().replace("q8", "s8")

    __repr__ = str_short


register_hitype(Own, lambda v: OwnTy(CodesTy(v.code.shape, jax.typeof(v.code).sharding)))


class OwnEncode(Typed):
    def result(self, x):
        return OwnTy(CodesTy(x.shape, x.sharding))

    def expand(self, x):
        q = Encode.expand(self, x)
        return Own(q.code, q.step)

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, _, ct):
        return (self_decode(ct),)


class OwnDecode(Typed):
    def result(self, q):
        return like(q.inner, q.inner.shape, "float32", *q.inner.sharding.spec)

    def expand(self, q):
        return Decode.expand(self, q)

    def vjp_fwd(self, nzs_in, q):
        return self(q), None

    def vjp_bwd_retval(self, _, ct):
        return (self_encode(ct),)


self_encode, self_decode = OwnEncode.on, OwnDecode.on


class OuterDense(StraightThrough):
    def result(self, v):
        return like(v, v.shape, "float32", *v.sharding.spec)

    def expand(self, v):
        return jnp.outer(v.left, v.right)


outer_dense = OuterDense.on

__all__ = [
    "Codes", "CodesP", "CodesTy", "Lead",
    "Outer", "OuterTy", "Own", "PairSpec", "decode", "encode", "factors", "jvp_decode", "no_batch",
    "outer", "outer_dense", "pair", "part", "product", "self_decode", "self_encode",
]  # fmt: skip
