"""Trees of parameters with values among them: `jax.tree`, `typax.tangent_zeros`, `apply_updates`, and Optax.

The oracle of an optimizer is the same one on arrays: on what a value stands for, or on its components where the tangents
are componentwise. It is led along the same path, so that no rounding is amplified: only the moves are compared.
"""

from typing import Any

import _raw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from jaxtyping import Array, Float

import typax
from typax import LowRank, QArray, dense, quantize

optax = pytest.importorskip("optax")

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Layer(typax.Value, name="layer"):
    weight: QArray
    bias: Float[Array, "n"]


class Own(QArray, name="own", tangent="itself"):
    pass


class Fed(QArray, name="fedq", tangent=typax.Itself(error_feedback=True)):
    pass


class Fixed(QArray, name="fixed", tangent="none"):
    pass


class Moveless(typax.Value, name="moveless"):
    code: Float[Array, "*batch n"]

    def dense(self) -> Float[Array, "*batch n"]:
        return self.code


def draw(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def parameters() -> dict[str, Any]:
    return {
        "first": quantize(draw(4, 8)),
        "middle": typax.outer(draw(8, 2, seed=1), draw(2, 8, seed=2)),
        "last": Layer(quantize(draw(8, 3, seed=3)), jnp.zeros(3)),
        "scale": jnp.ones(3),
    }


def arrays(p: Any) -> dict[str, Any]:
    left, right = p["middle"].components()
    weight, bias = p["last"].components()
    return {"first": dense(p["first"]), "middle": (left, right), "last": (dense(weight), bias), "scale": p["scale"]}


def loss(p: Any, x: Any) -> Any:
    h = jnp.tanh(typax.matmul(jnp.tanh(typax.matmul(x, p["first"])), p["middle"]))
    weight, bias = p["last"].components()
    return jnp.mean((p["scale"] * (typax.matmul(h, weight) + bias) - 1.0) ** 2)


def plain_loss(p: Any, x: Any) -> Any:
    h = jnp.tanh(jnp.tanh(x @ p["first"]) @ (p["middle"][0] @ p["middle"][1]))
    return jnp.mean((p["scale"] * (h @ p["last"][0] + p["last"][1]) - 1.0) ** 2)


gradient, plain_gradient = jax.jit(jax.grad(loss)), jax.jit(jax.grad(plain_loss))
GROUPS = {"first": "fast", "middle": "slow", "last": "fast", "scale": "frozen"}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.3),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.trace(0.9, nesterov=True), optax.scale_by_trust_ratio(), optax.scale(-0.1)
    ),
    "groups": lambda: optax.multi_transform(
        {"fast": optax.adamw(0.05), "slow": optax.sgd(0.1), "frozen": optax.set_to_zero()}, GROUPS
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.core] * (n == "adamw")) for n in OPTIMIZERS])
def test_an_optimizer_moves_values_as_it_moves_arrays(name):
    tx, x = OPTIMIZERS[name](), draw(5, 4, seed=4)
    opt, p = typax.optimizer(tx), parameters()
    state, plain_state = opt.init(p), tx.init(arrays(p))

    @jax.jit
    def step(grads, p, state):
        updates, state = opt.update(grads, state, p)
        return typax.apply_updates(p, updates), updates, state

    for _ in range(2):
        moved, updates, state = step(gradient(p, x), p, state)
        want, plain_state = jax.jit(tx.update)(plain_gradient(arrays(p), x), plain_state, arrays(p))
        got = {**updates, "middle": updates["middle"].components(), "last": updates["last"].components()}
        jax.tree.map(lambda a, b: close(a, b, 1e-4), got, want)
        assert jax.tree.map(jax.typeof, moved) == jax.tree.map(jax.typeof, p)
        close(moved["middle"].left, p["middle"].left + want["middle"][0], 1e-4)
        near = jnp.max(moved["first"].scale) * 0.51  # rounding to the nearest code
        assert jnp.max(jnp.abs(dense(moved["first"]) - (dense(p["first"]) + want["first"]))) <= near + 1e-4
        p = moved
    assert jnp.all(moved["middle"].left != parameters()["middle"].left)


def test_a_loop_that_knows_nothing_of_values():
    opt, x = typax.optimizer(optax.adam(0.05)), draw(5, 4, seed=4)

    def train(params, loss, opt, steps):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = opt.update(grads, state, params)
            return (typax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, opt.init(params)), None, length=steps)

    (p, _), losses = jax.jit(lambda p: train(p, lambda p: loss(p, x), opt, 8))(parameters())
    assert jax.tree.map(jax.typeof, p) == jax.tree.map(jax.typeof, parameters())
    assert losses[-1] < 0.7 * losses[0]


