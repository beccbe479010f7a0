"""Rules that an op's author writes by hand, in place of the derived ones.

A rule is traced code on values: hi values are closed in it, and are worked on by ops.  Whatever else JAX asks for follows
from the rules that are given:

    given        forward mode                      reverse mode
    def_jvp      the rule                          its transpose
    def_lin      the rule                          the transpose of its linear part
    def_vjp      refused, naming def_jvp           the rule
    two of them  each its own
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from typax import _jax, _prim, _repairs
from typax._prim import Application, Linear, Mask
from typax._structural import close_tangent, open_tangent, tangent_leaf_count, tangent_views
from typax._type import ValueType


class Overridden(Application):
    """An application whose op may have rules by hand. The derived ones have the names with an underscore."""

    rules: dict[str, Any]
    tree: Any
    out_tree: Any
    statics: dict[str, Any]

    def pushforward(self, nonzero: Mask) -> Linear:
        if "jvp" in self.rules:
            return _by_jvp(self, nonzero)
        if "lin" in self.rules:
            return _by_lin(self, nonzero)
        if "vjp" in self.rules:
            return _refused(self, nonzero)
        return self._pushforward(nonzero)

    def pullback(self, nonzero: Mask) -> Linear:
        if "vjp" in self.rules:
            return _by_vjp(self, nonzero)
        if "jvp" in self.rules or "lin" in self.rules:
            return _flipped(self, self.pushforward(nonzero), nonzero)
        return self._pullback(nonzero)

    def transposed(self, linear: Mask) -> Linear:
        return _by_transpose(self, linear) if "transpose" in self.rules else self._transposed(linear)

    def _pushforward(self, nonzero: Mask) -> Linear:
        raise NotImplementedError

    _pullback = _transposed = _pushforward

    def nest(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Operands, or something for each of them, as the op is called."""
        return self.tree.unflatten(flat)

    def results(self, out: Any, rule: str) -> list[Any]:
        """The results of a rule, one for each of the op's own.

        Raises:
          TypeError: if they are not of the op's types.
        """
        try:
            flat = self.out_tree.flatten_up_to(out)
        except ValueError as e:
            raise TypeError(f"{self.name}.{rule}: the result must be a {self.out_tree}, got {out!r}: {e}") from None
        for x, t in zip(flat, self.out_tys, strict=True):
            _check(self.name, rule, "the result", x, t)
        return flat


def _check(name: str, rule: str, what: str, x: Any, want: Any) -> None:
    got = _jax.typeof(x)
    if _jax.is_hi(want) or _jax.is_hi(got):
        same = _jax.is_hi(want) and _jax.is_hi(got) and _normal(want) == _normal(got)
    else:
        same = want.shape == got.shape and want.dtype == got.dtype
    if not same:
        raise TypeError(f"{name}.{rule}: {what} must be of type {want}, got {got}")


def _normal(ty: Any) -> Any:
    return ty.normalize() if isinstance(ty, ValueType) else ty


def _tangents(app: Overridden, nonzero: Mask, leaves: Sequence[Any]) -> list[Any]:
    """A tangent for each operand: zeros where there is none."""
    it, out = iter(leaves), []
    for t, m in zip(app.in_tys, nonzero, strict=True):
        if m:
            out.append(close_tangent(t, [next(it) for _ in range(tangent_leaf_count(t))]))
        elif _prim.has_tangent(t):
            out.append(_jax.zeros(t.to_tangent_aval()))
        else:
            out.append(np.zeros(t.to_tangent_aval().shape, _jax.float0))
    return out


def _opened(app: Overridden, tangents: Sequence[Any], rule: str) -> list[Any]:
    """The leaves of the tangents of the results."""
    out = []
    for t, x in zip(app.out_tys, tangents, strict=True):
        if not _prim.has_tangent(t):
            continue
        x = _jax.zeros(t.to_tangent_aval()) if x is None else x
        _check(app.name, rule, "the tangent of the result", x, t.to_tangent_aval())
        out += open_tangent(t, x)
    return out


