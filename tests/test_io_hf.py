"""Quantized checkpoints of Hugging Face's layouts: made here from the layouts' definitions, decoded by NumPy."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _fuzz import Tally, little_memory, mutate

import typax
from typax.io import FileError, load, load_gguf, load_hf
from typax.io._open import open_checkpoint
from typax.io._safetensors import Planned, write

pytestmark = pytest.mark.core
RNG = np.random.default_rng(0)
N, K = 24, 64


def put(folder, tensors, config=None, **more):
    folder.mkdir(exist_ok=True)
    arrays = {n: np.ascontiguousarray(x) for n, x in tensors.items()}
    write(folder / "model.safetensors", {n: Planned(x.dtype, x.shape) for n, x in arrays.items()}, arrays.values(), {})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config, **more}))
    return folder


def words(codes, bits):
    """Rows of codes as rows of int32, the first in the lowest bits, codes straddling words."""
    stream = ((codes[:, :, None] >> np.arange(bits)) & 1).reshape(codes.shape[0], -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)


def check(got, want, shown):
    assert str(jax.typeof(got)) == shown
    np.testing.assert_array_equal(np.asarray(typax.dense(got)), want)


def floats(*shape):
    return RNG.uniform(0.1, 2, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("scale", "name", "shown"),
    [
        (floats(1), "weight_scale", "f8e4m3<axis=(-2,-1)>[24,64]"),
        (floats(N, 1), "weight_scale", "f8e4m3[24,64]"),
        (floats(3, 4), "weight_scale_inv", "f8e4m3g8x16[24,64]"),
        (floats(3, 4).astype(ml_dtypes.bfloat16), "weight_scale_inv", "f8e4m3g8x16[24,64]"),
    ],
)
def test_fp8(tmp_path, scale, name, shown):
    w = (RNG.normal(size=(N, K)) * 50).astype(ml_dtypes.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    got = load_hf(put(tmp_path, {"l.weight": w, f"l.{name}": scale, "l.bias": floats(N)}, config))
    full = scale.astype(np.float32)
    if full.shape == (3, 4):
        full = np.repeat(np.repeat(full, 8, 0), 16, 1)
    check(got["l.weight"], w.astype(np.float32) * full, shown)
    assert set(got) == {"l.weight", "l.bias"} and isinstance(got["l.bias"], jax.Array)


def test_fp8_in_tiles_that_do_not_divide_and_of_another_dtype(tmp_path):
    w, s = (RNG.normal(size=(20, 130))).astype(ml_dtypes.float8_e4m3fn), floats(1, 2)
    got = load_hf(put(tmp_path, {"l.weight": w, "l.weight_scale_inv": s}, {"quant_method": "fp8"}, torch_dtype="bfloat16"))
    want = (w.astype(np.float32) * np.repeat(s, 128, 1)[:, :130]).astype(ml_dtypes.bfloat16)
    check(got["l.weight"], want, "f8e4m3g128x128<bfloat16>[20,130]")


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors_packed(tmp_path, bits, groups, asymmetric):
    half = 1 << (bits - 1)
    q, s = RNG.integers(-half, half, (N, K)), floats(N, groups)
    z = RNG.integers(-half, half, (N, groups)) if asymmetric else np.zeros((N, groups), int)
    tensors = {"l.weight_packed": words(q + half, bits), "l.weight_scale": s, "l.weight_shape": np.array([N, K])}
    if asymmetric:
        tensors["l.weight_zero_point"] = words((z + half).T, bits).T
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": bits}}}}
    got = load_hf(put(tmp_path, tensors, config))["l.weight"]
    wide = lambda x: np.repeat(x, K // groups, 1)
    want = (q - wide(z)).astype(np.float32) * wide(s)
    name = ("u" if asymmetric else "q") + str(bits) + ("z" if asymmetric else "")
    check(got, want, name + ("g16" if groups > 1 else "") + "[24,64]")


def test_compressed_tensors_of_whole_codes(tmp_path):
    q, s = RNG.integers(-128, 128, (N, K)).astype(np.int8), floats(N, 1)
    got = load_hf(put(tmp_path, {"l.weight": q, "l.weight_scale": s}, {"quant_method": "compressed-tensors"}))["l.weight"]
    assert isinstance(got, typax.QArray)
    check(got, q.astype(np.float32) * s, "q8[24,64]")


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_compressed_tensors_of_four_bit_floats(tmp_path):
    q = RNG.integers(0, 16, (N, K))
    packed = (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)
    e = RNG.integers(120, 134, (N, K // 32)).astype(np.uint8)
    s8, inverse = floats(N, K // 16).astype(ml_dtypes.float8_e4m3fn), np.array([8.0], np.float32)
    tensors = {"m.weight_packed": packed, "m.weight_scale": e, "n.weight_packed": packed, "n.weight_scale": s8,
               "n.weight_global_scale": inverse, "n.input_global_scale": inverse}  # fmt: skip
    w8 = (RNG.normal(size=(N, K))).astype(ml_dtypes.float8_e4m3fn)
    got = load_hf(put(tmp_path, tensors | {"p.weight": w8, "p.weight_scale": e}, {"quant_method": "compressed-tensors"}))
    assert set(got) == {"m.weight", "n.weight", "p.weight"}
    powers = np.repeat(np.exp2(e.astype(np.float32) - 127), 32, 1)
    check(got["m.weight"], FP4[q] * powers, "mxfp4[24,64]")
    check(got["p.weight"], w8.astype(np.float32) * powers, "mxfp8[24,64]")
    check(got["n.weight"], FP4[q] * np.repeat(s8.astype(np.float32) / 8, 16, 1), "nvfp4[24,64]")


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(tmp_path, version, ordered):
    groups = 4
    q, z = RNG.integers(0, 16, (K, N)), RNG.integers(0, 16, (groups, N))
    s = floats(groups, N).astype(np.float16)
    g_idx = np.arange(K) // (K // groups)
    if ordered:
        g_idx = RNG.permutation(g_idx)
    stored = (z - 1) % 16 if version == "gptq" else z
    tensors = {"l.qweight": words(q.T, 4).T, "l.qzeros": words(stored, 4), "l.scales": s, "l.g_idx": g_idx.astype(np.int32)}
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": version}
    got = load_hf(put(tmp_path, tensors, config))["l.weight"]
    want = ((q - z[g_idx]).astype(np.float32) * s.astype(np.float32)[g_idx]).T
    check(got, want, "perm[24,64]" if ordered else "u4zg16[24,64]")
    if ordered:
        x = jnp.asarray(floats(2, K))
        y = typax.lift(lambda x, w: jnp.einsum("bk,nk->bn", x, w), "allow")(x, got)
        np.testing.assert_allclose(y, np.asarray(x) @ want.T, rtol=2e-5, atol=1e-4)


def test_awq(tmp_path):
    groups, order = 2, [0, 2, 4, 6, 1, 3, 5, 7]
    q, z = RNG.integers(0, 16, (K, N)), RNG.integers(0, 16, (groups, N))
    s = floats(groups, N).astype(np.float16)
    ordered = lambda x: x.reshape(x.shape[0], N // 8, 8)[..., order].reshape(x.shape[0], N)
    tensors = {"l.qweight": words(ordered(q), 4), "l.qzeros": words(ordered(z), 4), "l.scales": s}
    got = load_hf(put(tmp_path, tensors, {"quant_method": "awq", "bits": 4}, dtype="float16"))["l.weight"]
    g = np.arange(K) // (K // groups)
    want = ((q - z[g]).astype(np.float32) * s.astype(np.float32)[g]).T.astype(np.float16)
    check(got, want, "u4zg32<float16>[24,64]")


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(tmp_path, nested):
    table = np.asarray(typax.quantized.format.NF4.values, np.float32)
    q, blocks = RNG.integers(0, 16, N * K), N * K // 16
    s = floats(blocks)
    state = {"quant_type": "nf4", "blocksize": 16, "dtype": "float32", "shape": [N, K]}
    tensors = {"l.weight": (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None], "l.weight.quant_map": table}
    if nested:
        codes, levels = RNG.integers(0, 256, blocks).astype(np.uint8), np.sort(RNG.uniform(-1, 1, 256)).astype(np.float32)
        coarse = floats(-(-blocks // 32))
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.25}
        s = levels[codes] * np.repeat(coarse, 32)[:blocks] + np.float32(0.25)
        tensors |= {"l.weight.absmax": codes, "l.weight.nested_absmax": coarse, "l.weight.nested_quant_map": levels}
    else:
        tensors["l.weight.absmax"] = s
    tensors["l.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    got = load_hf(put(tmp_path, tensors, {"quant_method": "bitsandbytes"}))
    assert set(got) == {"l.weight"}
    check(got["l.weight"], (table[q] * np.repeat(s, 16)).reshape(N, K), "nf4g16[24,64]")


def test_a_part_and_a_sharding(tmp_path):
    w, s = RNG.integers(-128, 128, (N, K)).astype(np.int8), floats(N, 1)
    put(tmp_path, {"a.weight": w, "a.weight_scale": s, "b.weight": w, "b.weight_scale": s}, {"quant_method": "fp8"})
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    got = load_hf(tmp_path, only="a", sharding=jax.NamedSharding(mesh, jax.P("i")))
    assert set(got) == {"a.weight"} and got["a.weight"].scale.sharding.spec == jax.P("i")
    np.testing.assert_array_equal(typax.dense(got["a.weight"]), w.astype(np.float32) * s)


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        ({"l.weight": np.ones((4, 4), np.int16), "l.weight_scale": floats(4, 1)}, {}, r"'l\.weight': .*of dtype int16"),
        (
            {"l.weight": np.ones((4, 4), np.int8), "l.weight_scale": floats(3, 2)},
            {},
            r"\[3, 2\] scales do not go with \[4, 4\]",
        ),
        (
            {
                "l.weight_packed": np.ones((4, 3), np.int32),
                "l.weight_scale": floats(4, 1),
                "l.weight_shape": np.array([4, 64]),
            },
            {"config_groups": {"g": {"weights": {"num_bits": 4}}}},
            r"\[4, 3\] words do not hold \[4, 64\] codes of 4 bits",
        ),
        (
            {
                "l.weight_packed": np.ones((4, 1), np.int32),
                "l.weight_scale": floats(4, 1),
                "l.weight_shape": np.array([4, 4]),
            },
            {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}},
            r"\[4, 1\] words fit \[4, 4\] codes of 4 or 8 bits",
        ),
        (
            {
                "l.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
                "l.weight_scale": floats(4, 1),
                "l.weight_zero_point": np.ones((4, 1), np.int8),
            },
            {},
            "codes of float8_e4m3fn have no zero points",
        ),
        ({"l.weight": np.ones((4, 4), np.int8), "l.SCB": floats(3)}, {}, r"\[3\] scales do not go with \[4, 4\] codes"),
        (
            {"l.weight": np.ones((4, 4), np.int8), "l.SCB": floats(4), "l.weight_format": np.array([1], np.uint8)},
            {},
            "its codes are in the order of a device; save it again, by rows",
        ),
        ({"l.qweight": np.ones((8, 4), np.int32)}, {"quant_method": "gptq"}, r"'l\.qzeros': there is no such tensor"),
        (
            {"l.weight": np.ones((8, 1), np.uint8), "l.weight.absmax": floats(1)},
            {},
            "its quantization is not described, and only nf4 is read",
        ),
        (
            {
                "l.qweight": words(np.ones((4, 64), int), 4).T,
                "l.qzeros": np.ones((3, 1), np.int32),
                "l.scales": floats(3, 4),
            },
            {"quant_method": "gptq"},
            "3 groups do not divide 64 inputs",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, tensors, config, match):
    config = {
        "quant_method": "bitsandbytes" if set(tensors) & {"l.SCB", "l.weight.absmax"} else "compressed-tensors",
        **config,
    }
    with pytest.raises(FileError, match=match):
        load_hf(put(tmp_path, tensors, config))


GPTQ = {"l.qweight": np.ones((8, 4), np.int32), "l.qzeros": np.ones((1, 1), np.int32), "l.scales": floats(1, 4)}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "hqq", "bits": 4},
            r"config\.json: its weights are quantized by the method 'hqq', and fp8, .* are read",
        ),
        ({"bits": 4}, "by the method None"),
        (
            {"quant_method": "compressed-tensors"},
            r"'l\.weight': its tensors are those of gptq or awq, but .* compressed-tensors",
        ),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "its checkpoint_format is 'marlin', and gptq, gptq_v2 are",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "its version is 'gemv', and gemm are read"),
    ],
)
def test_another_method_is_refused_by_name(tmp_path, config, match):
    put(tmp_path, GPTQ, config)
    for reads in (load_hf, open_checkpoint):
        with pytest.raises(FileError, match=match):
            reads(tmp_path).leaves()


def test_without_a_configuration_tensors_are_what_they_are(tmp_path):
    put(tmp_path, {**GPTQ, "a.weight.b": floats(2)})
    (tmp_path / "config.json").unlink()
    for _ in range(2):
        got = load_hf(tmp_path)
        assert list(got) == list(open_checkpoint(tmp_path).leaves()) == ["l.qweight", "l.qzeros", "l.scales", "a.weight.b"]
        np.testing.assert_array_equal(got["l.qweight"], GPTQ["l.qweight"])
        (tmp_path / "config.json").write_text('{"torch_dtype": "int4"}')


@pytest.mark.parametrize("shard_bytes", [None, 40])
def test_values_that_typax_wrote_come_back(tmp_path, shard_bytes):
    low = typax.outer(jnp.ones(3), jnp.ones(2))
    tree = {"l": {"weight": typax.quantize(floats(4, 64))}, "a": [{"weight": low}], "norm": np.ones(3), "n": 7}
    typax.io.save(tmp_path / ("" if shard_bytes else "model.safetensors"), tree, shard_bytes=shard_bytes)
    for _ in range(2):  # whatever the configuration of what it was made of says
        got, want = load_hf(tmp_path), typax.io.load(tmp_path, only="*")
        assert list(got) == list(want) == ["l.weight", "a.0.weight", "norm", "n"] and got["n"] == 7
        assert jax.typeof(got["l.weight"]) == jax.typeof(want["l.weight"]) and isinstance(got["a.0.weight"], typax.Value)
        np.testing.assert_array_equal(got["l.weight"].qvalue, want["l.weight"].qvalue)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    assert set(load_hf(tmp_path, only="l")) == {"l.weight"}
    with pytest.raises(FileError, match="no path is chosen by 'x'"):
        load_hf(tmp_path, only="x")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_pipes_are_refused_wherever_a_file_is_read(tmp_path):
    put(tmp_path / "a", {"l.weight": floats(4, 4)})
    (tmp_path / "a" / "config.json").unlink()
    for name in ("p", "p.gguf", "p.toml", "a/config.json"):
        os.mkfifo(tmp_path / name)
    for read, name in [(open_checkpoint, "p"), (open_checkpoint, "p.gguf"), (load_gguf, "p"), (load_hf, "p"), (load, "p")]:
        with pytest.raises(FileError, match="is no ordinary file"):
            read(tmp_path / name)
    with pytest.raises(FileError, match=r"config\.json: is no ordinary file"):
        load_hf(tmp_path / "a")
    with pytest.raises(ValueError, match="is no ordinary file"):
        typax.quantize_tree({"a": floats(2, 2)}, str(tmp_path / "p.toml"))


def test_a_bad_configuration(tmp_path):
    put(tmp_path, {"a": floats(2)})
    assert set(load_hf(tmp_path)) == {"a"}
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(FileError, match=r"config\.json"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"torch_dtype": "int4", "quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(FileError, match="its dtype is 'int4'"):
        load_hf(tmp_path)


def test_mutated_folders_are_refused_or_read(tmp_path):
    """The configuration, the header and the tensors of a folder of each method, changed at random."""
    q, z, rng, tally = RNG.integers(0, 16, (K, N)), RNG.integers(0, 16, (4, N)), np.random.default_rng(0), Tally(tmp_path)
    s, state = (
        floats(4, N).astype(np.float16),
        {"blocksize": 16, "shape": [N, K], "nested_blocksize": 32, "nested_offset": 0.5},
    )
    words4 = {"l.qweight": words(q.T, 4).T, "l.qzeros": words(z, 4), "l.scales": s}
    table = np.asarray(typax.quantized.format.NF4.values, np.float32)
    kinds = [
        ({**words4, "l.g_idx": (np.arange(K) // 16).astype(np.int32)}, {"quant_method": "gptq", "bits": 4}),
        ({**words4, "l.qweight": words(q, 4)}, {"quant_method": "awq", "bits": 4}),
        (
            {"l.weight_packed": words(q.T, 4), "l.weight_scale": floats(N, 4), "l.weight_shape": np.array([N, K])},
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
        ),
        (
            {"l.weight": floats(N, K).astype(ml_dtypes.float8_e4m3fn), "l.weight_scale_inv": floats(3, 4)},
            {"quant_method": "fp8", "weight_block_size": [8, 16]},
        ),
        (
            {
                "l.weight": RNG.integers(0, 256, (N * K // 2, 1)).astype(np.uint8),
                "l.weight.quant_map": table,
                "l.weight.absmax": RNG.integers(0, 256, N * K // 16).astype(np.uint8),
                "l.weight.nested_absmax": floats(3),
                "l.weight.nested_quant_map": floats(256),
                "l.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
            },
            {"quant_method": "bitsandbytes"},
        ),
    ]
    odd = [None, 0, -1, 3, 1e30, 10**12, 2**63, "x", [], {}, [1], [0, 0], True, "gptq_v2"]
    keys = ["quant_method", "bits", "weight_block_size", "config_groups", "checkpoint_format"]
    with little_memory():
        for i in range(150):
            (tensors, config), what = kinds[i % len(kinds)], i // len(kinds) % 5
            name = list(tensors)[int(rng.integers(len(tensors)))]
            x = tensors[name]
            if what == 0:
                config = config | {keys[int(rng.integers(len(keys)))]: odd[int(rng.integers(len(odd)))]}
            elif what == 1:
                tensors = {n: v for n, v in tensors.items() if n != name}
            elif what == 2:
                tensors = tensors | {name: (x[:-1], x.reshape(-1), x[..., None], x[:0], x.T)[int(rng.integers(5))]}
            elif what == 3:
                dtype = ("i4", "u1", "i1", "f4", "f2", "i8", "f8", "c8")[int(rng.integers(8))]
                tensors = tensors | {name: np.zeros(x.shape, dtype)}
            put(tmp_path, tensors, config)
            if what == 4:
                file = tmp_path / ("config.json" if i % 2 else "model.safetensors")
                file.write_bytes(mutate(file.read_bytes(), rng))
            tally.of(lambda: load_hf(tmp_path))
    assert tally.refused > 60 and tally.read > 15
