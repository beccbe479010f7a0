"""Evaluate a jaxpr on hi operands.

An equation whose operands are all arrays is bound as it stands.  One with a hi operand is given to the op whose
reference is the primitive at hand and which has an implementation for the operand types; without one, its hi operands
become dense.  `_op` fills the registry, so that there is one registry of arithmetic; `_lift` adds the primitives that
hold programs of their own (loops, branches).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from typax import _jax


class Native(Protocol):
    """An op that may run an equation: returns ``NotImplemented`` where none of its implementations fits."""

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any]) -> Any: ...


registry: dict[Any, list[Native]] = {}
structured: dict[Any, Callable[..., Any]] = {}
densify: Callable[[Any], Any]  # set by _op: typax.dense


class Policy:
    """What happens where no op fits; the derived rules densify without a word."""

    def native(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Called when an op has run an equation."""

    def densified(self, eqn: Any, operand: Any) -> None:
        """Called before an operand becomes dense."""

    def plain(self, eqn: Any, operands: Sequence[Any]) -> None:
        """Called when an equation without hi operands runs as it stands."""


silent = Policy()


def evaluate(jaxpr: Any, args: Sequence[Any], policy: Policy = silent) -> list[Any]:
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
            results = _equation(eqn, operands, policy)
        env.update(zip(eqn.outvars, results, strict=True))
        for v in {v for v in eqn.invars if not isinstance(v, _jax.Literal)}:
            if last_use[v] == i and v not in keep:
                env.pop(v, None)
    return [read(a) for a in jaxpr.outvars]


def stands_for_array(x: Any, aval: Any) -> bool:
    """Whether ``x`` is a hi value in a place where the program has an array."""
    return _jax.is_hi(_jax.typeof(x)) and not _jax.is_hi(aval)


def run(primitive: Any, operands: Sequence[Any], **params: Any) -> Any:
    """What an op whose reference is this primitive makes of these hi operands.

    Raises:
      TypeError: if no op fits.
    """
    for op in registry.get(primitive, ()):
        out = op.run_equation(operands, params)
        if out is not NotImplemented:
            return out
    tys = ", ".join(str(_jax.typeof(x)) for x in operands)
    given = ", ".join(f"{k}={v}" for k, v in params.items())
    raise TypeError(
        f"no op with the reference {primitive.name} has an implementation for ({tys}) with {given}; add one, or use "
        f"typax.dense(v)"
    )


def _equation(eqn: Any, operands: list[Any], policy: Policy) -> list[Any]:
    hi = [stands_for_array(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)]
    if eqn.primitive in structured and any(hi):
        return structured[eqn.primitive](eqn, operands, policy)
    if not any(hi):
        policy.plain(eqn, operands)
        return _jax.bind_eqn(eqn, operands)
    params = dict(eqn.params)
    for op in registry.get(eqn.primitive, ()):
        out = op.run_equation(operands, params)
        if out is not NotImplemented:
            results = list(out) if eqn.primitive.multiple_results else [out]
            policy.native(eqn, operands, results)
            return results
    for x, is_hi in zip(operands, hi, strict=True):
        if is_hi:
            policy.densified(eqn, x)
    return _jax.bind_eqn(eqn, [densify(x) if h else x for x, h in zip(operands, hi, strict=True)])


def _jit(eqn: Any, operands: list[Any], policy: Policy) -> list[Any]:
    """A nested program keeps its name and its place in the jaxpr."""
    inner = eqn.params["jaxpr"]

    def run(*args: Any) -> list[Any]:
        return evaluate(inner, args, policy)

    run.__name__ = eqn.params["name"]
    return list(jax.jit(run, inline=bool(eqn.params.get("inline", False)))(*operands))


structured[_jax.jit_p] = _jit
