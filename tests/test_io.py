"""Trees of values in safetensors files."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _fuzz import Tally, little_memory, mutate
from jaxtyping import Array, Float32, Int4

import typax
from typax.io import FileError, _disk, load, save
from typax.io._safetensors import DIGESTS, Planned, Reader, _render, sha256, write

pytestmark = pytest.mark.core


class Packed(typax.Value, name="packed"):
    """Components of less than a byte, and a static."""

    codes: Int4[Array, "*batch n"]
    scale: Float32[Array, "*batch"]
    note: str = "none"

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.codes.astype(jnp.float32) * self.scale[..., None]


class Pair(NamedTuple):
    left: Any
    right: Any


def example():
    x = jax.random.normal(jax.random.key(0), (3, 4, 8))
    return {
        "layers": [
            {"w": typax.quantize(x), "b": jnp.arange(3, dtype=jnp.bfloat16)},
            (typax.outer(jnp.ones(3), jnp.arange(4.0)), typax.tup(typax.quantize(x[0]), jnp.int32(7))),
        ],
        "a.b": jnp.ones((2, 0, 3)),
        "a": {"b": jnp.zeros(()), "nasty": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45])},
        "pair": Pair(Packed(jnp.arange(-8, 7).astype("int4"), jnp.float32(0.5), "x"), None),
        "step": 7,
        "lr": 0.1,
        "name": "encoder",
        "done": False,
        "key": jax.random.key(5),
        "host": np.arange(4, dtype=np.float64),
        "fp8": jnp.array([1.5, -448], jnp.float8_e4m3fn),
        "other": jnp.array([1.5, -3], jnp.float8_e4m3b11fnuz),
        "bits": np.array([3, 1, 2, 0, 3], ml_dtypes.uint2),
        "complex": np.array([1 + 2j]),
        "mask": jnp.array([True, False]),
    }


def _bits(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return (type(x) if isinstance(x, np.ndarray) else jax.Array, x.dtype, x.shape, np.asarray(x).tobytes())


def same(a: Any, b: Any) -> None:
    """The same structure, types and bits."""
    la, ta = jax.tree.flatten(a)
    lb, tb = jax.tree.flatten(b)
    assert ta == tb
    for x, y in zip(la, lb, strict=True):
        if not hasattr(x, "dtype") and not isinstance(x, typax.Value):
            assert type(x) is type(y) and repr(x) == repr(y)
        elif isinstance(x, typax.Value):
            assert jax.typeof(x) == jax.typeof(y)
            same(jax.typeof(x).lower_val(x), jax.typeof(y).lower_val(y))
        else:
            assert _bits(x) == _bits(y)


def test_a_tree_comes_back_to_the_bit(tmp_path):
    tree = example()
    save(tmp_path / "x.safetensors", tree)
    same(tree, load(tmp_path / "x.safetensors"))
    with pytest.raises(FileError, match="two of its leaves have the same path"):
        load(tmp_path / "x.safetensors", like=tree)
    del tree["a.b"]
    save(tmp_path / "x.safetensors", tree)
    same(tree, load(str(tmp_path / "x.safetensors"), like=tree))


@pytest.mark.parametrize(
    "tree",
    [None, 3, {}, [], (), {(1, True): 2, (3, "x"): 4}, jnp.float32(2), np.float64(2), typax.quantize(jnp.ones((0, 3)))],
)
def test_the_smallest_trees(tmp_path, tree):
    save(tmp_path / "x", tree)
    same(tree, load(tmp_path / "x"))


def test_texts_and_arrays_of_any_kind(tmp_path):
    tree = {"half\ud800": jnp.ones(1), "text": "\ud800", "☃\n": jnp.ones(()), "swapped": np.arange(3, dtype=">i4")}
    save(tmp_path / "x", tree)
    back = load(tmp_path / "x")
    assert back["text"] == tree["text"] and back["swapped"].tolist() == [0, 1, 2]
    same({k: v for k, v in tree.items() if k != "swapped"}, {k: v for k, v in back.items() if k != "swapped"})
    deep: Any = jnp.ones(1)
    for _ in range(300):
        deep = {"a": [deep]} if _ % 2 else {"a": deep}
    with pytest.raises(ValueError, match="deeper than 300"):
        save(tmp_path / "x", deep)
    with pytest.raises(TypeError, match="only is 3, neither a pattern"):
        load(tmp_path / "x", only=3)


OWN = dataclasses.replace(typax.quantized.format.INT4, name="own4", shown="own4")


@pytest.mark.parametrize("format", [*typax.quantized.formats(), OWN], ids=str)
def test_every_format_is_kept_as_it_is(tmp_path, format):
    x = jnp.cos(jnp.arange(6 * 64.0)).reshape(6, 64)
    tree = {"w": typax.quantize(x, format), "t": typax.quantize(x, format, axis=0, group=3 if format != "nvfp4" else 2)}
    save(tmp_path / "x", tree)
    same(tree, load(tmp_path / "x"))
    code = f"import typax, jax; print({{k: str(jax.typeof(v)) for k, v in typax.io.load({str(tmp_path / 'x')!r}).items()}})"
    if format == "nf4_double":  # another process, where nobody has made the classes yet
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
        assert out.stdout.strip() == str({k: str(jax.typeof(v)) for k, v in tree.items()})


def test_other_readers_find_ordinary_tensors(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    q = typax.quantize(jnp.ones((2, 3)))
    save(tmp_path / "x.safetensors", {"enc": {"w": q, "b": jnp.ones(2, jnp.bfloat16)}})
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as f:
        assert sorted(f.keys()) == ["enc.b", "enc.w.qvalue", "enc.w.scale"]
        np.testing.assert_array_equal(f.get_tensor("enc.w.qvalue"), q.qvalue)
        assert f.metadata()["typax"].startswith('{"version":1')


def test_a_file_of_another_writer_is_a_flat_dict(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"b.x": np.ones((2, 3), np.float16), "a": np.arange(3)}, tmp_path / "x.safetensors")
    got = load(tmp_path / "x.safetensors")
    assert set(got) == {"b.x", "a"}
    (tmp_path / "x.safetensors").rename(tmp_path / "model.safetensors")
    assert set(load(tmp_path)) == {"b.x", "a"}
    same(got["b.x"], jnp.ones((2, 3), jnp.float16))
    same(got["a"], np.arange(3))  # 64 bits, which JAX does not hold


def test_a_part(tmp_path):
    tree = example()
    save(tmp_path / "x", tree)
    same(load(tmp_path / "x", only="layers.0"), {"layers.0.w": tree["layers"][0]["w"], "layers.0.b": tree["layers"][0]["b"]})
    assert set(load(tmp_path / "x", only=["*.w", "step"])) == {"layers.0.w", "step"}
    assert set(load(tmp_path / "x", only=lambda p: p.startswith("na"))) == {"name"}
    with pytest.raises(FileError, match=r"no path is chosen by 'nothing'; it has layers\.0\.w"):
        load(tmp_path / "x", only="nothing")


def test_several_files_with_an_index(tmp_path):
    tree = example()
    save(tmp_path / "m", tree, shard_bytes=100)
    files = sorted(p.name for p in (tmp_path / "m").iterdir())
    assert len(files) == 4 and files[-1] == "model.safetensors.index.json"
    same(tree, load(tmp_path / "m"))
    same(tree, load(tmp_path / "m" / "model.safetensors.index.json"))
    save(tmp_path / "m", {"w": jnp.ones(3)}, shard_bytes=100)  # what is not of the new checkpoint goes
    same(load(tmp_path / "m"), {"w": jnp.ones(3)})
    assert len(list((tmp_path / "m").iterdir())) == 2


@pytest.mark.parametrize("told", [True, False])
def test_a_part_needs_only_the_files_that_it_is_in(tmp_path, told):
    save(tmp_path / "m", {"a": jnp.arange(64.0), "b": typax.quantize(jnp.ones((8, 8)))}, shard_bytes=100)
    index = tmp_path / "m" / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    if not told:  # as another library would have written it
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
        numpy = pytest.importorskip("safetensors.numpy")
        for f in set(where.values()):
            numpy.save_file(numpy.load_file(tmp_path / "m" / f), tmp_path / "m" / f)
    gone = next(f for name, f in where.items() if name.startswith("b"))
    (tmp_path / "m" / gone).unlink()
    (a,) = load(tmp_path / "m", only="a").values()
    np.testing.assert_array_equal(a, np.arange(64.0))
    with pytest.raises(FileError, match=f"it is in {gone}, which is not there"):
        load(tmp_path / "m", only="b*")
    with pytest.raises(FileError, match=gone):
        load(tmp_path / "m")


def test_names_that_would_be_the_same_are_kept_apart(tmp_path):
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(2)}, "__metadata__": jnp.ones(3), "": jnp.ones(4)}
    save(tmp_path / "x", tree)
    same(tree, load(tmp_path / "x"))


def test_nodes_of_other_kinds_need_a_tree_that_has_them_too(tmp_path):
    Model = _model()
    tree = {"m": Model(typax.quantize(jnp.ones((2, 3))))}
    save(tmp_path / "x", tree)
    with pytest.raises(FileError, match=r"it has a .*Model in its tree, which only load\(path, like=tree\) can make"):
        load(tmp_path / "x")
    same(tree["m"].w, load(tmp_path / "x", like=tree)["m"].w)
    types = {"m": Model(typax.QArray.type((2, 3)))}
    same(tree["m"].w, load(tmp_path / "x", like=types)["m"].w)
    with pytest.raises(FileError, match=r"m\.w is q8\[2,3\], where `like` has q8\[2,4\]"):
        load(tmp_path / "x", like={"m": Model(typax.QArray.type((2, 4)))})
    with pytest.raises(FileError, match=r"it has no 'k', which `like` has"):
        load(tmp_path / "x", like=tree | {"k": jnp.ones(2)})
    with pytest.raises(FileError, match=r"it has 'm\.w', which `like` has not"):
        load(tmp_path / "x", like={})


def _model():
    @jax.tree_util.register_pytree_with_keys_class
    class Model:
        def __init__(self, w):
            self.w = w

        def tree_flatten_with_keys(self):
            return ((jax.tree_util.GetAttrKey("w"), self.w),), None

        @classmethod
        def tree_unflatten(cls, _, xs):
            return cls(*xs)

    return Model


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_straight_to_a_sharding(tmp_path, kind):
    mesh = jax.make_mesh((2, 4), ("i", "j"), axis_types=(kind,) * 2)
    q = typax.quantize(jnp.arange(64.0).reshape(8, 8))
    save(tmp_path / "x", {"q": q, "b": jnp.ones(8)})
    rows = jax.NamedSharding(mesh, jax.P("j"))
    got = load(tmp_path / "x", sharding=rows)
    assert got["q"].qvalue.sharding.spec == jax.P("j", None) or got["q"].qvalue.sharding.spec == jax.P("j")
    assert got["q"].scale.sharding.spec == jax.P("j") and got["b"].sharding.spec == jax.P("j")
    np.testing.assert_array_equal(got["q"].qvalue, q.qvalue)
    np.testing.assert_array_equal(typax.dense(got["q"]), typax.dense(q))
    got = load(tmp_path / "x", sharding=lambda p, ty: jax.NamedSharding(mesh, jax.P(None, "i")) if p == "q" else None)
    assert got["q"].scale.sharding.is_fully_replicated and got["q"].qvalue.addressable_shards[0].data.shape == (8, 4)
    assert not isinstance(got["b"].sharding, jax.NamedSharding)
    got = load(tmp_path / "x", sharding={"q": rows, "b": None})
    assert got["q"].scale.sharding.spec == jax.P("j") and not isinstance(got["b"].sharding, jax.NamedSharding)
    with pytest.raises(TypeError, match="b: the tree of shardings has nothing for it"):
        load(tmp_path / "x", sharding={"q": rows})
    with pytest.raises(TypeError, match=r"b: .*cannot be put as"):
        load(tmp_path / "x", sharding=lambda p, ty: jax.NamedSharding(mesh, jax.P(None, "i")))
    with pytest.raises(TypeError, match="sharding must be a device"):
        load(tmp_path / "x", sharding="i")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save(path, {"w": jnp.ones(3)})
    path.chmod(0o640)
    monkeypatch.setattr(_disk.os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(path, {"w": jnp.zeros(3)})
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "m", {"w": jnp.zeros(3)}, shard_bytes=1)
    monkeypatch.undo()
    same(load(path), {"w": jnp.ones(3)})
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["x.safetensors"] and not list((tmp_path / "m").iterdir())
    save(path, {"w": jnp.zeros(3)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    os.symlink(path, tmp_path / "link")
    save(tmp_path / "link", {"w": jnp.ones(2)})
    assert (tmp_path / "link").is_symlink()
    same(load(path), {"w": jnp.ones(2)})


def test_what_cannot_be_kept_is_refused_before_a_file_is_there(tmp_path):
    for tree, match in [
        ({"f": max}, r"f: .*is neither an array, a value nor a node"),
        ({"s": {1, 2}}, "s: set"),
        ({"t": np.array(["a"])}, "t: an array of dtype <U1 has no form in a file"),
        ({"o": np.array([None])}, "o: an array of dtype object has no form"),
        ({"ty": typax.QArray.type((2, 3))}, r"ty: q8\[2,3\] is a type"),
        ({"ty": jax.ShapeDtypeStruct((2,), "int8")}, r"ty: int8\[2\] is a type"),
    ]:
        with pytest.raises(TypeError, match=match):
            save(tmp_path / "x", tree)
    around: list[Any] = []
    around.append(around)
    with pytest.raises(ValueError, match="deeper than 300 nodes, or holds itself"):
        save(tmp_path / "x", around)
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        save(tmp_path / "x", {}, shard_bytes=0)
    for name in ("a\0b", "/dev/null", tmp_path):
        with pytest.raises(FileError, match=r"no file can have|no ordinary file|is a folder"):
            save(name, {})
    for x in (jnp.ones(2), typax.quantize(jnp.ones((2, 3)))):
        with pytest.raises(TypeError, match=r"q: a file is written outside of jit"):
            jax.jit(lambda x: save(tmp_path / "x", {"q": x}))(x)
    with pytest.raises(FileError, match="its folder does not exist"):
        save(tmp_path / "no" / "x", {})
    assert not list(tmp_path.iterdir())


# --- files that are not what they should be -------------------------------------------------------------------------


def _digested(header: Any, payload: bytes) -> Any:
    """The header of a file that tells of values, with the digests that such a file has."""
    meta = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    if "typax" not in meta:
        return header
    planned = {n: Planned(np.dtype("f4"), tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"}
    found = {"": sha256(_render(planned, meta))} | {n: sha256(payload[slice(*header[n]["data_offsets"])]) for n in planned}
    return header | {"__metadata__": meta | {DIGESTS: json.dumps(found)}}


def _file(tmp_path, header: Any, payload: bytes = b"", length: int | None = None):
    header = _digested(header, payload)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + payload)
    return path


def _t(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    ("header", "payload", "match"),
    [
        (b"", b"", "is not valid JSON"),
        (b"[1]", b"", "is not a JSON object"),
        (b'{"a": NaN}', b"", "NaN is no JSON"),
        (b'{"a": 1, "a": 2}', b"", "'a' stands there twice"),
        (b"[" * 100_000, b"", "is not valid JSON"),
        (b'{"\\ud800": 1}', b"", "is not valid JSON: .*surrogates"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not an object of strings"),
        ({"a": _t()}, b"0" * 7, r"tensor 'a': data_offsets \[0, 8\] lie outside .* cut off"),
        ({"a": _t()}, b"0" * 9, "1 bytes after the last tensor"),
        ({"a": _t(offsets=(4, 12))}, b"0" * 12, "tensor 'a': there are 4 bytes before it"),
        ({"a": _t(), "b": _t(offsets=(4, 12))}, b"0" * 12, "tensor 'b': its bytes overlap those of 'a'"),
        ({"a": _t(offsets=(8, 0))}, b"0" * 8, "tensor 'a': data_offsets"),
        ({"a": _t(shape=(3,))}, b"0" * 8, r"tensor 'a': F32\[3\] takes 12 bytes"),
        ({"a": _t(shape=(2**62, 2**62))}, b"0" * 8, "takes .* bytes, but"),
        ({"a": _t(shape=(-2,))}, b"0" * 8, "is not a list of sizes"),
        ({"a": _t(shape=(2.0,))}, b"0" * 8, "is not a list of sizes"),
        ({"a": _t(dtype="F128")}, b"0" * 8, "tensor 'a': dtype 'F128' is none of"),
        ({"a": _t(extra=1)}, b"0" * 8, "tensor 'a': it is not described by"),
        ({"a": 3}, b"0" * 8, "tensor 'a': it is not described by"),
        ({"__metadata__": {"typax": "no"}}, b"", "bad.safetensors: Expecting value"),
        ({"__metadata__": {"typax": "{}"}}, b"", "no version or no tree"),
        ({"__metadata__": {"typax": '{"version": 2, "tree": {}}'}}, b"", "version 2 of the layout"),
        ({"__metadata__": {"typax": '{"version": 1, "tree": {"list": 3}}'}}, b"", "in place of a node"),
        ({"__metadata__": {"typax": '{"version": 1, "tree": {"dict": [[1]]}}'}}, b"", "in place of a node"),
        (
            {"__metadata__": {"typax": json.dumps({"version": 1, "tree": {"leaf": {"array": "float32", "shape": [2]}}})}},
            b"",
            "does not name the 1 arrays",
        ),
        (
            {
                "__metadata__": {
                    "typax": json.dumps(
                        {"version": 1, "tree": {"leaf": {"array": "float32", "shape": [3], "tensors": ["a"]}}}
                    )
                },
                "a": _t(),
            },
            b"0" * 8,
            r"tensor 'a': it is float32\[2\] where float32\[3\] is told of",
        ),
        (
            {
                "__metadata__": {
                    "typax": json.dumps(
                        {"version": 1, "tree": {"leaf": {"array": "float32", "shape": [2], "tensors": ["b"]}}}
                    )
                },
                "a": _t(),
            },
            b"0" * 8,
            "tensor 'b': there is no such tensor",
        ),
        ({"__metadata__": {"typax.sha256": "{}"}, "a": _t()}, b"0" * 8, "does not name every tensor"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, header, payload, match):
    with pytest.raises(FileError, match=match) as caught:
        load(_file(tmp_path, header, payload))
    assert "bad.safetensors" in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_bytes(b"123")
    for head, what in [(b"GGUF", "is a GGUF file"), (b"PK\3\4", "but a zip archive")]:
        (tmp_path / "other").write_bytes(head + bytes(60))
        with pytest.raises(FileError, match=what):
            load(tmp_path / "other")
    with pytest.raises(FileError, match="short: is no safetensors file: 3 bytes"):
        load(tmp_path / "short")
    with pytest.raises(FileError, match="its header would take"):
        load(_file(tmp_path, {}, length=2**63))
    with pytest.raises(FileError, match="is cut off, or no safetensors file"):
        load(_file(tmp_path, {}, length=2**20))
    with pytest.raises(FileError, match="nowhere: No such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileError, match="has no safetensors file"):
        load(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe: is no ordinary file"):
        load(tmp_path / "pipe")
    tree = {"version": 1, "tree": {"list": []}}
    text = json.dumps({"__metadata__": {"typax": json.dumps(tree)}}).encode()
    (tmp_path / "bare").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(FileError, match=r"tells of typax's values, but has no typax\.sha256"):
        load(tmp_path / "bare")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin", 3])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FileError, match="tensor 'a': it is said to be in"):
        load(tmp_path)


def test_a_changed_byte_is_found(tmp_path):
    path = tmp_path / "x"
    save(path, {"a": jnp.arange(100.0), "b": jnp.ones(3)})
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FileError, match=r"tensor 'b': its bytes are not those that were written"):
        load(path)
    same(load(path, only="a"), {"a": jnp.arange(100.0)})


def test_mutated_files_are_refused_or_the_same(tmp_path):
    """Of 1,000 files with bytes changed, cut out or put in, none gives another tree."""
    tree = {"q": typax.quantize(jnp.arange(12.0).reshape(3, 4)), "l": [jnp.ones(2, jnp.bfloat16), 3, "x"], "n": None}
    path, rng, tally = tmp_path / "x", np.random.default_rng(0), Tally(tmp_path)
    save(path, tree)
    good = path.read_bytes()
    with little_memory():
        for _ in range(1000):
            path.write_bytes(mutate(good, rng))
            if (got := tally.of(lambda: load(path))) is not None:
                same(got, tree)
    assert tally.refused > 950


def test_mutated_plain_files_are_refused_or_flat_dicts(tmp_path):
    path, rng, tally = tmp_path / "x", np.random.default_rng(1), Tally(tmp_path)
    header = {"__metadata__": {"format": "pt"}, "a.w": _t(), "b": _t("I8", (2, 4), (8, 16)), "c": _t("BF16", (), (16, 18))}
    good = _file(tmp_path, header, bytes(range(18))).read_bytes()
    with little_memory():
        for i in range(300):
            path.write_bytes(mutate(good, rng, len(good) - 18 if i % 3 else None))
            if (got := tally.of(lambda: load(path))) is not None:
                assert all(isinstance(x, jax.Array | np.ndarray) for x in got.values())
    assert tally.refused > 150


def test_mutated_descriptions_are_refused_whose_digests_are_right(tmp_path):
    """What the header tells of the tree is data that may be anything, of a writer who knows the digests."""
    path, rng, tally = tmp_path / "x", np.random.default_rng(2), Tally(tmp_path)
    save(path, {"q": typax.quantize(jnp.ones((3, 4))), "p": Pair(jnp.ones(2), 3), "k": jax.random.key(1), "f": 0.5})
    reader = Reader(path)
    planned = {n: Planned(e.dtype, e.shape) for n, e in reader.entries.items()}
    tensors, told = [reader[n].copy() for n in planned], reader.metadata["typax"].encode()
    with little_memory():
        for _ in range(200):
            write(path, planned, tensors, {"typax": mutate(told, rng).decode("utf-8", "replace")})
            tally.of(lambda: load(path))
    assert tally.refused > 150


def test_mutated_indices_are_refused_or_give_the_same(tmp_path):
    tree, folder = {"a": jnp.ones((2, 3)), "q": typax.quantize(jnp.ones((3, 4))), "n": 3}, tmp_path / "m"
    save(folder, tree, shard_bytes=20)
    index, rng, tally = folder / "model.safetensors.index.json", np.random.default_rng(3), Tally(tmp_path)
    good = index.read_bytes()
    first, second, *_ = json.loads(good)["weight_map"]

    def changed(i: int) -> bytes:
        told = json.loads(good)
        where = told["weight_map"]
        match i % 10:
            case 0:
                where[first] = where[second]
            case 1:
                del where[first]
            case 2:
                where[first + "x"] = where.pop(first)
            case 3:
                del told["metadata"]
            case 4:
                where[first] = "missing.safetensors"
            case 5:
                where[first] = "half\ud800.safetensors"
            case 6:
                where[first] = "long" * 100 + ".safetensors"
            case 7:
                told["metadata"]["typax"] = told["metadata"]["typax"].replace("3", "4")
            case 8:
                return good.replace(b'"weight_map": {', b'"weight_map": {"' + second.encode() + b'": "x",')
            case 9:
                told["weight_map"] = [where]
        return json.dumps(told).encode()

    with little_memory():
        for i in range(200):
            index.write_bytes(changed(i) if i < 10 else mutate(good, rng))
            if (got := tally.of(lambda: load(folder))) is not None:
                assert i >= 10
                same(got, tree)
    assert tally.refused > 150
    index.write_bytes(good)
    other = next(p for p in folder.iterdir() if p != index)
    planned = {n: Planned(e.dtype, e.shape) for n, e in Reader(other).entries.items()}
    write(other, planned, [np.zeros(p.shape, p.dtype) for p in planned.values()], {})
    with pytest.raises(FileError, match=r"is not the file that was written with it"):
        load(folder)
    target = tmp_path / "elsewhere"
    other.rename(target)
    os.symlink(target, other)  # as in the cache of Hugging Face
    with pytest.raises(FileError, match=r"is not the file that was written with it"):
        load(folder)
    target.unlink()
    with pytest.raises(FileError, match="No such file"):
        load(folder)
