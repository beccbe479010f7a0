"""Products with codes as CPUs run them: to float accuracy whatever the rows, the same in every transformation, lean."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import typax
from typax.quantized import kernels

K, N, M = 1024, 512, 4  # more codes than are decoded at a time
WEIGHTS = {
    "q8t": ("int8", {"axis": 0}), "q8": ("int8", {}), "q4t": ("int4", {"axis": 0}),
    "q4g128t": ("int4", {"axis": 0, "group": 128}),
}  # fmt: skip
MORE = {
    "nf4": ("nf4", {"axis": 0}), "q8<axis=(-2,-1)>": ("int8", {"axis": None}), "f8e4m3t": ("fp8_e4m3", {"axis": 0}),
    "mxfp4t": ("mxfp4", {"axis": 0}), "q4g100t": ("int4", {"axis": 0, "group": 100}),
    "q8g128t": ("int8", {"axis": 0, "group": 128}), "nvfp4t": ("nvfp4", {"axis": 0}),
}  # fmt: skip


def weights(name, k=K, n=N):
    format, how = (WEIGHTS | MORE)[name]
    w = np.random.default_rng(0).normal(size=(k, n)).astype(np.float32)
    w[3, ::2] = 0  # what meets the large entry of a row
    return typax.quantize(w, format, **how)


def normal(m=M, k=K, seed=1):
    return np.random.default_rng(seed).normal(size=(m, k)).astype(np.float32)


def with_one(ratio):
    x = normal()
    x[:, 3] = ratio * np.abs(x).mean(1)
    return x


ROWS = {
    "normal": normal(), "positive": np.abs(normal()), "relu": np.maximum(normal(), 0), "tiny": normal() * np.float32(2**-90),
    "tiniest": normal() * np.float32(2**-122), "large": normal() * np.float32(2**90),
    "largest": normal() * np.float32(2**116), "log-uniform": np.exp2(20 * normal()).astype(np.float32) * np.sign(normal()),
    "zeros": normal() * (np.arange(M) % 2)[:, None], "few": normal() * (np.arange(K) % 64 == 3),
    **{f"one {r:g}": with_one(r) for r in (13, 1e2, 1e3, 3e3, 1e4, 1e5, 1e6)},
    "few, one 1e6": with_one(1e6) * (np.arange(K) % 64 == 3),
}  # fmt: skip


def error(y, x, w):
    """The largest error of entries that meet the large entry of a row, and of those that do not, in 2^-24 |x| · |w|."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    bound = np.abs(x) @ np.abs(w)
    found = np.abs(np.asarray(y, np.float64) - x @ w) / np.where(bound == 0, 1, bound) * 2**24
    return found[:, 1::2].max(), found[:, ::2].max()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.core) if n == "q8t" else n for n in WEIGHTS])
def test_float_accuracy(name):
    q = weights(name)
    d = np.asarray(typax.dense(q))
    f, dot = typax.jit(typax.matmul), jax.jit(jnp.matmul)
    for rows, x in ROWS.items():
        usual = error(dot(normal(), d), normal(), d)
        for got, of_floats, of_normal in zip(error(f(x, q), x, d), error(dot(x, d), x, d), usual, strict=True):
            assert got <= 2 * max(of_floats, of_normal), rows
    x = normal()
    x[1, 5], x[2, 7], x[3, 9] = np.nan, np.inf, -np.inf
    y, want = np.asarray(f(x, q)), np.asarray(dot(x, d))
    assert np.isnan(y[1]).all() and (np.isnan(y) == np.isnan(want)).all()
    assert (np.isposinf(y) == np.isposinf(want)).all() and (np.isneginf(y) == np.isneginf(want)).all()
    for got, of_floats in zip(error(y[:1], x[:1], d), error(want[:1], x[:1], d), strict=True):
        assert got <= 2 * max(of_floats, 1)


def agree(got, want, rtol=1e-5):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


