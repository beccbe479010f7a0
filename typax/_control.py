"""Programs inside programs on hi operands: nested calls, loops, branches, checkpoints, custom derivatives.

Each such equation gets a *plan*, made once for given operand types: which operands become dense before it, and its inner
programs lifted.  A loop's carry keeps its type, and all branches give the same types:

    carry q8, body gives f32      the carry is made dense before the loop
    carry f32, body gives q8      what the body gives is made dense, at its end
    branches give q8 and f32      dense, in the branches

Nested calls, scans and checkpoints are bound anew with the lifted program, so that JAX differentiates them as it does
any.  The others are ops whose reference is the equation itself and whose implementation runs the lifted programs: their
derivatives are those of the equation (a custom rule stays), evaluated on the hi operands, and they map over axes as
programs on arrays do.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from typax import _interpret, _jax, _jaxpr, _repairs
from typax._interpret import Event, Modes, Paths, Record
from typax._op import Op
from typax._prim import Cache, has_tangent
from typax._structural import by_components, pack_open
from typax._type import ValueType, dense_type


class Lifted(NamedTuple):
    """An inner program on hi operands, and what happened to its equations."""

    jaxpr: Any
    events: tuple[Event, ...]

    def __call__(self, *args: Any) -> list[Any]:
        return _jax.eval_jaxpr_fun(self.jaxpr)(*args)


class Plan(NamedTuple):
    dense: dict[int, str]  # operands to make dense before, and why
    programs: tuple[Lifted, ...] = ()
    cut: tuple[tuple[int, Any], ...] = ()  # operands of a scan that a value with the same entries stands in for, and how

    @property
    def jaxpr(self) -> Any:
        return self.programs[0].jaxpr


_lifted, _plans, _jitted = Cache(1024), Cache(1024), Cache(1024)


def _cached(cache: Cache, key: Any, make: Callable[[], Any]) -> Any:
    with _jax.without_anonymous_axes():
        key = (key, _jax.trace_key())
        try:
            hash(key)
        except TypeError:
            return make()
        return cache.get(key, make)


class Lifting(NamedTuple):
    """How inner programs are lifted: by which modes, with which paths of the equation's operands."""

    modes: Modes
    paths: tuple[str | None, ...] | None

    def of(self, start: int, *others: int) -> Paths:
        """The paths of the operands from one on, after some others."""
        return None if self.paths is None else (*(self.paths[i] for i in others), *self.paths[start:])


def lifted(
    jaxpr: Any, types: Sequence[Any], modes: Modes, paths: Paths, dense_outs: frozenset[int] = frozenset(), why: str = ""
) -> Lifted:
    """``jaxpr`` on operands of these types; the results ``dense_outs`` are made dense at its end."""

    def make() -> Lifted:
        events: list[Event] = []

        def run(*args: Any) -> list[Any]:
            out = _interpret.evaluate(jaxpr, args, events.append, modes, paths)
            for i in dense_outs:
                if _interpret.stands_for_array(ty := _jax.typeof(out[i]), jaxpr.out_avals[i]):
                    events.append(Event("", (), ty, why=why))
                    out[i] = _interpret.densify(out[i])
            return [_jaxpr.with_weak_type(x, a) for x, a in zip(out, jaxpr.out_avals, strict=True)]

        return Lifted(_jaxpr.trace(run, types), tuple(events))

    return _cached(_lifted, (jaxpr, tuple(types), modes, paths if paths is None else tuple(paths), dense_outs), make)


# --- plans ---------------------------------------------------------------------------------------------------------


def _settle(carry: Sequence[int], types: list[Any], lift: Callable[[frozenset[int]], Lifted]) -> Plan:
    """Make carries dense until the body gives what it takes; ``types`` becomes what the body is lifted on.

    ``carry`` holds the operand's position of each carry; the body's first results are the carries.
    """
    dense, ends = dict[int, str](), frozenset[int]()
    while True:
        body = lift(ends)
        outs = body.jaxpr.out_avals
        wrong = [j for j, i in enumerate(carry) if not _same(types[i], outs[j])]
        if not wrong:
            return Plan(dense, (body,))
        for j in wrong:
            i = carry[j]
            if isinstance(types[i], ValueType):
                dense[i] = f"before the loop, whose body gives {outs[j]} for it"
                types[i] = dense_type(types[i])
            else:
                ends |= {j}


