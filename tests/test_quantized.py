"""Quantized arrays: every format, bit by bit, whoever computes it; and every layout."""

import pickle
import re

import _quantized_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import typax
import typax.laws
from gallery.int3 import INT3
from typax.quantized import Format, Quantized, contract, error, fake, formats

CASES = [(name, False) for name in formats() if name not in ("nf4_double", "dynamic8")]
CASES += [(name, True) for name in ("int8", "uint8", "int4", "uint4")]
cases = pytest.mark.parametrize(("name", "zero_point"), CASES, ids=lambda v: {True: "z", False: ""}.get(v, v))


def rows(n=64):
    """Rows that quantizers stumble over."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, n)).astype(np.float32)
    x[1] = 0
    x[2] = -0.0
    x[3, 5] = np.nan
    x[4, 7] = np.inf
    x[5, 9] = -np.inf
    x[6] *= 1e-37
    x[7] *= 2.0**-126 / 8  # many subnormal
    x[8] = np.copysign(np.float32(3e38), x[8])
    x[9] *= 1e37
    x[10] = np.abs(x[10])
    x[11] = -np.abs(x[11])
    x[12, 3] = 1e6
    x[13] = np.round(x[13] * 4) / 4 * 6  # ties
    x[14] = np.tile(np.array([448, 464, -448, 57344.0, 6, 5, 2.5, 0.25], np.float32), n // 8)
    x[15] = 2.0 ** rng.integers(-20, 20, n)
    x[16] = np.float32(2.0**-126)
    x[17] = 1e-40
    return x


def parts(q):
    """Codes, scales and zero points of a value, on the host."""
    scale = q.scale
    if isinstance(scale, Quantized):
        scale = tuple(np.asarray(s) for s in scale.components()[:2])
    zero = getattr(q, "zero_point", None)
    return (
        np.asarray(q.qvalue),
        scale if isinstance(scale, tuple) else np.asarray(scale),
        None if zero is None else np.asarray(zero),
    )


def same_bits(got, want):
    flat = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(flat[0]) == len(flat[1])
    for g, w in zip(*flat, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape, (g.dtype, g.shape, w.dtype, w.shape)
        nan = np.isnan(g.astype(np.float32)) & np.isnan(w.astype(np.float32))  # of any bits
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[g.dtype.itemsize]
        differ = (np.ascontiguousarray(g).view(bits) != np.ascontiguousarray(w).view(bits)) & ~nan
        assert not differ.any(), (np.argwhere(differ)[:5], g[differ][:5], w[differ][:5])


@pytest.mark.core
@cases
def test_codes_and_scales_are_those_of_the_specification(name, zero_point):
    x, group = rows(), formats()[name].group or 16
    q = typax.quantize(x, name, group=group, zero_point=zero_point)
    want = reference.quantize(name, x.reshape(24, -1, group), zero_point)
    same_bits(parts(q), want)
    again = jax.jit(lambda x: typax.quantize(x + 0.0, name, group=group, zero_point=zero_point))(jnp.asarray(x))
    same_bits(parts(again), parts(q))
    assert jax.typeof(again) == jax.typeof(q)
    d = np.asarray(typax.dense(q))
    bad = np.zeros_like(x, bool).reshape(24, -1, group)
    bad[~np.isfinite(x.reshape(bad.shape)).all(-1)] = True
    assert (np.isnan(d) == bad.reshape(x.shape)).all()
    same_bits(np.asarray(jax.jit(typax.dense)(q)), d)


@cases
def test_behind_a_producer_of_bfloat16_and_on_large_arrays(name, zero_point):
    group = formats()[name].group or 16
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.normal(size=(256, 256)), jnp.bfloat16) for _ in range(2))
    a = a.at[3, 200].set(jnp.nan).at[255, 255].set(jnp.nan)
    product = a * b  # 65,536 elements, of which XLA's own reductions may lose the NaN
    fused = jax.jit(lambda a, b: typax.quantize(a * b, name, group=group, zero_point=zero_point))(a, b)
    want = reference.quantize(name, np.asarray(product.astype(jnp.float32)).reshape(256, -1, group), zero_point)
    same_bits(parts(fused), want)
    assert fused.dtype == jnp.bfloat16 and "<bfloat16>" in str(jax.typeof(fused))


LAYOUTS = {
    "q8[6,10]": ("int8", {}), "q8t[6,10]": ("int8", {"axis": 0}), "q8<axis=(-2,-1)>[6,10]": ("int8", {"axis": None}),
    "q4[6,10]": ("int4", {}), "q4t[6,10]": ("int4", {"axis": 0}), "q4g4[6,10]": ("int4", {"group": 4}),
    "q4g4t[6,10]": ("int4", {"axis": -2, "group": 4}), "q4g3[6,10]": ("int4", {"group": 3}),
    "u4z[6,10]": ("uint4", {"zero_point": True}), "u8zg4t[6,10]": ("uint8", {"axis": 0, "group": 4, "zero_point": True}),
    "q8g2x4[6,10]": ("int8", {"axis": (0, 1), "group": (2, 4)}),
    "f8e4m3<axis=(-2,-1),group=(None,4)>[6,10]": ("fp8_e4m3", {"axis": (0, 1), "group": (None, 4)}),
    "nf4[6,10]": ("nf4", {}), "nf4dg4t[6,10]": ("nf4_double", {"axis": 0, "group": 4}),
    "mxfp8[6,10]": ("mxfp8", {}), "mxfp4t[6,10]": ("mxfp4", {"axis": 0}), "nvfp4[6,10]": ("nvfp4", {}),
}  # fmt: skip


@pytest.mark.parametrize("shown", LAYOUTS)
def test_a_layout_is_rows_with_one_scale_each(shown):
    name, how = LAYOUTS[shown]
    x = np.random.default_rng(2).normal(size=(6, 10)).astype(np.float32)
    q = typax.quantize(x, name, **how)
    assert str(jax.typeof(q)) == shown and q.shape == (6, 10) and isinstance(q, Quantized)
    step = formats()[name].codes.gap * 2.01 if name.startswith("mx") else formats()[name].codes.gap * 0.51
    d = np.asarray(typax.dense(q))
    if name != "nf4_double":
        scale = np.abs(x).max() / (formats()[name].codes.largest - 0.5 * how.get("zero_point", False))
        assert np.abs(d - x).max() <= step * scale * (2 if name.startswith("u") else 1)
    restored = pickle.loads(pickle.dumps(q))
    assert jax.typeof(restored) == jax.typeof(q) and (np.asarray(typax.dense(restored)) == d).all()
    grad = jax.grad(lambda q: jnp.sum(typax.dense(q) ** 2))(q)
    assert (np.asarray(grad) == 2 * d).all()
    stack = jax.vmap(lambda x: typax.quantize(x, name, **how))(jnp.stack([x, 3 * x]))
    assert stack.shape == (2, 6, 10) and (np.asarray(typax.dense(stack))[0] == d).all()
    if jax.typeof(q).decl.cls.general:
        moved = typax.retract(q, jnp.zeros((6, 10)))
        assert jax.typeof(moved) == jax.typeof(q)


def test_of_more_axes_and_none():
    x = np.random.default_rng(3).normal(size=(2, 3, 4, 5)).astype(np.float32)
    q = typax.quantize(x, axis=(0, 2, 3))  # one scale for each index of axis 1, as for convolutions
    assert q.scale.shape == (3,) and np.abs(typax.dense(q) - x).max() < 0.02
    assert str(jax.typeof(q)) == "q8<axis=(-4,-2,-1)>[2,3,4,5]"
    for shape in [(0, 4), (3, 0), (0,)]:
        for name in ("int8", "int4", "nf4", "mxfp4", "nvfp4"):
            assert typax.dense(typax.quantize(np.zeros(shape, np.float32), name)).shape == shape
    q = typax.quantize(np.ones((2, 1), np.float32), "int4")
    assert (typax.dense(q) == 1).all() and q.qvalue.shape == (2, 1)


def test_second_level_of_few_and_of_huge_scales():
    x = np.random.default_rng(5).normal(size=(8, 128)).astype(np.float32)
    few, many = (typax.quantize(np.tile(x, (1, n)), "nf4_double") for n in (1, 128))
    assert few.nbytes == 8 * (64 + 2 + 4 + 4)  # codes, scales, and those of the second level: nothing fills a group
    # which are the same codes, of the same numbers again
    assert (many.qvalue.reshape(8, 128, -1) == few.qvalue.reshape(8, 1, -1)).all()
    np.testing.assert_allclose(typax.dense(many)[:, :128], typax.dense(few), rtol=1e-5, atol=1e-6)
    for huge in (x * np.float32(5e37), np.full((8, 64), np.finfo(np.float32).max)):
        got, one = (np.asarray(typax.dense(typax.quantize(huge, name))) for name in ("nf4_double", "nf4"))
        assert np.isfinite(got).all() and np.abs(got / np.float32(1e37) - one / np.float32(1e37)).max() < 0.1


def test_dtypes():
    x = np.random.default_rng(4).normal(size=(3, 32))
    want = typax.quantize(x.astype(np.float32), "int4")
    for dtype in ("float16", "bfloat16", "float64"):
        with jax.enable_x64(dtype == "float64"):
            q = typax.quantize(jnp.asarray(x.astype(dtype)), "int4")
            assert q.dtype == dtype and typax.dense(q).dtype == dtype
            f32 = typax.quantize(np.asarray(x.astype(dtype)).astype(np.float32), "int4")
            assert (q.qvalue == f32.qvalue).all() and (q.scale == f32.scale).all()
    assert want.dtype == jnp.float32


def test_scales_are_chosen():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4, 256)).astype(np.float32)
    x[:, 0] = 30
    error = lambda **how: float(jnp.sum((typax.dense(typax.quantize(x, "int4", **how)) - x)[:, 1:] ** 2))
    whole = lambda **how: float(jnp.sum((typax.dense(typax.quantize(x, "int4", **how)) - x) ** 2))
    assert whole(scale="mse") < whole() and whole(scale="mse", zero_point=True) < whole(zero_point=True)
    assert error(scale=("percentile", 99.0)) < error() / 4
    q = typax.quantize(x, "int8", scale=np.full((4,), 0.125, np.float32))
    assert (np.asarray(q.qvalue) == np.clip(np.rint(x / 0.125), -127, 127)).all() and (q.scale == 0.125).all()
    q = typax.quantize(x, "uint8", scale=0.25, zero_point=np.uint8(128))
    assert (np.asarray(q.qvalue) == np.clip(np.rint(x / 0.25) + 128, 0, 255)).all()
    q = typax.quantize(x, "int8", scale=np.array([0.25, 0, -1, np.inf], np.float32))
    assert np.isnan(np.asarray(typax.dense(q))).all(-1).tolist() == [False, False, True, True]
    p = np.percentile(np.abs(x), 99, axis=-1, method="inverted_cdf").astype(np.float32)
    np.testing.assert_allclose(typax.quantize(x, "int8", scale=("percentile", 99.0)).scale, p / 127, rtol=1e-6)


@pytest.mark.parametrize("exponents", ["even", "ceil", "rceil"])
def test_exponents_of_mx(exponents):
    x = rows(32)[:1].repeat(64, 0) * 2.0 ** np.random.default_rng(6).uniform(-4, 4, (64, 1)).astype(np.float32)
    q = typax.quantize(x.astype(np.float32), "mxfp8", exponents=exponents)
    a = np.abs(x).max(-1).astype(np.float64)
    if exponents == "ceil":
        e = np.ceil(np.log2(a)) - 8
    elif exponents == "rceil":
        e = np.ceil(np.log2(a / 448))
    else:
        fraction, e = np.frexp(a)
        e = e - 1 + (2 * fraction + 2.0**-4 >= 2) - 8
    assert (np.asarray(q.scale)[:, 0] == e + 127).all()
    if exponents != "even":  # nothing saturates
        assert (np.abs(typax.dense(q)).max(-1) >= a * (1 - 2.0**-4)).all()


REFUSED = [
    ({"format": "int5"}, ValueError, r"no format is called 'int5'; the formats are int8, int4"),
    ({"axis": 2}, ValueError, "quantize: axis=2 does not name distinct axes of an array of rank 2"),
    ({"axis": ()}, ValueError, r"quantize: axis=\(\), group=None: values share no scale"),
    ({"group": 0}, ValueError, "group=0, but a group has at least one value"),
    ({"axis": (0, 1), "group": (4,)}, ValueError, r"group=\(4,\) has 1 entries, but axis=\(0, 1\) names 2 axes"),
    ({"scale": "max"}, ValueError, 'quantize: scale=\'max\'; it is "absmax", "mse"'),
    ({"scale": ("percentile", 0)}, ValueError, "a percentile lies above 0"),
    ({"scale": np.ones((3, 7), np.float32)}, ValueError, r"scale has shape \(3, 7\), which does not broadcast .* \(6,\)"),
    (
        {"format": "nvfp4", "scale": 1.0},
        ValueError,
        "scales of nvfp4 are codes of fp8_e4m3, .* by typax.quantized.from_codes",
    ),
    ({"scale": None}, ValueError, 'quantize: scale=None; it is "absmax", "mse"'),
    ({"scale": True}, ValueError, 'quantize: scale=True; it is "absmax", "mse"'),
    ({"scale": np.complex64(1)}, TypeError, "quantize: a scale is a real number, got complex64"),
    ({"scale": ("percentile", "99")}, ValueError, r"scale=\('percentile', '99'\); it is"),
    ({"zero_point": None}, ValueError, "zero_point=None; it is True, False, or the zero points"),
    ({"format": "nf4", "zero_point": True}, ValueError, "nf4 has no zero point"),
    ({"zero_point": np.int8(3)}, ValueError, "a zero point is given together with its scale"),
    ({"format": "uint8", "scale": 1.0, "zero_point": np.float32(3)}, TypeError, "a zero point is a code, an integer"),
    ({"exponents": "ceil"}, ValueError, "exponents= is for scales that are powers of two, and int8 has float32"),
    ({"format": "mxfp8", "exponents": "up"}, ValueError, "exponents='up' is none of 'floor', 'even'"),
    ({"format": None}, ValueError, "no format is called None; the formats are int8"),
    ({"format": ["int8"]}, ValueError, r"no format is called \['int8'\]"),
    ({"group": 2.5}, ValueError, r"quantize: group=2\.5 is neither a whole number"),
    ({"group": True}, ValueError, "group=True is neither a whole number"),
    ({"axis": "rows"}, ValueError, "quantize: axis='rows' is neither the number of an axis"),
    ({"key": 3}, TypeError, r"quantize: key=3 is not one key; use jax\.random\.key\(0\)"),
    ({"key": np.ones(2, np.float32)}, TypeError, r"key=float32\[2\] is not one key"),
    ({"format": "nf4_double", "axis": None}, ValueError, "quantized in groups, but there is one scale only"),
]


@pytest.mark.parametrize(("how", "error", "says"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused(how, error, says):
    with pytest.raises(error, match=says):
        typax.quantize(np.ones((6, 10), np.float32), **how)


def test_twice_is_to_requantize():
    q = typax.quantize(np.ones((6, 10), np.float32))
    for f in (typax.quantize, jax.jit(typax.quantize)):
        with pytest.raises(TypeError, match=r"quantize: q8\[6,10\] is quantized already; use typax\.requantize"):
            f(q)
    with pytest.raises(TypeError, match=r"requantize: float32\[6,10\] is not quantized; use typax\.quantize"):
        typax.requantize(np.ones((6, 10), np.float32), "int4")


def test_components_must_be_those_of_the_format():
    q = typax.quantize(np.ones((6, 10), np.float32), "int4", group=4)
    cls, statics = type(q), {"scheme": q.scheme, "bits": 4, "g0": 4, "p0": 2}
    with pytest.raises(TypeError, match="codes of int4 are uint8, got int8"):
        cls(q.qvalue.view(jnp.int8), q.scale, **statics)
    with pytest.raises(TypeError, match=r"4 codes of int4 take 2 bytes, got uint8\[6,3,1\]"):
        cls(q.qvalue[..., :1], q.scale, **statics)
    with pytest.raises(ValueError, match="int9: 512 codes do not fit 8 bits"):
        Format("int9", "q9", typax.quantized.Integers(-256, 255))


def test_scales_follow_the_codes_on_a_mesh():
    x = jnp.asarray(np.random.default_rng(7).normal(size=(16, 8)).astype(np.float32))
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        for spec, name, how, shown in [
            (jax.P("i"), "int4", {"axis": 0, "group": 4}, "q4g4t[16@i,8]"),
            (jax.P(None, "i"), "int4", {"axis": 0, "group": 4}, "q4g4t[16,8@i]"),
            (jax.P("i"), "int4", {"group": 4}, "q4g4[16@i,8]"),
            (jax.P("i"), "int4", {"axis": 0}, "q4t[16@i,8]"),
            (jax.P(None, "i"), "nvfp4", {"axis": 0}, "nvfp4t[16,8@i]"),
            (jax.P("i"), "int8", {"axis": (0, 1), "group": 4}, "q8g4x4[16@i,8]"),
        ]:
            q = typax.quantize(jax.device_put(x, spec), name, **how)
            assert str(jax.typeof(q)) == shown
            assert (jax.device_get(typax.dense(q)) == np.asarray(typax.dense(typax.quantize(x, name, **how)))).all()
            cut = jax.typeof(q).partition_spec(spec)[0]
            f = jax.jit(jax.shard_map(typax.dense, in_specs=cut, out_specs=spec))
            assert (jax.device_get(f(q)) == jax.device_get(typax.dense(q))).all()
        says = r"axis 0 of float32\[16@i,8\] has 2 shards of 8, which groups of 16 do not divide; use a group that divides 8"
        with pytest.raises(TypeError, match=says):
            typax.quantize(jax.device_put(x, jax.P("i")), "int4", axis=0, group=16)


SOME = [
    "raise-lower",
    "lowered-types",
    "equality",
    "dense-declared",
    "rank-change",
    "dense-of-stack",
    "retract-zero",
    "fan-out",
]


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_laws(name):
    q = typax.quantize(jnp.linspace(-1, 1, 60).reshape(6, 10), name, group=4)
    others = [typax.quantize(jnp.linspace(-2, 1, 60).reshape(6, 10), name, group=4)]
    result = typax.laws.check(type(q), examples=[q, *others], laws=SOME)
    assert result.ok, str(result)


# --- products ---------------------------------------------------------------------------------------------------------

WEIGHTS = [
    ("int8", {}), ("int8", {"axis": 0}), ("int8", {"axis": None}), ("int8", {"axis": (0, 1), "group": (4, 3)}),
    ("int4", {"axis": 0, "group": 5}), ("int4", {"group": 4}), ("uint4", {"axis": 0, "group": 4, "zero_point": True}),
    ("nf4", {"axis": 0}), ("mxfp4", {"axis": 0}), ("nvfp4", {"axis": 0}), ("fp8_e4m3", {}),
]  # fmt: skip


def close(got, want, x, w):
    """To float accuracy: within a few rounding errors of |x| . |w|."""
    assert got.shape == want.shape and got.dtype == want.dtype
    bound = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)) * 2.0**-20 + 1e-30
    assert (np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)) <= bound).all()


@pytest.mark.parametrize("block", [16, 1 << 18])
@pytest.mark.parametrize(("name", "how"), WEIGHTS, ids=lambda v: v if isinstance(v, str) else "")
def test_products_run_on_the_codes(name, how, block, monkeypatch):
    monkeypatch.setattr(contract, "BLOCK", block)
    typax.matmul.forget()
    typax.dot_general.forget()
    rng = np.random.default_rng(8)
    x, w = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((3, 12), (12, 10)))
    q = typax.quantize(w, name, **how)
    d = typax.dense(q)
    close(typax.matmul(x, q), x @ d, x, d)
    if block == 16:
        y = typax.matmul(x, q, activations="bfloat16")
        assert np.abs(y - x @ d).max() < 2.0**-6 * np.abs(x @ d).max()
        return
    close(typax.matmul(q, x.T[:10]), d @ x.T[:10], d, x.T[:10])
    close(typax.matmul(x[0], q), x[0] @ d, x[0], d)
    # the gradients: that of the activations runs on the codes
    f = jax.grad(lambda x, q: jnp.sum(typax.matmul(x, q) ** 2), argnums=(0, 1))
    (gx, gq), y = f(x, q), x @ d
    close(gx, 2 * y @ d.T, 2 * y, d.T)
    close(gq, 2 * x.T @ y, 2 * x.T, y)
    assert "= dense" not in str(jax.make_jaxpr(lambda x: f(x, q)[0])(x))


def test_stacks_and_batches_of_products():
    rng = np.random.default_rng(9)
    x, w = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((2, 3, 12), (2, 12, 10)))
    q = typax.quantize(w, "int4", axis=1, group=4)
    assert str(jax.typeof(q)) == "q4g4t[2,12,10]"
    want = x @ typax.dense(q)
    np.testing.assert_allclose(typax.matmul(x, q), want, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(typax.matmul)(x, q), want, atol=1e-5)
    _, ys = jax.lax.scan(lambda c, xq: (c, typax.matmul(*xq)), 0, (x, q))
    np.testing.assert_allclose(ys, want, atol=1e-5)
    half = typax.quantize(w.astype(jnp.bfloat16), "int4", axis=1, group=4)
    assert typax.matmul(x.astype(jnp.bfloat16), half).dtype == jnp.bfloat16
    one = typax.quantize(w[0], "nvfp4", axis=0)
    np.testing.assert_allclose(typax.matmul(x, one), x @ typax.dense(one), atol=1e-5)


def test_integers_meet_integers():
    rng = np.random.default_rng(10)
    x, w = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((3, 12), (12, 10)))
    a = typax.quantize(x)
    for how in ({"axis": 0}, {"axis": 0, "group": 5}, {"axis": None}):
        for name in ("int8", "int4"):
            b = typax.quantize(w, name, **how)
            np.testing.assert_allclose(typax.matmul(a, b), typax.dense(a) @ typax.dense(b), atol=1e-5)
    dynamic = typax.matmul(x, typax.quantize(w, axis=0), activations="dynamic")
    np.testing.assert_allclose(dynamic, typax.matmul(a, typax.quantize(w, axis=0)), atol=1e-5)
    given = typax.matmul(x, typax.quantize(w, axis=0), activations=0.125)
    codes = np.clip(np.rint(np.asarray(x) / 0.125), -127, 127) * 0.125
    np.testing.assert_allclose(given, codes @ typax.dense(typax.quantize(w, axis=0)), atol=1e-5)
    # longer than what int32 holds: 127 * 127 * 140000
    n = 140_000
    long = typax.matmul(typax.quantize(jnp.ones((1, n))), typax.quantize(jnp.ones((n, 1)), axis=0))
    assert abs(float(long[0, 0]) / n - 1) < 1e-6
    with pytest.raises(ValueError, match='activations=\'int8\'; they are "float", "dynamic"'):
        typax.matmul(x, typax.quantize(w), activations="int8")
    for wrong in (float("inf"), True, 0, -0.5):
        with pytest.raises(ValueError, match="or a scale above 0"):
            typax.matmul(x, typax.quantize(w), activations=wrong)


PAIRS = [
    (("int8", {"group": 5}), ("int4", {"axis": 0, "group": 10})),  # groups of one are pieces of those of the other
    (("int8", {"group": 12}), ("nvfp4", {"axis": 0, "group": 4})),
    (("mxfp4", {}), ("mxfp4", {"axis": 0})),
    (("int8", {"axis": (0, 1), "group": (2, 4)}), ("int8", {"axis": (0, 1), "group": (8, 3)})),
    (("int4", {"group": 4}), ("int8", {"axis": 0})),  # none of the second: exchanged
    (("uint4", {"zero_point": True}), ("int8", {"axis": 0})),  # these as floats
    (("mxfp8", {}), ("fp8_e4m3", {})), (("int8", {"axis": 0}), ("nf4_double", {"axis": 0, "group": 6})),
    (("int8", {"group": 4}), ("int8", {"axis": 0, "group": 3})),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{a[0]}-{b[0]}" for a, b in PAIRS])
def test_any_two_quantized_arrays_meet(pair, monkeypatch):
    monkeypatch.setattr(contract, "BLOCK", 32)
    rng = np.random.default_rng(14)
    (a, b), (x, w) = pair, (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((7, 23), (23, 9)))
    a, b = typax.quantize(x, a[0], **a[1]), typax.quantize(w, b[0], **b[1])
    x, w = typax.dense(a), typax.dense(b)
    typax.matmul.forget()
    typax.dot_general.forget()
    close(jax.jit(typax.matmul)(a, b), x @ w, x, w)
    of_both = lambda a, b: jnp.swapaxes(typax.dot_general(b, a, (((0,), (1,)), ((), ()))), 0, 1)
    close(jax.jit(of_both)(a, b), x @ w, x, w)
    text = jax.jit(typax.matmul).lower(a, b).as_text()
    assert bool(re.search(r"dot_general .*xi8>\) -> tensor<[0-9x]+xi32>", text)) == (pair in PAIRS[:5])
    typax.matmul.forget()
    typax.dot_general.forget()


def test_stacks_of_two_quantized_arrays():
    rng = np.random.default_rng(15)
    x, w = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((2, 3, 12), (2, 12, 5)))
    a, b = typax.quantize(x), typax.quantize(w, axis=1)
    x, w = typax.dense(a), typax.dense(b)
    row = typax.quantize(x[0, 1])
    for i, j in ((a, b), (a, b[0]), (a[0], b), (row, b), (row, b[1]), (a, row)):
        got, want = jax.eval_shape(typax.matmul, i, j), typax.dense(i) @ typax.dense(j)
        assert got.shape == want.shape
    for i, j in ((a, b), (row, b)):
        np.testing.assert_allclose(typax.matmul(i, j), typax.dense(i) @ typax.dense(j), atol=1e-5)
    with pytest.raises(TypeError, match=r"matmul of q8\[2,3,12\] and q8\[2,5,12\]: 12 entries meet 5"):
        typax.matmul(a, b.mT)
    with pytest.raises(TypeError, match=r"q8t\[2,12,5\], stacks of several shapes; apply it to each with jax\.vmap"):
        typax.matmul(a[:1], b)
    np.testing.assert_allclose(typax.vmap(typax.matmul)(a, b), x @ w, atol=1e-5)
    np.testing.assert_allclose(typax.lift(jnp.matmul, "error")(a, b), x @ w, atol=1e-5)


def test_activations_in_codes_meet_every_format():
    rng = np.random.default_rng(16)
    x, w = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((3, 24), (24, 10)))
    w = w * np.float32(10) ** np.arange(-18, 6, dtype=np.float32)[:, None]  # rows of any scale
    rows = typax.dense(typax.quantize(x, scale=np.float32(0.03)))
    for name, how in (("int8", {}), ("int8", {"axis": 0}), ("int4", {"group": 4}), ("mxfp4", {}), ("fp8_e4m3", {}),
                      ("uint8", {"axis": 0, "zero_point": True}), ("nf4_double", {"axis": (0, 1), "group": 4})):  # fmt: skip
        q = typax.quantize(w, name, **how)
        d = typax.dense(q)
        y = typax.matmul(x, q, activations=np.float32(0.03))
        bound = jnp.abs(rows) @ jnp.abs(d) * 2.0**-20
        # the numbers of nf4 are rounded to 127ths where they meet integers
        assert (jnp.abs(y - rows @ d) <= bound).all() or name == "nf4_double", name
        y = typax.matmul(x, q, activations="dynamic")
        steps = jnp.max(jnp.abs(x), 1, keepdims=True) / 254
        assert (jnp.abs(y - x @ d) <= 1.01 * steps * jnp.max(jnp.abs(d)) * 24).all(), name


def test_the_dense_array_is_never_made():
    x = jax.ShapeDtypeStruct((4, 1024), jnp.float32)
    for name, how in [("int4", {"axis": 0, "group": 128}), ("int8", {"axis": 0}), ("nf4", {"axis": 0}), ("mxfp4", {})]:
        q = jax.eval_shape(lambda w: typax.quantize(w, name, **how), jax.ShapeDtypeStruct((1024, 1024), jnp.float32))  # noqa: B023
        program = jax.jit(typax.matmul).lower(x, q).as_text()
        sizes = re.findall(r"tensor<([0-9x]+)x(?:f32|bf16)>", program)
        assert sizes and max(int(np.prod([int(n) for n in s.split("x")])) for s in sizes) <= 1 << 18, name


# --- formats of one's own, errors, training -----------------------------------------------------------------------------


def test_a_format_of_ones_own():
    x, w = (
        jnp.asarray(np.random.default_rng(s).normal(size=n).astype(np.float32)) for s, n in ((11, (3, 70)), (12, (70, 10)))
    )
    q = typax.quantize(w, INT3, axis=0)
    assert (
        str(jax.typeof(q)) == "q3t<scale=float16>[70,10]" and q.qvalue.shape == (3, 10, 12) and q.scale.dtype == jnp.float16
    )
    rows = np.zeros((96, 10), np.float32)
    rows[:70] = w
    rows = rows.reshape(3, 32, 10).swapaxes(1, 2)
    s = np.maximum(np.abs(rows).max(-1) * np.float32(1 / 3), np.float32(2.0**-14)).astype(np.float16).astype(np.float32)
    codes = np.rint(np.clip(rows * (1 / s)[..., None], -3, 3))
    want = (codes * s[..., None]).swapaxes(1, 2).reshape(96, 10)[:70] + 0.0  # integers have no -0
    same_bits(np.asarray(typax.dense(q)), want)
    bits = (codes.astype(np.int64) & 7) @ (1 << 3 * np.arange(32, dtype=object)).astype(object)
    assert bytes(np.asarray(q.qvalue)[1, 2]) == int(bits[1, 2]).to_bytes(12, "little")
    close(typax.matmul(x, q), x @ typax.dense(q), x, typax.dense(q))
    assert jax.typeof(pickle.loads(pickle.dumps(q))) == jax.typeof(q)


def test_error():
    x = np.array([[1.0, 0.5, 0.001, 0.0, 4.0, np.nan, 2.0, -3.0]], np.float32)
    e = error(x, "int8", scale=np.float32(2.0 / 127))
    assert e.max == 0 and e.saturated == 0  # NaN makes its group NaN: nothing is left to count
    e = error(x[:, :5], "int8", scale=np.float32(2.0 / 127))
    assert e.max == 2.0 and e.saturated == 0.2 and e.zeroed == 0.2 and 0.89 < e.rms < 0.9
    e = error(np.random.default_rng(13).normal(size=(64, 256)), "int8")
    assert 38 < e.sqnr < 45 and e.saturated == 0
    assert error(x[:, :5], "mxfp4").sqnr < error(x[:, :5], "mxfp8").sqnr
    assert error(np.zeros((2, 3)), "nf4") == (0, 0, 0, 0, 0)


@cases
def test_training_sees_what_is_stored(name, zero_point):
    x = jnp.asarray(rows()[12:16])
    f = jax.jit(jax.value_and_grad(lambda x: jnp.vdot(fake(x, name, zero_point=zero_point), 3 * x)))
    seen = jax.jit(lambda x: fake(x * 1, name, zero_point=zero_point))(x)
    stored = pickle.loads(pickle.dumps(typax.quantize(np.asarray(x), name, zero_point=zero_point)))
    same_bits(np.asarray(seen), np.asarray(typax.dense(stored)))
    np.testing.assert_allclose(f(x)[1], 3 * x + 3 * seen, rtol=1e-6)


def test_clipped_gradients():
    x = jnp.array([[0.5, 3.0, -5.0, 1.9]])
    g = jax.grad(lambda x: jnp.sum(fake(x, "int8", scale=np.float32(2 / 127), gradient="clipped")))(x)
    assert g.tolist() == [[1, 0, 0, 1]]
    g = jax.grad(
        lambda x: jnp.sum(fake(x, "uint8", scale=np.float32(1 / 64), zero_point=np.uint8(128), gradient="clipped"))
    )(x)
    assert g.tolist() == [[1, 0, 0, 1]]
    with pytest.raises(ValueError, match='gradient=\'soft\'; it is "straight" or "clipped"'):
        fake(x, gradient="soft")


def test_codes_of_tables_are_looked_up_where_they_are():
    w = jnp.cos(jnp.arange(128.0)).reshape(16, 8)
    with jax.set_mesh(jax.make_mesh((2,), ("m",))):
        q = typax.device_put(typax.quantize(w, "nf4_double", axis=0, group=4), jax.P(None, "m"))
        assert jax.typeof(typax.dense(q)).sharding.spec == jax.P(None, "m")
        x = jnp.ones((2, 16))
        np.testing.assert_allclose(typax.matmul(x, q), x @ jax.device_get(typax.dense(q)), rtol=1e-5, atol=1e-5)
        typax.matmul(x, q, activations="dynamic")


@pytest.mark.parametrize(
    "how", [{"format": "int4", "axis": 0, "group": 4}, {"format": "nf4", "axis": 0}, {"format": "mxfp4"}]
)
def test_rows_of_activations_on_a_mesh_meet_weights_in_groups(how):
    x, q = jnp.sin(jnp.arange(32.0)).reshape(4, 8), typax.quantize(jnp.cos(jnp.arange(64.0)).reshape(8, 8), **how)
    with jax.set_mesh(jax.make_mesh((2, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)):
        rows = jax.device_put(x, jax.P("d", None))
        np.testing.assert_allclose(typax.matmul(rows, q), x @ typax.dense(q), rtol=1e-5, atol=1e-5)
        for out in (jax.P("d", None), jax.P("d", "m")):
            y = typax.lift(lambda x, w, out=out: jnp.matmul(x, w, out_sharding=out), "error")(rows, q)
            assert jax.typeof(y).sharding.spec == out
            np.testing.assert_allclose(y, x @ typax.dense(q), rtol=1e-5, atol=1e-5)
    padded = typax.lift(lambda w: jnp.pad(w, ((0, 0), (0, 4))) if how.get("axis") == 0 else w, "error")(q)
    np.testing.assert_allclose(typax.dense(padded)[:, :8], typax.dense(q), rtol=1e-5, atol=1e-5)
