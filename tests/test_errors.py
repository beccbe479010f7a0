"""A user's mistakes, each with its message."""

import inspect
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
    with pytest.raises(TypeError, match=r"no implementation for \(q8\[2,3\], Tup\{.*\}\); it has: .*QArray"):
        matmul(quantize(X), typax.tup(X))


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


TAKES = r"Float\[Array, '\*batch n'\]"
MISFITS = {
    "an int array": (lambda q: quantize(jnp.arange(6).reshape(2, 3)), rf"int32\[2,3\] is not {TAKES}; cast it with astype"),
    "a complex one": (lambda q: quantize(jnp.ones(3, complex)), rf"complex64\[3\] is not {TAKES}; cast it with astype"),
    "a number": (lambda q: quantize(jnp.float32(3)), rf"float32\[\] has too few axes for {TAKES}"),
    "a list": (lambda q: quantize([1.0, 2.0]), "a list is not an array; make it one with jnp.asarray"),
    "two sizes": (
        lambda q: matmul(jnp.ones((2, 3)), q),
        r"k is 3 in float32\[2,3\] and 4 in q8\[4,3\], where \(Float\[Array, '\*b k'\], Float\[QArray, .*\) has one size",
    ),
    "ints with it": (lambda q: matmul(jnp.ones((2, 4), int), q), r"int32\[2,4\] is not Float\[Array, '\*b k'\]; cast it"),
    "a static by position": (
        lambda q: typax.gather(q, X, None),
        "it takes 2 operands; statics go by keyword: dimension_numbers",
    ),
}


@pytest.mark.parametrize("call", MISFITS)
def test_the_one_thing_to_change_is_said(call):
    f, says = MISFITS[call]
    with pytest.raises(TypeError, match=r"has no implementation for \(.*\): " + says):
        f(quantize(jnp.ones((4, 3))))


def test_a_long_list_of_implementations_is_cut():
    with pytest.raises(TypeError, match=r"matmul has no implementation for .*; it has: (\(.*\); ){4}\d+ more\. Add one"):
        matmul(typax.Rank1(jnp.ones(2), jnp.ones(3)), quantize(X))


def test_a_result_is_what_it_is_annotated_to_be():
    @typax.op(reference=None)
    def scales(q: QArray) -> Float32[Array, "k"]:
        return q.scale.astype(jnp.bfloat16)

    @typax.op(reference=None)
    def rows(q: Float[QArray, "k n"]) -> Float[Array, "n k"]:
        return dense(q)

    @typax.op(reference=None)
    def halved(q: QArray) -> QArray:
        return q.scale

    for f, says in (
        (scales, r"Float32\[Array, 'k'\], but it gives bfloat16\[2\]"),
        (rows, r"Float\[Array, 'n k'\], but it gives float32\[2,3\]"),
        (halved, r"QArray, but it gives float32\[2\]"),
    ):
        with pytest.raises(TypeError, match=r"the implementation is annotated to give " + says):
            jax.jit(f)(quantize(X))


def test_ops_have_signatures():
    assert list(inspect.signature(quantize).parameters)[:3] == ["x", "format", "axis"]
    assert list(inspect.signature(matmul).parameters)[:2] == ["a", "b"]
    scaled = typax.op(reference=lambda x, *_, **__: x)(lambda x, factor=2.0: x)
    assert str(inspect.signature(scaled)) == "(x, factor=2.0)"


# --- a value is not an array -------------------------------------------------------------------------------------

USES = {
    "matmul": lambda v: v @ W, "rmatmul": lambda v: X @ v, "numpy_rmatmul": lambda v: np.ones((2, 3)) @ v,
    "add": lambda v: v + 1, "radd": lambda v: 1 + v, "eq": lambda v: v == 1, "ne": lambda v: v != v, "lt": lambda v: v < 1,
    "abs": abs, "invert": lambda v: ~v, "pow": lambda v: v**2,
    "rpow": lambda v: 2**v, "floordiv": lambda v: v // 2, "and": lambda v: v & 1, "divmod": lambda v: divmod(v, 2),
    "contains": lambda v: 1 in v, "iter": list, "at": lambda v: v.at[0], "sum": lambda v: v.sum(), "jnp.sum": jnp.sum,
    "jnp.stack": lambda v: jnp.stack([v, v]), "rtruediv": lambda v: 1 / v,
}  # fmt: skip
WITHOUT_OPS = {
    "neg": lambda v: -v, "mul": lambda v: v * 2, "rmul": lambda v: 2 * v, "truediv": lambda v: v / 2, "mT": lambda v: v.mT,
    "astype": lambda v: v.astype(jnp.float32), "reshape": lambda v: v.reshape(12), "swapaxes": lambda v: v.swapaxes(0, 1),
    "take": lambda v: v.take(jnp.zeros(1, int), 0),
}  # fmt: skip


