"""Tuples and records as values, against plain tuples under the same transformations."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import X, close
from jaxtyping import Array, Float, Int32

import typax
from typax import Axes, LowRank, QArray, Tup, Value, dense, matmul, quantize, tup

pytestmark = pytest.mark.core

Q = quantize(X)
LOW = LowRank(jnp.sin(jnp.arange(6.0)).reshape(3, 2), jnp.cos(jnp.arange(8.0)).reshape(2, 4))
WRAPS = [lambda f: f, jax.jit, jax.checkpoint]
wraps = pytest.mark.parametrize("wrap", WRAPS, ids=["eager", "jit", "checkpoint"])


class State(Value):
    """A record: named fields, one of them of any class, one an integer, one a tuple."""

    weights: QArray | LowRank
    bias: Float[Array, "n"]
    step: Int32[Array, ""]
    rest: Tup
    label: str = "adam"


def state(weights=Q):
    return State(weights, X[0], jnp.int32(7), tup(X, tup(1.0, Q)))


def test_the_values_that_the_guide_to_hijax_prints():
    t = tup(jnp.arange(3.0), 5.0)
    assert str(jax.typeof(t)) == "Tup{float32[3],float32[]}" and float(t[1]) == 5.0
    nested = tup(tup(1.0, 2.0), jnp.arange(2.0))
    assert str(jax.typeof(nested)) == "Tup{Tup{float32[],float32[]},float32[2]}"
    assert jax.jit(lambda t: t[0][1])(nested) == 2.0
    assert str(jax.typeof(tup(Q, 3.0))) == "Tup{q8[2,3],float32[]}"
    swap = jax.vmap(lambda t: tup(t[1], t[0]), in_axes=Axes(0, None), out_axes=Axes(None, 0), axis_size=3)
    for f in (swap, jax.jit(swap)):
        out = f(t)
        assert str(jax.typeof(out)) == "Tup{float32[],float32[3]}"
        close(out[1], t[0])
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        rows = jax.device_put(jnp.zeros((8, 3)), jax.P("i"))
        assert str(jax.typeof(tup(rows, jnp.float32(1)))) == "Tup{float32[8@i,3],float32[]}"


@wraps
def test_a_tuple_is_read_as_tuples_are(wrap):
    t = tup(jnp.arange(3.0), Q, tup(1.0), jnp.int32(4))

    def read(t):
        first, q, (one,), four = t
        assert len(t) == 4 and isinstance(t, Tup) and isinstance(t[2], Tup) and isinstance(q, QArray)
        assert len(t[1:3]) == 2 and len(t[:0]) == 0 and len([*t]) == 4
        with pytest.raises(IndexError):
            t[4]
        return first + t[-4] + dense(t[1:3][0]).sum() + one + four.astype(jnp.float32)

    close(wrap(read)(t), 2 * jnp.arange(3.0) + dense(Q).sum() + 5)
    assert str(jax.typeof(tup())) == "Tup{}" and jax.typeof(jax.jit(lambda t: t)(tup())) == jax.typeof(tup())
    assert str(jax.typeof(wrap(lambda t: tup(*t[::-1]))(tup(1.0, Q)))) == "Tup{q8[2,3],float32[]}"


@wraps
def test_records_with_named_fields(wrap):
    s = state()
    text = "state{weights:q8[2,3],bias:float32[3],step:int32[],rest:Tup{float32[2,3],Tup{float32[],q8[2,3]}}}"
    assert str(jax.typeof(s)) == text and s.label == "adam" and s.step == 7
    assert str(jax.typeof(state(LOW))).startswith("state{weights:lr[3,4],")

    def f(s):
        weights, bias, _, rest = s.components()
        return jnp.sum((bias @ dense(weights).T) ** 2) * rest[1][0] + jnp.sum(dense(rest[1][1])) + jnp.sum(rest[0] ** 3)

    g = wrap(jax.grad(f))(s)
    plain = lambda w, b, x, one, q: jnp.sum((b @ w.T) ** 2) * one + jnp.sum(q) + jnp.sum(x**3)
    want = jax.grad(plain, range(5))(dense(Q), X[0], X, jnp.float32(1), dense(Q))
    for a, b in zip((g.weights, g.bias, g.rest[0], g.rest[1][0], g.rest[1][1]), want, strict=True):
        close(a, b, 1e-4)
    assert g.step.dtype == jax.dtypes.float0
    moved = typax.retract(s, g)
    assert isinstance(moved, State) and moved.step == 7 and isinstance(moved.rest[1][1], QArray) and moved.label == "adam"


def test_derivatives_of_tuples():
    t = tup(LOW, X, jnp.arange(3))
    f = lambda t: jnp.sum(jnp.sin(matmul(t[1], t[0])))
    plain = lambda u, v, x: jnp.sum(jnp.sin(x @ (u @ v)))
    primal = (LOW.left, LOW.right, X)
    g = jax.grad(f)(t)
    assert str(jax.typeof(g)) == "Tup{lr.tangent{left:float32[3,2],right:float32[2,4]},float32[2,3],float0[3]}"
    want = jax.grad(plain, (0, 1, 2))(*primal)
    for a, b in zip((g[0].left, g[0].right, g[1]), want, strict=True):
        close(a, b)
    _, dot = jax.jvp(f, (t,), (g,))
    close(dot, jax.jvp(plain, primal, want)[1], 1e-4)
    _, hvp = jax.jvp(jax.grad(f), (t,), (g,))
    _, want_hvp = jax.jvp(jax.grad(plain, (0, 1, 2)), primal, want)
    for a, b in zip((hvp[0].left, hvp[0].right, hvp[1]), want_hvp, strict=True):
        close(a, b, 1e-3)
    made = jax.grad(lambda x: jnp.sum(dense(tup(quantize(x), x)[0]) ** 2) + jnp.sum(tup(x, x)[1]))(X)
    close(made, 2 * dense(Q) + 1)


@pytest.mark.parametrize("spec", [0, Axes(0, None), Axes(None, 0), Axes(0, Axes(0, None, 0))])
def test_elements_are_mapped_each_by_its_own_spec(spec):
    stack = lambda x: jnp.stack([x, 2 * x, 3 * x])
    inner = lambda axis: tup(*(stack(e) if a == 0 else e for e, a in zip((X, X[0], X[1]), axis, strict=True)))
    axes = {0: (0, (0, 0, 0)), Axes(0, None): (0, (None,) * 3), Axes(None, 0): (None, (0,) * 3)}.get(spec, (0, (0, None, 0)))
    first = stack(X) if axes[0] == 0 else X
    t = tup(jax.vmap(quantize)(first) if axes[0] == 0 else quantize(first), inner(axes[1]))
    f = lambda q, a, b, c: jnp.sin(q).sum() * a.sum() + (b * c).sum()
    got = jax.vmap(lambda t: f(dense(t[0]), *t[1]), in_axes=(spec,), axis_size=3)(t)
    plain = jax.vmap(f, (axes[0], *axes[1]), axis_size=3)(dense(t[0]), *t[1])
    close(got, plain, 1e-4)
    g = jax.vmap(jax.grad(lambda t: f(dense(t[0]), *t[1])), in_axes=(spec,), axis_size=3)(t)
    want = jax.vmap(jax.grad(f, range(4)), (axes[0], *axes[1]), axis_size=3)(dense(t[0]), *t[1])
    for a, b in zip((g[0], *g[1]), want, strict=True):
        close(a, b, 1e-4)


def test_carries_and_results_of_loops():
    xs = tup(jax.vmap(quantize)(jnp.stack([X, -X, 2 * X])), jnp.arange(3.0))

    def step(c, x):
        total, low, n = c
        new = tup(total + dense(x[0]) * x[1], low, n + 1)
        return new, tup(x[0], tup(total.sum(), n))

    c, ys = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs, length=3))(tup(X, LOW, jnp.int32(0)), xs)
    want = [X]
    for q, k in zip(dense(xs[0]), range(3), strict=True):
        want.append(want[-1] + q * k)
    close(c[0], want[-1])
    assert int(c[2]) == 3 and str(jax.typeof(ys)) == "Tup{q8[3,2,3],Tup{float32[3],int32[3]}}"
    close(ys[1][0], [w.sum() for w in want[:3]])

    loss = lambda c, xs: jnp.sum(jax.lax.scan(step, c, xs, length=3)[0][0] ** 2)
    g = jax.grad(loss, (0, 1))(tup(X, LOW, jnp.int32(0)), xs)
    close(g[0][0], 2 * want[-1])
    close(g[1][0], jnp.arange(3.0)[:, None, None] * 2 * want[-1])
    close(g[1][1], [(2 * want[-1] * q).sum() for q in dense(xs[0])])
    out = jax.lax.while_loop(lambda t: t[0] < 3, lambda t: tup(t[0] + 1, t[1]), tup(jnp.int32(0), Q))
    assert int(out[0]) == 3
    swapped = jax.jit(lambda p, t: jax.lax.cond(p, lambda t: tup(t[1], t[0]), lambda t: tup(t[0], t[1]), t))(
        True, tup(1.0, 2.0)
    )
    assert float(swapped[0]) == 2.0


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_elements_are_partitioned_each_by_its_own_spec(kind):
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(kind,))):
        rows = jax.device_put(jnp.arange(24.0).reshape(8, 3), jax.P("i"))
        t = tup(rows, quantize(rows), jnp.float32(2), tup(LOW))
        spec = Tup.P(jax.P("i"), QArray.P("i"), jax.P(), Tup.P(LowRank.P()))
        body = lambda t: tup(t[0] * t[2], matmul(dense(t[1]), t[3][0]))
        f = jax.shard_map(body, in_specs=spec, out_specs=Tup.P(jax.P("i"), jax.P("i")))
        out = jax.jit(f)(t)
        close(out[0], 2 * np.arange(24.0).reshape(8, 3))
        close(out[1], np.asarray(dense(t[1])) @ np.asarray(dense(LOW)), 1e-4)
        g = jax.jit(jax.grad(lambda t: jnp.sum(f(t)[0]) + jnp.sum(f(t)[1])))(t)
        close(g[2], np.arange(24.0).sum())
        close(g[1], np.ones((8, 4)) @ np.asarray(dense(LOW)).T, 1e-4)
        assert str(jax.typeof(g[3])) == "Tup{lr.tangent{left:float32[3,2],right:float32[2,4]}}"


def test_the_rest():
    t = tup(X, Q, tup(1.0))
    assert Tup.type(*map(jax.typeof, t)) == jax.typeof(t) and hash(jax.typeof(t)) == hash(jax.typeof(tup(X, Q, tup(1.0))))
    for again in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        assert jax.typeof(again) == jax.typeof(t)
        close(again[0], X)
    stands_for = dense(t)
    close(jax.tree.leaves(stands_for)[1], dense(Q))
    assert len(jax.tree.leaves({"a": t})) == 1
    with pytest.raises(TypeError, match=r"Tup: component elts.* got str|Tup.*str"):
        tup("a")
    with pytest.raises(TypeError, match=r"State: component weights: .* does not admit float32\[2,3\]"):
        State(X, X[0], jnp.int32(7), tup())
