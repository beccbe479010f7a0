"""What the libraries that own the formats made of the same numbers, bit by bit, and where they and typax disagree, exactly.

`references/produce.py` ran them and wrote `references/data`; ``make references`` runs them anew, and this on what they wrote
(``TYPAX_REFERENCES`` is the folder).  The disagreements are those of docs/numerics.md.
"""

import json
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from _quantized_reference import NF4
from references.inputs import INF, NAN, SUBNORMAL, USUAL, ZEROS, edges, normal

import typax
from typax.io import load_hf
from typax.quantized.format import formats

DATA = Path(os.environ.get("TYPAX_REFERENCES") or Path(__file__).parent / "references" / "data")
TOLD = json.loads((DATA / "versions.json").read_text())
F = np.float32
X = edges(NF4)
N = len(X)


def of(library):
    if library in TOLD["not imported"]:
        pytest.skip(f"{library} could not be imported where the references were made: {TOLD['not imported'][library]}")
    return np.load(DATA / f"{library}.npz")


def bits(x):
    x = np.asarray(x)
    return x.view(np.uint8) if x.dtype.itemsize == 1 else x


def rows_that_differ(mine, theirs):
    mine, theirs = bits(mine), bits(theirs)
    theirs = theirs.reshape(mine.shape)
    return {i for i in range(len(mine)) if not np.array_equal(mine[i], theirs[i], equal_nan=mine.dtype.kind == "f")}


def an_ulp_apart(mine, theirs):
    mine, theirs = np.asarray(mine, F).ravel(), np.asarray(theirs, F).ravel()
    return bool((np.abs(mine.view(np.int32).astype(np.int64) - theirs.view(np.int32)) <= 1).all())


# --- equal in every bit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
def test_mx_is_that_of_torchao(name):
    t = of("torchao")
    for mode in ("floor", "even", "ceil", "rceil"):
        q = typax.quantize(X, name, exponents=mode)
        scale, codes = (t[f"{name} {mode} {part}"] for part in ("scale", "codes"))
        assert rows_that_differ(q.scale, scale) == {INF}  # NaN is 255 in both
        flushed = set() if mode == "rceil" else {SUBNORMAL}
        assert rows_that_differ(q.qvalue, codes) == {NAN, INF} | flushed
        # theirs: an infinity is 2^128, and its group's other codes zeros
        emax = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp4": 2}[name]
        assert scale[INF, 0] == (254 if mode == "rceil" else 255 - emax) and q.scale[INF, 0] == 255
        assert not bits(q.qvalue)[[NAN, INF], 0].any()
        if flushed:  # theirs: subnormal numbers are none
            signs = 0x88 if name == "mxfp4" else 0x80
            assert (codes[SUBNORMAL] & ~np.uint8(signs)).all() and not (bits(q.qvalue)[SUBNORMAL] & ~np.uint8(signs)).any()


def test_mx_of_bfloat16_is_that_of_torchao():
    t, q = of("torchao"), typax.quantize(X[USUAL].astype(ml_dtypes.bfloat16), "mxfp8")
    assert not rows_that_differ(q.scale, t["mxfp8 bfloat16 scale"])
    assert not rows_that_differ(q.qvalue, t["mxfp8 bfloat16 codes"])


def test_nvfp4_is_that_of_torchao():
    t, q = of("torchao"), typax.quantize(X, "nvfp4_block")
    assert rows_that_differ(q.scale, t["nvfp4_block scale"]) == {INF}
    assert rows_that_differ(q.qvalue, t["nvfp4_block codes"]) == {NAN, INF}
    assert t["nvfp4_block scale"][INF, 0] == 0x7E and bits(q.scale)[INF, 0] == 0x7F  # theirs: 448, ours: NaN
    q = typax.quantize(normal(2, 16, 64), "nvfp4")
    assert not rows_that_differ(q.scale.qvalue, t["nvfp4 scale"]) and not rows_that_differ(q.qvalue, t["nvfp4 codes"])
    assert (np.asarray(q.scale.scale) == t["nvfp4 global"]).all()


