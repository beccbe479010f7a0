"""shard_map: values through its boundary and inside, eagerly, under jit, grad and vmap; collectives."""

from typing import Any

import jax
import jax.numpy as jnp

from _matrix import row
from _matrix.sides import ROWS8, XS, fake, mesh

MODES = {"explicit": (True, True), "auto": (False, True), "auto, check_vma=False": (False, False)}


def modes(name: str, red: bool = True, where: Any = tuple(MODES), **how: Any) -> Any:
    """A row on an explicit mesh, on an automatic one, and on that without check_vma."""

    def add(program: Any) -> None:
        for mode in where:
            kind, check = MODES[mode]

            def run(s: Any, kind: Any = kind, check: Any = check) -> Any:
                with jax.set_mesh(mesh(kind)):
                    return program(s, lambda f, i, o: s.shard_map(f, in_specs=i, out_specs=o, check_vma=check))

            run.__module__ = program.__module__
            row(f"[{mode}] {name}", red=red, **how)(run)

    return add


def put(x: Any) -> Any:
    return jax.device_put(x, jax.P("i"))


VMA = ("explicit", "auto")
I = jax.P("i")


@modes("under jit: array to value and back", red=False)
def _(s: Any, sm: Any) -> Any:
    q = s.jit(sm(s.quantize, I, s.P("i")))(put(ROWS8))
    return s.dense(q), s.jit(sm(lambda q: s.dense(q) * 2, s.P("i"), I))(q)


@modes("under jit: a value made and used inside, a value closed over", red=False)
def _(s: Any, sm: Any) -> Any:
    f = lambda x: s.matmul(s.dense(s.quantize(x)), s.quantize(jnp.arange(12.0).reshape(3, 4) / 12))
    return s.jit(sm(f, I, I))(put(ROWS8))


@modes("eager: array to value")
def _(s: Any, sm: Any) -> Any:
    return s.dense(sm(s.quantize, I, s.P("i"))(put(ROWS8)))


@modes("eager: value to array")
def _(s: Any, sm: Any) -> Any:
    return sm(lambda q: s.dense(q) * 2, s.P("i"), I)(s.quantize(put(ROWS8)))


@modes("a jax.P as the spec of a hi result", error=(TypeError | AttributeError, r"\.P\("), want=lambda: fake(ROWS8))
def _(s: Any, sm: Any) -> Any:
    return s.dense(s.jit(sm(s.quantize, I, I))(put(ROWS8)))


@modes("psum of a value", limit=(TypeError | NotImplementedError, r"psum\(.*dense"))
def _(s: Any, sm: Any) -> Any:
    return s.dense(s.jit(sm(lambda q: s.psum(q, "i"), s.P("i"), s.P()))(s.quantize(put(ROWS8))))


@modes("psum of what a value stands for", red=False)
def _(s: Any, sm: Any) -> Any:
    return s.jit(sm(lambda q: s.psum(s.dense(q), "i"), s.P("i"), jax.P()))(s.quantize(put(ROWS8)))


@modes("all_gather of a value")
def _(s: Any, sm: Any) -> Any:
    f = lambda q: s.dense(s.all_gather(q, "i", tiled=True))[None]
    return s.jit(sm(f, s.P("i"), jax.P("i")))(s.quantize(put(ROWS8)))


@modes("ppermute of a value")
def _(s: Any, sm: Any) -> Any:
    f = lambda q: s.ppermute(q, "i", [(k, (k + 1) % 4) for k in range(4)])
    return s.dense(s.jit(sm(f, s.P("i"), s.P("i")))(s.quantize(put(ROWS8))))


@modes("all_to_all of a value", where=("auto",))
def _(s: Any, sm: Any) -> Any:
    x = jnp.stack([ROWS8] * 4) * jnp.arange(1.0, 5)[:, None, None]
    f = lambda q: s.all_to_all(q, "i", 1, 0, tiled=True)
    return s.dense(s.jit(sm(f, s.P("i"), s.P("i")))(s.quantize(put(x))))


@modes("grad of an array through it, vjp rules", where=VMA)
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda x: jnp.sin(s.dense(s.quantize(x))), I, I)
    return s.jit(s.grad(lambda x: jnp.sum(f(x))))(put(ROWS8))


@modes("grad of a replicated value through it, vjp rules", where=VMA)
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda x, w: s.matmul(x, w), (I, s.P()), I)
    return s.jit(s.grad(lambda w: jnp.sum(jnp.sin(f(put(ROWS8), w)))))(s.w)


@modes("grad of a value through it, jvp rules", where=VMA)
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda q: jnp.sin(s.jvp_dense(q)), s.P("i"), I)
    return s.jit(s.grad(lambda q: jnp.sum(f(q))))(s.quantize(put(ROWS8)))


@modes("grad of a partitioned value through it", where=VMA)
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda q: jnp.sin(s.dense(q)), s.P("i"), I)
    return s.jit(s.grad(lambda q: jnp.sum(f(q))))(s.quantize(put(ROWS8)))


@modes("grad through it with a hi result", where=VMA)
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda x: s.quantize(jnp.sin(x)), I, s.P("i"))
    return s.jit(s.grad(lambda x: jnp.sum(s.dense(f(x)) ** 2)))(put(ROWS8))


@modes("grad, eager, a value is the residual")
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda x, q: x * s.dense(q), (I, s.P("i")), I)
    return s.grad(lambda x: jnp.sum(jnp.sin(f(x, s.quantize(put(ROWS8))))))(put(ROWS8 + 1))


@modes("grad, the residual is a value made inside", where=VMA)
def _(s: Any, sm: Any) -> Any:
    f = sm(lambda x: jnp.sin(s.dense(s.quantize(x))) * x, I, I)
    return s.jit(s.grad(lambda x: jnp.sum(f(x))))(put(ROWS8))


@modes("vmap of it, hi operand")
def _(s: Any, sm: Any) -> Any:
    stack = s.quantize(jax.device_put(jnp.stack([ROWS8, ROWS8 + 1, -ROWS8]), jax.P(None, "i")))
    f = sm(lambda q: s.dense(q) * 2, s.P("i"), I)
    return s.jit(s.vmap(f, in_axes=s.axis, axis_size=3))(stack)


@row("vmap inside, hi operand", red=False)
def _(s: Any) -> Any:
    with jax.set_mesh(mesh()):
        f = lambda q: s.vmap(lambda q: s.dense(q) * 2, in_axes=s.axis, axis_size=1)(q)
        return s.jit(s.shard_map(f, in_specs=s.P("i"), out_specs=I))(s.quantize(put(XS)))


@row("components that carry their own types: checkpoint inside, vjp rules")
def _(s: Any) -> Any:
    with jax.set_mesh(mesh()):
        f = s.shard_map(s.checkpoint(lambda x: jnp.sin(s.dense(s.quantize(x)))), in_specs=I, out_specs=I)
        return s.jit(s.grad(lambda x: jnp.sum(f(x))))(put(ROWS8))
