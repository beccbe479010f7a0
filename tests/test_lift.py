"""Programs that know nothing of typax, on hi values."""

import jax
import jax.numpy as jnp
import pytest
from _util import W, X, close

import typax
from typax import dense, lift, quantize

pytestmark = pytest.mark.core


def test_products_on_either_side_and_transposed():
    qw, qt = quantize(W), quantize(W.T)
    programs = [
        (lambda x, w: x @ w, (X, qw)),
        (lambda x, w: x @ w.T, (X, qt)),
        (lambda x, w: w.T @ x.T, (X, qw)),
        (lambda x, w: w @ x.T, (X, qt)),
    ]
    for f, args in programs:
        receipt = typax.Receipt()
        for run in (lift(f, "error", receipt), jax.jit(lift(f, "error"))):
            close(run(*args), f(args[0], dense(args[1])))
        assert any("dot_general" in line for line in receipt.natives) and not receipt.densifications
        loss = lambda g: lambda x, w: jnp.sum(g(x, w) ** 2)
        got = jax.grad(loss(lift(f)), (0, 1))(*args)
        jax.tree.map(close, got, jax.grad(loss(f), (0, 1))(args[0], dense(args[1])))


def test_rows_are_read_from_the_codes():
    table, at = quantize(jnp.arange(12.0).reshape(4, 3)), jnp.array([[2, 0, 3], [1, 1, 2]])
    close(lift(lambda t, i: t[i], "error")(table, at), dense(table)[at])


def test_what_no_op_runs_becomes_dense_and_is_announced():
    q = quantize(X)
    with pytest.warns(UserWarning, match=r"exp makes q8\[2,3\] dense \(24 bytes\)"):
        close(lift(jnp.exp)(q), jnp.exp(dense(q)))
    with pytest.raises(TypeError, match="no op with the reference exp"):
        lift(jnp.exp, "error")(q)
    with pytest.raises(ValueError, match="fallback"):
        lift(jnp.exp, "never")  # type: ignore[arg-type]
