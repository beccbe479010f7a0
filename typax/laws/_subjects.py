"""What laws are checked on: a class, an op with one of its implementations, all that a module has."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from hypothesis.strategies import SearchStrategy

from typax import _jax
from typax._op import Op, by_name, every
from typax._value import Value
from typax.laws import _draw
from typax.laws._calls import ByHand
from typax.laws._law import LAWS, Call, Law, Values


@dataclass(frozen=True)
class Subject:
    """What a law is checked on: a class, or an op with one of its implementations; and how its examples are drawn.

    ``kind`` is ``"type"`` or ``"op"``, ``name`` that of its column, ``what`` the class or op; ``draw`` makes a strategy of
    examples, ``given`` holds those that are not drawn, ``made`` the classes whose values an op makes, ``without`` the kinds
    of examples that there are known to be none of.
    """

    kind: Literal["type", "op"]
    name: str
    what: Any
    draw: Callable[[_draw._Options], Any]
    given: tuple[Any, ...] | None = None
    made: tuple[type, ...] = ()
    without: set[Any] = field(default_factory=set, compare=False)


def subjects(cls: Any = None, ops: Sequence[Any] = (), examples: Any = None) -> list[Subject]:
    """What is checked: the class, and each implementation of each op that takes or gives a value of it.

    ``examples`` are as `check` takes them. Raises TypeError for examples of a class that is not among them.
    """
    found = _subjects(cls, ops, examples)
    _all_used({cls: examples} if examples is not None and not isinstance(examples, Mapping) else examples or {}, found)
    return found


def _all_used(given: Mapping[Any, Any], found: Sequence[Subject], more: Sequence[Any] = ()) -> None:
    """Raise for examples of a class that is neither checked, nor a part or an operand of it, nor among ``more``."""
    ops = [s.what for s in found if s.kind == "op"]
    taken = [p.cls for op in ops if isinstance(op, Op) for i in op.impls for ps in i.operands for p in ps]
    taken += [getattr(i.fn, "__annotations__", {}).get("return") for op in ops if isinstance(op, Op) for i in op.impls]
    taken += [_owner(i) for op in ops if isinstance(op, Op) for i in op.impls]
    classes = [s.what for s in found if s.kind == "type"]
    known = [*classes, *(op.fn if isinstance(op, ByHand) else op for op in ops), *more]
    known += [c for cls in [*classes, *taken] for c in _with_parts(cls)]
    checked = ", ".join(dict.fromkeys(s.name for s in found))
    for key in given:
        if key is None:
            raise TypeError("examples that are not a dict are of a class, and no class is checked: examples={op: [...]}")
        if not any(key is k or (callable(k) and key == k) for k in known):
            name = getattr(key, "__name__", None) or getattr(key, "name", str(key))
            twice = any(getattr(k, "__name__", None) == name or getattr(k, "name", None) == name for k in known)
            if not twice and not isinstance(key, type):  # one dict may hold the examples of ops of many modules
                continue
            why = ", but of another one of this name: is its file imported twice?" if twice else f" ({checked})"
            raise TypeError(f"examples are given of {name}, which is none of what is checked{why}")


def _with_parts(cls: Any) -> list[Any]:
    """A class, and those of its components."""
    seen: list[Any] = []
    todo = [cls]
    while todo:
        if isinstance(at := todo.pop(), type) and at not in seen:
            seen.append(at)
            decl = getattr(at, "_declaration", None)
            todo += [p.cls for c in decl.components for p in c.patterns] if decl is not None else []
    return seen


def _subjects(cls: Any, ops: Sequence[Any], examples: Any) -> list[Subject]:
    given = examples if isinstance(examples, Mapping) else {} if examples is None else {cls: examples}
    given = {**conversions([cls] if cls is not None else (), ops), **given}
    makers = tuple((k, v) for k, v in given.items() if isinstance(k, type) and callable(v) and not _is_strategy(v))
    given = {k: v for k, v in given.items() if (k, v) not in makers}
    out = [] if cls is None else [_type_subject(cls, given.get(cls), makers)]
    for item in map(_added, ops):
        if (hand := _by_hand(item)) is not None:
            out.append(_hand_subject(hand, given))
            continue
        op, impls = (item, item.impls) if isinstance(item, Op) else (item[0], [item[1]])
        if op in given:
            out.append(_op_subject(op, None, given[op], cls, makers))
            continue
        mine = [i for i in impls if cls is None or len(impls) == 1 or concerns(i, cls)]
        out += [_op_subject(op, i, None, cls, makers) for i in mine]
    return out


def conversions(classes: Sequence[Any], ops: Sequence[Any]) -> dict[Any, Op]:
    """For classes with an axis that no component shows, whose values cannot be drawn component by component: the op whose
    reference is the identity, which makes them of arrays."""
    found: dict[Any, Op] = {}
    for cls in classes:
        for op in (op for op in ops if isinstance(op, Op) and hidden(cls) and _is_identity(op)):
            if any(gives(i, cls) and len(i.operands) == 1 and i.operands[0][0].cls is jax.Array for i in op.impls):
                found.setdefault(cls, op)
    return found


def hidden(cls: Any) -> set[str]:
    """The statics of a class that are sizes of axes which it stands for and no component has."""
    decl = getattr(cls, "_declaration", None)
    if decl is None or decl.stands_for is None:
        return set()
    own = {n for c in decl.components if c.axes for d in c.axes.dims for n in d.names}
    return {n for d in decl.stands_for.axes.dims for n in d.names} - own


def gives(impl: Any, cls: Any) -> bool:
    """Whether an implementation is annotated as giving values of the class."""
    return getattr(impl.fn, "__annotations__", {}).get("return") in (cls, cls.__name__)


def _is_identity(op: Op) -> bool:
    try:
        return op.reference is not None and op.reference(token := object()) is token
    except Exception:  # the user's function, of what it does not expect
        return False


def in_module(space: Any, target: Any = None, ops: Sequence[Any] | None = None, examples: Any = None) -> list[Subject]:
    """What a module has: its value classes, its ops, and the implementations that it adds to ops of others.

    With ``target`` one of its classes and the ops that take or give it, or one op. ``ops`` stand in the place of the
    module's. Classes written by hand are among them where there are ``examples``, as `check` takes them.
    """
    members = vars(space).values()
    own = list(dict.fromkeys(v for v in members if isinstance(v, Op))) if ops is None else list(ops)
    others = [op for op in by_name() if op not in own] if ops is None else []
    added = [(op, i) for op in others for i in op.impls if i.fn.__module__ == space.__name__]
    here = _classes(space)
    more = [*members, *here] if isinstance(examples, Mapping) else []  # a module may have one dict of all examples
    if isinstance(target, Op):
        found = _subjects(None, [target, *(ops or ())], examples)
    elif target is not None:
        if ops is None:
            own = [op for op in own if any(concerns(i, target) or gives(i, target) for i in op.impls)]
        found = _subjects(target, [*own, *(a for a in added if concerns(a[1], target))], examples)
    else:
        classes = [c for c in here if issubclass(c, Value)]
        if examples is None or isinstance(examples, Mapping):
            every_one = {**conversions(classes, own), **(examples or {})}
            classes += [c for c in here if c in every_one and c not in classes]
        elif len(classes) != 1:
            raise TypeError(f"{space.__name__} has {len(classes)} value classes: give a dict of classes and their examples")
        else:
            every_one = {classes[0]: examples}
        found = [s for c in classes for s in _subjects(c, (), every_one)] + _subjects(None, [*own, *added], every_one)
    given = examples if isinstance(examples, Mapping) else {} if examples is None or target is None else {target: examples}
    _all_used(given, found, more)
    return found


def written_by_hand(space: Any) -> list[type]:
    """The classes of a module whose values have a hi type that is written by hand."""
    return [c for c in _classes(space) if _jax.is_hi_class(c) and not issubclass(c, Value)]


def _classes(space: Any) -> list[type]:
    return [c for c in vars(space).values() if isinstance(c, type) and c.__module__ == space.__name__]


def _by_hand(item: Any) -> ByHand | None:
    fn, ref = item if isinstance(item, tuple) else (item, None)
    return None if isinstance(fn, Op) else ByHand(fn, ref)


def _added(item: Any) -> Any:
    """Of a function that was added to an op as an implementation, both; what else is given as it is."""
    return next(((op, i) for op in list(every) for i in op.impls if i.fn is item), item)


def _hand_subject(op: ByHand, given: Any) -> Subject:
    if (examples := given.get(op.fn)) is None:
        raise TypeError(f"{op.name} is written by hand, so that no examples follow; give some: examples={{fn: [...]}}")
    return _op_subject(op, None, examples, None, ())


def concerns(impl: Any, cls: Any) -> bool:
    """Whether an implementation takes a value of the class."""
    return _owner(impl) is cls or any(isinstance(p.cls, type) and issubclass(p.cls, cls) for ps in impl.operands for p in ps)


def _owner(impl: Any) -> Any:
    """The class of which an implementation is a method."""
    path = getattr(impl.fn, "__qualname__", "").split(".")[:-1]
    found = functools.reduce(lambda at, name: getattr(at, name, None), path, sys.modules.get(impl.fn.__module__))
    return found if path and hasattr(found, "_declaration") else None


def _is_strategy(x: Any) -> bool:
    return isinstance(x, SearchStrategy)


def _type_subject(cls: Any, examples: Any, makers: Any) -> Subject:
    if examples is None:
        if not hasattr(cls, "_declaration"):
            raise TypeError(f"{cls.__name__} is written by hand, so that no examples follow; give some: examples=[...]")
        return Subject(
            "type", cls.__name__, cls, lambda o: _draw.examples_of(cls, o._replace(makers=makers), {}), None, _made(makers)
        )
    if _is_strategy(examples):
        return Subject("type", cls.__name__, cls, lambda o: examples.map(_as_values))
    return Subject("type", cls.__name__, cls, lambda o: None, tuple(map(_as_values, examples)))


def _made(makers: Any) -> tuple[type, ...]:
    return tuple(cls for cls, _ in makers)


def _as_values(x: Any) -> Values:
    return x if isinstance(x, Values) else Values(x, (x, x))


def _op_subject(op: Any, impl: Any, examples: Any, owner: Any, makers: Any) -> Subject:
    if examples is None:
        name = op.name
        if len(op.impls) > 1:
            short = [_short(i) for i in op.impls]
            name += _short(impl) if short.count(_short(impl)) == 1 else str(impl)
        of = _owner(impl) or owner
        return Subject(
            "op", name, op, lambda o: _draw.calls_of(op, impl, o._replace(makers=makers), {}, of), None, _made(makers)
        )
    as_call = functools.partial(_as_call, op)
    if _is_strategy(examples):
        return Subject("op", op.name, op, lambda o: examples.map(as_call))
    return Subject("op", op.name, op, lambda o: None, tuple(map(as_call, examples)))


def _short(impl: Any) -> str:
    """The classes of the operands."""
    return "(" + ", ".join("|".join(getattr(p.cls, "__name__", str(p.cls)) for p in ps) for ps in impl.operands) + ")"


def _as_call(op: Any, x: Any) -> Call:
    if isinstance(x, Call):
        return replace(x, op=op)
    args, statics = x if len(x) == 2 and isinstance(x[0], tuple) and isinstance(x[1], dict) else (x, {})
    return Call(op, tuple(args), (tuple(args), tuple(args)), statics)


def pairs(subjects: Sequence[Subject], laws: Sequence[str] | str | None = None) -> Iterator[tuple[Law, Subject]]:
    """The laws that are of each subject's kind."""
    names = list(LAWS) if laws is None else [laws] if isinstance(laws, str) else list(laws)
    if unknown := [n for n in names if n not in LAWS]:
        raise ValueError(f"no law is called {', '.join(unknown)}; the laws are {', '.join(LAWS)}")
    for s in subjects:
        yield from ((LAWS[n], s) for n in names if LAWS[n].kind == s.kind)
