"""The real encoder, unchanged, on int8 weights: every matmul and the embedding lookup run natively."""

import jax
import numpy as np

import typax
from examples import assets, minilm, quality
from examples.minilm_demo import quantized


def test_no_weight_becomes_dense_and_the_embeddings_stay(minilm_folder, minilm_params):
    sentences = assets.sentences()[0][:32]
    tokens, mask = minilm.tokenize(minilm_folder / "tokenizer.json", sentences)
    receipt = typax.Receipt()
    encode = jax.jit(typax.lift(minilm.encode, fallback="error", receipt=receipt))
    got = np.asarray(encode(quantized(minilm_params), tokens, mask))
    want = np.asarray(jax.jit(minilm.encode)(minilm_params, tokens, mask))
    assert quality.compare(want, got)[0] >= 0.999
    assert not receipt.densifications
    assert sum(line.startswith("dot_general") for line in receipt.natives) == 6 * len(minilm_params["layers"])
    assert any(line.startswith("gather(q8[30522,384]") for line in receipt.natives)
