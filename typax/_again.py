"""Ops of a program that `lift` runs, on what they meet there.

    typax.matmul(x, w, activations="dynamic")      in the program w is an array, as it is traced; then a value

By an implementation for the operand types; else by its reference, equation by equation.
"""

from collections.abc import Sequence
from typing import Any

import jax

from typax import _interpret, _jax, _jaxpr
from typax._interpret import Event, Modes, Paths, Record
from typax._op import OpApplication, Refused


def _for_lift(op: Any, key: Any, tree: Any, tys: Sequence[Any], statics: dict[str, Any]) -> Any:
    """In a program that `lift` traces, an op on arrays stays one: they may stand for values that it takes."""
    on_plain = any(not i.hi_count() for i in op.impls)
    if on_plain or op.primitive is not None or op.reference is None or any(map(_jax.is_hi, tys)):
        return None

    def make() -> Any:
        app = OpApplication(op, op._of_reference(tree.num_leaves), tree, tys, statics)
        app.for_lift = True
        return app

    return op.cache.get(("lift", *key), make)


def _again(app: Any, eqn: Any, operands: list[Any], hi: list[bool], record: Record, modes: Modes, paths: Paths) -> Any:
    if not isinstance(app, OpApplication):
        return NotImplemented
    if app.op._within_lift is not None:
        return app.op._within_lift.run(operands, record, modes, paths)
    op, types = app.op, tuple(map(_jax.typeof, operands))
    args, statics = app.tree.unflatten(operands), getattr(app, "all_statics", app.statics)
    impl = op.choose(app.tree.unflatten(types)) if any(hi) else None
    if impl is not None:
        path = _interpret.path_of(paths, hi)
        own = {k: v for k, v in modes.options(path).items() if k in impl.statics and k not in statics}
        try:
            out = jax.tree.leaves(op(*args, **statics, **own))
        except Refused:
            impl = None
        else:
            if record is not _interpret.silent:
                record(_interpret.event(eqn, types)._replace(path=path))
            return out
    if op.reference is None or any(_jax.is_hi(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return NotImplemented
    given = op.accepted(statics)
    avals = tuple(v.aval for v in eqn.invars)

    def make() -> Any:
        return _jaxpr.trace(lambda *xs: jax.tree.leaves(op.reference(*app.tree.unflatten(xs), **given)), avals)

    program = op.cache.get(("program", app, avals, _interpret.lifting.depth > 0, _jax.trace_key()), make)

    def here(event: Event) -> bool | None:
        return record(event._replace(place=event.place or _jaxpr.place(eqn)))

    return _interpret.evaluate(program, operands, record if record is _interpret.silent else here, modes, paths)


_interpret.again, _interpret.for_lift = _again, _for_lift