def test_nf4_is_that_of_bitsandbytes():
    b, q = of("bitsandbytes"), typax.quantize(X, "nf4")
    np.testing.assert_array_equal(b["nf4 table"], NF4)
    codes = b["nf4 codes"].reshape(N, -1)
    assert rows_that_differ(q.qvalue, codes) == {SUBNORMAL, NAN, INF}
    assert rows_that_differ(q.scale, b["nf4 scale"][:, None]) == {ZEROS, SUBNORMAL, INF}
    assert b["nf4 scale"][ZEROS] == 0 and q.scale[ZEROS] == F(2.0**-126)  # theirs: 0
    assert rows_that_differ(typax.dense(q), b["nf4 dense"]) == {SUBNORMAL, INF}
    assert (
        set(np.unique(b["nf4 dense"][INF])) >= {F(np.inf)} and np.isnan(typax.dense(q)[INF]).all()
    )  # theirs: at the infinities
    narrow = typax.quantize(X[USUAL].astype(ml_dtypes.bfloat16), "nf4")
    assert not rows_that_differ(narrow.qvalue, b["nf4 bfloat16 codes"].reshape(20, -1))
    assert not rows_that_differ(np.asarray(typax.dense(narrow)).astype(F), b["nf4 bfloat16 dense"])


def test_scales_of_nf4_are_quantized_as_those_of_bitsandbytes_about_a_given_mean():
    b, x = of("bitsandbytes"), normal(3, 280, 64)
    q = typax.quantize(x.reshape(-1), "nf4_double")
    np.testing.assert_array_equal(np.asarray(formats()["dynamic8"].codes.values, F), b["nested table"])
    assert not rows_that_differ(q.qvalue, b["nested codes"].reshape(280, -1))
    mean = b["nested offset"]  # theirs: the sum is in another order
    assert an_ulp_apart(q.scale.offset[0], mean)
    again = typax.quantize(np.abs(x).max(1) - mean, "dynamic8")
    np.testing.assert_array_equal(np.asarray(again.qvalue).reshape(-1)[:280], b["nested scale"])
    np.testing.assert_array_equal(again.scale, b["nested outer"])


def test_int8_is_that_of_bitsandbytes():
    b, q = of("bitsandbytes"), typax.quantize(X[8:16].astype(np.float16), "int8")
    assert not rows_that_differ(q.qvalue, b["int8 codes"][8:16])
    np.testing.assert_array_equal(np.asarray(q.scale).ravel(), b["int8 stats"][8:16] * F(1 / 127))


def test_fp8_of_torchao_has_the_same_codes():
    t, q = of("torchao"), typax.quantize(X, "fp8_e4m3")
    assert an_ulp_apart(q.scale[USUAL], t["fp8 scale"][USUAL])  # theirs: a / 448
    np.testing.assert_array_equal(t["fp8 scale"][USUAL].ravel(), np.abs(X[USUAL]).max(1) / F(448))
    assert rows_that_differ(q.qvalue, t["fp8 codes"]) == {ZEROS, SUBNORMAL, NAN, INF}
    assert (t["fp8 codes"][ZEROS] & 0x7F == 0x7F).all()  # theirs: a row of zeros is one of NaN
    assert (np.asarray(typax.dense(q))[ZEROS] == 0).all()


# --- disagreements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "high"), [("int8", 127), ("int4", 7)])
def test_integers_of_torchao_end_at_the_lower_end(name, high):
    t = of("torchao")
    scale, codes = t[f"{name} scale"][USUAL], t[f"{name} codes"][USUAL]
    x = X[USUAL]
    np.testing.assert_array_equal(scale.ravel(), np.abs(x).max(1) / F(high + 0.5))
    np.testing.assert_array_equal(codes, np.clip(np.rint(x * (F(1) / scale.reshape(-1, 1))), -high - 1, high))
    mine = np.asarray(typax.dense(typax.quantize(x, name, scale=scale.ravel())) / scale.reshape(-1, 1))
    np.testing.assert_allclose(mine, np.maximum(codes, -high), rtol=1e-6)  # given their scales, it is the lowest code alone
    assert (codes == -high - 1).any()
    np.testing.assert_array_equal(np.ravel(typax.quantize(x, name).scale), np.abs(x).max(1) * F(1 / high))


