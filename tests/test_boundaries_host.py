"""Jacobians in and of values, and values that cross to the host; the dense array is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from test_boundaries import KINDS, wave

import typax
from typax import LowRank, QArray, dense, matmul, quantize, tup

pytestmark = pytest.mark.core

Q, LOW, X = quantize(wave(3, 2)), LowRank(wave(3, 2), wave(2, 2)), wave(2, 3)


def test_jacobians_in_values_and_of_values():
    f = lambda x, w: jnp.sin(matmul(x, w)) ** 2
    plain = lambda x, w: jnp.sin(x @ w) ** 2
    for ours, theirs in ((typax.jacrev, jax.jacrev), (typax.jacfwd, jax.jacfwd), (typax.hessian, jax.hessian)):
        got = jax.jit(ours(f, argnums=(0, 1)))(X, Q)
        want = theirs(plain, argnums=(0, 1))(X, dense(Q))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            close(a, b, 1e-4)
    product = lambda ab, x: plain(x, ab["left"] @ ab["right"])
    of_factors = dict(zip(("left", "right"), LOW.components(), strict=True))
    for ours, theirs in ((typax.jacrev, jax.jacrev), (typax.hessian, jax.hessian)):
        got = jax.jit(ours(lambda w, x: f(x, w)))(LOW, X)
        want = theirs(product)(of_factors, X)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            close(a, b, 1e-4)
    made = typax.jacfwd(lambda x: tup(quantize(x), 2 * x))(X)  # of a record of values: of what they stand for
    eye = jnp.eye(6).reshape(2, 3, 2, 3)
    close(made[0], eye), close(made[1], 2 * eye)


def test_jacobians_in_records_and_under_other_transformations():
    t = {"t": tup(X, Q, jnp.int32(2)), "x": X}
    f = lambda d: matmul(d["t"][0], d["t"][1]) * d["x"][0, 0]
    got, aux = typax.jacrev(lambda d: (f(d), d["t"][1]), has_aux=True)(t)
    want = jax.jacrev(lambda x, q, y: (x @ q) * y[0, 0], (0, 1, 2))(X, dense(Q), X)
    first, second, nothing = got["t"]
    assert nothing is None and jax.typeof(aux) == jax.typeof(Q)
    close(first, want[0]), close(second, want[1]), close(got["x"], want[2])
    again = KINDS["itself"]
    close(typax.jacrev(lambda q: dense(q) * 2)(again[0]), 2 * jnp.eye(6).reshape(2, 3, 2, 3))
    mapped = jax.vmap(typax.jacrev(lambda q: jnp.sum(dense(q) ** 2)))(KINDS["q8"])
    close(mapped, 2 * dense(KINDS["q8"]))
    with pytest.raises(TypeError, match=r"a Jacobian with respect to quiet\[4,2,3\], which has no tangents"):
        typax.jacfwd(lambda q: dense(q).sum())(KINDS["none"])
    assert np.all(jax.grad(lambda x: jnp.sum(dense(typax.stop_gradient(quantize(x)))))(X) == 0)


def test_callbacks_are_given_values_and_give_them():
    seen = []
    twice = lambda t: (seen.append(type(t[0]).__name__), QArray(t[0].qvalue, 2 * t[0].scale))[1]
    ask = lambda t: typax.pure_callback(twice, jax.typeof(t[0]), t, vmap_method="sequential")
    for out in (ask(tup(Q, X)), jax.jit(ask)(tup(Q, X))):
        close(dense(out), 2 * dense(Q), 0.02)
    stack = KINDS["q8"]
    close(dense(jax.vmap(lambda q: ask(tup(q, X)))(stack)), 2 * dense(stack), 0.02)
    assert set(seen) == {"QArray"} and len(seen) == 6

    summed = lambda q: (q.qvalue * q.scale[..., None]).sum((-1, -2))
    scalar = jax.ShapeDtypeStruct((), "float32")
    at_once = lambda q: typax.pure_callback(summed, scalar, q, vmap_method="expand_dims")
    close(jax.vmap(at_once)(stack), dense(stack).sum((1, 2)))
    wrong = lambda q: typax.pure_callback(lambda q: q.scale, jax.typeof(q), q)
    with pytest.raises(Exception, match=r"a callback gives ndarray where q8\[3,2\] was announced"):
        jax.block_until_ready(jax.jit(wrong)(Q).qvalue)

    got = []
    loss = lambda q: (typax.io_callback(lambda q, k: got.append((q, k)), None, q, k=1, ordered=True), jnp.sum(dense(q)))[1]
    close(jax.jit(jax.grad(loss))(Q), jnp.ones((3, 2)))
    jax.effects_barrier()
    ((q, k),) = got
    assert isinstance(q, QArray) and k == 1
    close(dense(q), dense(Q))


def test_values_are_printed(capfd):
    @jax.jit
    def f(q, low):
        typax.debug.print("{} and {x}", q, x=low)
        typax.debug.callback(lambda q, low: print(jax.typeof(q), jax.typeof(low)), q, low)
        return jnp.sum(dense(q))

    jax.block_until_ready(jax.grad(f)(Q, LOW))
    typax.debug.print("eagerly {q}", q=Q)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert "QArray(qvalue=array([[" in out and " and LowRank(left=" in out and "q8[3,2] lr[3,2]" in out
    assert "eagerly QArray(" in out
