"""What an array does: operators, attributes, functions of jax.numpy; on a value, and on the tracer of one."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.flatten_util import ravel_pytree

from _matrix import need, row, works_raw
from _matrix.sides import W, X

REMEDY = (TypeError, r"typax\.dense|typax\.matmul")


def refused(name: str, program: Any) -> None:
    """Rows for a call that has to say what to write instead, eagerly and under jit."""
    for mode, wrap in (("eager", lambda s, f: f), ("jit", lambda s, f: s.jit(f))):

        def run(s: Any, wrap: Any = wrap) -> Any:
            wrap(s, lambda q, x: jnp.asarray(program(q, x)) * 1)(s.q, X.T)

        run.__module__ = __name__
        row(f"{name} [{mode}]", error=REMEDY)(run)


refused("x @ q", lambda q, x: x @ q)
refused("q @ x", lambda q, x: q @ x)
refused("jnp.matmul(x, q)", lambda q, x: jnp.matmul(x, q))
refused("jnp.sum(q)", lambda q, x: jnp.sum(q))
refused("jnp.asarray(q)", lambda q, x: jnp.asarray(q) + 1)
refused("q + 1", lambda q, x: q + 1)
refused("1 + q", lambda q, x: 1 + q)
refused("q == q", lambda q, x: q == q)
refused("q.at[0].set(1)", lambda q, x: q.at[0].set(1))


@row("-q [eager]")
def _(s: Any) -> Any:
    return s.dense(-s.q), s.dense(2 * s.q)


@row("-q [jit]")
def _(s: Any) -> Any:
    return s.jit(lambda q: s.dense(-q))(s.q)


@row("jnp.zeros_like(q), a dense array")
def _(s: Any) -> Any:
    return jnp.zeros_like(s.q), s.jit(jnp.zeros_like)(s.q)


@row("a component of a tracer", error=(TypeError, r"components\(\)"))
def _(s: Any) -> Any:
    return s.jit(lambda q: getattr(q, s.components[0]))(s.q)


@row("iter of a tracer of a single row", error=(TypeError, r"dense|batch"))
def _(s: Any) -> Any:
    return s.jit(lambda q: list(q))(s.quantize(X[0]))


def attribute(name: str, program: Any, **how: Any) -> None:
    """A row for what a tracer tells about itself."""

    def run(s: Any) -> Any:
        told = []
        s.jit(lambda q: told.append(program(s, q)) or s.dense(q))(s.stack)
        return told, [program(s, s.stack)]

    run.__module__ = __name__
    row(f"tracer: {name}", **how)(run)


attribute("q.shape", lambda s, q: str(q.shape))
attribute("q.dtype", lambda s, q: str(q.dtype))
attribute("q.ndim", lambda s, q: q.ndim)
attribute("q.size", lambda s, q: q.size)
attribute("q.sharding", lambda s, q: str(jax.typeof(q).sharding.spec))
attribute("q.nbytes", lambda s, q: q.nbytes // q.nbytes)
attribute("len(q)", lambda s, q: len(q))


@row("tracer: q.T")
def _(s: Any) -> Any:
    return s.jit(lambda q: s.dense(q.T))(s.q), s.dense(s.q.T)


@row("tracer: q[0], of a stack")
def _(s: Any) -> Any:
    return s.jit(lambda q: s.dense(q[0]))(s.stack), s.dense(s.stack[1])


@row("tracer: iter of a stack", error=(TypeError, r"typax\.dense"))
def _(s: Any) -> Any:
    return s.jit(lambda q: [s.dense(r) for r in q])(s.stack)


@row("isinstance of a tracer", want=lambda: "True")
def _(s: Any) -> Any:
    told = []
    s.jit(lambda q: told.append(isinstance(q, s.Q)) or s.dense(q))(s.q)
    return told[0]


@row("result_type")
def _(s: Any) -> Any:
    return jnp.zeros((), jnp.result_type(s.q)), jnp.zeros((), jax.dtypes.result_type(s.q, jnp.float32))


@row("stack of values")
def _(s: Any) -> Any:
    other = s.quantize(2 * X)
    f = lambda a, b: s.dense(s.stack_values([a, b]))
    return f(s.q, other), s.jit(f)(s.q, other), s.grad(lambda a: jnp.sum(f(a, other) ** 2))(s.q)


@row("concatenate along a batch axis")
def _(s: Any) -> Any:
    f = lambda a, b: s.dense(s.concatenate([a, b]))
    return f(s.q, s.quantize(-X)), s.grad(lambda a: jnp.sum(f(a, s.q) ** 2))(s.q)


@row("tree.map of stack over trees with values")
def _(s: Any) -> Any:
    trees = [{"q": s.quantize(k * X), "x": k * X} for k in (1, 2, 3)]
    out = jax.tree.map(lambda *xs: s.stack_values(xs), *trees)
    return s.dense(out["q"]), out["x"]


@row("take along a batch axis")
def _(s: Any) -> Any:
    i = jnp.array([2, 0, 2])
    return s.dense(s.take(s.stack, i, axis=0)), s.grad(lambda q: jnp.sum(s.dense(s.take(q, i, axis=0)) ** 2))(s.stack)


@row("tree.map of arithmetic over a tree with values")
def _(s: Any) -> Any:
    out = jax.tree.map(lambda a: a * 2, {"q": s.q, "x": X})
    return s.dense(out["q"]), out["x"]


@row("tree.transpose into the components of a value", error=(TypeError | ValueError, "Mismatch"))
def _(s: Any) -> Any:
    outer, inner = jax.tree.structure([0]), jax.tree.structure((0, 0))
    return jax.tree.transpose(outer, inner, [s.q])


@works_raw("jax.tree: a value is one leaf")
def _(s: Any) -> Any:
    tree = {"a": s.q, "b": [s.w, X]}
    back = jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(tree))
    return jnp.array(len(jax.tree.leaves(tree))), s.dense(back["a"])


@row("ravel_pytree", limit=(TypeError | ValueError, r"unexpected type q8\[2,3\]"))
def _(s: Any) -> Any:
    return ravel_pytree({"q": s.q, "x": X})[0]


@row("block_until_ready, of a tree and as a method")
def _(s: Any) -> Any:
    return s.dense(s.block_until_ready({"q": s.q})["q"]), s.dense(s.q.block_until_ready())


@row("device_get")
def _(s: Any) -> Any:
    got = jax.device_get(s.q)
    if not s.is_plain:
        assert isinstance(got, s.Q) and isinstance(s.codes(got), np.ndarray)
        got = np.asarray(s.codes(got)) * np.asarray(s.steps(got))[..., None]
    return jnp.asarray(got)


@works_raw("pickle and deepcopy")
def _(s: Any) -> Any:
    return s.dense(pickle.loads(pickle.dumps(s.q))), s.dense(copy.deepcopy(s.q))


@works_raw("ref of a value, read and written whole")
def _(s: Any) -> Any:
    def f(q):
        ref = jax.new_ref(q)
        ref[...] = s.quantize(s.dense(ref[...]) * 2)
        return s.dense(ref[...])

    return s.jit(f)(s.q)


@row("ref of a stack, ref[0]", limit=(TypeError | NotImplementedError, r"ref\[\.\.\.\]"))
def _(s: Any) -> Any:
    return s.jit(lambda q: s.dense(jax.new_ref(q)[0]))(s.stack)


def kernel(code: Any, step: Any, out: Any) -> None:
    out[...] = code[...].astype(jnp.float32) * step[...]


@works_raw("pallas_call on the components")
def _(s: Any) -> Any:
    if s.is_plain:
        return s.w
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(W.shape, jnp.float32), interpret=True)
    return call(s.codes(s.w), s.steps(s.w)[:, None])


@row("pallas_call on a value", limit=(TypeError | NotImplementedError, r"components\(\)"))
def _(s: Any) -> Any:
    def copied(q, out):
        out[...] = q[...] if s.is_plain else s.dense(q[...])

    return s.jit(pl.pallas_call(copied, jax.ShapeDtypeStruct((2, 3), jnp.float32), interpret=True))(s.q)


@row("export of a function of values, and back")
def _(s: Any) -> Any:
    need("flatbuffers")
    from jax import export

    if s.is_plain:
        return X @ s.w
    if s.name == "typax":
        import typax

        data = typax.export(lambda x, w: s.matmul(x, w))(s.x, s.w).serialize()
        return typax.deserialize(data).call(s.x, s.w)
    exported = export.export(s.jit(s.matmul))(s.x, s.w)
    return export.deserialize(exported.serialize()).call(s.x, s.w)
