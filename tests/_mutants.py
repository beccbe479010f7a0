"""Types and ops that are wrong on purpose, each with the law that must say so. `correct` are those they were made from."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8

import typax
from typax import QArray, Value, dense, quantize


def type_of(hitype=None, body=None, **methods):
    """An int8 type by rows: one scale for each, in the manner of `QArray`."""

    class Rows(Value, name="rows", hitype=hitype):
        code: Int8[Array, "*batch n"]
        scale: Float32[Array, "*batch"]
        group: int = 2

        def dense(self) -> Float32[Array, "*batch n"]:
            return self.code.astype(jnp.float32) * self.scale[..., None]

        @classmethod
        def from_dense(cls, x, group):
            code, scale = quantize(x).components()
            return cls(code, scale, group) if body is None else body(cls, code, scale, group)

    return Rows


class Swapped(typax.ValueType):
    """lower_val gives the arrays in the other order."""

    def lower_val(self, value):
        return super().lower_val(value)[::-1]


class Narrow(typax.ValueType):
    """lo_ty declares a dtype that the arrays do not have."""

    def lo_ty(self):
        return [a.update(dtype=jnp.dtype("int16")) if a.dtype == jnp.int8 else a for a in super().lo_ty()]


class Stale(typax.ValueType):
    """The hash is that of the object."""

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return super().__eq__(other) if not isinstance(other, Stale) else self._hash == other._hash


class Deaf(typax.ValueType):
    """Equality does not look at statics."""

    def __hash__(self):
        return hash((self.decl, self.leaves))

    def __eq__(self, other):
        return isinstance(other, Deaf) and self.decl is other.decl and self.leaves == other.leaves


class Address(typax.ValueType):
    """Prints where it lies in memory."""

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"<rows at {hex(id(self))}>"


class Mute(typax.ValueType):
    """Does not print its statics."""

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return "rows"


class Longer(typax.ValueType):
    """A stack is one longer than it should be."""

    def inc_rank(self, size, spec, mesh_axis=None):
        return super().inc_rank(size + 1, spec, mesh_axis)


class Drifting(typax.ValueType):
    """The tangent type is another each time: half as precise."""

    def to_tangent_aval(self):
        return super().to_tangent_aval().update(dtype=jnp.dtype("float16"))

    def to_ct_aval(self):
        return self


class Unplaced(typax.ValueType):
    """The types of the arrays do not say how they are sharded."""

    def lo_ty(self):
        return [a.update(sharding=a.sharding.update(spec=jax.P(*(None,) * a.ndim))) for a in super().lo_ty()]


class Uneven(typax.Itself):
    """The sum favours its second operand."""

    name = "uneven"

    def add(self, ty, x, y):
        return self.close(ty, dense(x) + 2 * dense(y))


class Unzero(typax.Itself):
    """The zero is one."""

    name = "unzero"

    def zero(self, ty):
        return self.close(ty, jnp.ones(ty.shape, ty.dtype))


def with_tangent(policy):
    class Own(QArray, name="own", tangent=policy):
        @classmethod
        def from_dense(cls, x, dtype):
            return cls(*quantize(x).components()[:2], dtype=dtype)

    return Own


def of_another_value():
    class Shifted(Value, name="shifted"):
        """A stack is seen otherwise than each of it: dense subtracts what depends on the stack."""

        x: Float32[Array, "*batch n"]
        calls = 0

        def dense(self) -> Float32[Array, "*batch n"]:
            Shifted.calls += 1
            return self.x + Shifted.calls

    return Shifted


TYPES = {
    "components lowered in the other order": (lambda: type_of(Swapped), "lowered-types", "is declared as"),
    "a dtype that is declared otherwise": (lambda: type_of(Narrow), "lowered-types", "is declared as int16"),
    "a hash of the object": (lambda: type_of(Stale), "equality", "have the hashes"),
    "statics ignored by equality": (lambda: type_of(Deaf), "inequality", "differs in statics"),
    "an address in print": (lambda: type_of(Address), "printing", "jaxprs could not be compared"),
    "statics not printed": (lambda: type_of(Mute), "printing", "differ in the static group"),
    "a stack one too long": (lambda: type_of(Longer), "rank-change", "dec_rank refuses"),
    "a tangent type that drifts": (lambda: type_of(Drifting), "tangent-types", "could not be summed"),
    "a sharding dropped": (lambda: type_of(Unplaced), "sharded-values", "the sharding is lost|it lies as"),
    "a retract that loses": (
        lambda: type_of(body=lambda cls, code, scale, group: cls(code, scale * 0.5, group)), "retract-zero", "drift",
    ),
    "a retract that forgets a static": (
        lambda: type_of(body=lambda cls, code, scale, group: cls(code, scale, group + 1)), "retract-zero", "gives",
    ),
    "a sum that is not commutative": (lambda: with_tangent(Uneven()), "tangent-sum", "order of a program"),
    "a zero that is not neutral": (lambda: with_tangent(Unzero()), "tangent-zero", "unused operand"),
    "dense of another value each time": (of_another_value, "dense-declared|dense-of-stack", "not the same|other values"),
}  # fmt: skip


# --- ops -----------------------------------------------------------------------------------------------------------


def product(body=None, within=8, reference=jnp.matmul, **rules):
    """A product with row-wise int8 weights."""
    op = typax.op(reference, name="product", within=within)

    def folded(x, w):
        return (x * w.scale) @ w.qvalue.astype(x.dtype)

    body = body or folded

    @op.impl
    def _(x: Float32[Array, "*b k"], w: Float32[QArray, "k n"]) -> Any:
        return body(x, w)

    for name, rule in rules.items():
        getattr(op, name)(*rule) if isinstance(rule, tuple) else getattr(op, name)(rule)
    return op


def jvp_of(change):
    """A rule by hand: the derivative, and what a mutation makes of it."""

    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return product_(x, w), change(dx @ dense(w), x @ dw)

    return rule


product_ = product()


def vjp_of(swap_residuals=False, flip=1.0):
    def fwd(nonzero, x, w):
        return product_(x, w), (x, w)

    def bwd(kept, ct):
        x, w = kept
        flat, g = x.reshape(-1, x.shape[-1]), ct.reshape(-1, ct.shape[-1])
        return flip * (ct @ dense(w).T), (jnp.abs(flat) if swap_residuals else flat).T @ g

    return fwd, bwd


def batch_of(change):
    def rule(size, axes, x, w):
        out = jax.vmap(product_, in_axes=tuple(axes), axis_size=size)(x, w)
        return change(out), 0

    return rule


def add_rows(x, w):
    return (x * w.scale[..., :1]) @ w.qvalue.astype(x.dtype)


OPS = {
    "the scale of the first row for all": (lambda: product(add_rows), "agrees-with-reference", "computes something else"),
    "a component dropped": (
        lambda: product(lambda x, w: x @ w.qvalue.astype(x.dtype)), "agrees-with-reference", "computes something else",
    ),
    "NaN made a number": (
        lambda: product(lambda x, w: jnp.nan_to_num(product_(x, w))), "agrees-with-reference", "hidden",
    ),
    "a bound that is too tight": (lambda: product(within=0), "agrees-with-reference", "computes something else"),
    "a tangent doubled": (lambda: product(def_jvp=jvp_of(lambda a, b: 2 * (a + b))), "jvp-differences", "forward mode"),
    "a tangent sign-flipped": (lambda: product(def_jvp=jvp_of(lambda a, b: a - b)), "rules-by-hand", "derivative"),
    "a tangent dropped": (
        lambda: product(def_jvp=jvp_of(lambda a, b: a)), "vjp-differences|jvp-differences", "mode is wrong",
    ),
    "a cotangent sign-flipped": (lambda: product(def_vjp=vjp_of(flip=-1.0)), "vjp-differences", "reverse mode"),
    "a residual of the wrong sign": (lambda: product(def_vjp=vjp_of(True)), "rules-by-hand", "not the derivative"),
    "modes that disagree": (
        lambda: product(def_jvp=jvp_of(lambda a, b: a + b), def_vjp=vjp_of(flip=3.0)), "dot-product", "one of the modes",
    ),
    "a batch reversed": (lambda: product(def_batch=batch_of(lambda y: y[::-1])), "batch-is-loop", "each for itself"),
    "a batch that broadcasts its first": (
        lambda: product(def_batch=batch_of(lambda y: jnp.broadcast_to(y[:1], y.shape))), "batch-is-loop", "each for itself",
    ),
    "a batching rule by hand that sums": (
        lambda: product(def_batch=batch_of(lambda y: y * 0 + y.sum(0))), "rules-by-hand", "not the loop",
    ),
    "a reference that is not meant": (
        lambda: product(reference=lambda x, w: jnp.matmul(x, w) + 1), "agrees-with-reference", "something else",
    ),
}  # fmt: skip
