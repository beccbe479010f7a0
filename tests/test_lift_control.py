"""Loops, branches, nested calls and custom derivatives on hi values: the dense array is the oracle."""

import re

import jax
import jax.numpy as jnp
import pytest
from _models import as_dense
from _util import close
from jax import lax
from test_lift import same

import typax
from typax import Receipt, dense, lift, quantize

pytestmark = pytest.mark.core

L = quantize(jnp.sin(jnp.arange(48.0)).reshape(3, 4, 4))  # three layers
M = quantize(jnp.cos(jnp.arange(16.0)).reshape(4, 4))
X = jnp.sin(jnp.arange(8.0)).reshape(2, 4)


@jax.custom_jvp
def doubled(x, w):
    return x @ w


doubled.defjvp(lambda p, t: (doubled(*p), 2 * (t[0] @ p[1] + p[0] @ t[1])))  # not its derivative: to be told apart


@jax.custom_vjp
def tripled(x, w):
    return x @ w


tripled.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (3 * (g @ r[1].T), 3 * (r[0].T @ g)))


def while_loop(x, w):
    return lax.while_loop(lambda c: jnp.sum(c[1] @ w) * 0 + c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


PROGRAMS = {
    "scan over layers": lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c @ w.T)), x, w),
    "scan backwards": lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w, reverse=True)[0],
    "scan of checkpointed layers": lambda x, w: lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, w)[0],
    "scan with a constant": lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w[1]), None), x, None, length=3)[0],
    "scan of scans": lambda x, w: lax.scan(
        lambda c, _: (lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, w)[0], None), x, None, length=2
    )[0],
    "scan that keeps layers": lambda x, w: lax.scan(lambda c, w: (c, (w.T, c @ w)), x, w)[1],
    "fori_loop": lambda x, w: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w[i]), x),
    "map": lambda x, w: lax.map(lambda w: x @ w, w),
    "hi carry": lambda x, w: lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, w[0]), None, length=2)[0],
    "cond": lambda x, w: lax.cond(x[0, 1] > 0, lambda x, w: jnp.tanh(x @ w[0]), lambda x, w: x @ w[1].T, x, w),
    "cond that returns a weight": lambda x, w: x @ lax.cond(x[0, 1] > 0, lambda w: w[0], lambda w: w[1], w),
    "switch": lambda x, w: lax.switch(jnp.int32(1), [lambda w: x @ w[0], lambda w: x @ w[1].T, lambda w: x + 1], w),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x, w: jnp.tanh(x @ w[0]) @ w[1])(x, w),
    "checkpoint with a policy": lambda x, w: jax.checkpoint(
        lambda x, w: jnp.tanh(x @ w[0]) @ w[1], policy=jax.checkpoint_policies.dots_saveable
    )(x, w),
    "jit": lambda x, w: jax.jit(lambda x, w: jax.jit(jnp.matmul)(x, w[0]) @ w[1])(x, w),
    "custom_jvp": lambda x, w: doubled(x, w[0]),
    "custom_jvp in a scan": lambda x, w: lax.scan(lambda c, w: (doubled(c, w), None), x, w)[0],
    "custom_jvp in a branch": lambda x, w: lax.cond(x[0, 1] > 0, doubled, lambda x, w: x, x, w[0]),
    "closed call": lambda x, w: jax.jit(lambda x, w: x @ w[2]).trace(x, w)(x, w),
}


STAY_HI = ("scan that keeps layers", "hi carry")  # results are hi values


@pytest.mark.parametrize("name", PROGRAMS)
def test_natively_and_as_on_arrays(name):
    def f(x, w):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(as_dense(PROGRAMS[name](x, w))))

    outs = lift(PROGRAMS[name], "error")(X, L)
    jax.tree.map(lambda a, b: close(dense(a), b), outs, PROGRAMS[name](X, dense(L)))
    if name in STAY_HI:
        assert any(isinstance(x, typax.Value) for x in jax.tree.leaves(outs))
    else:
        same(f, X, L)


