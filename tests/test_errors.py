"""A user's mistakes, each with its message."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import W, X
from jaxtyping import Array, Float, Float32

import typax
from typax import QArray, Value, dense, matmul, quantize

pytestmark = pytest.mark.core


def test_components_that_contradict_each_other():
    with pytest.raises(TypeError, match=r"batch axis 0 is 2 in qvalue .* but 7 in scale"):
        QArray(jnp.ones((2, 3), jnp.int8), jnp.ones(7))


def test_a_wrong_dtype():
    with pytest.raises(TypeError, match=r"component scale: .* does not admit int32\[2\]"):
        QArray(jnp.ones((2, 3), jnp.int8), jnp.ones(2, jnp.int32))
    with pytest.raises(TypeError, match="does not admit float64"):
        QArray(np.ones((2, 3), np.int8), np.ones(2))


def test_values_are_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        quantize(X).scale = 1  # type: ignore[misc]


def test_opening_and_building_in_traced_code():
    with pytest.raises(TypeError, match=r"v\.components\(\)"):
        jax.jit(lambda q: q.qvalue)(quantize(X))
    with pytest.raises(TypeError, match=r"QArray\.from_components"):
        jax.jit(lambda x: QArray(x.astype(jnp.int8), x[:, 0]))(X)


@pytest.mark.parametrize("f", [lambda q: X @ q, lambda q: q + 1, jnp.sum, lambda q: jnp.matmul(X, q)])
def test_a_value_does_not_become_an_array(f):
    with pytest.raises(TypeError, match=r"typax\.matmul.*typax\.dense"):
        f(quantize(W))


def test_a_missing_implementation_lists_those_that_exist():
    with pytest.raises(TypeError, match=r"no implementation for \(q8\[2,3\], q8\[2,3\]\); it has: .*QArray"):
        matmul(quantize(X), quantize(X))


def test_two_equal_implementations():
    op = typax.op(jnp.negative)
    op.impl(lambda q: q)
    with pytest.raises(TypeError, match="two implementations"):
        op.impl(lambda q: q)


def test_implementations_that_overlap():
    op = typax.op(jnp.multiply)

    @op.impl
    def _(x: Any, w: QArray):
        return x

    with pytest.raises(TypeError, match=r"\(Any, QArray\) and \(QArray, Any\), fit \(QArray, QArray\) equally well.*before"):

        @op.impl
        def _(w: QArray, x: Any):
            return x

    clear = typax.op(jnp.multiply)

    @clear.impl
    def _(x: QArray, w: QArray):
        return dense(x) * dense(w)

    @clear.impl
    def _(x: Any, w: QArray):
        return x * dense(w)

    @clear.impl
    def _(w: QArray, x: Any):
        return dense(w) * x

    assert (clear(quantize(X), quantize(X)) == clear(dense(quantize(X)), quantize(X))).all()


def test_a_stack_where_one_value_is_expected():
    with pytest.raises(TypeError, match=r"q8\[2,3,4\] is a stack where .* takes one; apply matmul to each with jax\.vmap"):
        matmul(X, quantize(jnp.stack([W, W])))


def test_a_result_of_another_type_than_the_reference_says():
    @typax.op(reference=lambda x: x)
    def halves(x):
        return quantize(x[:1])

    with pytest.raises(TypeError, match=r"halves of .*another shape"):
        halves(X)


def test_a_dense_of_another_type_than_its_annotation():
    class Wrong(Value, name="wrong"):
        a: Float32[Array, "*batch n"]

        def dense(self) -> Float32[Array, "*batch n"]:
            return self.a.astype(jnp.bfloat16)

    with pytest.raises(TypeError, match=r"Wrong\.dense.*another dtype"):
        dense(Wrong(X))


def test_mapping_a_named_axis():
    with pytest.raises(TypeError, match="only batch axes are mapped"):
        jax.vmap(dense, in_axes=1)(quantize(X))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a: Float[Array, 'n +1']\n", "cannot read axis"),
        ("a: Float[Array, 'n *b']\n", "batch axes lead"),
        ("a: Float[Array, 'n']\n    shape: Any = 1\n", "cannot be named shape"),
        ("k: int = 1\n", "no components"),
    ],
)
def test_declarations_that_are_refused(body, message):
    names: dict[str, Any] = {"Value": Value, "Float": Float, "Array": Array, "Any": Any}
    with pytest.raises(TypeError, match=message):
        exec(f"class T(Value):\n    {body}    def dense(self) -> Float[Array, 'n']: return self.a", names)


def test_a_static_that_is_not_hashable():
    class Sized(Value):
        a: Float32[Array, "n"]
        k: Any

        def dense(self) -> Float32[Array, "n"]:
            return self.a

    with pytest.raises(TypeError, match="static k must be hashable"):
        Sized(jnp.ones(2), [1])


def test_a_reference_or_implementation_that_closes_over_a_traced_value():
    def by_reference(s, q):
        g = typax.op(reference=lambda x: x * s)(lambda x: dense(x) * 2.0)
        return jnp.sum(g(q))

    def by_implementation(s, q):
        g = typax.op(reference=lambda x: x)(lambda x: dense(x) * s)
        return jnp.sum(g(q))

    for f in (by_reference, by_implementation):
        for d in (jax.grad(f), jax.jit(jax.grad(f, 1))):
            with pytest.raises(TypeError, match="closes over a value of a program being traced; pass it as an argument"):
                d(2.0, quantize(X))


def test_results_of_another_structure_than_the_reference():
    @typax.op(reference=lambda x: {"b": x, "a": 2 * x})
    def pair(x: QArray):
        return dense(x), 2 * dense(x)

    with pytest.raises(TypeError, match=r"its reference <lambda> gives .*'a'.*, but the implementation"):
        pair(quantize(X))


@pytest.mark.parametrize("x", [jnp.arange(6).reshape(2, 3), jnp.float32(3), jnp.ones((2, 3), complex)])
def test_plain_operands_must_fit_where_an_implementation_takes_plain_operands(x):
    with pytest.raises(TypeError, match=r"quantize has no implementation for .*it has: \(Float\[Array, '\*batch n'\]\)"):
        quantize(x)
