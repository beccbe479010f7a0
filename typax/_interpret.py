"""Evaluate a jaxpr on hi operands.

An equation whose operands are all arrays is bound as it stands.  One with a hi operand is given to the op whose
reference is the primitive at hand and which has an implementation for the operand types; without one, its hi operands
become dense.  `_op` fills the registry, so that there is one registry of arithmetic; `_control` adds the primitives that
hold programs of their own (loops, branches).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from typax import _jax, _jaxpr
from typax._paths import matches


class Native(Protocol):
    """An op that may run an equation: returns ``NotImplemented`` where none of its implementations fits."""

    def run_equation(self, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any: ...


class Event(NamedTuple):
    """What happened to an equation: an op has run it, an operand becomes dense, or (of products) it has arrays only."""

    primitive: str
    types: tuple[Any, ...]  # of its operands
    dense: Any = None  # the type that becomes dense; None: it ran natively, or is plain
    place: tuple[str, int, str] | None = None  # file, line and function of the program
    why: str = ""
    plain: bool = False
    scope: str = ""  # the named scopes that it is in
    path: str | None = None  # of the argument that its hi operand comes from
    flops: int = 0  # of the product that it is
    times: int = 1  # how often it runs: in a scan, its length


type Record = Callable[[Event], None]
type Paths = Sequence[str | None] | None
"""For each operand, the path of the argument that it comes from; ``None`` where nobody asks."""


class Modes(NamedTuple):
    """What ops are told by the paths of their hi operands; the first pattern that matches decides.

    ``tracked``: whether anybody asks for paths.
    """

    activations: tuple[tuple[str, str], ...] = ()
    tracked: bool = False

    def options(self, path: str | None) -> dict[str, Any]:
        """The keywords for an op."""
        found = next((mode for pattern, mode in self.activations if matches(pattern, path or "")), "float")
        return {} if found == "float" else {"activations": found}


PLAIN = Modes()


registry: dict[Any, list[Native]] = {}
structured: dict[Any, Callable[[Any, Sequence[Any], Record, Modes, Paths], list[Any]]] = {}
densify: Callable[[Any], Any]  # set by _structural: typax.dense


def silent(event: Event) -> None:
    """The record of the derived rules: what they make dense, they make dense without a word."""


def evaluate(
    jaxpr: Any, args: Sequence[Any], record: Record = silent, modes: Modes = PLAIN, paths: Paths = None
) -> list[Any]:
    """The results of ``jaxpr`` on ``args``, any of which may be a hi value that stands for the array expected there."""
    names: dict[Any, str | None] = dict(zip(jaxpr.invars, paths, strict=True)) if paths is not None else {}
    same: dict[Any, frozenset[int]] = {}  # of arrays: the axes along which they were repeated
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, _jax.Literal)}
    keep = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(a) for a in eqn.invars]
        own = [None if isinstance(a, _jax.Literal) else names.get(a) for a in eqn.invars] if names else None
        with _jax.eqn_context(eqn):
            results = _equation(eqn, operands, record, modes, own, same)
        if repeated := _repeated(eqn, same):
            same[eqn.outvars[0]] = repeated
        env.update(zip(eqn.outvars, results, strict=True))
        if own is not None and (path := next((p for p in own if p is not None), None)) is not None:
            names.update((v, path) for v, x in zip(eqn.outvars, results, strict=True) if _jax.is_hi(_jax.typeof(x)))
        for v in {v for v in eqn.invars if not isinstance(v, _jax.Literal)}:
            if last_use[v] == i and v not in keep:
                env.pop(v, None)
    return [read(a) for a in jaxpr.outvars]


def _repeated(eqn: Any, same: dict[Any, frozenset[int]]) -> frozenset[int]:
    """The axes along which the result of an equation is the same, as far as can be told from what it repeats."""
    if eqn.primitive.name == "broadcast_in_dim":
        shape, dims, x = eqn.params["shape"], eqn.params["broadcast_dimensions"], eqn.invars[0]
        moved = {d for a, d in enumerate(dims) if x.aval.shape[a] == shape[d] != 1 and a not in _known(x, same)}
        return frozenset(range(len(shape))) - moved
    if eqn.primitive.name in ("convert_element_type", "neg", "copy"):
        return _known(eqn.invars[0], same)
    return frozenset()


def _known(atom: Any, same: dict[Any, frozenset[int]]) -> frozenset[int]:
    return frozenset() if isinstance(atom, _jax.Literal) else same.get(atom, frozenset())


def stands_for_array(ty: Any, aval: Any) -> bool:
    """Whether ``ty`` is a hi type in a place where the program has an array."""
    return _jax.is_hi(ty) and not _jax.is_hi(aval)


def _native(primitive: Any, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
    """What the first op that fits makes of these operands; ``NotImplemented`` if none does."""
    for op in registry.get(primitive, ()):
        out = op.run_equation(operands, params, options)
        if out is not NotImplemented:
            return out
    return NotImplemented


def run(primitive: Any, operands: Sequence[Any], **params: Any) -> Any:
    """What an op whose reference is this primitive makes of these hi operands.

    Raises:
      TypeError: if no op fits.
    """
    out = _native(primitive, operands, params, {})
    if out is not NotImplemented:
        return out
    tys = ", ".join(str(_jax.typeof(x)) for x in operands)
    given = ", ".join(f"{k}={v}" for k, v in params.items())
    raise TypeError(
        f"no op with the reference {primitive.name} has an implementation for ({tys}) with {given}; add one, or use "
        f"typax.dense(v)"
    )


def _equation(
    eqn: Any, operands: list[Any], record: Record, modes: Modes, paths: Paths, same: dict[Any, frozenset[int]]
) -> list[Any]:
    types = tuple(map(_jax.typeof, operands))
    hi = [stands_for_array(t, v.aval) for t, v in zip(types, eqn.invars, strict=True)]
    if not any(hi):
        if record is not silent:
            for inner, times in _jaxpr.products(eqn):
                record(event(inner, tuple(v.aval for v in inner.invars))._replace(plain=True, times=times))
        return _jaxpr.bind_eqn(eqn, operands)
    if eqn.primitive in structured:
        return structured[eqn.primitive](eqn, operands, record, modes, paths)
    path = next((p for p, h in zip(paths, hi, strict=True) if h and p is not None), None) if paths is not None else None
    options = modes.options(path)
    if eqn.primitive.name in ("mul", "div") and (along := frozenset().union(*(_known(v, same) for v in eqn.invars))):
        options["along"] = tuple(sorted(along))
    out = _native(eqn.primitive, operands, dict(eqn.params), options)
    if out is not NotImplemented:
        if record is not silent:
            record(event(eqn, types)._replace(path=path))
        return list(out) if eqn.primitive.multiple_results else [out]
    if record is not silent:
        whole = event(eqn, types)
        for k, (t, is_hi) in enumerate(zip(types, hi, strict=True)):
            if is_hi:
                record(whole._replace(dense=t, path=paths[k] if paths is not None else None))
    return _jaxpr.bind_eqn(eqn, [densify(x) if h else x for x, h in zip(operands, hi, strict=True)])


def event(eqn: Any, types: tuple[Any, ...]) -> Event:
    """An equation that an op has run on operands of these types."""
    scope = str(eqn.source_info.name_stack)
    return Event(eqn.primitive.name, types, place=_jaxpr.place(eqn), scope=scope, flops=_jaxpr.flops(eqn))
