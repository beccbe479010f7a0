"""Primitives on quantized arrays of any layout: what they give is what the plain ones give, and no array becomes dense."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import typax
from typax._rows import reshape, slice_
from typax.quantized import Quantized, formats

X = np.random.default_rng(0).normal(size=(4, 12, 10)).astype(np.float32)
HOW = {
    "q8<axis=(-3)>": ("int8", {"axis": 0}), "q8g4x5": ("int8", {"axis": (1, 2), "group": (4, 5)}),
    "q4t": ("int4", {"axis": 1}), "q4g5": ("int4", {"group": 5}),
    "u4zg4t": ("uint4", {"axis": 1, "group": 4, "zero_point": True}),
    "nf4g8t": ("nf4", {"axis": 1, "group": 8}), "nf4dg4t": ("nf4_double", {"axis": 1, "group": 4}),
    "mxfp4g4t": ("mxfp4", {"axis": 1, "group": 4}), "nvfp4g4t": ("nvfp4", {"axis": 1, "group": 4}),
}  # fmt: skip
SOME = ("q4g5", "nf4dg4t", "nvfp4g4t")  # all that is done to an axis, in the order of codes and in nested scales
I = jnp.array([[3, 0], [1, 3]])

MOVES = {  # of axes of sizes 4, 12, 10; those that a layout cannot move are told below
    "transpose": lambda q: q.transpose(2, 0, 1),
    "to and fro": lambda q: q.swapaxes(1, 2).swapaxes(1, 2),
    "new axis": lambda q: q[:, None],
    "new last axis": lambda q: q[..., None],
    "squeezed": lambda q: q[:1, None].squeeze(0),
    "broadcast": lambda q: jnp.broadcast_to(q[:, None], (2, 4, 3, 12, 10)),
    "halves": lambda q: q.reshape(2, 2, 12, 10).reshape(4, 12, 10),
    "heads": lambda q: q.reshape(4, 3, 4, 10),
    "rows": lambda q: q[1:3],
    "every other": lambda q: q[::-2],
    "on borders": lambda q: q[:, 4:12],
    "one": lambda q: q[2],
    "one by a traced number": lambda q: jax.jit(lambda q, i: q[i])(q, 2),
    "split": lambda q: jnp.split(q, [1, 3])[1],
    "unstack": lambda q: jnp.unstack(q)[3],
    "backwards": lambda q: q[:, ::-1],
    "joined": lambda q: jnp.concatenate([q, q[:1]]),
    "stacked": lambda q: jnp.stack([q, q], axis=1),
    "blocks": lambda q: q[I],
    "blocks, mapped": lambda q: jax.vmap(lambda i: q[i])(I[0]),
    "mapped blocks": lambda q: jax.vmap(lambda w, i: w[i])(q[:, None], jnp.zeros((4, 1), int)),
    "bfloat16": lambda q: q.astype(jnp.bfloat16),
    "either": lambda q: jnp.where(I[0, 0] > 1, q, q[::-1]),
}
ROWS = {
    "row": lambda q: q[1, 5],
    "column": lambda q: q[1, :, 7],
    "traced row": lambda q: jax.jit(lambda q, i: q[1, i])(q, 7),
    "rows by index": lambda q: q[1][jnp.array([[3, 0], [11, 4]])],
    "columns by index": lambda q: q[1][:, jnp.array([3, 9])].T,
    "rows, filled": lambda q: jnp.take(q[1], jnp.array([7, 12, -13]), axis=0),
    "rows, mapped": lambda q: jax.vmap(lambda w, i: w[i])(q, jnp.array([[1, 2], [7, 0], [0, 11], [5, 5]])),
}
REFUSED = {
    "q8<axis=(-3)>": {"squeezed", "one", "one by a traced number", "unstack", "joined", "blocks", "blocks, mapped",
                      "mapped blocks", "rows by index", "columns by index", "rows, filled"},  # one scale for what is cut
    "nf4g8t": {"heads", "on borders", "backwards"}, "nvfp4g4t": {"joined"},
}  # fmt: skip


def native(f, *args):
    receipt = typax.Receipt()
    out = jax.jit(typax.lift(f, "error", receipt))(*args)
    assert not receipt.densified
    return out


def each(of, but=()):
    return lambda q: {k: f(q) for k, f in of.items() if k not in but}


@pytest.mark.parametrize("shown", [pytest.param(k, marks=[pytest.mark.core] * (k in SOME[1:2])) for k in HOW])
def test_what_they_give(shown):
    name, how = HOW[shown]
    q = typax.quantize(X, name, **how)
    assert str(q._type).startswith(shown + "[")
    d, not_here = typax.dense(q), REFUSED.get(shown, set())
    got, want = native(each(MOVES | ROWS, not_here), q), each(MOVES | ROWS, not_here)(d)
    for k, x in got.items():
        assert isinstance(x, Quantized if k in MOVES else jax.Array), k
        assert (x.shape, x.dtype) == (want[k].shape, want[k].dtype), k
        np.testing.assert_array_equal(typax.dense(x), want[k], k)  # codes move: not a bit differs
    for k in not_here:
        with pytest.raises(TypeError, match="no op with the reference"):
            jax.eval_shape(typax.lift((MOVES | ROWS)[k], "error"), q)
    assert {str(jax.typeof(got[k])) for k in ("to and fro", "backwards", "either", "halves") if k in got} == {str(q._type)}


def test_gradients_and_vmap():
    name, how = HOW["nvfp4g4t"]
    q = typax.quantize(X, name, **how)
    some = {k: (MOVES | ROWS)[k] for k in ("transpose", "heads", "on borders", "rows, filled")}
    total = lambda q: sum(jnp.nansum(jnp.sin(typax.dense(x))) for x in each(some)(q).values())
    want = jax.jit(jax.grad(total))(typax.dense(q))
    np.testing.assert_allclose(jax.grad(typax.lift(total, "allow"))(q), want, rtol=1e-5, atol=1e-6)
    stack = jax.vmap(lambda x: typax.quantize(x, name, **how))(jnp.stack([X, -X]))
    mapped = jax.vmap(typax.lift(lambda q: q.reshape(4, 3, 4, 10)[1:3].transpose(3, 0, 1, 2), "error"))(stack)
    want = typax.dense(stack).reshape(2, 4, 3, 4, 10)[:, 1:3].transpose(0, 4, 1, 2, 3)
    np.testing.assert_array_equal(typax.dense(mapped), want)


def test_numbers():
    for name, how in HOW.values():
        q = typax.quantize(X, name, **how)
        if name in ("mxfp8", "mxfp4", "nvfp4_block"):
            with pytest.raises(TypeError, match="no op with the reference mul"):
                typax.lift(lambda q: -2 * q, "error")(q)
            continue
        doubled = native(lambda q: -2 * q / 4, q)
        assert isinstance(doubled, Quantized)
        np.testing.assert_allclose(typax.dense(doubled), -typax.dense(q) / 2, rtol=1e-6)


def test_numbers_along_axes_that_have_scales():
    s, half = jnp.arange(1.0, 41.0).reshape(4, 10) / 40, jnp.arange(1.0, 5.0).astype(jnp.float16)
    f = lambda q: s[:, None] * q / half.astype("float32")[:, None, None]
    for shown in ("q4t", "u4zg4t"):
        q = typax.quantize(X, HOW[shown][0], **HOW[shown][1])
        got = native(f, q)
        assert isinstance(got, Quantized)
        np.testing.assert_allclose(typax.dense(got), f(typax.dense(q)), rtol=1e-6)
    total = lambda q: jnp.sum(jnp.sin(f(q) @ jnp.ones((10, 2))))
    want = jax.grad(total)(typax.dense(q))
    np.testing.assert_allclose(jax.grad(typax.lift(total, "error"))(q), want, rtol=1e-5, atol=1e-5)
    for g in (
        lambda q: q * s[:1].T,
        lambda q: q * jnp.sin(jnp.ones((4, 10, 10))),
    ):  # along the axis that shares a scale; unknown
        with pytest.raises(TypeError, match="no op with the reference mul"):
            typax.lift(g, "error")(typax.quantize(X[:, :10], "int4", axis=1))


def test_sharding():
    x = X.reshape(4, 120)
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        q = typax.quantize(x, "int4", group=10)
        moved = native(lambda q: jax.sharding.reshard(q, jax.P(None, "i")), q)
        assert str(jax.typeof(moved)) == "q4g10[4,120@i]" and str(jax.typeof(moved.qvalue)) == "uint8[4,12@i,5]"
        f = lambda q: lax.reshape(q.T, (4, 30, 4), out_sharding=jax.P("i"))[:, :20]
        got = native(f, moved)
        assert str(jax.typeof(got)) == str(jax.typeof(f(typax.dense(moved)))).replace("float32", "q4g10t")
        np.testing.assert_array_equal(jax.device_get(typax.dense(got)), f(typax.dense(q)))
        with pytest.raises(TypeError, match=r"4 shards of 30, which groups of 20 do not divide"):
            typax.quantize(jax.device_put(x, jax.P(None, "i")), "int4", group=20)
        coarse, odd = typax.quantize(x, "int4", group=20), typax.quantize(x[:, :60], "int4")
        for place in (typax.reshard, typax.device_put, lambda q, s: native(lambda q: jax.sharding.reshard(q, s), q)):
            with pytest.raises(TypeError, match=r"axis 1 of q4g20\[4,120\] has 4 shards of 30, which groups of 20 do not"):
                place(coarse, jax.P(None, "i"))
        with pytest.raises(TypeError, match=r"axis 1 of q4\[4,60\] has 4 shards of 15, which groups of 2 do not divide"):
            typax.device_put(odd, jax.P(None, "i"))
    auto = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    by = jax.NamedSharding(auto, jax.P("i"))
    got = native(lambda q: 2 * lax.with_sharding_constraint(q, by), typax.quantize(x, "int4", group=10))
    assert isinstance(got, Quantized) and got.qvalue.sharding.spec[0] == "i"


def test_what_pads_and_fills():
    for shown in ("q4t", "u4zg4t", "nf4g8t"):
        name, how = HOW[shown]
        q = typax.quantize(X, name, **how)
        for value in (2.5, jnp.nan):
            f = lambda q, value=value: lax.pad(q, value, ((1, 2, 1), (0, 0, 0), (0, 0, 0)))
            g = lambda q, value=value: jnp.take(q, jnp.array([5, 1]), axis=0, mode="fill", fill_value=value)
            for h in (f, g):
                got = native(h, q)
                assert isinstance(got, Quantized)
                np.testing.assert_array_equal(typax.dense(got), h(typax.dense(q)))


def test_every_format():
    for name in formats():
        q = typax.quantize(X.reshape(4, 120)[:, :64], name)
        moved = lambda q: q[::2].T.reshape(2, 32, 2)[:, None].astype(jnp.bfloat16)
        got = native(moved, q)
        assert isinstance(got, Quantized) and got.nbytes <= q.nbytes
        np.testing.assert_array_equal(typax.dense(got), moved(typax.dense(q)))


def test_refused_with_the_numbers():
    q = typax.quantize(X[0], "int4", axis=0, group=4)
    slices = {"2:6": (2, 6, None), "0:6": (0, 6, None), "0:12:2": (0, 12, (2, 1))}
    for text, (i, j, strides) in slices.items():
        with pytest.raises(TypeError, match=rf"a slice {text} along axis 0 of q4\[12,10\] by groups \(4,1\) does not start"):
            slice_(q, start_indices=(i, 0), limit_indices=(j, 10), strides=strides)
    with pytest.raises(TypeError, match=r"as \[10, 12\]: a piece of 3 is no part of an axis of 10, nor the other way"):
        reshape(q, new_sizes=(10, 12), dimensions=None, sharding=None)
