"""Tangent policies and records: each against derivatives of the dense array, or of the components."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _util import X, close
from jaxtyping import Array, Float, Int32

import typax
from typax import QArray, Value, dense, quantize, retract

pytestmark = pytest.mark.core


class Factors(Value, name="lr", tangent="componentwise"):
    u: Float[Array, "*batch m r"]
    v: Float[Array, "*batch r n"]

    def dense(self) -> Float[Array, "*batch m n"]:
        return self.u @ self.v

    @property
    def rank(self) -> Any:
        return self.u.shape[-1]

    def flipped(self):
        return Factors(self.v.T, self.u.T)


product = typax.op(jnp.matmul, name="product")


@product.impl
def _(x: Float[Array, "*b m"], w: Factors):
    return (x @ w.u) @ w.v


class Pack(Value, name="Pack"):
    elts: tuple[Any, ...]

    def __getitem__(self, i):
        return self.components()[i]

    def __len__(self):
        return len(self.components())


def pack(*xs):
    return Pack.from_components(xs)


class Pair(Value):
    left: Float[Array, "*batch n"]
    right: QArray
    count: Int32[Array, ""]


class Own(QArray, name="own", tangent="itself"):
    @classmethod
    def from_dense(cls, x, dtype):
        return cls(*quantize(x).components(), dtype=dtype)


class Fed(Own, name="fedq", tangent=typax.Itself(error_feedback=True)):
    pass


class Still(QArray, name="still", tangent="none"):
    pass


U, V = jnp.arange(12.0).reshape(6, 2) / 10, jnp.linspace(-1, 1, 10).reshape(2, 5)
ACTS = jnp.arange(18.0).reshape(3, 6) / 7


def loss(x, w):
    return jnp.sum(product(x, w) ** 2)


def plain(x, u, v):
    return jnp.sum(((x @ u) @ v) ** 2)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_componentwise_gradients_are_records_of_those_of_the_components(wrap):
    w = Factors(U, V)
    gx, gw = wrap(jax.grad(loss, (0, 1)))(ACTS, w)
    assert str(jax.typeof(gw)) == "lr.tangent{u:float32[6,2],v:float32[2,5]}"
    for got, want in zip((gx, gw.u, gw.v), jax.grad(plain, (0, 1, 2))(ACTS, U, V), strict=True):
        close(got, want)
    moved = retract(w, gw)
    assert isinstance(moved, Factors)
    close(moved.u, U + gw.u)


def test_componentwise_hessian_vector_products():
    w = Factors(U, V)
    t = jax.grad(loss, 1)(ACTS, w)
    _, got = jax.jvp(jax.grad(loss, 1), (ACTS, w), (ACTS, t))
    _, want = jax.jvp(jax.grad(plain, (1, 2)), (ACTS, U, V), (ACTS, t.u, t.v))
    close(got.u, want[0])
    close(got.v, want[1])


def test_methods_and_properties_are_ops():
    w = Factors(U, V)
    assert w.rank == 2 and jax.jit(lambda w: w.rank)(w) == 2
    got = jax.jit(jax.grad(lambda w: jnp.sum(dense(w.flipped()) * X[:1, :1])))(w)
    close(got.u, jnp.ones((6, 5)) @ V.T)
    assert str(jax.typeof(w.flipped())) == "lr[5,6]"


def test_records_hold_anything_and_print_their_elements():
    t = pack(jnp.arange(3.0), 5.0)
    assert str(jax.typeof(t)) == "Pack{float32[3],float32[]}" and float(t[1]) == 5.0 and len(t) == 2
    assert str(jax.typeof(pack(quantize(X), 3.0))) == "Pack{q8[2,3],float32[]}"
    nested = pack(pack(1.0, 2.0), jnp.arange(2.0))
    assert str(jax.typeof(nested)) == "Pack{Pack{float32[],float32[]},float32[2]}"
    assert jax.jit(lambda t: t[0][1])(nested) == 2.0
    pair = Pair(X[0], quantize(X), jnp.int32(7))
    assert str(jax.typeof(pair)) == "pair{left:float32[3],right:q8[2,3],count:int32[]}"
    assert Pack.type(jax.typeof(X), jax.typeof(quantize(X))) == jax.typeof(pack(X, quantize(X)))


def test_swap_with_a_spec_for_each_component():
    t = pack(jnp.arange(3.0), 5.0)
    swap = jax.vmap(lambda t: pack(t[1], t[0]), in_axes=typax.Axes(0, None), out_axes=typax.Axes(None, 0), axis_size=3)
    assert str(jax.typeof(swap(t))) == "Pack{float32[],float32[3]}"
    assert str(jax.typeof(jax.jit(swap)(t))) == "Pack{float32[],float32[3]}"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients_of_records_keep_integers_apart(wrap):
    t = pack(quantize(X), 3.0, jnp.arange(4))
    g = wrap(jax.grad(lambda t: jnp.sum(dense(t[0]) ** 2) * t[1]))(t)
    assert str(jax.typeof(g)) == "Pack{float32[2,3],float32[],float0[4]}"
    close(g[0], 6 * dense(quantize(X)))
    pair = Pair(X[0], quantize(X), jnp.int32(7))
    g = wrap(jax.grad(lambda p: jnp.sum(p.components()[0] ** 2)))(pair)
    assert str(jax.typeof(g)) == "pair.tangent{left:float32[3],right:float32[2,3],count:float0[]}"
    close(g.left, 2 * X[0])
    moved = retract(pair, g)
    assert isinstance(moved.right, QArray) and moved.count == 7
    close(moved.left, 3 * X[0])


def scanned(carry, xs, make, get, to, frm):
    def step(c, x):
        new = make(frm(to(get(c, 0)) * 0.5 + to(get(x, 0))), get(c, 1) * 2 + get(x, 1))
        return new, make(get(x, 0), get(c, 1))

    c, ys = jax.lax.scan(step, carry, xs, length=4)
    return jnp.sum(to(get(c, 0))) * get(c, 1) + jnp.sum(to(get(ys, 0)) * 2)


def test_scan_of_records_and_its_gradient():
    q, qs = quantize(X), quantize(jnp.arange(24.0).reshape(4, 2, 3))
    rounded = lambda x: x + jax.lax.stop_gradient(dense(quantize(x)) - x)
    same = lambda x: x

    def on_hi(c, xs):
        return scanned(c, xs, pack, lambda t, i: t[i], dense, quantize)

    def on_tuples(c, xs):
        return scanned(c, xs, lambda *t: t, lambda t, i: t[i], same, rounded)

    want = jax.grad(on_tuples, (0, 1))((dense(q), jnp.float32(3)), (dense(qs), jnp.arange(4.0)))
    for wrap in (same, jax.jit):
        got = wrap(jax.grad(on_hi, (0, 1)))(pack(q, 3.0), pack(qs, jnp.arange(4.0)))
        for g, w in zip(got, want, strict=True):
            close(g[0], w[0], 1e-4)
            close(g[1], w[1], 1e-4)
    batch = jax.vmap(on_hi, (None, 0))(pack(q, 3.0), pack(quantize(jnp.ones((5, 4, 2, 3))), jnp.ones((5, 4))))
    close(batch, jnp.full(5, on_hi(pack(q, 3.0), pack(quantize(jnp.ones((4, 2, 3))), jnp.ones(4)))))


def test_tangents_that_are_values_themselves():
    q = Own.from_dense(X, dtype=jnp.float32)
    f = lambda q: jnp.sum(dense(q) ** 2) + jnp.sum(dense(q))
    g = jax.grad(f)(q)
    assert isinstance(g, Own)
    close(dense(g), 2 * dense(q) + 1, 0.2)
    stack = Own.from_dense(jnp.stack([X, X + 1]), dtype=jnp.float32)
    assert str(jax.typeof(jax.jit(jax.vmap(jax.grad(f)))(stack))) == "own[2,2,3]"
    assert isinstance(retract(q, g), Own)


def test_error_feedback_loses_nothing_in_a_sum():
    q = Fed.from_dense(X, dtype=jnp.float32)
    g = jax.grad(lambda q: jnp.sum(dense(q) ** 2) + jnp.sum(dense(q)) + jnp.sum(jnp.sin(dense(q))))(q)
    assert str(jax.typeof(g)) == "fed{value:fedq[2,3],error:float32[2,3]}"
    close(dense(g.value) + g.error, 2 * dense(q) + 1 + jnp.cos(dense(q)))


def test_values_that_are_constants_for_differentiation():
    s = Still(*quantize(X).components()[:2])
    close(jax.grad(lambda x: jnp.sum(x @ dense(s)))(jnp.ones((2, 2))), jnp.ones((2, 3)) @ dense(s).T)

    @typax.op(reference=lambda x: x)
    def freeze(x: Float[Array, "*b n"]):
        return Still(*quantize(x).components()[:2], dtype=x.dtype)

    for wrap in (lambda f: f, jax.jit):
        g = wrap(jax.grad(lambda x: jnp.sum(dense(freeze(x)) * x)))(X)
        close(g, dense(freeze(X)))


class Biggest(typax.Itself):
    """Gradients accumulate by their maximum (as amax statistics of scaled float8 training do)."""

    name = "max"

    def add(self, ty, x, y):
        return self.close(ty, jnp.maximum(dense(x), dense(y)))


class Amax(Value, tangent=Biggest()):
    x: Float[Array, "*batch"]

    def dense(self) -> Float[Array, "*batch"]:
        return self.x

    @classmethod
    def from_dense(cls, x):
        return cls(x)


def test_a_policy_of_ones_own_adds_by_the_maximum():
    a = Amax(jnp.array([1.0, 2.0]))
    g = jax.grad(lambda a: jnp.sum(dense(a) * jnp.array([3.0, 1.0])) + jnp.sum(dense(a) * 2))(a)
    close(g.x, [3.0, 2.0])

    def step(c, k):
        return c + k * jnp.sum(dense(a)), None

    total = lambda a: sum(k * jnp.sum(dense(a)) for k in (1.0, 5.0, 2.0))
    close(jax.jit(jax.grad(total))(a).x, [5.0, 5.0])


class Elsewhere(typax.Tangent):
    """Tangents are values of another class, whose type is made anew at each call."""

    name = "elsewhere"

    def tangent_type(self, ty):
        return Moved.type(ty.shape)

    def open(self, ty, t):
        return dense(t)

    def close(self, ty, array):
        return Moved.from_components(array)

    def zero(self, ty):
        return Moved.from_components(jnp.zeros(ty.shape))

    def add(self, ty, x, y):
        return Moved.from_components(dense(x) + dense(y))


class Moved(Value, tangent=Elsewhere()):
    by: Float[Array, "*batch"]

    def dense(self) -> Float[Array, "*batch"]:
        return self.by


class Placed(Value, tangent=Elsewhere()):
    at: Float[Array, "*batch"]

    def dense(self) -> Float[Array, "*batch"]:
        return self.at


def test_tangents_of_another_class_whose_tangents_are_its_own():
    g = jax.grad(lambda p: jnp.sum(dense(p) * jnp.array([3.0, 1.0])) + jnp.sum(dense(p)))(Placed(jnp.ones(2)))
    assert isinstance(g, Moved)
    close(g.by, [4.0, 2.0])


class Inverse(typax.Itself):
    name = "inverse unit"

    def cotangent_type(self, ty):
        return ty.with_statics(power=-ty.static("power"))


class Length(Value, tangent=Inverse()):
    x: Float[Array, "*batch"]
    power: int = 1

    def dense(self) -> Float[Array, "*batch"]:
        return self.x

    @classmethod
    def from_dense(cls, x, power):
        return cls(x, power)


def test_a_policy_of_ones_own_with_another_cotangent_type():
    v = Length(jnp.array([1.0, 2.0]))
    g = jax.grad(lambda v: jnp.sum(dense(v) ** 2))(v)
    assert str(jax.typeof(g)) == "length<power=-1>[2]"
    close(g.x, [2.0, 4.0])
    _, t = jax.jvp(lambda v: v, (v,), (v,))
    assert str(jax.typeof(t)) == "length[2]"


def test_policies_that_a_type_cannot_have():
    with pytest.raises(TypeError, match=r"needs a classmethod from_dense"):

        class A(Value, tangent="itself"):
            x: Float[Array, "n"]

            def dense(self) -> Float[Array, "n"]:
                return self.x

    with pytest.raises(TypeError, match=r"a record stands for no single array, so its tangents are componentwise"):

        class B(Value, tangent="dense"):
            x: Float[Array, "n"]

    with pytest.raises(TypeError, match=r"no component has a floating dtype"):

        class C(Value, tangent="componentwise"):
            x: Int32[Array, "n"]

            def dense(self) -> Int32[Array, "n"]:
                return self.x

    with pytest.raises(TypeError, match=r"tangent='float' is none of 'dense', 'componentwise'"):

        class D(Value, tangent="float"):
            x: Float[Array, "n"]

    with pytest.raises(TypeError, match=r"typax\.retract of lone\[3\] needs a classmethod Lone\.from_dense"):
        retract(Lone(X[0]), X[0])
    with pytest.raises(TypeError, match=r"tangents of q8\[2,3\] are of type float32\[2,3\], not float32\[3\]"):
        retract(quantize(X), jnp.ones(3))


class Lone(Value):
    x: Float[Array, "n"]

    def dense(self) -> Float[Array, "n"]:
        return self.x


def test_a_cotangent_type_of_its_own_needs_a_hi_tangent_type():
    class Odd(typax.Dense):
        def cotangent_type(self, ty):
            return Pack.type(ty.dense_type)

    class V(Value, tangent=Odd()):
        x: Float[Array, "n"]

        def dense(self) -> Float[Array, "n"]:
            return self.x

    with pytest.raises(TypeError, match=r"a cotangent type of its own needs a hi type for tangents"):
        jax.grad(lambda v: jnp.sum(dense(v)))(V(X[0]))


def test_axes_from_the_end_in_a_spec_for_each_component():
    t = pack(jnp.ones((2, 3)), 5.0)
    f = lambda a, b: jax.vmap(lambda t: t, in_axes=typax.Axes(a, None), out_axes=typax.Axes(b, None), axis_size=3)(t)
    assert jax.typeof(f(-1, 1)) == jax.typeof(t)
