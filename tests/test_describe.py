"""Types as plain data, and back."""

import dataclasses
import enum
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Float32, Int8

import typax
from typax import _describe

pytestmark = pytest.mark.core


class Mode(enum.Enum):
    near = "n"
    far = "f"


@dataclasses.dataclass(frozen=True)
class Options:
    mode: Mode
    scale: float = 1.0
    kinds: tuple[str, ...] = ()


class Rich(typax.Value, name="rich"):
    """Every kind of static."""

    x: Float[Array, "*batch n"]
    s: Float32[Array, "*batch"]
    options: Options = Options(Mode.near)
    spec: Any = jax.P("i", None, ("a", "b"))
    of: Any = typax.QArray
    small: float = float("inf")
    dtype: Any = jnp.bfloat16

    def dense(self) -> Float[Array, "*batch n"]:
        return (self.x * self.s[..., None]).astype(self.dtype)


class Nest(typax.Value, name="nest"):
    inner: typax.QArray
    many: tuple[Any, ...]


def values():
    q = typax.quantize(jnp.ones((2, 3, 4), jnp.bfloat16))
    yield q
    yield jax.vmap(lambda x, s: typax.QArray.from_components(x, s), (0, None))(jnp.ones((5, 4), "int8"), jnp.float32(1))
    yield Rich(jnp.ones((2, 3)), jnp.ones(2), Options(Mode.far, 0.1, ("a", "b")), small=-0.0)
    yield Rich(jnp.ones((2, 3), jnp.float16), jnp.ones(2), spec=jax.P())
    yield Nest(q, (q, jnp.ones(3), (jnp.arange(2), {"a": q, "b": jnp.ones(())})))
    yield typax.tup(q, jnp.zeros((), bool), jax.random.key(0))
    yield typax.outer(jnp.ones(3), jnp.ones(4))


@pytest.mark.parametrize("value", list(values()), ids=lambda v: str(jax.typeof(v)))
def test_a_type_comes_back_equal(value):
    ty = jax.typeof(value)
    back = _describe.type_from_json(json.loads(json.dumps(_describe.type_to_json(ty))))
    assert back == ty and hash(back) == hash(ty) and str(back) == str(ty)


def test_minus_zero_and_nan_statics_stay_apart():
    for v in (-0.0, 0.0, float("nan"), 1e-320, float("-inf")):
        assert repr(_describe.static_from_json(_describe.static_to_json(v, "it"))) == repr(v)


def test_what_has_no_form_in_a_file_is_refused_with_its_name():
    class Keeps(typax.Value, name="keeps"):
        x: Int8[Array, "n"]
        f: Any = max

        def dense(self) -> Float32[Array, "n"]:
            return self.x.astype(jnp.float32)

    with pytest.raises(TypeError, match=r"static f of keeps.* is <built-in function max>, which has no form in a file"):
        _describe.type_to_json(jax.typeof(Keeps(jnp.ones(2, "int8"))))

    @dataclasses.dataclass(frozen=True)
    class Local:
        n: int

    with pytest.raises(TypeError, match="could not be found again by that name"):
        _describe.type_to_json(jax.typeof(Keeps(jnp.ones(2, "int8"), Local(1))))


def test_a_class_with_a_name_that_two_have_is_refused():
    def make():
        class Twin(typax.Value, name="twin"):
            x: Int8[Array, "n"]

            def dense(self) -> Float32[Array, "n"]:
                return self.x.astype(jnp.float32)

        return Twin

    one = make()
    told = _describe.type_to_json(jax.typeof(one(jnp.ones(2, "int8"))))
    assert _describe.type_from_json(told).decl.cls is one
    two = make()
    with pytest.raises(TypeError, match=r"there are 2 value classes .*Twin"):
        _describe.type_to_json(jax.typeof(two(jnp.ones(2, "int8"))))


def _q8(**changes):
    return {**_describe.type_to_json(typax.QArray.type((2, 3))), **changes}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (None, "describes not a type"),
        ({"class": "os:system"}, "no value class 'os:system'"),
        ({"class": "nowhere.to:Be"}, "import nowhere.to first"),
        ({"class": 3}, "names no value class"),
        (_q8(statics={}), "has the statics"),
        (_q8(statics={"dtype": {"dtype": "float99"}}), "'float99' is no dtype"),
        (_q8(components=[]), "has the components"),
        (_q8(components=[{"array": "int8", "shape": [2, 3]}, {"array": "float32", "shape": [7]}]), "batch axis 0 is 2"),
        (_q8(components=[{"array": "int8", "shape": [2, -3]}, {"array": "float32", "shape": [2]}]), "is no shape"),
        (_q8(components=[{"array": "float32", "shape": [2, 3]}, {"array": "float32", "shape": [2]}]), "does not admit"),
        (_q8(masks=[[1]]), "has not the form"),
        (_q8(statics={"dtype": {"dataclass": "os:system", "fields": {}}}), "is no frozen dataclass"),
        (_q8(statics={"dtype": {"enum": "os:environ", "name": "x"}}), "is no member of an enum"),
        (_q8(statics={"dtype": {"tuple": [], "P": []}}), "describes no static"),
    ],
)
def test_data_that_describes_no_type_is_refused(data, match):
    with pytest.raises(ValueError, match=match):
        _describe.type_from_json(data)
