"""Values at the boundaries of JAX: joined, chosen from, indexed; the dense array is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close
from jaxtyping import Array, Float, Float32, Int8, Int32

import typax
from typax import LowRank, QArray, Value, dense, quantize, tup

N = 4


class Step(Value):
    """A record with named fields and no batch axes of its own."""

    q: QArray
    b: Float[Array, "k"]
    n: Int32[Array, ""]


class Shared(Value):
    """One scale for a whole stack."""

    codes: Int8[Array, "*batch n"]
    scale: Float32[Array, ""]

    def dense(self) -> Float32[Array, "*batch n"]:
        return self.codes.astype(jnp.float32) * self.scale


class Quiet(QArray, name="quiet", tangent="none"):
    """A constant for differentiation."""


class Again(QArray, name="again", tangent="itself"):
    """Its tangents are quantized."""


def wave(*shape):
    return jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape)


def stacked(make):
    return jax.vmap(make)(jnp.arange(float(N)))


# stacks of four, of every kind of type
KINDS = {
    "q8": quantize(wave(N, 2, 3)),
    "lr": LowRank(wave(N, 3, 2), wave(N, 2, 3)),
    "tup": tup(wave(N, 2), quantize(wave(N, 2, 3)), jnp.arange(N)),
    "record": stacked(lambda k: Step.from_components(quantize(wave(2, 3) + k), wave(3) * k, k.astype("int32"))),
    "none": Quiet(*quantize(wave(N, 2, 3)).components()),
    "itself": Again(*quantize(wave(N, 2, 3)).components()),
    "shared": Shared(jnp.arange(24, dtype="int8").reshape(N, 2, 3), jnp.float32(0.1)),
}
CORE = ("q8", "tup")  # also on the oldest JAX
kinds = pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.core] * (k in CORE)) for k in KINDS])


def views(v):
    return jax.tree.leaves(dense(v))


def weighted(xs):
    """A function of views that tells their entries apart."""
    return sum(jnp.sum(x * jnp.cos(jnp.arange(float(x.size))).reshape(x.shape)) for x in xs if x.dtype == jnp.float32)


def tangents(t):
    """The arrays of a tangent."""
    return [x for x in views(t) if x.dtype == jnp.float32]


MASK = jnp.array([True, False, True, True])


def rows(x):
    return MASK.reshape(N, *(1,) * (x.ndim - 1))


# of values, and of the arrays that they stand for
STRUCTURAL = {
    "stack": (lambda v: typax.stack([v, v]), lambda x: jnp.stack([x, x])),
    "concatenate": (
        lambda v: typax.concatenate([v, typax.take(v, jnp.array([1]), 0)]),
        lambda x: jnp.concatenate([x, x[1:2]]),
    ),
    "where": (lambda v: typax.where(MASK[1], v, typax.take(v, jnp.array([3, 2, 1, 0]), 0)), lambda x: x[::-1]),
    "take": (lambda v: typax.take(v, jnp.array([[2, 0], [3, 3]]), axis=0), lambda x: x[jnp.array([[2, 0], [3, 3]])]),
    "take one": (lambda v: typax.take(v, MASK.sum(), axis=0), lambda x: x[3]),
    "expand_dims": (lambda v: typax.squeeze(typax.expand_dims(v, (0, 1)), 1), lambda x: x[None]),
}
OF_ARRAY_LIKE = {  # a Tup is indexed as a tuple, and has no one rank
    "where rows": (lambda v: typax.where(rows(v), v, v[::-1]), lambda x: jnp.where(rows(x), x, x[::-1])),
    "v[1]": (lambda v: v[1], lambda x: x[1]),
    "v[i]": (lambda v: v[-MASK.sum()], lambda x: x[1]),
    "v[1:]": (lambda v: v[1::2], lambda x: x[1::2]),
    "v[ids, None]": (lambda v: v[jnp.array([2, 1]), None], lambda x: x[jnp.array([2, 1]), None]),
    "v[mask]": (lambda v: v[np.asarray(MASK)], lambda x: x[np.array([0, 2, 3])]),
    "moveaxis": (lambda v: typax.moveaxis(typax.stack([v, v], axis=1), 0, 1), lambda x: jnp.stack([x, x])),
}


@kinds
def test_stacks_are_joined_chosen_from_and_indexed(kind):
    v = KINDS[kind]
    table = STRUCTURAL | OF_ARRAY_LIKE if kind in ("q8", "lr", "shared") else STRUCTURAL

    def run(v):
        return {name: views(f(v)) for name, (f, _) in table.items()}

    def loss(v):
        return weighted(x for xs in run(v).values() for x in xs)

    @jax.jit
    def all_of(v):
        return run(v), jax.vmap(run)(typax.stack([v, v])), jax.grad(loss, allow_int=True)(v)

    got, many, g = all_of(v)
    for name, (_, plain) in table.items():
        for x, xs, y in zip(got[name], many[name], map(plain, views(v)), strict=True):
            np.testing.assert_allclose(x, y, 1e-6, 1e-6, err_msg=name)
            np.testing.assert_allclose(xs[1], y, 1e-6, 1e-6, err_msg=name)
    if kind == "none":
        assert g.dtype == jax.dtypes.float0
        return
    of_arrays = lambda xs: weighted(plain(x) for _, plain in table.values() for x in xs)
    if kind == "lr":  # through the factors
        want = jax.grad(lambda ab: of_arrays([ab[0] @ ab[1]]))(v.components())
    else:
        floats = [x for x in views(v) if x.dtype == jnp.float32]
        want = jax.grad(of_arrays)(floats)
    for x, y in zip(tangents(g), want, strict=True):
        close(x, y, 0.05 if kind == "itself" else 1e-4)  # quantized: within half a step of a row


Q = KINDS["q8"]
S = KINDS["shared"]
ALONG = (
    r" along a named axis of shared\[4,2,3\] would change what the value is \(its batch axes are the first 2\).*typax\.dense"
)


@pytest.mark.core
@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda _: S[:, :, 1], TypeError, "indexing" + ALONG),
        (lambda q: typax.concatenate([S, S], -1), TypeError, r"typax\.concatenate" + ALONG),
        (lambda q: typax.stack([S, S], 3), TypeError, r"typax\.stack" + ALONG),
        (lambda q: typax.take(S, 1, 2), TypeError, r"typax\.take" + ALONG),
        (lambda q: q[5], IndexError, r"index 5 is out of bounds for axis 0 of q8\[4,2,3\], of size 4"),
        (lambda q: q[0, 0, 0, 0], IndexError, r"too many indices for q8\[4,2,3\]: 4 where it has 3 axes"),
        (lambda q: q["a"], TypeError, r"q8\[4,2,3\] is indexed by integers, slices.* not by 'a'"),
        (lambda _: S[..., None], TypeError, "indexing" + ALONG),
        (lambda q: jax.jit(lambda q, m: q[m])(q, MASK), TypeError, r"mask with known entries only; typax\.where"),
        (lambda q: jax.jit(lambda q, i: q[i:])(q, 1), TypeError, r"static bounds; .* typax\.take\(v, start \+ "),
        (lambda q: typax.stack([q, q[0]]), TypeError, r"one type, got q8\[2,3\] and q8\[4,2,3\]; typax\.dense"),
        (lambda q: typax.where(True, q, dense(q)), TypeError, r"one type, got float32\[4,2,3\] and q8\[4,2,3\]"),
        (lambda q: typax.where(np.ones(3, bool), q, q), TypeError, r"apart what lies .* batch axes, \[4, 2, 1\]"),
        (lambda q: typax.where(np.ones((3, 1, 1), bool), q, q), TypeError, r"\[3, 1, 1\] does not broadcast to q8"),
        (lambda q: typax.take(q, 1), TypeError, "takes an axis: a value is not flattened"),
        (lambda q: typax.squeeze(q, 0), ValueError, r"axis 0 of q8\[4,2,3\] has size 4"),
        (lambda q: typax.stack([q, q], 9), ValueError, "axis 9 is out of bounds"),
    ],
)  # fmt: skip
def test_what_cannot_be_indexed_says_so(use, error, message):
    with pytest.raises(error, match=message):
        use(Q)


def test_the_length_of_a_value_is_that_of_its_first_axis():
    assert len(Q) == 4 and len(Q[0]) == 2 and jax.jit(lambda q: len(q))(Q) == 4
    with pytest.raises(TypeError, match="has no axis, so that it has no length"):
        len(KINDS["record"][0])
