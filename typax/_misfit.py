"""Why no implementation takes the operands of a call: the one thing to change, where there is one."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from typax import _jax
from typax._axes import Pattern
from typax._match import Implementation, is_one, match, stack_of_one
from typax._type import fits_class

SHOWN = 4  # implementations that a message lists


def no_implementation(name: str, impls: Sequence[Implementation], args: Sequence[Any]) -> TypeError:
    """The error for operands, each a pytree of types, of which no implementation takes."""
    said = f"{name} has no implementation for {show(args)}"
    if why := next(_reasons(name, impls, args), None):
        return TypeError(f"{said}: {why}")
    have = [*map(str, impls[:SHOWN]), *([f"{len(impls) - SHOWN} more"] if len(impls) > SHOWN else [])]
    hi = any(map(_jax.is_hi, jax.tree.leaves(args)))
    advice = f"Add one with @{name}.impl" + (", or apply it to typax.dense(v)" if hi else "")
    return TypeError(f"{said}; it has: {'; '.join(have) or 'none'}. {advice}")


def show(args: Any) -> str:
    return "(" + ", ".join(map(_show_one, args)) + ")"


def _show_one(arg: Any) -> str:
    return str(arg) if is_one(arg) else str(jax.tree.map(str, arg))


def _reasons(name: str, impls: Sequence[Implementation], args: Sequence[Any]) -> Iterator[str]:
    alike = [i for i in impls if len(i.operands) == len(args) and not i.variadic]
    for impl in alike:
        if sizes := _clash(impl, args):
            yield f"{sizes}, where {impl} has one size"
    for impl in alike:
        if (t := stack_of_one(impl, args)) is not None:
            yield f"{t} is a stack where {impl} takes one; apply {name} to each with jax.vmap"
    counts = {len(i.operands) for i in impls if not i.variadic}
    if counts and len(args) > max(counts) == len(impls[0].operands) and impls[0].statics:
        statics = ", ".join(impls[0].statics)
        yield f"it takes {max(counts)} operand{'s' * (max(counts) > 1)}; statics go by keyword: {statics}"
    for impl in alike:  # all but one operand fit
        wrong = [(ps, a) for ps, a in zip(impl.operands, args, strict=True) if not any(match(p, a, {}) for p in ps)]
        if len(wrong) == 1 and (why := _unfit(*wrong[0])):
            yield why


def _clash(impl: Implementation, args: Sequence[Any]) -> str:
    """The first axis that has two sizes, where each operand by itself fits."""
    seen: dict[Any, tuple[Any, Any]] = {}
    found = ""
    for ps, a in zip(impl.operands, args, strict=True):
        env: dict[Any, Any] = {}
        p = next((p for p in ps if match(p, a, env)), None)
        if p is None:
            return ""
        for axis, size in env.items():
            if not isinstance(axis, str) or not isinstance(size, int):
                continue
            old, where = seen.setdefault(axis, (size, a))
            if old != size:
                found = found or f"{axis} is {old} in {where} and {size} in {a}"
    return found


def _unfit(patterns: Sequence[Pattern], arg: Any) -> str:
    """What to do with an operand that stands where an array is taken."""
    p = next((p for p in patterns if p.cls is jax.Array), None)
    if p is None:
        return ""
    if not is_one(arg):
        return f"a {type(arg).__name__} is not an array; make it one with jnp.asarray"
    if _jax.is_hi(arg) or not fits_class(p.cls, arg):
        return ""
    if not p.admits(arg.dtype):
        return f"{arg} is not {p.text}; cast it with astype"
    if p.axes is not None and len(arg.shape) < p.axes.rank:
        return f"{arg} has too few axes for {p.text}"
    return ""
