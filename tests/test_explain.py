"""What a lifted program does with each hi operand."""

import io
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float32

import typax
from typax import _interpret

pytestmark = pytest.mark.core

W = typax.quantize(jnp.sin(jnp.arange(32.0)).reshape(4, 8))
X = jnp.ones((3, 4))


def program(params, x):
    with jax.named_scope("mlp"):
        h = x @ params["up"]
    y = jax.lax.scan(lambda c, _: (c + h @ params["down"], None), x, length=5)[0]
    return jnp.sum(jnp.exp(params["up"])) + y @ jnp.ones((4, 2))


def params():
    return {"up": W, "down": typax.quantize(jnp.ones((8, 4)))}


def test_a_receipt_has_every_equation_and_totals():
    r = typax.explain(program)(params(), X)
    up, down, exp, plain = r.lines
    assert (up.ran, up.operands, up.scope, up.flops, up.times) == (
        "native",
        ("float32[3,4]", "q8[4,8]"),
        "mlp",
        2 * 3 * 4 * 8,
        1,
    )
    assert (down.ran, down.flops, down.times) == ("native", 2 * 3 * 8 * 4, 5)
    assert (exp.ran, exp.became, exp.bytes) == ("densified", "q8[4,8]", 4 * 32)
    assert (plain.ran, plain.primitive, plain.flops) == ("plain", "dot_general", 2 * 3 * 4 * 2)
    assert up.place[0] == __file__ and up.place[2] == "program" and up.where.startswith("test_explain.py:")
    native = 6 * 192
    assert r.native_share == native / (native + 48)
    assert r.held == W.nbytes + 8 * 4 + 4 * 8 and r.stood_for == 2 * 32 * 4
    assert r.densified == [str(exp)] and len(r.natives) == 2


def test_nothing_is_run_and_types_are_enough():
    hit = []

    def f(w, x, mode):
        jax.debug.callback(lambda: hit.append(1))
        return x @ w if mode == "dot" else x

    r = typax.explain(f)(jax.typeof(W), jax.ShapeDtypeStruct((3, 4), "float32"), mode="dot")
    assert [x.ran for x in r.lines] == ["native"] and not hit


def test_it_prints_as_a_table_and_as_json():
    r = typax.explain(program)(params(), X)
    lines = str(r).splitlines()
    assert lines[0].split() == ["place", "equation", "ran", "bytes", "flops"]
    assert any("x5" in x and "dot_general" in x for x in lines) and any("densified q8[4,8]" in x for x in lines)
    assert lines[-1].startswith("2 native, 1 densified, 1 products of arrays; 96.0% of the multiplications")
    told = json.loads(r.to_json())
    assert told["held"] == r.held and [x["ran"] for x in told["lines"]] == [x.ran for x in r.lines]
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=150, record=True, file=io.StringIO())
    console.print(r)
    assert "densified" in console.export_text()


def test_a_receipt_of_a_run_is_that_of_the_explanation():
    r = typax.Receipt()
    typax.lift(program, "allow", r)(params(), X)
    assert r.lines == typax.explain(program)(params(), X).lines


def test_products_of_arrays_are_counted_in_loops_and_convolutions():
    def f(x, k):
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "VALID")
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ jnp.ones((4, 4))), y[0, 0])

    r = typax.explain(f)(jnp.ones((1, 2, 6, 6)), jnp.ones((5, 2, 3, 3)))
    assert [(x.primitive, x.ran, x.flops, x.times) for x in r.lines] == [
        ("conv_general_dilated", "plain", 2 * 5 * 16 * 2 * 9, 1),
        ("dot_general", "plain", 2 * 4 * 4 * 4, 3),
    ]
    assert r.native_share == 0
    r = typax.explain(lambda x: x)(X)
    assert r.native_share == 1 and r.summary.endswith("there are no products; no argument is a hi value")


