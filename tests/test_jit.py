"""`typax.jit`: what `jax.jit` gives, through each way of calling; for arrays, and under a trace, it is `jax.jit`."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float32

import typax
from typax import _jax
from typax.tup import Tup, tup

pytestmark = pytest.mark.core

x = jnp.sin(jnp.arange(12.0)).reshape(3, 4)
q = typax.quantize(jnp.cos(jnp.arange(32.0)).reshape(4, 8))


@pytest.fixture(params=["in C++", "in Python"])
def jit(request, monkeypatch):
    """`typax.jit` by each of its ways."""
    assert _jax.call_path is not None, "JAX has other names than `_jax.call_path` knows: calls are slow"
    if request.param == "in Python":
        monkeypatch.setattr(_jax, "call_path", None)
    return typax.jit


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for v, w in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jax.typeof(v) == jax.typeof(w)
        los = zip(jax.typeof(v).lower_val(v), jax.typeof(w).lower_val(w), strict=True)
        assert all(np.array_equal(c, d) for c, d in los)


def test_it_gives_what_jax_gives_and_traces_once(jit):
    traced = []

    def f(x, v, *, k=1.0):
        traced.append(1)
        return {"y": typax.matmul(x, v["w"]) * k, "w": v["w"], "t": tup(v["w"], tup(), v["n"]), "none": None}

    v = {"w": q, "n": tup(x, tup(q)), "e": tup()}
    want = jax.jit(f)(x, v, k=2.0)
    g = jit(f)
    n = len(traced)
    for _ in range(3):
        same(g(x, v, k=2.0), want)
    assert len(traced) <= n + 1
    same(g(x, v), jax.jit(f)(x, v))
    other = v | {"w": typax.quantize(jnp.ones((4, 2)))}
    same(g(x, other), jax.jit(f)(x, other))
    same(g(x, v, k=2.0), want)
    assert g.__wrapped__ is f and g.__name__ == "f"


def test_arguments(jit):
    def f(v, n, *, scale):
        return typax.quantize(typax.dense(v) * scale), n

    for options in ({"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": (-1,)}):
        g = jit(f, **options)
        (a, n), (b, _) = g(q, 2, scale=1.0), g(q, 3, scale=1.0)
        assert n == 2 and isinstance(n, jax.Array)
        same(a, b)
    assert jit(f, static_argnames=("n",))(q, n=5, scale=2.0)[1] == 5
    with pytest.raises(ValueError, match=r"[Nn]on-hashable"):
        jit(f, static_argnums=1)(q, [2], scale=1.0)
    for options, args, kwargs in (({"static_argnums": 1}, (2.0, q), {}), ({"static_argnames": "q"}, (2.0,), {"q": (q,)})):
        with pytest.raises(TypeError, match=r"a value of type q8.* is no static argument"):
            jit(lambda x, q: x, **options)(*args, **kwargs)

    class Layer:
        @jit
        def __call__(self, v):
            return typax.dense(v) + self.bias

        def __init__(self):
            self.bias = 1.0

    jax.tree_util.register_static(Layer)
    np.testing.assert_allclose(Layer()(q), typax.dense(q) + 1.0)
    partial = jit(functools.partial(f, scale=3.0))
    np.testing.assert_allclose(typax.dense(partial(q, 1)[0]), typax.dense(q) * 3.0, atol=0.05)
    np.testing.assert_allclose(jit(keep_unused=True)(lambda a, b: typax.dense(a))(q, 1), typax.dense(q))
    closed = jit(lambda y: (typax.matmul(y, q), q))
    same(closed(x), jax.jit(lambda y: (typax.matmul(y, q), q))(x))
    with pytest.raises(TypeError, match="unexpected keyword"):
        jit(f, donate=1)


def test_donation_gives_up_the_components(jit):
    f = jit(lambda v, w: typax.quantize(typax.dense(v) + 1), donate_argnums=0, keep_unused=True)
    for _ in range(2):
        mine, kept = typax.quantize(x), typax.quantize(x)
        f(mine, kept)
        assert all(c.is_deleted() for c in mine.components()[:2])
        assert not any(c.is_deleted() for c in kept.components()[:2])


def test_effects_happen_at_each_call(jit, capfd):
    def f(v):
        jax.debug.print("first {}", typax.dense(v)[0, 0], ordered=True)
        jax.debug.print("second {}", typax.dense(v)[0, 1], ordered=True)
        return v

    g = jit(f)
    for _ in range(3):
        same(g(q), q)
    jax.effects_barrier()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["first", "second"] * 3


def test_under_a_trace_it_is_jax_jit(jit):
    f = jit(lambda x, v: typax.matmul(x, v))
    loss = lambda x, v: (f(x, v) ** 2).sum()
    want = lambda x, v: (typax.matmul(x, v) ** 2).sum()
    f(x, q)
    for d in (0, 1):
        np.testing.assert_allclose(jax.grad(loss, d)(x, q), jax.grad(want, d)(x, q), rtol=1e-6)
        np.testing.assert_allclose(jit(jax.grad(loss, d))(x, q), jax.grad(want, d)(x, q), rtol=1e-6)
    _, t = jax.jvp(f, (x, q), (jnp.ones_like(x), jnp.ones(q.shape)))
    np.testing.assert_allclose(t, x @ jnp.ones(q.shape) + jnp.ones_like(x) @ typax.dense(q), rtol=1e-5)
    stack = jax.vmap(typax.quantize)(jnp.stack([jnp.ones((4, 8)), 2 * jnp.ones((4, 8))]))
    same(jax.vmap(f, (None, 0))(x, stack), jax.vmap(typax.matmul, (None, 0))(x, stack))
    assert "jit" in str(jax.make_jaxpr(lambda x, v: f(x, v) + 1)(x, q))
    with jax.disable_jit():
        same(f(x, q), typax.matmul(x, q))


def test_ahead_of_time(jit):
    into, out_of, both = jit(typax.quantize), jit(typax.dense), jit(lambda v, y: (y, v))
    same(into.lower(x).compile()(x), jax.jit(typax.quantize)(x))
    same(into.trace(x).lower().compile()(x), jax.jit(typax.quantize)(x))
    compiled = both.lower(jax.typeof(q), x).compile()
    for _ in range(2):
        same(compiled(q, x), (x, q))
    same(out_of.lower(q).compile()(q), typax.dense(q))
    assert into.eval_shape(x) == jax.eval_shape(typax.quantize, x) and "HloModule" in compiled.as_text()
    with pytest.raises(TypeError, match=r"compiled for q8\[4,8\] as argument 0, but called with q8\[2,8\]"):
        compiled(typax.quantize(jnp.ones((2, 8))), x)
    plain = jit(jnp.sin)
    assert isinstance(plain.lower(x), jax.stages.Lowered) and isinstance(plain.trace(x), jax.stages.Traced)


def test_contexts_are_part_of_what_is_remembered(jit):
    def f(v):
        traced.append(jax.config.jax_default_matmul_precision)
        return typax.dense(v) @ typax.dense(v).T

    traced = []
    g = jit(f)
    for _ in range(2):
        g(q)
        with jax.default_matmul_precision("bfloat16"):
            g(q)
    assert traced == [None, "bfloat16"]
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    g = jit(typax.quantize)
    g(jnp.ones((8, 4)))
    with jax.set_mesh(mesh):
        rows = jax.device_put(jnp.ones((8, 4)), jax.P("i"))
        assert str(jax.typeof(g(rows))) == str(jax.typeof(g(rows))) == "q8[8@i,4]"
    assert str(jax.typeof(g(jnp.ones((8, 4))))) == "q8[8,4]"


def test_nothing_is_kept_alive(jit):
    def f(v):
        return typax.quantize(typax.dense(v))

    g, mine = jit(f), typax.quantize(x)
    out = g(mine)
    refs = [weakref.ref(f), weakref.ref(mine), weakref.ref(out)]
    del f, g, mine, out
    gc.collect()
    assert [r() for r in refs] == [None] * 3


def test_errors_are_those_of_jax(jit):
    with pytest.raises(TypeError, match="8 entries meet 4"):
        jit(typax.matmul)(q, q)
    with pytest.raises(TypeError, match="not marked as static"):
        jit(lambda v, s: v)(q, "s")


def test_shardings(jit):
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    big = typax.quantize(jnp.cos(jnp.arange(64.0)).reshape(8, 8))
    rows, cols = (jax.sharding.NamedSharding(mesh, s) for s in (jax.P("i"), jax.P(None, "j")))
    specs = lambda v: [c.sharding.spec for c in v.components()[:2]]
    f = lambda v, y: (typax.quantize(typax.dense(v) + y), y)
    for _ in range(2):
        out, _ = jit(f, in_shardings=(rows, None), out_shardings=(rows, None))(big, 1.0)
        assert specs(out) == [jax.P("i"), jax.P("i")] or specs(out) == [jax.P("i", None), jax.P("i")]
    moved = jit(lambda v: v, out_shardings=cols)(big)
    assert moved.components()[0].sharding.is_equivalent_to(cols, 2) and moved.components()[1].sharding.is_fully_replicated
    np.testing.assert_array_equal(typax.dense(moved), typax.dense(big))
    with jax.set_mesh(mesh):
        g = jit(lambda v: v, in_shardings=typax.QArray.P("i"), out_shardings=(typax.QArray.P("i")))
        assert len(g(big).components()[0].sharding.device_set) == 8 and g(big).components()[1].sharding.spec == jax.P("i")
        np.testing.assert_array_equal(typax.dense(g.lower(big).compile()(big)), typax.dense(big))
        with pytest.raises(TypeError, match=r"in_shardings: QArray.P\('i'\) is for hi values, not for float32\[3,4\]"):
            g(x)
        with pytest.raises(TypeError, match=r"is partitioned by QArray.P\(...\), not by Tup.P"):
            jit(lambda v: v, in_shardings=(Tup.P(jax.P()),))(big)


def test_shardings_inside_a_program_are_constraints(jit):
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    big = typax.quantize(jnp.cos(jnp.arange(64.0)).reshape(8, 8))
    rows = jax.sharding.NamedSharding(mesh, jax.P("i"))
    f = jit(lambda v, n, y: (v, y * n), static_argnums=1, in_shardings=(rows, None), out_shardings=(rows, None))
    outer = jax.jit(lambda v, y: f(v, 2, y))
    v, y = outer(big, jnp.ones(3))
    assert v.components()[0].sharding.is_equivalent_to(rows, 2) and not v.components()[1].sharding.is_fully_replicated
    np.testing.assert_array_equal(typax.dense(v), typax.dense(big))
    np.testing.assert_array_equal(y, jnp.full(3, 2.0))
    g = jax.grad(lambda v: (typax.dense(f(v, 2, 1.0)[0]) ** 2).sum())(big)
    np.testing.assert_allclose(g, 2 * typax.dense(big), rtol=1e-6)
    arrays = jit(lambda y: 2 * y, in_shardings=rows)
    np.testing.assert_array_equal(jax.jit(arrays)(jnp.ones((8, 8))), jnp.full((8, 8), 2.0))


class Half(typax.Value):
    half: Float32[Array, "*batch n"]
    unit: int = 1

    def dense(self) -> Float32[Array, "*batch n"]:
        return 2 * self.half

    def moved(self, *, by: float = 0.0):
        return Half(self.half + by / 2, self.unit)

    @property
    def ends(self):
        return self.half[..., 0], self.half[..., -1]


class Held(Half, hitype=type("HeldType", (typax.ValueType,), {"lower_val": lambda self, v: [v.half]})):
    """Values that calls in C++ cannot open."""


def test_ops_by_each_way(jit):
    scaled = typax.op(lambda v, *, k=1.0: v * k, name="scaled")

    @scaled.impl
    def _(v: Half, *, k: float = 1.0):
        return Half(v.half * k, v.unit)

    h, held = Half(jnp.arange(4.0), unit=3), Held(jnp.arange(4.0))
    for k in (1.0, 2.0, 0.0, -0.0):
        for _ in range(2):
            got = scaled(h, k=k)
            same(got, Half(h.half * k, 3))
            assert np.array_equal(np.signbit(got.half), np.signbit(h.half * k)) and got.unit == 3
    same(scaled(h), h)
    np.testing.assert_array_equal(scaled(x, k=2.0), x * 2.0)
    with jax.disable_jit():
        same(scaled(h, k=2.0), Half(h.half * 2, 3))
    np.testing.assert_array_equal(jax.grad(lambda h: scaled(h, k=3.0).dense().sum())(h), jnp.full(4, 3.0))
    with pytest.raises(TypeError, match="scaled: keyword arguments are static and must be hashable"):
        scaled(h, k=[1.0])
    with pytest.raises(TypeError, match="scaled has no implementation for"):
        scaled(tup(x))
    with pytest.raises(TypeError, match="is not a value; static parameters go by keyword"):
        scaled(h, "k")
    for _ in range(2):
        same(scaled(held, k=2.0), Half(held.half * 2))
        same(jit(lambda v: v)(held), held)
        same(h.moved(by=1.0), Half(h.half + 0.5, 3))
        assert [float(e) for e in h.ends] == [0.0, 3.0] and [float(e) for e in held.ends] == [0.0, 3.0]

    @scaled.impl
    def _(v: Held, *, k: float = 1.0):
        return Half(v.half * k + 1)

    same(scaled(held, k=2.0), Half(held.half * 2 + 1))
