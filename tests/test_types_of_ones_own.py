"""Types that a user writes: inside functions, with postponed annotations, statics, groups, hidden axes, hi components."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from jaxtyping import Array, Float, Float32, Int8, UInt8

import typax
from typax import QArray, Value, dense, matmul, quantize

pytestmark = pytest.mark.core


def test_a_kronecker_product_with_an_implementation_and_stacked():
    class Kron(Value, name="kron"):
        a: Float32[Array, "m n"]
        b: Float32[Array, "p q"]

        def dense(self) -> Float32[Array, "m*p n*q"]:
            return jnp.kron(self.a, self.b)

    @matmul.impl
    def _(x: Float[Array, "b k"], w: Float[Kron, "k n"]):
        return x @ jnp.kron(w.a, w.b)

    k, x = Kron(jnp.arange(4.0).reshape(2, 2), jnp.arange(6.0).reshape(2, 3)), jnp.ones((2, 4))
    assert str(jax.typeof(k)) == "kron[4,6]"
    close(matmul(x, k), x @ dense(k))
    got = jax.grad(lambda w: jnp.sum(matmul(x, w) ** 2))(k)
    close(got, jax.grad(lambda w: jnp.sum((x @ w) ** 2))(dense(k)))
    close(jax.vmap(matmul, (0, None))(jnp.stack([x, 2 * x]), k)[1], 2 * x @ dense(k))
    stack = jax.vmap(lambda s: Kron.from_components(k.a * s, k.b))(jnp.arange(3.0))
    assert str(jax.typeof(stack)) == "kron[3,4,6]"
    close(dense(stack)[2], 2 * dense(k))
    with pytest.raises(TypeError, match=r"no implementation for .*kron\[3,4,6\]"):
        matmul(x, stack)


def test_groups_and_statics():
    class Group(Value, name="g"):
        q: Int8[Array, "*batch n"]
        s: Float32[Array, "*batch n//group"]
        group: int = 2

        def dense(self) -> Float32[Array, "*batch n"]:
            return self.q.astype(jnp.float32) * jnp.repeat(self.s, self.group, axis=-1)

    g = Group(jnp.ones((3, 4), jnp.int8), jnp.arange(6.0).reshape(3, 2))
    close(dense(g), np.repeat(g.s, 2, axis=1))
    close(jax.jit(lambda g: dense(g) * g.group)(g), 2 * dense(g))
    with pytest.raises(TypeError, match=r"axis 'n//group' must be 2 but is 4 in s"):
        Group(jnp.ones((3, 4), jnp.int8), jnp.ones((3, 4)))


def test_an_axis_that_no_component_shows():
    class Bits(Value, name="bits"):
        b: UInt8[Array, "*batch m"]
        n: int

        def dense(self) -> Float32[Array, "*batch n"]:
            return jnp.unpackbits(self.b, axis=-1)[..., : self.n].astype(jnp.float32)

    v = Bits(np.array([[255, 1], [0, 255]], "uint8"), 11)
    assert v.shape == (2, 11) and str(jax.typeof(v)) == "bits<n=11>[2,11]"
    close(jax.vmap(dense)(v), np.unpackbits(np.asarray(v.b), axis=1)[:, :11])


def test_a_hi_component():
    class Twice(Value, name="twice"):
        s: Float32[QArray, "*batch n"]

        def dense(self) -> Float32[Array, "*batch n"]:
            return typax.dense(self.s) * 2

    v = Twice(quantize(jnp.ones((2, 3))))
    for f in (dense, jax.jit(dense), jax.vmap(dense)):
        close(f(v), 2 * jnp.ones((2, 3)))
    close(jax.grad(lambda v: jnp.sum(dense(v) ** 2))(v), 4 * jnp.ones((2, 3)))


def test_keys_are_operands():
    @typax.op(reference=lambda x, key: x)
    def noisy(x: Float[Array, "*b n"], key: Any):
        return quantize(x + 0 * jax.random.uniform(key, x.shape))

    key = jax.random.key(0)
    close(dense(jax.jit(noisy)(np.ones((2, 3), "float32"), key)), jnp.ones((2, 3)))
    close(jax.grad(lambda x: jnp.sum(dense(noisy(x, key))))(jnp.ones((2, 3))), jnp.ones((2, 3)))


class Outer(typax.Value, tangent="componentwise"):
    """``dense`` is written for one value, and says nothing of stacks."""

    u: Float32[Array, "*batch m"]
    v: Float32[Array, "*batch n"]

    def dense(self) -> Float32[Array, "*batch m n"]:
        return self.u[:, None] * self.v[None, :]


type Turned = Outer  # a name for what an implementation takes


@typax.transpose.impl
def _(w: Turned, *, permutation):
    if tuple(permutation) != (0, 2, 1):
        raise typax.Refused("rows and columns stay the last two axes")
    return Outer(w.v, w.u)


def test_an_op_on_a_stack_of_values_with_tangents_by_components():
    w = Outer(jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 4)))
    f = typax.lift(lambda w: w.swapaxes(1, 2) * 1.0, {"mul": "allow", "*": "error"})
    close(f(w), typax.dense(w).swapaxes(1, 2))
    g = jax.grad(lambda w: jnp.sum(f(w)[:, 1] ** 2))(w)
    close(g.u, 2 * w.u * w.v[:, 1:2] ** 2)


class Cyclic(Value, name="cyclic"):
    """``w[i, j] = c[j - i mod n]``."""

    c: Float32[Array, "*batch n"]

    def dense(self) -> Float32[Array, "*batch n n"]:
        return jnp.stack([jnp.roll(self.c, i) for i in range(self.c.size)])


@typax.matmul.impl
def _(x: Float[Array, "*b n"], w: Float[Cyclic, "n n"]):
    return sum(x[..., i, None] * jnp.roll(w.c, i) for i in range(w.c.size))


@typax.transpose.impl
def _(w: Float[Cyclic, "n n"], *, permutation):
    return Cyclic(jnp.roll(w.c[::-1], 1))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [("bn,nm->bm", (2, 4)), ("bm,nm->bn", (2, 4)), ("bm,nm->nb", (2, 4)), ("nb,nm->bm", (4, 2)),
     ("abm,nm->anb", (2, 3, 4)), ("m,nm->n", (4,))],
)  # fmt: skip
@pytest.mark.parametrize("first", [False, True])
def test_a_product_along_either_axis_is_a_matmul_and_its_derivative_too(spec, shape, first):
    operands, out = spec.split("->")
    a, b = operands.split(",")
    spec = f"{b},{a}->{out}" if first else spec
    f = lambda w, x: jnp.einsum(spec, *((w, x) if first else (x, w)))
    w, x = Cyclic(jnp.arange(1.0, 5.0)), jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)
    lifted = typax.lift(f, fallback="error")
    close(lifted(w, x), f(dense(w), x))
    loss = lambda f: lambda w, x: jnp.sin(f(w, x)).sum()
    g = jax.grad(loss(lifted), 1)
    close(g(w, x), jax.grad(loss(f), 1)(dense(w), x))
    assert " dense " not in str(jax.make_jaxpr(g)(w, x))
    close(jax.grad(loss(lifted))(w, x), jax.grad(loss(f))(dense(w), x))


class Bare(Value, name="bare"):
    """A type without ops."""

    d: Float32[Array, "n"]

    def dense(self) -> Float32[Array, "n n"]:
        return jnp.diag(self.d)


def test_a_sum_runs_its_parts_by_their_ops_or_refuses():
    f = lambda w, x: jnp.tanh(x @ w) @ w.T
    w, x = Cyclic(jnp.arange(1.0, 5.0) / 8), jnp.sin(jnp.arange(8.0).reshape(2, 4))
    w = typax.Sum(w, typax.outer(jnp.ones((4, 1)), jnp.arange(4.0)[None] / 8), scale=0.5)
    lifted = typax.lift(f, fallback="error")
    close(lifted(w, x), f(dense(w), x))
    close(matmul(x, w), x @ dense(w))
    loss = lambda f: lambda w, x: jnp.sin(f(w, x)).sum()
    close(jax.grad(loss(lifted), 1)(w, x), jax.grad(loss(f), 1)(dense(w), x))
    w = typax.Sum(quantize(jnp.eye(4)), Bare(jnp.arange(4.0)))
    why = r"no op for (dot_general|matmul|transpose) takes bare\[4,4\], a part of a sum"
    with pytest.warns(UserWarning, match=why):
        close(typax.lift(f)(w, x), f(dense(w), x))
    with pytest.raises(TypeError, match=why):
        lifted(w, x)
    with pytest.raises(typax.Refused, match=why):
        matmul(x, w)


def test_entries_of_a_stack_are_read_from_its_components():
    def f(ws, x, i):
        x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ ws[i]), x @ ws[1] + x @ ws[i])
        for w in ws:
            x = x @ w
        x = sum((x @ part[0] for part in jnp.split(ws, [1])), x)
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws[jnp.array([2, 0])])[0]

    ws, x = Cyclic(jnp.sin(jnp.arange(12.0).reshape(3, 4))), jnp.sin(jnp.arange(8.0).reshape(2, 4))
    lifted = typax.lift(f, fallback="error")
    close(lifted(ws, x, 2), f(dense(ws), x, 2))
    close(jax.grad(lambda ws: lifted(ws, x, 2).sum())(ws), jax.grad(lambda ws: f(ws, x, 2).sum())(dense(ws)))
    with pytest.raises(TypeError, match="entries out of range are filled"):
        typax.lift(lambda ws, i: jnp.take(ws, i, 0), fallback="error")(ws, 1)
