"""Programs that know nothing of typax, on hi values: the dense array is the oracle."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import as_dense
from _util import W, X, close
from jax import lax
from jax.sharding import AxisType

import typax
from typax import QArray, Receipt, _closures, dense, lift, quantize

pytestmark = pytest.mark.core

Q = quantize(jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4))  # a stack of two
M = quantize(jnp.cos(jnp.arange(12.0)).reshape(3, 4))
IDS = jnp.array([[2, 0, 7], [1, -1, 2]])  # 7 is out of bounds

PRODUCTS = {
    "x @ w": (lambda x, w: x @ w, X, M),
    "x @ w.T": (lambda x, w: x @ w.T, X, quantize(W.T)),
    "w.T @ x.T": (lambda x, w: w.T @ x.T, X, M),
    "w @ x.T": (lambda x, w: w @ x.T, X, quantize(W.T)),
    "w @ vector": (lambda x, w: w @ x, jnp.arange(4.0), M),
    "bij,bjk": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), jnp.ones((2, 5, 3)), Q),
    "bkj,bij": (lambda x, w: jnp.einsum("bkj,bij->ikb", x, w), jnp.arange(16.0).reshape(2, 2, 4), Q),
    "experts": (lambda x, w: jnp.einsum("ted,edf->tef", x, w), jnp.ones((5, 2, 3)), Q),
    "scale kept and contracted": (lambda x, w: jnp.einsum("td,edf->tef", x, w), jnp.cos(jnp.arange(15.0)).reshape(5, 3), Q),
    "unmapped x": (lambda x, w: jax.vmap(lambda w: w.T @ x)(w), jnp.cos(jnp.arange(15.0)).reshape(3, 5), Q),
    "all contracted": (lambda x, w: jnp.einsum("bij,bij->", x, w), jnp.ones((2, 3, 4)), Q),
    "low rank": (lambda x, w: x @ w + (x @ jnp.ones((3, 1))) @ jnp.ones((1, 4)), X, M),
    "one batched axis of x": (lambda x, w: jax.vmap(lambda x, w: w @ x)(x, w), jnp.ones((2, 4)), Q),
}

STRUCTURE = {
    "merge": lambda q: q.reshape(6, 4),
    "split rows": lambda q: q.reshape(2, 3, 1, 4),
    "transpose": lambda q: q.transpose(1, 0, 2),
    "last axis first": lambda q: q.transpose(2, 0, 1),
    "joined rows": lambda q: jnp.concatenate([q, q], axis=2),
    "transpose columns": lambda q: q.transpose(1, 0, 2).swapaxes(1, 2),
    "columns and back": lambda q: q.swapaxes(1, 2)[1:].swapaxes(1, 2),
    "merged columns": lambda q: q[:, None].swapaxes(2, 3).reshape(2, 4, 3),
    "cast": lambda q: q.astype(jnp.bfloat16),
    "slice": lambda q: q[:, ::2, 1:3],
    "layer": lambda q: q[1],
    "last": lambda q: q[-1],
    "traced layer": lambda q: jax.jit(lambda q, i: q[i])(q, 1),
    "negative traced layer": lambda q: jax.jit(lambda q, i: q[i])(q, -2),
    "window": lambda q: lax.dynamic_slice(q, (0, jnp.int32(2), 0), (2, 2, 4)),
    "unstack": lambda q: jnp.unstack(q)[1],
    "new axis": lambda q: q[:, None],
    "trailing axis": lambda q: q[..., None],
    "broadcast": lambda q: jnp.broadcast_to(q, (5, 2, 3, 4)),
    "concatenate": lambda q: jnp.concatenate([q, q[:1]]),
    "stack": lambda q: jnp.stack([q, -q]),
    "split": lambda q: jnp.split(q, 3, axis=1)[1],
    "split columns": lambda q: jnp.split(q, 2, axis=2)[1],
    "reverse": lambda q: q[::-1, :, ::-1],
    "blocks by index": lambda q: q[jnp.array([1, 0, 1])],
    "take blocks": lambda q: jnp.take(q, jnp.array([[1], [5]]), axis=0, mode="fill", fill_value=2.5),
    "rows of columns": lambda q: jnp.take(q.swapaxes(1, 2), jnp.array([1, 0]), axis=0),
    "scaled": lambda q: 2.0 * q * 3.0 / 4.0,
    "scaled along axes": lambda q: q * jnp.arange(1.0, 4.0)[:, None] / jnp.full((2, 1, 1), 2.0),
    "copy": lambda q: jnp.array(q, copy=True),
    "barrier": lambda q: lax.optimization_barrier((q, 1))[0],
    "stop": lax.stop_gradient,
    "choice": lambda q: jnp.where(jnp.sum(jnp.ones(2)) > 1, q, -q),
    "nested jit": lambda q: jax.jit(lambda q: q[0])(q),
}

ROWS = {
    "index": lambda t, i: t[i],
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "take, filled": lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=2.5),
    "clip": lambda t, i: t.at[i].get(mode="clip"),
    "fill": lambda t, i: t.at[i].get(mode="fill"),
    "fill with": lambda t, i: t.at[i].get(mode="fill", fill_value=-1.5),
    "in bounds": lambda t, i: t.at[i % 2].get(mode="promise_in_bounds"),
    "unsigned": lambda t, i: t[(i % 2).astype("uint8")],
    "vmap": lambda t, i: jax.vmap(lambda i: t[i])(i),
    "one row": lambda t, i: t[i[0, 1]],
    "vmap of one row": lambda t, i: jax.vmap(jax.vmap(lambda i: t[i]))(i),
    "both mapped": lambda t, i: jax.vmap(lambda t, i: t[i])(jnp.stack([t, -t]), i),
}


def same(f, *args, tol=1e-5):
    """``f`` lifted gives what it gives on the dense arguments: eagerly, jitted, differentiated."""
    plain = as_dense(args)
    receipt = Receipt()
    want = f(*plain)
    for run in (lift(f, "error", receipt), jax.jit(lift(f, "error"))):
        got = run(*args)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), want)
        jax.tree.map(lambda a, b: close(dense(a).astype("float32"), b.astype("float32"), tol), got, want)
    assert receipt.natives and not receipt.densified
    floats = tuple(i for i, x in enumerate(plain) if jnp.issubdtype(x.dtype, jnp.floating))

    def total(g):
        return lambda *xs: jnp.sum(jnp.sin(dense(g(*xs)).astype("float32")))

    got = jax.grad(total(lift(f)), floats)(*args)
    jax.tree.map(lambda a, b: close(a, b, tol), got, jax.grad(total(f), floats)(*plain))
    got = jax.jvp(lambda *xs: total(lift(f))(*put(args, floats, xs)), *pushed(args, plain, floats))[1]
    close(got, jax.jvp(lambda *xs: total(f)(*put(plain, floats, xs)), *pushed(plain, plain, floats))[1], 10 * tol)


def put(args, places, xs):
    return [xs[places.index(i)] if i in places else a for i, a in enumerate(args)]


def pushed(args, plain, floats):
    return tuple(args[i] for i in floats), tuple(jnp.cos(plain[i]) for i in floats)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    f, x, w = PRODUCTS[name]
    same(f, x, w)


@pytest.mark.parametrize("name", ["x @ w", "bij,bjk", "experts"])
def test_products_in_low_precision(name):
    f, x, w = PRODUCTS[name]
    same(f, x.astype(jnp.bfloat16), quantize(dense(w).astype(jnp.bfloat16)), tol=4e-2)
    same(lambda x, w: f(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), x, w, tol=4e-2)


def test_products_of_two_hi_values():
    same(lambda a, b: a @ b.T, M, M)
    same(lambda a, b: a.T @ b, M, M)
    same(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), Q, Q)
    same(lambda a, b: jnp.einsum("bij,cil->bjcl", a, b), Q, Q)  # both scales on kept and contracted axes


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_stays_on_the_codes(name):
    f = STRUCTURE[name]
    same(f, Q)
    assert not isinstance(lift(f, "error")(Q), jax.Array)


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_read_from_the_codes(name):
    table = quantize(jnp.sin(jnp.arange(12.0)).reshape(4, 3))
    same(ROWS[name], table, IDS)
    assert isinstance(lift(ROWS[name], "error")(table, IDS), jax.Array)


def test_mapped_after_lifting():
    f = lift(lambda x, w: x @ w, "error")
    close(jax.vmap(f)(jnp.ones((2, 5, 3)), Q), jnp.ones((2, 5, 3)) @ dense(Q))
    close(jax.vmap(f, (0, None))(jnp.ones((2, 5, 3)), M), jnp.ones((2, 5, 3)) @ dense(M))
    got = jax.vmap(jax.grad(lambda w, x: jnp.sum(f(x, w) ** 2)))(Q, jnp.ones((2, 5, 3)))
    close(got, jax.vmap(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)))(dense(Q), jnp.ones((2, 5, 3))))


REFUSED = {
    "rows split": (lambda q: q.reshape(3, 8), "reshape"),
    "integers": (lambda q: q.astype("int32"), "convert_element_type"),
    "joined rows": (lambda q: jnp.concatenate([q, q[:, :, :2]], axis=2), "concatenate"),
    "element by element": (lambda q: jnp.where(jnp.ones((2, 3, 4), bool), q, -q), "select_n"),
    "array of factors": (lambda q: q * jnp.arange(24.0).reshape(2, 3, 4), "mul"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_the_codes_becomes_dense(name):
    f, primitive = REFUSED[name]
    receipt = Receipt()
    close(dense(lift(f, "allow", receipt)(Q)), f(dense(Q)))
    assert [line for line in receipt.densified if line.startswith(f"{primitive} makes q8[")]
    with pytest.raises(TypeError, match=f"no op with the reference {primitive}"):
        lift(f, "error")(Q)


def test_what_no_op_runs_becomes_dense_and_is_announced_with_its_place():
    q = quantize(X)
    with pytest.warns(UserWarning, match=r"exp makes q8\[2,3\] dense \(24 bytes\), at test_lift.py:\d+ \(test_what_"):
        close(lift(jnp.exp)(q), jnp.exp(dense(q)))
    with pytest.raises(TypeError, match=r"at test_lift.py:\d+ \(test_what.*no op with the reference exp"):
        lift(jnp.exp, "error")(q)
    with pytest.raises(ValueError, match="fallback"):
        lift(jnp.exp, "never")  # type: ignore[arg-type]


def test_each_place_is_announced_once():
    receipt = Receipt()
    f = lift(lambda q: jnp.exp(q) + jnp.exp(q), receipt=receipt)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for run in (f, f, jax.jit(f), lambda q: jax.jit(f)(q)):
            run(M)
            assert len(receipt.densified) == 2  # of the last run
        f(Q)
    assert len(seen) == 2 and "q8[2,3,4]" in str(seen[1].message) and seen[0].filename.endswith("test_lift.py")
    strict = lift(jnp.exp, "error")
    for _ in range(2):
        with pytest.raises(TypeError, match="exp makes"):
            strict(M)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lift(jnp.exp, "allow")(M)


def test_a_program_is_traced_once_for_its_types_and_statics():
    traces = []

    @jax.jit
    def inner(x, w):
        traces.append("inner")
        return jnp.tanh(x @ w)

    def f(x, w, scale=1.0, *, flip=False):
        traces.append("f")
        return inner(-x if flip else x, w) * scale

    lifted, other = lift(f, "error"), X + 1
    close(lifted(X, M), jnp.tanh(X @ dense(M)))
    assert traces == ["f", "inner"]
    with jax.no_tracing():
        lifted(other, M)
        lifted(X, M)
    jax.grad(lambda x: jnp.sum(lifted(x, M)))(X)
    assert traces == ["f", "inner"]
    close(lifted(X, M, flip=True), -lifted(X, M))
    assert traces == ["f", "inner", "f"]
    # equal, but not the same program: 0.0 and -0.0, 1 and True
    signs = [bool(jnp.signbit(lifted(jnp.abs(X), M, scale)[0, 0])) for scale in (0.0, -0.0, 0.0, -0.0)]
    assert signs == [signs[0], not signs[0]] * 2 and len(traces) == 5
    picked = lift(lambda w, which: w[0] if which is True else w[1], "error")
    close(dense(picked(M, 1)), dense(M)[1])
    close(dense(picked(M, True)), dense(M)[0])


def test_statics_numpy_scalars_pytrees_and_keywords():
    def f(tree, *, activation, factor, training):
        x, w = tree["x"], tree["layers"][0]
        y = activation(x @ w) * factor
        return {"y": y, "w": w, "n": (y if training else None)}

    args = {"x": X, "layers": [M]}
    kw = {"activation": jnp.tanh, "training": False}
    got = lift(f, "error")(args, factor=np.float32(3.0), **kw)
    close(got["y"], jnp.tanh(X @ dense(M)) * 3)
    assert isinstance(got["w"], QArray) and got["n"] is None

    class Box:  # a static that cannot be hashed
        __hash__ = None  # type: ignore[assignment]
        value = 2.0

    close(lift(lambda w, box: w @ jnp.ones(4) * box.value)(M, Box()), dense(M) @ jnp.ones(4) * 2)
    traces = []
    g = lift(lambda w, c: (traces.append(0), w * c)[1], "error")
    for c in (np.float32(2.0), np.float32(3.0)):
        close(dense(g(M, c)), dense(M) * c)
    assert len(traces) == 1


def test_sharded():
    stack = jnp.sin(jnp.arange(96.0)).reshape(4, 3, 8)
    want = jnp.einsum("eti,eij->etj", jnp.ones((4, 8, 3)), dense(quantize(stack)))
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        for spec, out in ((jax.P("i"), "float32[4@i,8,8]"), (jax.P(None, None, "i"), "float32[4,8,8@i]")):
            q = quantize(jax.device_put(stack, spec))
            x = jax.device_put(jnp.ones((4, 8, 3)), jax.P(*spec[:1]))
            f = lift(lambda x, w: jnp.einsum("eti,eij->etj", x, w), "error")
            got = f(x, q)
            assert str(jax.typeof(got)) == out
            close(jax.device_get(got), want)
            g = jax.jit(jax.grad(lambda x, q, f=f: jnp.sum(f(x, q) ** 2), (0, 1)))(x, q)
            assert [str(jax.typeof(a)) for a in g] == [str(jax.typeof(dense(a))) for a in (x, q)]
        f = lift(lambda x, w: lax.scan(lambda c, w: (c + x @ w, None), jnp.zeros_like(x @ w[0]), w)[0], "error")
        q = quantize(jax.device_put(stack, jax.P(None, None, "i")))
        close(jax.device_get(f(jnp.ones((8, 3)), q)), want.sum(0))


GLOBAL = M


class Model:
    """A pytree that is called."""

    def __init__(self, w, name="m"):
        self.w, self.name = w, name

    def __call__(self, x):
        return x @ self.w

    def transposed(self, x):
        return x @ self.w.T


jax.tree_util.register_pytree_node(Model, lambda m: ((m.w,), m.name), lambda name, ws: Model(*ws, name))


def test_within_shard_map():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    q = quantize(jnp.sin(jnp.arange(32.0)).reshape(4, 8))

    def f(x, w):
        part = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(jax.P(), jax.P(None, "i")), out_specs=jax.P(None, "i"))
        rows = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "i"), mesh=mesh, in_specs=(jax.P(None, "i"), jax.P("i")), out_specs=jax.P()
        )
        same = jax.shard_map(lambda w: w, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
        return part(x, w.T) + rows(x, same(w.T))

    x, receipt = jnp.cos(jnp.arange(16.0)).reshape(2, 8), Receipt()
    for run in (lift(f, "error", receipt), jax.jit(lift(f, "error"))):
        close(run(x, q), f(x, dense(q)), 1e-4)
    assert len(receipt.natives) == 4
    assert str(jax.make_jaxpr(lift(f, "error"))(x, q)).count("shard_map[") == 3
    total = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
    got = jax.jit(jax.grad(total(lift(f, "error")), (0, 1)))(x, q)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), got, jax.grad(total(f), (0, 1))(x, dense(q)))


def test_closures():
    m, stack = M, Q

    def inner(x):
        return x @ m if x is not None else inner(x)

    params, calls = {"w": [m, 2]}, []

    def default(x, a=M, *, b=M):
        calls.append(1)
        return jnp.stack([x @ a, x @ b])

    T = quantize(W.T)
    held = {
        "typax.matmul": lambda x: typax.matmul(x, m),
        "in a tree": lambda x: x @ params["w"][0],
        "by a function that refers to itself": inner,
        "by one that it calls": lambda x: inner(x) + 1,
        "in a list of functions": lambda x, fs=[inner, jnp.tanh]: fs[1](fs[0](x)),
        "defaults": default,
        "a model": Model(M),
        "a method": Model(T).transposed,
        "partial": functools.partial(lambda w, x: x @ w, M),
        "partial by keyword": functools.partial(lambda x, *, w: x @ w, w=M),
        "in a loop": lambda x: lax.scan(lambda c, w: (c + w @ w.T, None), jnp.zeros((3, 3)), stack)[0] + x[0, 0],
        "jitted within": lambda x: jax.jit(lambda x: x @ m)(x),
    }
    for f in held.values():
        receipt, arrays = Receipt(), _closures.held(f)
        got = lift(f, "error", receipt)(X)
        assert receipt.natives and not receipt.densified
        assert arrays is not None
        close(got, arrays.rebuild(as_dense(arrays.values))(X))
        close(jax.jit(lift(f, "error"))(X), got)
    assert len(calls) == 3  # lifted twice, and once on arrays
    assert _closures.held(lambda x: x @ X) is None
    g = lift(lambda x: x @ params["w"][0], {"w": "allow", "*": "error"}, activations={"w": "dynamic"})
    close(g(X), typax.matmul(X, M, activations="dynamic"))
    params["w"][0] = quantize(-dense(M))  # read when it is called, as an argument is
    close(g(X), -typax.matmul(X, M, activations="dynamic"))
    close(lift(lambda x: typax.matmul(x, GLOBAL), "error")(X), X @ dense(M))
    for f in (lambda x: x @ GLOBAL, lambda x: x @ quantize(x)):
        with pytest.raises(TypeError, match="give it to the lifted function as an argument"):
            lift(f)(X)

    def outer(x):  # a program being traced is closed over: another one each time
        return lift(lambda w: x @ w, "error")(M)

    close(jax.jit(outer)(X), X @ dense(M))
    close(jax.grad(lambda x: jnp.sum(outer(x) ** 2))(X), jax.grad(lambda x: jnp.sum((x @ dense(M)) ** 2))(X))
    g = None

    def twice(x):
        nonlocal g
        g = g or lift(lambda w: x @ w, "error")
        return g(M)

    close(twice(X), X @ dense(M))


@typax.op
def gated(x, w, *, cut=0.0):
    """An op of one's own, in a program that knows it."""
    return jnp.maximum(x @ w, cut)


