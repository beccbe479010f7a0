"""Hi types written by hand on `typax.hijax`: int8 codes by rows, outer products, tuples."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from typax.hijax import HiPrim, HiPspec, HiType, MappingSpec, ShapedArray, register_hitype


def like(aval: Any, shape: Any, dtype: Any, *parts: Any) -> Any:
    """An array type on the mesh of ``aval``; if that is an array type, varying as it does."""
    given = {"shape": tuple(shape), "dtype": jnp.dtype(dtype), "sharding": aval.sharding.update(spec=jax.P(*parts))}
    return aval.update(**given, weak_type=False) if isinstance(aval, ShapedArray) else ShapedArray(**given)


def show(name: str, ty: Any) -> str:
    dims = zip(ty.shape, ty.sharding.spec, strict=True)
    return f"{name}[{','.join(f'{n}' if p is None else f'{n}@{p}' for n, p in dims)}]"


class Typed(HiPrim):
    """A primitive whose result type is a function of its operand types and parameters."""

    def __init__(self, *operands, **params):
        self.in_avals, self.params = operands, params
        self.out_aval = self.result(*operands, **params)
        super().__init__()

    @classmethod
    def on(cls, *args, **params):
        return cls(*map(jax.typeof, args), **params)(*args)


# --- int8 codes with one step for each row ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    code: jax.Array
    step: jax.Array


@dataclass(frozen=True)
class Lead(MappingSpec):
    """Codes are mapped along their first axis."""


@dataclass(frozen=True)
class CodesP(HiPspec):
    spec: jax.P

    def to_lo(self):
        return self.spec, self.spec


@dataclass(frozen=True)
class CodesTy(HiType):
    shape: tuple[int, ...]
    sharding: NamedSharding

    def lo_ty(self):
        spec = self.sharding.spec
        return [like(self, self.shape, "int8", *spec), like(self, self.shape[:-1], "float32", *spec[:-1])]

    def lower_val(self, v):
        return [v.code, v.step]

    def raise_val(self, code, step):
        return Codes(code, step)

    def to_tangent_aval(self):
        return like(self, self.shape, "float32", *self.sharding.spec)

    def dec_rank(self, size, spec):
        assert spec == Lead() and self.shape[0] == size
        return CodesTy(self.shape[1:], self.sharding.update(spec=jax.P(*self.sharding.spec[1:])))

    def inc_rank(self, size, spec):
        assert spec == Lead()
        return CodesTy((size, *self.shape), self.sharding.update(spec=jax.P(None, *self.sharding.spec)))

    def leading_axis_spec(self):
        return Lead()

    def shard(self, mesh, manual_axes, check_vma, spec):
        code = self.lo_ty()[0].shard(mesh, manual_axes, check_vma, spec.spec)
        return CodesTy(code.shape, code.sharding)

    def unshard(self, mesh, check_vma, spec):
        code = self.lo_ty()[0].unshard(mesh, check_vma, spec.spec)
        return CodesTy(code.shape, code.sharding)

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return show("q8", self)

    __repr__ = str_short


register_hitype(Codes, lambda v: CodesTy(v.code.shape, jax.typeof(v.code).sharding))


class StraightThrough(Typed):
    """Differentiated as if it were the identity."""

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, _, ct):
        return (ct,)


class Encode(StraightThrough):
    def result(self, x):
        if x.dtype != jnp.float32:
            raise TypeError(f"cannot encode {x}")
        return CodesTy(x.shape, x.sharding)

    def expand(self, x):
        step = jnp.max(jnp.abs(x), axis=-1) / 127.0
        return Codes(jnp.round(x / step[..., None]).astype(jnp.int8), step)

    def batch(self, axis_data, args, dims):
        if dims == (None,):
            return encode(*args), None
        return encode(jnp.moveaxis(args[0], dims[0], 0)), Lead()


class Decode(StraightThrough):
    def result(self, q):
        return like(q, q.shape, "float32", *q.sharding.spec)

    def expand(self, q):
        return q.code.astype("float32") * q.step[..., None]

    def batch(self, axis_data, args, dims):
        return decode(*args), None if dims == (None,) else 0


class Product(Typed):
    """x @ q, on the int8 codes."""

    def result(self, x, q):
        if not (isinstance(q, CodesTy) and len(x.shape) == len(q.shape) == 2 and x.shape[1] == q.shape[0]):
            raise TypeError(f"no product of {x} and {q}")
        (rows, k), (kq, cols) = x.sharding.spec, q.sharding.spec
        if k is not None or kq is not None:
            raise TypeError(f"the contracted axes of {x} and {q} must be whole")
        return like(x, (x.shape[0], q.shape[1]), "float32", rows, cols)

    def expand(self, x, q):
        return (x * q.step) @ q.code.astype(jnp.float32)

    def vjp_fwd(self, nzs_in, x, q):
        return self(x, q), (x, q)

    def vjp_bwd_retval(self, residuals, ct):
        x, q = residuals
        w = decode(q)
        return (
            jnp.matmul(ct, w.T, out_sharding=jax.typeof(x).sharding),
            jnp.matmul(x.T, ct, out_sharding=jax.typeof(w).sharding),
        )


encode, decode, product = Encode.on, Decode.on, Product.on


# --- outer products --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outer:
    left: jax.Array
    right: jax.Array


@dataclass(frozen=True)
class OuterTy(HiType):
    shape: tuple[int, int]
    sharding: NamedSharding

    def lo_ty(self):
        return [like(self, (n,), "float32", p) for n, p in zip(self.shape, self.sharding.spec, strict=True)]

    def lower_val(self, v):
        return [v.left, v.right]

    def raise_val(self, left, right):
        return Outer(left, right)

    def to_tangent_aval(self):  # the sum of two outer products is none
        return like(self, self.shape, "float32", *self.sharding.spec)

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return show("r1", self)

    __repr__ = str_short


def outer_type(left, right):
    parts = left.sharding.spec[0], right.sharding.spec[0]
    return OuterTy((left.shape[0], right.shape[0]), left.sharding.update(spec=jax.P(*parts)))


register_hitype(Outer, lambda v: outer_type(jax.typeof(v.left), jax.typeof(v.right)))


class MakeOuter(Typed):
    def result(self, left, right):
        if (len(left.shape), len(right.shape)) != (1, 1):
            raise TypeError(f"no outer product of {left} and {right}")
        return outer_type(left, right)

    def expand(self, left, right):
        return Outer(left, right)

    def vjp_fwd(self, nzs_in, left, right):
        return self(left, right), (left, right)

    def vjp_bwd_retval(self, residuals, ct):
        left, right = residuals
        return ct @ right, left @ ct


class Factors(Typed):
    def result(self, v):
        return tuple(v.lo_ty())

    def expand(self, v):
        return v.left, v.right


class OuterProduct(Typed):
    """x @ (left right^T), without the matrix."""

    def result(self, x, v):
        if not (isinstance(v, OuterTy) and len(x.shape) == 2 and x.shape[1] == v.shape[0]):
            raise TypeError(f"no product of {x} and {v}")
        return like(x, (x.shape[0], v.shape[1]), "float32", x.sharding.spec[0], v.sharding.spec[1])

    def expand(self, x, v):
        return jnp.outer(x @ v.left, v.right)

    def vjp_fwd(self, nzs_in, x, v):
        return self(x, v), (x, *factors(v))

    def vjp_bwd_retval(self, residuals, ct):
        x, left, right = residuals
        return jnp.outer(ct @ right, left), x.T @ ct


outer, factors, outer_product = MakeOuter.on, Factors.on, OuterProduct.on


# --- tuples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A tuple as one value."""

    parts: tuple


