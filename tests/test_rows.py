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
    "nf4dg8t": ("nf4_double", {"axis": 1, "group": 8}), "nvfp4g4t": ("nvfp4", {"axis": 1, "group": 4}),
}  # fmt: skip
CORE = "nf4dg8t"  # all that is done to an axis, in padded groups and in nested scales
I = jnp.array([[3, 0], [1, 3]])

# Of axes of sizes 4, 12, 10, by functions of `jnp` that `lift` runs, or by those of typax; what a layout cannot is below.
MOVES = {
    "transpose": lambda q, np: np.transpose(q, (2, 0, 1)),
    "to and fro": lambda q, np: np.swapaxes(q.mT, 1, 2),
    "new axis": lambda q, np: q[:, None],
    "new last axis": lambda q, np: q[..., None],
    "squeezed": lambda q, np: q[:1, None].squeeze(0),
    "halves": lambda q, np: np.reshape(q.reshape(2, 2, 12, 10), (4, 12, 10)),
    "heads": lambda q, np: q.reshape(4, 3, -1, 10),
    "rows": lambda q, np: q[1:3],
    "every other": lambda q, np: q[::-2],
    "on borders": lambda q, np: q[:, 4:12],
    "window": lambda q, np: (lax if np is jnp else typax).dynamic_slice(q, (1, 0, 0), (2, 12, 10)),
    "one": lambda q, np: q[2],
    "one by a traced number": lambda q, np: jax.jit(lambda q, i: q[i])(q, 2),
    "split": lambda q, np: np.split(q, [1, 3])[1],
    "backwards": lambda q, np: q[:, ::-1],
    "joined": lambda q, np: np.concatenate([q, q[:1]]),
    "joined last": lambda q, np: np.concatenate([q, q[..., ::-1]], axis=-1),
    "stacked": lambda q, np: np.stack([q, q], axis=1),
    "stacked last": lambda q, np: np.stack([q, q], axis=-1),
    "blocks": lambda q, np: q[I],
    "filled blocks": lambda q, np: np.take(q, jnp.array([2, 4, -5, 0]), axis=0),
    "bfloat16": lambda q, np: q.astype(jnp.bfloat16),
    "either": lambda q, np: np.where(I[0, 0] > 1, q, q[::-1]),
}
LIFTED = {
    "broadcast": lambda q, _: jnp.broadcast_to(q[:, None], (2, 4, 3, 12, 10)),
    "unstack": lambda q, _: jnp.unstack(q)[3],
    "blocks, mapped": lambda q, _: jax.vmap(lambda i: q[i])(I[0]),
    "mapped blocks": lambda q, _: jax.vmap(lambda w, i: w[i])(q[:, None], jnp.zeros((4, 1), int)),
}
ROWS = {
    "row": lambda q, np: q[1, 5],
    "column": lambda q, np: q[1, :, 7],
    "columns": lambda q, np: q[..., 3],
    "traced row": lambda q, np: jax.jit(lambda q, i: q[1, i])(q, 7),
    "entries": lambda q, np: q[jnp.array([1, 2]), 4:8, jnp.array([0, 9])],
    "rows by index": lambda q, np: q[1][jnp.array([[3, 0], [11, 4]])],
    "columns by index": lambda q, np: np.take(q[1], jnp.array([3, 9]), axis=-1).T,
    "rows, filled": lambda q, np: np.take(q[1], jnp.array([7, 12, -13]), axis=0),
}
LIFTED_ROWS = {"rows, mapped": lambda q, _: jax.vmap(lambda w, i: w[i])(q, jnp.array([[1, 2], [7, 0], [0, 11], [5, 5]]))}
OWN = {"one", "one by a traced number", "unstack", "blocks", "filled blocks", "blocks, mapped", "mapped blocks", "squeezed"}
SAME = {"to and fro", "backwards", "either", "halves"}
REFUSED = {
    "q8<axis=(-3)>": {"joined"}, "nvfp4g4t": {"joined"},  # one scale for what is joined
    "nf4dg8t": {"heads", "on borders", "backwards", "columns", "entries"},
}  # fmt: skip


def native(f, *args):
    receipt = typax.Receipt()
    out = jax.jit(typax.lift(f, "error", receipt))(*args)
    assert not receipt.densified
    return out


def each(of, np=jnp, but=()):
    return lambda q: {k: f(q, np) for k, f in of.items() if k not in but}


def seen(f):
    """What a program gives, and what that stands for."""
    return lambda q: ((out := f(q)), typax.dense(out))


def same(got, want):
    for k, x in got.items():
        assert (x.shape, x.dtype) == (want[k].shape, want[k].dtype), k
        np.testing.assert_array_equal(x, want[k], k)  # codes move: not a bit differs


