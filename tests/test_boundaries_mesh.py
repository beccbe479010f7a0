"""Values on meshes: placed, mapped by shard_map, sent between devices; the same function of arrays is the oracle."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from jax.sharding import AxisType
from test_boundaries import KINDS, N, tangents, views, weighted
from test_boundaries_control import same, total

import typax
from typax import QArray, Tup, dense, quantize, tup

ON = ["q8", "lr", "tup", "record"]
on = pytest.mark.parametrize("kind", ON)
P = jax.P


def mesh(kind=AxisType.Explicit, shape=(2, 2)):
    return jax.make_mesh(shape, ("i", "j"), axis_types=(kind,) * 2)


@on
def test_values_are_placed(kind):
    v = KINDS[kind]
    sharding = jax.NamedSharding(mesh(), P("i"))
    for where in (sharding, None, jax.devices()[1]):
        moved = typax.device_put({"v": v, "x": jnp.ones(N)}, where)
        same(moved["v"], v)
    parts = jax.typeof(v).lower_val(typax.device_put(v, sharding))
    assert all(x.sharding.spec[0] == "i" and x.sharding.num_devices == 4 for x in parts)
    assert {d.id for x in jax.typeof(v).lower_val(typax.device_put(v, jax.devices()[1])) for d in x.devices()} == {1}
    with jax.set_mesh(sharding.mesh):
        placed = typax.device_put(v, P("i"))
        loss = lambda v: total(typax.with_sharding_constraint(typax.device_put(v, sharding), P("i")))
        value, g = jax.jit(jax.value_and_grad(loss, allow_int=True))(v)
        close(value, total(v))
        for x, y in zip(tangents(g), tangents(jax.grad(total, allow_int=True)(v)), strict=True):
            close(x, y)
        assert jax.typeof(typax.reshard({"a": v}, P("i"))["a"]) == jax.typeof(placed)
        with pytest.raises(TypeError, match=r"with_sharding_constraint of .* move it with typax\.reshard"):
            jax.jit(lambda v: typax.with_sharding_constraint(v, P("j")))(placed)


@pytest.mark.core
def test_specs_of_a_class_are_put_on_a_mesh():
    q = KINDS["q8"]
    moved = typax.device_put(q, QArray.P("i", "j").on(mesh()))
    assert moved.qvalue.sharding.spec[:2] == ("i", "j") and moved.scale.sharding.spec == P("i", "j")
    with pytest.raises(TypeError, match=r"the mesh has no axis k; it has i, j"):
        typax.device_put(q, QArray.P("k").on(mesh()))
    auto = jax.NamedSharding(mesh(AxisType.Auto), P("j"))
    assert jax.jit(lambda q: typax.with_sharding_constraint(q, auto))(q).scale.sharding.spec[0] == "j"


SENT = {  # of values and of arrays: what each device sees is (2, ...) of (4, ...)
    "all_gather": (lambda v: typax.all_gather(v, "i", tiled=True), lambda x: jnp.concatenate([x, x])),
    "ppermute": (lambda v: typax.ppermute(v, "i", [(0, 1), (1, 0)]), lambda x: jnp.roll(x, 2, 0)),
    "all_to_all": (lambda v: typax.all_to_all(v, "i", 0, 0, tiled=True), lambda x: x[jnp.array([0, 2, 1, 3])]),
}


@on
@pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto])
def test_values_are_sent_between_devices(kind, axes):
    """By shard_map with the plain specs of what values stand for, eagerly; gradients come back the way."""
    v = KINDS[kind]
    table = {k: s for k, s in SENT.items() if k != "all_to_all" or kind in ("q8", "lr")}
    with jax.set_mesh(mesh(axes)):
        v = typax.device_put(v, P("i"))
        body = lambda v: [f(v) for f, _ in table.values()]
        send = typax.shard_map(body, in_specs=P("i"), out_specs=P("i"))
        got = send(v)
        for out, (_, plain) in zip(got, table.values(), strict=True):
            for x, y in zip(views(out), views(KINDS[kind]), strict=True):
                close(x, plain(y))
        g = jax.grad(lambda v: sum(map(total, send(v))), allow_int=True)(v)
        if kind != "lr":
            floats = [x for x in views(KINDS[kind]) if x.dtype == jnp.float32]
            weigh = lambda xs: weighted(plain(x) for x in xs for _, plain in table.values())
            for x, y in zip(tangents(g), jax.grad(weigh)(floats), strict=True):
                close(x, y, 1e-4)


@pytest.mark.core
def test_quantized_bytes_are_what_an_all_gather_moves():
    q = KINDS["q8"]
    with jax.set_mesh(mesh()):
        q = typax.device_put(q, P("i"))
        gather = lambda q: dense(typax.all_gather(q, "i"))
        run = jax.jit(jax.shard_map(gather, in_specs=QArray.P("i"), out_specs=P(None, "i")))
        text = run.lower(q).as_text()
        moved = re.findall(r'"stablehlo.all_gather".*?: \((tensor<[^>]*>)\)', text, re.S)
        assert sorted(t.rstrip(">").rsplit("x", 1)[1] for t in moved) == ["f32", "i8"], moved
        close(np.asarray(run(q))[0, :2], dense(KINDS["q8"])[:2])


@pytest.mark.core
def test_collectives_between_the_entries_of_a_vmap():
    q, again, t = KINDS["q8"], KINDS["itself"], tup(jnp.arange(4.0), jnp.arange(4))

    def body(q, again, t, k):
        gathered = typax.all_gather(q, "a")
        same_for_all = typax.all_gather(quantize(jnp.ones(3)), "a")  # not mapped
        swapped = typax.ppermute(t, "a", [(0, 1), (1, 0), (2, 3), (3, 2)])
        return dense(gathered), dense(same_for_all), swapped, typax.psum(t, "a"), typax.pmean(again, "a")

    everywhere, ones, swapped, sums, mean = jax.jit(jax.vmap(body, axis_name="a"))(q, again, t, jnp.arange(4))
    close(everywhere, jnp.broadcast_to(dense(q), everywhere.shape))
    close(ones, jnp.ones((4, 4, 3)))
    assert [*map(int, swapped[1])] == [1, 0, 3, 2] and [*map(float, sums[0])] == [6.0] * 4
    close(dense(mean)[0], dense(again).mean(0), 0.02)
    with pytest.raises(TypeError, match=r"typax\.psum of q8\[2,3\]: the sum .* psum\(typax\.dense\(v\), 'a'\)"):
        jax.vmap(lambda q: typax.psum(q, "a"), axis_name="a")(q)
    with pytest.raises(TypeError, match=r"typax\.all_gather along a named axis of q8\[2,3\]"):
        jax.vmap(lambda q: typax.all_gather(q, "a", axis=-1, tiled=True), axis_name="a")(q)


@pytest.mark.core
@pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto])
def test_a_shard_map_of_values_is_mapped(axes):
    """``vmap`` of raw ``jax.shard_map`` with hi operands, residuals and results, along any batch axis."""
    q, t = KINDS["q8"], tup(dense(KINDS["q8"]), KINDS["q8"])
    body = lambda q: quantize(jnp.sin(dense(q)))
    plain = lambda q: jnp.sin(dense(q))
    with jax.set_mesh(mesh(axes)):
        put = lambda v, *spec: typax.device_put(v, P(*spec))
        sharded = jax.shard_map(body, in_specs=QArray.P("i"), out_specs=QArray.P("i"))
        for k in (0, 1):
            over = jax.jit(jax.vmap(sharded, k, k))
            x = put(q, *([None, "i"] if k == 0 else ["i", None]))
            close(dense(over(x)), plain(q), 0.02)
            g = jax.jit(jax.grad(lambda q, over=over: jnp.sum(dense(over(q)) ** 2)))(x)
            want = jax.grad(lambda q: jnp.sum(dense(jax.vmap(body)(q)) ** 2))(q)
            close(g, want, 1e-4)
        spec = Tup.P(P("i"), QArray.P("i"))
        pair = jax.shard_map(lambda t: tup(t[0] * 2, t[1]), in_specs=spec, out_specs=spec)
        halves = put(t, None, "i")
        out, g = jax.jit(lambda t: (jax.vmap(pair)(t), jax.grad(lambda t: total(jax.vmap(pair)(t)))(t)))(halves)
        same(out, tup(2 * t[0], t[1]))
        for x, y in zip(tangents(g), tangents(jax.grad(lambda t: total(tup(2 * t[0], t[1])))(t)), strict=True):
            close(x, y)
        if axes == AxisType.Auto:
            named = jax.jit(
                jax.vmap(jax.shard_map(body, in_specs=QArray.P("i"), out_specs=QArray.P("i")), spmd_axis_name="j")
            )
            close(dense(named(q)), plain(q), 0.02)


def test_a_sharded_axis_is_not_cut_silently():
    with jax.set_mesh(mesh()):
        q = typax.device_put(KINDS["q8"], P("i"))
        with pytest.raises(ValueError, match=r"leading axis is partitioned by 'i'; make it whole with typax\.reshard"):
            typax.map(dense, q)
        with pytest.raises(TypeError, match=r"index of q8\[4@i,2,3\]: .*make the axis whole first, with typax\.reshard"):
            q[1]
        np.testing.assert_array_equal(typax.reshard(q, P())[1].qvalue, KINDS["q8"][1].qvalue)
