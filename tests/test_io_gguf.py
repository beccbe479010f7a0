"""GGUF files: blocks as they are, and back, byte for byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _fuzz import Tally, little_memory, mutate

import typax
from typax.io import FileError, Gguf, _gguf, load_gguf, save_gguf
from typax.quantized import quantize_ggml

gguf = pytest.importorskip("gguf")
RNG = np.random.default_rng(0)
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def another_writer(path, **tensors):
    """A file as the package gguf writes it."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("small")
    w.add_uint32("llama.block_count", 3)
    w.add_float32("llama.eps", 1e-5)
    w.add_bool("llama.flag", True)
    w.add_token_list(["a", "b", "ü"])
    w.add_array("llama.sizes", [1, 2, 3])
    x = RNG.normal(size=(6, 64)).astype(np.float32)
    for kind in KINDS:
        t = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(x, t)
        w.add_tensor(f"w.{kind}", raw, raw_shape=raw.shape, raw_dtype=t)
    w.add_tensor("norm", x[0])
    w.add_tensor("half", x.astype(np.float16))
    w.add_tensor("ids", np.arange(5))
    for name, raw in tensors.items():
        w.add_tensor(name, raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return x


def test_blocks_are_values_and_are_written_back_byte_for_byte(tmp_path):
    x = another_writer(tmp_path / "a.gguf")
    got = load_gguf(tmp_path / "a.gguf")
    assert got.metadata["general.name"] == "small" and got.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert got.metadata["llama.block_count"] == 3 and got.metadata["llama.sizes"] == [1, 2, 3]
    for kind in KINDS:
        q = got.tensors[f"w.{kind}"]
        assert str(jax.typeof(q)) == f"{kind.lower()}[6,64]"
        t = gguf.GGMLQuantizationType[kind]
        want = gguf.quants.dequantize(gguf.quants.quantize(x, t), t)
        np.testing.assert_array_equal(typax.dense(q), want)
    np.testing.assert_array_equal(got.tensors["half"], x.astype(np.float16))
    assert got.tensors["ids"].dtype == np.int64 and got.tensors["norm"].dtype == jnp.float32
    save_gguf(tmp_path / "b.gguf", got)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_a_part_and_a_sharding(tmp_path):
    another_writer(tmp_path / "a.gguf")
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    got = load_gguf(tmp_path / "a.gguf", only=["w.Q4_*", "norm"], sharding=lambda p, _: jax.NamedSharding(mesh, jax.P("i")))
    assert set(got.tensors) == {"w.Q4_0", "w.Q4_1", "norm"}
    assert got.tensors["w.Q4_0"].blocks.sharding.spec[0] == "i"


def test_values_made_here_are_read_by_others(tmp_path):
    x = RNG.normal(size=(4, 256)).astype(np.float32)
    tensors = {"w": quantize_ggml(jnp.asarray(x), kind="Q8_0"), "b": jnp.ones(3), "h": jnp.ones((2, 2), jnp.bfloat16)}
    save_gguf(tmp_path / "a.gguf", tensors, {"general.architecture": "x", "x.n": 3, "x.names": ["a"], "x.f": 0.5})
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    t = {t.name: t for t in reader.tensors}
    np.testing.assert_array_equal(gguf.quants.dequantize(t["w"].data, t["w"].tensor_type), typax.dense(tensors["w"]))
    assert reader.fields["x.n"].contents() == 3 and reader.fields["x.names"].contents() == ["a"]
    back = load_gguf(tmp_path / "a.gguf")
    assert back.tensors["h"].dtype == jnp.bfloat16 and back.tensors["h"].shape == (2, 2)


def test_what_gguf_does_not_hold(tmp_path):
    meta = {"general.architecture": "x"}
    with pytest.raises(ValueError, match=r"the metadata has no general\.architecture"):
        save_gguf(tmp_path / "a", {"b": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"w is q8\[2,3\], which GGUF does not hold"):
        save_gguf(tmp_path / "a", {"w": typax.quantize(jnp.ones((2, 3)))}, meta)
    with pytest.raises(TypeError, match=r"w is bool\[2\], and GGUF holds"):
        save_gguf(tmp_path / "a", {"w": jnp.ones(2, bool)}, meta)
    with pytest.raises(ValueError, match=r"x: \[1, 'a'\]|x: an array of GGUF has entries of one type"):
        save_gguf(tmp_path / "a", Gguf({}, meta | {"x": [1, "a"]}))
    assert not list(tmp_path.iterdir())


def test_a_type_that_is_not_known_is_refused_by_name(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    raw = np.zeros((2, 2 * 66), np.uint8)
    w.add_tensor("odd", raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(FileError, match=r"a\.gguf: tensor 'odd': its type is IQ2_XXS, none of"):
        load_gguf(tmp_path / "a.gguf")


ALL_KINDS = {
    "general.architecture": ("x", (8,)), "u8": (3, (0,)), "i8": (-3, (1,)), "u16": (3, (2,)), "i16": (-3, (3,)),
    "u32": (3, (4,)), "i32": (-3, (5,)), "f32": (0.5, (6,)), "bool": (True, (7,)), "u64": (2**63, (10,)),
    "i64": (-(2**40), (11,)), "f64": (0.1, (12,)), "texts": (["a", "\udcff"], (9, 8)), "nested": ([[1, 2], [3]], (9, 9, 5)),
    "none": ([], (9, 4)), "bools": ([True, False], (9, 7)), "general.alignment": (64, (4,)),
}  # fmt: skip


def every_kind(path):
    """A file with metadata of each type, and an alignment of its own."""
    x = jnp.asarray(RNG.normal(size=(2, 64)), jnp.float32)
    tensors = {k: quantize_ggml(x, kind=k) for k in KINDS} | {"f": x, "h": jnp.ones((1, 2, 3, 4), jnp.bfloat16)}
    model = Gguf(
        tensors | {"0": np.float64(2), "no": jnp.ones((0, 3))}, *({k: v[i] for k, v in ALL_KINDS.items()} for i in (0, 1))
    )
    save_gguf(path, model)
    return model


def test_metadata_of_every_type_comes_back(tmp_path):
    model = every_kind(tmp_path / "a.gguf")
    back = load_gguf(tmp_path / "a.gguf")
    assert back.metadata == model.metadata and back.kinds == model.kinds
    assert {n: x.shape for n, x in back.tensors.items()} == {n: np.shape(x) for n, x in model.tensors.items()}
    save_gguf(tmp_path / "b.gguf", back)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    for key, value in (("u8", 256), ("u8", 0.5), ("bool", 1), ("i32", True), ("texts", ["a", 3]), ("u32", "x"), ("none", 3)):
        with pytest.raises(ValueError, match=rf"^{key}: .* is no "):
            save_gguf(tmp_path / "c.gguf", back, {key: value})
    with pytest.raises(ValueError, match=r"general\.alignment is 3, no uint32 that is a power of two"):
        save_gguf(tmp_path / "c.gguf", back, {"general.alignment": 3})
    assert not (tmp_path / "c.gguf").exists()


def test_types_are_numbered_as_by_the_package():
    told = {t.value: t.name for t in gguf.GGMLQuantizationType}
    assert {n: name for n, name in _gguf.KINDS.items() if n in told} == {n: told[n] for n in _gguf.KINDS if n in told}


def test_mutated_files_are_refused_or_of_the_same_tensors(tmp_path):
    model = every_kind(tmp_path / "a.gguf")
    good = (tmp_path / "a.gguf").read_bytes()
    header = min(e.start for e in _gguf.Reader(tmp_path / "a.gguf").entries.values())
    rng, tally, path = np.random.default_rng(1), Tally("m.gguf"), tmp_path / "m.gguf"
    with little_memory():
        for i in range(500):
            path.write_bytes(mutate(good, rng, header if i % 4 else None))
            if (got := tally.of(lambda: load_gguf(path))) is not None:
                assert len(got.tensors) <= len(model.tensors)
    assert tally.refused > 250
    for text in (b"", b"GGUF", b"no file at all, but longer than a header"):
        (tmp_path / "m.gguf").write_bytes(text)
        with pytest.raises(FileError, match="no GGUF file"):
            load_gguf(tmp_path / "m.gguf")
    with pytest.raises(FileError, match="No such file"):
        load_gguf(tmp_path / "nowhere.gguf")


def test_the_command_line_reads_them(tmp_path):
    testing = pytest.importorskip("click.testing")
    from typax.cli import main

    another_writer(tmp_path / "a.gguf")
    run = lambda *a: testing.CliRunner().invoke(main, [str(x) for x in a], catch_exceptions=False)
    assert "q4_1[6,64]" in run("inspect", tmp_path / "a.gguf").output
    assert run("convert", tmp_path / "a.gguf", tmp_path / "b.safetensors").exit_code == 0
    a, b = load_gguf(tmp_path / "a.gguf").tensors, typax.io.load(tmp_path / "b.safetensors")
    assert list(a) == list(b) and jax.typeof(a["w.Q5_1"]) == jax.typeof(b["w.Q5_1"])
    np.testing.assert_array_equal(a["w.Q5_1"].blocks, b["w.Q5_1"].blocks)
    assert run("compare", tmp_path / "a.gguf", tmp_path / "b.safetensors").exit_code == 0
    assert run("convert", tmp_path / "a.gguf", tmp_path / "c.safetensors", "--dense", "float32").exit_code == 0
    out = run("quantize", tmp_path / "c.safetensors", tmp_path / "d.safetensors", "--recipe", "int4").output
    assert "q4[6,64]" in out
