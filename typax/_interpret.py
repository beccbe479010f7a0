"""Evaluate a jaxpr on hi operands.

An equation whose operands are all arrays is bound as it stands.  One with a hi operand is given to the op whose
reference is the primitive at hand and which has an implementation for the operand types; without one, its hi operands
become dense.  `_op` fills the registry, so that there is one registry of arithmetic; `_control` adds the primitives that
hold programs of their own (loops, branches).
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from typax import _jax, _jaxpr
from typax._paths import matches


class Declined(NamedTuple):
    """Why an implementation does not run an equation, though its annotations fit."""

    why: str


class Native(Protocol):
    """An op that may run an equation: returns ``NotImplemented`` where none of its implementations fits, or `Declined`."""

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
    settled: bool = False  # whether a `lift` within has said what becomes of it


type Record = Callable[[Event], bool | None]
"""Takes note of an event; true if it has said what becomes of it."""
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


class Within(NamedTuple):
    """A program that is lifted within another: what is said there holds in it."""

    jaxpr: Any
    record: Record
    modes: Modes
    paths: Paths

    def run(self, operands: Sequence[Any], record: Record, modes: Modes, paths: Paths) -> list[Any]:
        def both(event: Event) -> None:
            if not event.settled:
                event = event._replace(settled=bool(self.record(event)))
            record(event)

        own = modes if self.modes.activations == PLAIN.activations else self.modes
        paths = self.paths if self.modes.tracked else paths
        return evaluate(self.jaxpr, operands, silent if record is silent else both, own, paths)


class Lifting(threading.local):
    """Active while `lift` traces a program: a value in it that is not an array is none of its arguments."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


