"""Rules by hand: each runs where JAX asks for it, what follows from it is right, and what cannot is said."""

import jax
import jax.numpy as jnp
import pytest
from _util import W, X, close
from jaxtyping import Array, Float
from test_tangents import Factors

import typax
from typax import QArray, dense, matmul, quantize

pytestmark = pytest.mark.core
QW = quantize(W)


def make():
    """A quantized product; its rules by hand scale the gradients by 10, to tell them from the derived ones."""
    mm = typax.op(jnp.matmul, name="mm")

    @mm.impl
    def _(x: Float[Array, "*b k"], w: Float[QArray, "k n"], *, gain=10.0):
        return (x * w.scale) @ w.qvalue.astype(x.dtype)

    return mm


def loss(mm):
    return lambda x, w: jnp.sum(jnp.sin(mm(x, w)))


def want(argnum, x, w, gain=10.0):
    return gain * jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), argnum)(x, dense(w))


def with_jvp(mm):
    @mm.def_jvp
    def _(primals, tangents, *, gain):
        (x, w), (dx, dw) = primals, tangents
        return mm(x, w, gain=gain), gain * (matmul(dx, w) + x @ dw)


def with_lin(mm):
    def linearized(res, dx, dw, *, gain):
        x, w = res
        return gain * (matmul(dx, w) + x @ dw)

    mm.def_lin(lambda nonzero, x, w, *, gain: (mm(x, w, gain=gain), (x, w)), linearized)


def with_vjp(mm):
    def fwd(nonzero, x, w, *, gain):
        assert nonzero in ((True, True), (True, False), (False, True))
        return mm(x, w, gain=gain), (x if nonzero[1] else None, w if nonzero[0] else None)

    def bwd(res, ct, *, gain):
        x, w = res
        gx = None if w is None else gain * (ct @ dense(w).T)
        return gx, None if x is None else gain * (x.T @ ct)

    mm.def_vjp(fwd, bwd)


@pytest.fixture(params=[with_jvp, with_lin, with_vjp])
def mm(request):
    op = make()
    request.param(op)
    return op


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_gradients_follow_the_rule(mm, wrap):
    got = jax.grad(wrap(loss(mm)), (0, 1))(X, QW)
    for argnum in (0, 1):
        close(got[argnum], want(argnum, X, QW), 1e-4)
        close(jax.grad(wrap(loss(mm)), argnum)(X, QW), want(argnum, X, QW), 1e-4)


def test_gradients_under_vmap_and_scan(mm):
    xs, ws = jnp.stack([X, X / 2, X * 2]), quantize(jnp.stack([W, W + 1, W * 2]))
    got = jax.vmap(jax.grad(loss(mm), (0, 1)), (0, None))(xs, QW)
    close(got[0], jax.vmap(lambda x: want(0, x, QW))(xs), 1e-4)
    close(got[1], jax.vmap(lambda x: want(1, x, QW))(xs), 1e-4)
    total = lambda x, ws: jnp.sum(jax.vmap(loss(mm), (None, 0))(x, ws))
    gx, gw = jax.jit(jax.grad(total, (0, 1)))(X, ws)
    each = [quantize(w) for w in (W, W + 1, W * 2)]
    close(gx, sum(want(0, X, w) for w in each), 1e-4)
    close(gw, jnp.stack([want(1, X, w) for w in each]), 1e-4)
    scanned = lambda x: jax.lax.scan(lambda c, w: (c + loss(mm)(x, w), None), 0.0, ws, length=3)[0]
    close(jax.grad(scanned)(X), sum(want(0, X, w) for w in each), 1e-4)


def test_statics_reach_the_rules(mm):
    got = jax.grad(lambda x: jnp.sum(jnp.sin(mm(x, QW, gain=3.0))))(X)
    close(got, want(0, X, QW, 3.0), 1e-4)


