"""Signatures of implementations: which operands one takes, which of two is the narrower, and where they overlap."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from typax import _axes
from typax._axes import Pattern
from typax._byhand import axes_type, has_axes, is_raw
from typax._type import ValueType, fits_class


@dataclass(frozen=True, eq=False)
class Implementation:
    fn: Callable[..., Any]
    operands: tuple[tuple[Pattern, ...], ...]
    variadic: bool
    statics: dict[str, Any]
    any_static: bool
    returns: tuple[Pattern, ...] = ()  # what it is annotated to give, of one value

    def __str__(self) -> str:
        return show_operands(self.operands)

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether the operands, each a pytree of types, are those of the signature."""
        n = len(self.operands)
        if len(args) != n and not (self.variadic and len(args) >= n - 1):
            return False
        env: dict[Any, Any] = {}
        return self._bind(args, env) and all(_holds(dim, size, env) for dim, size in env.get(_EXPRESSIONS, ()))

    def _bind(self, args: Sequence[Any], env: dict[Any, Any]) -> bool:
        pats = [self.operands[min(i, len(self.operands) - 1)] for i in range(len(args))]
        return all(any(match(p, a, env) for p in ps) for ps, a in zip(pats, args, strict=True))

    def gives(self, args: Sequence[Any], out: Any) -> bool:
        """Whether the type of the result is as annotated."""
        symbolic = any(not isinstance(n, int) for n in getattr(out, "shape", ()))  # sizes that may be equal
        if not self.returns or symbolic:
            return True
        env: dict[Any, Any] = {}
        self._bind(args, env)
        return any(match(p, out, env) for p in self.returns)

    def hi_count(self) -> int:
        return sum(any(_is_value_class(p.cls) for p in ps) for ps in self.operands)


def show_operands(operands: Any) -> str:
    return "(" + ", ".join(" | ".join(p.text for p in ps) for ps in operands) + ")"


def _is_value_class(cls: Any) -> bool:
    return isinstance(cls, type) and hasattr(cls, "_declaration")


_EXPRESSIONS = object()


def _holds(dim: Any, size: int, env: dict[Any, Any]) -> bool:
    """Whether an axis such as ``k//2`` has the size that the operands give it; a name that none of them shows is free."""
    if not dim.names <= env.keys():
        return True
    try:
        return _axes.evaluate(dim, {n: _axes.Axis(env[n]) for n in dim.names}, "").size == size
    except TypeError:
        return False


def is_one(arg: Any) -> bool:
    """Whether an operand, a pytree of types, is one of them."""
    leaves = jax.tree.leaves(arg)
    return len(leaves) == 1 and leaves[0] is arg


def match(p: Pattern, arg: Any, env: dict[Any, Any]) -> bool:
    if p.cls is Any or p.cls is inspect.Parameter.empty:
        return True
    if not is_one(arg):
        return getattr(p.cls, "__origin__", p.cls) in (tuple, list, dict)
    if not fits_class(p.cls, arg):
        return False
    if p.dtypes is None and p.axes is None:
        return True
    if is_raw(arg) and not has_axes(arg):
        return False
    arg = axes_type(arg)
    if not p.admits(arg.dtype):
        return False
    if p.axes is None:
        return True
    shape = tuple(arg.shape)
    lead = len(shape) - p.axes.rank
    if lead < 0 or (lead and not p.axes.variadic):
        return False
    for dim, size in zip(p.axes.dims, shape[lead:], strict=True):
        name = dim.name
        if name is not None and env.setdefault(name, size) != size:
            return False
        if dim.size is not None and dim.size != size:
            return False
        if name is None and dim.size is None:
            env.setdefault(_EXPRESSIONS, []).append((dim, size))
    return not p.axes.variadic or env.setdefault(f"*{p.axes.variadic}", shape[:lead]) == shape[:lead]


def stack_of_one(impl: Implementation, args: Sequence[Any]) -> ValueType | None:
    """An operand that is a stack of values where the implementation takes one, the others being as it takes them."""
    for i, (ps, t) in enumerate(zip(impl.operands, args, strict=False)):
        for p in ps:
            if not isinstance(t, ValueType) or p.axes is None or p.axes.variadic or not fits_class(p.cls, t):
                continue
            extra, one = t.ndim - p.axes.rank, t
            if not 0 < extra <= t.n_batch:
                continue
            for _ in range(extra):
                one = one.dec_rank(one.batch[0].size, 0)
            if impl.fits([*args[:i], one, *args[i + 1 :]]):
                return t
    return None


