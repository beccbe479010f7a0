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
    none = jax.tree.map(lambda x: _empty(_jax.typeof(x)), call.args)
    c, ys = jax.lax.scan(step, 0, none, length=0)
    shapes = [tuple(y.shape) for y in jax.tree.leaves(meaning(ys))]
    if int(c) or shapes != [(0, *w.shape) for w in jax.tree.leaves(loop[0])]:
        raise Broken(f"an empty scan gives {int(c)} steps and results of shape {shapes}: loops of length 0 change a program")


def _empty(ty: Any) -> Any:
    """A stack of no values."""
    if not _jax.is_hi(ty):
        return jax.numpy.zeros((0, *ty.shape), ty.dtype)
    none = ty.inc_rank(0, spec_of(ty))
    return none.raise_val(*(jax.numpy.zeros(a.shape, a.dtype) for a in none.lo_ty()))


@law("op", "In branches and loops the op gives what it gives without, and its result is carried.")
def control_flow(op: Any, call: Call) -> None:
    first, second = (meaning(call.run(*args)) for args in call.all[:2])
    branches = [lambda a, b: call.run(*a), lambda a, b: call.run(*b)]

    def program(i: Any, a: Any, b: Any) -> Any:
        chosen = jax.lax.cond(i == 1, *branches, a, b), jax.lax.switch(i, branches, a, b)
        looped = jax.lax.fori_loop(0, 2, lambda k, c: call.run(*b), call.run(*a))
        counted = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, call.run(*a)), (0, call.run(*b)))
        return *chosen, looped, counted[1]

    # jit of a branch asks a type for `mat`, which one written by hand need not have
    plain = all(hasattr(_jax.typeof(x), "mat") for x in jax.tree.leaves(call.run(*call.args)))
    for i in (0, 1):
        results = (jax.jit(program) if plain else program)(i, *call.all[:2])
        wanted = [(first, second)[1 - i], (first, second)[i], second, first]
        for what, got, want in zip(("cond", "switch", "fori_loop", "while_loop"), results, wanted, strict=True):
            got = meaning(got)
            close(f"the result in a {what}", got, want, near(got, want, 64), "control flow changes what the op gives")
