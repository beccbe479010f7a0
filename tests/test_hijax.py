"""The raw API: rules in the form of the newest JAX work on every supported one."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax as jax_hijax

from typax import _jax, hijax
from typax.hijax import HiPrim, Zero, is_zero

pytestmark = pytest.mark.core


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-6)


class Scale(HiPrim):
    """y = a * x for a float x and an integer a."""

    def __init__(self, a, x):
        self.in_avals, self.out_aval, self.params = (a, x), x, {}
        super().__init__()

    def expand(self, a, x):
        return a.astype(x.dtype) * x

    def jvp(self, primals, tangents):
        (a, x), (_, dx) = primals, tangents
        return self(a, x), Zero(self.out_aval.to_tangent_aval()) if is_zero(dx) else self(a, dx)

    def lin(self, nzs_in, a, x):
        return self(a, x), a

    def linearized(self, a, _, dx):
        return Zero(self.out_aval.to_tangent_aval()) if is_zero(dx) else self(a, dx)

    def transpose(self, ct, a, dx):
        dx.accum(self(a, hijax.instantiate_zeros(ct)))


def scale(cls, a, x):
    return cls(jax.typeof(a), jax.typeof(x))(a, x)


A, X = jnp.int32(3), jnp.arange(4.0)


@pytest.mark.parametrize("derived", ["vjp_from_jvp", "vjp_from_lin"])
def test_reverse_mode_derived_from_forward_mode(derived):
    class Derived(Scale):
        vjp_fwd, vjp_bwd_retval = getattr(hijax, derived)

    f = lambda x: jnp.sum(scale(Derived, A, x) ** 2)
    for grad in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.checkpoint(f))):
        close(grad(X), 18 * X)
    close(jax.jvp(f, (X,), (X,))[1], jnp.sum(18 * X * X))
    close(jax.linearize(f, X)[1](X), jnp.sum(18 * X * X))


def test_forward_mode_derived():
    class FromJvp(Scale):
        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin

    class FromLin(Scale):
        jvp = hijax.jvp_from_lin

    close(jax.linearize(lambda x: scale(FromJvp, A, x), X)[1](X), 3 * X)
    close(jax.grad(lambda x: jnp.sum(scale(FromJvp, A, x) ** 2))(X), 18 * X)
    close(jax.jvp(lambda x: scale(FromLin, A, x), (X,), (X,))[1], 3 * X)


def test_the_old_name_is_the_same_class():
    assert hijax.VJPHiPrimitive is hijax.HiPrim
    assert issubclass(HiPrim, getattr(jax_hijax, "HiPrim", None) or jax_hijax.VJPHiPrimitive)


class Both(HiPrim):
    """(2 x, 3 y): each result needs one operand only."""

    def __init__(self, x, y, effects=frozenset()):
        self.in_avals, self.out_aval, self.params, self.effects = (x, y), (x, y), {}, effects
        super().__init__()

    def expand(self, x, y):
        return 2 * x, 3 * y

    def dce(self, used_outs, live_ins):
        kept, produced, new = super().dce(used_outs, live_ins)
        if new is None:
            return kept, produced, new
        assert live_ins == (True, True)
        if used_outs == (True, False):
            return (True, False), (True, False), Double(self.in_avals[0])
        return True, True, self


class Double(HiPrim):
    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), (x,), {}
        super().__init__()

    def expand(self, x):
        return (2 * x,)


@pytest.mark.parametrize(
    ("uses", "left"),
    [(lambda a, b: (a, b), "Both"), (lambda a, b: a, "Double"), (lambda a, b: X, "")],
    ids=["both", "one", "none"],
)
def test_dead_code(uses, left):
    def f(x, y):
        return uses(*Both(jax.typeof(x), jax.typeof(y))(x, y))

    jaxpr, reads = _jax.dce(jax.jit(f).trace(X, X).jaxpr)
    assert [n for n in ("Both", "Double") if n in str(jaxpr)] == [left] * bool(left)
    assert reads == [bool(left), left == "Both"]


def test_an_effect_is_not_dead():
    (effect,) = jax.make_jaxpr(lambda: jax.debug.print("x"))().effects

    class Effectful(HiPrim):
        def __init__(self, x):
            self.in_avals, self.out_aval, self.params, self.effects = (x,), x, {}, frozenset([effect])
            super().__init__()

        def expand(self, x):
            return x

    jaxpr, _ = _jax.dce(jax.jit(lambda x: (Effectful(jax.typeof(x))(x), x)[1]).trace(X).jaxpr)
    assert "Effectful" in str(jaxpr)


@pytest.fixture
def remat3():
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


class Sin(HiPrim):
    """sin, whose value a checkpoint saves."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), x, {}
        super().__init__()

    def expand(self, x):
        return jnp.sin(x)

    def vjp_fwd(self, nzs_in, x):
        return self(x), x

    def vjp_bwd_retval(self, x, ct):
        return (jnp.cos(x) * ct,)

    def remat(self, trace, x):
        out, residuals, _ = super().remat(trace, x)
        assert residuals == ()
        return out, out, lambda saved, x: SinKnown(jax.typeof(x))(x, saved)