type Operands = tuple[tuple[Pattern, ...], ...]


def covers(a: Operands, b: Operands) -> bool:
    """Whether all that the signature ``b`` admits is admitted by ``a``."""
    return all(all(any(_covers_one(p, q) for p in ps) for q in qs) for ps, qs in zip(a, b, strict=False))


def _any(p: Pattern) -> bool:
    return p.cls is Any or p.cls is inspect.Parameter.empty


def _subclass(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, type) and isinstance(b, type) and issubclass(a, b))


def _covers_one(p: Pattern, q: Pattern) -> bool:
    if _any(p):
        return True
    if _any(q) or not _subclass(q.cls, p.cls):
        return False
    if p.dtypes is not None and (q.dtypes is None or not set(q.dtypes) <= set(p.dtypes)):
        return False
    if p.axes is None:
        return True
    if q.axes is None or (q.axes.variadic and not p.axes.variadic) or p.axes.rank > q.axes.rank:
        return False
    if p.axes.rank < q.axes.rank and not p.axes.variadic:
        return False
    same = _aligned(p, q)
    if any(a.size is not None and a.size != b.size for a, b in same):
        return False
    return all(b.name == d.name for a, b in same for c, d in same if a.name and a.name == c.name)


def _aligned(p: Pattern, q: Pattern) -> list[tuple[Any, Any]]:
    """The last axes of both, those that have a counterpart, with it."""
    assert p.axes is not None and q.axes is not None
    n = min(p.axes.rank, q.axes.rank)
    return list(zip(p.axes.dims[p.axes.rank - n :], q.axes.dims[q.axes.rank - n :], strict=True))


def _meet(p: Pattern, q: Pattern) -> Pattern | None:
    """A pattern for what both admit; ``None`` if nothing is."""
    if _any(p) or _any(q):
        return q if _any(p) else p
    if not (_subclass(p.cls, q.cls) or _subclass(q.cls, p.cls)):
        return None
    cls = p.cls if _subclass(p.cls, q.cls) else q.cls
    both = p.dtypes if q.dtypes is None else q.dtypes if p.dtypes is None else tuple(d for d in p.dtypes if d in q.dtypes)
    axes = p.axes if q.axes is None else q.axes if p.axes is None else _meet_axes(p, q)
    if both == () or (axes is None and p.axes is not None):
        return None
    return Pattern(cls, both, axes, p.text if cls is p.cls and both == p.dtypes else q.text)


def _meet_axes(p: Pattern, q: Pattern) -> Any:
    assert p.axes is not None and q.axes is not None
    if any(a.size is not None and b.size is not None and a.size != b.size for a, b in _aligned(p, q)):
        return None
    for one, other in ((p.axes, q.axes), (q.axes, p.axes)):
        if one.rank >= other.rank and (one.rank == other.rank or other.variadic):
            return one if not one.variadic or other.variadic else other if one.rank == other.rank else None
    return None


def overlap(a: Implementation, b: Implementation) -> Operands | None:
    """Operand types that fit two implementations of which neither is the more specific."""
    if len(a.operands) != len(b.operands) or covers(a.operands, b.operands) != covers(b.operands, a.operands):
        return None
    meets = [
        tuple(m for p in ps for q in qs if (m := _meet(p, q)) is not None)
        for ps, qs in zip(a.operands, b.operands, strict=True)
    ]
    return tuple(meets) if all(meets) else None


def read_implementation(name: str, fn: Callable[..., Any], names: Any) -> Implementation:
    hints = _axes.resolve(fn, names, f"{name}, implementation {fn.__name__}")
    operands, statics, variadic, any_static = [], {}, False, False
    for p in inspect.signature(fn).parameters.values():
        where = f"{name}: operand {p.name}"
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL):
            operands.append(_axes.patterns(hints.get(p.name, Any), where))
            variadic |= p.kind is p.VAR_POSITIONAL
        elif p.kind is p.KEYWORD_ONLY:
            statics[p.name] = p.default
        else:
            any_static = True
    returns = _axes.patterns(hints.get("return", Any), f"{name}: the result")
    told = all(_is_value_class(p.cls) or (p.cls is jax.Array and p.axes is not None) for p in returns)
    return Implementation(fn, tuple(operands), variadic, statics, any_static, returns if told else ())
