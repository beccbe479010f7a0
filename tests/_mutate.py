"""Mutants, generated: every mutation of every shipped type and op that it applies to, and the law that finds it.

    mutant = subject with one thing wrong     found: a law fails     survives: an equivalent mutant, or a hole in the laws

``make mutants`` makes and checks them all (minutes), and puts the table into docs/laws.md.  The tests check that the page
speaks of the mutants that there are, and a sample of them.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _shipped
import conftest  # noqa: F401  the ground that tests stand on: devices, strict promotion
import hypothesis
import jax
import jax.numpy as jnp

import typax.laws as laws
from typax import _jax
from typax._prim import Cache
from typax._structural import close_tangent, component_leaves, from_leaves, open_tangent
from typax._type import ValueType
from typax.laws import _draw

PAGE = Path(__file__).parent.parent / "docs" / "laws.md"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``what`` is wrong with ``subject``, which has the name ``of``; ``laws`` are tried first."""

    mutation: str
    what: str
    of: str
    make: Callable[[], Any]
    laws: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.of}: {self.mutation}" + (f" ({self.what})" if self.what else "")


EQUIVALENT = {
    "a static ignored by hash": "equality tells such types apart; caches only get slower",
}
"""Mutations that no law can find, with the reason."""


# --- types ---------------------------------------------------------------------------------------------------------


def _example(cls: Any) -> Any:
    """The type of a value of a class."""
    return _jax.typeof(_first(laws.subjects(cls)[0]).value)


