"""Descriptions of formats: good and bad ones, how types print, groups that are not told, scales that are chosen, signs."""

import _quantized_reference as reference
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import typax
from gallery.int3 import INT3
from typax.quantized import Floats, Format, Integers, Scale, Table, error, formats, from_codes, limits
from typax.quantized.format import signed

F = np.float32
X = np.random.default_rng(0).normal(size=(6, 128)).astype(F)


def _e2m3():
    small, rest = [m / 8 for m in range(8)], [(1 + m / 8) * 2.0**e for e in range(3) for m in range(8)]
    return Table((*small, *rest), signed=True, ties="even")


FP6 = Format("mxfp6", "mxfp6", _e2m3(), 6, scale=Scale("e8m0"), group=32, fixed=True)
THIRDS = Format("thirds", "t3", Table((-2.0, -0.5, 0.0, 0.3, 1.0)), 3)
UINT2 = Format("uint2", "u2", Integers(0, 3), 2)
FNUZ = Format("fnuz", "f8fnuz", Floats("float8_e4m3fnuz"))
WIDE = Format("wide", "wide", Table(tuple(map(float, range(64))), signed=True, ties="even"), 7)

BAD = [
    (lambda: Integers(1, 3), r"Integers\(1, 3\) are to begin at 0 or below it, and end above it"),
    (lambda: Integers(-1, 0), "and end above it"),
    (lambda: Floats("float16"), r"Floats\('float16'\): there are float8_e4m3fn, .* others are a Table"),
    (lambda: Table((-1.0, 1.0)), "are no finite numbers in ascending order with 0 among them"),
    (lambda: Table((1.0, 0.0)), "in ascending order"),
    (lambda: Table((0.0, np.nan)), "no finite numbers"),
    (lambda: Table((-1.0, 0.0, 1.0), signed=True), "signed=True adds the sign to magnitudes, and -1.0 is none"),
    (lambda: Table((0.0, 1.0), ties="up"), "ties='up'; they go to"),
    (lambda: Scale("float64"), "dtype='float64'; scales are float32, float16"),
    (lambda: Scale(group=4), "group and offset are of scales that are quantized"),
    (lambda: Scale(of="int8"), "of='int8' is no Format whose own scales are numbers"),
    (lambda: Scale("float16", of=formats()["int8"], group=4), "scales are of int8 or of dtype='float16', not both"),
    (lambda: Scale(of=formats()["uint8"]), "quantized all together are fp8_e4m3, without offset; give group= with uint8"),
    (lambda: Format("a", "a", 8), "codes are Integers, Floats or a Table"),
    (lambda: Format("a", "a", Integers(0, 15), 9), "16 codes do not fit 9 bits"),
    (lambda: Format("a", "a", Floats("float8_e5m2"), 4), "float8_e5m2 has 8 bits, not 4"),
    (lambda: Format("a", "a", Integers(0, 15), 4, "middle"), "order='middle'; the first code takes"),
    (lambda: Format("a", "a", Integers(0, 15), 4, group=1), "group=1; a group has at least 2 values, or is None"),
    (lambda: Format("mine", "q4", Integers(-8, 7), 4), "typax's int4 is called so and prints q4; call another"),
    (lambda: Format("int4", "mine", Integers(-8, 7), 4), "typax's int4 is called so and prints q4; call another"),
]


