"""Primitives on quantized arrays of any layout: what they give is what the plain ones give, and no array becomes dense."""

import jax.numpy as jnp
import numpy as np
import pytest

import typax
from typax._codes import slice_
from typax.quantized import Quantized

X = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)
HOW = {
    "q4g4t": ("int4", {"axis": 0, "group": 4}), "q4": ("int4", {}), "u4zg4": ("uint4", {"group": 4, "zero_point": True}),
    "mxfp4g4t": ("mxfp4", {"axis": 0, "group": 4}), "f8e4m3t": ("fp8_e4m3", {"axis": 0}),
    "q8<axis=(-2,-1)>": ("int8", {"axis": None}), "q8g4x5": ("int8", {"axis": (0, 1), "group": (4, 5)}),
    "nvfp4": ("nvfp4", {}),
}  # fmt: skip


@pytest.mark.parametrize("shown", HOW)
def test_what_they_give(shown):
    name, how = HOW[shown]
    q = typax.quantize(X, name, **how)
    assert str(q._type).startswith(shown + "[")
    d = np.asarray(typax.dense(q))
    native = lambda f, *args: typax.lift(f, fallback="error")(*args)
    if shown != "q8g4x5":
        t = native(jnp.transpose, q)
        assert isinstance(t, Quantized) and (np.asarray(typax.dense(t)) == d.T).all()
        assert native(lambda t: t.T, t)._type == q._type
    else:
        assert (np.asarray(typax.dense(native(jnp.transpose, q))) == d.T).all()
    half = native(lambda q: q.astype(jnp.bfloat16), q)
    assert half.dtype == jnp.bfloat16 and (typax.dense(half) == d.astype(jnp.bfloat16)).all()
    if shown == "nvfp4":
        return
    part = native(lambda q: q[4:8], q)
    assert isinstance(part, Quantized) and (np.asarray(typax.dense(part)) == d[4:8]).all()
    part = native(lambda q: q[:, :10], q)
    assert (np.asarray(typax.dense(part)) == d).all()
    if name not in ("mxfp4",):
        doubled = native(lambda q: -2 * q, q)
        assert isinstance(doubled, Quantized) and (np.asarray(typax.dense(doubled)) == -2 * d).all()


def test_rows_are_looked_up_and_joined():
    for name, how in (HOW["q4"], HOW["u4zg4"], ("mxfp4", {"group": 4}), ("nf4", {})):
        q = typax.quantize(X, name, **how)
        d = typax.dense(q)
        lookup = typax.lift(lambda q, i: q[i], fallback="error")
        assert (lookup(q, jnp.array([[3, 0], [11, 3]])) == d[jnp.array([[3, 0], [11, 3]])]).all()
        filled = typax.lift(lambda q, i: jnp.take(q, i, axis=0), fallback="error")(q, jnp.array([3, 12]))
        assert (filled[0] == d[3]).all() and jnp.isnan(filled[1]).all()
        both = typax.lift(lambda a, b: jnp.concatenate([a, b]), fallback="error")(q, q)
        assert isinstance(both, Quantized) and (typax.dense(both) == jnp.concatenate([d, d])).all()


def test_refused_with_the_numbers():
    q = typax.quantize(X, "int4", axis=0, group=4)
    with pytest.raises(
        TypeError, match=r"a slice 2:6 along axis 0 of q4g4t\[12,10\] does not start and end between groups of 4"
    ):
        slice_(q, start_indices=(2, 0), limit_indices=(6, 10), strides=None)
    row = typax.quantize(X, "int4")
    with pytest.raises(
        TypeError, match=r"a slice 1:4 along axis 1 of q4\[12,10\] does not start and end between packs of 2"
    ):
        slice_(row, start_indices=(0, 1), limit_indices=(12, 4), strides=None)
