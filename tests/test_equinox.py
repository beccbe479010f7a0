"""Equinox with values in modules: the filtered transformations against the same module on dense arrays."""

import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close

import typax
from typax import LowRank, QArray, dense, quantize

eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")

import typax.equinox as teqx  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Net(eqx.Module):
    first: eqx.nn.Linear
    middle: Any
    last: Any
    act: Callable
    drop: float = 0.5

    def __call__(self, x):
        h = self.act(typax.matmul(self.act(self.first(x)), self.middle))
        return typax.matmul(h, self.last)


def net(key=None) -> Any:
    a, b, c, d = jax.random.split(jax.random.key(0) if key is None else key, 4)
    low = typax.outer(jax.random.normal(b, (4, 2)), jax.random.normal(c, (2, 5)))
    return Net(eqx.nn.Linear(3, 4, key=a), quantize(jax.random.normal(d, (4, 4))), low, jnp.tanh)


def plain(m: Any) -> Any:
    return eqx.tree_at(lambda m: (m.middle, m.last), m, (dense(m.middle), dense(m.last)))


def loss(m, x):
    return jnp.mean((jax.vmap(m)(x) - 1.0) ** 2)


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def test_filter_jit():
    m, seen = net(), []

    @teqx.filter_jit
    def f(m, x, how, *, twice=False):
        seen.append(how)
        return {"y": m(x) * (2 if twice else 1), "how": how, "model": m, "act": m.act}

    out = f(m, X[0], "first", twice=True)
    close(out["y"], 2 * m(X[0]), 1e-4)
    assert out["how"] == "first" and out["act"] is jnp.tanh and type(out["model"].last) is LowRank
    other = eqx.tree_at(lambda m: m.middle, m, quantize(jnp.ones((4, 4))))
    f(other, X[0], "first", twice=True)
    assert seen == ["first"]  # traced once for both values
    f(m, X[0], "second")
    assert seen == ["first", "second"]
    close(teqx.filter_jit(m)(X[1]), m(X[1]), 1e-4)  # a module is a function
    slope = jax.grad(lambda q: jnp.sum(teqx.filter_jit(lambda q, f: f(q))(q, dense)))(m.middle)
    close(slope, 1)
    gone = jnp.ones(3)
    close(teqx.filter_jit(lambda m, x: x + 1, donate="all-except-first")(m, gone), 2)
    assert gone.is_deleted() and not m.middle.qvalue.is_deleted()
    with pytest.raises(ValueError, match="donate must be one of none, all"):
        teqx.filter_jit(m, donate="some")


@pytest.mark.core
def test_training():
    m, tx = net(), optax.adamw(0.05)
    opt = typax.optimizer(tx)

    @teqx.filter_jit
    def step(m, state, x):
        value, grads = teqx.filter_value_and_grad(loss)(m, x)
        updates, state = opt.update(grads, state, m)
        return teqx.apply_updates(m, updates), state, value, grads

    state, values = opt.init(m), []
    want = eqx.filter_grad(loss)(plain(m), X)
    for _ in range(4):
        new, state, value, grads = step(m, state, X)
        values.append(float(value))
        if len(values) == 1:
            close(grads.first.weight, want.first.weight, 1e-4)
            close(grads.middle, want.middle, 1e-4)
            left, right = m.last.components()
            close(grads.last.left, want.last @ right.T, 1e-4)
            close(grads.last.right, left.T @ want.last, 1e-4)
            assert grads.act is None and grads.drop is None
        assert isinstance(new.middle, QArray) and new.act is jnp.tanh and new.drop == 0.5
        m = new
    assert values[-1] < values[0]


def test_gradients_and_what_equinox_itself_makes_of_values():
    m = net()
    grad, aux = teqx.filter_grad(lambda m, x: (loss(m, x), m.act), has_aux=True)(m, X)
    assert aux is jnp.tanh and isinstance(grad, Net)
    assert eqx.filter_grad(loss)(m, X).middle is None  # a limit: dropped without a word
    moving, still = eqx.partition(m, teqx.is_inexact_array)
    assert still.middle is None and moving.act is None and type(moving.middle) is QArray
    close(eqx.combine(moving, still)(X[0]), m(X[0]))
    assert teqx.is_array(m.middle) and not teqx.is_array(3.0) and teqx.is_array(X)
    with pytest.raises(TypeError, match="has to be given by position"):
        teqx.filter_grad(loss)(m=m, x=X)


class Small(eqx.Module):
    w: QArray
    act: Callable

    def __call__(self, x):
        return self.act(typax.matmul(x, self.w))


@pytest.mark.core
def test_an_ensemble():
    w = jnp.arange(24.0).reshape(2, 3, 4) / 24
    many = teqx.filter_vmap(lambda w: Small(quantize(w), jnp.tanh))(w)
    assert (str(jax.typeof(many.w)), many.act) == ("q8[2,3,4]", jnp.tanh)
    want = jnp.tanh(X[0] @ dense(many.w))
    y, weight, name = teqx.filter_vmap(lambda m, x: (m(x), m.w, "n"), in_axes=(eqx.if_array(0), None))(many, X[0])
    close(y, want)
    assert jax.typeof(weight) == jax.typeof(many.w) and name == "n"
    close(teqx.filter_vmap(lambda m, x: m(x), in_axes=(teqx.if_array(0), None), out_axes=1)(many, X[0]), want.T)
    one = Small(quantize(w[0]), jnp.tanh)
    y, same = teqx.filter_vmap(lambda x: (one(x), one.w), out_axes=(0, None))(X)
    close(y, jnp.tanh(X @ dense(one.w)))
    assert jax.typeof(same) == jax.typeof(one.w)


def test_files(tmp_path):
    m = net()
    teqx.tree_serialise_leaves(tmp_path / "net.eqx", m)
    other = teqx.tree_deserialise_leaves(tmp_path / "net.eqx", net(jax.random.key(7)))
    for a, b in zip(jax.tree.leaves(m), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        if teqx.is_array(a):
            assert jax.typeof(a) == jax.typeof(b) and np.array_equal(dense(a), dense(b))
    wider = eqx.tree_at(lambda m: m.middle, m, quantize(jnp.ones((4, 5))))
    with pytest.raises(RuntimeError) as error:
        teqx.tree_deserialise_leaves(tmp_path / "net.eqx", wider)
    assert str(first_cause(error.value)) == "`like` has q8[4,5] where the file has q8[4,4]"
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, eqx.filter(m, eqx.is_array))
    file.seek(0)
    with pytest.raises(RuntimeError) as error:
        teqx.tree_deserialise_leaves(file, m.middle)
    assert str(first_cause(error.value)) == "`like` has q8[4,4] where the file has an array"


def first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else first_cause(error.__cause__)