def _same(a: Any, b: Any) -> bool:
    return a == b if _jax.is_hi(a) or _jax.is_hi(b) else True


def _plan_scan(params: dict[str, Any], types: list[Any], how: Lifting) -> Plan:
    n_consts, n_carry = _jaxpr.scan_counts(params)
    start, dense, cut = n_consts + n_carry, dict[int, str](), dict[int, Any]()
    for i in range(start, len(types)):
        try:
            types[i], cut[i] = _sliced(params["length"], types[i])
        except TypeError:
            dense[i] = "since its leading axis cannot be sliced"
            types[i] = _repairs.mapped_leading_aval(params["length"], dense_type(types[i]))
    why = "at the end of the body, since the carry is an array"
    plan = _settle(range(n_consts, start), types, lambda ends: lifted(params["jaxpr"], types, *how, ends, why))
    return Plan(
        dense | plan.dense, plan.programs, tuple((i, p) for i, p in cut.items() if p is not None and i not in plan.dense)
    )


def _sliced(length: int, ty: Any) -> tuple[Any, Any]:
    """The type of an entry, and the program for a value that has these entries, if it is another.

    Raises:
      TypeError: where there is none.
    """
    try:
        return _repairs.mapped_leading_aval(length, ty), None
    except TypeError:
        program = _entries(ty)
        return _repairs.mapped_leading_aval(length, program.out_avals[0]), program


def _entries(ty: ValueType) -> Any:
    """The program that takes a value apart along its leading axis and stacks the parts, where ops do both: what the entries
    shared, a scale of all, each then has for itself.

    Raises:
      TypeError: where no op does.
    """
    whole = dense_type(ty)
    parts = lambda x: jax.numpy.stack([jax.lax.index_in_dim(x, i, 0, keepdims=False) for i in range(whole.shape[0])])
    done = lifted(_jaxpr.trace(parts, [whole]), [ty], _interpret.PLAIN, None)
    if any(e.dense is not None for e in done.events) or not isinstance(done.jaxpr.out_avals[0], ValueType):
        raise TypeError
    return done.jaxpr


def _plan_while(params: dict[str, Any], types: list[Any], how: Lifting) -> Plan:
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    carry = range(nc + nb, len(types))
    why = "at the end of the body, since the carry is an array"
    plan = _settle(carry, types, lambda ends: lifted(params["body_jaxpr"], types[nc:], how.modes, how.of(nc), ends, why))
    of_cond = how.of(nc + nb, *range(nc))
    cond = lifted(params["cond_jaxpr"], [*types[:nc], *types[nc + nb :]], how.modes, of_cond)
    return Plan(plan.dense, (*plan.programs, cond))


def _plan_cond(params: dict[str, Any], types: list[Any], how: Lifting) -> Plan:
    branches, paths = params["branches"], how.of(1)
    first = [lifted(b, types[1:], how.modes, paths) for b in branches]
    outs = zip(*(b.jaxpr.out_avals for b in first), strict=True)
    differ = frozenset(j for j, tys in enumerate(outs) if not all(_same(tys[0], t) for t in tys))
    why = "at the end of a branch, since the others give another type"
    return Plan({}, tuple(lifted(b, types[1:], how.modes, paths, differ, why) for b in branches))


def _plan_jit(params: dict[str, Any], types: list[Any], how: Lifting) -> Plan:
    dense = dict[int, str]()
    for i, (t, a, s) in enumerate(zip(types, params["jaxpr"].in_avals, params["in_shardings"], strict=True)):
        if _interpret.stands_for_array(t, a) and s is not _jax.unspecified:
            dense[i], types[i] = f"since the call asks for the sharding {s} of an array", dense_type(t)
    placed = frozenset(i for i, s in enumerate(params["out_shardings"]) if s is not _jax.unspecified)
    return Plan(dense, (lifted(params["jaxpr"], types, *how, placed, "since the call asks for the sharding of an array"),))


