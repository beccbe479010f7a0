"""The commands on files, as a user runs them."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("click")
from click.shell_completion import get_completion_class
from click.testing import CliRunner

import typax
from typax.cli import main
from typax.io import _disk


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
    assert "1 leaf, " in run("inspect", source, "--only", "head").stdout


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
    (folder / "no.toml").write_text("[[rule]]\npaths = *")
    (folder / "odd.toml").write_text("[[rule]]\npaths = '*'\nformat = 'int4'\ngroup = 'x'")
    for args, match in [
        (("inspect", folder / "nothing"), "No such file"),
        (("inspect", folder / "bad"), "is no safetensors file"),
        (("inspect", "x.pt"), "is a pickle"),
        (("quantize", source, folder / "q", "--recipe", folder / "no.toml"), "no.toml is no TOML: "),
        (("quantize", source, folder / "q", "--recipe", folder / "odd.toml"), "odd.toml, rule 1: group is 'x', neither"),
        (("quantize", source, folder / "no" / "q"), "its folder does not exist"),
    ]:
        result = run(*args, code=1)
        assert result.stderr.startswith("Error: ") and match in result.stderr and len(result.stderr.splitlines()) == 1
    (folder / "none.toml").write_text("[[rule]]\npaths = 'x'\nformat = 'int4'")
    result = run("quantize", source, folder / "q", "--recipe", folder / "none.toml", code=1)
    assert "none.toml matches a path of" in result.stderr and not (folder / "q").exists()
    assert "matched nothing" in run("quantize", source, folder / "q", "--recipe", folder / "none.toml", "--dry-run").stdout
    for args, match in [
        (("quantize", source, folder / "q", "--recipe", "int99"), "no format is called 'int99'"),
        (("quantize", source, folder / "q.PT"), "let it end with .safetensors, not .PT"),
        (("convert", source, folder / "q.npz"), "let it end with .safetensors, not .npz"),
        (("quantize", source, folder / "q.bin", "--shard-bytes", 9), "let it end with .safetensors, not .bin"),
        (("quantize", source, folder, "--force"), "give --shard-bytes"),
    ]:
        assert match in " ".join(run(*args, code=2).stderr.split())
    assert "Usage" in run("quantize", source, code=2).stderr
    assert "'float7' is not one of" in run("convert", source, folder / "q", "--dense", "float7", code=2).stderr
    typax.io.save(tmp_path / "other", {"ids": jnp.ones(4), "enc": 1})
    result = run("compare", source, tmp_path / "other", code=1)
    assert "enc.0.weight is only in" in result.stderr and "ids has the shape [3]" in result.stderr


def test_names_do_not_reach_the_terminal_as_they_are(tmp_path):
    odd = {"red\x1b[31m": jnp.ones((2, 4)), "two\nlines": jnp.ones(3), "": jnp.ones((4, 4)), "[bold]m[/bold]": jnp.ones(2)}
    typax.io.save(tmp_path / "a", odd | {"text\x07": "\x1b[2J"})
    typax.io.save(tmp_path / "b", {"red\x1b[31m": jnp.ones((2, 5))})
    typax.io.save(tmp_path / "c", {"q\x1b[31m": typax.quantize(jnp.ones((2, 4)))})
    a, b, c, g = (tmp_path / name for name in ("a", "b", "c", "g.gguf"))
    shown = {"red\\x1b[31m", "two\\nlines", "''", "[bold]m[/bold]"}
    for args, code in [
        (("inspect", a), 0),
        (("inspect", a, "--depth", 2), 0),
        (("quantize", a, tmp_path / "q"), 0),
        (("compare", a, a), 0),
        (("compare", a, b), 1),
    ]:
        result = run(*args, code=code)
        assert not set("\x1b\x07\r") & set(result.output)
        assert shown <= {line.split()[0] for line in result.output.splitlines()}
    assert "text\\x07" in run("convert", a, g, "--architecture", "x").stderr
    assert "q\\x1b[31m is q8" in run("convert", c, g, "--architecture", "x", "-f", code=1).stderr
    assert list(typax.io.load(a, only="[bold]m[/bold]")) == ["[bold]m[/bold]"]


def test_a_folder_without_a_safetensors_file_says_what_it_has(tmp_path):
    for name, match in [
        (".x", "has no safetensors file\n"),
        ("m.gguf", "but m.gguf, which is to"),
        ("a.bin", "but a.bin, which is a pi"),
    ]:
        (tmp_path / name).write_bytes(b"")
        assert match in run("inspect", tmp_path, code=1).stderr
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    assert "has several, one.safetensors and two.safetensors, and no model" in run("inspect", tmp_path, code=1).stderr


def test_no_number_becomes_infinite_or_narrower_without_a_word(tmp_path, recwarn):
    wide = np.linspace(0, 1, 8).reshape(2, 4)
    typax.io.save(tmp_path / "a", {"w": jnp.array([[1e38, jnp.inf]]), "wide": wide})
    a, out = tmp_path / "a", tmp_path / "out"
    told = run("convert", a, out, "--dense", "float16", code=1).stderr
    assert told == "Error: w has a number of magnitude 1e+38, and float16 ends at 6.55e+04: give --dense float32\n"
    for dtype in ("bfloat16", "float64"):
        run("convert", a, out, "--dense", dtype, "-f")
        assert np.isfinite(np.asarray(typax.io.load(out)["w"])[0, 0])
    np.testing.assert_array_equal(typax.io.load(out)["wide"], wide)
    told = run("quantize", a, out, "-f").stderr
    assert told == "wide is float64, and quantized as float32: set JAX_ENABLE_X64=1 for more\n"
    typax.io.save(a, {"w": wide * 1e300})
    assert (
        "float32 ends at 3.4e+38: give --dense float64" in run("convert", a, out, "--dense", "float32", "-f", code=1).stderr
    )
    assert not [w for w in recwarn if "float64" in str(w.message)]


def test_help_of_every_command():
    for name in main.commands:
        assert "Usage" in run(name, "--help").stdout
    assert "_TYPAX_COMPLETE" in run("--help").stdout


def command(folder):
    """The command ``typax``, as a shell finds it."""
    path = folder / "bin" / "typax"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c \'from typax.cli import main; main(prog_name="typax")\' "$@"\n')
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(typax.__file__).parents[1])}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_the_shell_completes_commands_options_and_formats(tmp_path):
    source = {shell: get_completion_class(shell)(main, {}, "typax", "_TYPAX_COMPLETE").source() for shell in ("zsh", "fish")}
    assert all("typax" in text for text in source.values())
    program = """
    eval "$(_TYPAX_COMPLETE=bash_source typax)"
    asked() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _typax_completion typax; echo "${COMPREPLY[@]}"; }
    asked typax qu
    asked typax quantize --sh
    asked typax quantize a b --recipe nf
    """
    done = subprocess.run(["bash", "-c", program], env=command(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["quantize", "--shard-bytes", "nf4 nf4_double"] and not done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a full device is Linux's")
def test_what_is_interrupted_leaves_what_was_there(files, monkeypatch):
    """Ctrl-C, and a disk that is full, while a file, a GGUF file, an index or a picture is written over another."""
    folder, _ = files
    source = folder / "model.safetensors"
    gguf = ("--architecture", "x", "--dense", "float32")
    writes = {"q": ("quantize", source, folder / "q"), "c": ("convert", source, folder / "c")}
    writes |= {"g.gguf": ("convert", source, folder / "g.gguf", *gguf)}
    writes |= {"s": ("quantize", source, folder / "s", "--shard-bytes", 100)}
    for args in writes.values():
        run(*args)
        assert "give --force" in run(*args, code=1).stderr
    whole = lambda: {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    before = whole()
    for error, code, told in [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "cannot be written: No space left on device"),
    ]:
        for args in writes.values():
            monkeypatch.setattr(_disk.os, "fsync", lambda _, e=error: (_ for _ in ()).throw(e))
            other = ("--recipe", "nf4") if args[0] == "quantize" else ("--dense", "same")
            result = run(*args, *other, "-f", code=code)
            monkeypatch.undo()
            assert told in result.stderr and whole() == before
    assert "is no ordinary file" in run("convert", source, "/dev/null", "-f", code=1).stderr
    assert Path("/dev/null").is_char_device()
    run("quantize", source, source, "--force")  # onto itself
    assert str(jax.typeof(typax.io.load(source)["enc.0.weight"])) == "q8[16,8]"


def test_rows_are_quantized_in_parts_as_they_are_at_once(files, monkeypatch):
    folder, _ = files
    for recipe in ("int8", "nf4", "nvfp4", "fp8_e4m3"):
        run("quantize", folder, folder / "whole", "--recipe", recipe, "--again", "--force")
        monkeypatch.setattr("typax.cli.files.PART", 100)
        run("quantize", folder, folder / "parts", "--recipe", recipe, "--force")
        monkeypatch.undo()
        assert (folder / "whole").read_bytes() == (folder / "parts").read_bytes(), recipe


def test_a_leaf_is_quantized_as_its_neighbours_ask_for(tmp_path):
    attention = {name: {"kernel": jnp.sin(jnp.arange(48.0)).reshape(8, 2, 3)} for name in ("query", "key")}
    typax.io.save(tmp_path / "a", {"attention": attention})
    run("quantize", tmp_path / "a", tmp_path / "b")
    want, _ = typax.quantize_tree({"attention": attention}, "int8")
    got = typax.io.load(tmp_path / "b")["attention"]["key"]["kernel"]
    assert jax.typeof(got) == jax.typeof(want["attention"]["key"]["kernel"])
    np.testing.assert_array_equal(typax.dense(got), typax.dense(want["attention"]["key"]["kernel"]))


def test_to_gguf_and_from_there_anew(files):
    pytest.importorskip("gguf")
    folder, _ = files
    rng = np.random.default_rng(1)
    typax.io.save(folder / "m", {"w": jnp.asarray(rng.normal(size=(4, 64)), jnp.float32), "b": jnp.ones(3)})
    assert "give --architecture" in run("convert", folder / "m", folder / "a.gguf", code=2).stderr
    told = run("convert", folder / "m", folder / "a.gguf", "--architecture", "mine", "--blocks", "Q8_0", "--json").stdout
    assert json.loads(told)["bytes"] == (folder / "a.gguf").stat().st_size
    model = typax.io.load_gguf(folder / "a.gguf")
    assert str(jax.typeof(model.tensors["w"])) == "q8_0[4,64]" and model.metadata == {"general.architecture": "mine"}
    run("convert", folder / "a.gguf", folder / "b.gguf")
    assert (folder / "a.gguf").read_bytes() == (folder / "b.gguf").read_bytes()
    text = run("quantize", folder / "a.gguf", folder / "q", "--recipe", "int8").stdout
    assert "left: it is a value already" in text and "q8_0[4,64]" in text
    assert "give --force" in run("quantize", folder / "a.gguf", folder / "q", "--again", code=1).stderr
    text = run("quantize", folder / "a.gguf", folder / "q", "--recipe", "int8", "--again", "--force").stdout
    assert "float32[4,64]" in text and "q8[4,64]" in text
    want = typax.quantize(typax.dense(model.tensors["w"]))
    np.testing.assert_array_equal(typax.io.load(folder / "q")["w"].qvalue, want.qvalue)
    assert (
        "which GGUF does not hold" in run("convert", folder / "q", folder / "c.gguf", "--architecture", "x", code=1).stderr
    )
    run("convert", folder / "q", folder / "c.gguf", "--architecture", "x", "--dense", "float16")
    assert typax.io.load_gguf(folder / "c.gguf").tensors["w"].dtype == jnp.float16
    assert "convert --blocks" in run("quantize", folder / "m", folder / "q.gguf", code=2).stderr
    for args in (("c.gguf", "--shard-bytes", 9), ("c", "--blocks", "Q8_0"), ("c.gguf", "--blocks", "Q9")):
        assert "Error" in run("convert", folder / "m", folder / args[0], *args[1:], code=2).stderr


@pytest.fixture
def hf(tmp_path):
    """A folder whose weights are quantized already."""
    folder = tmp_path / "hf"
    folder.mkdir()
    codes = np.random.default_rng(0).integers(-128, 128, (4, 64), np.int8)
    tensors = {"l.weight": codes, "l.weight_scale": np.full((4, 1), 0.5, np.float32), "norm": np.ones(4, np.float32)}
    pytest.importorskip("safetensors.numpy").save_file(tensors, folder / "model.safetensors")
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "compressed-tensors"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, codes


def test_folders_that_are_quantized_already(hf, tmp_path):
    folder, codes = hf
    told = json.loads(run("inspect", folder, "--json").stdout)
    assert {r["path"]: r["type"] for r in told["leaves"]} == {"l.weight": "q8<bfloat16>[4,64]", "norm": "float32[4]"}
    assert told["metadata"]["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "2 leaves" in run("inspect", folder / "model.safetensors").stdout
    run("convert", folder, tmp_path / "same")
    got = typax.io.load(tmp_path / "same")["l.weight"]
    np.testing.assert_array_equal(got.qvalue, codes)
    assert run("compare", folder, tmp_path / "same").exit_code == 0
    assert "it is a value already" in run("quantize", folder, tmp_path / "q", "--recipe", "int4").stdout
    run("quantize", folder, tmp_path / "q", "--recipe", "int4", "--again", "-f")
    assert str(jax.typeof(typax.io.load(tmp_path / "q")["l.weight"])) == "q4<bfloat16>[4,64]"


def test_no_configuration_makes_a_stack_trace(hf):
    folder, _ = hf
    odd = [None, 0, -1, 1e30, 10**12, "x", [], {}, [1], True]
    keys = ("quant_method", "weight_block_size", "config_groups", "bits", "checkpoint_format")
    configs = [{"quantization_config": x} for x in odd] + [{"torch_dtype": x} for x in odd] + odd
    configs += [{"quantization_config": {"quant_method": "x", k: x}} for k in keys for x in odd]
    for config in configs:
        (folder / "config.json").write_text(json.dumps(config))
        result = CliRunner().invoke(main, ["inspect", str(folder)])
        assert result.exit_code in (0, 1) and isinstance(result.exception, SystemExit | None), (config, result.exception)
        assert result.exit_code == 0 or str(folder) in result.stderr, config


def test_a_picture_and_its_absence(files, monkeypatch):
    folder, _ = files
    run("quantize", folder, folder / "q")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("compare", folder, folder / "q", "--plot", folder / "p.png", code=1)
    assert result.stderr == "Error: --plot needs matplotlib: pip install 'typax[plot]'\n"
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    run("compare", folder, folder / "q", "--plot", folder / "p.png")
    assert (folder / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "p.nothing" in run("compare", folder, folder / "q", "--plot", folder / "p.nothing", code=2).stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("safetensors", ["quantize", "in.safetensors", "out", "--recipe", "int8"]),
        ("gguf", ["quantize", "in.gguf", "out", "--recipe", "int8"]),
        ("safetensors", ["convert", "in.safetensors", "out.gguf", "--architecture", "x", "--blocks", "Q8_0"]),
        ("safetensors", ["compare", "in.safetensors", "in.safetensors"]),
    ],
)
def test_one_tensor_and_its_result_are_held(kind, command, tmp_path):
    """By the peak of the process's own memory: the one that getrusage tells begins with that of the process before it."""
    largest = 2**28
    x = np.resize(np.random.default_rng(0).normal(size=2**16).astype(np.float32), (largest // 4096, 1024))
    if kind == "gguf":
        typax.io.save_gguf(tmp_path / "in.gguf", {"a": x, "c": x}, {"general.architecture": "x"})
    else:
        typax.io.save(tmp_path / "in.safetensors", {"a": x, "c": x})
    del x
    program = (
        "import re\nfrom pathlib import Path\nfrom typax.cli import main\n"
        f"main({command!r}, standalone_mode=False)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) * 1024 <= 2.5 * largest + 400e6, done.stdout