class Bare(Value):
    """A type for which no op has an implementation."""

    a: Float32[Array, "m n"]

    def dense(self) -> Float32[Array, "m n"]:
        return self.a


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("through", ["eagerly", "jit", "in an op"])
def test_what_an_array_does_and_a_value_does_not(use, through):
    f = USES[use]
    op = typax.op(lambda x: x)
    op.impl(lambda v: f(v))
    with pytest.raises(TypeError, match=r"q8\[3,4\] is not an array .*typax\.matmul.*typax\.dense.*typax\.lift"):
        {"eagerly": f, "jit": jax.jit(f), "in an op": op}[through](quantize(W))


@pytest.mark.parametrize("use", WITHOUT_OPS)
def test_what_a_value_without_ops_does_not(use):
    v, f = Bare(W), WITHOUT_OPS[use]
    for run in (f, jax.jit(f)):
        with pytest.raises(TypeError, match=r"bare\[3,4\] is not an array .*typax\.matmul.*typax\.dense.*typax\.lift"):
            run(v)
    assert use not in ("mT", "astype", "reshape", "swapaxes", "take") or not hasattr(v, use)


@pytest.mark.parametrize("use", [bool, float, int, np.asarray, np.sum, round, lambda v: np.add(np.ones(4), v)])
def test_what_a_concrete_value_does_not(use):
    with pytest.raises(TypeError, match=r"q8\[3,4\] is not an array .*typax\.matmul.*typax\.dense.*typax\.lift"):
        use(quantize(W))


def test_names_of_array_methods_are_not_there():
    v = quantize(W)
    assert hasattr(v, "mT") and not hasattr(v, "sum") and not jax.jit(lambda v: hasattr(v, "real"))(v)
    assert v in [v] and isinstance(hash(v), int)
    with pytest.raises(AttributeError, match="'QArray' object has no attribute 'other'"):
        v.other  # type: ignore[attr-defined]


def test_a_class_defines_its_own_operators():
    class Money(Value):
        a: Float32[Array, ""]

        def dense(self) -> Float32[Array, ""]:
            return self.a

        def __add__(self, other):
            return dense(self) + other

        def __eq__(self, other):
            return dense(self) == other

        def __float__(self):
            return float(dense(self))

        def __rmatmul__(self, other):
            return other * dense(self)

    v = Money(jnp.float32(2))
    for run in (lambda f: f, jax.jit):
        assert run(lambda v: v + 1)(v) == 3 and run(lambda v: v == 2)(v)
    assert float(v) == 2 and (np.ones(2) @ v == 2).all()
    with pytest.raises(TypeError, match="money\\[\\] is not an array"):
        v - 1  # type: ignore[operator]


def test_a_value_is_not_changed():
    v = quantize(X)
    with pytest.raises(AttributeError, match="QArray values are immutable; scale cannot be deleted"):
        del v.scale


def test_an_error_of_a_property_is_seen():
    class Odd(Value):
        a: Float32[Array, ""]

        def dense(self) -> Float32[Array, ""]:
            return self.a

        @property
        def wrong(self):
            return (1).nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'int' object has no attribute 'nothing'"):
        Odd(jnp.float32(1)).wrong  # type: ignore[attr-defined]


# --- refs, mapping -----------------------------------------------------------------------------------------------


def test_a_ref_of_a_value_is_read_whole():
    def read(v):
        return jax.new_ref(v)[0]

    def write(v):
        jax.new_ref(v)[0] = v

    for f in (read, jax.jit(read), write, jax.jit(write)):
        with pytest.raises(TypeError, match=r"a ref of q8\[2,3\] is read and written whole, ref\[\.\.\.\]"):
            f(quantize(X))
    assert (dense(jax.new_ref(quantize(X))[...]) == dense(quantize(X))).all()


@pytest.mark.parametrize(("axes", "name"), [(typax.Axes(0, None), "scale"), (typax.Axes(None, 0), "qvalue")])
def test_a_spec_that_leaves_out_a_component(axes, name):
    stack = quantize(jnp.stack([W, W]))
    with pytest.raises(TypeError, match=rf"leaves {name} of q8\[2,3,4\] unmapped, but it has batch axis 0"):
        jax.vmap(dense, in_axes=(axes,), axis_size=2)(stack)


# --- ops ---------------------------------------------------------------------------------------------------------


def build(row):
    return QArray(row.astype(jnp.int8), jnp.float32(1))


def test_building_inside_a_loop_of_an_op():
    bodies = [lambda x: jax.vmap(build)(x), lambda x: jax.lax.scan(lambda c, row: (c, build(row)), 0, x)[1]]
    for body in bodies:
        op = typax.op(lambda x: x)
        op.impl(body)
        with pytest.raises(
            TypeError, match=r"traced components: a value is built in traced code by QArray\.from_components"
        ):
            op(X)


