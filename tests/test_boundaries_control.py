"""Loops, branches and maps over values, and what typax repairs under them; the same function of arrays is the oracle."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from test_boundaries import KINDS, MASK, N, kinds, tangents, views, wave, weighted

import typax
from typax import LowRank, dense, quantize, tup


def total(v):
    return weighted(views(v))


def same(got, want, tol=1e-5):
    for x, y in zip(views(got), views(want), strict=True):
        close(x, y, tol)


@kinds
def test_loops_read_their_length_off_values(kind):
    v = typax.unshare(KINDS[kind])

    @jax.jit
    def run(v):
        n, ys = typax.scan(lambda c, x: (c + 1, x), 0, v, reverse=True)
        by_three = typax.map(lambda x: (x, total(x)), v, batch_size=3)
        return n, ys, by_three, jax.grad(lambda v: total(typax.map(lambda x: x, v)), allow_int=True)(v)

    n, ys, (again, totals), g = run(v)
    assert n == N
    same(ys, v), same(again, v)
    close(totals, [total(typax.take(v, i, 0)) for i in range(N)])
    if kind != "none":
        want = jax.grad(total, allow_int=True)(v)
        for x, y in zip(tangents(g), tangents(want), strict=True):
            close(x, y, 0.05 if kind == "itself" else 1e-5)
    with jax.disable_jit():
        n, ys = typax.scan(lambda c, x: (c + 1, x), 0, v)
        assert n == N and typax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1]), (0, v))[0] == 2
        same(ys, v)


@kinds
def test_a_predicate_is_mapped(kind):
    """``vmap`` runs both branches and selects; gradients flow through the branch that is chosen."""
    v = typax.unshare(KINDS[kind])
    other = typax.take(v, jnp.array([1, 2, 3, 0]), 0)

    def pick(p, v, w):
        return typax.cond(p, lambda v, w: v, lambda v, w: w, v, w)

    def loss(v, w):
        out = jax.vmap(lambda p, v, w: total(pick(p, v, w)) + typax.cond(p, total, lambda v: 2 * total(v), v))
        return jnp.sum(out(MASK, v, w))

    def plain(v, w):
        chosen = [(v if p else w, typax.take(v, i, 0), 1.0 if p else 2.0, i) for i, p in enumerate(MASK.tolist())]
        return sum(total(typax.take(u, i, 0)) + times * total(x) for u, x, times, i in chosen)

    run = jax.jit(lambda v, w: (jax.vmap(pick)(MASK, v, w), *jax.value_and_grad(loss, (0, 1), allow_int=True)(v, w)))
    chosen, value, gs = run(v, other)
    for x, a, b in zip(views(chosen), views(v), views(other), strict=True):
        np.testing.assert_array_equal(x, jnp.where(MASK.reshape(N, *(1,) * (a.ndim - 1)), a, b))
    want, want_gs = jax.value_and_grad(plain, (0, 1), allow_int=True)(v, other)
    close(value, want, 1e-4)
    if kind != "none":
        for g, w in zip(gs, want_gs, strict=True):
            for x, y in zip(tangents(g), tangents(w), strict=True):
                close(x, y, 0.05 if kind == "itself" else 1e-4)


@pytest.mark.core
def test_values_made_in_a_branch_and_carried():
    x = wave(2, 3)

    def f(i, x):
        q = typax.switch(i, [quantize, lambda x: quantize(2 * x), lambda x: quantize(-x)], x)
        return jnp.sum(dense(typax.fori_loop(0, 2, lambda _, q: quantize(3 * dense(q)), q)) * x)

    ids = jnp.arange(3)
    value, g = jax.jit(jax.vmap(jax.value_and_grad(f, 1), (0, None)))(ids, x)
    sign = jnp.array([1.0, 2.0, -1.0])
    close(value, 9 * sign * jnp.sum(x * x), 0.05)
    close(g, 18 * sign[:, None, None] * x, 0.1)
    close(jax.grad(f, 1)(2, x), g[2])


@pytest.mark.core
@pytest.mark.parametrize("reverse", [False, True])
def test_associative_scan_composes_values(reverse):
    low = LowRank(jnp.cos(jnp.arange(45.0) ** 2).reshape(5, 3, 3), jnp.sin(jnp.arange(45.0) ** 2).reshape(5, 3, 3))
    pairs = tup(wave(5), wave(5) + 1)
    combine = lambda a, b: tup(a[0] * b[0], b[0] * a[1] + b[1])

    @jax.jit
    def run(low, pairs):
        scan = lambda low: typax.associative_scan(jax.vmap(typax.matmul), low, reverse)
        return scan(low), typax.associative_scan(combine, pairs, reverse), jax.grad(lambda x: total(scan(x)))(low)

    products, affine, g = run(low, pairs)
    plain = lambda left, right: lax.associative_scan(jnp.matmul, left @ right, reverse)
    close(dense(products), plain(*low.components()), 1e-3)
    want = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), tuple(pairs), reverse)
    close(affine[1], want[1])
    for x, y in zip(tangents(g), jax.grad(lambda ab: weighted([plain(*ab)]))(low.components()), strict=True):
        close(x, y, 1e-3)


@pytest.mark.core
def test_derivatives_by_hand_of_functions_of_records():
    low = LowRank(wave(3, 2), wave(2, 3))
    record = tup(wave(3), low, jnp.int32(1))

    @jax.custom_vjp
    def f(v):
        return total(v)

    f.defvjp(lambda v: (total(v), v), lambda v, ct: jax.tree.map(lambda t: t, jax.vjp(total, v)[1](2 * ct)))
    for v in (low, record):
        for g, want in ((jax.grad(f, allow_int=True)(v), jax.grad(total, allow_int=True)(v)),):
            for x, y in zip(tangents(g), tangents(want), strict=True):
                close(x, 2 * y)
        stopped = jax.grad(lambda v: total(jax.lax.stop_gradient(v)), allow_int=True)(v)
        assert not any(np.any(x) for x in tangents(stopped))
    keep = jax.checkpoint_policies.save_only_these_names("kept")
    named = jax.checkpoint(lambda x: jnp.sum(dense(checkpoint_name(quantize(jnp.sin(x)), "kept")) ** 2), policy=keep)
    close(jax.grad(named)(wave(2, 3)), jax.grad(lambda x: jnp.sum(dense(quantize(jnp.sin(x))) ** 2))(wave(2, 3)))


@pytest.mark.core
def test_what_loops_refuse():
    q = KINDS["q8"]
    step = lambda c, x: (c, x)
    for use, error, message in [
        (lambda: typax.scan(step, 0, q, length=3), ValueError, "one length: q8[4,2,3] has 4 steps, length is 3"),
        (lambda: typax.scan(step, 0, (q, jnp.arange(3))), ValueError, "int32[3] has 3 steps, q8[4,2,3] has 4 steps"),
        (lambda: typax.map(dense, q[0, 0]), TypeError, "a loop over q8[3]: it has no batch axis to be sliced along"),
        (lambda: typax.scan(step, 0, KINDS["shared"]), TypeError, "typax.unshare(v)"),
        (lambda: typax.associative_scan(max, (q, q[:2])), ValueError, "stacks of one length, got q8[4,2,3], q8[2,2,3]"),
        (lambda: lax.scan(step, 0, q, length=7), TypeError, "batch axis 0 of q8[4,2,3], of size 4, as if of size 7"),
    ]:  # fmt: skip
        with pytest.raises(error, match=re.escape(message)):
            use()
