"""Trees of values in Orbax checkpoints: the same types and bits, on this mesh and on another."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int4, Key

import typax
from typax import QArray, ValueType, dense, quantize

ocp = pytest.importorskip("orbax.checkpoint")

pytestmark = pytest.mark.core

import typax.io.orbax as checkpoints  # noqa: E402
from typax.io import FileError  # noqa: E402


class Odd(typax.Value):
    """Components that Orbax does not store as they are."""

    key: Key[Array, "*batch"]
    small: Int4[Array, "*batch n"]
    eighth: Float[Array, "*batch n"]


class Two(NamedTuple):
    first: Any
    second: Any


def tree() -> dict[str, Any]:
    q = quantize(jnp.arange(32.0).reshape(8, 4) - 7)
    odd = Odd(jax.random.key(3), jnp.array([1, -2], jnp.int4), jnp.array([1, 0.5], jnp.float8_e4m3fn))
    return {
        "a/b.c": q,
        "two": Two(3, "three"),
        "layers": [q, (jnp.ones(3, "bfloat16"), np.arange(3.0), None, np.float32(2))],
        "odd": odd,
        "low": typax.outer(jnp.ones((4, 2)), jnp.ones((2, 3))),
        "tup": typax.tup(quantize(jnp.ones((2, 3), "bfloat16")), jnp.ones(3)),
        "key": jax.random.key(1),
        "last": True,
    }


def los(x: Any) -> list[Any]:
    xs = jax.typeof(x).lower_val(x) if isinstance(jax.typeof(x), ValueType) else [x]
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in xs]


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, str | bool | int):
        assert a == b
        return
    assert jax.typeof(a).normalize() == jax.typeof(b).normalize()
    same_bits(a, b)


def same_bits(a: Any, b: Any) -> None:
    for x, y in zip(los(a), los(b), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "tree"
    checkpoints.save(path, tree())
    return path


def test_types_and_bits_come_back(folder):
    jax.tree.map(same, tree(), checkpoints.load(folder))
    jax.tree.map(same, tree(), checkpoints.load(folder, like=tree()))
    names = set(ocp.StandardCheckpointer().metadata(folder).item_metadata.tree)
    assert {"layers.0.qvalue", "layers.0.scale", "odd.small", "low.left"} <= names


def test_onto_another_mesh(tmp_path):
    rows, both = jax.make_mesh((8,), ("i",)), jax.make_mesh((4, 2), ("i", "j"))
    auto = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(rows):
        q = quantize(jax.device_put(x, jax.P("i")))
        checkpoints.save(tmp_path / "q", {"q": q, "x": x})
    place = jax.NamedSharding(both, jax.P("j", "i"))
    got = checkpoints.load(tmp_path / "q", sharding=lambda path, ty: place if path == "q" else None)["q"]
    assert (got.qvalue.sharding.spec, got.scale.sharding.spec) == (jax.P("j", "i"), jax.P("j"))
    with jax.set_mesh(both):
        assert jax.typeof(got) == QArray.type((8, 4), sharding=place)
    plain = checkpoints.load(tmp_path / "q", sharding=jax.NamedSharding(auto, jax.P("i")))["q"]
    assert plain.scale.sharding.is_equivalent_to(jax.NamedSharding(auto, jax.P("i")), 1)
    like_values = checkpoints.load(tmp_path / "q", like={"q": plain, "x": x})["q"]
    assert like_values.scale.sharding.is_equivalent_to(plain.scale.sharding, 1)
    with jax.set_mesh(rows):
        like_types = checkpoints.load(tmp_path / "q", like={"q": jax.typeof(q), "x": jax.typeof(x)})["q"]
        assert jax.typeof(like_types) == jax.typeof(q)
    on_one = checkpoints.load(tmp_path / "q", sharding=jax.devices()[3])["q"]
    assert on_one.scale.devices() == {jax.devices()[3]}
    for v in (got, plain, like_values, like_types, on_one):
        assert type(v) is QArray
        same_bits(q, v)
    with pytest.raises(TypeError, match=r"q: q8\[8,4\] cannot be put as .*: q\.qvalue: .*partitioned 8 times"):
        checkpoints.load(
            tmp_path / "q", sharding=lambda p, t: jax.NamedSharding(rows, jax.P(None, "i")) if p == "q" else None
        )


def test_in_orbaxs_own_manager(tmp_path):
    params = {"w": quantize(jnp.arange(6.0).reshape(2, 3)), "b": jnp.zeros(3)}
    both = ocp.args.Composite(params=checkpoints.Save(params), step=ocp.args.JsonSave({"n": 4}))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(4, args=both)
        manager.wait_until_finished()
        ask = ocp.args.Composite(params=checkpoints.Restore(), step=ocp.args.JsonRestore())
        got = manager.restore(4, args=ask)
    jax.tree.map(same, params, got["params"])
    assert got["step"] == {"n": 4}
    jax.tree.map(same, params, checkpoints.load(tmp_path / "run/4/params"))


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(FileError, match="it has no 'other', which `like` has"):
        checkpoints.load(folder, like={"other": jnp.ones(3)})
    with pytest.raises(FileError, match=r"low is lr\[4,3\], where `like` has float32\[4,3\]"):
        checkpoints.load(folder, like={**tree(), "low": jnp.ones((4, 3))})
    with pytest.raises(FileError, match="there is no such folder"):
        checkpoints.load(tmp_path / "nowhere")
    with pytest.raises(FileError, match="no Orbax checkpoint"):
        checkpoints.load(tmp_path)
    with pytest.raises(ValueError, match="already exists"):
        checkpoints.save(folder, tree())
    with pytest.raises(TypeError, match="is neither an array, a value nor a node of a tree"):
        checkpoints.save(tmp_path / "act", {"act": dense})
    with ocp.StandardCheckpointer() as plain:
        plain.save(tmp_path / "plain", {"x": jnp.ones(3)})
    with pytest.raises(FileError, match="this Orbax checkpoint tells of no values; restore it with Orbax"):
        checkpoints.load(tmp_path / "plain")
    checkpoints.save(tmp_path / "numbers", {"n": 3})
    assert checkpoints.load(tmp_path / "numbers") == {"n": 3}
    checkpoints.save(tmp_path / "numbers", {"n": 4}, force=True)
    assert checkpoints.load(tmp_path / "numbers") == {"n": 4}
