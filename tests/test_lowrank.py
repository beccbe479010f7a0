"""Low-rank matrices against the dense ones; the compiled programs never hold an m × n array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import QUICK
from _util import close

import typax
from typax import DenseLowRank, FactoredRank1, LowRank, QArray, Rank1, Sum, dense, factors, matmul, outer, quantize

pytestmark = pytest.mark.core

COL, ROW = jnp.arange(6.0) / 6, jnp.arange(5.0) / 5
LEFT, RIGHT = jnp.sin(jnp.arange(12.0)).reshape(6, 2), jnp.cos(jnp.arange(10.0)).reshape(2, 5)
ACTS = jnp.sin(jnp.arange(18.0)).reshape(3, 6)
VALUES = {
    LowRank: LowRank(LEFT, RIGHT),
    DenseLowRank: DenseLowRank(LEFT, RIGHT),
    Rank1: Rank1(COL, ROW),
    FactoredRank1: FactoredRank1(COL, ROW),
}
every = pytest.mark.parametrize("cls", VALUES)
factored = pytest.mark.parametrize("cls", [LowRank, FactoredRank1])
WRAPS = [lambda f: f, jax.jit, lambda f: jax.jit(jax.checkpoint(f))]
wraps = pytest.mark.parametrize("wrap", WRAPS, ids=["eager", "jit", "checkpoint"])


def plain(cls):
    """What a value of the class stands for, as a function of its factors."""
    return jnp.outer if issubclass(cls, Rank1) else jnp.matmul


def loss(x, w):
    return jnp.sum(matmul(x, w) ** 2)


def test_the_values_that_the_guide_to_hijax_prints():
    r1 = outer(COL, ROW)
    assert str(jax.typeof(r1)) == "r1[6,5]"
    close(matmul(jnp.ones((3, 6)), r1), jnp.ones((3, 6)) @ jnp.outer(COL, ROW))
    jaxpr = " ".join(str(jax.make_jaxpr(matmul)(ACTS, r1)).split()).replace("call_hi_primitive[_prim=matmul[]]", "matmul")
    assert jaxpr == "{ lambda ; a:f32[3,6] b:r1[6,5]. let c:f32[3,5] = matmul a b in (c,) }"
    assert str(jax.typeof(jax.grad(loss, 1)(ACTS, r1))) == "float32[6,5]"
    got = jax.grad(lambda u, v: loss(ACTS, outer(u, v)), (0, 1))(COL, ROW)
    want = jax.grad(lambda u, v: loss(ACTS, jnp.outer(u, v)), (0, 1))(COL, ROW)
    assert [str(jax.typeof(g)) for g in got] == ["float32[6]", "float32[5]"]
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-4)


@every
@wraps
def test_products_on_either_side_with_vectors_and_stacks(cls, wrap):
    w, d = VALUES[cls], dense(VALUES[cls])
    stack = jnp.stack([ACTS, -ACTS])
    for x in (ACTS, ACTS[0], stack):
        close(wrap(matmul)(x, w), x @ d)
    for y in (d.T @ ACTS.T, ACTS[0, :5], jnp.stack([d.T, -d.T])):
        close(wrap(matmul)(w, y), d @ y)
    close(wrap(lambda w: dense(w.transpose()))(w), d.T)
    for a, b in zip(wrap(factors)(w), w.components(), strict=True):
        close(a, b)


@pytest.mark.parametrize("first", VALUES)
@pytest.mark.parametrize("second", VALUES)
def test_a_product_of_two_is_one(first, second):
    a, b = VALUES[first], VALUES[second].transpose()
    c = matmul(a, b)
    is_dense = {first, second} & {DenseLowRank, Rank1}
    both = issubclass(first, Rank1) and issubclass(second, Rank1)
    assert type(c) is ((Rank1 if is_dense else FactoredRank1) if both else (DenseLowRank if is_dense else LowRank))
    close(dense(c), dense(a) @ dense(b))
    if type(c) in (first, second) and type(a) is type(b):
        f = lambda a, b: jnp.sum(jnp.sin(dense(matmul(a, b))))
        got = jax.grad(f, (0, 1))(a, b)
        if is_dense:
            want = jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), (0, 1))(dense(a), dense(b))
            for g, t in zip(got, want, strict=True):
                close(g, t)
        else:
            build = plain(first)
            want = jax.grad(lambda a, b: jnp.sum(jnp.sin(build(*a) @ build(*b))), (0, 1))(a.components(), b.components())
            for g, t in zip(got, want, strict=True):
                jax.tree.map(close, g.components(), t)


@every
@wraps
def test_gradients(cls, wrap):
    w, build = VALUES[cls], plain(cls)
    gx, gw = wrap(jax.grad(loss, (0, 1)))(ACTS, w)
    close(gx, jax.grad(loss)(ACTS, dense(w)))
    if cls in (DenseLowRank, Rank1):
        close(gw, jax.grad(loss, 1)(ACTS, dense(w)))
    else:
        want = jax.grad(lambda f: loss(ACTS, build(*f)))(w.components())
        jax.tree.map(close, gw.components(), want)
        moved = typax.retract(w, gw)
        assert type(moved) is cls
        close(moved.components()[0], w.components()[0] + want[0])
    tangent = "dense" if cls in (DenseLowRank, Rank1) else "componentwise"
    through = wrap(jax.grad(lambda f: loss(ACTS, outer(*f, tangent=tangent))))(w.components())
    jax.tree.map(close, through, jax.grad(lambda f: loss(ACTS, build(*f)))(w.components()))


@every
def test_hessian_vector_products_and_forward_mode(cls):
    w, d = VALUES[cls], dense(VALUES[cls])
    hvp = lambda f, x, t: jax.jvp(jax.grad(f), (x,), (t,))[1]
    close(hvp(lambda x: loss(jnp.sin(x), w), ACTS, ACTS), hvp(lambda x: loss(jnp.sin(x), d), ACTS, ACTS), 1e-4)
    t = jax.grad(loss, 1)(ACTS, w)
    got = hvp(lambda w: loss(ACTS, w), w, t)
    if cls in (DenseLowRank, Rank1):
        close(got, hvp(lambda d: loss(ACTS, d), d, t), 1e-4)
    else:
        want = hvp(lambda f: loss(ACTS, plain(cls)(*f)), w.components(), t.components())
        jax.tree.map(lambda g, x: close(g, x, 1e-4), got.components(), want)


@every
def test_mapped_and_in_loops(cls):
    w, d = VALUES[cls], dense(VALUES[cls])
    build = lambda s: cls.from_components(*(c * s for c in w.components()))
    scales = jnp.arange(1.0, 4.0)
    stack = jax.vmap(build)(scales)
    want = jnp.stack([d * s**2 for s in scales])
    assert stack.shape == (3, 6, 5)
    close(dense(stack), want)
    close(jax.vmap(matmul, (None, 0))(ACTS, stack), ACTS @ want)
    close(jax.vmap(matmul, (1, None), out_axes=1)(ACTS.T, w).T, ACTS @ d)
    close(jax.vmap(matmul)(jnp.stack([ACTS] * 3), stack), ACTS @ want)
    shared = jax.vmap(lambda c: cls.from_components(c, w.components()[1]))(jnp.stack([w.components()[0]] * 3))
    close(dense(shared), jnp.stack([d] * 3))
    gx = jax.vmap(jax.grad(loss), (None, 0))(ACTS, stack)
    close(gx, jnp.stack([jax.grad(loss)(ACTS, t) for t in want]), 1e-4)

    back = (LEFT @ RIGHT).T / 20

    def step(x, w):
        return jnp.sin(matmul(x, w) @ back), build(1.0)

    on_hi = lambda x, ws: jax.lax.scan(step, x, ws, length=3)
    on_arrays = lambda x, ws: jax.lax.scan(lambda x, w: (jnp.sin(x @ w @ back), None), x, ws)[0]
    out, ys = jax.jit(on_hi)(ACTS, stack)
    close(out, on_arrays(ACTS, want), 1e-4)
    assert ys.shape == (3, 6, 5) and type(ys) is cls
    got = jax.grad(lambda x: jnp.sum(on_hi(x, stack)[0] ** 2))(ACTS)
    close(got, jax.grad(lambda x: jnp.sum(on_arrays(x, want) ** 2))(ACTS), 1e-3)


M, N, B = 1031, 1033, 7


def big(cls):
    key = jax.random.key(0)
    shapes = [(M,), (N,)] if issubclass(cls, Rank1) else [(M, 3), (3, N)]
    return cls(*(jax.random.normal(key, s) for s in shapes)), jax.random.normal(key, (B, M))


def assert_small(f, *args):
    """The compiled program holds no m × n array, in either order, however it is stacked or typed."""
    text = jax.jit(f).lower(*args).compile().as_text()
    assert f"{B},{M}" in text, "the sizes are seen in the program"
    for shape in (f"{M},{N}]", f"{N},{M}]", f"{M},{N},", f"{N},{M},", f"[{M * N}]"):
        assert shape not in text, shape


def hvp(f, *xs):
    return jax.jvp(jax.grad(f, tuple(range(len(xs)))), xs, xs)[1]


@every
def test_the_matrix_is_never_built_with_respect_to_activations(cls):
    w, x = big(cls)
    assert_small(matmul, x, w)
    assert_small(lambda x, w: matmul(w.transpose(), x.T), x, w)
    assert_small(jax.grad(loss), x, w)
    assert_small(lambda x, w: hvp(lambda x: loss(jnp.sin(x), w), x), x, w)
    assert_small(lambda x, w: jax.vmap(jax.grad(lambda x: loss(jnp.sin(x), w)))(x), x, w)
    with pytest.raises(AssertionError, match="1031,1033"):
        assert_small(lambda x, w: x @ jnp.sin(dense(w)), x, w)


@factored
def test_the_matrix_is_never_built_with_respect_to_factors(cls):
    w, x = big(cls)
    assert_small(jax.grad(loss, (0, 1)), x, w)
    t = jax.grad(loss, 1)(x, w)
    assert_small(lambda x, w, t: jax.jvp(jax.grad(loss, (0, 1)), (x, w), (x, t))[1], x, w, t)
    assert_small(lambda x, w: jax.grad(jax.checkpoint(loss), (0, 1))(x, w), x, w)
    through = lambda x, left, right: loss(x, outer(left, right, tangent="componentwise"))
    assert_small(jax.grad(through, (0, 1, 2)), x, *w.components())
    assert_small(lambda *a: hvp(through, *a), x, *w.components())
    assert_small(jax.grad(typax.lift(lambda x, w: jnp.sum((x @ w) ** 2), fallback="error"), (0, 1)), x, w)


@every
def test_unchanged_programs(cls):
    w, d = VALUES[cls], dense(VALUES[cls])
    programs = {
        "x w": (lambda x, w: x @ w, ACTS),
        "transposes": (lambda x, w: (w.T @ x.T).T @ w.T, ACTS),
        "from the left": (lambda x, w: w @ (w.T @ x), ACTS.T),
    }
    squares = lambda x, w, f: jnp.sum(f(x, w) ** 2)
    for f, x in programs.values():
        lifted = typax.lift(f, fallback="error")
        close(jax.jit(lifted)(x, w), f(x, d), 1e-4)
        close(jax.grad(squares)(x, w, lifted), jax.grad(squares)(x, d, f), 1e-3)
    twice = typax.lift(lambda w: w @ w.T, fallback="error")(w)
    close(dense(twice), d @ d.T)
    einsum = typax.lift(lambda x, w: jnp.einsum("abm,mn->anb", x, w), fallback="error")
    close(einsum(ACTS[None], w), jnp.einsum("abm,mn->anb", ACTS[None], d))
    full = typax.lift(lambda y, w: jnp.tensordot(y, w, 2), fallback="error")
    close(full(d, w), jnp.sum(d * d), 1e-4)


def test_sharded():
    with jax.set_mesh(jax.make_mesh((4,), ("i",))):
        put = lambda x, *spec: jax.device_put(x, jax.P(*spec))
        assert str(jax.typeof(outer(put(jnp.zeros(8), "i"), ROW))) == "r1[8@i,5]"
        left, right = put(jnp.ones((8, 2)), "i", None), put(jnp.arange(8.0).reshape(2, 4), None, "i")
        rows, cols = outer(left, RIGHT), outer(LEFT, right)
        assert str(jax.typeof(rows)) == "lr[8@i,5]" and str(jax.typeof(cols)) == "lr[6,4@i]"
        assert str(jax.typeof(jax.jit(matmul)(ACTS, cols))) == "float32[3,4@i]"
        close(matmul(ACTS, cols), ACTS @ (LEFT @ np.arange(8.0, dtype="float32").reshape(2, 4)))
        g = jax.jit(jax.grad(loss, 1))(ACTS, cols)
        assert [str(jax.typeof(c)) for c in g.components()] == ["float32[6,2]", "float32[2,4@i]"]
        dense_g = jax.jit(jax.grad(loss, 1))(ACTS, outer(COL, put(jnp.arange(4.0), "i")))
        assert str(jax.typeof(dense_g)) == "float32[6,4@i]"
        assert str(jax.typeof(rows.transpose())) == "lr[5,8@i]"


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
@every
def test_shard_map(cls, kind):
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(kind,))):
        narrow = issubclass(cls, Rank1)
        left = jnp.arange(8.0) if narrow else jnp.arange(16.0).reshape(8, 2)
        w = cls(jax.device_put(left / 8, jax.P("i")), ROW if narrow else RIGHT)
        square = jax.shard_map(lambda w, y: matmul(w, y) ** 2, in_specs=(cls.P(m="i"), jax.P()), out_specs=jax.P("i"))
        y = jnp.arange(10.0).reshape(5, 2)
        g = jax.jit(jax.grad(lambda w: jnp.sum(square(w, y))))(w)
        host = [np.asarray(c) for c in w.components()]
        f = lambda d: jnp.sum((d @ np.asarray(y)) ** 2)
        if cls in (DenseLowRank, Rank1):
            close(g, jax.grad(f)(plain(cls)(*host)), 1e-4)
        else:
            jax.tree.map(lambda a, b: close(a, b, 1e-4), g.components(), jax.grad(lambda h: f(plain(cls)(*h)))(tuple(host)))


# --- sums

SUMS = {
    "array": Sum(jnp.tanh(LEFT @ RIGHT), VALUES[LowRank], 0.5),
    "quantized": Sum(quantize(ACTS.T @ ACTS[:, :5]), VALUES[LowRank], 2.0),
}
sums = pytest.mark.parametrize("base", SUMS)


@sums
@wraps
def test_a_sum_is_two_products(base, wrap):
    w, d = SUMS[base], dense(SUMS[base])
    close(d, dense(w.base) + w.scale * dense(w.delta))
    close(wrap(matmul)(ACTS, w), ACTS @ d)
    close(wrap(matmul)(w, ACTS[:, :5].T), d @ ACTS[:, :5].T)
    if base == "array":
        close(wrap(matmul)(w, ACTS[0, :5]), d @ ACTS[0, :5])
    gx, gw = wrap(jax.grad(loss, (0, 1)))(ACTS, w)
    close(gx, jax.grad(loss)(ACTS, d), 1e-4)
    parts = (dense(w.base), *w.delta.components())
    want = jax.grad(lambda b, u, v: loss(ACTS, b + w.scale * (u @ v)), (0, 1, 2))(*parts)
    for g, t in zip((gw.base, *gw.delta.components()), want, strict=True):
        close(g, t, 1e-4)


@sums
def test_sums_in_unchanged_programs_and_mapped(base):
    w, d = SUMS[base], dense(SUMS[base])
    layer = typax.lift(lambda x, w: jnp.tanh(x @ w) @ w.T, fallback="error")
    close(jax.jit(layer)(ACTS, w), jnp.tanh(ACTS @ d) @ d.T, 1e-4)
    adapters = jax.vmap(lambda s: outer(LEFT * s, RIGHT))(jnp.arange(4.0))
    many = jax.vmap(lambda a: matmul(ACTS, Sum.from_components(w.base, a, scale=0.5)))(adapters)
    close(many, jnp.stack([ACTS @ (dense(w.base) + 0.5 * s * LEFT @ RIGHT) for s in range(4)]), 1e-4)


def test_the_delta_alone_is_trained():
    key = jax.random.key(1)
    base, (delta, x) = quantize(jax.random.normal(key, (M, N))), big(LowRank)
    build = lambda base, delta: Sum.from_components(base, delta, scale=0.5)
    f = lambda delta, x, base: loss(x, build(base, delta))
    text = jax.jit(jax.grad(f)).lower(delta, x, base).compile().as_text()
    assert f"s8[{M},{N}]" in text
    for g, c in zip(jax.jit(jax.grad(f))(delta, x, base).components(), delta.components(), strict=True):
        assert g.shape == c.shape

    class Frozen(QArray, name="frozen", tangent="none"):
        pass

    w = Sum(Frozen(base.qvalue, base.scale), delta)
    g = jax.jit(jax.grad(loss, 1))(x, w)
    assert (
        str(jax.typeof(g))
        == f"sum.tangent{{base:float0[{M},{N}],delta:lr.tangent{{left:float32[{M},3],right:float32[3,{N}]}}}}"
    )


# --- axes and numbers


MOVES = {
    "transpose": lambda w: w.T, "rows": lambda w: w[1:5:2], "columns": lambda w: w[:, 1:4],
    "backwards": lambda w: w[::-1, ::-1], "scaled": lambda w: -2 * w / jnp.arange(1.0, 7.0)[:, None],
    "stacked": lambda w: jnp.broadcast_to(w[None], (3, 6, 5))[1:].reshape(2, 1, 6, 5)[:, 0].swapaxes(1, 2),
    "window": lambda w: jax.lax.dynamic_slice(w, (jnp.int32(2), 0), (2, 5)), "cast": lambda w: w.astype(jnp.bfloat16),
}  # fmt: skip
ROWS = {"row": lambda w: w[3], "rows": lambda w: w[jnp.array([[5, 0], [1, 9]])], "column": lambda w: w[:, -1]}


@pytest.mark.parametrize("kind", [LowRank, Rank1, Sum])
def test_axes_and_numbers_of_unchanged_programs(kind):
    w = Sum(quantize(LEFT @ RIGHT), VALUES[LowRank], 0.5) if kind is Sum else VALUES[kind]
    d = dense(w)
    if kind is not Sum:  # of which the base has one scale for all columns
        close(dense(typax.lift(lambda w: w * jnp.arange(5.0), "error")(w)), d * jnp.arange(5.0))
    many = lambda of: lambda w: {k: f(w) for k, f in of.items()}
    receipt = typax.Receipt()
    got = jax.jit(typax.lift(many(MOVES | {f"{k} read": f for k, f in ROWS.items()}), "error", receipt))(w)
    assert not receipt.densified
    for k, f in MOVES.items():
        assert isinstance(got[k], typax.Value) and (got[k].shape, got[k].dtype) == (f(d).shape, f(d).dtype), k
        close(dense(got[k]).astype("float32"), f(d).astype("float32"), 4e-2 if k == "cast" else 1e-5)
    for k, f in ROWS.items():
        close(got[f"{k} read"], f(d))
    total = lambda w: sum(jnp.sum(jnp.sin(dense(x).astype("float32"))) for k, x in many(MOVES)(w).items() if k != "cast")
    grads = [jax.jit(jax.grad(f))(w) for f in (typax.lift(total, "allow"), lambda w: total(dense(w)))]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        same = zip(a.components(), b.components(), strict=True) if isinstance(a, typax.Value) else [(a, b)]
        for x, y in same:
            if not isinstance(x, typax.Value):
                close(x, y, 1e-4)


STACK = jnp.sin(jnp.arange(48.0)).reshape(4, 6, 2), jnp.cos(jnp.arange(40.0)).reshape(4, 2, 5)
HEADS = jnp.sin(jnp.arange(24.0)).reshape(6, 4), jnp.cos(jnp.arange(24.0)).reshape(4, 6)  # rank 4: [6, 6]
PRODUCTS = {  # of x [3, 6], a matrix [6, 5], a stack [4, 6, 5] and a matrix [6, 6] that heads are cut from
    "columns joined": lambda x, w, b, h: x @ jnp.concatenate([w, -w], 1),
    "rows joined": lambda x, w, b, h: jnp.concatenate([x, x], 1) @ jnp.concatenate([w, 2 * w], 0),
    "stacks joined": lambda x, w, b, h: x @ jnp.concatenate([b, -b[:2]]),
    "stacked": lambda x, w, b, h: x @ jnp.stack([w, -w]),
    "stacked last": lambda x, w, b, h: jnp.einsum("bd,dko->bko", x, jnp.stack([w, -w], 1)),
    "split": lambda x, w, b, h: [x @ part for part in jnp.split(w, [2], 1)],
    "unstacked": lambda x, w, b, h: [x @ part for part in jnp.unstack(b)],
    "chosen": lambda x, w, b, h: x @ jnp.where(x[0, 0] > 0, w, -w),
    "copied": lambda x, w, b, h: x @ jnp.copy(w),
    "repeated": lambda x, w, b, h: x @ jnp.broadcast_to(w, (2, 6, 5)),
    "a stack": lambda x, w, b, h: jnp.einsum("bd,ldk->lbk", x, b),
    "mapped": lambda x, w, b, h: jax.vmap(lambda w: jnp.tanh(x @ w))(b),
    "one each": lambda x, w, b, h: jax.vmap(jnp.matmul)(jnp.stack([x, -x, x, 2 * x]), b),
    "experts": lambda x, w, b, h: jnp.einsum("bd,bdk->bk", x, b[jnp.array([0, 3, 0])]),
    "an expert each": lambda x, w, b, h: jax.vmap(lambda x, i: x @ b[i])(x, jnp.array([1, 3, 9])),
    "in runs": lambda x, w, b, h: jax.lax.ragged_dot(x, b, jnp.array([1, 0, 1, 1])),
    "rows of each": lambda x, w, b, h: b[jnp.array([[0, 1]]), jnp.array([[5, 2]])],
    "mapped rows": lambda x, w, b, h: jax.vmap(lambda i: w[i])(jnp.array([5, 0])),
    "columns": lambda x, w, b, h: jnp.take(w, jnp.array([4, 7]), axis=1),
    "to heads": lambda x, w, b, h: jnp.einsum("bd,dhk->bhk", x, h.reshape(6, 2, 3)),
    "from heads": lambda x, w, b, h: jnp.einsum("bhk,hkd->bd", x.reshape(3, 2, 3), h.reshape(2, 3, 6)),
    "heads, turned": lambda x, w, b, h: jnp.einsum("bd,hkd->bhk", x, h.reshape(6, 2, 3).transpose(1, 2, 0) * 2.0),
    "heads, put back": lambda x, w, b, h: x @ h.reshape(6, 2, 3)[:, ::-1].reshape(6, 6),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["sum", "rank 1"])
def test_joined_stacked_and_cut_to_heads(kind):
    make = lambda a, b: FactoredRank1(a[..., 0], b[..., 0, :])
    if kind == "sum":
        make = lambda a, b: Sum(quantize(a @ b, axis=-2), LowRank(a, b), 0.5)
    values = [make(*factors) for factors in ((LEFT, RIGHT), STACK, HEADS)]
    own = [f for k, f in PRODUCTS.items() if not (kind == "rank 1" and "heads" in k)]
    run = lambda x, *values: [f(x, *values) for f in own]

    def total(f, *args):
        out = f(*args)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), out

    def both(f):
        return jax.jit(jax.grad(functools.partial(total, f), (0, 1, 2, 3), has_aux=True), compiler_options=QUICK)

    lifted, plain = typax.lift(run, "error"), lambda x, *values: run(x, *map(dense, values))
    got, want = (_parts(both(f)(ACTS, *values)) for f in (lifted, plain))
    jax.tree.map(lambda a, b: close(a, b, 2e-3), got, want)


def _parts(tree):
    """The components of values that are gradients, down to the arrays."""
    return [_parts(x.components()) if isinstance(x, typax.Value) else x for x in jax.tree.leaves(tree)]


ADDED = {
    "plain": lambda w, a, b, c: w + a @ b,
    "scaled": lambda w, a, b, c: 0.5 * (a @ b) + w,
    "by a traced number": lambda w, a, b, c: w + c * jnp.einsum("mr,rn->mn", a, b),
    "taken away": lambda w, a, b, c: w - a @ b / 4,
    "turned": lambda w, a, b, c: (w.T + (a @ b).T).T,
}


def test_what_a_program_adds_up_is_two_products():
    w, a, b = quantize(jnp.tanh(LEFT @ RIGHT), axis=0), LEFT[:, :1], RIGHT[:1]
    for name, added in ADDED.items():
        f = lambda x, w, a, b, c, added=added: jnp.sum(jnp.sin(x @ added(w, a, b, c)))
        receipt = typax.explain(f)(ACTS, w, a, b, jnp.float32(2))
        assert not receipt.densified and "sum<" in receipt.natives[-1], name
        got = jax.grad(typax.lift(f, "error"), (0, 2, 3))(ACTS, w, a, b, jnp.float32(2))
        want = jax.grad(f, (0, 2, 3))(ACTS, dense(w), a, b, jnp.float32(2))
        jax.tree.map(lambda x, y: close(x, y, 1e-4), got, want)
    used_twice = lambda x, w, a, b: (lambda d: x @ (w + d) + jnp.sum(d))(a @ b)
    assert len(typax.explain(used_twice)(ACTS, w, a, b).densified) == 1
    full_rank = lambda x, w, a: x @ (w + a @ a.T @ w)
    assert typax.explain(full_rank)(ACTS, w, jnp.ones((6, 6))).densified


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_sums_cross_a_shard_map_of_a_lifted_program(kind):
    w = Sum(quantize(jnp.sin(jnp.arange(48.0)).reshape(8, 6), axis=0), LowRank(jnp.ones((8, 2)), jnp.ones((2, 6))))
    d, x = dense(w), jnp.cos(jnp.arange(32.0)).reshape(4, 8)
    bodies = [
        (jax.P(None, "m"), jax.P("d", "m"), jnp.matmul),
        (jax.P("m"), jax.P("d"), lambda x, w: jax.lax.psum(x @ w, "m")),
    ]
    with jax.set_mesh(jax.make_mesh((2, 2), ("d", "m"), axis_types=(kind,) * 2)):
        for of_w, out, body in bodies:
            of_x = jax.P("d", of_w[0])
            f = jax.shard_map(body, in_specs=(of_x, of_w), out_specs=out)
            args = jax.device_put(x, of_x), typax.device_put(w, of_w)
            assert not typax.explain(f)(*args).densified
            got = jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(typax.lift(f, "error")(x, w) ** 2)))(*args)
            close(got, jax.grad(lambda x: jnp.sum((x @ d) ** 2))(x), 1e-4)


def test_a_summed_axis_that_is_sharded():
    w = LowRank(LEFT[:4], jnp.tile(RIGHT[:, :4], 2))  # [4, 8]
    with jax.set_mesh(jax.make_mesh((2, 2), ("d", "m"))):
        put = jax.device_put(w.right, jax.P(None, "m"))
        cut, y = LowRank(w.left, put), jax.device_put(jnp.ones((2, 8)), jax.P("d", "m"))
        f = lambda y, w: jnp.matmul(y, w.T, out_sharding=jax.P("d", None))
        close(typax.lift(f, "error")(y, cut), jnp.ones((2, 8)) @ dense(w).T)
        got = jax.grad(lambda x: jnp.sum(typax.lift(jnp.matmul, "error")(x, cut)))(
            jax.device_put(jnp.ones((2, 4)), jax.P("d"))
        )
        close(got, jnp.ones((2, 8)) @ dense(w).T)


def test_what_lies_outside_a_lookup_is_what_fills_it():
    for w in (VALUES[LowRank], VALUES[Rank1]):
        look = lambda w: jnp.take(w, jnp.array([0, 9]), axis=0, mode="fill", fill_value=7.0)
        close(typax.lift(look, "error")(w), look(dense(w)))


# --- what is refused


def test_mistakes():
    wrong = [
        (LEFT, jnp.ones((3, 5))),
        (COL, RIGHT),
        (COL, jnp.arange(5)),
        (COL, ROW.astype(jnp.bfloat16)),
        (LEFT[None], RIGHT[None]),
    ]
    for a, b in wrong:
        with pytest.raises(TypeError, match=r"typax\.outer takes vectors \[m\], \[n\] or matrices.*got .* and .*jax\.vmap"):
            outer(a, b)
    with pytest.raises(ValueError, match='tangent must be "dense" or "componentwise", got \'itself\''):
        outer(COL, ROW, tangent="itself")
    with pytest.raises(TypeError, match=r"LowRank: axis 'r' is 2 in left \(float32\[6,2\]\) but 3 in right"):
        LowRank(LEFT, jnp.ones((3, 5)))
    with pytest.raises(TypeError, match=r"matmul has no implementation for \(float32\[3,5\], lr\[6,5\]\)"):
        matmul(ACTS[:, :5], VALUES[LowRank])
    with pytest.raises(NotImplementedError, match=r"factors of \(r1\[6,5\]\) has no reference, so it has no derivative"):
        jax.grad(lambda w: jnp.sum(factors(w)[0]))(VALUES[Rank1])
    close(jax.grad(lambda w: jnp.sum(factors(w)[0]))(VALUES[LowRank]).left, jnp.ones((6, 2)))
    with pytest.raises(TypeError, match=r"Sum: axis 'm' is 6 in base \(float32\[6,5\]\) but 5 in delta \(lr\[5,6\]\)"):
        Sum(jnp.ones((6, 5)), VALUES[LowRank].transpose())


@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 2, 4, 8)])
def test_a_sum_whose_base_shares_scales_along_leading_axes(shape):
    base = jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape)
    w = Sum(quantize(base, axis=tuple(range(len(shape) - 1))), jnp.cos(base), 0.5)
    want = dense(w.base) + 0.5 * jnp.cos(base)
    close(dense(w), want)
    close(jax.jit(dense)(w), want)
    with pytest.warns(UserWarning, match="exp makes sum"):
        close(typax.lift(jnp.exp)(w), jnp.exp(want))
    x = jnp.ones((3, *shape[:-1]))
    loss = lambda w: jnp.sin(jnp.tensordot(x, w, len(shape) - 1)).sum()
    got, wanted = jax.grad(typax.lift(loss))(w), jax.grad(loss)(want)
    close(got.base, wanted)
    close(got.delta, 0.5 * wanted)
