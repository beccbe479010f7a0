"""The commands on files, as a user runs them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("click")
from click.testing import CliRunner

import typax
from typax.cli import main


def run(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, (result.output, result.exception)
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def files(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    tree = {
        "enc.0.weight": rng.normal(size=(16, 8)).astype(np.float32),
        "enc.0.bias": np.ones(16, np.float32),
        "head.weight": rng.normal(size=(4, 8)).astype(np.float16),
        "ids": np.arange(3),
    }
    numpy.save_file(tree, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, tree


def test_from_a_plain_file_to_a_quantized_one_and_back(files):
    folder, tree = files
    source, out, back = folder / "model.safetensors", folder / "q.safetensors", folder / "dense.safetensors"
    told = json.loads(run("quantize", source, out, "--recipe", "int8", "--json").stdout)
    assert {r["path"] for r in told["leaves"] if r["why"] is None} == {"enc.0.weight", "head.weight"}
    q = typax.io.load(out)
    for path, x in tree.items():
        if path in ("enc.0.weight", "head.weight"):
            want = typax.quantize(jnp.asarray(x))
            assert jax.typeof(q[path]) == jax.typeof(want)
            np.testing.assert_array_equal(q[path].qvalue, want.qvalue)
        else:
            np.testing.assert_array_equal(q[path], x)
    run("convert", out, back, "--dense", "same")
    dense = typax.io.load(back)
    assert dense["head.weight"].dtype == jnp.float16
    np.testing.assert_array_equal(dense["enc.0.weight"], typax.dense(q["enc.0.weight"]))
    rows = json.loads(run("compare", source, out, "--json").stdout)["rows"]
    assert [r["path"] for r in rows][:2] == ["head.weight", "enc.0.weight"] or rows[0]["sqnr"] <= rows[1]["sqnr"]
    assert 30 < rows[0]["sqnr"] < 60 and rows[-1]["sqnr"] == "inf"
    text = run("compare", source, out, "--worst", 1).stdout
    assert len(text.splitlines()) == 2 and "SQNR dB" in text
    text = run("inspect", out).stdout
    assert "q8[16,8]" in text and "4 leaves, 179 numbers" in text
    text = run("inspect", out, "--depth", 1).stdout
    assert "1 q8, 1 float32" in text or "1 float32, 1 q8" in text
    told = json.loads(run("inspect", source, "--json").stdout)
    assert told["metadata"] == {"format": "pt"} and len(told["leaves"]) == 4
    assert "1 leaves" in run("inspect", source, "--only", "head").stdout


def test_a_typed_tree_keeps_its_structure(tmp_path):
    tree = {"a": [jnp.ones((4, 8)), typax.outer(jnp.ones(3), jnp.ones(2))], "n": 3, "t": (None, "x")}
    typax.io.save(tmp_path / "a", tree)
    run("quantize", tmp_path / "a", tmp_path / "b", "--recipe", "int8")
    got = typax.io.load(tmp_path / "b")
    assert jax.tree.structure(got) == jax.tree.structure(tree) and got["n"] == 3 and got["t"] == (None, "x")
    assert str(jax.typeof(got["a"][0])) == "q8[4,8]" and str(jax.typeof(got["a"][1])) == "r1[3,2]"
    run("convert", tmp_path / "b", tmp_path / "c", "--shard-bytes", 40)
    again = typax.io.load(tmp_path / "c")
    np.testing.assert_array_equal(again["a"][0].qvalue, got["a"][0].qvalue)


def test_a_dry_run_writes_nothing(files):
    folder, _ = files
    text = run("quantize", folder, folder / "q", "--dry-run").stdout
    assert "q8[16,8]" in text and not (folder / "q").exists()


def test_mistakes_are_one_line(files, tmp_path):
    folder, _ = files
    source = folder / "model.safetensors"
    (folder / "bad").write_bytes(b"1234")
    for args, match in [
        (("inspect", folder / "nothing"), "No such file"),
        (("inspect", folder / "bad"), "is no safetensors file"),
        (("inspect", "x.pt"), "is a pickle"),
        (("quantize", source, folder / "q", "--recipe", "int99"), "no format is called 'int99'"),
        (("quantize", source, folder / "no" / "q"), "its folder does not exist"),
        (("convert", source, folder / "q", "--dense", "float7"), "float7"),
    ]:
        result = run(*args, code=1)
        assert result.stderr.startswith("Error: ") and match in result.stderr and len(result.stderr.splitlines()) == 1
    assert "Usage" in run("quantize", source, code=2).stderr
    typax.io.save(tmp_path / "other", {"ids": jnp.ones(4), "enc": 1})
    result = run("compare", source, tmp_path / "other", code=1)
    assert "enc.0.weight is only in" in result.stderr and "ids has the shape [3]" in result.stderr


def test_help_of_every_command():
    for name in main.commands:
        assert "Usage" in run(name, "--help").stdout
    assert "_TYPAX_COMPLETE" in run("--help").stdout