@pytest.mark.core
def test_rows_are_rows_however_they_are_stacked():
    q, d = weights("q8t"), typax.dense(weights("q8t"))
    x = normal(6).reshape(3, 2, K)
    f = typax.matmul
    many = jax.jit(jax.vmap(jax.vmap(f, (0, None)), (0, None)))
    agree(many(x, q), x @ d)
    agree(typax.jit(f)(x, q), x @ d)
    agree(typax.jit(f)(x[0, 0], q), x[0, 0] @ d)
    both = typax.jit(lambda a, b: typax.vmap(f)(x[:2], typax.stack([a, b])))
    q8 = [weights("q8t"), typax.lift(lambda w: w * 2.0)(weights("q8t"))]
    agree(both(*q8), jnp.stack([a @ typax.dense(b) for a, b in zip(x, q8, strict=False)]))
    only = typax.jit(lambda a, b: typax.vmap(f, (None, 0))(x[0], typax.stack([a, b])))
    agree(only(*q8), jnp.stack([x[0] @ typax.dense(b) for b in q8]))
    steps = typax.jit(lambda x, q: jax.lax.scan(lambda c, x: (c, f(x, q)), 0, x)[1])
    agree(steps(x, q), x @ d)
    # the rows of all choose one case: there is no selection among the results of all cases
    text = many.lower(x, q).as_text()
    assert "stablehlo.case" in text and "x512xi1>" not in text
    low = typax.lift(lambda w: w.astype(jnp.bfloat16))(q)
    agree(typax.jit(f)(x.astype(jnp.bfloat16), low), x.astype(jnp.bfloat16).astype(jnp.float32) @ d, 2.0**-7)


@pytest.mark.core
def test_on_a_mesh():
    x, q = normal(8), weights("q8t")
    want = x @ typax.dense(q)
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        rows = jax.shard_map(typax.matmul, in_specs=(jax.P("i"), type(q).P()), out_specs=jax.P("i"))
        agree(jax.device_get(jax.jit(rows)(jax.device_put(x, jax.P("i")), q)), want)
        explicit = typax.jit(typax.matmul)(jax.device_put(x, jax.P("i")), q)
        assert jax.typeof(explicit).sharding.spec[0] == "i"
        agree(jax.device_get(explicit), want)


def test_derivatives_are_those_of_the_reference():
    x = normal()
    f = lambda x, q: jnp.sum(typax.matmul(x, q) ** 2)
    for name in ("q8t", "q4g128t"):
        q = weights(name)
        d = typax.dense(q)
        gx, gq = typax.jit(jax.grad(f, (0, 1)))(x, q)
        agree(gx, 2 * (x @ d) @ d.T)
        agree(gq, 2 * x.T @ (x @ d))
        dots = jax.jvp(jax.grad(lambda x, q=q: f(x, q)), (x,), (x,))[1]
        agree(dots, 2 * (x @ d) @ d.T)


def test_what_activations_are():
    x = normal()
    for name in ("q8t", "q8", "q4t", "q4g128t", "nf4", "q8<axis=(-2,-1)>", "q4g100t", "mxfp4t"):
        q = weights(name)
        d = typax.dense(q)
        y = typax.jit(lambda x, q: typax.matmul(x, q, activations="dynamic"))(x, q)
        agree(y, x @ d, 0.05 if name == "nf4" else 0.02)
    for name in ("q8t", "q4t", "q4g128t", "nf4", "f8e4m3t", "q4g100t", "q8g128t", "nvfp4t"):
        q = weights(name)
        y = typax.jit(lambda x, q: typax.matmul(x, q, activations="bfloat16"))(x, q)
        agree(y, x @ typax.dense(q), 2.0**-7)
    q = weights("q8t")
    codes = np.clip(np.rint(x / np.float32(0.125)), -127, 127) * 0.125
    agree(typax.jit(lambda x, q: typax.matmul(x, q, activations=0.125))(x, q), codes @ typax.dense(q))
    want = typax.dense(typax.quantize(x)) @ typax.dense(q)
    agree(typax.jit(lambda x, q: typax.matmul(x, q, activations="dynamic"))(x, q), want)