@pytest.mark.parametrize("shown", [pytest.param(k, marks=[pytest.mark.core] * (k == CORE)) for k in HOW])
def test_what_they_give(shown):
    name, how = HOW[shown]
    q = typax.quantize(X, name, **how)
    assert str(q._type).startswith(shown + "[")
    d, not_here = typax.dense(q), REFUSED.get(shown, set())
    everything = MOVES | LIFTED | ROWS | LIFTED_ROWS
    want = each(everything)(d)
    own = {
        k: f for k, f in everything.items() if k in {*LIFTED, *LIFTED_ROWS, *OWN, *SAME, "split", "stacked", "rows, filled"}
    }
    # nested scales have no NaN: a batch axis is filled otherwise, of which lift does not know
    not_lifted = not_here | ({"filled blocks"} if shown == CORE else set())
    both = lambda q: (each(MOVES | ROWS, typax, not_here)(q), typax.lift(each(own, jnp, not_lifted), "error")(q))
    (called, lifted), dense = jax.jit(seen(both))(q)
    for out in dense:
        same(out, want)
    arrays = ({*ROWS, *LIFTED_ROWS} | OWN if shown == "q8<axis=(-3)>" else {*ROWS, *LIFTED_ROWS}) & lifted.keys()
    assert {k for k, x in lifted.items() if isinstance(x, jax.Array)} == arrays
    for out in (called, lifted):
        assert {str(jax.typeof(out[k])) for k in SAME if k in out} == {str(q._type)}
    for k in not_here:
        with pytest.raises(TypeError, match=r"do it to typax\.dense"):
            jax.eval_shape(lambda q, k=k: everything[k](q, typax), q)
        with pytest.raises(TypeError, match="no op with the reference"):
            jax.eval_shape(typax.lift(lambda q, k=k: everything[k](q, jnp), "error"), q)


def test_gradients_and_vmap():
    name, how = HOW["nvfp4g4t"]
    q = typax.quantize(X, name, **how)
    some = {k: (MOVES | ROWS)[k] for k in ("transpose", "heads", "on borders", "rows, filled")}
    total = lambda np: lambda q: sum(jnp.nansum(jnp.sin(typax.dense(x))) for x in each(some, np)(q).values())
    want = jax.jit(jax.grad(total(jnp)))(typax.dense(q))
    for f in (typax.lift(total(jnp), "allow"), total(typax)):
        np.testing.assert_allclose(jax.jit(jax.grad(f))(q), want, rtol=1e-5, atol=1e-6)
    stack = jax.vmap(lambda x: typax.quantize(x, name, **how))(jnp.stack([X, -X]))
    moved = lambda q: q.reshape(4, 3, 4, 10)[1:3].transpose(3, 0, 1, 2)
    want = typax.dense(stack).reshape(2, 4, 3, 4, 10)[:, 1:3].transpose(0, 4, 1, 2, 3)
    for f in (typax.lift(moved, "error"), moved):
        np.testing.assert_array_equal(typax.dense(jax.jit(jax.vmap(f))(stack)), want)
    _, ys = typax.scan(lambda c, q: (c, typax.dense(q[:, 4:8].mT)), 0, stack)
    np.testing.assert_array_equal(ys, typax.dense(stack)[:, :, 4:8].mT)


def test_numbers():
    for name, how in (*HOW.values(), ("mxfp4", {}), ("nvfp4_block", {})):
        q = typax.quantize(X, name, **how)
        if name in ("mxfp8", "mxfp4", "nvfp4_block"):
            with pytest.raises(TypeError, match="no op with the reference mul"):
                typax.lift(lambda q: -2 * q, "error")(q)
            with pytest.raises(TypeError, match=r"multiply of .* scales of .* are .*, which does not hold every product"):
                -2 * q
            continue
        for f in (lambda q: native(lambda q: -2 * q / 4, q), lambda q: jax.jit(lambda q: -(2 * q) / 4)(q)):
            doubled, dense = seen(f)(q)
            assert str(jax.typeof(doubled)) == str(q._type)
            np.testing.assert_allclose(dense, -typax.dense(q) / 2, rtol=1e-6)


def test_numbers_along_axes_that_have_scales():
    s, half = jnp.arange(1.0, 41.0).reshape(4, 10) / 40, jnp.arange(1.0, 5.0).astype(jnp.float16)
    f = lambda q: s[:, None] * q / half.astype("float32")[:, None, None]
    for shown in ("q4t", "u4zg4t"):
        q = typax.quantize(X, HOW[shown][0], **HOW[shown][1])
        for got in (
            native(f, q),
            q * s[:, None] / half.astype("float32")[:, None, None],
            typax.divide(typax.multiply(s[:, None], q), half.astype("float32")[:, None, None]),
        ):
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


