"""Every transformation on row-wise int8, against the dense array as the oracle."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import W, X, close
from jaxtyping import Array, Float

import typax
from typax import QArray, dense, hijax, matmul, quantize

pytestmark = pytest.mark.core


def double(q):
    return quantize(dense(q) * 2.0)


def loss(x, w):
    return jnp.sum(matmul(x, w) ** 2)


def plain_loss(x, w):
    return jnp.sum((x @ w) ** 2)


@pytest.fixture
def q():
    return quantize(X)


@pytest.fixture
def qw():
    return quantize(W)


def test_the_numbers_of_the_definition(q):
    np.testing.assert_array_equal(q.qvalue, [[42, 85, 127], [85, -106, 127]])
    close(q.scale, [0.02362205, 0.04724409], 1e-7)
    close(dense(q), [[0.992126, 2.007874, 3], [4.015748, -5.007874, 6]], 1e-6)
    gradient = jax.grad(lambda q: jnp.sum(dense(q) ** 2))(q)
    close(gradient, [[1.984252, 4.015748, 6], [8.031496, -10.015748, 12]], 1e-6)


def test_types_print_in_jaxprs(q):
    assert str(jax.typeof(q)) == "q8[2,3]"
    jaxpr = str(jax.make_jaxpr(lambda x: dense(quantize(x)))(X))
    assert "q8[2,3] = " in jaxpr and "quantize" in jaxpr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_stands_for_the_dtype_it_came_from(dtype):
    q = quantize(X.astype(dtype))
    assert dense(q).dtype == dtype and q.dtype == jnp.dtype(dtype)
    y = matmul(X.astype(dtype), quantize(W.astype(dtype)))
    assert y.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(4, 8), (64, 2048)])
def test_nan_and_inf_stay_in_their_row(bad, shape):
    x = jnp.ones(shape).at[1, 3].set(bad)
    for f in (quantize, jax.jit(quantize)):
        out = dense(f(x))
        assert jnp.isnan(out[1]).all()
        assert (jnp.delete(out, 1, axis=0) == 1).all()


def test_zero_rows_and_empty_arrays():
    assert (dense(quantize(jnp.zeros((3, 4)))) == 0).all()
    assert dense(quantize(jnp.zeros((0, 4)))).shape == (0, 4)
    assert dense(quantize(jnp.zeros((2, 0)))).shape == (2, 0)


def test_eager_jit_and_numpy_input_agree_bit_for_bit():
    x = np.random.default_rng(0).normal(size=(64, 96)).astype("float32")
    for other in (jax.jit(quantize)(x), quantize(jnp.asarray(x))):
        np.testing.assert_array_equal(quantize(x).qvalue, other.qvalue)
        np.testing.assert_array_equal(quantize(x).scale, other.scale)


def test_matmul_on_both_sides_and_batched(q, qw):
    close(matmul(X, qw), X @ dense(qw))
    close(matmul(q, W), dense(q) @ W)
    xs = jnp.stack([X, X + 1])
    close(matmul(xs, qw), xs @ dense(qw))


def test_jit_arguments_results_closures_and_donation(q, qw):
    close(dense(jax.jit(quantize)(X)), dense(q))
    close(jax.jit(matmul)(X, qw), X @ dense(qw))
    close(jax.jit(lambda x: matmul(x, qw))(X), X @ dense(qw))
    close(dense(jax.jit(double, donate_argnums=0)(quantize(X))), 2 * dense(q))


def test_grad_jvp_linearize(qw):
    dense_w = dense(qw)
    want = jax.grad(plain_loss, (0, 1))(X, dense_w)
    for f in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        jax.tree.map(close, f(X, qw), want)
    tangents = (jnp.ones_like(X), dense_w)
    jax.tree.map(close, jax.jvp(loss, (X, qw), tangents), jax.jvp(plain_loss, (X, dense_w), tangents))
    _, push = jax.linearize(loss, X, qw)
    close(push(*tangents), jax.jvp(plain_loss, (X, dense_w), tangents)[1])
    close(jax.grad(lambda x: jnp.sum(dense(quantize(x))))(X), jnp.ones_like(X))


def test_jacobians_and_hessian(qw):
    want = jax.jacrev(lambda x: x @ dense(qw))(X)
    close(jax.jacfwd(lambda x: matmul(x, qw))(X), want)
    close(jax.jacrev(lambda x: matmul(x, qw))(X), want)
    close(jax.hessian(loss)(X, qw), jax.hessian(plain_loss)(X, dense(qw)))


def test_checkpoint(qw):
    f = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(matmul(x, w))))
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(X, dense(qw))
    jax.tree.map(close, jax.grad(f, (0, 1))(X, qw), want)
    jax.tree.map(close, jax.jit(jax.grad(f, (0, 1)))(X, qw), want)


def test_the_activation_gradient_runs_on_the_quantized_weights(qw):
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(X, qw))
    assert "dot_general" in jaxpr and "dense" not in jaxpr


def test_quantize_keeps_nothing_for_its_gradient():
    _, pull = jax.vjp(lambda x: dense(quantize(x)), X)
    assert not [x for x in jax.tree.leaves(pull) if getattr(x, "size", 0) > 1]


XS = jnp.stack([X, X + 1, X * 2, X - 3])
WS = jnp.stack([W, W + 1, W * 2, W - 1])


@pytest.mark.parametrize(("in_x", "in_w"), [(0, 0), (0, None), (None, 0), (1, None)])
def test_vmap_any_operands_and_gradients(in_x, in_w):
    xs = X if in_x is None else jnp.moveaxis(XS, 0, in_x)
    qs = quantize(W if in_w is None else WS)
    axes = (in_x, in_w)
    close(jax.vmap(matmul, axes)(xs, qs), jax.vmap(jnp.matmul, axes)(xs, dense(qs)))
    got = jax.vmap(jax.grad(loss, (0, 1)), axes)(xs, qs)
    jax.tree.map(close, got, jax.vmap(jax.grad(plain_loss, (0, 1)), axes)(xs, dense(qs)))
    total = lambda f: lambda x, w: jnp.sum(jax.vmap(f, axes)(x, w) ** 2)
    got = jax.grad(total(matmul), (0, 1))(xs, qs)
    jax.tree.map(close, got, jax.grad(total(jnp.matmul), (0, 1))(xs, dense(qs)))


def test_vmap_nested_and_to_hi_results():
    qs = quantize(WS)
    f = jax.vmap(jax.vmap(matmul, (0, None)), (None, 0))
    close(f(XS, qs), XS[None] @ dense(qs)[:, None])
    stacked = jax.vmap(quantize)(XS)
    assert str(jax.typeof(stacked)) == "q8[4,2,3]"
    np.testing.assert_array_equal(stacked.qvalue, quantize(XS).qvalue)
    assert "q8[4,2,3]" in str(jax.make_jaxpr(jax.vmap(jax.jit(quantize)))(XS))


def test_vmap_to_any_axis_and_of_what_is_not_mapped(q):
    xs = jnp.arange(120.0).reshape(4, 5, 2, 3)
    moved = jax.vmap(quantize, out_axes=1)(xs)
    assert str(jax.typeof(moved)) == "q8[5,4,2,3]"
    close(dense(moved), jnp.moveaxis(dense(quantize(xs)), 0, 1))
    g = jax.grad(lambda x: jnp.sum(dense(jax.vmap(quantize, out_axes=1)(x)) * jnp.moveaxis(xs, 0, 1)))(xs)
    close(g, xs)
    same = jax.jit(jax.vmap(lambda x: q))(XS)
    close(dense(same), jnp.stack([dense(q)] * 4))
    last = jax.vmap(quantize, out_axes=2)(XS)
    assert str(jax.typeof(last)) == "q8t[2,3,4]"
    np.testing.assert_array_equal(dense(last), jnp.moveaxis(dense(quantize(XS)), 0, 2))


@pytest.mark.parametrize(("in_carry", "in_xs"), [(None, 0), (0, 0), (0, None)])
def test_vmap_of_scan_with_hi_carry_and_values(in_carry, in_xs):
    def run(c, xs, build, open_):
        def step(c, x):
            new = build(open_(c) * 0.5 + open_(x))
            return new, new

        return jax.lax.scan(step, c, xs, length=5)

    plain = (X if in_carry is None else XS), jnp.arange(120.0).reshape(4, 5, 2, 3)[slice(None) if in_xs == 0 else 0]
    hi = tuple(map(quantize, plain))
    plain = tuple(map(dense, hi))

    def total(build, open_):
        def f(c, xs):
            last, ys = jax.vmap(lambda c, xs: run(c, xs, build, open_), (in_carry, in_xs))(c, xs)
            return jnp.sum(open_(last)) + jnp.sum(open_(ys) ** 2)

        return f

    rounded = lambda x: x + jax.lax.stop_gradient(dense(quantize(x)) - x)
    want = jax.value_and_grad(total(rounded, lambda x: x), (0, 1))(*plain)
    got = jax.jit(jax.value_and_grad(total(quantize, dense), (0, 1)))(*hi)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), got, want)


def test_scan_over_values_and_with_hi_carry(q):
    qs = quantize(jnp.arange(24.0).reshape(4, 2, 3))
    total, ys = jax.lax.scan(lambda c, q: (c + jnp.sum(dense(q)), double(q)), 0.0, qs, length=4)
    close(total, 275.9685, 1e-4)
    assert str(jax.typeof(ys)) == "q8[4,2,3]"
    close(dense(ys), 2 * dense(qs))

    def grow(x):
        return dense(jax.lax.scan(lambda c, _: (double(c), None), quantize(x), None, length=3)[0])

    close(jax.jit(grow)(X), 8 * dense(q))
    close(jax.grad(lambda x: jnp.sum(grow(x)))(X), 8 * jnp.ones_like(X))


def test_loops_and_branches_under_jit(q):
    close(dense(jax.jit(lambda q: jax.lax.fori_loop(0, 3, lambda _, c: double(c), q))(q)), 8 * dense(q))
    branch = jax.jit(lambda p, q: jax.lax.cond(p, lambda q: q, double, q))
    close(dense(branch(False, q)), 2 * dense(q))
    close(dense(jax.jit(lambda i, q: jax.lax.switch(i, [lambda q: q, double], q))(1, q)), 2 * dense(q))


def test_refs(q):
    def f(q):
        r = jax.new_ref(q)
        r[...] = double(r[...])
        return dense(r[...])

    close(jax.jit(f)(q), 2 * dense(q))


def test_ahead_of_time(qw):
    assert str(jax.eval_shape(quantize, X)) == "q8[2,3]"
    close(jax.jit(matmul).lower(X, qw).compile()(X, qw), X @ dense(qw))
    assert QArray.type((2, 3)) == jax.typeof(quantize(X))


def test_a_warm_eager_call_neither_traces_nor_compiles(qw):
    matmul(X, qw)
    with jax.no_tracing():
        matmul(X, qw)


def test_explicit_sharding(qw):
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        rows = jax.device_put(jnp.arange(24.0).reshape(8, 3), jax.P("i"))
        q = quantize(rows)
        assert str(jax.typeof(q)) == "q8[8@i,3]" and "q8[8@i,3]" in str(jax.make_jaxpr(quantize)(rows))
        assert str(jax.typeof(dense(q))) == "float32[8@i,3]"
        assert q.scale.sharding.spec == jax.P("i")
        assert str(jax.typeof(matmul(rows, qw))) == "float32[8@i,4]"
        columns = quantize(jax.device_put(W, jax.P(None, "i")))
        assert str(jax.typeof(matmul(jnp.ones((2, 3)), columns))) == "float32[2,4@i]"
        got = jax.grad(loss, (0, 1))(rows, qw)
        assert [str(jax.typeof(g)) for g in got] == ["float32[8@i,3]", "float32[3,4]"]
        x = jax.device_put(jnp.ones((2, 8)), jax.P(None, "i"))
        with pytest.raises(TypeError, match=r"float32\[2,8@i\], q8\[8@i,3\]"):
            matmul(x, quantize(jax.device_put(jnp.ones((8, 3)), jax.P("i"))))
    want = jax.grad(plain_loss, (0, 1))(jnp.arange(24.0).reshape(8, 3), dense(qw))
    jax.tree.map(lambda a, b: close(jax.device_get(a), b), got, want)


def test_pickle_copy_and_host(q):
    for other in (pickle.loads(pickle.dumps(q)), copy.copy(q), copy.deepcopy(q), jax.device_get(q)):
        assert isinstance(other, QArray)
        np.testing.assert_array_equal(other.scale, q.scale)
    assert jax.block_until_ready(q) is q
    assert q.nbytes == 6 + 8 and q.shape == (2, 3)


def test_values_are_opened_and_built_in_traced_code(q):
    codes, scale = jax.jit(lambda v: v.components())(q)[:2]
    built = jax.jit(QArray.from_components)(codes, scale)
    close(dense(built), dense(q))
    assert jax.jit(lambda v: jnp.float32(isinstance(v, QArray)))(q) == 1
    close(jax.grad(lambda s: jnp.sum(dense(QArray.from_components(codes, s))))(scale), codes.sum(1).astype("float32"))


def test_a_type_of_ones_own_with_statics_and_several_results():
    @typax.op(reference=lambda x: (x, -x))
    def both(x):
        return quantize(x), -x

    a, b = both(X)
    close(dense(a), dense(quantize(X)))
    close(b, -X)
    close(jax.grad(lambda x: jnp.sum(dense(both(x)[0]) + 2 * both(x)[1]))(X), -jnp.ones_like(X))


class SharedScale(typax.Value, name="shared"):
    codes: Float[Array, "*batch n"]
    scale: Float[Array, ""]

    def dense(self) -> Float[Array, "*batch n"]:
        return self.codes * self.scale


def test_a_component_shared_along_the_batch_is_unshared_for_a_scan():
    v = SharedScale(X, jnp.float32(2))
    sums = lambda v: jax.lax.scan(lambda c, v: (c + jnp.sum(dense(v)), dense(v)), 0.0, v, length=2)
    with pytest.raises(TypeError, match=r"scale of shared\[2,3\] is shared along the leading axis; .*typax\.unshare"):
        sums(v)
    total, rows = sums(typax.unshare(v))
    close(total, 2 * X.sum())
    close(rows, 2 * X)
    g = jax.jit(jax.grad(lambda v: jnp.sum(sums(typax.unshare(v))[1] ** 2)))(v)
    close(g, 4 * X)


def test_stop_gradient_barriers_and_branches_that_close_over_values(qw):
    frozen = jax.jit(jax.grad(lambda w: jnp.sum(dense(jax.lax.stop_gradient(w)) * dense(w))))(qw)
    close(frozen, dense(qw))
    close(jax.jit(lambda w: dense(jax.lax.optimization_barrier((w, 1.0))[0]))(qw), dense(qw))
    for branches in [(lambda: qw, lambda: qw), (lambda: qw, lambda: double(qw))]:
        close(dense(jax.jit(lambda p, b=branches: jax.lax.cond(p, *b))(True)), dense(qw))
    same = jax.jit(lambda p, w: jax.lax.cond(p, lambda: w, lambda: w))
    close(dense(same(False, qw)), dense(qw))


def test_vmap_along_an_explicitly_sharded_axis():
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        xs = jax.device_put(jnp.ones((8, 4, 2)), jax.P("i"))
        ws = quantize(jax.device_put(jnp.arange(64.0).reshape(8, 2, 4), jax.P("i")))
        f = lambda x, w: jnp.sum(matmul(x, w) ** 2)
        plain = lambda x, w: jnp.sum((x @ w) ** 2)
        for d in (jax.grad, jax.hessian):
            got = jax.vmap(d(f, (0, 1)))(xs, ws)
            want = jax.vmap(d(plain, (0, 1)))(xs, dense(ws))
            assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
            jax.tree.map(lambda a, b: close(jax.device_get(a), jax.device_get(b)), got, want)
        assert str(jax.typeof(jax.grad(lambda x: jnp.sum(jax.vmap(matmul)(x, ws)))(xs))) == "float32[8@i,4,2]"


def test_statics_of_other_types_are_other_statics():
    @typax.op(reference=lambda x, *, p: jnp.asarray(p))
    def told(x: QArray, *, p):
        return jnp.asarray(p)

    q = quantize(X)
    assert [str(told(q, p=p).dtype) for p in (1, 1.0, True)] == ["int32", "float32", "bool"]
    assert [bool(jnp.signbit(told(q, p=p))) for p in (0.0, -0.0)] == [False, True]


def test_ops_are_traced_in_several_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        @typax.op(reference=lambda x: x * (i + 1))
        def mine(x: Float[Array, "*b n"]):
            return quantize(x * (i + 1))

        return float(jnp.sum(dense(jax.jit(mine)(X))))

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(16)))
    close(got, [float(jnp.sum(dense(quantize(X * (i + 1))))) for i in range(16)])


class Rows(hijax.MappingSpec):
    """The mapping spec of a type of one's own: it is mapped along its rows."""