def test_fallback_by_primitive_and_by_path():
    f = lambda p, x: (jnp.exp(p["up"]), jnp.sin(p["down"]), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        typax.lift(f, {"exp": "allow", "down": "allow", "*": "error"})(params(), X)
        with pytest.raises(TypeError, match=r"sin makes q8\[8,4\] dense"):
            typax.lift(f, {"up": "allow", "*": "error"})(params(), X)
    with pytest.warns(UserWarning, match=r"sin makes q8\[8,4\] dense"):
        typax.lift(f, {"up": "allow"})(params(), X)
    with pytest.raises(ValueError, match="got 'never'"):
        typax.lift(f, {"up": "never"})

    def nested(p, x):  # paths are followed into nested programs and through what gives values
        g = jax.jit(lambda w: jnp.exp(w.T))
        return jax.lax.scan(lambda c, _: (c, g(p["layers"][1]["up"])), 0, length=2), jnp.exp(p["layers"][0]["up"])

    two = {"layers": [params(), params()]}
    r = typax.Receipt()
    typax.lift(nested, {"layers.*": "allow", "*": "error"}, r)(two, X)
    assert [(x.primitive, x.path) for x in r.lines if x.ran == "densified"] == [
        ("exp", "layers.1.up"),
        ("exp", "layers.0.up"),
    ]
    with pytest.raises(TypeError, match="exp makes"):
        typax.lift(nested, {"layers.1": "allow", "*": "error"})(two, X)


class Half(typax.Value, name="half"):
    """A matrix that stands for twice itself."""

    x: Float32[Array, "*batch m n"]

    def dense(self) -> Float32[Array, "*batch m n"]:
        return 2 * self.x


SEEN: list[str] = []


@typax.dot_general.impl
def _(x: Float32[Array, "*b"], w: Half, *, activations: str = "float", **params: Any) -> Any:
    SEEN.append(activations)
    return 2 * jax.lax.dot_general_p.bind(x, w.x, **params)


def test_options_reach_the_implementations_that_take_them():
    w = {"a": Half(jnp.ones((4, 4))), "b": Half(jnp.ones((4, 4)))}

    def f(w, x):
        times = jax.jit(lambda w, x: x @ w)
        return jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (times(w["a"], c[0]), c[1] + 1), (x, 0))[0] @ w["b"]

    want = f({k: typax.dense(v) for k, v in w.items()}, X)
    for told, seen in [("float", {"float"}), ("dynamic", {"dynamic"}), ({"b": "dynamic"}, {"float", "dynamic"})]:
        SEEN.clear()
        got = typax.lift(f, "error", activations=told)(w, X)
        assert set(SEEN) == seen and jnp.array_equal(got, want)
        typax.dot_general.forget()
    loss = lambda w, x: jnp.sum(typax.lift(f, "error", activations="dynamic")(w, x))
    assert jax.jvp(lambda x: loss(w, x), (X,), (X,))[1].shape == ()


class Blocks(typax.Value, name="blocks"):
    """A block-diagonal matrix, on which products are known as a matmul only."""

    b: Float32[Array, "k n n"]

    def dense(self) -> Float32[Array, "k*n k*n"]:
        return jax.scipy.linalg.block_diag(*self.b)


@typax.matmul.impl
def _(x: Float32[Array, "*m n"], w: Blocks) -> Any:
    return jnp.einsum("...kn,knp->...kp", x.reshape(*x.shape[:-1], *w.b.shape[:2]), w.b).reshape(x.shape)


def test_a_product_that_spells_a_matmul_runs_by_its_implementations():
    w = Blocks(jnp.cos(jnp.arange(8.0)).reshape(2, 2, 2))
    f = typax.lift(lambda x, w: jnp.sin(x @ w), "error")
    for x in (X, X[0], jnp.stack([X, 2 * X])):
        assert jnp.allclose(f(x, w), jnp.sin(x @ typax.dense(w)), atol=1e-6)
    assert jnp.allclose(jax.vmap(f, (0, None))(jnp.stack([X, X]), w)[1], f(X, w))
    got = jax.grad(lambda w: jnp.sum(f(X, w)))(w)
    assert jnp.allclose(got, jax.grad(lambda w: jnp.sum(jnp.sin(X @ w)))(typax.dense(w)), atol=1e-5)
    other = lambda x, w: jnp.einsum("ij,kj->ik", x, w)  # no matmul
    assert jnp.allclose(typax.lift(other, "allow")(X, w), other(X, typax.dense(w)), atol=1e-5)


def test_the_modes_are_by_the_first_pattern():
    modes = _interpret.Modes((("layers.0", "dynamic"), ("*", "bfloat16")))
    assert modes.options("layers.0.w") == {"activations": "dynamic"}
    assert modes.options("layers.1.w") == modes.options(None) == {"activations": "bfloat16"}
    assert _interpret.PLAIN.options("x") == {}


def test_what_a_function_of_jax_holds_is_where_it_is_called():
    def two(w):
        a = jnp.sort(w, axis=0)
        return a + jnp.sort(w, axis=1) + jnp.tril(w)

    with pytest.warns(UserWarning) as warned:
        typax.lift(two)(W)
    first = two.__code__.co_firstlineno + 1
    assert sorted((w.filename, w.lineno) for w in warned) == [(__file__, first)] + [(__file__, first + 1)] * 2
    places = typax.explain(lambda x, w: jnp.take(w, jnp.array([0]), axis=0) + x)(X[0, :1], W).lines
    assert {line.place and line.place[0] for line in places} == {__file__}


def test_what_is_no_function_is_not_lifted():
    with pytest.raises(TypeError, match=r"typax\.lift takes a function, not 3 of type int"):
        typax.lift(3)