@pytest.mark.parametrize("rule", [with_jvp, with_lin])
def test_forward_mode_by_the_rule(rule):
    mm = make()
    rule(mm)
    tangents = (jnp.ones_like(X), jnp.ones_like(W))
    _, got = jax.jvp(mm, (X, QW), tangents)
    close(got, 10 * (tangents[0] @ dense(QW) + X @ tangents[1]), 1e-4)
    _, push = jax.linearize(mm, X, QW)
    close(push(*tangents), got)
    close(jax.jacfwd(mm)(X, QW), 10 * jax.jacfwd(jnp.matmul)(X, dense(QW)), 1e-4)


def test_forward_mode_with_a_reverse_rule_only_names_def_jvp():
    mm = make()
    with_vjp(mm)
    forward = [
        lambda: jax.jvp(loss(mm), (X, QW), (X, W)),
        lambda: jax.jit(lambda x: jax.jvp(lambda x: mm(x, QW), (x,), (x,)))(X),
        lambda: jax.jacfwd(mm)(X, QW),
        lambda: jax.vmap(lambda x: jax.jvp(lambda x: mm(x, QW), (x,), (x,)))(jnp.stack([X, X])),
    ]
    for f in forward:
        with pytest.raises((TypeError, NotImplementedError), match=r"mm has a reverse-mode rule only.*mm\.def_jvp"):
            f()
    with_jvp(mm)
    close(jax.jvp(mm, (X, QW), (X, W))[1], 10 * (X @ dense(QW) + X @ W), 1e-4)


def test_a_componentwise_result_from_a_dense_value_by_def_jvp():
    @typax.op(reference=None)
    def split(q: QArray):
        d = dense(q)
        return Factors(d, jnp.eye(3))

    with pytest.raises(NotImplementedError, match=r"split\.def_jvp"):
        jax.grad(lambda q: jnp.sum(dense(split(q))))(quantize(X))

    @split.def_jvp
    def _(primals, tangents):
        (q,), (t,) = primals, tangents
        out = split(q)
        tangent_type = jax.typeof(out).to_tangent_aval()
        return out, tangent_type.decl.cls.from_components(t, jnp.zeros((3, 3)))

    close(jax.grad(lambda q: jnp.sum(dense(split(q)) * X))(quantize(X)), X)


def test_transposition():
    flip = typax.op(lambda x, q: x, name="flip")

    @flip.impl
    def _(x: Float[Array, "*b n"], q: QArray):
        return x

    @flip.def_transpose
    def _(ct, x, q):
        assert x is None and q is not None
        return 7 * ct, None

    (got,) = jax.linear_transpose(lambda x: flip(x, quantize(X)), X)(X)
    close(got, 7 * X)


def test_batching():
    calls = []

    @typax.op(reference=lambda x: x)
    def rows(x: Float[Array, "*b n"]):
        return quantize(x)

    @rows.def_batch
    def _(axis_size, in_axes, x):
        calls.append((axis_size, in_axes))
        return rows(jnp.moveaxis(x, in_axes[0], 0)), 0

    got = jax.vmap(rows, in_axes=1)(jnp.stack([X, X + 1, X + 2], axis=1))
    assert calls == [(3, (1,))] and str(jax.typeof(got)) == "q8[3,2,3]"
    close(dense(got), dense(quantize(jnp.stack([X, X + 1, X + 2]))))

    @rows.def_batch
    def _(axis_size, in_axes, x):
        return rows(x[0]), 0

    with pytest.raises(TypeError, match=r"rows\.def_batch: the mapped result must be of type q8\[3,2,3\], got q8\[2,3\]"):
        jax.vmap(rows)(jnp.stack([X, X + 1, X + 2]))