def test_the_same_by_hand():
    """Where all tangents are dense, an optimizer may be started on zeros and shown the dense parameters."""
    p, x = {"w": quantize(draw(4, 3))}, draw(5, 4, seed=4)
    grads = jax.grad(lambda p: jnp.sum(typax.matmul(x, p["w"]) ** 2))(p)
    tx = optax.lion(0.1, weight_decay=1.0)
    opt = typax.optimizer(tx)
    by_hand, _ = tx.update(grads, tx.init(typax.tangent_zeros(p)), dense(p))
    updates, _ = opt.update(grads, opt.init(p), p)
    close(updates["w"], by_hand["w"])
    undecayed, _ = tx.update(grads, tx.init(typax.tangent_zeros(p)), typax.tangent_zeros(p))
    close(by_hand["w"] - undecayed["w"], -0.1 * dense(p["w"]))


@pytest.mark.core
@pytest.mark.parametrize("cls", [Own, Fed])
def test_gradients_that_are_values(cls):
    q = quantize(draw(4, 8))
    p = {"w": cls(q.qvalue, q.scale)}
    opt, tx = typax.optimizer(optax.adam(0.1)), optax.adam(0.1)
    grads = jax.grad(lambda p: jnp.sum(typax.dense(p["w"]) ** 2 * 3))(p)
    updates, state = opt.update(grads, opt.init(p), p)
    assert jax.typeof(updates["w"]) == jax.typeof(p["w"]).to_tangent_aval()
    want, _ = tx.update({"w": 6 * dense(p["w"])}, tx.init({"w": dense(p["w"])}))
    assert state[0].mu["w"].dtype == jnp.float32
    close(jnp.abs(dense(typax.apply_updates(p, updates)["w"]) - (dense(p["w"]) + want["w"])) < 0.05, True)


@pytest.mark.core
def test_what_does_not_move():
    q = quantize(draw(4, 3))
    p = {"w": q, "head": jnp.ones(3), "fixed": Fixed(q.qvalue, q.scale), "count": jnp.int32(3), "act": jnp.tanh}
    opt = typax.optimizer(optax.adamw(0.1), trainable={"w": True, "head": False, "fixed": True, "count": True, "act": True})
    state = opt.init(p)
    assert len(jax.tree.leaves(state)) == 3  # a count and two moments, of w alone
    none = np.zeros((), jax.dtypes.float0)
    grads = {"w": jnp.ones((4, 3)), "head": jnp.ones(3), "fixed": np.zeros((4, 3), jax.dtypes.float0), "count": none}
    updates, state = opt.update({**grads, "act": None}, state, p)
    assert [k for k, u in updates.items() if u is not None] == ["w"]
    moved = typax.apply_updates(p, updates)
    assert all(moved[k] is p[k] for k in ("head", "fixed", "count", "act")) and moved["w"] is not p["w"]

    labelled = typax.optimizer(optax.masked(optax.set_to_zero(), {"w": False, "head": True}))
    some = {"w": p["w"], "head": p["head"]}
    updates, _ = labelled.update({"w": jnp.ones((4, 3)), "head": jnp.ones(3)}, labelled.init(some), some)
    close(updates["head"], 0)

    by_size = typax.optimizer(optax.sgd(1.0), trainable=lambda p: jax.tree.map(lambda x: x.ndim == 2, p))
    updates, _ = by_size.update({"w": jnp.ones((4, 3)), "head": jnp.ones(3)}, by_size.init(some), some)
    assert updates["head"] is None and updates["w"] is not None


def test_an_optimizer_says_what_is_wrong():
    p = {"w": quantize(draw(4, 3)), "lr": typax.outer(draw(4, 2), draw(2, 3))}
    opt = typax.optimizer(optax.adam(0.1))
    state = opt.init(p)
    good = typax.tangent_zeros(p)
    with pytest.raises(TypeError, match=r"update\(grads, state, params\) needs the parameters"):
        opt.update(good, state)
    with pytest.raises(TypeError, match=r"no gradient for params\['w'\], of type q8\[4,3\]; freeze it, trainable="):
        opt.update({**good, "w": None}, state, p)
    with pytest.raises(TypeError, match=r"of params\['w'\], of type q8\[4,3\], are of type float32\[4,3\], not q8\[4,3\]"):
        opt.update({**good, "w": p["w"]}, state, p)
    with pytest.raises(TypeError, match=r"gradients of params\['lr'\].*are of type lr\.tangent\{.*not float32\[4,3\]"):
        opt.update({**good, "lr": jnp.ones((4, 3))}, state, p)
    with pytest.raises(TypeError, match=r"a gradient for params\['n'\], which is 0\.5 and no floating array"):
        opt.update({**good, "n": 1.0}, state, {**p, "n": 0.5})
    with pytest.raises(
        TypeError, match=r"takes an optax\.GradientTransformation, not MultiSteps.*gradient_transformation\(\)"
    ):
        typax.optimizer(optax.MultiSteps(optax.adam(0.1), 2))


