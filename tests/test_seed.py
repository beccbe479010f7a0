"""Hi types written by hand: everything that raw hijax promises of them, on every supported JAX, with the values it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _raw import Codes, CodesP, Lead, PairSpec, decode, encode, factors, outer, outer_product, pair, part, product

pytestmark = pytest.mark.core

X = jnp.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]])
W = jnp.arange(12, dtype="float32").reshape(3, 4) / 12
XS = jnp.arange(24, dtype="float32").reshape(4, 2, 3)
DECODED = [[0.992126, 2.007874, 3.0], [4.015748, -5.007874, 6.0]]


def close(a, b, rtol=2e-7):
    np.testing.assert_allclose(a, b, rtol=rtol)


def equations(f, *args):
    """The equations of a traced function, each as (types of its operands, name, types of its results)."""
    jaxpr = jax.jit(f).trace(*args).jaxpr
    return [
        ([str(v.aval) for v in e.invars], type(e.params["_prim"]).__name__, [str(v.aval) for v in e.outvars])
        for e in jaxpr.eqns
    ]


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def rows(mesh):
    return jax.device_put(jnp.arange(24, dtype="float32").reshape(8, 3), jax.P("i"))


# --- values and types ------------------------------------------------------------------------------------------------


def test_a_value_and_its_type():
    q = encode(X)
    assert isinstance(q, Codes) and str(jax.typeof(q)) == "q8[2,3]"
    np.testing.assert_array_equal(q.code, [[42, 85, 127], [85, -106, 127]])
    close(q.step, [0.02362205, 0.04724409])
    close(decode(q), DECODED, rtol=1e-6)
    with pytest.raises(TypeError, match="cannot encode int32"):
        encode(jnp.ones((2, 3), "int32"))


def test_traced_values_are_opaque():
    with pytest.raises(AttributeError, match="DynamicJaxprTracer has no attribute code"):
        jax.jit(lambda q: q.code)(encode(X))


def test_values_are_made_by_primitives_only():
    def smuggle(x):
        return Codes(x.astype("int8"), x[..., 0])

    with pytest.raises(TypeError, match="No constant handler for type"):
        jax.jit(smuggle)(X)


def test_an_operation_on_two_kinds():
    want = [[2.6627297, 3.1706038, 3.6587927, 4.166667], [2.3077428, 2.7447505, 3.1463253, 3.5833333]]
    close(product(X, encode(W)), want, rtol=1e-6)
    close(product(X, encode(W)), X @ decode(encode(W)), rtol=1e-6)
    with pytest.raises(TypeError, match=r"no product of float32\[2,3\] and q8\[4,3\]"):
        product(X, encode(W.T))


# --- jit -------------------------------------------------------------------------------------------------------------


def test_jaxprs_say_what_they_mean():
    got = equations(lambda x: decode(encode(x)), X)
    assert got == [(["float32[2,3]"], "Encode", ["q8[2,3]"]), (["q8[2,3]"], "Decode", ["float32[2,3]"])]
    assert equations(product, X, encode(W)) == [(["float32[2,3]", "q8[3,4]"], "Product", ["float32[2,4]"])]


def test_jit_inside_out_and_in():
    close(jax.jit(lambda x: decode(encode(x)))(X), DECODED, rtol=1e-6)
    q = jax.jit(encode)(X)
    assert str(jax.typeof(q)) == "q8[2,3]"
    close(jax.jit(decode)(q), DECODED, rtol=1e-6)


# --- derivatives -----------------------------------------------------------------------------------------------------


def test_gradients_pass_straight_through():
    close(jax.grad(lambda x: jnp.sum(decode(encode(x))))(X), jnp.ones((2, 3)))


def test_the_tangent_of_a_value_is_an_array():
    got = jax.grad(lambda q: jnp.sum(decode(q) ** 2))(encode(X))
    assert str(jax.typeof(got)) == "float32[2,3]"
    close(got, [[1.984252, 4.015748, 6.0], [8.031496, -10.015748, 12.0]], rtol=1e-6)


def test_gradients_for_both_kinds_of_operand():
    dx, dw = jax.grad(lambda x, q: jnp.sum(product(x, q) ** 2), argnums=(0, 1))(X, encode(W))
    assert (str(jax.typeof(dx)), str(jax.typeof(dw))) == ("float32[2,3]", "float32[3,4]")
    w = decode(encode(W))
    close(dx, 2 * (X @ w) @ w.T, rtol=1e-5)
    close(dw, 2 * X.T @ (X @ w), rtol=1e-5)


# --- vmap ------------------------------------------------------------------------------------------------------------


def test_map_to_a_value():
    qs = jax.vmap(encode, out_axes=Lead())(XS)
    assert str(jax.typeof(qs)) == "q8[4,2,3]" and (qs.code.shape, qs.step.shape) == ((4, 2, 3), (4, 2))


@pytest.mark.parametrize("f", [decode, jax.jit(decode)], ids=["plain", "jit"])
def test_map_over_a_value(f):
    qs = encode(XS + 1)
    close(jax.vmap(f, in_axes=Lead(), axis_size=4)(qs), decode(qs))


def test_map_a_gradient():
    got = jax.vmap(jax.grad(lambda x: jnp.sum(decode(encode(x)) ** 2)))(XS + 1)
    assert got.shape == (4, 2, 3)
    close(got, 2 * decode(encode(XS + 1)), rtol=1e-6)


def test_what_is_not_mapped():
    q = encode(X)
    got = jax.vmap(lambda c: c * decode(q))(jnp.arange(3.0))
    close(got[2], 2 * decode(q))


# --- scan ------------------------------------------------------------------------------------------------------------


def test_scan_over_a_stack():
    qs = encode(XS.at[0, 0].set(1.0))
    total, () = jax.lax.scan(lambda total, q: (total + jnp.sum(decode(q)), ()), 0.0, qs, length=4)
    close(total, jnp.sum(decode(qs)), rtol=1e-6)


def test_scan_with_carry_and_results():
    def step(total, x):
        return encode(decode(total) + x), encode(2 * x)

    xs = XS + 1
    total, ys = jax.lax.scan(step, encode(jnp.ones((2, 3))), xs)
    assert (str(jax.typeof(total)), str(jax.typeof(ys))) == ("q8[2,3]", "q8[4,2,3]")
    close(decode(ys), decode(encode(2 * xs)), rtol=1e-6)
    close(decode(total), 1 + jnp.sum(xs, axis=0), rtol=0.02)


# --- explicit sharding -----------------------------------------------------------------------------------------------


def test_types_carry_shardings(rows):
    q = encode(rows)
    assert str(jax.typeof(q)) == "q8[8@i,3]" and str(jax.typeof(decode(q))) == "float32[8@i,3]"
    assert (q.code.sharding.spec, q.step.sharding.spec) == (jax.P("i", None), jax.P("i"))
    got = equations(lambda x: decode(encode(x)), rows)
    assert [out for _, _, out in got] == [["q8[8@i,3]"], ["float32[8@i,3]"]]


def test_a_product_passes_shardings_on(rows):
    assert str(jax.typeof(product(rows, encode(W)))) == "float32[8@i,4]"
    q = encode(jax.device_put(W, jax.P(None, "i")))
    assert str(jax.typeof(q)) == "q8[3,4@i]"
    assert str(jax.typeof(product(jnp.ones((2, 3)), q))) == "float32[2,4@i]"


def test_a_sharded_contraction_is_refused(mesh):
    x = jax.device_put(jnp.ones((2, 8)), jax.P(None, "i"))
    q = encode(jax.device_put(jnp.ones((8, 3)), jax.P("i")))
    with pytest.raises(TypeError, match=r"contracted axes of float32\[2,8@i\] and q8\[8@i,3\] must be whole"):
        product(x, q)


def test_cotangents_live_where_primals_live(rows):
    dx, dw = jax.grad(lambda x, q: jnp.sum(product(x, q) ** 2), argnums=(0, 1))(rows, encode(W))
    assert (str(jax.typeof(dx)), str(jax.typeof(dw))) == ("float32[8@i,3]", "float32[3,4]")


# --- shard_map -------------------------------------------------------------------------------------------------------


def test_shard_map_from_and_to_values(rows):
    @jax.jit
    @jax.shard_map(in_specs=jax.P("i"), out_specs=CodesP(jax.P("i")))
    def encode_shards(x):
        assert jax.typeof(x).shape == (2, 3)
        return encode(x)

    @jax.jit
    @jax.shard_map(in_specs=CodesP(jax.P("i")), out_specs=jax.P("i"))
    def decode_shards(q):
        assert str(jax.typeof(q)).startswith("q8[2,3]")
        return decode(q)

    q = encode_shards(rows)
    assert str(jax.typeof(q)) == "q8[8@i,3]"
    assert (q.code.sharding.spec, q.step.sharding.spec) == (jax.P("i", None), jax.P("i"))
    close(jnp.max(jnp.abs(decode_shards(q) - rows)), 0.08661461, rtol=1e-5)
    whole = encode(rows)
    assert (q.code == whole.code).all() and (q.step == whole.step).all()


# --- outer products --------------------------------------------------------------------------------------------------

LEFT, RIGHT = jnp.arange(6, dtype="float32") / 6, jnp.arange(5, dtype="float32") / 5
ACTS = jnp.ones((3, 6))


def test_an_outer_product_is_never_a_matrix():
    v = outer(LEFT, RIGHT)
    assert str(jax.typeof(v)) == "r1[6,5]"
    close(outer_product(ACTS, v), ACTS @ jnp.outer(LEFT, RIGHT), rtol=1e-6)
    assert equations(outer_product, ACTS, v) == [(["float32[3,6]", "r1[6,5]"], "OuterProduct", ["float32[3,5]"])]
    assert [f.shape for f in factors(v)] == [(6,), (5,)]


def test_its_gradient_is():
    got = jax.grad(lambda v: jnp.sum(outer_product(ACTS, v) ** 2))(outer(LEFT, RIGHT))
    assert str(jax.typeof(got)) == "float32[6,5]"
    close(got, 2 * ACTS.T @ (ACTS @ jnp.outer(LEFT, RIGHT)), rtol=1e-5)


def test_gradients_of_the_factors():
    got = jax.grad(lambda a, b: jnp.sum(outer_product(ACTS, outer(a, b)) ** 2), argnums=(0, 1))(LEFT, RIGHT)
    want = jax.grad(lambda a, b: jnp.sum((ACTS @ jnp.outer(a, b)) ** 2), argnums=(0, 1))(LEFT, RIGHT)
    for g, w in zip(got, want, strict=True):
        close(g, w, rtol=1e-5)


def test_an_outer_product_of_a_sharded_vector(mesh):
    v = outer(jax.device_put(jnp.zeros(8), jax.P("i")), RIGHT)
    assert str(jax.typeof(v)) == "r1[8@i,5]"


# --- tuples ----------------------------------------------------------------------------------------------------------


def test_tuples_of_anything():
    t = pair(jnp.arange(3.0), 5.0)
    assert str(jax.typeof(t)) == "Tup{float32[3],float32[]}" and part(t, i=1) == 5.0
    nested = pair(pair(1.0, 2.0), jnp.arange(2.0))
    assert str(jax.typeof(nested)) == "Tup{Tup{float32[],float32[]},float32[2]}"
    assert jax.jit(lambda t: part(part(t, i=0), i=1))(nested) == 2.0
    assert str(jax.typeof(pair(encode(X), 3.0))) == "Tup{q8[2,3],float32[]}"


def test_a_tuple_is_made_while_tracing():
    t = jax.jit(lambda x: pair(x, encode(X)))(X)
    assert str(jax.typeof(t)) == "Tup{float32[2,3],q8[2,3]}"
    close(decode(part(t, i=1)), DECODED, rtol=1e-6)


def test_map_parts_differently():
    t = pair(jnp.arange(3.0), 5.0)
    swap = lambda t: pair(part(t, i=1), part(t, i=0))
    out = jax.vmap(swap, in_axes=PairSpec((0, None)), out_axes=PairSpec((None, 0)), axis_size=3)(t)
    assert str(jax.typeof(out)) == "Tup{float32[],float32[3]}"


def test_a_tuple_with_a_sharded_part(rows):
    assert str(jax.typeof(pair(rows, jnp.float32(1)))) == "Tup{float32[8@i,3],float32[]}"


def test_a_type_that_is_its_own_tangent():
    """Zeros are instantiated and sums taken by the type: an unused operand, and one that is used twice."""

    def twice(t):
        return jnp.sum(part(t, i=0) * part(t, i=0)) + part(t, i=1)

    t = pair(jnp.arange(3.0), jnp.float32(5))
    got = jax.grad(twice)(t)
    assert str(jax.typeof(got)) == "Tup{float32[3],float32[]}"
    close(part(got, i=0), 2 * jnp.arange(3.0))
    close(part(got, i=1), 1)
    unused = jax.grad(lambda t: 1.0)(t)
    close(part(unused, i=0), jnp.zeros(3))
