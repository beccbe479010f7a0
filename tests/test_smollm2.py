"""The language model of examples/: against formulas in NumPy, on blocks of ggml, and its demo on a tiny model."""

import hashlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import as_dense as dense

import typax
from examples import assets, demo, minilm_demo, novels, results, smollm2, smollm2_demo
from typax.io import load_gguf, save_gguf
from typax.quantized import quantize_ggml

LAYERS, HEADS, SHARED, WIDTH, HIDDEN = 2, 4, 2, 16, 96
SIZE = HEADS * WIDTH
BYTES = sorted({*range(33, 127), *range(161, 173), *range(174, 256)})
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
    *(chr(b) for b in BYTES),
    *(chr(256 + i) for i in range(256 - len(BYTES))),
    *("Ġt", "he", "Ġthe", "li", "gh", "ght"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A GGUF file of a random model with the architecture of SmolLM2, and its tokenizer's data."""
    path = tmp_path_factory.mktemp("tiny") / "SmolLM2-tiny.gguf"
    rng = np.random.default_rng(0)

    def matrix(n, k, kind="Q4_1"):
        return quantize_ggml(jnp.asarray(rng.normal(size=(n, k)) / np.sqrt(k), jnp.float32), kind=kind)

    tensors = {"token_embd.weight": matrix(len(WORDS), SIZE, "Q8_0"), "output_norm.weight": jnp.ones(SIZE)}
    for i in range(LAYERS):
        shapes = {"attn_q": (SIZE, SIZE), "attn_k": (SHARED * WIDTH, SIZE), "attn_v": (SHARED * WIDTH, SIZE)}
        shapes |= {
            "attn_output": (SIZE, SIZE),
            "ffn_gate": (HIDDEN, SIZE),
            "ffn_up": (HIDDEN, SIZE),
            "ffn_down": (SIZE, HIDDEN),
        }
        tensors |= {f"blk.{i}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        norms = {name: jnp.asarray(1 + 0.1 * rng.normal(size=SIZE), jnp.float32) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{i}.{name}.weight": x for name, x in norms.items()}
    metadata = {
        "general.architecture": "llama", "llama.block_count": LAYERS, "llama.embedding_length": SIZE,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": SHARED, "llama.rope.freq_base": 1e4,
        "llama.rope.dimension_count": WIDTH, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(WORDS) - 3),
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he", "l i", "g h", "gh t"],
    }  # fmt: skip
    save_gguf(path, tensors, metadata)
    return path


@pytest.fixture(scope="session")
def model(tiny):
    return load_gguf(tiny)