def _plan_shard_map(params: dict[str, Any], types: list[Any], how: Lifting) -> Plan:
    """The whole equation is traced: its body sees the mesh only within it. A value is cut as the array it stands for."""
    dense, events, specs = dict[int, str](), list[Event](), list(params["in_specs"])
    ends: list[Any] = list(params["out_specs"])
    for i, (t, v) in enumerate(zip(types, params["jaxpr"].in_avals, strict=True)):
        if _interpret.stands_for_array(t, v):
            try:
                spec = t.partition_spec(specs[i])[0]
                t.shard(params["mesh"], params["newly_manual_axes"], params["check_vma"], spec)
                specs[i] = spec
            except (TypeError, AttributeError):
                dense[i], types[i] = f"since it cannot be cut by {params['in_specs'][i]}", dense_type(t)

    def body(*xs: Any) -> list[Any]:
        out = _interpret.evaluate(params["jaxpr"], xs, events.append, *how)
        for i, (x, a) in enumerate(zip(out, params["jaxpr"].out_avals, strict=True)):
            if _interpret.stands_for_array(t := _jax.typeof(x), a):
                try:
                    ends[i] = t.partition_spec(params["out_specs"][i])[0]
                except (TypeError, AttributeError):
                    events.append(Event("", (), t, why=f"since it cannot be put together by {params['out_specs'][i]}"))
                    out[i] = _interpret.densify(x)
        return out

    whole = _jaxpr.trace(lambda *xs: _jax.bind_shard_map(xs, body, specs, lambda: ends, params), types)
    return Plan(dense, (Lifted(whole, tuple(events)),))


def _run_shard_map(operands: Sequence[Any], params: dict[str, Any], plan: Plan, _: Lifting) -> list[Any]:
    if not _jax.trace_is_clean():
        return _jax.eval_jaxpr_fun(plan.jaxpr)(*operands)
    # JAX's takes no values eagerly
    return _jitted.get(plan.jaxpr, lambda: jax.jit(_jax.eval_jaxpr_fun(plan.jaxpr)))(*operands)


def _plan_inner(name: str) -> "MakePlan":
    return lambda params, types, how: Plan({}, (lifted(params[name], types, *how),))


def _plan_rule(params: dict[str, Any], types: list[Any], how: Lifting) -> Plan:
    """A function with a rule of derivatives: the rule gives arrays their tangents, and none to the components of a value."""
    whole = lifted(params["call_jaxpr"], types, *how)
    parts = frozenset(j for j, t in enumerate(whole.jaxpr.out_avals) if by_components(t) and has_tangent(t))
    why = "at the end of a function with its own rule of derivatives, which knows of no components"
    return Plan({}, (lifted(params["call_jaxpr"], types, *how, parts, why) if parts else whole,))


# --- running them ----------------------------------------------------------------------------------------------------

type MakePlan = Callable[[dict[str, Any], list[Any], Lifting], Plan]
type Run = Callable[[Sequence[Any], dict[str, Any], Plan, Lifting], list[Any]]


def _plan_for(primitive: Any, plan: MakePlan, params: dict[str, Any], types: Iterable[Any], how: Lifting) -> Plan:
    types = tuple(types)
    return _cached(_plans, (primitive, tuple(params.items()), types, how), lambda: plan(params, list(types), how))


def _structured(primitive: Any, plan: MakePlan, run: Run) -> None:
    def handle(eqn: Any, operands: Sequence[Any], record: Record, modes: Modes, paths: Paths) -> list[Any]:
        how = Lifting(modes, None if paths is None else tuple(paths))
        chosen = _plan_for(primitive, plan, eqn.params, map(_jax.typeof, operands), how)
        if record is not _interpret.silent:
            whole = _interpret.event(eqn, tuple(map(_jax.typeof, operands)))
            for i, why in chosen.dense.items():
                record(whole._replace(dense=whole.types[i], why=why, path=None if paths is None else paths[i]))
            times = eqn.params["length"] if primitive is jax.lax.scan_p else 1
            for e in (e for p in chosen.programs for e in p.events):
                e = e if e.primitive else e._replace(primitive=primitive.name, scope=whole.scope)
                e = e._replace(place=e.place or whole.place)  # a jitted function of JAX has none of the program's frames
                record(e._replace(times=e.times * times))
        full = [_interpret.densify(x) if i in chosen.dense else x for i, x in enumerate(operands)]
        for i, program in chosen.cut:
            (full[i],) = _jax.eval_jaxpr_fun(program)(full[i])
        return list(run(full, eqn.params, chosen, how))

    _interpret.structured[primitive] = handle


