"""The real encoder, unchanged, on int8 weights: every matmul and the embedding lookup run natively."""

import jax
import numpy as np

import typax
from examples import assets, minilm, quality
from examples.minilm_demo import Batch, Program, progress, quantized, show_layer, show_receipt


def test_no_weight_becomes_dense_and_the_embeddings_stay(minilm_folder, minilm_params):
    sentences = assets.sentences()[0][:32]
    tokens, mask = minilm.tokenize(minilm_folder / "tokenizer.json", sentences)
    receipt = typax.Receipt()
    encode = jax.jit(typax.lift(minilm.encode, fallback="error", receipt=receipt))
    got = np.asarray(encode(quantized(minilm_params), tokens, mask))
    want = np.asarray(jax.jit(minilm.encode)(minilm_params, tokens, mask))
    assert quality.compare(want, got)[0] >= 0.999
    assert not receipt.densified
    assert sum(line.startswith("dot_general") for line in receipt.natives) == 6 * len(minilm_params["layers"])
    assert any(line.startswith("gather(q8[30522,384]") for line in receipt.natives)


def test_the_demo_shows_what_is_typed(minilm_folder, minilm_params, capsys):
    program = Program("int8", typax.lift(minilm.encode), quantized(minilm_params))
    batch = Batch(np.arange(2), *minilm.tokenize(minilm_folder / "tokenizer.json", ["A man.", "A plan."]))
    show_layer(program, batch, typax.lift(minilm.layer))
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40 and shown.rstrip().endswith("}")
    assert shown.count("dot_general") == 6 and shown.count("q8t[") >= 6  # queries, keys, values, output, up, down
    assert "softmax" not in shown and "equations on arrays)" in shown
    lines = [typax.Line("gather", ("q8[4,3]", "int32[2]"), "native")] * 3
    show_receipt(typax.Receipt([*lines, typax.Line("exp", ("q8[2@i,3]",), "densified", "q8[2@i,3]")]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "q8[" in line or "│ all" in line]
    numbers = [[word for word in row if word.isdigit()] for row in rows]
    assert numbers == [["0", "1"], ["3", "0"], ["3", "1"]]


def test_progress_is_a_line_where_there_is_no_terminal(capsys):
    assert list(progress([1, 2], "Counting")) == [1, 2]
    assert capsys.readouterr().out == "Counting ...\n"