def _first(subject: Any) -> Any:
    """The plain example of a subject."""
    if subject.given is not None:
        return subject.given[0]
    found: list[Any] = []
    settings = hypothesis.settings(max_examples=1, derandomize=True, database=None, deadline=None,
                                   suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
    settings(hypothesis.given(subject.draw(_draw._Options("plain")))(lambda x: found.append(x)))()
    return found[0]


def _hitypes(ty: Any) -> Iterator[tuple[str, str, type, tuple[str, ...]]]:
    """Wrong types: what is wrong, where, the class of the type, and the laws that should say so."""
    base = type(ty)
    for i, lo in enumerate(ty.lo_ty()):
        yield "a component is lost", f"array {i}", _lost(base, i), ("raise-lower",)
        if len(set(lo.shape[-2:])) == 2:
            yield "two axes are swapped", f"array {i}", _swapped(base, i), ("lowered-types",)
    if len(ty.lo_ty()) > 1:
        yield "components are lowered in another order", "", _reordered(base), ("lowered-types", "raise-lower")
    yield "a batch axis is put elsewhere", "", _elsewhere(base), ("rank-change", "dense-of-stack")
    yield "a stale type", "inc_rank", _stale(base, "inc_rank"), ("rank-change",)
    yield "a stale type", "dec_rank", _stale(base, "dec_rank"), ("rank-change",)
    yield "a sharding is dropped", "lo_ty", _unplaced(base), ("sharded-values", "lowered-types")
    if not _jax.is_hi(ty.to_tangent_aval()):
        yield "a sharding is dropped", "to_tangent_aval", _unplaced_tangent(base), ("sharded-values", "shard-map")
        yield "a tangent of another dtype", "", _half(base), ("tangent-types", "dense-derivative")
    if isinstance(ty.to_ct_aval(), base):  # the class of a tangent is the class itself
        for what, change in (("add drops the second", lambda x, y, s: x), ("add drops the first", lambda x, y, s: y)):
            yield "a sum of tangents that is none", what, _sum(base, change), ("tangent-sum", "tangent-zero")
        yield "a sum of tangents that is none", "add doubles", _sum(base, lambda x, y, s: s(s(x, x), y)), ("tangent-zero",)
        yield "a zero of tangents that is none", "", _zero(base), ("tangent-zero", "fan-out")
    if ty.statics:
        yield "statics ignored by equality", "", _deaf(base), ("inequality",)
        yield "a static ignored by hash", "", _hashed(base), ("equality",)
        yield "statics not printed", "", _mute(base), ("printing",)


def _lost(base: Any, i: int) -> type:
    class Lost(base):
        def raise_val(self, *los):
            return super().raise_val(*los[:i], jnp.zeros_like(los[i]), *los[i + 1 :])

    return Lost


def _swapped(base: Any, i: int) -> type:
    class Swapped(base):
        def lower_val(self, value):
            los = super().lower_val(value)
            return [*los[:i], los[i].swapaxes(-1, -2), *los[i + 1 :]]

    return Swapped


def _reordered(base: Any) -> type:
    class Reordered(base):
        def lower_val(self, value):
            return super().lower_val(value)[::-1]

    return Reordered


def _elsewhere(base: Any) -> type:
    class Elsewhere(base):
        def inc_rank(self, size, spec, mesh_axis=None):
            big = super().inc_rank(size, spec, mesh_axis)
            return big.with_leaves([_last_first(a) for a in big.leaves])

    return Elsewhere


def _last_first(a: Any) -> Any:
    shape = getattr(a, "shape", ())
    return a.update(shape=(*shape[1:], shape[0])) if isinstance(a, _jax.ShapedArray) and len(shape) > 1 else a


def _stale(base: Any, method: str) -> type:
    return type("Stale", (base,), {method: lambda self, size, spec, mesh_axis=None: self})


def _unsharded(a: Any) -> Any:
    return a.update(sharding=a.sharding.update(spec=jax.P(*(None,) * a.ndim)))


def _unplaced(base: Any) -> type:
    class Unplaced(base):
        def lo_ty(self):
            return [_unsharded(a) for a in super().lo_ty()]

    return Unplaced


def _unplaced_tangent(base: Any) -> type:
    class UnplacedTangent(base):
        def to_tangent_aval(self):
            return _unsharded(super().to_tangent_aval())

        def to_ct_aval(self):
            return _unsharded(super().to_ct_aval())

    return UnplacedTangent


def _half(base: Any) -> type:
    class Half(base):
        def to_tangent_aval(self):
            return super().to_tangent_aval().update(dtype=jnp.dtype("float16"))

    return Half


def _sum(base: Any, change: Any) -> type:
    class Sum(base):
        def vspace_add(self, x, y):
            return change(x, y, super().vspace_add)

    return Sum


def _zero(base: Any) -> type:
    class Zero(base):
        def vspace_zero(self):
            zero = super().vspace_zero()
            return from_leaves(_jax.typeof(zero), [_more(x) for x in component_leaves(zero)])

    return Zero


def _more(x: Any) -> Any:
    ty = _jax.typeof(x)
    if isinstance(ty, ValueType):
        return from_leaves(ty, [_more(c) for c in component_leaves(x)])
    return x + jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _deaf(base: Any) -> type:
    class Deaf(base):
        def __hash__(self):
            return hash((self.decl, self.leaves))

        def __eq__(self, other):
            return isinstance(other, Deaf) and self.decl is other.decl and self.leaves == other.leaves

    return Deaf


def _hashed(base: Any) -> type:
    return type("Hashed", (base,), {"__hash__": lambda self: hash((self.decl, self.leaves)), "__eq__": base.__eq__})


def _mute(base: Any) -> type:
    class Mute(base):
        def str_short(self, short_dtypes=False, mesh_axis_types=False):
            return self.decl.name

    return Mute


def _slopes(cls: Any) -> Iterator[tuple[str, str, Any, tuple[str, ...]]]:
    """Wrong tangent policies: the tangent that enters is scaled."""
    policy = cls._declaration.tangent
    if policy.by_components:
        return
    for word, k in _SCALES.items():

        class Scaled(type(policy)):
            name = word

            def open(self, ty, t, k=k):
                return k * super().open(ty, t)

        yield f"a tangent that is {word}", "open", Scaled(), ("dense-derivative", "fan-out")


_SCALES = {"zero": 0.0, "doubled": 2.0, "sign-flipped": -1.0}


def of_type(cls: Any) -> Iterator[Mutant]:
    decl = cls._declaration

    def make(**how: Any) -> Callable[[], Any]:
        return lambda: laws.subjects(type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__}, name=decl.name, **how))[
            0
        ]

    for mutation, what, hitype, names in _hitypes(_example(cls)):
        yield Mutant(mutation, what, cls.__name__, make(hitype=hitype), names)
    for mutation, what, policy, names in _slopes(cls):
        yield Mutant(mutation, what, cls.__name__, make(tangent=policy), names)


# --- ops -----------------------------------------------------------------------------------------------------------


def _with(subject: Any, rules: Any = None, body: Any = None) -> Any:
    """A subject whose op has other rules, or whose implementations run inside of ``body``."""
    op = copy.copy(subject.what)
    op.rules, op.cache = {}, Cache()
    if body is not None:
        op.impls = [dataclasses.replace(i, fn=_wrapped(i.fn, body)) for i in op.impls]
    for kind, rule in (rules or {}).items():
        op.rules[kind] = rule
    draw = lambda o: subject.draw(o).map(lambda c: dataclasses.replace(c, op=op))  # unless examples are given
    given = subject.given and tuple(dataclasses.replace(c, op=op) for c in subject.given)
    return dataclasses.replace(subject, what=op, draw=draw, given=given)