class RowType(typax.ValueType):
    def mapping(self, spec):
        return 0 if isinstance(spec, Rows) else spec

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"rows({self.shape[0]})"


class Table(QArray, hitype=RowType):
    pass


def test_a_type_may_replace_what_is_derived_for_it(q):
    t = Table(*q.components()[:2])
    assert str(jax.typeof(t)) == "rows(2)" and "rows(2)" in str(jax.make_jaxpr(dense)(t))
    close(jax.vmap(dense, in_axes=Rows(), axis_size=2)(t), dense(t))
    out = jax.vmap(lambda t: t, in_axes=Rows(), out_axes=Rows(), axis_size=2)(t)
    close(dense(out), dense(t))
    close(jax.vmap(lambda x: Table.from_dense(x), out_axes=Rows())(X).scale, t.scale)
    close(jax.grad(lambda t: jnp.sum(jax.vmap(dense, in_axes=Rows(), axis_size=2)(t) ** 2))(t), 2 * dense(t))
    with pytest.raises(TypeError, match=r"is no subclass of typax\.ValueType"):
        type("Odd", (QArray,), {}, hitype=int)


def test_wide_products_are_summed_wide():
    with jax.enable_x64(True):
        w, x = quantize(jnp.linspace(-1, 1, 12, dtype=jnp.float64).reshape(3, 4)), jnp.array([[1e39, 1.0, 2.0]])
        np.testing.assert_allclose(matmul(x, w), x @ dense(w), rtol=1e-13)
        np.testing.assert_allclose(typax.lift(lambda x, w: x @ w)(x, w), x @ dense(w), rtol=1e-13)


def test_a_contraction_sharded_on_one_side_is_what_the_reference_makes_of_it():
    with jax.set_mesh(jax.make_mesh((4, 2), ("i", "j"))):
        x = jax.device_put(jnp.ones((8, 16)), jax.P("i"))
        w = quantize(jax.device_put(jnp.ones((16, 8)), jax.P("j")))
        for f in (matmul, typax.lift(lambda x, w: x @ w)):
            assert jax.typeof(f(x, w)) == jax.typeof(x @ dense(w))
        got = jax.grad(lambda x, w: jnp.sum(matmul(x, w) ** 2), (0, 1))(x, w)
        assert [str(jax.typeof(g)) for g in got] == ["float32[8@i,16]", "float32[16@j,8]"]