@pytest.mark.parametrize(("name", "steps"), [("uint8", 255), ("uint4", 15)])
def test_scales_with_zero_points_of_torchao_are_divided(name, steps):
    t, x = of("torchao"), X[USUAL]
    scale, zero = t[f"{name} scale"][USUAL].reshape(-1, 1), t[f"{name} zero"][USUAL].reshape(-1, 1)
    low, high = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    np.testing.assert_array_equal(scale.ravel(), (high - low) / F(steps))
    mine = typax.quantize(x, name, zero_point=True)
    assert an_ulp_apart(mine.scale, scale) and rows_that_differ(mine.zero_point, zero.astype(np.uint8)) <= {11}  # a tie
    given = typax.quantize(x, name, scale=scale.ravel(), zero_point=zero.ravel().astype(np.uint8))
    want = t[f"{name} codes"][USUAL]
    np.testing.assert_array_equal(given.qvalue, want if name == "uint8" else want[:, ::2] | want[:, 1::2] << 4)


def test_the_table_of_torchao_has_four_digits():
    t, x = of("torchao"), X[:16]
    np.testing.assert_array_equal(t["nf4 table"], np.round(NF4.astype(np.float64), 4).astype(F))
    assert rows_that_differ(typax.quantize(x, "nf4").qvalue, t["nf4 codes"].reshape(16, -1)) == {12}  # the middles of ours


def test_the_kernel_of_bitsandbytes_for_8_bits_takes_a_neighbour_near_the_middle():
    b, x = of("bitsandbytes"), normal(4, 8, 256)
    q, table = typax.quantize(x.reshape(4, 512), "dynamic8"), b["nested table"].astype(np.float64)
    mine, theirs = (np.asarray(c).reshape(-1).astype(int) for c in (q.qvalue, b["dynamic8 codes"]))
    np.testing.assert_array_equal(np.asarray(q.scale).ravel(), b["dynamic8 scale"])
    apart = mine != theirs
    t = (x * (F(1) / np.abs(x).max(1, keepdims=True))).reshape(-1)[apart]
    assert apart.sum() == 8 and (np.abs(mine - theirs)[apart] == 1).all()
    assert (np.abs(t - (table[mine] + table[theirs])[apart] / 2) < 2.0**-16).all()
    assert (np.abs(t - table[mine[apart]]) <= np.abs(t - table[theirs[apart]])).all()  # ours is the nearest


CASES = [
    "int4-group", "int4-group-asymmetric", "int4-channel-asymmetric", "int3-channel", "int8-packed", "int8", "int8-tensor",
    "int8-group", "int8-asymmetric", "fp8-tensor", "fp8-channel", "fp8-group", "fp8-block", "nvfp4", "mxfp4", "mxfp8",
]  # fmt: skip


def of_compressed_tensors(case):
    """What it was given, and what it made of it."""
    return normal(20 + CASES.index(case), 24, 64), checkpoint(f"compressed-tensors-{case}")["0.weight"]


@pytest.mark.parametrize(("case", "high", "group"), [("int8", 127, 64), ("int8-packed", 127, 16), ("int4-group", 7, 32)])
def test_integers_of_compressed_tensors_end_at_the_lower_end(case, high, group):
    x, made = of_compressed_tensors(case)
    most = np.abs(x.reshape(24, -1, group)).max(-1)
    scale = np.asarray(made.scale).reshape(most.shape)
    np.testing.assert_array_equal(scale, most / F(high + 0.5))
    wide = np.repeat(scale, group, 1)
    theirs = np.rint(np.asarray(typax.dense(made)) / wide)
    mine = np.asarray(typax.dense(typax.quantize(x, f"int{4 if high == 7 else 8}", group=group, scale=scale))) / wide
    np.testing.assert_allclose(mine, np.maximum(theirs, -high), rtol=1e-6)
    assert (theirs == -high - 1).any()