def test_ops_of_the_program_run_by_their_implementations():
    seen = []

    def plain(x, w, p):
        y = typax.matmul(x, w, activations="dynamic")
        return gated(y, p, cut=0.5) + jax.jit(lambda y: typax.matmul(y, p))(y)

    P = quantize(jnp.cos(jnp.arange(16.0)).reshape(4, 4))
    receipt = Receipt()
    want = typax.matmul(X, M, activations="dynamic")
    want = jnp.maximum(want @ dense(P), 0.5) + want @ dense(P)
    f = lift(plain, "error", receipt)  # gated has no implementation: by its reference
    close(f(X, M, P), want)
    assert [x.primitive for x in receipt.lines] == ["matmul", "dot_general", "matmul"]
    close(lift(plain, "error")(X, dense(M), dense(P)), plain(X, dense(M), dense(P)))

    @gated.impl
    def _(x: jax.Array, w: QArray, *, cut: float = 0.0):
        seen.append(cut)
        return jnp.maximum(typax.matmul(x, w), cut)

    close(f(X, M, P), want)
    assert seen == [0.5] and [x.primitive for x in receipt.lines] == ["matmul", "gated", "matmul"]
    g = jax.grad(lambda x, p: jnp.sum(f(x, M, p)), (0, 1))(X, P)
    slope = lambda x, p: jnp.sum(jnp.maximum(x @ dense(M) @ p, 0.5) + x @ dense(M) @ p)
    jax.tree.map(lambda a, b: close(a, b, 0.05), g, jax.grad(slope, (0, 1))(X, dense(P)))
    step = lambda x, p: jax.grad(lambda x: jnp.sum(gated(x, p)))(x)  # a program that differentiates
    close(lift(step, "error")(want, P), step(want, dense(P)))


def test_large_weights_on_either_side():
    w = quantize(jnp.sin(jnp.arange(520.0 * 512)).reshape(520, 512))
    for f, x in ((lambda w, x: w @ x, jnp.ones((512, 2))), (lambda w, x: x @ w, jnp.ones((2, 520)))):
        for y in (x, x[:, 0] if x.shape[0] == 512 else x[0]):
            close(jax.jit(lift(f, "error"))(w, y), f(dense(w), y), 1e-3)
