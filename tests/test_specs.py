"""Partition specs: shard_map in both directions, its gradients, resharding, in explicit and auto mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from jax import P
from jaxtyping import Array, Float32, UInt8
from test_tangents import Factors, Pack, pack

import typax
from typax import QArray, dense, matmul, quantize, reshard

pytestmark = pytest.mark.core

ROWS = jnp.arange(24.0).reshape(8, 3)
W = jnp.arange(12.0).reshape(3, 4) / 12
LOOSE = quantize(W)


@pytest.fixture(params=["explicit", "auto"])
def mode(request):
    kind = jax.sharding.AxisType.Explicit if request.param == "explicit" else jax.sharding.AxisType.Auto
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(kind,))):
        yield request.param


def test_shards_quantized_one_by_one_equal_the_whole_bit_for_bit(mode):
    rows = jax.device_put(ROWS, P("i"))

    def body(x):
        assert jax.typeof(x).shape == (2, 3)
        return quantize(x)

    by_shard = jax.jit(jax.shard_map(body, in_specs=P("i"), out_specs=QArray.P("i")))(rows)
    whole = quantize(rows)
    np.testing.assert_array_equal(by_shard.qvalue, whole.qvalue)
    np.testing.assert_array_equal(by_shard.scale, whole.scale)
    assert by_shard.scale.sharding.spec == P("i")
    if mode == "explicit":
        assert str(jax.typeof(by_shard)) == "q8[8@i,3]"
    back = jax.jit(jax.shard_map(dense, in_specs=QArray.P("i"), out_specs=P("i")))(by_shard)
    close(back, dense(whole))


def test_gradients_through_shard_map(mode):
    rows = jax.device_put(ROWS, P("i"))
    q, w = quantize(rows), quantize(W)

    def body(r, w, q):
        return matmul(r, w).sum(1) + dense(q).sum(1) ** 2

    def f(r, w, q):
        out = jax.shard_map(body, in_specs=(P("i"), QArray.P(), QArray.P("i")), out_specs=P("i"))(r, w, q)
        return jnp.sum(out**2)

    got = jax.jit(jax.grad(f, (0, 1, 2)))(rows, w, q)
    host = [np.asarray(dense(x)) for x in (rows, w, q)]
    want = jax.grad(lambda r, w, q: jnp.sum(((r @ w).sum(1) + q.sum(1) ** 2) ** 2), (0, 1, 2))(*host)
    for g, t in zip(got, want, strict=True):
        close(g, t, 1e-4)
    if mode == "explicit":
        assert [str(jax.typeof(g)) for g in got] == ["float32[8@i,3]", "float32[3,4]", "float32[8@i,3]"]


def test_hi_results_residuals_and_closures_of_a_shard_map(mode):
    rows = jax.device_put(ROWS, P("i"))
    made = jax.shard_map(quantize, in_specs=P("i"), out_specs=QArray.P("i"))
    close(jax.jit(jax.grad(lambda x: jnp.sum(dense(made(x)) ** 2)))(rows), 2 * dense(quantize(rows)))
    closed = LOOSE if mode == "explicit" else quantize(W)

    def body(x):
        return jnp.sin(dense(quantize(x))) * matmul(x, closed).sum(1, keepdims=True)

    f = jax.jit(jax.grad(lambda x: jnp.sum(jax.shard_map(body, in_specs=P("i"), out_specs=P("i"))(x))))
    straight = lambda x: x + jax.lax.stop_gradient(dense(quantize(x)) - x)
    plain = np.asarray(dense(LOOSE))
    want = jax.grad(lambda x: jnp.sum(jnp.sin(straight(x)) * (x @ plain).sum(1, keepdims=True)))(np.asarray(ROWS))
    close(f(rows), want, 1e-4)


def test_named_axes(mode):
    w = quantize(jax.device_put(jnp.arange(24.0).reshape(3, 8), P(None, "i")))
    x = jnp.ones((2, 3))
    f = jax.shard_map(lambda x, w: matmul(x, w), in_specs=(P(), QArray.P(None, n="i")), out_specs=P(None, "i"))
    close(jax.jit(f)(x, w), np.ones((2, 3)) @ np.asarray(dense(w)))


def test_componentwise_tangents_and_records(mode):
    w = Factors(jax.device_put(jnp.ones((8, 2)), P("i")), jnp.ones((2, 4)))
    squares = jax.shard_map(lambda w: dense(w) ** 2, in_specs=Factors.P(m="i"), out_specs=P("i"))
    g = jax.jit(jax.grad(lambda w: jnp.sum(squares(w))))(w)
    close(g.u, jax.grad(lambda u: jnp.sum((u @ np.ones((2, 4))) ** 2))(np.ones((8, 2), "float32")))
    t = pack(jax.device_put(ROWS, P("i")), quantize(jax.device_put(ROWS, P("i"))), jnp.float32(2))
    specs = Pack.P(P("i"), QArray.P("i"), P())
    f = jax.shard_map(lambda t: pack(t[0] * t[2], t[1]), in_specs=specs, out_specs=Pack.P(P("i"), QArray.P("i")))
    g = jax.jit(jax.grad(lambda t: jnp.sum(f(t)[0])))(t)
    close(g[2], ROWS.sum())
    close(g[0], jnp.full((8, 3), 2.0))


def test_reshard():
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        q = quantize(ROWS)
        for spec in (P("i"), QArray.P("i")):
            assert str(jax.typeof(reshard(q, spec))) == "q8[8@i,3]"
            assert "q8[8@i,3]" in str(jax.make_jaxpr(lambda q, s=spec: reshard(q, s))(q))
        g = jax.grad(lambda q: jnp.sum(dense(reshard(q, P("i"))) ** 2))(q)
        assert str(jax.typeof(g)) == "float32[8,3]"
        close(g, 2 * dense(q))
        stacked = jax.vmap(lambda x: quantize(x))(jnp.stack([ROWS, ROWS]))
        assert str(jax.typeof(reshard(stacked, P(None, "i")))) == "q8[2,8@i,3]"


def test_mistakes():
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        q = quantize(jax.device_put(ROWS, P("i")))
        through = lambda spec: jax.shard_map(dense, in_specs=spec, out_specs=P("i"))
        with pytest.raises(TypeError, match=r"q8\[8@i,3\] is partitioned by QArray\.P\(\.\.\.\), not by Pack\.P"):
            jax.jit(through(Pack.P(P("i"))))(q)
        with pytest.raises(TypeError, match=r"partitioned by QArray\.P\(\.\.\.\), not by P"):
            jax.jit(through(P("i")))(q)
        with pytest.raises(TypeError, match=r"does not match the sharding of its operand.*typax\.reshard"):
            jax.jit(through(QArray.P("i")))(quantize(ROWS))
        with pytest.raises(TypeError, match=r"under jax\.jit only"):
            through(QArray.P("i"))(q)
        with pytest.raises(
            TypeError, match=r"with axis 0 by None does not match the sharding of its operand.*typax\.reshard"
        ):
            jax.jit(jax.vmap(through(QArray.P("i"))))(quantize(jnp.ones((2, 8, 3))))
    with pytest.raises(TypeError, match=r"no axis is named k; the axes are n"):
        QArray.P("i", k="j")
    with pytest.raises(TypeError, match="by the name of a mesh axis"):
        QArray.P(0)
    with pytest.raises(TypeError, match="takes a partition spec"):
        Pack.P("i")


def test_results_that_differ_between_shards_are_not_one_of_them(mode):
    rows = jax.device_put(ROWS, P("i"))
    for f, spec in ((quantize, QArray.P()), (lambda x: pack(x * 1), Pack.P(P()))):
        with pytest.raises(TypeError, match="leaves out the mesh axis i"):
            jax.jit(jax.shard_map(f, in_specs=P("i"), out_specs=spec))(rows)


class Padded(typax.Value, name="padded"):
    codes: UInt8[Array, "*batch m"]
    n: int

    def dense(self) -> Float32[Array, "*batch n"]:
        return jnp.unpackbits(self.codes, axis=-1)[..., : self.n].astype(jnp.float32)


def test_axes_that_no_component_shows_and_batch_axes_that_are_not_given():
    with pytest.raises(TypeError, match=r"Padded\.P: no component shows the axis n; partition"):
        Padded.P(None, n="i")
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        v = Padded(jnp.ones((4, 4), jnp.uint8), 30)
        with pytest.raises(TypeError, match=r"with named axes, each batch axis is given by position.*Padded\.P\(None, m="):
            reshard(v, Padded.P(m="i"))
        with pytest.raises(TypeError, match="the mesh has no axis zz; it has i"):
            reshard(v, Padded.P("zz"))
        with pytest.raises(TypeError, match="the mesh has no axis zz; it has i"):
            jax.jit(jax.shard_map(dense, in_specs=QArray.P("zz"), out_specs=P("i")))(quantize(ROWS))


def test_values_of_another_mesh():
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        q = quantize(jax.device_put(jnp.ones((8, 3)), P("i")))
    other = pytest.raises(TypeError, match=r"matmul: q8\[8@i,3\] is on a mesh with the axes \{'i': 4\}, but .* \{'j': 2\}")
    with jax.set_mesh(jax.make_mesh((2,), ("j",))), other:
        matmul(jnp.ones((4, 8)), q)
