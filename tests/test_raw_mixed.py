"""Types written by hand and declared types hold each other, and appear in each other's ops."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _raw import (
    Codes,
    CodesP,
    Decode,
    Lead,
    Outer,
    PairSpec,
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
from jaxtyping import Array, Float, Float32

import typax
from typax import QArray, Value, dense, hijax, quantize

pytestmark = pytest.mark.core

X = jnp.arange(6.0).reshape(2, 3) + 1
XS = jnp.stack([X, 2 * X, 3 * X])


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def square(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


# --- a declared type holds a type written by hand --------------------------------------------------------------------


class Shifted(Value, name="shifted"):
    """base + shift; the axes of ``base`` are those of its tangents."""

    base: Float32[Codes, "*batch m n"]
    shift: Float32[Array, "*batch n"]

    def dense(self) -> Float32[Array, "*batch m n"]:
        return decode(self.base) + self.shift


SHIFT = jnp.arange(3.0)
V, WANT = Shifted(encode(X), SHIFT), decode(encode(X)) + SHIFT
VS = Shifted(encode(XS), jnp.stack([SHIFT, SHIFT, SHIFT]))


def shifted(x):
    return Shifted.from_components(encode(x), SHIFT)


def test_it_is_built_and_checked():
    assert str(jax.typeof(V)) == "shifted[2,3]" and str(jax.typeof(VS)) == "shifted[3,2,3]"
    with pytest.raises(TypeError, match=r"axis 'n' is 3 in base \(q8\[2,3\]\) but 4 in shift"):
        Shifted(encode(X), jnp.ones(4))
    with pytest.raises(TypeError, match=r"component base: Float32\[Codes, '\*batch m n'\] does not admit r1\[2,3\]"):
        Shifted(outer(jnp.ones(2), jnp.ones(3)), SHIFT)
    with pytest.raises(TypeError, match=r"component base: .* does not admit float32"):
        Shifted(X, SHIFT)


@pytest.mark.parametrize("f", [dense, jax.jit(dense), lambda v: dense(jax.jit(lambda v: v)(v))])
def test_what_it_stands_for(f):
    close(f(V), WANT)


def test_it_is_built_and_opened_while_tracing():
    v = jax.jit(shifted)(X)
    assert str(jax.typeof(v)) == "shifted[2,3]" and isinstance(v.base, Codes)
    close(jax.jit(lambda v: decode(v.components()[0]))(V), decode(V.base))
    with pytest.raises(TypeError, match=r"shifted\[2,3\] is closed"):
        jax.jit(lambda v: v.base)(V)


def test_its_gradients():
    close(jax.grad(square(dense))(V), 2 * WANT)
    close(jax.jit(jax.grad(square(lambda x: dense(shifted(x)))))(X), 2 * WANT)
    got = jax.grad(lambda s: jnp.sum(dense(Shifted.from_components(V.base, s)) ** 2))(SHIFT)
    close(got, 2 * WANT.sum(0))


def test_it_is_mapped():
    close(dense(VS), decode(encode(XS)) + SHIFT)
    close(jax.vmap(dense)(VS), dense(VS))
    assert str(jax.typeof(jax.vmap(shifted)(XS))) == "shifted[3,2,3]"
    close(jax.vmap(jax.grad(square(dense)))(VS), 2 * dense(VS))
    close(jax.grad(square(jax.vmap(dense)))(VS), 2 * dense(VS))


def test_it_is_mapped_where_a_component_is_not():
    shared = jax.vmap(lambda s: Shifted.from_components(V.base, s))(VS.shift)
    close(dense(shared), jnp.broadcast_to(WANT, (3, 2, 3)))
    copies = jax.vmap(lambda _: V)(jnp.ones(3))
    assert str(jax.typeof(copies)) == "shifted[3,2,3]"
    close(dense(copies), jnp.broadcast_to(WANT, (3, 2, 3)))
    close(jax.grad(lambda v: jnp.sum(dense(jax.vmap(lambda _: v)(jnp.ones(3)))))(V), 3 * jnp.ones((2, 3)))


def test_it_is_scanned():
    step = lambda c, v: (c + jnp.sum(dense(v)), None)
    close(jax.lax.scan(step, 0.0, VS, length=3)[0], jnp.sum(dense(VS)))
    total = jax.lax.scan(lambda v, x: (shifted(dense(v) + x), v), V, XS)
    assert [str(jax.typeof(t)) for t in total] == ["shifted[2,3]", "shifted[3,2,3]"]
    loss = lambda xs: jnp.sum(dense(jax.lax.scan(lambda v, x: (shifted(dense(v) + x), None), V, xs)[0]))
    close(jax.jit(jax.grad(loss))(XS), jnp.ones((3, 2, 3)))
    close(jax.vmap(lambda c: jax.lax.scan(step, c, VS, length=3)[0])(SHIFT), SHIFT + jnp.sum(dense(VS)))


def test_it_is_pickled_and_copied():
    for v in (pickle.loads(pickle.dumps(V)), copy.deepcopy(V)):
        assert isinstance(v.base, Codes)
        close(dense(v), WANT)


class Two(Value, name="two"):
    """A tuple of anything, one written by hand among them, and one whose class alone is named."""

    parts: tuple[Any, ...]
    extra: Outer
    m: int
    n: int

    def dense(self) -> Float32[Array, "m n"]:
        left, right = factors(self.extra)
        return decode(self.parts[0]) + self.parts[1] + jnp.outer(left, right)


def test_a_component_without_axes():
    v = Two((encode(X), X), outer(jnp.ones(2), SHIFT), 2, 3)
    want = decode(encode(X)) + X + SHIFT
    close(dense(v), want)
    close(jax.jit(dense)(v), want)
    close(jax.grad(square(dense))(v), 2 * want)
    with pytest.raises(TypeError, match=r"component extra: Outer does not admit q8\[2,3\]"):
        Two((encode(X), X), encode(X), 2, 3)


def test_a_value_without_a_leading_axis_names_the_method_that_it_lacks():
    v = Two((encode(X), X), outer(jnp.ones(2), SHIFT), 2, 3)
    with pytest.raises(NotImplementedError, match=r"r1\[2,3\] .* implement OuterTy.leading_axis_spec"):
        jax.vmap(lambda _: v)(jnp.ones(3))


def test_it_is_mapped_along_its_leading_axis_only():
    close(dense(VS.transpose(0, 1, 2)), dense(VS))
    deep = Shifted(encode(jnp.ones((4, 5, 2, 3))), jnp.ones((4, 5, 3)))
    close(jax.vmap(jax.vmap(dense))(deep), dense(deep))
    with pytest.raises(
        TypeError, match=r"q8\[4,5,2,3\] can be mapped along its leading axis only \(Lead\(\)\), not along axis 1"
    ):
        jax.vmap(dense, in_axes=1)(deep)
    with pytest.raises(TypeError, match=r"cannot permute q8\[4,5,2,3\] by \(1, 0, 2, 3\)"):
        jax.vmap(lambda v: v, out_axes=1)(deep)


# --- an op takes and gives values written by hand --------------------------------------------------------------------


@typax.op(reference=lambda x, w: x @ decode(w))
def matmul(x: Float[Array, "*b k"], w: Float[Codes, "k n"]):
    return product(x, w)


@typax.op(reference=lambda x: x)
def to_codes(x: Float[Array, "*b n"]):
    return encode(x)


ACTS, W = jnp.ones((2, 3)), encode(jnp.arange(12.0).reshape(3, 4) + 1)
WS = encode(jnp.stack([decode(W), 2 * decode(W)]))
Y = ACTS @ decode(W)


def test_an_op_on_a_value_written_by_hand():
    close(matmul(ACTS, W), Y)
    close(jax.jit(lambda x, w: matmul(x, encode(w)))(ACTS, decode(W)), Y)
    dx, dw = jax.jit(jax.grad(square(matmul), argnums=(0, 1)))(ACTS, W)
    close(dx, 2 * Y @ decode(W).T)
    close(dw, 2 * ACTS.T @ Y)
    with pytest.raises(TypeError, match=r"no implementation for \(float32\[2,2\], q8\[3,4\]\)"):
        matmul(jnp.ones((2, 2)), W)
    with pytest.raises(TypeError, match=r"no implementation for \(float32\[2,3\], r1\[3,3\]\)"):
        matmul(ACTS, outer(SHIFT, SHIFT))


def test_it_maps_any_of_its_operands():
    xs = jnp.stack([ACTS, 3 * ACTS])
    close(jax.vmap(matmul, (0, None))(xs, W), jnp.stack([Y, 3 * Y]))
    close(jax.vmap(matmul, (None, Lead()), axis_size=2)(ACTS, WS), jnp.stack([Y, 2 * Y]))
    close(jax.vmap(matmul, (0, Lead()))(xs, WS), jnp.stack([Y, 6 * Y]))
    want = jnp.stack([2 * ACTS.T @ Y, 4 * ACTS.T @ Y])
    grads = jax.vmap(jax.grad(square(matmul), argnums=1), (None, Lead()), axis_size=2)
    close(grads(ACTS, WS), want)
    close(jax.grad(lambda w: square(jax.vmap(matmul, (None, Lead()), axis_size=2))(ACTS, w))(WS), want)


def test_it_is_scanned_over():
    total, _ = jax.lax.scan(lambda c, w: (c + matmul(ACTS, w), None), 0 * Y, WS, length=2)
    close(total, 3 * Y)


def test_an_op_that_gives_a_value_written_by_hand():
    """Its reference may give the array that such values have for tangents."""
    q = jax.jit(to_codes)(X)
    assert str(jax.typeof(q)) == "q8[2,3]"
    close(jax.grad(square(lambda x: decode(to_codes(x))))(X), 2 * decode(q))
    qs = jax.vmap(to_codes, out_axes=Lead())(XS)
    close(decode(qs), decode(encode(XS)))
    mapped = lambda xs: decode(jax.vmap(to_codes, out_axes=Lead())(xs))
    close(jax.grad(square(mapped))(XS), 2 * decode(qs))
    close(jax.vmap(jax.grad(square(lambda x: decode(to_codes(x)))))(XS), 2 * decode(qs))


def test_its_reference_may_give_one_too():
    @typax.op(reference=lambda q, s: encode(decode(q) * s))
    def scaled(q: Codes, s: Float[Array, ""]):
        return encode(s * decode(q))

    q, s = encode(X), jnp.float32(2)
    close(decode(scaled(q, s)), 2 * decode(q))
    close(jax.grad(lambda s: jnp.sum(decode(scaled(q, s))))(s), jnp.sum(decode(q)))
    stack = jax.vmap(scaled, (None, 0), out_axes=Lead())(q, SHIFT + 1)
    close(decode(stack)[2], 3 * decode(q))


def test_a_reference_of_another_type_is_refused():
    @typax.op(reference=lambda x: x[..., 0])
    def wrong(x: Float[Array, "*b n"]):
        return encode(x)

    with pytest.raises(TypeError, match=r"gives float32\[2,3\], but its reference <lambda> gives float32\[2\]"):
        wrong(X)


def test_shardings_pass():
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jax.device_put(jnp.ones((8, 3)), jax.P("i"))
        assert str(jax.typeof(to_codes(x))) == "q8[8@i,3]"
        assert str(jax.typeof(matmul(x, W))) == "float32[8@i,4]"
        v = Shifted(encode(x), SHIFT)
        assert str(jax.typeof(v)) == "shifted[8@i,3]" and str(jax.typeof(dense(v))) == "float32[8@i,3]"
        assert str(jax.typeof(jax.grad(square(dense))(v))) == "float32[8@i,3]"


def test_shard_map():
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jax.device_put(jnp.arange(24.0).reshape(8, 3) + 1, jax.P("i"))
        specs = {"in_specs": (jax.P("i"), CodesP(jax.P())), "out_specs": jax.P("i")}
        close(jax.jit(jax.shard_map(lambda x, w: matmul(x, w), **specs))(x, W), x @ decode(W))
        q = jax.jit(jax.shard_map(lambda x: to_codes(x), in_specs=jax.P("i"), out_specs=CodesP(jax.P("i"))))(x)
        assert str(jax.typeof(q)) == "q8[8@i,3]"


def test_nested_transformations():
    xs = jnp.stack([ACTS, 2 * ACTS, 3 * ACTS])
    both = jax.vmap(jax.vmap(matmul, (0, None)), (None, Lead()), axis_size=2)
    close(both(xs, WS)[1, 2], 6 * Y)
    want = jnp.stack([2 * 14 * ACTS.T @ Y, 4 * 14 * ACTS.T @ Y])  # 14 = 1 + 2^2 + 3^2
    close(jax.jit(jax.grad(square(lambda w: both(xs, w))))(WS), want)
    stacks = encode(jnp.stack([decode(WS)] * 3))
    twice = jax.vmap(jax.vmap(matmul, (None, Lead()), axis_size=2), (None, Lead()), axis_size=3)
    close(twice(ACTS, stacks)[2], jnp.stack([Y, 2 * Y]))


class DecodeLinear(Decode):
    """With forward-mode rules too."""

    def jvp(self, primals, tangents):
        return self(*primals), hijax.instantiate_zeros(tangents[0])

    lin, linearized = hijax.linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp


@typax.op(reference=lambda x, w: x @ DecodeLinear.on(w))
def matmul_both_ways(x: Float[Array, "*b k"], w: Float[Codes, "k n"]):
    return product(x, w)


def test_forward_mode():
    f, w = matmul_both_ways, decode(W)
    close(jax.jvp(f, (ACTS, W), (ACTS, w))[1], 2 * Y)
    close(jax.linearize(f, ACTS, W)[1](ACTS, w), 2 * Y)
    close(jax.jvp(jax.vmap(f, (None, Lead()), axis_size=2), (ACTS, WS), (ACTS, decode(WS)))[1][1], 4 * Y)
    close(jax.jit(jax.grad(square(jax.checkpoint(f)), argnums=1))(ACTS, W), 2 * ACTS.T @ Y)
    assert jax.hessian(lambda x: square(f)(x, W))(ACTS).shape == (2, 3, 2, 3)


# --- a primitive written by hand takes and gives declared values -----------------------------------------------------


class RowSum(Typed):
    def result(self, q):
        return like(q, q.shape[:-1], "float32", *q.sharding.spec[:-1])

    def expand(self, q):
        return jnp.sum(dense(q), axis=-1)

    def vjp_fwd(self, nzs_in, q):
        return self(q), q

    def vjp_bwd_retval(self, q, ct):
        return (jnp.broadcast_to(ct[..., None], jax.typeof(q).shape),)

    def batch(self, axis_data, args, dims):
        return RowSum.on(*args), dims[0]


class ToQ(Typed):
    def result(self, x):
        return QArray.type(x.shape, x.dtype, sharding=x.sharding)

    def expand(self, x):
        return quantize(x)

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, _, ct):
        return (ct,)

    def batch(self, axis_data, args, dims):
        return ToQ.on(jnp.moveaxis(args[0], dims[0], 0)), 0


Q = quantize(X)
SUMS = jnp.sum(dense(Q), axis=-1)


def test_a_primitive_on_declared_values():
    close(RowSum.on(Q), SUMS)
    close(jax.jit(lambda x: RowSum.on(quantize(x)))(X), SUMS)
    close(jax.vmap(RowSum.on)(Q), SUMS)
    close(jax.lax.scan(lambda c, q: (c + RowSum.on(q), None), 0.0, Q, length=2)[0], SUMS.sum())
    want = 2 * SUMS[:, None] * jnp.ones((2, 3))
    close(jax.grad(square(RowSum.on))(Q), want)
    close(jax.vmap(jax.grad(square(RowSum.on)))(Q), want)
    close(jax.jit(jax.grad(lambda x: jnp.sum(RowSum.on(quantize(x)) ** 2)))(X), want)


def test_a_primitive_that_gives_declared_values():
    for f in (ToQ.on, jax.jit(ToQ.on), jax.vmap(ToQ.on)):
        close(dense(f(X)), dense(Q))
    close(jax.grad(square(lambda x: dense(ToQ.on(x))))(X), 2 * dense(Q))


# --- a type written by hand holds a declared type --------------------------------------------------------------------


def test_a_tuple_with_a_declared_part():
    p = pair(Q, jnp.float32(2))
    assert str(jax.typeof(p)) == "Tup{q8[2,3],float32[]}"
    close(dense(jax.jit(lambda p: part(p, i=0))(p)), dense(Q))
    close(dense(jax.jit(lambda p: p)(p).parts[0]), dense(Q))
    grad = jax.grad(lambda p: jnp.sum(dense(part(p, i=0)) ** 2) * part(p, i=1))(p)
    assert str(jax.typeof(grad)) == "Tup{float32[2,3],float32[]}"
    close(part(grad, i=0), 4 * dense(Q))
    scaled = lambda p: dense(part(p, i=0)) * part(p, i=1)
    close(jax.vmap(scaled, in_axes=PairSpec((0, None)), axis_size=2)(p), 2 * dense(Q))
    out = jax.vmap(lambda x: pair(quantize(x), x), out_axes=PairSpec((0, 0)))(X)
    close(dense(part(out, i=0)), dense(Q))
    stack = pair(Q, jnp.ones(2))
    total, again = jax.lax.scan(lambda c, p: (c + jnp.sum(dense(part(p, i=0))), p), 0.0, stack, length=2)
    close(total, SUMS.sum())
    close(dense(part(again, i=0)), dense(Q))


class Through(Value, name="through"):
    """A body whose open value goes into a primitive written by hand."""

    q: Float32[QArray, "*batch n"]

    def dense(self) -> Float32[Array, "*batch n"]:
        return dense(part(pair(self.q, jnp.float32(1)), i=0))


@typax.op(reference=lambda x: x)
def through(v: Through):
    return dense(part(pair(v, v.q), i=0))


@pytest.mark.parametrize("f", [dense, jax.jit(dense), jax.vmap(dense), through, jax.jit(through), jax.vmap(through)])
def test_an_open_value_in_a_primitive_written_by_hand(f):
    v = Through(Q)
    close(f(v), dense(Q))
    close(jax.grad(square(f))(v), 2 * dense(Q))


def test_what_typax_cannot_do_with_types_written_by_hand_is_said():
    c = encode(jnp.arange(12.0).reshape(4, 3))
    for f, says in (
        (lambda: typax.stack([c, c]), "apply its own primitives"),
        (lambda: typax.device_put(c, jax.devices()[1]), "place its arrays"),
        (lambda: typax.associative_scan(lambda a, b: a, c), "scan its arrays"),
    ):
        with pytest.raises(TypeError, match=rf"q8\[4,3\] is no declared type \(a class of typax.Value\); {says}"):
            f()
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        rows = lambda spec: typax.shard_map(decode, in_specs=spec, out_specs=jax.P("i"))(c)
        with pytest.raises(TypeError, match=r"q8\[4,3\] is a hi type written by hand, whose in_specs is a HiPspec"):
            rows(jax.P("i"))
        close(rows(CodesP(jax.P("i"))), decode(c))