@pytest.mark.parametrize(
    "how",
    [
        {"axis": None},
        {"axis": (0, 1)},
        {"format": "nf4", "axis": (0, 2)},
        {"format": "int4", "axis": (0, 2), "zero_point": True},
    ],
)
def test_layers_that_share_scales_are_each_given_theirs(how):
    layers = quantize(dense(L), **how)
    f = lambda w, x: PROGRAMS["scan over layers"](x, w)[0]
    same(f, layers, X)
    natives = typax.explain(f)(layers, X).natives
    assert [line.split("(")[0] for line in natives] == ["dot_general", "transpose", "dot_general"]


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in STAY_HI])
def test_mapped_after_lifting(name):
    f = PROGRAMS[name]
    xs = jnp.stack([X, -X, 2 * X])
    want = jax.vmap(f, (0, None))(xs, dense(L))
    jax.tree.map(close, jax.vmap(lift(f, "error"), (0, None))(xs, L), want)
    jax.tree.map(close, jax.jit(jax.vmap(lift(f, "error"), (0, None)))(xs, L), want)

    def total(f):
        return lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(x, w)))

    got = jax.vmap(jax.grad(total(lift(f)), (0, 1)), (0, None))(xs, L)
    jax.tree.map(close, got, jax.vmap(jax.grad(total(f), (0, 1)), (0, None))(xs, dense(L)))


@pytest.mark.parametrize("axis", [0, 1])
def test_stacks_of_layers_mapped_after_lifting(axis):
    stacks = quantize(
        jnp.sin(jnp.arange(96.0)).reshape(3, 2, 4, 4) if axis else jnp.sin(jnp.arange(96.0)).reshape(2, 3, 4, 4)
    )
    xs = jnp.stack([X, -X])
    for name in ("scan over layers", "scan with a constant", "cond", "checkpoint", "custom_jvp in a scan", "jit"):
        f = PROGRAMS[name]
        got = jax.vmap(lift(f, "error"), (0, axis))(xs, stacks)
        jax.tree.map(close, got, jax.vmap(f, (0, axis))(xs, dense(stacks)))


def test_a_batched_predicate_runs_both_branches():
    f = PROGRAMS["cond"]
    xs = jnp.stack([X, -X])  # the predicate differs
    close(jax.vmap(lift(f, "error"), (0, None))(xs, L), jax.vmap(f, (0, None))(xs, dense(L)))


def test_while_and_its_forward_derivative():
    f = while_loop
    for run in (lift(f, "error"), jax.jit(lift(f, "error"))):
        close(run(X, M), f(X, dense(M)))
    got = jax.jvp(lambda x: lift(f, "error")(x, M), (X,), (jnp.cos(X),))
    jax.tree.map(close, got, jax.jvp(lambda x: f(x, dense(M)), (X,), (jnp.cos(X),)))
    xs = jnp.stack([X, -X])
    close(jax.vmap(lift(f, "error"), (0, None))(xs, M), jax.vmap(f, (0, None))(xs, dense(M)))
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax\.while_loop"):
        jax.grad(lambda x: jnp.sum(lift(f)(x, M)))(X)


@pytest.mark.parametrize("place", ["alone", "in a scan", "in a branch", "checkpointed", "mapped"])
def test_custom_vjp_keeps_its_rule(place):
    programs = {
        "alone": lambda x, w: tripled(x, w[0]),
        "in a scan": lambda x, w: lax.scan(lambda c, w: (tripled(c, w), None), x, w)[0],
        "in a branch": lambda x, w: lax.cond(x[0, 1] > 0, tripled, lambda x, w: x, x, w[0]),
        "checkpointed": lambda x, w: jax.checkpoint(tripled)(x, w[0]),
        "mapped": lambda x, w: jax.vmap(tripled, (None, 0))(x, w),
    }
    f = programs[place]
    close(lift(f, "error")(X, L), f(X, dense(L)))
    for wrap in (lambda g: g, jax.jit):
        got = wrap(jax.grad(lambda x, w: jnp.sum(jnp.sin(lift(f)(x, w))), (0, 1)))(X, L)
        jax.tree.map(close, got, jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))(X, dense(L)))


