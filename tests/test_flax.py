"""Flax with values among the parameters: NNX and Linen, against the same models on dense arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close

import typax
from typax import LowRank, QArray, dense, quantize

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import flax.linen as nn  # noqa: E402
import flax.serialization  # noqa: E402

import typax.flax  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Net(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.middle = nnx.Param(quantize(jax.random.normal(rngs.params(), (4, 4))))
        self.last = nnx.Param(typax.outer(jnp.ones((4, 2)) / 2, jnp.ones((2, 5)) / 2))

    def __call__(self, x):
        h = jnp.tanh(typax.matmul(jnp.tanh(self.first(x)), self.middle[...]))
        return typax.matmul(h, self.last[...])


def loss(model, x):
    return jnp.mean((model(x) - 1.0) ** 2)


def test_a_model_in_nnx():
    model = Net(nnx.Rngs(0))
    graph, state = nnx.split(model)
    assert type(state["middle"].get_value()) is QArray and type(state["last"].get_value()) is LowRank
    close(nnx.merge(graph, state)(X), model(X))
    close(nnx.jit(lambda m, x: m(x))(model, X), model(X))
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, X), model(X))
    assert str(jax.typeof(nnx.to_pure_dict(nnx.state(model, nnx.Param))["middle"])) == "q8[4,4]"

    @nnx.jit
    def double(m):
        m.middle.set_value(quantize(2 * dense(m.middle[...])))

    before = dense(model.middle[...])
    double(model)
    close(dense(model.middle[...]), 2 * before, 1e-4)
    many = nnx.vmap(lambda w: nnx.Param(quantize(w)))(jnp.ones((3, 2, 4)))
    assert str(jax.typeof(many.get_value())) == "q8[3,2,4]"


@pytest.mark.core
def test_training_in_nnx():
    model = Net(nnx.Rngs(0))
    plain = nnx.clone(model)
    plain.middle.set_value(dense(model.middle[...]))
    plain.last.set_value(dense(model.last[...]))
    optimizer = typax.flax.Optimizer(model, optax.adamw(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value, grads

    want = nnx.grad(loss)(plain, X)
    values, grads = zip(*[step(model, optimizer, X) for _ in range(4)], strict=True)
    close(grads[0]["middle"][...], want["middle"][...], 1e-4)
    close(grads[0]["last"][...].left, want["last"][...] @ jnp.ones((5, 2)) / 2, 1e-4)
    assert values[-1] < values[0] and int(optimizer.step[...]) == 4
    assert type(model.middle[...]) is QArray and type(model.last[...]) is LowRank
    moments = jax.tree.leaves(optimizer.opt_state)
    assert len(moments) == 1 + 2 * (2 + 1 + 2) and not any(m is None or np.all(m == 0) for m in moments)


def test_the_optimizer_of_nnx_itself_refuses():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, typax.optimizer(optax.sgd(0.1)), wrt=nnx.Param)
    with pytest.raises(TypeError, match="is not an array and does not become one silently"):
        optimizer.update(model, nnx.grad(loss)(model, X))


def test_a_plain_layer_of_nnx_by_lift():
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    run = typax.lift(lambda state, x: nnx.merge(graph, state)(x), fallback="error")
    want = X @ dense(quantize(layer.kernel[...])) + layer.bias[...]
    state["kernel"].set_value(quantize(layer.kernel[...]))
    close(jax.jit(run)(state, X), want)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4)(x)
        w = self.param("w", lambda key: quantize(jax.random.normal(key, (4, 2))))
        return typax.matmul(jnp.tanh(h), w)


def test_linen():
    model = Head()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    assert str(jax.typeof(variables["params"]["w"])) == "q8[4,2]"
    lossy = lambda params: jnp.mean((model.apply({"params": params}, X) - 1.0) ** 2)
    state = typax.flax.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(0.05))

    @jax.jit
    def step(state):
        value, grads = jax.value_and_grad(lossy)(state.params)
        return state.apply_gradients(grads=grads), value, grads

    p = variables["params"]
    oracle = lambda w: jnp.mean((jnp.tanh(X @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]) @ w - 1.0) ** 2)
    values = []
    for i in range(3):
        state, value, grads = step(state)
        values.append(float(value))
        if i == 0:
            close(grads["w"], jax.grad(oracle)(dense(p["w"])), 1e-4)
    assert values[-1] < values[0] and type(state.params["w"]) is QArray and int(state.step) == 3
    dense_layer = nn.Dense(4)
    quantized = {"params": {**p["Dense_0"], "kernel": quantize(p["Dense_0"]["kernel"])}}
    got = typax.lift(dense_layer.apply, fallback="error")(quantized, X)
    close(got, X @ dense(quantized["params"]["kernel"]) + p["Dense_0"]["bias"])


def test_files_of_flax():
    typax.flax.register(QArray, LowRank)
    params = {"w": quantize(jnp.arange(6.0).reshape(2, 3)), "lr": typax.outer(jnp.ones((4, 2)), jnp.ones((2, 3))), "b": X}
    data = flax.serialization.to_bytes(params)
    target = {"w": quantize(jnp.ones((2, 3))), "lr": typax.outer(jnp.zeros((4, 2)), jnp.zeros((2, 3))), "b": 0 * X}
    back = flax.serialization.from_bytes(target, data)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and np.array_equal(dense(a), dense(b))
    with pytest.raises(TypeError, match=r"the target is q8\[2,4\], but what was kept is q8\[2,3\]"):
        flax.serialization.from_bytes({**target, "w": quantize(jnp.ones((2, 4)))}, data)
    with pytest.raises(TypeError, match="what was kept is ndarray, no value"):
        flax.serialization.from_bytes({**target, "b": quantize(X)}, data)
    with pytest.raises(TypeError, match="takes classes of values, not <class 'int'>"):
        typax.flax.register(int)  # pyright: ignore