@pytest.mark.core
def test_every_byte_is_decoded():
    for name in ("fp8_e4m3", "nf4", "mxfp4", "int4"):
        format = typax.quantized.formats()[name]
        words = np.arange(256, dtype=np.uint8)
        codes, unit = kernels.bfloats(format, False)(jnp.asarray(words))
        whole = typax.quantized.packing.unpack(format, jnp.asarray(words.view(format.storage)).reshape(256, 1))
        want = typax.quantized.rounding.number(format, whole, jnp.float32).astype(jnp.bfloat16)
        got = codes.astype(jnp.float32).T * np.float32(unit)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(jnp.float32)))


def test_codes_that_are_turned_stay_bytes():
    q = jax.eval_shape(lambda w: typax.quantize(w, axis=None), jax.ShapeDtypeStruct((1024, 512), jnp.float32))
    f = typax.jit(lambda x, q: typax.matmul(x, q.T, activations="dynamic"))
    program = f.lower(jax.ShapeDtypeStruct((16, 512), jnp.float32), q).compile().as_text()
    assert not re.search(r"s32\[(1024,512|512,1024)\]", program)


@pytest.mark.parametrize("activations", ["float", "dynamic", "bfloat16"])
def test_no_dense_weights_are_made(activations):
    """The compiled program holds no array of floats of the size of the weights, which are 16 blocks."""
    k, n = 2048, 2050  # no number of whole registers
    for name, format, how in [(name, *WEIGHTS[name]) for name in WEIGHTS] + [("nf4", "nf4", {"axis": 0, "group": 64})] + [
        ("f8e4m3t", "fp8_e4m3", {"axis": 0})] * (activations == "bfloat16"):  # fmt: skip
        w = jax.ShapeDtypeStruct((k, n), jnp.float32)
        q = jax.eval_shape(lambda w: typax.quantize(w, format, **how), w)  # noqa: B023
        for m in (1, 64) if name in ("q8t", "q4g128t") else (64,):
            x = jax.ShapeDtypeStruct((m, k), jnp.float32)
            program = typax.jit(lambda x, q: typax.matmul(x, q, activations=activations)).lower(x, q).compile()
            sizes = re.findall(r"(?:f32|bf16|f16|s32)\[([0-9,]+)\]", program.as_text())
            largest = max(int(np.prod([int(s) for s in size.split(",")])) for size in sizes)
            assert largest <= k * n // 2, (name, m)
            assert not re.search(rf"= u8\[{k},{n}\]\S* (fusion|copy)\(", program.as_text()), name  # nor are words copied
            assert program.memory_analysis().temp_size_in_bytes <= 2 * k * n, (name, m)


def test_sizes_that_no_block_divides(monkeypatch):
    """Blocks then overlap: nothing is converted as a whole, nor counted twice."""
    monkeypatch.setattr(kernels, "BLOCK", 1 << 18)
    k, n, m = 1021, 509, 521
    x, w = normal(m, k), np.random.default_rng(2).normal(size=(k, n)).astype(np.float32)
    for name, how, activations in [("int8", {"axis": 0}, "float"), ("int8", {}, "float"), ("int4", {"axis": 0}, "dynamic"),
                                   ("int8", {"axis": None}, "float"), ("int8", {"axis": 0}, "bfloat16"),
                                   ("fp8_e4m3", {"axis": 1}, "float"), ("int4", {"axis": None}, "bfloat16")]:  # fmt: skip
        q = typax.quantize(w, name, **how)
        program = typax.jit(lambda x, q: typax.matmul(x, q, activations=activations)).lower(x, q).compile()  # noqa: B023
        sizes = re.findall(r"(?:f32|f16|bf16|s32)\[([0-9,]+)\]", program.as_text())
        assert all(np.prod(list(map(int, size.split(",")))) != k * n for size in sizes), (name, how)
        agree(program(x, q), x @ typax.dense(q), {"float": 1e-6, "bfloat16": 2.0**-7, "dynamic": 0.02}[activations])