@jax.custom_vjp
def reversed_gradient(w):
    return w


reversed_gradient.defvjp(lambda w: (w, None), lambda _, g: (-g,))

RULES = {
    "custom_jvp": lambda w: doubled(X, w),
    "custom_vjp": lambda w: tripled(X, w),
    "of what it returns": lambda w: X @ reversed_gradient(w.T).T,
    "in a scan": lambda w: lax.scan(lambda c, _: (tripled(c, reversed_gradient(w)), None), X, None, length=2)[0],
    "in a branch": lambda w: lax.cond(X[0, 1] > 0, lambda w: tripled(X, w), lambda w: X, w),
    "of JAX": jax.nn.relu,  # at zeros, where the rule has no slope
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_holds_where_tangents_have_components(name):
    f = RULES[name]
    factors = typax.outer(jnp.zeros((4, 1)) if name == "of JAX" else X.T, X[:1] if name == "of JAX" else X)
    for w in (factors, typax.Sum(jnp.zeros_like(M) if name == "of JAX" else M, factors, scale=0.5)):
        close(lift(f, "allow")(w), f(dense(w)))
        got = jax.jit(jax.grad(lambda w: jnp.sum(jnp.cos(lift(f, "allow")(w) + 1)), allow_int=True))(w)
        want = jax.grad(lambda w: jnp.sum(jnp.cos(f(dense(w)) + 1)), allow_int=True)(w)
        jax.tree.map(close, dense(got), dense(want))
        assert name != "of JAX" or not any(jnp.any(x) for x in jax.tree.leaves(dense(got)))


def test_a_value_whose_tangents_have_components_is_dense_after_a_rule():
    w = typax.outer(X.T, X)
    with pytest.warns(
        UserWarning, match=r"custom_vjp_call makes lr\[4,4\] dense \(64 bytes\) at the end of a function with its"
    ):
        assert jnp.shape(lift(reversed_gradient)(w)) == (4, 4)
    assert isinstance(lift(reversed_gradient, "error")(M), typax.QArray)


def test_programs_that_differentiate():
    def step(x, w):
        loss = lambda x, w: jnp.sum(lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, w)[0] ** 2)
        return jax.grad(loss)(x, w)

    close(lift(step, "error")(X, L), step(X, dense(L)))
    close(jax.jit(lift(step, "error"))(X, L), step(X, dense(L)))


UNSETTLED = {
    "a carry that comes back dense": (
        lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c), None), w, None, length=2)[0],
        r"scan makes q8\[3,4,4\] dense \(192 bytes\) before the loop, whose body gives float32\[3,4,4\]",
    ),
    "a while carry": (
        lambda x, w: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, w))[1],
        r"while makes q8\[3,4,4\] dense \(192 bytes\) before the loop",
    ),
    "two carries that change places": (
        lambda x, w: lax.scan(lambda c, _: ((c[1], c[0]), None), (w[0], w[1] + 1), None, length=1)[0][0],
        r"scan makes q8\[4,4\] dense \(64 bytes\) before the loop",
    ),
    "a carry that becomes hi": (
        lambda x, w: lax.scan(lambda c, w: (w, None), w[0] * jnp.arange(16.0).reshape(4, 4), w)[0],
        r"scan makes q8\[4,4\] dense \(64 bytes\) at the end of the body, since the carry is an array",
    ),
    "branches that differ": (
        lambda x, w: lax.cond(x[0, 1] > 0, lambda w: w[0], lambda w: w[1] + 1, w),
        r"cond makes q8\[4,4\] dense \(64 bytes\) at the end of a branch",
    ),
    "sliced along named axes": (
        lambda x, w: lax.scan(lambda c, w: (c + w, None), x[0], w[0].T)[0],
        r"scan makes q8t\[4,4\] dense \(64 bytes\) since its leading axis cannot be sliced",
    ),
}