def test_a_result_that_is_no_value():
    @typax.op(reference=lambda x: x)
    def text(x):
        return "a"

    with pytest.raises(TypeError, match=r"text \(Any\): the implementation returns 'a' of type str, which is not a value"):
        text(X)


@pytest.mark.parametrize("make", [lambda: typax.op(3), lambda: typax.op(reference=3)])
def test_an_op_of_something_else(make):
    with pytest.raises(TypeError, match=r"typax\.op takes a function or a JAX primitive, not 3 of type int"):
        make()


def test_values_go_by_position():
    with pytest.raises(TypeError, match=r"quantize: keyword arguments are static and must be hashable .*go by position"):
        quantize(x=X)
    with pytest.raises(TypeError, match="matmul: keyword arguments are static; the value w goes by position"):
        matmul(X, w=quantize(W))
    with pytest.raises(TypeError, match="is not a value"):
        matmul(2**40, quantize(W))


def test_statics_that_the_reference_does_not_take():
    @typax.op(reference=lambda x: x)
    def fake(x: Float[QArray, "*b n"], *, bits=8):
        return x

    assert (fake(X, bits=4) == X).all() and jax.typeof(fake(quantize(X), bits=4)) == jax.typeof(quantize(X))
    for x in (X, quantize(X)):
        with pytest.raises(TypeError, match=r"fake.* takes no keyword bats"):
            fake(x, bats=4)


def test_defaults_that_differ():
    with pytest.raises(TypeError, match=r"scaled \(QArray\): the default of p is 2, but its reference has 3; make them one"):

        @typax.op(reference=lambda x, p=3: x)
        def scaled(x: QArray, *, p=2):
            return x

    @typax.op(reference=lambda x, p=3: x * p)
    def same(x: QArray, *, p=3):
        return dense(x) * p

    assert (same(quantize(X)) == same(dense(quantize(X)))).all()


def test_axes_of_operands_agree():
    halves = typax.op(lambda x, y: x)

    @halves.impl
    def _(x: Float[QArray, "m k"], y: Float[Array, "k//2"]):
        return dense(x)

    rows = typax.op(lambda x, y: x)

    @rows.impl
    def _(x: Float[QArray, "*b k"], y: Float[Array, "*b"]):
        return dense(x)

    w = quantize(W)
    assert halves(w, jnp.ones(2)).shape == rows(w, jnp.ones(3)).shape == w.shape
    for op, y in ((halves, jnp.ones(3)), (rows, jnp.ones(4)), (rows, jnp.ones((1, 3)))):
        with pytest.raises(TypeError, match=r"has no implementation for \(q8\[3,4\], float32"):
            op(w, y)


def test_an_error_in_a_body_comes_alone():
    @typax.op(reference=lambda x: x)
    def fails(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as info:
        fails(X)
    assert info.value.__context__ is None


@pytest.mark.parametrize("promotion", ["allow", "raise"])
@pytest.mark.parametrize(
    ("q", "x"),
    [
        ((3, 4), (4,)),
        ((3, 4), (4, 2)),
        ((3, 4), (5, 4, 2)),
        ((2, 3, 4), (4,)),
        ((4,), (4,)),
        ((4,), (4, 2)),
        ((4,), (5, 4, 2)),
    ],
)
def test_a_quantized_value_times_an_array(q, x, promotion):
    same_product(*random(q, x), promotion)


@pytest.mark.parametrize("promotion", ["allow", "raise"])
@pytest.mark.parametrize(
    ("x", "q"), [((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((4,), (4,)), ((5, 2, 4), (4,))]
)
def test_an_array_times_a_quantized_value(x, q, promotion):
    same_product(*random(q, x)[::-1], promotion)


def random(q, x):
    keys = jax.random.split(jax.random.key(0))
    return quantize(jax.random.normal(keys[0], q)), jax.random.normal(keys[1], x)


def same_product(a, b, promotion):
    with jax.numpy_rank_promotion(promotion):
        got, want = matmul(a, b), jnp.matmul(dense(a), dense(b))
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_result_that_varies_over_other_manual_axes_than_the_reference_says():
    @typax.op(reference=lambda x: x)
    def zeros(x: Float[Array, "*b n"]):
        return jnp.zeros(x.shape, x.dtype)

    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        f = jax.shard_map(zeros, in_specs=jax.P("i"), out_specs=jax.P("i"))
        with pytest.raises(TypeError, match=r"zeros of .*\{V:i\}.*it varies over other manual axes"):
            jax.jit(f)(jax.device_put(X, jax.P("i")))
