"""Evaluate a jaxpr on hi operands.

An equation whose operands are all arrays is bound as it stands.  One with a hi operand is given to the op whose
reference is the primitive at hand and which has an implementation for the operand types; without one, its hi operands
become dense.  `_op` fills the registry, so that there is one registry of arithmetic; `_control` adds the primitives that
hold programs of their own (loops, branches).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from typax import _jax, _jaxpr


class Native(Protocol):
    """An op that may run an equation: returns ``NotImplemented`` where none of its implementations fits."""

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any]) -> Any: ...


class Event(NamedTuple):
    """What happened to an equation with a hi operand: an op has run it, or an operand becomes dense."""

    primitive: str
    types: tuple[Any, ...]  # of its operands
    dense: Any = None  # the type that becomes dense; None: it ran natively
    place: tuple[str, int, str] | None = None  # file, line and function of the program
    why: str = ""


type Record = Callable[[Event], None]

registry: dict[Any, list[Native]] = {}
structured: dict[Any, Callable[[Any, Sequence[Any], Record], list[Any]]] = {}
densify: Callable[[Any], Any]  # set by _structural: typax.dense


def silent(event: Event) -> None:
    """The record of the derived rules: what they make dense, they make dense without a word."""


def evaluate(jaxpr: Any, args: Sequence[Any], record: Record = silent) -> list[Any]:
    """The results of ``jaxpr`` on ``args``, any of which may be a hi value that stands for the array expected there."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, _jax.Literal)}
    keep = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(a) for a in eqn.invars]
        with _jax.eqn_context(eqn):
            results = _equation(eqn, operands, record)
        env.update(zip(eqn.outvars, results, strict=True))
        for v in {v for v in eqn.invars if not isinstance(v, _jax.Literal)}:
            if last_use[v] == i and v not in keep:
                env.pop(v, None)
    return [read(a) for a in jaxpr.outvars]


def stands_for_array(ty: Any, aval: Any) -> bool:
    """Whether ``ty`` is a hi type in a place where the program has an array."""
    return _jax.is_hi(ty) and not _jax.is_hi(aval)


def _native(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """What the first op that fits makes of these operands; ``NotImplemented`` if none does."""
    for op in registry.get(primitive, ()):
        out = op.run_equation(operands, params)
        if out is not NotImplemented:
            return out
    return NotImplemented


def run(primitive: Any, operands: Sequence[Any], **params: Any) -> Any:
    """What an op whose reference is this primitive makes of these hi operands.

    Raises:
      TypeError: if no op fits.
    """
    out = _native(primitive, operands, params)
    if out is not NotImplemented:
        return out
    tys = ", ".join(str(_jax.typeof(x)) for x in operands)
    given = ", ".join(f"{k}={v}" for k, v in params.items())
    raise TypeError(
        f"no op with the reference {primitive.name} has an implementation for ({tys}) with {given}; add one, or use "
        f"typax.dense(v)"
    )


def _equation(eqn: Any, operands: list[Any], record: Record) -> list[Any]:
    types = tuple(map(_jax.typeof, operands))
    hi = [stands_for_array(t, v.aval) for t, v in zip(types, eqn.invars, strict=True)]
    if not any(hi):
        return _jaxpr.bind_eqn(eqn, operands)
    if eqn.primitive in structured:
        return structured[eqn.primitive](eqn, operands, record)
    out = _native(eqn.primitive, operands, dict(eqn.params))
    if out is not NotImplemented:
        record(Event(eqn.primitive.name, types, place=_jaxpr.place(eqn)))
        return list(out) if eqn.primitive.multiple_results else [out]
    for t, is_hi in zip(types, hi, strict=True):
        if is_hi:
            record(Event(eqn.primitive.name, types, t, _jaxpr.place(eqn)))
    return _jaxpr.bind_eqn(eqn, [densify(x) if h else x for x, h in zip(operands, hi, strict=True)])