@pytest.mark.parametrize("name", UNSETTLED)
def test_what_becomes_dense_and_where(name):
    f, line = UNSETTLED[name]
    receipt = Receipt()
    for run in (lift(f, "allow", receipt), jax.jit(lift(f, "allow", receipt))):
        close(run(X, L), f(X, dense(L)))
        assert any(re.match(line, r) for r in receipt.densified), receipt.densified
    with pytest.raises(TypeError, match=r"makes q8"):
        lift(f, "error")(X, L)


def test_inner_programs_are_lifted_once_and_always_told():
    traces = []

    @typax.op(reference=lambda x: x)
    def seen(x: jax.Array):
        traces.append(0)
        return x

    inner = jax.jit(lambda x, w: jnp.exp(seen(x) @ w) + jnp.sum(jnp.exp(w)))
    receipts = [Receipt(), Receipt()]
    for receipt in receipts:
        f = lift(lambda x, w: inner(inner(x, w), w), "allow", receipt)
        for _ in range(3):
            f(X, M)
        with jax.no_tracing():
            f(X, M)
        assert len(receipt.densified) == 2 and len(receipt.natives) == 2
    assert str(jax.make_jaxpr(f)(X, M)).count("name=<lambda>") == 2 and len(set(map(str, receipts))) == 1


def test_a_scanned_transformer_runs_on_int8_weights():
    d, heads, n, layers = 8, 2, 5, 3
    key = jax.random.key(0)
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    w = {k: jax.random.normal(jax.random.fold_in(key, i), (layers, *s)) / 3 for i, (k, s) in enumerate(shapes.items())}
    norms = jnp.ones((layers, 2, d))

    def norm(x, g):
        return g * (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def block(x, layer):
        w, g = layer
        q, k, v = jnp.moveaxis((norm(x, g[0]) @ w["qkv"]).reshape(n, 3, heads, d // heads), 1, 0)
        a = jax.nn.softmax(jnp.einsum("nhd,mhd->hnm", q, k) / 2.0, axis=-1)
        x = x + jnp.einsum("hnm,mhd->nhd", a, v).reshape(n, d) @ w["out"]
        return x + jax.nn.gelu(norm(x, g[1]) @ w["up"]) @ w["down"], jnp.mean(x)

    def model(params, norms, tokens):
        x = jnp.take(params["table"], tokens, axis=0)
        x, means = lax.scan(block, x, (params["w"], norms))
        return x @ params["table"].T, means

    params = {"table": jax.random.normal(key, (11, d)), "w": w}
    hi, tokens, receipt = jax.tree.map(quantize, params), jnp.arange(n), Receipt()
    plain = as_dense(hi)
    jax.tree.map(
        lambda a, b: close(a, b, 1e-4), lift(model, "error", receipt)(hi, norms, tokens), model(plain, norms, tokens)
    )
    products = [line for line in receipt.natives if line.startswith("dot_general")]
    assert len(products) == 5 and not receipt.densified
    batch = jnp.stack([tokens, tokens[::-1]])
    got = jax.jit(jax.vmap(lift(model, "error"), (None, None, 0)))(hi, norms, batch)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), got, jax.vmap(model, (None, None, 0))(plain, norms, batch))

    def loss(model):
        return lambda p, g: jnp.mean(jax.nn.logsumexp(model(p, g, tokens)[0], axis=-1))

    got = jax.jit(jax.grad(loss(lift(model, "error")), (0, 1)))(hi, norms)
    want = jax.grad(loss(model), (0, 1))(plain, norms)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), got, want)
