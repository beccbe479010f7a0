"""The gallery: each type against the array that it stands for, under every transformation; and what each page promises."""

import ast
import io
import tokenize
from dataclasses import dataclass
from typing import Any

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _util import close

from gallery import block_diagonal, complex_pair, interval, kronecker, masked, packed_bits, secret_shares, units
from gallery import diagonal_plus_lowrank as dlr
from typax import dense, laws, matmul


def wave(*shape, shift=0.0):
    return jnp.sin(jnp.arange(float(np.prod(shape))) + 1 + shift).reshape(shape)


@dataclass
class Case:
    """A type: how a value is built of its parts, what it stands for, and ops, each with its meaning and another operand."""

    build: Any
    parts: tuple[Any, ...]
    stands_for: Any
    ops: dict[str, tuple[Any, Any, Any]]
    moving: tuple[int, ...] = (0, 1)  # the parts that have derivatives
    tangent: Any = lambda g: g  # a tangent, from a gradient

    @property
    def value(self):
        return self.build(*self.parts)


SPEED = units.Unit((1, -1, 0))
BITS = np.array([True, False, True] * 5)
SQUARE = (2 * jnp.eye(2) + wave(2, 2) / 4, 2 * jnp.eye(3) + wave(3, 3) / 4)


def known(d):
    return jnp.where(jnp.isnan(d), 0.0, d)