def by_formulas(tensors, tokens):
    """Logits float64[T, V] of tokens int[T], one token and one head at a time."""
    t = {name: np.asarray(typax.dense(x) if isinstance(x, typax.Value) else x, np.float64) for name, x in tensors.items()}
    norm = lambda x, w: x / np.sqrt(np.mean(x * x) + 1e-5) * w
    xs = [t["token_embd.weight"][i] for i in tokens]
    for layer in range(LAYERS):
        w = lambda name, i=layer: t[f"blk.{i}.{name}.weight"]
        keys, values, out = [], [], []
        for p, x in enumerate(xs):
            h = norm(x, w("attn_norm"))
            q, k, v = (w(name) @ h for name in ("attn_q", "attn_k", "attn_v"))
            turn = np.exp(1j * p * 1e4 ** (-np.arange(WIDTH // 2) * 2 / WIDTH))
            rotated = lambda y, turn=turn: (y[0::2] + 1j * y[1::2]).reshape(-1, WIDTH // 2) * turn
            keys.append(rotated(k))
            values.append(v.reshape(SHARED, WIDTH))
            heads = []
            for head, one in enumerate(rotated(q)):
                g = head // (HEADS // SHARED)
                scores = np.array([np.real(np.sum(one * np.conj(key[g]))) for key in keys]) / np.sqrt(WIDTH)
                share = np.exp(scores - scores.max())
                heads.append(sum(s * value[g] for s, value in zip(share / share.sum(), values, strict=True)))
            x = x + w("attn_output") @ np.concatenate(heads)
            h = norm(x, w("ffn_norm"))
            gate = w("ffn_gate") @ h
            out.append(x + w("ffn_down") @ (gate / (1 + np.exp(-gate)) * (w("ffn_up") @ h)))
        xs = out
    return np.array([t["token_embd.weight"] @ norm(x, t["output_norm.weight"]) for x in xs])


def test_it_computes_what_the_formulas_say_on_blocks_too(model):
    config, params = smollm2.load(model)
    tokens = jnp.asarray([[5, 90, 17, 200, 31]], jnp.int32)
    want = by_formulas(model.tensors, tokens[0])
    receipt = typax.Receipt()
    plain = lambda p, t: smollm2.forward(config, p, t, smollm2.empty(config, *t.shape), 0)[0]
    lifted = jax.jit(typax.lift(plain, "allow", receipt))
    for f, p in ((jax.jit(plain), dense(params)), (lifted, params)):
        np.testing.assert_allclose(f(p, tokens)[0], want, rtol=2e-4, atol=2e-5)
    assert (
        len(receipt.densified) == 8 and len(receipt.natives) == 1
    )  # 5 rows: all products are dense ones, the lookup is none


def test_a_step_with_a_cache_is_that_of_the_whole_and_makes_nothing_dense(model):
    config, params = smollm2.load(model)
    prompt, steps = jnp.asarray([[5, 90, 17]], jnp.int32), 6

    def write(p, prompt):
        cache = smollm2.empty(config, 1, prompt.shape[1] + steps)
        logits, cache = smollm2.forward(config, p, prompt, cache, 0, last=True)
        return smollm2.greedy(config, p, logits, cache, prompt.shape[1], steps)

    got = np.asarray(jax.jit(typax.lift(write, "error"))(params, prompt))[0]  # 3 rows are few
    ids = list(np.asarray(prompt[0]))
    for token in got:
        assert by_formulas(model.tensors, ids)[-1].argmax() == token
        ids.append(token)


def test_the_loss_is_that_of_the_probabilities(model):
    config, params = smollm2.load(model)
    tokens = jnp.asarray([[5, 90, 17, 200]], jnp.int32)
    logits = by_formulas(model.tensors, tokens[0])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    want = -np.log((p / p.sum(-1, keepdims=True))[[0, 1, 2], np.asarray(tokens[0, 1:])])
    loss, likeliest = jax.jit(lambda p, t: smollm2.losses(config, p, t))(dense(params), tokens)
    np.testing.assert_allclose(loss[0], want, rtol=1e-4)
    assert likeliest[0].tolist() == logits[:3].argmax(-1).tolist()


def test_another_model_is_refused(model):
    with pytest.raises(ValueError, match="another kind of model: gpt2"):
        smollm2.load(typax.io.Gguf(model.tensors, {**model.metadata, "general.architecture": "gpt2"}))
    with pytest.raises(ValueError, match="only a part of each head is rotated"):
        smollm2.load(typax.io.Gguf(model.tensors, {**model.metadata, "llama.rope.dimension_count": 8}))
    with pytest.raises(ValueError, match=r"another tokenizer: .'gpt2', 'qwen2'."):
        smollm2.tokenizer({**model.metadata, "tokenizer.ggml.pre": "qwen2"})


def test_the_tokenizer_of_a_file(model):
    made = smollm2.tokenizer(model.metadata)
    text = smollm2.asked("the light of 42 ü")
    encoded = made.encode(text)
    assert made.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.ids[0] == 1 and made.encode("light").tokens == ["li", "ght"]
    assert made.encode("42").tokens == ["4", "2"] and made.encode(" the").tokens == ["Ġthe"]


def test_the_demo_on_a_tiny_model(tiny, monkeypatch, capsys):
    monkeypatch.setattr(smollm2_demo, "WINDOW", 8)
    monkeypatch.setattr(smollm2_demo, "STEPS", 3)
    monkeypatch.setattr(smollm2_demo, "RECIPES", {})
    monkeypatch.setattr(assets, "find", lambda asset, say: tiny.parent)
    monkeypatch.setattr(assets, "SMOLLM2", assets.Asset("", "", "", "", {tiny.name: ""}))
    monkeypatch.setattr(novels, "pride_and_prejudice", lambda say: "It is a truth universally acknowledged.")
    table = smollm2_demo.run(sequences=2)
    names = [row[0] for row in table]
    assert names == ["float32", "as in the file"] and all(len(row) == len(results.SMOLLM2) for row in table)
    assert table[0][3:5] == table[1][3:5] == ("100.0%", "yes") and table[0][2] == table[1][2]
    assert float(table[1][1]) < float(table[0][1])
    shown = capsys.readouterr().out
    assert "a token: 9 operations" in shown and "nothing made dense" in shown

    def nowhere(say):
        raise assets.AssetError("The novel is on the moon.")

    monkeypatch.setattr(novels, "pride_and_prejudice", nowhere)
    assert smollm2_demo.novel(None, 2) is None
    assert "Without perplexity: The novel is on the moon." in capsys.readouterr().out


# --- the text and the tables -------------------------------------------------------------------------------------


def chunk(*lines):
    """A vector of strings as R serializes and packs it."""
    number = lambda n: n.to_bytes(4, "big")
    raw = b"X\n" + number(3) + number(0x40201) + number(0x30500) + number(5) + b"UTF-8" + number(16) + number(len(lines))
    raw += b"".join(number(0x40009) + number(len(x.encode())) + x.encode() for x in lines)
    return number(len(raw)) + zlib.compress(raw)


def test_the_novel_out_of_its_package(tmp_path, monkeypatch):
    lines = [novels.TITLE, "", "Chapter 1", "", "It is a truth", "universally known:", "", "“ü”"]
    whole = chunk("EMMA", "x") + chunk(*lines)
    assert novels.vectors(whole) == [["EMMA", "x"], lines]
    text = "Chapter 1\nIt is a truth universally known:\n“ü”"
    monkeypatch.setattr(novels, "INSTALLED", tmp_path / "nowhere")
    (tmp_path / "janeaustenr.rdb").write_bytes(whole)
    with pytest.raises(assets.AssetError, match="holds another text of the novel"):
        novels.pride_and_prejudice(tmp_path)
    monkeypatch.setattr(novels, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    assert novels.pride_and_prejudice(tmp_path) == text
    for bad in (whole[:40], b"\0" * 50, chunk("EMMA"), b""):
        (tmp_path / "janeaustenr.rdb").write_bytes(bad)
        with pytest.raises(assets.AssetError, match="does not hold the novels: remove it"):
            novels.pride_and_prejudice(tmp_path)
    (tmp_path / "janeaustenr.rdb").unlink()
    monkeypatch.setattr(novels.shutil, "which", lambda name: None)
    with pytest.raises(assets.AssetError, match="apt-get or dpkg-deb is not there"):
        novels.pride_and_prejudice(tmp_path)
    monkeypatch.setattr(novels.shutil, "which", lambda name: "false")
    monkeypatch.setattr(novels, "APT", ["false"])
    with pytest.raises(assets.AssetError, match="apt-get did not give r-cran-janeaustenr"):
        novels.pride_and_prejudice(tmp_path)


def test_tables_of_the_readme(tmp_path):
    table = results.markdown(("weights", "MB", "time*"), [("a", "1.0", "2"), ("b", "3.0", "4")])
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- make demo: X -->\nold\n<!-- end of X -->\nafter\n")
    results.write("X", table, page)
    assert results.written("X", page) == table and page.read_text().startswith("before\n") and "old" not in page.read_text()
    assert results.differences(table, table.replace("| 2 |", "| 9 |")) == []
    assert results.differences(table, table.replace("3.0", "5.0")) == ["b, MB: 5.0 there, 3.0 here"]
    assert results.differences(table, table.rpartition("\n")[0]) == ["it has no row b"]
    with pytest.raises(ValueError, match="no table between"):
        results.written("Y", page)


@pytest.mark.parametrize("name", ["MiniLM", "SmolLM2"])
def test_the_readme_has_the_tables_that_the_demo_prints(name):
    headings = {"MiniLM": results.MINILM, "SmolLM2": results.SMOLLM2}[name]
    recipes = {"MiniLM": minilm_demo.RECIPES, "SmolLM2": {"as in the file": None, **smollm2_demo.RECIPES}}[name]
    cells = [line.strip("| ").split(" | ") for line in results.written(name).splitlines()]
    assert tuple(cells[0]) == headings and [row[0] for row in cells[2:]] == ["float32", *recipes]
    assert results.differences(results.written(name), results.markdown(headings, cells[2:])) == []
    assert all(re_number(c) for row in cells[2:] for c in row[1:])


def re_number(cell):
    return cell in ("yes", "no", "the same") or float(cell.rstrip("%")) >= -1


def test_the_demo_prints_the_tables_and_goes_on_without_a_model(monkeypatch, capsys):
    def nowhere():
        raise assets.AssetError("The model is on the moon.")

    rows = [tuple(c) for c in (line.strip("| ").split(" | ") for line in results.written("SmolLM2").splitlines()[2:])]
    monkeypatch.setattr(minilm_demo, "run", nowhere)
    monkeypatch.setattr(smollm2_demo, "run", lambda sequences: rows)
    assert demo.main([]) == 1
    shown = capsys.readouterr().out
    assert "The model is on the moon." in shown and results.written("SmolLM2") in shown
    assert "README.md says the same" in shown


# --- the real file -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real():
    try:
        folder = assets.find(assets.SMOLLM2)
    except assets.AssetError as error:
        pytest.skip(str(error))
    return folder / next(iter(assets.SMOLLM2.sha256))


@pytest.mark.slow
def test_the_real_file_comes_back_byte_for_byte(real, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = load_gguf(real)
    save_gguf(tmp_path / "again.gguf", model)
    assert (tmp_path / "again.gguf").read_bytes() == real.read_bytes()
    for t in gguf.GGUFReader(real).tensors[::9]:
        want = gguf.quants.dequantize(t.data, t.tensor_type)
        x = model.tensors[t.name]
        np.testing.assert_array_equal(typax.dense(x) if isinstance(x, typax.Value) else x, want, err_msg=t.name)
    config, params = smollm2.load(model)
    ids = smollm2.tokenizer(model.metadata).encode(smollm2.asked("What is the capital of France?")).ids
    tokens = jnp.asarray([ids], jnp.int32)
    run = jax.jit(
        typax.lift(lambda p, t: smollm2.forward(config, p, t, smollm2.empty(config, *t.shape), 0, True)[0], "allow")
    )
    assert model.metadata["tokenizer.ggml.tokens"][int(run(params, tokens)[0, -1].argmax())] == "The"
