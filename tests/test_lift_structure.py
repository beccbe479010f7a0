"""A lifted program keeps its structure: names, loops, rules, policies, effects, constants, places."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import near, normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

import typax
from typax import Receipt, dense, explain, lift, quantize

pytestmark = pytest.mark.core

N = 4
W = quantize(normal(0, N, N), axis=-2)
STACK = quantize(normal(1, 3, N, N), axis=-2)
X = normal(2, 2, N)


def equations(jaxpr):
    """All equations of a jaxpr and of those in it."""
    for e in jaxpr.eqns:
        yield e
        inner = [*e.params.values()]
        if (prim := e.params.get("_prim")) is not None:
            inner += prim.app.shown.values()
        for p in inner:
            for q in p if isinstance(p, tuple | list) else (p,):
                if hasattr(q, "eqns"):
                    yield from equations(q)


def name(e):
    prim = e.params.get("_prim")
    return e.primitive.name if prim is None else prim.app.name


@jax.custom_jvp
def squashed(x):
    return jnp.tanh(x)


squashed.defjvp(lambda p, t: (squashed(*p), 7 * t[0]))


@jax.custom_vjp
def clipped(x, w):
    return x @ w


clipped.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (5 * g, jnp.zeros_like(r[1])))

TABLE = np.arange(100_000.0, dtype=np.float32)  # a constant that nobody wants to see copied


def program(x, w, stack):
    @jax.jit
    def project(x, w):
        with jax.named_scope("inner"):
            return checkpoint_name(x @ w, "projected")

    with jax.named_scope("outer"):
        y = project(x, w)
    y = lax.scan(jax.checkpoint(lambda c, w: (squashed(c @ w), None), policy=POLICY, prevent_cse=False), y, stack)[0]
    y = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, y))[1]
    y = lax.cond(y[0, 0] > 0, lambda y: y @ w, lambda y: clipped(y, w), y)
    jax.debug.print("norm {}", jnp.sum(y))
    return y + jnp.asarray(TABLE)[:N] + clipped(x, w)


POLICY = jax.checkpoint_policies.save_only_these_names("projected")


def test_its_equations_stay_what_they_are():
    plain = jax.make_jaxpr(program)(X, dense(W), dense(STACK))
    lifted = jax.make_jaxpr(lift(program, "error"))(X, W, STACK)
    count = lambda jaxpr, what: sum(name(e) == what for e in equations(jaxpr))
    for what in (
        "scan",
        "while",
        "cond",
        "custom_jvp_call",
        "custom_vjp_call",
        "debug_print",
        "debug_callback",
        "name",
        "jit",
    ):
        assert count(lifted, what) == count(plain, what), what
    names = lambda jaxpr: sorted(e.params["name"] for e in equations(jaxpr) if name(e) == "jit")
    assert names(lifted) == names(plain) and "project" in names(plain)
    remat = {name(e): e.params for e in equations(lifted) if "remat" in name(e) or name(e) == "checkpoint"}
    (params,) = remat.values()
    assert params["policy"] is POLICY and params["prevent_cse"] is False
    (scan,) = (e for e in equations(lifted) if name(e) == "scan")
    assert scan.params["length"] == 3
    assert lifted.effects == plain.effects and lifted.effects
    assert sum(c is TABLE or getattr(c, "shape", ()) == TABLE.shape for c in lifted.consts) == 1
    assert not [e for e in equations(lifted) if name(e) == "dense"]
    text = str(lifted)
    assert text.count("dot_general") >= 5 and "q8t[4,4]" in text


def test_places_and_scopes_stay():
    receipt = explain(program)(X, W, STACK)
    first = next(x for x in receipt.lines if x.flops)
    assert first.scope.endswith("inner") and first.place[0] == __file__ and first.place[2].endswith("project")
    lifted = jax.make_jaxpr(lift(program, "error"))(X, W, STACK)
    product = next(e for e in equations(lifted) if name(e) == "dot_general")
    assert "inner" in str(product.source_info.name_stack)
    outer = next(e for e in lifted.jaxpr.eqns if e.params.get("name") == "project")
    assert str(outer.source_info.name_stack) == "outer"
    text = jax.jit(lift(program, "error")).lower(X, W, STACK).as_text(debug_info=True)
    assert "outer" in text and "inner" in text and "test_lift_structure.py" in text


def test_rules_and_policies_are_used():
    total = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
    for f in (lambda x, w: squashed(x @ w), clipped):
        got = jax.grad(total(lift(f, "error")), (0, 1))(X, W)
        near(got, jax.grad(total(f), (0, 1))(X, dense(W)), 1e-5)

    def deep(x, w):
        body = lambda x, w: checkpoint_name(jnp.sin(x @ w), "projected") @ w
        return jnp.sum(jax.checkpoint(body, policy=POLICY)(x, w) ** 2)

    kept = lambda f, w: sorted(str(jax.typeof(r)) for r in jax.tree.leaves(jax.vjp(lambda x: f(x, w), X)[1]))
    hi, lo = kept(lift(deep, "error"), W), kept(deep, dense(W))
    assert len(hi) == len(lo) and not any(t == "float32[4,4]" for t in hi)  # the weight is kept as it is held
    near(jax.grad(lift(deep, "error"), (0, 1))(X, W), jax.grad(deep, (0, 1))(X, dense(W)), 1e-5)


def test_effects_happen_in_order(capfd):
    def f(x, w):
        jax.debug.print("a {}", x[0, 0], ordered=True)
        y = lax.fori_loop(0, 2, lambda i, x: (jax.debug.print("b {}", i, ordered=True), x @ w)[1], x)
        jax.debug.print("c", ordered=True)
        return y

    near(jax.jit(lift(f, "error"))(X, W), (X @ dense(W)) @ dense(W), 1e-5)
    jax.effects_barrier()
    assert re.findall(r"^[abc]", capfd.readouterr().out, re.M) == ["a", "b", "b", "c"]


def test_lift_within_lift():
    inner = lift(lambda w, x: jnp.tanh(x @ w), "error")
    outer = lift(lambda w, x: inner(w, x) @ w, "error")
    near(outer(W, X), jnp.tanh(X @ dense(W)) @ dense(W), 1e-5)
    near(
        jax.jit(jax.grad(lambda x: jnp.sum(outer(W, x))))(X),
        jax.grad(lambda x: jnp.sum(jnp.tanh(x @ dense(W)) @ dense(W)))(X),
        1e-5,
    )
    # the inner one knows how its own products are to be run, and what may become dense
    told = lift(lambda w, x: lift(jnp.matmul, activations="dynamic")(x, w) + x @ w, "error")
    near(told(W, X), typax.matmul(X, W, activations="dynamic") + X @ dense(W), 1e-5)
    receipt = Receipt()
    loose = lift(lambda w: lift(jnp.exp, "allow")(w) + 1, "error", receipt)
    near(loose(W), jnp.exp(dense(W)) + 1, 1e-5)
    assert len(receipt.densified) == 1
    strict = lift(lambda w: lift(jnp.exp, "error")(w), "allow")
    with pytest.raises(TypeError, match="exp makes q8t"):
        strict(W)


def test_statics_by_keyword():
    def f(w, x, *, activation, scale, training=False, name="layer", axes=(0, 1), table=None):
        y = activation(x @ w) * scale
        assert isinstance(training, bool) and isinstance(name, str) and axes == (0, 1)
        return y if not training else (y, w, name and table["w"])

    run = lift(f, "error")
    near(run(W, x=X, activation=jnp.tanh, scale=2), jnp.tanh(X @ dense(W)) * 2, 1e-5)
    y, w, t = run(W, X, activation=jnp.sin, scale=0.5, training=True, table={"w": STACK})
    assert jax.typeof(w) == jax.typeof(W) and jax.typeof(t) == jax.typeof(STACK)
    near(y, jnp.sin(X @ dense(W)) * 0.5, 1e-5)


def test_results_and_arguments_of_any_kind():
    def f(p, key):
        y = jax.random.uniform(key, (2, N)) * (X @ p["w"])
        return {"y": y, "act": p["act"], "n": 3, "none": None, "key": key, "w": p["w"], "name": "f", "host": np.arange(2)}

    args = {"w": W, "act": jnp.tanh}, jax.random.key(0)
    for run in (lift(f, "error"), lift(jax.tree_util.Partial(f), "error")):
        out = run(*args)
        want = f({"w": dense(W), "act": jnp.tanh}, args[1])
        near(out["y"], want["y"], 1e-5)
        assert out["act"] is jnp.tanh and out["n"] == 3 and type(out["n"]) is int and out["name"] == "f"
        assert jax.typeof(out["w"]) == jax.typeof(W) and out["key"].dtype == args[1].dtype and out["none"] is None
        assert np.array_equal(out["host"], [0, 1])


def test_records_are_the_trees_that_they_stand_for():
    record = typax.tup(W, typax.tup(jnp.ones(N), STACK))
    f = lambda t, x: jnp.tanh(x @ t[0] + t[1][0]) @ t[1][1][2]
    run = lift(f, "error")
    plain = (dense(W), (jnp.ones(N), dense(STACK)))
    near(run(record, X), f(plain, X), 1e-5)
    assert explain(f)(record, X).densified == []
    got = jax.jit(jax.grad(lambda t: jnp.sum(run(t, X))))(record)
    near(dense(got), jax.grad(lambda t: jnp.sum(f(t, X)))(plain), 1e-5)


def test_it_composes():
    f = lambda x, w: jnp.tanh(x @ w)
    run, total = lift(f, "error"), lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
    want = jax.grad(total(f), (0, 1))
    near(jax.jit(jax.grad(jax.checkpoint(total(run)), (0, 1)))(X, W), want(X, dense(W)), 1e-5)
    near(jax.vmap(jax.grad(total(run), (0, 1)), (None, 0))(X, STACK), jax.vmap(want, (None, 0))(X, dense(STACK)), 1e-5)
    deep = lambda f: lambda x, ws: lax.scan(lambda c, w: (f(c, w), None), x, ws, length=3)[0]
    near(jax.jit(deep(run))(X, STACK), deep(f)(X, dense(STACK)), 1e-5)
    near(jax.jvp(lambda x: run(x, W), (X,), (X,)), jax.jvp(lambda x: f(x, dense(W)), (X,), (X,)), 1e-5)
    near(jax.hessian(lambda x: total(run)(x, W))(X), jax.hessian(lambda x: total(f)(x, dense(W)))(X), 1e-4)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    part = lambda f: jax.shard_map(f, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i"))
    whole = jax.jit(typax.shard_map(run, mesh=mesh, in_specs=(jax.P("i"), jax.P()), out_specs=jax.P("i")))
    near(whole(X, W), part(f)(X, dense(W)), 1e-5)
    with jax.set_mesh(jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))):
        x, w = jax.device_put(X, jax.P("i")), quantize(jax.device_put(dense(W), jax.P()), axis=-2)
        y, g = jax.jit(lambda x, w: (run(x, w), jax.grad(total(run), 1)(x, w)))(x, w)
        assert jax.typeof(y).sharding.spec == jax.P("i", None) and jax.typeof(g).sharding.spec == jax.P(None, None)


def test_where_values_are():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def f(x, w):
        w = lax.with_sharding_constraint(w, jax.NamedSharding(mesh, jax.P(None, "i")))
        gather = lambda x, w: x @ lax.all_gather(w, "i", axis=1, tiled=True)
        specs = {"in_specs": (jax.P(), jax.P(None, "i")), "out_specs": jax.P(), "check_vma": False}
        return checkpoint_name(x @ w, "projected"), jax.shard_map(gather, mesh=mesh, **specs)(x, w)

    text = jax.jit(lift(f, "allow")).lower(X, W).as_text()
    assert "sdy.sharding_constraint" in text or "sharding" in text
    assert not [line for line in explain(f)(X, W).densified if line.startswith("sharding_constraint")]
    near(jax.jit(lift(f, "allow"))(X, W), f(X, dense(W)), 1e-5)
    with jax.set_mesh(jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))):
        g = lambda x, w: x @ jax.sharding.reshard(w, jax.P(None, "i"))
        x, w = jax.device_put(X, jax.P()), quantize(jax.device_put(dense(W), jax.P()), axis=-2)
        y = jax.jit(lift(g, "error"))(x, w)
        assert jax.typeof(y).sharding.spec == jax.P(None, "i")
        near(jax.device_get(y), jax.device_get(g(x, dense(w))), 1e-5)


def test_what_loops_and_branches_make_dense_is_announced_at_them():
    def f(w, x):
        y = lax.scan(lambda c, _: (jnp.sin(c), None), w, length=2)[0]
        z = lax.cond(x[0, 0] > 0, lambda: w, lambda: jnp.cos(w))
        return y + z

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        near(lift(f)(W, X), f(dense(W), X), 1e-5)
    told = [str(w.message) for w in seen]
    assert any("scan makes q8t[4,4] dense (64 bytes) before the loop" in t for t in told), told
    assert any("cond makes q8t[4,4] dense (64 bytes) at the end of a branch" in t for t in told), told
    assert all(w.filename == __file__ for w in seen)
