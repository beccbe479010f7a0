"""Convolutions with quantized kernels and products by ragged groups of rows: the arrays they stand for are the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import typax
from typax._convolutions import conv_general_dilated

X = np.random.default_rng(0).normal(size=(2, 7, 8, 6)).astype(np.float32)
K = np.random.default_rng(1).normal(size=(3, 2, 6, 8)).astype(np.float32)  # taps, input and output channels
NHWC = ("NHWC", "HWIO", "NHWC")
CONVOLUTIONS = {
    "kernel by output channel": ("int8", {"axis": (0, 1, 2)}, {}),
    "as a whole": ("fp8_e4m3", {"axis": None}, {}),
    "strides": ("int4", {"axis": (0, 1, 2)}, {"window_strides": (2, 1), "padding": "VALID", "rhs_dilation": (1, 2)}),
    "input channels": ("int8", {"axis": (0, 1, 3)}, {}),
    "rows": ("int8", {}, {}),  # a scale for each tap and input channel
    "groups of input channels": ("int4", {"axis": 2, "group": 4}, {"lhs_dilation": (2, 1)}),
    "zero points": ("uint4", {"axis": (0, 1, 2), "zero_point": True}, {}),
    "nested scales": ("nvfp4", {"axis": 2, "group": 3}, {}),
    "bytes": ("mxfp8", {"axis": (0, 1, 2), "group": (3, 2, 6)}, {}),
}


def same(f, x, q, tol=2e-6):
    d = typax.dense(q)
    receipt = typax.Receipt()
    want, got = f(x, d), typax.lift(f, "error", receipt)(x, q)
    assert (got.shape, got.dtype) == (want.shape, want.dtype) and receipt.natives and not receipt.densified
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol * float(jnp.max(jnp.abs(b))))
    close(got, want)
    return close


def gradients(f, close, x, q):
    total = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
    got = jax.jit(jax.grad(total(typax.lift(f, "error")), (0, 1)))(x, q)
    for a, b in zip(got, jax.jit(jax.grad(total(f), (0, 1)))(x, typax.dense(q)), strict=True):
        close(a, b)


def conv(**how):
    how = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC} | how
    if "lhs_dilation" in how:
        how["padding"] = ((1, 1), (1, 0))
    return lambda x, w: lax.conv_general_dilated(x, w, **how)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.core] * (i == 0)) for i, n in enumerate(CONVOLUTIONS)])
def test_convolutions(name):
    format, how, params = CONVOLUTIONS[name]
    q = typax.quantize(K, format, **how)
    f = conv(**params)
    close = same(f, X, q)
    if name in ("kernel by output channel", "groups of input channels"):
        gradients(f, close, X, q)


def test_feature_groups_other_layouts_and_types():
    depthwise = typax.quantize(K[:, :, :1, :6], "int8", axis=(0, 1, 2))
    f = conv(feature_group_count=6)
    gradients(f, same(f, X, depthwise), X, depthwise)
    pairs = typax.quantize(K[:, :, :3], "int4", axis=(0, 1, 2))
    f = conv(feature_group_count=2)
    gradients(f, same(f, X, pairs), X, pairs)
    oihw = typax.quantize(K.transpose(3, 2, 0, 1), "int4", axis=(1, 2, 3))
    f = lambda x, w: lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0]
    same(jax.vmap(f, (0, None)), X.transpose(0, 3, 1, 2), oihw)
    f = lambda x, w: conv()(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype("float32")
    same(f, X, typax.quantize(K, "int8", axis=(0, 1, 2)), 2e-2)
    each = jax.vmap(lambda k: typax.quantize(k, "int8", axis=(0, 1, 2)))(jnp.stack([K, -K]))
    same(jax.vmap(conv()), jnp.stack([X, X]), each)


def test_the_dense_kernel_is_not_made():
    """The program is the one written by hand: codes cast, the product, its scales; so is the gradient of the activations."""
    q = typax.quantize(K, "int8", axis=(0, 1, 2))
    codes, scale, *_ = q.components()

    def by_hand(x, codes, scale):
        w = jnp.transpose(codes, (1, 2, 3, 0)).astype(jnp.float32)
        return conv()(x, w) * scale

    def ops(f, *args):
        text = jax.jit(f).lower(*args).as_text()
        return {k: text.count(f"stablehlo.{k}") for k in ("convolution", "multiply", "transpose", "convert")}

    assert ops(typax.lift(conv(), "error"), X, q) == ops(by_hand, X, codes, scale)
    back = lambda f: jax.grad(lambda x, *w: jnp.sum(f(x, *w)))
    assert ops(back(typax.lift(conv(), "error")), X, q)["multiply"] == ops(back(by_hand), X, codes, scale)["multiply"]


SIZES = jnp.array([3, 0, 4])
EXPERTS = {
    "by output": ("int8", {"axis": 1}), "by input": ("int8", {}), "groups": ("int4", {"axis": 1, "group": 4}),
    "nf4": ("nf4_double", {"axis": 1, "group": 8}), "one for all experts": ("int8", {"axis": (0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.core] * (i == 0)) for i, n in enumerate(EXPERTS)])
def test_experts(name):
    format, how = EXPERTS[name]
    w = np.random.default_rng(2).normal(size=(3, 10, 5)).astype(np.float32)
    x = np.random.default_rng(3).normal(size=(9, 10)).astype(np.float32)  # the last two rows are of no expert
    q = typax.quantize(w, format, **how)
    f = lambda x, w: lax.ragged_dot(x, w, SIZES)
    close = same(f, x, q)
    if name in ("by output", "groups"):
        gradients(f, close, x, q)


def test_what_is_refused():
    by_tap = typax.quantize(K, "int8", axis=(0, 1))  # a scale for each pair of channels
    with pytest.raises(TypeError, match=r"conv_general_dilated makes q8<.*dense"):
        typax.lift(conv(), "error")(X, by_tap)
    (eqn,) = jax.make_jaxpr(conv())(X, K).eqns
    with pytest.raises(
        TypeError, match=r"axis 2 of .* is summed, but each of its entries has a scale, .*requantize\(w, \.\.\., axis=2\)"
    ):
        conv_general_dilated(X, by_tap, **eqn.params)
