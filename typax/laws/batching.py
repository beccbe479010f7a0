"""A mapped or scanned op is a loop over it."""

import itertools
from typing import Any

import jax

from typax import _jax
from typax.laws._calls import mapped
from typax.laws._law import Broken, Call, NotApplicable, law
from typax.laws._values import close, meaning, near, spec_of, stacked
from typax.laws.mapping import places


def _last_axis(tree: Any) -> int:
    """The last place of a new batch axis in every value of an operand."""
    return min((places(_jax.typeof(x)) for x in jax.tree.leaves(tree)), default=0)


def _specs(tree: Any, axis: int) -> Any:
    return jax.tree.map(lambda x: spec_of(_jax.typeof(x), axis), tree)


def _loop(call: Call, mapped: tuple[int, ...]) -> list[Any]:
    rows = [[r[i] if i in mapped else call.args[i] for i in range(len(call.args))] for r in call.all]
    return [meaning(call.run(*row)) for row in rows]


def _against(what: str, got: Any, loop: list[Any]) -> None:
    want = jax.tree.map(lambda *xs: jax.numpy.stack(xs), *loop)
    close(what, got, want, near(got, want, 64), "mapped operands are not treated each for itself")


@law("op", "Mapped over any of its operands, along any batch axis, the op is the loop over it.")
def batch_is_loop(op: Any, call: Call) -> None:
    n, count = len(call.all), len(call.args)
    if not count:
        raise NotApplicable("the op has no operands")
    subsets = [s for k in range(1, count + 1) for s in itertools.combinations(range(count), k)]
    for chosen in subsets[:7]:
        loop = _loop(call, chosen)
        spots = {0} | ({max(_last_axis(call.args[i]) for i in chosen)} if len(chosen) == count or count == 1 else set())
        for place in spots:
            axes = [min(place, _last_axis(x)) if i in chosen else None for i, x in enumerate(call.args)]
            args = [
                x if a is None else stacked([r[i] for r in call.all], a)
                for i, (x, a) in enumerate(zip(call.args, axes, strict=True))
            ]
            specs = [None if a is None else _specs(x, a) for x, a in zip(args, axes, strict=True)]
            out = mapped(call.run, call.args, n, specs)(*args)
            _against(f"vmap over operands {list(chosen)} along axes {axes}", meaning(out), loop)


@law("op", "Mapped twice, over the same operands or others, the op is the loop over the loop.")
def batch_twice(op: Any, call: Call) -> None:
    n, count = len(call.all), len(call.args)
    every = tuple(range(count))
    once = [stacked([r[i] for r in call.all]) for i in every]
    twice = [stacked([x] * 2) for x in once]
    loop = _loop(call, every)
    each = [_specs(x, 0) for x in once]
    inner = mapped(call.run, call.args, n, each)
    out = meaning(mapped(inner, once, 2, [_specs(x, 0) for x in twice])(*twice))
    for k in range(2):
        _against(f"vmap of vmap, element {k},", jax.tree.map(lambda x, k=k: x[k], out), loop)
    if count > 1:
        inner = mapped(call.run, call.args, n, [each[0], *(None,) * (count - 1)])
        out = meaning(mapped(inner, [once[0], *call.args[1:]], n, [None, *each[1:]])(*once))
        for k, row in enumerate(call.all):
            loop = [meaning(call.run(r[0], *row[1:])) for r in call.all]
            _against("vmap over the first operand, then the others,", jax.tree.map(lambda x, k=k: x[k], out), loop)


@law("op", "Scanned over stacked operands, forwards or backwards, the op is the loop over it; an empty scan is empty.")
def scan_is_loop(op: Any, call: Call) -> None:
    n = len(call.all)
    stack = stacked(call.all)
    loop = _loop(call, tuple(range(len(call.args))))
    step = lambda c, args: (c + 1, call.run(*args))
    for reverse in (False, True):
        c, ys = jax.lax.scan(step, 0, stack, length=n, reverse=reverse)
        _against("scan" + (", reversed," if reverse else ""), meaning(ys), loop)
        if int(c) != n:
            raise Broken(f"a scan of length {n} runs {int(c)} times")