lifting = Lifting()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Not in the program that `lift` traces, but in a function of ours that it calls."""
    depth, lifting.depth = lifting.depth, 0
    try:
        yield
    finally:
        lifting.depth = depth


registry: dict[Any, list[Native]] = {}
by_components: dict[Any, Native] = {}  # set by _stacks: tried where no op fits
structured: dict[Any, Callable[[Any, Sequence[Any], Record, Modes, Paths], list[Any]]] = {}
densify: Callable[[Any], Any]  # set by _structural: typax.dense
for_lift: Callable[..., Any]  # set by _again: an op on arrays in a program that `lift` traces
keep_product: Callable[[Any, Sequence[Any], Any], Any]  # set by sums: a product of arrays that a value is added to
again: Callable[
    [Any, Any, list[Any], list[bool], Record, Modes, Paths], Any
]  # set by _again: an op of the program, on hi operands


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
    standing = {v for v, x in env.items() if stands_for_array(_jax.typeof(x), v.aval)}  # those that hold hi values
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _is_var(v)}
    keep = {v for v in jaxpr.outvars if _is_var(v)}
    added = _added(jaxpr, keep) if standing else {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(a) for a in eqn.invars]
        variables = [v for v in eqn.invars if _is_var(v)]
        frames, mesh = _jax.eqn_context(eqn)
        with frames, mesh:
            if standing.isdisjoint(variables):
                base = added.get(eqn.outvars[0]) if eqn.outvars else None
                kept = keep_product(eqn, operands, env[base]) if base in standing and base in env else NotImplemented
                if kept is NotImplemented:
                    results = _on_arrays(eqn, operands, record, modes)
                else:
                    results = [kept]
                    standing.add(eqn.outvars[0])
                if repeated := _repeated(eqn, same):
                    same[eqn.outvars[0]] = repeated
            else:
                hi = [_is_var(v) and v in standing for v in eqn.invars]
                own = [names.get(a) if h else None for a, h in zip(eqn.invars, hi, strict=True)] if names else None
                results = _on_values(eqn, operands, hi, same, record, modes, own)
                path = path_of(own, hi)
                for v, x in zip(eqn.outvars, results, strict=True):
                    if stands_for_array(_jax.typeof(x), v.aval):
                        standing.add(v)
                        if path is not None:
                            names[v] = path
        env.update(zip(eqn.outvars, results, strict=True))
        for v in variables:
            if last_use[v] == i and v not in keep:
                env.pop(v, None)
    return [read(a) for a in jaxpr.outvars]


def _added(jaxpr: Any, kept: set[Any]) -> dict[Any, Any]:
    """The products of two matrices that are used once, to be added to something, if by way of numbers, and to what."""
    if not any(map(_adds_matrices, jaxpr.eqns)) or not any(e.primitive.name == "dot_general" for e in jaxpr.eqns):
        return {}
    uses = collections.Counter(v for e in jaxpr.eqns for v in e.invars if _is_var(v))
    of = {v: e for e in jaxpr.eqns for v in e.outvars}
    to: dict[Any, Any] = {}

    def is_number(atom: Any) -> bool:
        e = of.get(atom) if _is_var(atom) else None
        return not atom.aval.shape or (e is not None and _repeats_a_number(e))

    for e in reversed(jaxpr.eqns):
        name = e.primitive.name
        if _adds_matrices(e):
            x, y = e.invars
            to |= {y: x, x: y} if name == "add" else {y: x}
        elif name in ("mul", "div", "neg", "convert_element_type", "transpose") and e.outvars[0] in to:
            those = [v for v in e.invars if not is_number(v)]
            if len(those) == 1 and _is_var(those[0]) and not (name == "div" and those[0] is not e.invars[0]):
                to[those[0]] = to[e.outvars[0]]
    return {
        v: w for v, w in to.items() if uses[v] == 1 and v not in kept and of.get(v) and of[v].primitive.name == "dot_general"
    }


def _adds_matrices(eqn: Any) -> bool:
    return eqn.primitive.name in ("add", "sub") and all(_is_var(v) and v.aval.ndim == 2 for v in eqn.invars)


def _repeats_a_number(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


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
    """The axes along which an array is the same: those of size 1, and those along which it was repeated."""
    one = frozenset(a for a, n in enumerate(atom.aval.shape) if n == 1)
    return one if isinstance(atom, _jax.Literal) else one | same.get(atom, frozenset())


def stands_for_array(ty: Any, aval: Any) -> bool:
    """Whether ``ty`` is a hi type in a place where the program has an array."""
    return _jax.is_hi(ty) and not _jax.is_hi(aval)


def native(primitive: Any, operands: Sequence[Any], params: dict[str, Any], options: dict[str, Any]) -> Any:
    """What the first op that fits makes of these operands; ``NotImplemented`` or `Declined` if none does."""
    last_resort = [by_components[primitive]] if primitive in by_components else []
    return first(op.run_equation(operands, params, options) for op in registry.get(primitive, []) + last_resort)


def first(outs: Iterable[Any]) -> Any:
    """The first that was made; else ``NotImplemented``, or the first `Declined`."""
    last: Any = NotImplemented
    for out in outs:
        if ran(out):
            return out
        last = out if last is NotImplemented else last
    return last


def ran(out: Any) -> bool:
    """Whether an op has made it, or none fits."""
    return out is not NotImplemented and not isinstance(out, Declined)


def run(primitive: Any, operands: Sequence[Any], **params: Any) -> Any:
    """What an op whose reference is this primitive makes of these hi operands.

    Raises:
      TypeError: if no op fits.
    """
    out = native(primitive, operands, params, {})
    if ran(out):
        return out
    why = f": {out.why}" if isinstance(out, Declined) else ""
    tys = ", ".join(str(_jax.typeof(x)) for x in operands)
    given = ", ".join(f"{k}={v}" for k, v in params.items())
    raise TypeError(
        f"no op with the reference {primitive.name} has an implementation for ({tys}) with {given}{why}; add one, or use "
        f"typax.dense(v)"
    )


def _on_arrays(eqn: Any, operands: list[Any], record: Record, modes: Modes) -> list[Any]:
    app = _jaxpr.application(eqn)
    if app is not None and app.for_lift:
        out = again(app, eqn, operands, [False] * len(operands), record, modes, None)
        if out is not NotImplemented:
            return out
    if record is not silent:
        for inner, times in _jaxpr.products(eqn):
            e = event(inner, tuple(v.aval for v in inner.invars))
            record(e._replace(plain=True, times=times, place=e.place or _jaxpr.place(eqn)))
    return _jaxpr.bind_eqn(eqn, operands)


def _on_values(
    eqn: Any,
    operands: list[Any],
    hi: list[bool],
    same: dict[Any, frozenset[int]],
    record: Record,
    modes: Modes,
    paths: Paths,
) -> list[Any]:
    out: Any = NotImplemented
    if (app := _jaxpr.application(eqn)) is not None:
        out = again(app, eqn, operands, hi, record, modes, paths)
    elif eqn.primitive in structured:
        out = structured[eqn.primitive](eqn, operands, record, modes, paths)
    if out is not NotImplemented:
        return out
    types = tuple(map(_jax.typeof, operands))
    path = path_of(paths, hi)
    options = modes.options(path)
    scales = eqn.primitive.name in ("mul", "div")
    if scales and (along := frozenset().union(*(_known(v, same) for v in eqn.invars))):
        options["along"] = tuple(sorted(along))
    if not (scales and any(h and v.aval.shape != eqn.outvars[0].aval.shape for v, h in zip(eqn.invars, hi, strict=True))):
        out = native(eqn.primitive, operands, dict(eqn.params), options)  # else the value itself is repeated
    if ran(out):
        if record is not silent:
            record(event(eqn, types)._replace(path=path))
        return list(out) if eqn.primitive.multiple_results else [out]
    if record is not silent:
        whole = event(eqn, types)._replace(why=f"since {out.why}" if isinstance(out, Declined) else "")
        for k, (t, is_hi) in enumerate(zip(types, hi, strict=True)):
            if is_hi:
                record(whole._replace(dense=t, path=paths[k] if paths is not None else None))
    return _jaxpr.bind_eqn(eqn, [densify(x) if h else x for x, h in zip(operands, hi, strict=True)])


def path_of(paths: Paths, hi: Sequence[bool]) -> str | None:
    """The path of the first hi operand that has one."""
    return None if paths is None else next((p for p, h in zip(paths, hi, strict=True) if h and p is not None), None)


def event(eqn: Any, types: tuple[Any, ...]) -> Event:
    """An equation that an op has run on operands of these types."""
    scope, app = str(eqn.source_info.name_stack), _jaxpr.application(eqn)
    return Event(
        eqn.primitive.name if app is None else app.name, types, place=_jaxpr.place(eqn), scope=scope, flops=_jaxpr.flops(eqn)
    )