def _wrapped(fn: Any, body: Any) -> Any:
    def run(*args, **statics):
        return body(lambda *xs: fn(*xs, **statics), *args)

    run.__annotations__ = getattr(fn, "__annotations__", {})
    return run


def _on_component(x: Any, k: int, change: Any) -> Any:
    """A value with its array ``k`` (counted over nested values) changed."""
    ty = _jax.typeof(x)
    if not isinstance(ty, ValueType):
        return change(x)
    out = []
    for leaf, part in zip(ty.leaves, component_leaves(x), strict=True):
        n = len(leaf.lo_ty())
        out.append(_on_component(part, k, change) if 0 <= k < n else part)
        k -= n
    return from_leaves(ty, out)


def _is_number(a: Any) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.inexact))


def _arrays(x: Any) -> list[Any]:
    return _jax.typeof(x).lo_ty()


def _turn(x: Any) -> Any:
    return jnp.flip(x)


def _reinterpret(x: Any) -> Any:
    """An array with its last two axes exchanged, read as one of the same shape."""
    return jnp.swapaxes(x, -1, -2).reshape(x.shape)


def _on_operand(i: int, change: Any) -> Any:
    return lambda f, *xs: f(*xs[:i], change(xs[i]), *xs[i + 1 :])


def of_op(subject: Any) -> Iterator[Mutant]:
    op, call = subject.what, _first(subject)
    out = jax.tree.leaves(call.run(*call.args))
    against = ("agrees-with-reference",)

    def mutant(mutation: str, what: str, names: tuple[str, ...], **how: Any) -> Mutant:
        return Mutant(mutation, what, subject.name, lambda: _with(subject, **how), names)

    for i, x in enumerate(call.args if op.reference is not None else ()):  # without one, another body is another op
        if not _jax.is_hi_value(x):
            continue
        for k, a in enumerate(_arrays(x)):
            lost = lambda x, k=k: _remade(x, k, jnp.ones_like)
            yield mutant("a component is lost", f"operand {i}, array {k}", against, body=_on_operand(i, lost))
            if a.ndim and a.size > 1:
                turned = lambda x, k=k: _remade(x, k, _turn)
                yield mutant("a component is turned round", f"operand {i}, array {k}", against, body=_on_operand(i, turned))
            if a.ndim > 1 and min(a.shape[-2:]) > 1:
                swap = lambda x, k=k: _remade(x, k, _reinterpret)
                yield mutant("two axes are swapped", f"operand {i}, array {k}", against, body=_on_operand(i, swap))
    for r, x in enumerate(out if op.reference is not None else ()):
        for k, a in enumerate(_arrays(x)):
            if a.ndim > 1 and min(a.shape[-2:]) > 1:
                yield mutant("two axes are swapped", f"result {r}, array {k}", against, body=_result(r, k, _reinterpret))
            other = "float16" if a.dtype != jnp.float16 else "float32"
            stale = lambda a, other=other: a.astype(other)
            yield mutant(
                "a stale type", f"result {r}, array {k} of another dtype", ("result-type",), body=_result(r, k, stale)
            )
    yield from _wrong_rules(op, call, mutant)


def _result(r: int, k: int, change: Any) -> Any:
    def body(f, *xs):
        leaves, tree = jax.tree.flatten(f(*xs))
        leaves[r] = _remade(leaves[r], k, change)
        return tree.unflatten(leaves)

    return body


def _remade(x: Any, k: int, change: Any) -> Any:
    """Like `_on_component`, built anew, so that the array may be of another type."""
    ty = _jax.typeof(x)
    if not isinstance(ty, ValueType):
        return change(x)
    parts = []
    for leaf, c in zip(ty.leaves, component_leaves(x), strict=True):
        parts.append(_remade(c, k, change) if 0 <= k < len(leaf.lo_ty()) else c)
        k -= len(leaf.lo_ty())
    return ty.decl.cls(*parts, **dict(zip((s.name for s in ty.decl.statics), ty.statics, strict=True)))