class _Equation(Op):
    """An equation that holds programs, as an op; it prints with these, lifted, under the names of its parameters."""

    holds: tuple[str, ...]
    plan: MakePlan

    def _application(self, tree: Any, tys: Sequence[Any], statics: dict[str, Any]) -> Any:
        app: Any = super()._application(tree, tys, statics)
        params = _jaxpr.opened({k: v for k, v in statics.items() if k != "lifting"})
        plan = _plan_for(self.primitive, self.plan, params, tys, statics.get("lifting", _UNTOLD))
        inner = tuple(p.jaxpr for p in plan.programs)
        app.shown = dict(zip(self.holds, inner, strict=True)) if len(self.holds) == len(inner) else {self.holds[0]: inner}
        return app


def _as_op(primitive: Any, plan: MakePlan, run: Run, *holds: str, rule: bool = False) -> None:
    """Run the equation as an op: derivatives are the equation's own, and it maps as its arrays do.

    ``rule``: it has a rule of derivatives, which the programs that it holds have not.
    """
    op = _Equation(primitive, primitive.name)
    op.holds, op.plan, op._reference_derives = holds, plan, rule

    def implementation(*operands: Any, lifting: Lifting = _UNTOLD, **params: Any) -> list[Any]:
        operands, params = tuple(map(pack_open, operands)), _jaxpr.opened(params)
        return run(operands, params, _plan_for(primitive, plan, params, map(_jax.typeof, operands), lifting), lifting)

    op.impl(implementation)
    _structured(primitive, plan, lambda operands, params, _, how: op(*operands, **_jaxpr.hashable(params), **_told(how)))


_UNTOLD = Lifting(_interpret.PLAIN, None)


def _told(how: Lifting) -> dict[str, Any]:
    return {} if how == _UNTOLD else {"lifting": how}


def _run_while(operands: Sequence[Any], params: dict[str, Any], plan: Plan, _: Lifting) -> list[Any]:
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    consts, of_body, init = operands[:nc], operands[nc : nc + nb], list(operands[nc + nb :])
    body, cond = plan.programs
    return jax.lax.while_loop(lambda c: cond(*consts, *c)[0], lambda c: body(*of_body, *c), init)


def _run_cond(operands: Sequence[Any], params: dict[str, Any], plan: Plan, _: Lifting) -> list[Any]:
    branches = [lambda *xs, program=program: program(*xs) for program in plan.programs]
    return jax.lax.switch(operands[0], branches, *operands[1:])


def _run_jit(operands: Sequence[Any], params: dict[str, Any], plan: Plan, _: Lifting) -> list[Any]:
    return _jax.jit_p.bind(*operands, **(params | {"jaxpr": plan.jaxpr}))


def _run_remat(operands: Sequence[Any], params: dict[str, Any], plan: Plan, _: Lifting) -> list[Any]:
    return _jax.remat_p.bind(*operands, **(params | {"jaxpr": plan.jaxpr}))


def _run_inner(operands: Sequence[Any], params: dict[str, Any], plan: Plan, _: Lifting) -> list[Any]:
    return plan.programs[0](*operands)


_structured(_jax.jit_p, _plan_jit, _run_jit)
_structured(_jax.remat_p, _plan_inner("jaxpr"), _run_remat)
_structured(jax.lax.scan_p, _plan_scan, lambda operands, params, plan, _: _jax.bind_scan(operands, plan.jaxpr, params))
_structured(_jax.shard_map_p, _plan_shard_map, _run_shard_map)
_structured(_jax.eval_jaxpr_p, _plan_inner("call_jaxpr"), _run_inner)
_as_op(jax.lax.while_p, _plan_while, _run_while, "body_jaxpr", "cond_jaxpr")
_as_op(jax.lax.cond_p, _plan_cond, _run_cond, "branches")
_as_op(_jax.custom_jvp_call_p, _plan_rule, _run_inner, "call_jaxpr", rule=True)
_as_op(_jax.custom_vjp_call_p, _plan_rule, _run_inner, "call_jaxpr", rule=True)
