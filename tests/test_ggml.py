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


@pytest.mark.core
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_a_few_rows_are_multiplied_without_a_dense_array(kind):
    block = BLOCKS[kind]
    rng = np.random.default_rng(2)
    b = rng.integers(0, 128, (6, 2, block.bytes), np.uint8)  # no NaN among the scales
    b[..., 1::2] &= 0x3B
    w, k = of_blocks(b, kind), 2 * block.values
    x = jnp.asarray(rng.normal(size=(2, 1, k)), jnp.float32)
    f = lambda x, w: jnp.einsum("...k,nk->...n", x, w)
    got = jax.jit(typax.lift(f, "error"))(x, w)
    want = np.asarray(x, np.float64) @ np.asarray(typax.dense(w), np.float64).T
    bound = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(typax.dense(w), np.float64)).T
    assert got.shape == (2, 1, 6) and (np.abs(got - want) <= k * 2**-23 * bound).all()


def test_products_that_are_dense_ones_say_so():
    w = quantize_ggml(jnp.ones((4, 32)), kind="Q4_0")
    f = lambda x, w: jnp.einsum("...k,nk->...n", x, w)
    product = lambda x, w, numbers: typax.dot_general(x, w, dimension_numbers=(numbers, ((), ())))
    with pytest.raises(TypeError, match=r"5 rows times q4_0.4,32. are products with the dense array: at most 4 are few"):
        product(jnp.ones((5, 32)), w, ((1,), (1,)))
    with pytest.raises(TypeError, match=r"products contract the last axis of q4_0.4,32., a matrix"):
        product(jnp.ones(4), w, ((0,), (0,)))
    with pytest.raises(TypeError, match=r"dot_general makes q4_0.4,32. dense"):
        typax.lift(f, "error")(jnp.ones((5, 32)), w)
    receipt = typax.Receipt()
    np.testing.assert_allclose(typax.lift(f, "allow", receipt)(jnp.ones((5, 32)), w), 32.0)
    assert len(receipt.densified) == 1
    gradient = jax.grad(lambda x: typax.lift(f, "error")(x, w).sum())(jnp.ones((2, 32)))
    np.testing.assert_allclose(gradient, 4.0)


def test_rows_are_looked_up_in_blocks():
    w = quantize_ggml(jnp.asarray(np.random.default_rng(3).normal(size=(5, 64)), jnp.float32), kind="Q5_1")
    rows = np.asarray(typax.dense(w))
    lookup = jax.jit(typax.lift(lambda w, i: w[i], "error"))
    same(lookup(w, jnp.array([[4, -1], [0, 2]])), rows[np.array([[4, -1], [0, 2]])])
    filled = typax.lift(lambda w, i: jnp.take(w, i, axis=0, mode="fill"), "error")(w, jnp.array([1, 9]))
    assert np.isnan(filled[1]).all() and (filled[0] == rows[1]).all()
    zero = typax.lift(lambda w, i: w.at[i].get(mode="fill", fill_value=7), "error")(w, jnp.array([9]))
    assert (np.asarray(zero) == 7).all()
    columns = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(1,), start_index_map=(1,))
    params = {"dimension_numbers": columns, "slice_sizes": (5, 1), "mode": jax.lax.GatherScatterMode.CLIP}
    with pytest.raises(TypeError, match=r"lookups in q5_1.5,64. are of rows along its first axis"):
        typax.gather(w, jnp.array([[0]]), **params, fill_value=None, indices_are_sorted=False, unique_indices=False)


def test_a_stack_of_blocks_is_scanned():
    x = np.random.default_rng(4).normal(size=(3, 32, 32)).astype(np.float32)
    stacked = typax.stack([quantize_ggml(jnp.asarray(a), kind="Q8_0") for a in x])
    f = lambda h, w: jax.lax.scan(lambda h, w: (jnp.tanh(jnp.einsum("bk,nk->bn", h, w)), None), h, w)[0]
    got = jax.jit(typax.lift(f, "error"))(jnp.ones((1, 32)), stacked)
    np.testing.assert_allclose(got, f(jnp.ones((1, 32)), typax.dense(stacked)), rtol=1e-5, atol=1e-6)