def _wrong_rules(op: Any, call: Any, mutant: Any) -> Iterator[Mutant]:
    plain = copy.copy(op)
    plain.rules, plain.cache = {}, Cache()
    moving = [i for i, x in enumerate(call.args) if _moves(x)]
    try:
        jax.jvp(lambda *xs: plain(*xs, **call.statics), call.args, tuple(map(_tangent, call.args)))
    except NotImplementedError:
        moving = []
    except TypeError:
        moving = []
    for i in moving:
        for word, k in _SCALES.items():
            rule = _jvp_rule(plain, i, k)
            yield mutant(
                f"a tangent that is {word}", f"operand {i}", ("jvp-differences", "rules-by-hand"), rules={"jvp": rule}
            )
            rule = _vjp_rule(plain, i, k)
            names = ("vjp-differences", "rules-by-hand", "dot-product")
            yield mutant(f"a cotangent that is {word}", f"operand {i}", names, rules={"vjp": rule})
    for i in range(len(call.args)) if moving else ():
        if _matters(plain, call, i):
            names = ("rules-by-hand", "vjp-differences")
            yield mutant("a residual of the wrong operand", f"operand {i}", names, rules={"vjp": _residual(plain, i)})
    if call.args:
        yield mutant("a batch rule that broadcasts", "", ("batch-is-loop",), rules={"batch": _broadcasts(plain)})
        for i in range(len(call.args)):
            yield mutant("a batch out of step", f"operand {i}", ("batch-is-loop",), rules={"batch": _rolled(plain, i)})
        yield mutant("a wrong batch axis", "of the result", ("batch-is-loop",), rules={"batch": _wrong_axis(plain)})


def _moves(x: Any) -> bool:
    t = _jax.typeof(x).to_tangent_aval()
    return _jax.is_hi(t) or t.dtype != _jax.float0


def _tangent(x: Any) -> Any:
    ty = _jax.typeof(x)
    return jax.tree.map(jnp.zeros_like, laws._values.tangent(x, 1)) if _moves(x) else close_tangent(ty, [])


def _scaled(ty: Any, t: Any, k: float, ct: bool = False) -> Any:
    leaves = [a * jnp.asarray(k, a.dtype) for a in open_tangent(ty, t)]
    return close_tangent(ty, leaves, ct) if isinstance(ty, ValueType) else leaves[0]


def _jvp_rule(plain: Any, i: int, k: float) -> Any:
    def rule(primals, tangents, **statics):
        moved = [_scaled(_jax.typeof(p), t, k) if j == i else t
                 for j, (p, t) in enumerate(zip(primals, tangents, strict=True))]  # fmt: skip
        return jax.jvp(lambda *xs: plain(*xs, **statics), tuple(primals), tuple(moved))

    return rule


def _pulled(plain: Any, operands: Any, statics: Any, ct: Any) -> list[Any]:
    some = [j for j, x in enumerate(operands) if _moves(x)]

    def of_some(*xs):
        full = list(operands)
        for j, x in zip(some, xs, strict=True):
            full[j] = x
        return plain(*full, **statics)

    _, pull = jax.vjp(of_some, *(operands[j] for j in some))
    out: list[Any] = [None] * len(operands)
    for j, c in zip(some, pull(ct), strict=True):
        out[j] = c
    return out


def _vjp_rule(plain: Any, i: int, k: float) -> Any:
    def forward(nonzero, *operands, **statics):
        return plain(*operands, **statics), operands

    def backward(kept, ct, **statics):
        cts = _pulled(plain, kept, statics, ct)
        cts[i] = _scaled(_jax.typeof(kept[i]), cts[i], k, True)
        return tuple(cts)

    return forward, backward


def _residual(plain: Any, i: int) -> Any:
    """The derivative at another place: operand ``i`` is kept wrong."""

    def forward(nonzero, *operands, **statics):
        wrong = next(k for k, a in enumerate(_arrays(operands[i])) if _is_number(a))
        return plain(*operands, **statics), (
            *operands[:i],
            _on_component(operands[i], wrong, lambda a: 2 * a + 1),
            *operands[i + 1 :],
        )

    def backward(kept, ct, **statics):
        return tuple(_pulled(plain, kept, statics, ct))

    return forward, backward


def _matters(plain: Any, call: Any, i: int) -> bool:
    """Whether the gradient depends on operand ``i``: where it does not, a wrong one is as good as the right one."""
    if not any(map(_is_number, _arrays(call.args[i]))):
        return False
    forward, backward = _residual(plain, i)
    out, wrong = forward(None, *call.args, **call.statics)
    ct = laws._values.tangent(out, 1, True)
    pairs = zip(call.args, backward(call.args, ct, **call.statics), backward(wrong, ct, **call.statics), strict=True)
    opened = [(open_tangent(_jax.typeof(x), a), open_tangent(_jax.typeof(x), b)) for x, a, b in pairs if a is not None]
    return any((p != q).any() for a, b in opened for p, q in zip(a, b, strict=True))


def _element(x: Any, axis: Any, size: int) -> Any:
    """The first of a stack."""
    if axis is None:
        return x
    ty = _jax.typeof(x)
    if not isinstance(ty, ValueType):
        return jax.lax.index_in_dim(x, 0, axis, keepdims=False)
    own = zip(component_leaves(x), ty.leaf_specs(axis), strict=True)
    return from_leaves(ty.dec_rank(size, axis), [_element(c, s, size) for c, s in own])