def _by_jvp(app: Overridden, nonzero: Mask) -> Linear:
    rule = app.rules["jvp"]

    def fn(primals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        dots = app.nest(_tangents(app, nonzero, leaves))
        out, tangents = _pair(app, "def_jvp", rule(app.nest(primals), dots, **app.statics), "result, tangent")
        app.results(out, "def_jvp")
        return _opened(app, app.out_tree.flatten_up_to(tangents), "def_jvp")

    return Linear(tuple(range(len(app.in_tys))), fn)


def _saving(app: Overridden, nonzero: Mask, rule: str, forward: Callable[..., Any]) -> Any:
    """The first half of a rule in two: the results, and what it keeps for the second."""

    def save(primals: Sequence[Any]) -> tuple[list[Any], Any]:
        made = forward(app.nest(nonzero), *app.nest(primals), **app.statics)
        out, residuals = _pair(app, rule, made, "result, residuals")
        return app.results(out, rule), residuals

    return save


def _by_lin(app: Overridden, nonzero: Mask) -> Linear:
    lin, linearized = app.rules["lin"]

    def fn(residuals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        dots = app.nest(_tangents(app, nonzero, leaves))
        tangents = linearized(residuals[0], *dots, **app.statics)
        return _opened(app, app.out_tree.flatten_up_to(tangents), "def_lin")

    return Linear((), fn, _saving(app, nonzero, "def_lin", lin))


def _by_vjp(app: Overridden, nonzero: Mask) -> Linear:
    fwd, bwd = app.rules["vjp"]

    def fn(residuals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        return _cotangents(app, "def_vjp", nonzero, bwd(residuals[0], _of_results(app, leaves), **app.statics))

    return Linear((), fn, _saving(app, nonzero, "def_vjp", fwd))


def _of_results(app: Overridden, leaves: Sequence[Any]) -> Any:
    """The cotangent of the result, as a rule is given it."""
    return app.out_tree.unflatten(_prim.close_all(app.out_tys, leaves, ct=True))


def _by_transpose(app: Overridden, linear: Mask) -> Linear:
    rule = app.rules["transpose"]
    reads = tuple(i for i, m in enumerate(linear) if not m)

    def fn(residuals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        known = dict(zip(reads, residuals, strict=True))
        operands = app.nest([known.get(i) for i in range(len(linear))])
        given = rule(_of_results(app, leaves), *operands, **app.statics)
        return _cotangents(app, "def_transpose", linear, given)

    return Linear(reads, fn)


def _pair(app: Overridden, rule: str, made: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"{app.name}.{rule}: the rule returns a pair ({what}), got {type(made).__name__}")
    return made


def _cotangents(app: Overridden, rule: str, mask: Mask, given: Any) -> list[Any]:
    """The leaves of the cotangents that are asked for; ``None`` is a zero."""
    given = given if isinstance(given, tuple) else (given,)
    try:
        flat = app.tree.flatten_up_to(given)
    except ValueError as e:
        raise TypeError(f"{app.name}.{rule}: one cotangent for each operand is returned, as a tuple: {e}") from None
    out = []
    for t, m, x in zip(app.in_tys, mask, flat, strict=True):
        if not m:
            continue
        x = _jax.zeros(t.to_ct_aval()) if x is None else x
        _check(app.name, rule, f"the cotangent of an operand of type {t}", x, t.to_ct_aval())
        out += open_tangent(t, x)
    return out


def _flipped(app: Overridden, part: Linear, nonzero: Mask) -> Linear:
    """The pullback that a pushforward transposes to."""
    tys = [t for t, m in zip(app.in_tys, nonzero, strict=True) if m]
    avals = [v.to_tangent_aval() for t in tys for v in tangent_views(t)]

    def fn(residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        flip = jax.linear_transpose(lambda *leaves: part.fn(residuals, leaves), *avals)
        return list(flip(list(cts)))

    return Linear(part.reads, fn, part.save)


def _refused(app: Overridden, nonzero: Mask) -> Linear:
    """Forward mode where only reverse-mode rules exist: a linear op of the tangents that may be transposed, not run."""
    part = app.pullback(nonzero)
    assert part.save is not None
    tys = [t for t, m in zip(app.in_tys, nonzero, strict=True) if m]
    tangents = [v.to_tangent_aval() for t in tys for v in tangent_views(t)]
    outs = [v.to_tangent_aval() for t in app.out_tys for v in tangent_views(t)]

    def fn(residuals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        flat, tree = jax.tree.flatten(residuals)
        stand_in = ReverseOnly(app.name, part, [_jax.typeof(x) for x in flat], tree, tangents, outs)
        return stand_in.apply([*flat, *leaves])

    return Linear((), fn, part.save)


class ReverseOnly(Application):
    """Stands for the tangents of an op that has reverse-mode rules only."""

    def __init__(self, name: str, part: Linear, kept: list[Any], tree: Any, tangents: list[Any], outs: list[Any]) -> None:
        self.name, self.part, self.tree, self.kept = f"{name}_tangent", part, tree, len(kept)
        self.shown, self.in_tys, self.out_tys = {}, (*kept, *tangents), tuple(outs)
        self.refuses = (
            f"{name} has a reverse-mode rule only (def_vjp), so it cannot be run in forward mode (jvp, linearize, jacfwd, "
            f"hessian); give it {name}.def_jvp as well"
        )
        self.lo = self._zeros
        n = sum(len(t.lo_ty()) for t in self.in_tys)
        self.deps = [frozenset(range(n))] * len(outs)

    def _zeros(self, *_: Any) -> list[Any]:
        return [_jax.zeros(t) for t in self.out_tys]

    def transposed(self, linear: Mask) -> Linear:
        def fn(residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            return self.part.fn(self.tree.unflatten(residuals), cts)

        return Linear(tuple(range(self.kept)), fn)

    def pushforward(self, nonzero: Mask) -> Linear:
        raise NotImplementedError(self.refuses)

    pullback = pushforward


def batch_rule(app: Overridden, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> Any:
    """What an author's ``def_batch`` makes of mapped operands."""
    made = app.rules["batch"](axis[1], app.nest(dims), *app.nest(args), **app.statics)
    out, out_dims = _pair(app, "def_batch", made, "result, its axes")
    flat = app.out_tree.flatten_up_to(out)
    spots = list(out_dims) if isinstance(out_dims, tuple | list) else [out_dims] * len(flat)
    if len(spots) != len(flat):
        raise TypeError(f"{app.name}.def_batch: {len(flat)} results, but axes for {len(spots)}")
    for x, d, t in zip(flat, spots, app.out_tys, strict=True):
        if isinstance(d, int) and not _jax.is_hi(t) and not 0 <= d <= t.ndim:
            raise TypeError(
                f"{app.name}.def_batch: the mapped result {_jax.typeof(x)} has no axis {d}, which is given for it"
            )
        want = t if d is None else _repairs.unmapped_aval(axis[1], d, t, axis[3])
        _check(app.name, "def_batch", "the mapped result", x, want)
    return tuple(flat), tuple(spots)


def remat_rule(app: Overridden, args: Sequence[Any]) -> Any:
    """What an author's ``def_remat`` keeps in a checkpoint, and how the results come back from it."""
    forward, again = app.rules["remat"]
    out, kept = _pair(app, "def_remat", forward(*app.nest(args), **app.statics), "result, what is kept")

    def rerun(kept: Any, *args: Any) -> tuple[Any, ...]:
        return tuple(app.results(again(kept, *app.nest(args), **app.statics), "def_remat"))

    return tuple(app.results(out, "def_remat")), kept, rerun


def dce_rule(app: Overridden, used: Sequence[bool]) -> Any:
    """The operands and the op that give only the results that are used; ``None`` to leave it as it is."""
    made = app.rules["dce"](app.out_tree.unflatten(used), **app.statics)
    if made is None:
        return None
    op, reads = _pair(app, "def_dce", made, "op, which operands it takes")
    reads = tuple(bool(r) for r in app.tree.flatten_up_to(tuple(reads)))
    tys = [t for t, r in zip(app.in_tys, reads, strict=True) if r]
    other = op.application(tys)
    want = [t for t, u in zip(app.out_tys, used, strict=True) if u]
    if list(map(_normal, other.out_tys)) != list(map(_normal, want)):
        raise TypeError(f"{app.name}.def_dce: {op.name} gives {list(other.out_tys)}, but {want} is used")
    return reads, other


def rule_setter(kind: str, count: int, doc: str) -> Callable[..., Any]:
    """A method of an op that sets a rule."""

    def set_rule(self: Any, *rules: Callable[..., Any]) -> Any:
        if len(rules) != count or not all(map(callable, rules)):
            raise TypeError(f"{self.name}.def_{kind} takes {count} function{'s' if count > 1 else ''}")
        self.rules[kind] = rules[0] if count == 1 else rules
        self.forget()
        return rules[0] if count == 1 else None

    set_rule.__name__ = f"def_{kind}"
    set_rule.__doc__ = doc
    return set_rule


_prim.batch_rule, _prim.remat_rule, _prim.dce_rule = batch_rule, remat_rule, dce_rule
