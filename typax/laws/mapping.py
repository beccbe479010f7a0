"""A stack of values is many values: axes come and go, and a mapped program is a loop."""

from typing import Any

import jax
import jax.numpy as jnp

from typax import _jax
from typax._byhand import is_raw
from typax._type import ValueType, lo_axes
from typax.laws._law import Broken, Values, law
from typax.laws._values import close, meaning, near, same, sliced, spec_of, stacked


def places(ty: Any) -> int:
    """The last place where a new batch axis can come: after those that there are."""
    if not isinstance(ty, ValueType):
        return 0 if is_raw(ty) else int(ty.ndim)
    if ty.has_own_axes:
        return ty.n_batch
    return min(map(places, ty.leaves), default=0)


def batch_axes(ty: Any) -> list[int]:
    """The axes along which a value can be mapped; those of a record are shared by all its components."""
    if isinstance(ty, ValueType):
        return list(range(places(ty) if ty.has_own_axes else min(places(ty), ty.ndim)))
    return []


@law("type", "A new batch axis that is taken away again leaves the type as it was, and each array has it once.")
def rank_change(cls: Any, example: Values) -> None:
    ty = _jax.typeof(example.value)
    for k in range(places(ty) + 1):
        spec = spec_of(ty, k)
        big = ty.inc_rank(3, spec)
        try:
            back = big.dec_rank(3, spec)
        except Exception as e:
            raise Broken(
                f"what inc_rank makes of {ty} along axis {k}, {big}, dec_rank refuses ({e}): vmap would fail"
            ) from None
        if back != ty:
            raise Broken(f"inc_rank and dec_rank of {ty} along axis {k} give {back}: vmap would change the type of a value")
        for a, b, axis in zip(ty.lo_ty(), big.lo_ty(), lo_axes(big, spec, 3), strict=True):
            if axis is not None and b.shape != (*a.shape[:axis], 3, *a.shape[axis:]):
                raise Broken(f"inc_rank of {ty} along axis {k} makes {b} of {a}: the stack would be read along another axis")
    for k in batch_axes(ty):
        size = ty.batch[k].size if ty.has_own_axes else ty.shape[k]
        small = ty.dec_rank(size, k)
        if (back := small.inc_rank(size, k)) != ty and all(m[k] for m in ty.masks if len(m) > k):
            raise Broken(f"dec_rank and inc_rank of {ty} along axis {k} give {back}: vmap would change the type of a value")


@law("type", "Mapping the identity along any batch axis gives the value back.")
def vmap_identity(cls: Any, example: Values) -> None:
    v = stacked(example.all)
    ty = _jax.typeof(v)
    for k in batch_axes(ty) if not is_raw(ty) else (0,):
        spec = spec_of(ty, k)
        size = len(example.all) if k == 0 else ty.batch[k].size if ty.has_own_axes else ty.shape[k]
        out = jax.vmap(lambda v: v, in_axes=spec, out_axes=spec, axis_size=size)(v)
        same(f"vmap of the identity along axis {k}", out, v, "values would change by being mapped")


@law("type", "What a stack stands for is the stack of what each stands for, along any batch axis, nested too.")
def dense_of_stack(cls: Any, example: Values) -> None:
    ty = _jax.typeof(example.value)
    n = len(example.all)
    want = [jax.tree.leaves(meaning(x)) for x in example.all]
    for k in range(places(ty) + 1):
        v = stacked(example.all, k)
        stack = [jnp.stack(xs, k) for xs in zip(*want, strict=True)]
        got = jax.tree.leaves(meaning(v))
        close(
            f"dense of a stack along axis {k}",
            got,
            stack,
            near(got, stack, 4),
            "a stack stands for other values than its own",
        )
        mapped = jax.tree.leaves(jax.vmap(meaning, in_axes=spec_of(ty, k), out_axes=k, axis_size=n)(v))
        close(f"vmap of dense along axis {k}", mapped, stack, near(mapped, stack, 4), "mapped programs see other values")
    once = stacked(example.all)
    twice = stacked([once] * 2)
    inner = jax.vmap(meaning, in_axes=spec_of(_jax.typeof(once)), axis_size=n)
    got = jax.tree.leaves(jax.vmap(inner, in_axes=spec_of(_jax.typeof(twice)), axis_size=2)(twice))
    stack = [jnp.stack([jnp.stack(xs)] * 2) for xs in zip(*want, strict=True)]
    close("vmap of vmap of dense", got, stack, near(got, stack, 4), "mapped programs see other values")


@law("type", "A scan over a stack sees each value in turn, forwards and backwards, and not at all if it is empty.")
def scan_slices(cls: Any, example: Values) -> None:
    n = len(example.all)
    vs = stacked(example.all)
    for reverse in (False, True):
        _, out = jax.lax.scan(lambda c, v: (c, v), 0, vs, length=n, reverse=reverse)
        same("the results of a scan that gives what it is given", out, vs, "loops would see other values than the stack's")
    for i, x in enumerate(example.all):
        same(f"element {i} of a stack", sliced(vs, i, n), x, "loops would see other values than the stack's")
    ty = _jax.typeof(example.value)
    if is_raw(ty):
        return
    none = ty.inc_rank(0, 0)
    empty = none.raise_val(*(jnp.zeros(a.shape, a.dtype) for a in none.lo_ty()))
    _, out = jax.lax.scan(lambda c, v: (c, v), 0, empty, length=0)
    same("an empty scan", out, empty, "loops of length 0 change a type")


@law("type", "A value may be carried by scan and while loops, and chosen by branches.")
def carried(cls: Any, example: Values) -> None:
    a, b = example.value, example.others[0]
    swap = lambda c: (c[1], c[0])
    out = jax.jit(lambda a, b: jax.lax.fori_loop(0, 3, lambda _, c: swap(c), (a, b)))(a, b)
    same("what a loop swaps three times", out, (b, a), "loops change the values that they carry")
    (c, d), _ = jax.lax.scan(lambda c, _: (swap(c), None), (a, b), None, length=3)
    same("what a scan swaps three times", (c, d), (b, a), "loops change the values that they carry")
    # jit of a branch asks a type for `mat`, which one written by hand need not have
    jit = jax.jit if hasattr(_jax.typeof(a), "mat") else lambda f: f
    choose = jit(lambda p, a, b: jax.lax.cond(p, lambda a, b: a, lambda a, b: b, a, b))
    same("cond(True, a, b)", choose(True, a, b), a, "branches change what they return")
    same("cond(False, a, b)", choose(False, a, b), b, "branches change what they return")
    switch = jit(lambda i, a, b: jax.lax.switch(i, [lambda a, b: a, lambda a, b: b], a, b))
    same("switch(1, a, b)", switch(1, a, b), b, "branches change what they return")


@law("type", "jit of the identity gives the value back.")
def jit_identity(cls: Any, example: Values) -> None:
    same(
        "jit of the identity",
        jax.jit(lambda v: v)(example.value),
        example.value,
        "values would change by passing through jit",
    )


@law("type", "A jitted function is traced once for values of one type.")
def one_trace(cls: Any, example: Values) -> None:
    count = 0

    @jax.jit
    def f(v: Any) -> Any:
        nonlocal count
        count += 1
        return v

    for v in example.all:
        f(v)
        f(f(v))
    if count != 1:
        raise Broken(
            f"a jitted function of {_jax.typeof(example.value)} is traced {count} times: each call would compile anew"
        )
