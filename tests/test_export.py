"""Programs with values as bytes and back: the numbers, types and derivatives of the function that was exported."""

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import _raw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import W, X, close
from jaxtyping import Array, Float32, Int8, Key

import typax
from typax import QArray, dense, quantize

pytest.importorskip("flatbuffers")


class Grouped(typax.Value, name="g8"):
    qvalue: Int8[Array, "*batch n"]
    scale: Float32[Array, "*batch n//group"]
    group: int = 2

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.qvalue.astype(jnp.float32) * jnp.repeat(self.scale, self.group, axis=-1)


class Noisy(typax.Value):
    key: Key[Array, ""]
    level: Float32[Array, ""]


bias = quantize(X[:1, :1].repeat(4, 1))


class Signed(typax.Value, name="signed", tangent="componentwise"):
    sign: Int8[Array, "*batch n"]
    log: Float32[Array, "*batch n"]

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.sign.astype(jnp.float32) * jnp.exp(self.log)


def program(x, q, *, rest):
    y = typax.matmul(x, q) + dense(bias)
    return {"q": quantize(y), "both": typax.tup(x, rest["g"]), "y": y, "n": jnp.int32(7)}


def arguments() -> Any:
    grouped = Grouped(jnp.arange(8, dtype="int8").reshape(2, 4), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    return (X, quantize(W)), {"rest": {"g": grouped}}


def loss(f):
    def of(x, q, g):
        out = f(x, q, rest={"g": g})
        x, g = out["both"]
        return jnp.sum(dense(out["q"]) ** 2) + jnp.sum(out["y"] ** 3) + jnp.sum(x) + jnp.sum(dense(g) ** 2)

    return of


@pytest.mark.core
def test_a_program_survives_as_bytes():
    args, kwargs = arguments()
    made = typax.export(jax.jit(program))(*args, **kwargs)
    read = typax.deserialize(made.serialize(vjp_order=1))
    want = program(*args, **kwargs)
    for f in (made.call, jax.jit(read.call)):
        got = f(*args, **kwargs)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        jax.tree.map(close, dense(got), dense(want))
    assert read.in_types == ((jax.typeof(X), jax.typeof(args[1])), {"rest": {"g": jax.typeof(kwargs["rest"]["g"])}})
    assert read.out_types["q"] == jax.typeof(want["q"]) and read.has_vjp()
    assert repr(read).startswith("Exported(program: (float32[2,3], q8[3,4], rest={'g': g8[2,4]}) -> {'both': Tup{")

    operands = (*args, kwargs["rest"]["g"])
    own = jax.grad(loss(program), (0, 1, 2))(*operands)
    for f in (made.call, read.call):  # the first traces its derivative when it is asked for
        jax.tree.map(close, jax.jit(jax.grad(loss(f), (0, 1, 2)))(*operands), own)
    assert [str(t) for t in jax.tree.leaves(read.vjp().out_types)] == ["float32[2,3]", "float32[3,4]", "float32[2,4]"]


def test_derivatives_of_derivatives():
    q = quantize(X)
    made = typax.deserialize(typax.export(lambda q: jnp.sum(dense(q) ** 3))(q).serialize(vjp_order=2))
    slope = lambda f: lambda q: jnp.sum(jax.grad(f)(q) ** 2)
    close(jax.grad(slope(made.call))(q), 36 * dense(q) ** 3)
    with pytest.raises(NotImplementedError, match="without its derivative"):
        jax.grad(slope(slope(made.call)))(q)


def test_another_process_reads_it(tmp_path):
    args = (X, quantize(W))
    (tmp_path / "program").write_bytes(typax.export(lambda x, q: quantize(typax.matmul(x, q)))(*args).serialize())
    reader = (
        "import sys, jax, jax.numpy as jnp, typax\n"
        "f = typax.deserialize(open(sys.argv[1], 'rb').read())\n"
        "w = jnp.arange(12.0, dtype='float32').reshape(3, 4) / 12.0\n"
        "y = f.call(jnp.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]]), typax.quantize(w))\n"
        "print(jax.typeof(y), y.qvalue.tolist(), [float(s).hex() for s in y.scale])"
    )
    run = [sys.executable, "-c", reader, str(tmp_path / "program")]
    done = subprocess.run(run, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    want = jax.jit(lambda x, q: quantize(typax.matmul(x, q)))(*args)
    shown = f"{jax.typeof(want)} {want.qvalue.tolist()} {[float(s).hex() for s in want.scale]}"
    assert done.stdout.split("\n")[0] == shown, done.stderr


def test_types_and_symbolic_shapes_in_place_of_values():
    (b,) = jax.export.symbolic_shape("b")
    specs = jax.ShapeDtypeStruct((b, 3), jnp.float32), QArray.type((3, 4))
    made = typax.deserialize(typax.export(typax.matmul)(*specs).serialize(vjp_order=1))
    for n in (2, 5):
        x, q = jnp.ones((n, 3)), quantize(W)
        close(made.call(x, q), typax.matmul(x, q))
        close(
            jax.grad(lambda q, x=x: jnp.sum(made.call(x, q) ** 2))(q),
            jax.grad(lambda q, x=x: jnp.sum(typax.matmul(x, q) ** 2))(q),
        )
    with pytest.raises(TypeError, match=r"matmul takes argument 0 of type float32\[b,3\], not float32\[2,4\]"):
        made.call(jnp.ones((2, 4)), q)
    with pytest.raises(NotImplementedError, match=r"q8\[b,3\] has an axis of symbolic size, which only arrays may have"):
        typax.export(quantize)(specs[0]).serialize()


def test_a_large_product_of_as_many_rows_as_there_will_be():
    (b,) = jax.export.symbolic_shape("b")
    w = quantize(jnp.sin(jnp.arange(600.0 * 500)).reshape(500, 600))
    f = lambda x, w: typax.matmul(x, typax.transpose(w, permutation=(1, 0)))
    made = typax.export(jax.jit(f))(jax.ShapeDtypeStruct((b, 600), jnp.float32), w)
    x = jnp.cos(jnp.arange(1800.0)).reshape(3, 600)
    close(made.call(x, w), x @ dense(w).T, 1e-4)


@pytest.mark.core
def test_what_has_no_tangent_is_read_back_with_derivatives():
    v = Signed(jnp.array([1, -1], jnp.int8), jnp.array([0.5, 2.0]))
    read = typax.deserialize(typax.export(jax.jit(dense))(v).serialize(vjp_order=1))
    square = lambda f: lambda v: jnp.sum(f(v) ** 2)
    g, want = jax.grad(square(read.call))(v), jax.grad(square(dense))(v)
    close(g.log, want.log)
    assert g.sign.dtype == want.sign.dtype == jax.dtypes.float0


def test_keys_and_tangent_records():
    v = Noisy(jax.random.key(3), jnp.float32(2.0))
    lr = typax.outer(jnp.ones((4, 2)), jnp.ones((2, 3)))

    def f(v, lr):
        key, level = v.components()
        return level * jax.random.normal(key, (3,)), jax.grad(lambda w: jnp.sum(dense(w) ** 2))(lr)

    made = typax.deserialize(typax.export(f)(v, lr).serialize())
    got, want = made.call(v, lr), f(v, lr)
    close(got[0], want[0])
    assert jax.typeof(got[1]) == jax.typeof(want[1]) == jax.typeof(lr).to_tangent_aval()
    close(got[1].left, want[1].left)


@pytest.mark.core
def test_on_a_mesh():
    with jax.set_mesh(jax.make_mesh((8,), ("i",))):
        q = quantize(jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.P("i")))
        made = typax.deserialize(typax.export(lambda q: quantize(dense(q) * 2))(q).serialize())
        got = jax.jit(made.call)(q)
        assert jax.typeof(got) == jax.typeof(q)
        close(dense(got), 2 * dense(q))


def test_what_an_exported_program_refuses():
    args, kwargs = arguments()
    made = typax.deserialize(typax.export(program)(*args, **kwargs).serialize())
    x, q = args
    with pytest.raises(TypeError, match=r"argument 1 of type q8\[3,4\], not float32\[3,4\]; export it for that type, too"):
        made.call(x, W, **kwargs)
    with pytest.raises(TypeError, match=r"argument 0 of type float32\[2,3\], not q8\[2,3\]"):
        made.call(quantize(X), q, **kwargs)
    with pytest.raises(TypeError, match=r"argument 1 of type q8\[3,4\], not q8<bfloat16>\[3,4\]"):
        made.call(x, quantize(W.astype("bfloat16")), **kwargs)
    with pytest.raises(TypeError, match=r"argument 'rest'\['g'\] of type g8\[2,4\], not g8<group=4>\[2,4\]"):
        made.call(x, q, rest={"g": Grouped(jnp.ones((2, 4), "int8"), jnp.ones((2, 1)), group=4)})
    with pytest.raises(TypeError, match=r"argument 0 of type .*, not <built-in"):
        made.call(len, q, **kwargs)
    with pytest.raises(TypeError, match="takes arguments of the structure"):
        made.call(x, q)
    by_hand = _raw.Codes(jnp.ones((2, 3), "int8"), jnp.ones(2))
    with pytest.raises(TypeError, match="of a type written by hand"):
        typax.export(lambda x: x)(by_hand)
    with pytest.raises(TypeError, match="of a type written by hand"):
        typax.export(lambda: by_hand)()
    operands = (*args, kwargs["rest"]["g"])
    with pytest.raises(NotImplementedError, match=r"program was written without its derivative; write it by .*vjp_order=1"):
        jax.grad(loss(made.call))(*operands)
    with pytest.raises(NotImplementedError, match="differentiated in reverse mode only"):
        jax.jvp(lambda x: loss(made.call)(x, *operands[1:]), (x,), (x,))


@pytest.mark.core
def test_bytes_that_are_no_program():
    data = typax.export(dense)(quantize(X)).serialize()
    for bad in (data[:5], b"", b"PK\x03\x04", bytes(jax.export.export(jax.jit(jnp.sin))(X).serialize())):
        with pytest.raises(ValueError, match=r"not the bytes of a program that typax\.export made"):
            typax.deserialize(bad)
    rng = np.random.default_rng(0)
    for at in [12, 14, 15, *rng.integers(16, len(data), 20)]:
        flipped = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        with pytest.raises(ValueError, match=r"damaged, or not whole|of version \d+; this typax reads version 1"):
            typax.deserialize(flipped)
        with pytest.raises(ValueError, match="damaged, or not whole"):
            typax.deserialize(data[:at] if at > 12 else data + b"\0")
    with pytest.raises(TypeError, match="takes bytes, not str"):
        typax.deserialize("program")  # pyright: ignore


def test_a_class_that_does_not_exist_here():
    passing = type(Grouped)("Passing", (Grouped,), {"__module__": "elsewhere", "__qualname__": "Passing"})
    v = passing(jnp.ones((2, 4), "int8"), jnp.ones((2, 2)))
    data = typax.export(dense)(v).serialize()
    assert typax.deserialize(data).in_types == ((jax.typeof(v),), {})
    data = data.replace(b"elsewhere:Passing", b"elsewhere:Missing")
    head = data[:16] + zlib.crc32(data[20:]).to_bytes(4, "little")
    with pytest.raises(ValueError, match="there is no value class 'elsewhere:Missing' yet; import elsewhere first"):
        typax.deserialize(head + data[20:])