def test_dead_code():
    ran = []

    @typax.op(reference=jnp.sum)
    def total(x: Float[Array, "*b n"]):
        return jnp.sum(x)

    @typax.op(reference=lambda x, y: (jnp.sum(x), y))
    def both(x: Float[Array, "*b n"], y: Float[Array, "*b n"]):
        return jnp.sum(x), quantize(y)

    @both.def_dce
    def _(used):
        ran.append(used)
        return (total, (True, False)) if used == (True, False) else None

    # partial evaluation drops what is not used: here of the body of a scan
    def f(x):
        return jax.lax.scan(lambda c, _: (c + both(x, x)[0], None), 0.0, None, length=3)[0]

    close(jax.jit(jax.grad(f))(X), 3 * jnp.ones_like(X))
    jaxpr = jax.make_jaxpr(lambda x: both(x, x)[0])(X)
    from jax.interpreters.partial_eval import dce_jaxpr

    small, used = dce_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), [True])
    assert (True, False) in ran and "total" in str(small) and "both" not in str(small) and list(used) == [True]


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this JAX has no checkpoint that asks for the rule")
def test_what_a_checkpoint_keeps():
    ran = []

    @typax.op(reference=jnp.sin)
    def wave(x: Float[Array, "*b n"]):
        return jnp.sin(x)

    def forward(x):
        ran.append("forward")
        return wave(x), jnp.sum(x)

    def again(kept, x):
        ran.append("again")
        return wave(x)

    wave.def_remat(forward, again)
    f = lambda x: jnp.sum(jnp.cos(wave(x)))
    want = jax.grad(lambda x: jnp.sum(jnp.cos(jnp.sin(x))))(X)
    close(jax.grad(jax.checkpoint(f))(X), want)
    assert not ran
    jax.config.update("jax_remat3", True)
    try:
        close(jax.grad(jax.checkpoint(f))(X), want)
    finally:
        jax.config.update("jax_remat3", False)
    assert ran == ["forward", "again"]


def test_mistakes_in_rules():
    with pytest.raises(TypeError, match=r"mm\.def_vjp takes 2 functions"):
        make().def_vjp(lambda *a: None)
    bad = make()
    bad.def_jvp(lambda primals, tangents, *, gain: matmul(*primals))
    with pytest.raises(TypeError, match=r"mm\.def_jvp: the rule returns a pair"):
        jax.jvp(bad, (X, QW), (X, W))
    bad.def_jvp(lambda primals, tangents, *, gain: (matmul(*primals), jnp.ones(3)))
    with pytest.raises(TypeError, match=r"mm\.def_jvp: the tangent of the result must be of type .*float32\[2,4\]"):
        jax.jvp(bad, (X, QW), (X, W))
    bad = make()
    bad.def_vjp(lambda nz, x, w, *, gain: (matmul(x, w), ()), lambda res, ct, *, gain: (ct, ct))
    with pytest.raises(TypeError, match=r"mm\.def_vjp: the cotangent of an operand of type .*float32\[2,3\]"):
        jax.grad(loss(bad))(X, QW)
    bad.def_vjp(lambda nz, x, w, *, gain: (matmul(x, w), ()), lambda res, ct, *, gain: (ct,))
    with pytest.raises(TypeError, match=r"mm\.def_vjp: one cotangent for each operand"):
        jax.grad(loss(bad))(X, QW)


def test_rules_hold_for_arrays_too():
    both = typax.op(jnp.sin, name="both")
    both.def_jvp(lambda p, t: (both(*p), 5 * t[0]))
    close(jax.grad(both)(1.0), 5.0)
    close(jax.jit(jax.vmap(jax.grad(both)))(X[0]), jnp.full(3, 5.0))
    mixed = typax.op(jnp.multiply, name="mixed")

    @mixed.impl
    def _(x: Float[Array, "*b n"], y: QArray):
        return x * dense(y)

    mixed.def_vjp(lambda nz, x, y: (mixed(x, y), ()), lambda res, g: (100 * g, None))
    for y in (quantize(X), X):
        close(jax.grad(lambda x, y=y: jnp.sum(mixed(x, y)))(X), jnp.full(X.shape, 100.0))