def _roll(x: Any, axis: Any) -> Any:
    if axis is None:
        return x
    ty = _jax.typeof(x)
    if not isinstance(ty, ValueType):
        return jnp.roll(x, 1, axis)
    return from_leaves(ty, [_roll(c, s) for c, s in zip(component_leaves(x), ty.leaf_specs(axis), strict=True)])


def _broadcasts(plain: Any) -> Any:
    def rule(size, axes, *operands, **statics):
        return plain(*(_element(x, a, size) for x, a in zip(operands, axes, strict=True)), **statics), None

    return rule


def _rolled(plain: Any, i: int) -> Any:
    def rule(size, axes, *operands, **statics):
        xs = [_roll(x, a) if i == j else x for j, (x, a) in enumerate(zip(operands, axes, strict=True))]
        return jax.vmap(lambda *xs: plain(*xs, **statics), in_axes=tuple(axes), axis_size=size)(*xs), 0

    return rule


def _wrong_axis(plain: Any) -> Any:
    def rule(size, axes, *operands, **statics):
        return jax.vmap(lambda *xs: plain(*xs, **statics), in_axes=tuple(axes), axis_size=size)(*operands), 1

    return rule


# --- the tables ----------------------------------------------------------------------------------------------------


def mutants(names: Any = None) -> list[Mutant]:
    """All of them, in the order of the shipped types and ops; or those of the subjects with these names."""
    found: list[Mutant] = []
    for s in _shipped.mutated():
        if names is None or s.name in names:
            found += of_type(s.what) if s.kind == "type" else of_op(s)
    return found


def found_by(mutant: Mutant, fully: bool = True) -> Any:
    """The first cell that fails, or ``None``; ``fully``: of all laws, not only of those that should."""
    try:
        subject = mutant.make()
    except Exception as e:
        return laws.Cell("the definition", mutant.of, "fail", f"{type(e).__name__}: {e}")
    rest = [n for n, law in laws.LAWS.items() if law.kind == subject.kind and n not in mutant.laws]
    for name in (*mutant.laws, *(rest if fully else ())):
        cell = laws.check_cell(laws.LAWS[name], subject, 0, ("plain", "batched"))
        if cell.status == "fail":
            return cell
    return None


def counts(found: list[Mutant]) -> dict[str, int]:
    out: dict[str, int] = {}
    for m in found:
        out[m.mutation] = out.get(m.mutation, 0) + 1
    return out


def table(found: list[Mutant], cells: list[Any]) -> str:
    """The kill table: for each mutation its mutants, the laws that found them first, and those that survive."""
    lines = [_shipped.told(list(dict.fromkeys(m.of for m in found))), ""]
    lines += ["| mutation | mutants | found first by | survive |", "| --- | --- | --- | --- |"]
    for mutation, count in counts(found).items():
        own = [(m, c) for m, c in zip(found, cells, strict=True) if m.mutation == mutation]
        by: dict[str, int] = {}
        for _, c in own:
            if c is not None:
                by[c.law] = by.get(c.law, 0) + 1
        first = ", ".join(f"`{n}` {k}" for n, k in sorted(by.items(), key=lambda p: -p[1]))
        alive = [m.of for m, c in own if c is None]
        why = f"{', '.join(alive)}: {EQUIVALENT.get(mutation, 'NO REASON')}" if alive else ""
        lines.append(f"| {mutation} | {count} | {first} | {why} |")
    return "\n".join(lines)


def put(name: str, text: str) -> None:
    """Put a table between its marks on the page."""
    begin, end = f"<!-- {name}: made by a program -->\n", f"<!-- end of {name} -->"
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}{text}\n{end}{after}")


def main(write: bool) -> int:
    found = mutants()
    cells = []
    for n, m in enumerate(found):
        cells.append(found_by(m, fully=m.mutation not in EQUIVALENT))
        says = f"{cells[-1].law}: {cells[-1].why[:150]}" if cells[-1] else "SURVIVES"
        print(f"{n + 1}/{len(found)} {m.name}: {says}", flush=True)
        if n % 40 == 39:
            jax.clear_caches()
    print(table(found, cells))
    if write:
        put("mutants", table(found, cells))
    alive = [m.name for m, c in zip(found, cells, strict=True) if c is None and m.mutation not in EQUIVALENT]
    print(*(f"a hole in the laws: {name}" for name in alive), sep="\n")
    return len(alive)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