def test_what_is_joined_along_axes_of_one_group():
    for shape, name, how in (((3, 1), "int8", {}), ((3, 5), "int4", {"group": 64}), ((1, 5), "nvfp4", {"axis": 0})):
        q = typax.quantize(X.reshape(4, -1)[: shape[0], : shape[1]], name, **how)
        a = -1 if how.get("axis") is None else 0
        got = typax.concatenate([q, 2 * q, q], axis=a)
        want = jnp.concatenate([typax.dense(q), 2 * typax.dense(q), typax.dense(q)], axis=a)
        assert isinstance(got, jax.Array if shape[a] == 1 else Quantized)
        np.testing.assert_array_equal(typax.dense(got), want)


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
    for name, how in (HOW["q4t"], HOW["u4zg4t"], ("nf4", {"axis": 1, "group": 8})):
        q = typax.quantize(X, name, **how)
        for value in (2.5, jnp.nan):
            f = lambda q, value=value: lax.pad(q, value, ((1, 2, 1), (0, 0, 0), (0, 0, 0)))
            g = lambda q, value=value: jnp.take(q, jnp.array([5, 1]), axis=0, mode="fill", fill_value=value)
            for h in (f, g):
                got = native(h, q)
                assert isinstance(got, Quantized)
                np.testing.assert_array_equal(typax.dense(got), h(typax.dense(q)))


def test_every_format():
    values = {name: typax.quantize(X.reshape(4, 120)[:, :64], name) for name in formats()}
    moved = lambda q: q[::2].T.reshape(2, 32, 2)[:, None].astype(jnp.bfloat16)
    all_of = lambda f: lambda values: {name: f(q) for name, q in values.items()}
    got, dense = jax.jit(seen(typax.lift(all_of(moved), "error")))(values)
    assert all(isinstance(x, Quantized) and x.nbytes <= values[name].nbytes for name, x in got.items())
    arrays = jax.jit(typax.dense)(values)
    same(dense, all_of(moved)(arrays))
    # NaN fills: in scales that are floats, bytes of e8m0, floats of 8 bits
    filled = lambda take, xs: {
        n: take(x, I[:, ::-1] * 3, axis=0) for n, x in xs.items() if n not in ("nf4_double", "dynamic8")
    }
    same(jax.jit(lambda xs: typax.dense(filled(typax.take, xs)))(values), filled(jnp.take, arrays))


def test_refused_with_the_numbers():
    q = typax.quantize(X[0], "int4", axis=0, group=4)
    slices = {"2:6": (2, 6, None), "0:6": (0, 6, None), "0:12:2": (0, 12, (2, 1))}
    for text, (i, j, strides) in slices.items():
        with pytest.raises(TypeError, match=rf"a slice {text} along axis 0 of q4\[12,10\] by groups \(4,1\) does not start"):
            slice_(q, start_indices=(i, 0), limit_indices=(j, 10), strides=strides)
        with pytest.raises(
            TypeError, match=rf"indexing of q4g4t\[12,10\]: a slice {text} along .*; do it to typax\.dense\(v\)"
        ):
            q[i : j : strides and strides[0]]
    with pytest.raises(TypeError, match=r"; those of typax\.requantize\(\.\.\., group=2\) would be cut there"):
        q[2:6]
    with pytest.raises(TypeError, match=r"as \[10, 12\]: a piece of 3 is no part of an axis of 10, nor the other way"):
        reshape(q, new_sizes=(10, 12), dimensions=None, sharding=None)


@pytest.mark.core
@pytest.mark.parametrize(("k", "n"), [(0, 4), (4, 0)])
def test_of_no_entries(k, n):
    x, y, shared = jnp.ones((2, k)), jnp.ones((n, 2)), int(k > 0)
    layouts = [
        ("int8", {}), ("int8", {"axis": None}), ("int4", {"group": 3}), ("nf4_double", {"axis": 0}), ("mxfp4", {}),
        ("nvfp4", {"axis": 0}), ("uint8", {"axis": 0, "group": 2, "zero_point": True}),
    ]  # fmt: skip
    moves = [
        (lambda q: typax.reshape(q, (-1,)), lambda d: d.reshape(0)),
        (lambda q: typax.reshape(q, (3, 0, 2)), lambda d: d.reshape(3, 0, 2)),
        (lambda q: typax.concatenate([q, q], axis=shared), lambda d: d),
        (lambda q: q[0:0:2, 1:1], lambda d: d[0:0, 1:1]),
        (lambda q: q[:0].T, lambda d: d[:0].T),
        (lambda q: typax.matmul(x, q), lambda d: x @ d),
        (lambda q: typax.matmul(q, y), lambda d: d @ y),
    ]
    d = jnp.zeros((k, n))
    for name, how in layouts:
        q = typax.quantize(d, name, **how)
        for f, g in moves:
            got, want = typax.dense(f(q)), g(d)
            assert got.shape == want.shape and not got.any(), (name, how)
    loss = lambda q: (x @ q.reshape(k, n)).sum() + q.reshape(-1).sum()
    assert jax.typeof(jax.jit(jax.grad(typax.lift(loss)))(q)).shape == (k, n)


def test_an_empty_part_adds_nothing():
    for name, a in (("int8", -1), ("int4", 0)):
        q = typax.quantize(jnp.arange(12.0).reshape(3, 4), name, axis=a)
        both = typax.concatenate([typax.quantize(jnp.zeros((0, 4) if a == 0 else (3, 0)), name, axis=a), q], axis=a)
        assert jax.typeof(both) == jax.typeof(q) and (typax.dense(both) == typax.dense(q)).all()
