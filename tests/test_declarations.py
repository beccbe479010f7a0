"""The class statement, the constructor and ``Cls.type``: what they take, and what they refuse with which message."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, UInt32

import typax
from typax import QArray, Value, dense, quantize

pytestmark = pytest.mark.core


class Scalar(Value):
    v: Int32[Array, ""]
    e: Any = 0

    def dense(self) -> Float32[Array, ""]:
        return self.v.astype(jnp.float32)


class Three(Value):
    a: Float32[Array, "3"]

    def dense(self) -> Float32[Array, "3"]:
        return self.a


class Kron(Value):
    a: Float32[Array, "m n"]
    b: Float32[Array, "p q"]

    def dense(self) -> Float32[Array, "m*p n*q"]:
        return jnp.kron(self.a, self.b)


class Outer(Value):
    a: Float32[Array, "m"]
    b: Float32[Array, "n"]

    def dense(self) -> Float32[Array, "m n"]:
        return self.a[:, None] * self.b[None, :]


class Blocks(Value):
    a: Float[Array, "m n"]
    s: Float32[Array, "m n//group"]
    group: int = 2

    def dense(self) -> Float[Array, "m n"]:
        return self.a * jnp.repeat(self.s, self.group, axis=1).astype(self.a.dtype)


class Packed(Value):
    codes: Int32[Array, "(n+1)//2"]
    n: int

    def dense(self) -> Int32[Array, "n"]:
        return jnp.repeat(self.codes, 2)[: self.n]


class Flags(Value):
    a: Bool[Array, "n"]

    def dense(self) -> Bool[Array, "n"]:
        return ~self.a


class Keys(Value):
    a: Key[Array, "n"]

    def dense(self) -> Key[Array, "n"]:
        return self.a


class RawKeys(Value):
    a: UInt32[Array, "n 2"]
    dtype: Any = jax.random.key(0).dtype

    def dense(self) -> Key[Array, "n"]:
        return jax.random.wrap_key_data(self.a)


A = jnp.arange(12.0).reshape(3, 4)
S = jnp.ones((3, 2))


# --- the class statement -----------------------------------------------------------------------------------------


def declare(body: str, base: str = "Value") -> Any:
    names: dict[str, Any] = {
        "Value": Value, "QArray": QArray, "Float": Float, "Float32": Float32, "Array": Array, "Any": Any,
        "Key": Key, "UInt32": UInt32, "quantize": quantize,
    }  # fmt: skip
    exec(f"class T({base}):\n" + "".join(f"    {line}\n" for line in body.splitlines()), names)
    return names["T"]


DENSE = 'def dense(self) -> Float32[Array, "n"]: return self.a'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f'k: int = 1\na: Float32[Array, "n"]\n{DENSE}', "T: field a has no default but follows k, which has one"),
        (f'a: Float32[Array, "n"] = 1.0\n{DENSE}', r"T\.a: a component has no default"),
        (f'a: Float32[Array, "n//group"]\n{DENSE}', r"T\.a: axis 'n//group': .*'group' and no static.*group: int"),
        ('a: Float32[Array, "n"]\ndef dense(self) -> Float32[Array, "m n"]: return self.a', r"T\.dense: axis 'm': .*m: int"),
        (
            'a: UInt32[Array, "n 2"]\ndef dense(self) -> Key[Array, "n"]: return self.a',
            r"T\.dense: Key\[Array, 'n'\] leaves the dtype open",
        ),
    ],
)
def test_class_statements_that_are_refused(body, message):
    with pytest.raises(TypeError, match=message):
        declare(body)


@pytest.mark.parametrize("field", ["more: int", 'more: Float32[Array, "n"]'])
def test_a_subclass_cannot_add_a_field_without_default_after_one_with(field):
    with pytest.raises(TypeError, match="T: field more has no default but follows dtype, which has one"):
        declare(field, "QArray")


def test_a_field_cannot_be_named_as_a_class_variable():
    with pytest.raises(TypeError, match="T: a field cannot be named word, a class variable of its base"):
        declare("word: int = 3", "QArray")


def test_a_subclass_adds_a_static():
    sub = declare("more: int = 3", "QArray")
    value = sub(jnp.ones((2, 3), jnp.int8), jnp.ones(2), more=4)
    assert str(jax.typeof(value)) == "t<more=4>[2,3]" and sub.type((2, 3), more=4) == jax.typeof(value)
    assert (dense(value) == 1).all() and isinstance(sub.from_dense(A), sub) and isinstance(value, QArray)


@pytest.mark.parametrize(
    ("body", "kind"), [("(self.a, self.a)", "tuple"), ("None", "NoneType"), ("'x'", "str"), ("[self.a]", "list")]
)
def test_a_dense_that_gives_no_array(body, kind):
    cls = declare(f'a: Float32[Array, "n"]\ndef dense(self) -> Float32[Array, "n"]: return {body}')
    with pytest.raises(TypeError, match=rf"T\.dense: the body gives {kind} where its annotation says one array, Float32"):
        dense(cls(jnp.ones(3)))


def test_a_dense_that_gives_a_value():
    cls = declare('a: Float32[Array, "n"]\ndef dense(self) -> Float32[Array, "n"]: return quantize(self.a)')
    with pytest.raises(TypeError, match=r"T\.dense: .* t\[3\] stands for float32\[3\], but the body gives q8\[3\]"):
        dense(cls(jnp.ones(3)))


def test_booleans_and_keys_are_no_open_dtypes():
    flags = Flags(jnp.array([True, False]))
    assert dense(flags).tolist() == [False, True] and Flags.type((2,)) == jax.typeof(flags)
    keys = jax.random.split(jax.random.key(1), 3)
    for value in (Keys(keys), RawKeys(jax.random.key_data(keys))):
        assert (jax.random.key_data(jax.jit(dense)(value)) == jax.random.key_data(keys)).all()
        assert value.dtype == keys.dtype and type(value).type((3,)) == jax.typeof(value)


def test_the_base_class_is_no_type():
    for use in (Value, lambda: Value.type((2,)), lambda: Value.P("i"), lambda: Value.from_components(1)):
        with pytest.raises(TypeError, match=r"typax\.Value is the base class of hi values; subclass it"):
            use()


# --- the constructor ---------------------------------------------------------------------------------------------


def test_unknown_and_missing_fields():
    with pytest.raises(
        TypeError, match="QArray: got an unexpected keyword argument 'foo'; its fields are qvalue, scale, dtype"
    ):
        QArray(A, A, foo=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="QArray: missing a required argument: 'scale'"):
        QArray(A)  # type: ignore[call-arg]


@pytest.mark.parametrize(("x", "kind"), [(1.7, "float"), (1.0, "float"), (1j, "complex")])
def test_numbers_are_not_truncated(x, kind):
    with pytest.raises(TypeError, match=rf"Scalar: component v: Int32\[Array, ''\] does not admit the {kind} "):
        Scalar(x)
    assert dense(Scalar(3)) == 3


@pytest.mark.parametrize("x", [2**40, -(2**40), 10**400])
def test_numbers_that_do_not_fit(x):
    with pytest.raises(ValueError, match=rf"Scalar: component v: .* cannot hold {x}"):
        Scalar(x)


@pytest.mark.parametrize("group", [2, np.int64(2), np.uint8(2)])
def test_the_size_of_an_axis_is_an_int(group):
    value = Blocks(A, S, group)
    assert type(value.group) is int and jax.typeof(value) == jax.typeof(Blocks(A, S))


@pytest.mark.parametrize("group", [2.0, True, "a", None])
def test_the_size_of_an_axis_is_no_other_thing(group):
    with pytest.raises(TypeError, match=r"Blocks: static group is the size of an axis or part of one.* an integer, got "):
        Blocks(A, S, group)


@pytest.mark.parametrize(("n", "group", "m"), [(5, 2, 2), (8, 3, 2)])
def test_groups_divide_their_axis(n, group, m):
    with pytest.raises(TypeError, match=rf"Blocks: component s .*axis 'n//group': {n} is not a multiple of {group}"):
        Blocks(jnp.ones((3, n)), jnp.ones((3, m)), group)


def test_a_division_of_a_sum_rounds_down():
    assert dense(Packed(jnp.arange(3), 5)).tolist() == [0, 0, 1, 1, 2] == dense(Packed(jnp.arange(3), 6)).tolist()[:5]


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, -0.0), ((1,), (1.0,)), (1 + 0j, 1.0)])
def test_statics_that_are_equal_but_not_the_same(a, b):
    one, other = jax.typeof(Scalar(1, a)), jax.typeof(Scalar(1, b))
    assert a == b and one != other and one == jax.typeof(Scalar(2, a))
    seen = jax.jit(lambda v: seen_statics.append(v.e))
    seen_statics: list[Any] = []
    seen(Scalar(1, a)), seen(Scalar(1, b))
    assert list(map(repr, seen_statics)) == [repr(a), repr(b)]


def test_the_static_dtype_is_a_dtype():
    codes, scale = jnp.ones((2, 3), jnp.int8), jnp.ones(2)
    value = QArray(codes, scale, dtype="bfloat16")
    assert value.dtype == jnp.dtype("bfloat16") and isinstance(value.dtype, np.dtype)
    assert jax.typeof(value) == jax.typeof(QArray(codes, scale, dtype=jnp.bfloat16)) == QArray.type((2, 3), "bfloat16")
    for make in (lambda d: QArray(codes, scale, dtype=d), lambda d: QArray.type((2, 3), d)):
        with pytest.raises(TypeError, match=r"QArray: dtype int32 is none of those that dense stands for, Float\["):
            make(jnp.int32)
        with pytest.raises(TypeError, match="QArray: dtype must be a dtype, got 'no'"):
            make("no")


def test_an_open_dtype_is_shown():
    half = Blocks(A.astype(jnp.bfloat16), S)
    assert str(jax.typeof(half)) == "blocks<bfloat16>[3,4]" and str(jax.typeof(Blocks(A, S))) == "blocks[3,4]"

    class Scaled(Value):
        a: Float32[Array, "n"]
        s: Float[Array, ""]

        def dense(self) -> Float32[Array, "n"]:
            return self.a * self.s.astype(jnp.float32)

    assert str(jax.typeof(Scaled(A[0], jnp.bfloat16(2)))) == "scaled<s:bfloat16>[4]"


def test_values_travel():
    for value in (Keys(jax.random.split(jax.random.key(1, impl="rbg"), 2)), quantize(A)):
        for made in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), jax.device_get(value)):
            assert type(made) is type(value) and jax.typeof(made) == jax.typeof(value)
        again = pickle.loads(pickle.dumps(value))
        for a, b in zip(jax.tree.leaves(again.components()), jax.tree.leaves(value.components()), strict=True):
            data = jax.random.key_data if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray
            assert (data(a) == data(b)).all()
    assert isinstance(jax.device_get(quantize(A)).scale, np.ndarray)


# --- Cls.type ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Three.type((7,)), r"Three\.type: no Three .* stands for float32\[7\]; three\[3\] stands for float32\[3\]"),
        (lambda: Three.type((3,), jnp.bfloat16), r"stands for bfloat16\[3\]; three\[3\] stands for float32\[3\]"),
        (lambda: Kron.type((6, 6), m=2, n=3, p=2, q=2), r"stands for float32\[6,6\]; kron\[4,6\] stands for float32\[4,6\]"),
        (lambda: Kron.type((4, 6)), r"Kron\.type: the shape \(4, 6\) does not show the axis m, n, p, q; give it, m="),
        (lambda: QArray.type((2, 3), foo=3), r"QArray\.type: no axis or static is named foo; they are dtype, n"),
        (lambda: QArray.type((2, 3), n=4), r"QArray\.type: axis 'n' is 3 in the shape \(2, 3\) but 4 is given"),
        (lambda: Kron.type((4, 6), m=2.0, n=3, p=2, q=2), "static m is the size of an axis.* got 2.0"),
        (lambda: Blocks.type((3, 4), group=3), r"Blocks\.type: axis 'n//group': 4 is not a multiple of 3"),
        (lambda: QArray.type((2, 2), sharding=P("i", "i")), r"QArray\.type: .* has two axes on the mesh axis 'i'"),
    ],
)
def test_types_that_are_not_what_was_asked(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_types_that_are_what_was_asked():
    assert Kron.type((4, 6), m=2, n=3, p=2, q=2) == jax.typeof(Kron(jnp.ones((2, 3)), jnp.ones((2, 2))))
    assert Blocks.type((3, 4)) == jax.typeof(Blocks(A, S))
    assert Blocks.type((3, 4), jnp.bfloat16, group=4) == jax.typeof(Blocks(A.astype(jnp.bfloat16), S[:, :1], 4))
    assert QArray.type((2, 3)) is QArray.type((2, 3))


def test_a_record_type_is_made_of_types():
    class Two(Value):
        a: jax.Array
        b: jax.Array

    assert Two.type(jax.typeof(A), jax.typeof(S)) == jax.typeof(Two(A, S))
    with pytest.raises(TypeError, match=r"Two\.type: a record's type is made of the types of its components"):
        Two.type(A, S)


def explicit():
    return jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)


def test_a_sharded_type_is_lowered():
    mesh = explicit()
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("i", "j")))
    with jax.set_mesh(mesh):
        ty = QArray.type((8, 4), sharding=NamedSharding(mesh, P("i", "j")))
        value = quantize(typax.reshard(x, P("i", None)))
        value = typax.reshard(value, P("i", "j"))
        assert jax.typeof(value) == ty
        compiled = jax.jit(dense).lower(ty).compile()
        got = compiled(value)
        assert got.sharding.spec == P("i", "j") and (got == dense(value)).all()
        assert (jax.jit(dense).lower(value).compile()(value) == got).all()
        assert value.sharding.mesh == mesh and value.sharding.spec == P("i", "j")


def test_the_sharding_of_a_value():
    assert quantize(A).sharding == quantize(A).scale.sharding
    auto = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    codes = jax.device_put(jnp.ones((4, 2), jnp.int8), NamedSharding(auto, P("i")))
    with pytest.raises(AttributeError, match="QArray: the mesh axes are not explicit"):
        QArray(codes, jnp.ones(4)).sharding
    with pytest.raises(TypeError, match=r"QArray\.type: .* names mesh axes that are not explicit"):
        QArray.type((4, 2), sharding=NamedSharding(auto, P("i")))


def test_two_axes_on_one_mesh_axis():
    with jax.set_mesh(explicit()):
        side = jax.sharding.reshard(jnp.ones(4), P("i"))
        with pytest.raises(TypeError, match=r"Outer\.dense: outer\[4@i,4@i\] has two axes on the mesh axis 'i'"):
            Outer(side, side)
    with pytest.raises(TypeError, match=r"Outer\.P\(m='i', n='i'\) partitions two axes of one array by the mesh axis 'i'"):
        Outer.P(m="i", n="i")