def test_apply_updates_says_what_is_wrong():
    p = {"deep": [Moveless(jnp.ones(3)), jnp.ones(3)]}
    with pytest.raises(
        TypeError, match=r"params\['deep'\]\[0\].*Moveless\.from_dense.*an update of None leaves it as it is"
    ):
        typax.apply_updates(p, {"deep": [jnp.ones(3), None]})
    with pytest.raises(TypeError, match=r"params\['deep'\]\[1\].*tangents of float32\[3\] are of type float32\[3\], not"):
        typax.apply_updates(p, {"deep": [None, jnp.ones((2, 3))]})
    with pytest.raises(TypeError, match=r"tangents of int32\[\] are of type float0\[\], not float32\[\]"):
        typax.apply_updates(jnp.int32(1), jnp.float32(1))
    with pytest.raises(TypeError, match=r"is not a declared type, so how its values move is not known"):
        typax.apply_updates([_raw.Codes(jnp.ones((2, 3), "int8"), jnp.ones(2))], [jnp.ones((2, 3))])
    kept = typax.apply_updates(p, {"deep": [None, jnp.ones(3)]})["deep"]
    assert kept[0] is p["deep"][0]
    close(kept[1], 2)


@pytest.mark.core
def test_tangent_zeros_are_the_tangents_of_each():
    p = {**parameters(), "count": jnp.int32(2), "none": None}
    assert typax.tangent_zeros({"act": jnp.tanh, "name": "x"}) == {"act": jnp.tanh, "name": "x"}
    kept = typax.dense({**p, "act": jnp.tanh, "name": "x"})
    assert (kept["act"], kept["name"]) == (jnp.tanh, "x") and kept["count"] is p["count"]
    zeros = typax.tangent_zeros(p)
    _, grads = jax.jvp(lambda s: jax.tree.map(lambda x: x, s), (p,), (zeros,))  # they are what jax.jvp takes
    assert jax.tree.map(jax.typeof, grads) == jax.tree.map(lambda x: jax.typeof(x).to_tangent_aval(), p)
    close(dense(zeros)["middle"]["left"], 0)
    assert zeros["count"].dtype == jax.dtypes.float0
    mesh = jax.make_mesh((8,), ("i",))
    with jax.set_mesh(mesh):
        placed = quantize(jax.device_put(jnp.ones((8, 3)), jax.P("i")))
        assert jax.typeof(typax.tangent_zeros(placed)) == jax.typeof(placed).dense_type


@pytest.mark.core
def test_a_value_is_one_leaf():
    p = parameters()
    paths, tree = jax.tree_util.tree_flatten_with_path(p)
    assert [(jax.tree_util.keystr(path), type(x)) for path, x in paths] == [
        ("['first']", QArray),
        ("['last']", Layer),
        ("['middle']", LowRank),
        ("['scale']", type(p["scale"])),
    ]
    assert jax.tree.structure(p) == tree and tree.num_leaves == 4
    assert jax.tree.unflatten(tree, jax.tree.leaves(p))["first"] is p["first"]
    assert jax.tree.map(lambda x: x.nbytes, p) == {"first": 48, "last": 68, "middle": 128, "scale": 12}
    assert jax.tree.reduce(lambda n, x: n + x.nbytes, p, 0) == sum(x.nbytes for x in jax.tree.leaves(p))
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, p, dict(p)))
    inner, outer = jax.tree.structure([0, 0]), jax.tree.structure(p)
    assert jax.tree.transpose(inner, outer, [p, p])["first"][1] is p["first"]
    assert jax.tree_util.all_leaves(jax.tree.leaves(p)) and jax.tree.leaves({"a": None, "b": p["first"]}) == [p["first"]]
    assert jax.tree.map(jax.typeof, jax.jit(lambda p: p)(p)) == jax.tree.map(jax.typeof, p)
    named = dense({"w": p["first"], "rest": (p["scale"], None)})
    assert named["w"].shape == (4, 8) and named["rest"] == (p["scale"], None)