@dataclass(frozen=True)
class PairSpec(MappingSpec):
    axes: tuple


@dataclass(frozen=True)
class PairTy(HiType):
    parts: tuple

    def lo_ty(self):
        return [lo for t in self.parts for lo in t.lo_ty()]

    def lower_val(self, v):
        return [lo for t, x in zip(self.parts, v.parts, strict=True) for lo in t.lower_val(x)]

    def raise_val(self, *los):
        it = iter(los)
        return Pair(tuple(t.raise_val(*islice(it, len(t.lo_ty()))) for t in self.parts))

    def each(self, f, *more):
        return PairTy(tuple(f(t, *xs) for t, *xs in zip(self.parts, *more, strict=True)))

    def to_tangent_aval(self):
        return self.each(lambda t: t.to_tangent_aval())

    def dec_rank(self, size, spec):
        return self.each(lambda t, a: t if a is None else t.dec_rank(size, a), spec.axes)

    def inc_rank(self, size, spec):
        return self.each(lambda t, a: t if a is None else t.inc_rank(size, a), spec.axes)

    def leading_axis_spec(self):
        return PairSpec(tuple(t.leading_axis_spec() for t in self.parts))

    def vspace_zero(self):
        return pair(*(jnp.zeros(t.shape, t.dtype) for t in self.parts))

    def vspace_add(self, x, y):
        return pair(*(t.vspace_add(part(x, i=i), part(y, i=i)) for i, t in enumerate(self.parts)))

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"Tup{{{','.join(t.str_short(short_dtypes, mesh_axis_types) for t in self.parts)}}}"

    __repr__ = str_short


register_hitype(Pair, lambda v: PairTy(tuple(map(jax.typeof, v.parts))))


class MakePair(Typed):
    def result(self, *parts):
        return PairTy(parts)

    def expand(self, *parts):
        return Pair(parts)

    def vjp_fwd(self, nzs_in, *parts):
        return self(*parts), None

    def vjp_bwd_retval(self, _, ct):
        return tuple(part(ct, i=i) for i in range(len(self.in_avals)))

    def batch(self, axis_data, args, dims):
        return pair(*args), PairSpec(tuple(dims))


class Part(Typed):
    def result(self, v, *, i):
        return v.parts[i]

    def expand(self, v):
        return v.parts[self.i]

    def vjp_fwd(self, nzs_in, v):
        return self(v), None

    def vjp_bwd_retval(self, _, ct):
        (ty,) = self.in_avals
        zeros = ty.to_tangent_aval().parts
        return (pair(*(ct if j == self.i else jnp.zeros(t.shape, t.dtype) for j, t in enumerate(zeros))),)

    def batch(self, axis_data, args, dims):
        (v,), (spec,) = args, dims
        return part(v, i=self.i), spec if spec is None else spec.axes[self.i]


pair, part = MakePair.on, Part.on