@pytest.mark.parametrize(("make", "says"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_descriptions_that_are_none(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_types_that_differ_print_apart():
    q = typax.quantize
    for a, b in [
        (q(X, "nf4"), q(X, "nf4", axis=(-1,))),  # groups of 64 and the whole axis
        (q(X[:, :4], "nf4"), q(X[:, :4], "nf4", group=64)),
        (q(X[:, :4], "nf4_double"), q(X[:, :4], "nf4_double", group=64)),
        (q(X[:, :4], "nf4"), q(X[:, :4], "nf4", group=4)),
        (q(X[:, :32], INT3), q(X[:, :32], signed(3))),  # scales in float16 and in float32
        (q(X, "mxfp4"), q(X, "mxfp4", axis=(1,))),
    ]:
        assert jax.typeof(a) != jax.typeof(b) and str(jax.typeof(a)) != str(jax.typeof(b))
    assert str(jax.typeof(q(X, "nf4", axis=(-1,)))) == "nf4<axis=(-1)>[6,128]"
    assert jax.typeof(q(X, "nf4", group=64)) == jax.typeof(q(X, "nf4"))


@pytest.mark.core
def test_a_group_that_nobody_tells_is_no_longer_than_its_axis():
    x = X[:4, :4]
    for name, how, size in [
        ("nf4", {"axis": 0}, 8 + 16), (INT3, {}, 12 + 8), ("nf4_double", {}, 8 + 4 + 8),
        ("mxfp4", {}, 4 * 17), ("nvfp4_block", {}, 4 * 9), ("nf4", {"group": 64}, 144),
    ]:  # fmt: skip
        q = jax.jit(lambda x: typax.quantize(x, name, **how))(x)  # noqa: B023
        assert q.nbytes == size, (name, how, q.nbytes)
    for shape in [(0, 4), (4, 0), (1,), (10,)]:
        assert typax.dense(typax.quantize(np.ones(shape, F), "nf4_double")).shape == shape
    q, filled = typax.quantize(x, "nf4"), typax.quantize(x, "nf4", group=64)
    assert (typax.dense(q) == typax.dense(filled)).all()
    again = from_codes(np.arange(16).reshape(4, 4), q.scale, "nf4")
    assert jax.typeof(again) == jax.typeof(q)
    joined = typax.concatenate([q, q], axis=1)
    assert str(jax.typeof(joined)) == "nf4g4[4,8]" and (typax.dense(joined)[:, 4:] == typax.dense(q)).all()


# --- scales ------------------------------------------------------------------------------------------------------------


def test_scales_are_given_as_the_format_holds_them():
    x = np.linspace(-2000, 2000, 64, dtype=F).reshape(4, 16)
    s = np.array([300.0, 1e6, 1e-9, 17.3], F)[:, None]
    q = typax.quantize(x, "nvfp4_block", scale=s)  # 300 is beyond 240, where some e4m3 end
    want = np.clip(s, F(2.0**-6), F(448)).astype(ml_dtypes.float8_e4m3fn)
    assert (np.asarray(q.scale) == want).all()
    codes = reference.pack4(reference.fp4(x * (F(1) / want.astype(F))))
    assert (np.asarray(q.qvalue).reshape(4, 8) == codes).all()
    q = typax.quantize(x, "mxfp8", scale=np.array([[1.0], [1.5], [2.0**-126], [np.inf]], F))  # rounded up to a power of two
    assert np.asarray(q.scale).ravel().tolist() == [127, 128, 1, 255] and np.isnan(typax.dense(q)[3]).all()
    big = Format("half", "half", Integers(-8, 7), 4, scale=Scale("float16"))
    q = typax.quantize(np.array([[1e6, 1, 2], [1, 2, 3]], F), big)  # a scale that float16 does not hold
    assert np.isnan(q.scale[0]) and np.isnan(typax.dense(q)[0]).all() and np.isfinite(typax.dense(q)[1]).all()


def test_searches_find_the_same_at_any_size():
    for name, how in [("int4", {}), ("nf4", {}), ("mxfp4", {}), ("uint4", {"zero_point": True})]:
        dense = lambda k: np.asarray(typax.dense(typax.quantize(X * F(2.0**k), name, scale="mse", **how)))  # noqa: B023
        want = dense(0)
        for k in (-90, 90):  # squares would be 0, or infinite
            assert (dense(k) == want * F(2.0**k)).all()


def test_percentiles_are_counted_exactly():
    x = np.arange(1, 2001, dtype=F)
    for n, p in [(1000, 99.9), (1000, 99.5), (700, 99.0), (100, 29.0), (1000, 58.0), (2000, 99.95)]:
        rank = -(-n * round(p * 100) // 10000)
        for group in (n, n + 5):
            q = typax.quantize(x[:n], "nf4", group=group, scale=("percentile", p))
            assert float(q.scale[0]) == rank, (n, p, group)


def test_exponents_are_rounded_to_the_codes_of_any_table():
    x = (X[:, :64] * 2.0 ** np.random.default_rng(1).uniform(-3, 3, (6, 1))).astype(F)
    q = typax.quantize(x, FP6, exponents="even")
    a = np.abs(x.reshape(6, 2, 32)).max(-1)
    e = ((a.view(np.int32) + (1 << 22 - 3)) >> 23) - 127 - 2  # a fraction of three bits
    assert (np.asarray(q.scale) == e + 127).all()
    y = np.clip(np.ldexp(x.reshape(6, 2, 32), -e[..., None]), -7.5, 7.5).astype(ml_dtypes.float6_e2m3fn).astype(F)
    assert (np.asarray(typax.dense(q)).reshape(6, 2, 32) == np.ldexp(y, e[..., None])).all()


def test_bytes_of_exponents_are_exact_in_float64():
    with jax.enable_x64(True):
        q = typax.quantize(X.astype(np.float64) * 1e-35, "mxfp4")
        d = np.asarray(typax.dense(q))
    codes = np.asarray(q.qvalue)
    c = np.stack([codes & 15, codes >> 4], -1).reshape(6, 4, 32)
    signed, e = np.where(c & 8, -1.0, 1.0), np.asarray(q.scale).astype(int)[..., None] - 127
    want = np.ldexp(signed * reference.FP4[c & 7], e)
    assert d.dtype == np.float64 and (d.reshape(6, 4, 32) == want).all()


# --- stochastic rounding -------------------------------------------------------------------------------------------------

ROWS = (np.random.default_rng(0).normal(size=(4, 32)) * [[1], [3], [0.01], [100]]).astype(F)
RANDOM = [(f, False) for f in formats() if f != "nf4_double"] + [(f, True) for f in ("int8", "uint4", UINT2, INT3)]
RANDOM += [(FP6, False), (THIRDS, False), (INT3, False)]


@pytest.mark.parametrize(("name", "zero_point"), RANDOM, ids=lambda v: str(v))
def test_stochastic_rounding_is_right_on_average(name, zero_point):
    unsigned = str(name).startswith("u") and not zero_point
    x, n = np.abs(ROWS) if unsigned else ROWS, 1000
    f = formats()[name] if isinstance(name, str) else name
    step = f.codes.gap / f.codes.largest
    rows = jnp.tile(jnp.asarray(x), (n, 1)).reshape(n, 4, 32)
    made = jax.jit(lambda x, key: typax.dense(typax.quantize(x, name, key=key, zero_point=zero_point)))
    d = np.asarray(made(rows, jax.random.key(7)), np.float64)
    off = np.abs(d.mean(0) - x)
    rare = 10 / n * np.nanmax(np.abs(d), (0, -1), initial=0)[:, None]  # what is so may not have been seen
    assert (off <= 5 * d.std(0) / np.sqrt(n) + 2e-4 * np.abs(x) + step * rare).all(), (off / np.abs(x)).max()
    if name in ("int8", "mxfp8", "nvfp4"):
        assert (np.asarray(made(rows, jax.random.key(7))) == d).all()
        assert (np.asarray(made(rows, jax.random.key(8))) != d).any()


def test_numbers_of_codes_stay_under_stochastic_rounding():
    """A sum with noise would be rounded, and one of a million go up."""
    x = np.tile(np.arange(-127, 128, dtype=F), 8000)
    q = jax.jit(lambda x, key: typax.quantize(x, scale=F(1), key=key))(x, jax.random.key(0))
    assert (np.asarray(q.qvalue) == x).all()
    q = typax.quantize(ROWS, "mxfp8", key=jax.random.key(0), exponents="floor")  # as it is told
    assert (np.asarray(q.scale) == np.asarray(typax.quantize(ROWS, "mxfp8").scale)).all()


# --- signs, errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*formats(), INT3, FP6, FNUZ, THIRDS], ids=str)
def test_negation_is_exact_in_every_format(name):
    x = X.copy()
    x[0, :3] = 0, -0.0, np.nan
    for axis in (-1, 0):
        q = typax.quantize(x, name, axis=axis)
        minus = -q
        d, n, again = (np.asarray(typax.dense(v)) for v in (q, minus, -minus))
        assert jax.typeof(minus) == jax.typeof(q) and ((n == -d) | np.isnan(d) & np.isnan(n)).all()
        assert (again.view(np.int32) == d.view(np.int32))[~np.isnan(d)].all()
        low, high = limits(minus)
        assert (np.isnan(low) | (low <= high)).all()
        if str(name)[:2] == "nv":  # written as any other: no scale is negative
            s = minus.scale if name == "nvfp4_block" else typax.dense(minus.scale)
            assert not (np.asarray(s, F) < 0).any()


def test_what_has_no_sign_says_so():
    q = typax.quantize(X, Format("mxint8", "mxi8", Integers(-128, 127), scale=Scale("e8m0"), group=32, fixed=True))
    with pytest.raises(TypeError, match=r"are e8m0, which has no sign, and codes have no bit for it; do it to typax\.dense"):
        _ = -q


def test_tables_of_many_numbers_round_to_even():
    x = np.concatenate([np.arange(0, 63, 0.5), [63, -0.5, -1.5, -2.5]]).astype(F)
    assert (np.asarray(typax.dense(typax.quantize(x, WIDE, scale=F(1)))) == np.rint(x)).all()


def test_error_of_tiny_and_of_huge_numbers():
    want = error(X, "int4")
    for k in (-100, 100):
        e = error(X * F(2.0**k), "int4")
        assert (e.max, e.rms) == (want.max * 2.0**k, want.rms * 2.0**k) and e[2:] == want[2:]
    with pytest.raises(TypeError, match="gives numbers, and its array is traced; call it outside of jit"):
        jax.jit(lambda x: error(x).max)(X)


def test_codes_that_a_format_has_not():
    with pytest.raises(ValueError, match="codes of int4 are from -8 to 7, got 0 to 15"):
        from_codes(np.arange(16).reshape(2, 8), np.ones(2, F), "int4")
    with pytest.raises(ValueError, match="scales of mxfp4 are bytes e8m0, integers from 0 to 255, got float32"):
        from_codes(np.zeros((2, 32), np.uint8), np.ones((2, 1), F), "mxfp4")
    with pytest.raises(
        ValueError, match="scales of nvfp4_block are float8_e4m3fn, which does not hold all of these float32"
    ):
        from_codes(np.zeros((2, 16), np.uint8), np.full((2, 1), 0.3, F), "nvfp4_block")
    with pytest.raises(
        ValueError, match="scales of nf4_double are three arrays: their codes in dynamic8, their scales and an"
    ):
        from_codes(np.zeros((2, 64), np.uint8), np.ones((2, 1), F), "nf4_double")
    with pytest.raises(ValueError, match="from_codes: nf4 has no zero point"):
        from_codes(np.zeros((2, 64), np.uint8), np.ones((2, 1), F), "nf4", zero_point=np.ones((2, 1), np.uint8))
    with pytest.raises(ValueError, match=r"typax\.quantized\.quantize_ggml\(x, kind='Q4_0'\)"):
        typax.quantize(X, "q4_0")
    q = typax.quantize(X, "nf4_double", group=16)
    s = q.scale
    codes = np.stack([np.asarray(q.qvalue) >> 4, np.asarray(q.qvalue) & 15], -1).reshape(6, 128)
    again = from_codes(codes, (s.qvalue, s.scale, s.offset), "nf4_double", group=16)
    assert jax.typeof(again) == jax.typeof(q) and (typax.dense(again) == typax.dense(q)).all()
    with pytest.raises(ValueError, match="zero points of uint4 are from 0 to 15, got 300 to 300"):
        from_codes(np.ones((2, 8), np.uint8), np.ones(2, F), "uint4", zero_point=np.full(2, 300))