CASES = {
    "units": Case(
        lambda a: units.Quantity.from_components(a, unit=SPEED),
        (wave(3) + 2,),
        lambda a: a,
        {
            "square": (lambda v, x: units.multiply(v, v), lambda d, x: d * d, wave(3)),
            "ratio": (lambda v, x: units.divide(units.multiply(v, v), v), lambda d, x: d, wave(3)),
            "sum": (lambda v, x: units.add(v, v), lambda d, x: d + d, wave(3)),
        },
        moving=(0,),
        tangent=lambda g: units.Quantity.from_components(dense(g), unit=SPEED),
    ),
    "complex_pair": Case(
        complex_pair.Pair.from_components,
        (wave(3, 3), wave(3, 3, shift=5)),
        jax.lax.complex,
        {
            "product": (
                lambda z, x: complex_pair.multiply(z, z).magnitude() * x,
                lambda d, x: jnp.abs(d * d) * x,
                wave(3, 3),
            ),
            "conj": (lambda z, x: complex_pair.conj(z).magnitude() * x, lambda d, x: jnp.abs(d) * x, wave(3, 3)),
            "matmul": (lambda z, x: matmul(z, complex_pair.conj(z)), lambda d, x: d @ jnp.conj(d), wave(3)),
        },
    ),
    "kronecker": Case(
        kronecker.Kron.from_components,
        SQUARE,
        jnp.kron,
        {
            "matmul": (lambda w, x: matmul(x, w), lambda d, x: x @ d, wave(4, 6)),
            "product": (lambda w, x: matmul(w, w.transpose()), lambda d, x: d @ d.T, wave(1)),
            "inv": (lambda w, x: kronecker.inv(w), lambda d, x: jnp.linalg.inv(d), wave(1)),
        },
    ),
    "block_diagonal": Case(
        block_diagonal.BlockDiagonal.from_components,
        (2 * jnp.eye(3) + wave(2, 3, 3) / 4,),
        lambda b: jax.scipy.linalg.block_diag(*b),
        {
            "matmul": (lambda w, x: matmul(x, w), lambda d, x: x @ d, wave(4, 6)),
            "product": (lambda w, x: matmul(w, w.transpose()), lambda d, x: d @ d.T, wave(1)),
            "inv": (lambda w, x: block_diagonal.inv(w), lambda d, x: jnp.linalg.inv(d), wave(1)),
            "logdet": (lambda w, x: block_diagonal.logdet(w) * x, lambda d, x: jnp.linalg.slogdet(d)[1] * x, wave(1)),
        },
        moving=(0,),
    ),
    "diagonal_plus_lowrank": Case(
        dlr.DiagonalPlusLowRank.from_components,
        (wave(5) + 2, wave(5, 2)),
        lambda d, u: jnp.diag(d) + u @ u.T,
        {
            "matmul": (lambda s, x: matmul(x, s), lambda d, x: x @ d, wave(4, 5)),
            "solve": (dlr.solve, jnp.linalg.solve, wave(5)),
            "likelihood": (
                dlr.log_likelihood,
                lambda d, x: jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros(5), d),
                wave(5),
            ),
        },
    ),
    "packed_bits": Case(
        lambda p: packed_bits.Bits.from_components(p, n=15),
        (jnp.packbits(BITS),),
        lambda p: jnp.unpackbits(p)[:15].astype(bool),
        {
            "both": (
                lambda v, x: packed_bits.both(v, packed_bits.negate(packed_bits.pack(x))),
                lambda d, x: d & ~x,
                jnp.asarray(BITS[::-1]),
            ),
            "differ": (lambda v, x: packed_bits.differ(v, packed_bits.pack(x)), lambda d, x: d ^ x, jnp.asarray(BITS[::-1])),
            "count": (
                lambda v, x: packed_bits.count(packed_bits.negate(v)) + x.argmin().astype(jnp.int32),
                lambda d, x: jnp.sum(~d) + x.argmin().astype(jnp.int32),
                jnp.asarray(BITS),
            ),
        },
        moving=(),
    ),
    "secret_shares": Case(
        secret_shares.Shares.from_components,
        (jnp.arange(4, dtype=jnp.uint32) * 10**9, jnp.arange(4, dtype=jnp.uint32) ** 9),
        lambda a, b: (a + b).astype(jnp.int32),
        {
            "add": (lambda s, k: secret_shares.add(secret_shares.add(s, s), k), lambda d, k: d + d + k, jnp.arange(4)),
            "multiply": (secret_shares.multiply, lambda d, k: d * k, jnp.arange(4) - 7),
            "matmul": (matmul, lambda d, w: d @ w, jnp.arange(12).reshape(4, 3)),
        },
        moving=(),
    ),
    "masked": Case(
        masked.Masked.from_components,
        (wave(5), jnp.array([True, False, True, True, False])),
        lambda a, m: jnp.where(m, a, jnp.nan),
        {
            "arithmetic": (
                lambda v, x: masked.fill(masked.add(v, masked.multiply(v, v)), x[0]),
                lambda d, x: jnp.where(jnp.isnan(d), x[0], known(d) * (1 + known(d))),
                wave(1),
            ),
            "total": (lambda v, x: masked.total(v) * x, lambda d, x: jnp.nansum(d) * x, wave(1)),
            "mean": (lambda v, x: masked.mean(masked.multiply(v, v)) * x, lambda d, x: jnp.nanmean(d * d) * x, wave(1)),
            "mask": (
                lambda v, x: masked.fill(masked.add(v, masked.mask(x, x > 0)), jnp.float32(0)),
                lambda d, x: jnp.where(jnp.isnan(d) | (x <= 0), 0.0, known(d) + x),
                wave(5),
            ),
        },
        moving=(0,),
    ),
}
every = pytest.mark.parametrize(("name", "op"), [(n, o) for n, c in CASES.items() for o in c.ops])
floats = pytest.mark.parametrize(("name", "op"), [(n, o) for n, c in CASES.items() if c.moving for o in c.ops])
WRAPS = {"eager": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def scalar(y):
    y = dense(y)
    return jnp.sum(jnp.sin(jnp.real(y)) + (jnp.cos(jnp.imag(y)) if jnp.iscomplexobj(y) else 0.0))


def losses(case, op):
    """The loss of the value and the operand, and the same of its moving parts and the operand."""
    f, plain, x = case.ops[op]

    def on_parts(some, x):
        full = list(case.parts)
        for i, p in zip(case.moving, some, strict=True):
            full[i] = p
        return scalar(plain(case.stands_for(*full), x))

    return (lambda v, x: scalar(f(v, x))), on_parts, tuple(case.parts[i] for i in case.moving), x


def moving_parts(case, g):
    leaves = g.components() if len(case.parts) > 1 else (g.components(),)
    return tuple(leaves[i] for i in case.moving)


def same(got, want, tol=1e-3):
    jax.tree.map(lambda a, b: close(a, b, tol), got, want)


# --- each type against what it stands for -----------------------------------------------------------------------------


@pytest.mark.core
@every
@wraps
def test_values(name, op, wrap):
    case = CASES[name]
    f, plain, x = case.ops[op]
    d = case.stands_for(*case.parts)
    np.testing.assert_array_equal(dense(case.value), d)
    close(dense(wrap(f)(case.value, x)), plain(d, x), 1e-4)


@pytest.mark.core
@floats
def test_derivatives(name, op):
    """Gradients, also of a checkpoint, tangents and Hessian-vector products, all in one program."""
    case = CASES[name]
    loss, on_parts, parts, x = losses(case, op)

    def gradient(of, v, x):
        return jax.grad(of, (0, 1))(v, x)

    @jax.jit
    def derivatives(v, parts, x):
        g, gx = gradient(loss, v, x)
        t = case.tangent(g)
        move, move_parts = (t, gx), (moving_parts(case, t), gx)
        _, (hg, hx) = jax.jvp(lambda v, x: gradient(loss, v, x), (v, x), move)
        _, (want, want_x) = jax.jvp(lambda p, x: gradient(on_parts, p, x), (parts, x), move_parts)
        firsts = (g, gx), gradient(jax.checkpoint(loss), v, x), gradient(on_parts, parts, x)
        slopes = jax.jvp(loss, (v, x), move)[1], jax.jvp(on_parts, (parts, x), move_parts)[1]
        return firsts, slopes, ((hg, hx), (want, want_x))

    ((g, gx), (cg, cx), want), slopes, ((hg, hx), second) = derivatives(case.value, parts, x)
    same((moving_parts(case, g), gx), want)
    same((moving_parts(case, cg), cx), want)
    same(*slopes)
    same((moving_parts(case, hg), hx), second, 1e-2)


@pytest.mark.core
@pytest.mark.parametrize("subject", [pytest.param(s, id=f"{page}-{s.name}") for page, s in _gallery.sample()])
def test_laws(subject):
    """All laws: under jit, in both modes of differentiation, mapped, in loops and branches, sharded, in a file.

    Here of each page the type and an op; ``make laws`` checks all.
    """
    cells = [laws.check_cell(law, subject, 0, ("plain",)) for law, subject in laws.pairs([subject])]
    assert not [f"{c.law}: {c.why} ({c.example})" for c in cells if c.status in ("fail", "no example")]
    assert len([c for c in cells if c.status == "pass"]) >= 8


# --- what is particular -------------------------------------------------------------------------------------------------


def test_units():
    metre, second = (units.Quantity(jnp.array([1.0, 2.0]), u) for u in (units.METRE, units.SECOND))
    speed = units.divide(metre, second)
    assert str(jax.typeof(speed)) == "quantity<unit=m s^-1>[2]"
    energy = lambda v: jnp.sum(dense(units.multiply(v, v)))
    assert str(jax.typeof(jax.jit(jax.grad(energy))(speed))) == "quantity<unit=m^-1 s>[2]"
    assert str(jax.typeof(jax.jvp(lambda v: v, (speed,), (speed,))[1])) == "quantity<unit=m s^-1>[2]"
    for f in (units.add, jax.jit(units.add)):
        with pytest.raises(TypeError, match=r"cannot add m and s: quantity<unit=m>\[2\] \+ quantity<unit=s>\[2\]"):
            f(metre, second)
    with pytest.raises(TypeError, match=r"add has no implementation for \(quantity<unit=m>\[2\], float32\[2\]\)"):
        units.add(metre, jnp.ones(2))


def test_complex_gradients_are_conjugate_to_those_of_complex_arrays():
    z = jax.lax.complex(wave(3), wave(3, shift=2))
    f = lambda z: jnp.sum(jnp.abs(z) ** 2 * wave(3))
    g = jax.grad(lambda z: jnp.sum(complex_pair.multiply(z, z).magnitude() * wave(3)))(complex_pair.split(z))
    close(jax.lax.complex(g.re, g.im), jnp.conj(jax.grad(f)(z)), 1e-4)


def test_kronecker_products_are_sharded_as_their_first_factor():
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        a, b = jax.device_put(wave(2, 2), jax.P("i")), wave(3, 3)
        assert str(jax.typeof(kronecker.Kron(a, b))) == "kron[6@i,6]"
    with pytest.raises(TypeError, match=r"the factors do not fit: \(2, 2\) with \(3, 3\)"):
        matmul(kronecker.Kron(*SQUARE), kronecker.Kron(*SQUARE[::-1]))


def test_blocks_of_different_numbers_do_not_meet():
    many, few = (block_diagonal.BlockDiagonal(jnp.ones(s)) for s in ((3, 2, 2), (2, 3, 3)))
    with pytest.raises(TypeError, match=r"3 blocks of bd\[6,6\] do not meet 2 of bd\[6,6\]"):
        matmul(many, few)


def test_a_gaussian_likelihood_holds_no_covariance():
    n = 1031
    s, y = dlr.DiagonalPlusLowRank(jnp.ones(n), wave(n, 3)), wave(n)
    text = jax.jit(jax.grad(dlr.log_likelihood, (0, 1))).lower(s, y).compile().as_text()
    assert f"[{n},3]" in text and f"{n},{n}" not in text


def test_bits_are_cut_over_devices_in_whole_bytes():
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        v = packed_bits.Bits(jax.device_put(jnp.arange(4, dtype=jnp.uint8), jax.P("i")), 32)
        body = lambda v: packed_bits.count(v)[None]
        spec = packed_bits.Bits.P(n="i", m="i")
        got = jax.jit(jax.shard_map(body, in_specs=spec, out_specs=jax.P("i")))(v)
        close(got, [1, 3])
    with pytest.raises(TypeError, match=r"both .*bits<n=15>\[15\], bits<n=16>\[16\]"):
        packed_bits.both(packed_bits.pack(BITS), packed_bits.pack(np.ones(16, bool)))


@wraps
def test_intervals_contain_what_they_should(wrap):
    x, w, v = wave(4), wave(4, 3), wave(3, 2)

    def bounds(radius):
        box = interval.around(x, radius)
        hidden = interval.monotone(interval.matmul(box, w), f=jnp.tanh)
        squares = interval.multiply(hidden, hidden)
        return interval.matmul(interval.add(hidden, squares), v)

    net = lambda x: (lambda h: (h + h * h) @ v)(jnp.tanh(x @ w))
    box = wrap(bounds)(jnp.float32(0.1))
    assert str(jax.typeof(box)) == "interval{lo:float32[2],hi:float32[2]}"
    noise = jax.random.uniform(jax.random.key(0), (500, 4), minval=-0.1, maxval=0.1)
    ys = net(x + noise)
    assert jnp.all(ys >= box.lo - 1e-6) and jnp.all(ys <= box.hi + 1e-6)
    close(bounds(jnp.float32(0)).lo, net(x), 1e-4)
    width = lambda r: jnp.sum(bounds(r).components()[1] - bounds(r).components()[0])
    r, eps = jnp.float32(0.1), 1e-2
    close(wrap(jax.grad(width))(r), (width(r + eps) - width(r - eps)) / (2 * eps), 2e-2)
    radii = jnp.array([0.0, 0.1, 0.2])
    many = jax.vmap(bounds)(radii)
    close(many.lo[1], box.lo)
    assert jnp.all(jnp.diff(many.hi, axis=0) > 0)
    _, boxes = jax.lax.scan(lambda c, r: (c, bounds(r)), 0, radii)
    close(boxes.hi, many.hi)
    g = jax.grad(lambda b: jnp.sum(interval.matmul(b, w).components()[1]))(interval.around(x, r))
    close(g.lo + g.hi, w.sum(1))
    with jax.set_mesh(jax.make_mesh((2,), ("i",))):
        rows = jax.device_put(wave(4, 4), jax.P("i"))
        out = jax.jit(interval.matmul)(interval.around(rows, r), w)
        assert str(jax.typeof(out)) == "interval{lo:float32[4@i,3],hi:float32[4@i,3]}"


@pytest.mark.parametrize("op", ["add", "multiply", "matmul"])
def test_shares_are_never_opened(op):
    """Each share of a result depends on that share of the operands alone, bit for bit."""
    case = CASES["secret_shares"]
    f, _, k = case.ops[op]
    a, b = case.parts
    out = f(secret_shares.Shares(a, b), k)
    other = f(secret_shares.Shares(a, b + jnp.uint32(77)), k)
    np.testing.assert_array_equal(out.a, other.a)
    other = f(secret_shares.Shares(a + jnp.uint32(77), b), k)
    np.testing.assert_array_equal(out.b, other.b)
    jaxpr = jax.make_jaxpr(lambda s: f(s, k))(case.value)
    assert "dense" not in str(jaxpr)


def test_shares_are_noise_and_add_up():
    x = jnp.array([5, -7, 2**31 - 1, -(2**31)], jnp.int32)
    s, t = (secret_shares.share(x, jax.random.key(i)) for i in (0, 1))
    np.testing.assert_array_equal(dense(s), x)
    assert not np.any(s.a == t.a) and not np.any(s.b == t.b)
    np.testing.assert_array_equal(dense(secret_shares.add(s, t)), 2 * x)
    with pytest.raises(TypeError, match=r"multiply has no implementation for \(shares\[4\], shares\[4\]\)"):
        secret_shares.multiply(s, t)
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(lambda x: dense(secret_shares.share(x, jax.random.key(0)))[0])(x)


def test_what_is_missing_has_no_derivative_of_any_order():
    bad = masked.mask(jnp.array([1.0, jnp.inf, jnp.nan]), jnp.array([True, False, False]))
    f = lambda v: masked.mean(masked.multiply(masked.multiply(v, v), v))
    g = jax.grad(f)(bad)
    close(g.data, [3.0, 0.0, 0.0])
    assert g.valid.dtype == jax.dtypes.float0
    _, h = jax.jvp(jax.grad(f), (bad,), (g,))
    close(h.data, [18.0, 0.0, 0.0])


# --- what each page promises --------------------------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """The lines of code: no docstrings, comments or blank lines."""
    told = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            told |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({n for t in tokens if t.type not in skipped for n in range(t.start[0], t.end[0] + 1)} - told)


@pytest.mark.parametrize("page", _gallery.PAGES, ids=lambda p: p.stem)
def test_a_page_is_short_and_on_the_public_api(page):
    source = page.read_text()
    tree = ast.parse(source)
    assert code_lines(source) <= 40
    assert "In raw hijax: " in (ast.get_docstring(tree) or "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert {n.split(".")[0] for n in names} <= {"jax", "jaxtyping", "typax", "numpy", "typing"}
            assert not any(part.startswith("_") for n in names for part in n.split("."))
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), ast.unparse(node)


def test_the_pages_are_the_ten_of_the_readme():
    readme = (_gallery.PAGES[0].parent / "README.md").read_text()
    assert len(_gallery.PAGES) == 10 and all(f"[{p.stem}]({p.name})" in readme for p in _gallery.PAGES)
    assert code_lines('"""Told."""\n\nx = 1  # one\n# none\ny = (\n    2\n)\n') == 4