def test_formats_of_compressed_tensors_have_the_same_codes():
    same = lambda q, made: not rows_that_differ(q.qvalue, made.qvalue)
    for case, name, how in (("int8-asymmetric", "int8", {}), ("int4-group-asymmetric", "uint4", {"group": 32})):
        x, made = of_compressed_tensors(case)
        q = typax.quantize(x, name, zero_point=True, **how)
        assert same(q, made) and not rows_that_differ(q.zero_point, made.zero_point) and an_ulp_apart(q.scale, made.scale)
    x, made = of_compressed_tensors("fp8-channel")
    q = typax.quantize(x, "fp8_e4m3")
    assert same(q, made) and an_ulp_apart(q.scale, made.scale)  # theirs: a / 448
    x, made = of_compressed_tensors("nvfp4")
    q = typax.quantize(x, "nvfp4")
    assert same(q, made) and not rows_that_differ(q.scale.qvalue, made.scale.qvalue)
    assert an_ulp_apart(q.scale.scale, made.scale.scale)  # theirs: the inverse, 2688 / a, is what is kept
    for name, mode in (("mxfp4", "even"), ("mxfp8", "rceil")):  # theirs: not the floor of OCP
        x, made = of_compressed_tensors(name)
        q = typax.quantize(x, name, exponents=mode)
        assert same(q, made) and not rows_that_differ(q.scale, made.scale)
        assert rows_that_differ(typax.quantize(x, name).scale, made.scale)


def test_qwix_ends_half_a_step_beyond_the_largest_code(standard_promotion):
    qwix = pytest.importorskip("qwix")
    x = X[:16]
    theirs = qwix.quantize(jax.numpy.asarray(x), "int8", channelwise_axes=(0,))
    assert an_ulp_apart(theirs.scale, np.abs(x).max(1) / F(127.5)) and np.asarray(theirs.qvalue).max() == 127


# --- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoint(name):
    folder = DATA / "checkpoints" / name
    if not folder.exists():
        pytest.skip(f"was not made: {TOLD['not imported']}")
    return load_hf(folder)


DENSE = np.load(DATA / "checkpoints" / "dense.npz")
SHOWN = {
    "awq": "u4zg32<float16>[32,64]",
    "bitsandbytes-nf4-nested": "nf4[24,64]",
    "compressed-tensors-int8-asymmetric": "q8z[24,64]",
    "compressed-tensors-int8-group": "q8g16[24,64]",
    "compressed-tensors-fp8-block": "f8e4m3g16x32[24,64]",
    "compressed-tensors-fp8-group": "f8e4m3g16[24,64]",
    "gptq-v1-3bits": "u3zg32<float16>[32,64]",
    "transformers-fp8-uneven": "f8e4m3g16x32[20,50]",
}


@pytest.mark.parametrize("name", sorted({n.partition("/")[0] for n in DENSE.files}))
def test_checkpoints_stand_for_what_their_library_decodes(name):
    got = checkpoint(name)
    wanted = {n.partition("/")[2]: DENSE[n] for n in DENSE.files if n.startswith(f"{name}/")}
    assert set(got) - {n for n in got if n.endswith(".bias")} == set(wanted)
    if name in SHOWN:
        assert str(jax.typeof(got["0.weight"])) == SHOWN[name]
    for tensor, want in wanted.items():
        assert isinstance(got[tensor], typax.Value)
        mine = np.asarray(typax.dense(got[tensor])).astype(F)
        if name == "bitsandbytes-int8":  # theirs: (code · a) · fl(1/127), ours: code · (a · fl(1/127))
            np.testing.assert_allclose(mine, want, rtol=2.0**-22)
        else:
            np.testing.assert_array_equal(mine, want.astype(F))


def test_all_libraries_were_there():
    assert not TOLD["not imported"], TOLD["not imported"]
    libraries = "torch torchao bitsandbytes compressed-tensors transformers auto-round autoawq"
    assert list(TOLD["versions"]) == libraries.split()
