"""Blocks of ggml, byte by byte against the package gguf."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import typax
from typax.quantized.ggml import BLOCKS, Ggml, of_blocks, quantize_ggml

SMALL = [k for k in BLOCKS if not k.endswith("_K")]


def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype == np.float32
    differ = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert not differ.any(), (np.argwhere(differ)[:3], got[differ][:3], want[differ][:3])


@pytest.mark.core
@pytest.mark.parametrize("kind", BLOCKS)
def test_any_bytes_stand_for_what_they_do_in_ggml(kind):
    block = BLOCKS[kind]
    b = np.random.default_rng(0).integers(0, 256, (200, 3, block.bytes), np.uint8)
    v = of_blocks(b, kind)
    assert str(jax.typeof(v)) == f"{kind.lower()}[200,{3 * block.values}]" and v.nbytes == b.size
    with np.errstate(all="ignore"):
        want = gguf.dequantize(b.reshape(200, -1), gguf.GGMLQuantizationType[kind])
    same(typax.dense(v), want)
    assert (np.asarray(jax.jit(lambda v: v)(v).blocks) == b).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SMALL)
def test_blocks_are_those_that_ggml_makes(kind, dtype):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 64)) * np.exp(rng.normal(size=(400, 1)) * 3)
    x[3] = 0
    x[4:200] = np.round(x[4:200] * 2) / 2  # ties
    x = jnp.asarray(x, dtype)
    v = jax.jit(lambda x: quantize_ggml(x * 1, kind=kind))(x)
    plain = np.asarray(x, np.float32)
    want = gguf.quantize(plain, gguf.GGMLQuantizationType[kind]).reshape(v.blocks.shape)
    assert isinstance(v, Ggml) and v.dtype == dtype
    same_bytes = np.asarray(v.blocks) == want
    signed = (np.asarray(v.blocks) ^ want) == 0x80  # the sign of a minimum that is zero, which is that of either
    assert (same_bytes | (signed & (kind[3] == "1"))).all()


def test_what_is_not_finite_and_what_is_refused():
    x = np.ones((5, 32), np.float32)
    x[1, 3], x[2, 4], x[3] = np.nan, -np.inf, 3e38
    for kind in SMALL:
        assert np.isnan(typax.dense(quantize_ggml(x, kind=kind))).all(-1).tolist() == [False, True, True, True, False], kind
    with pytest.raises(ValueError, match="Q4_K is held and decoded, not made; quantize to one of Q4_0"):
        quantize_ggml(np.ones((2, 256), np.float32), kind="Q4_K")
    with pytest.raises(ValueError, match="rows of 31 values are no whole number of Q8_0 blocks, of 32"):
        quantize_ggml(np.ones((2, 31), np.float32), kind="Q8_0")
    with pytest.raises(ValueError, match="ggml has no blocks 'Q9_0' here; there are Q4_0, Q4_1"):
        of_blocks(np.zeros((2, 34), np.uint8), "Q9_0")
    with pytest.raises(ValueError, match="33 bytes are no whole number of Q8_0 blocks, of 34 bytes"):
        of_blocks(np.zeros((2, 33), np.uint8), "Q8_0")


def test_derivatives_and_stacks():
    x = jnp.linspace(-1, 1, 128).reshape(2, 64)
    v = quantize_ggml(x, kind="Q4_1")
    assert (jax.grad(lambda v: jnp.sum(typax.dense(v) ** 2))(v) == 2 * typax.dense(v)).all()
    assert jax.vmap(typax.dense)(v).shape == (2, 64)
    assert jax.typeof(typax.retract(v, jnp.zeros((2, 64)))) == jax.typeof(v)