class SinKnown(Sin):
    """sin(x), given its value; that value is a constant for differentiation."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x, x), x, {}
        HiPrim.__init__(self)

    def expand(self, x, saved):
        return saved

    def vjp_fwd(self, nzs_in, x, saved):
        return self(x, saved), x

    def vjp_bwd_retval(self, x, ct):
        return jnp.cos(x) * ct, jnp.zeros_like(x)


def test_remat(remat3):
    grad = jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.exp(Sin(jax.typeof(x))(x)))))
    for g in (grad, jax.jit(grad)):
        close(g(X), np.exp(np.sin(X)) * np.cos(X))
    text = str(jax.make_jaxpr(grad)(X))
    assert len(re.findall(r"\bSin\b", text)) == len(re.findall(r"SinKnown", text)) == 1


def test_remat_by_default(remat3):
    class Plain(Scale):
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp

    close(jax.grad(jax.checkpoint(lambda x: jnp.sum(scale(Plain, A, x) ** 2)))(X), 18 * X)


def test_logs_of_the_backward_pass():
    class Logs(HiPrim):
        def __init__(self, x):
            self.in_avals, self.out_aval, self.params = (x,), x, {}
            super().__init__()

        def expand(self, x):
            return 2 * x

        def vjp_fwd(self, nzs_in, x):
            return self(x), None

        def vjp_bwd_retval_logs(self, _, ct):
            return (2 * ct,), {"norm": jnp.sum(ct)}

    _, vjp = jax.vjp(lambda x: Logs(jax.typeof(x))(x), X)
    (grad,), logs = vjp.with_logs(jnp.ones(4))
    close(grad, 2 * jnp.ones(4))
    close(logs["norm"], 4)


class Row(HiPrim):
    """x - mean(x) of a vector, mapped by the helpers for batch rules."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), x, {}
        super().__init__()

    def expand(self, x):
        return x - jnp.mean(x)


class Rows(Row):
    def expand(self, x):
        return x - jnp.mean(x, axis=-1, keepdims=True)


def test_helpers_for_batch_rules():
    class Mapped(Row):
        def batch(self, axis_data, args, dims):
            args = hijax.bdims_at_front(axis_data, args, dims)
            (aval,) = hijax.unmap_avals(axis_data, self.in_avals, (0,))
            assert args[0].shape == aval.shape == (3, 4)
            return Rows(aval)(*args), 0

    class ByRule(Row):
        def batch(self, axis_data, args, dims):
            return hijax.vmap_rule(axis_data, self.expand, dims, 0)(*args), 0

    x = jnp.arange(12.0).reshape(3, 4) ** 2
    want = x - np.mean(x, axis=1, keepdims=True)
    for cls in (Mapped, ByRule):
        f = lambda x, cls=cls: cls(jax.typeof(x))(x)
        close(jax.vmap(f)(x), want)
        close(jax.vmap(f, in_axes=1)(x.T), want)


def test_symbolic_zeros_pass_a_mapped_rule():
    def rule(primal, tangent):
        assert is_zero(tangent) and tangent.aval.shape == (4,)
        return 2 * primal, tangent

    class Probe(Row):
        def batch(self, axis_data, args, dims):
            (d,) = dims
            zero = Zero(jax.typeof(args[0]).to_tangent_aval())
            out, tangent = hijax.vmap_rule(axis_data, rule, (d, d), (0, 0))(args[0], zero)
            assert is_zero(tangent) and tangent.aval.shape == (3, 4)
            return out, 0

    x = jnp.ones((3, 4))
    close(jax.vmap(lambda x: Probe(jax.typeof(x))(x))(x), 2 * x)


def test_parameters_show():
    class Named(Row):
        def __init__(self, x):
            super().__init__(x)
            self.params = {"seen": 1, "_hidden": 2}

    shown = str(jax.make_jaxpr(lambda x: Named(jax.typeof(x))(x))(X))
    assert "seen" in shown and "_hidden" not in shown


def test_all_names_are_there_and_documented():
    source = Path(hijax.__file__).read_text()
    assert sorted(hijax.__all__) == sorted(n for n in vars(hijax) if not n.startswith("_"))
    for name in hijax.__all__:
        assert re.search(rf'^{name} = .*\n"""', source, re.MULTILINE), name
    theirs = {n for n in vars(jax_hijax) if not n.startswith("_")}
    assert theirs - {"HiPrimitive"} <= set(hijax.__all__)
