"""What it costs to trace and to lower a program of many ops, and its gradients.

    python -m benchmarks.trace [--rounds 9] [--ops 200]

Three forms of one program, a chain of products with int8 matrices: with `typax.matmul`; with a hi type and a primitive
written by hand on the raw API, as JAX's own example writes them; and on arrays alone, as a function of the components.
Each is traced anew in each round: a new function is jitted, while what JAX and typax know of the op itself stays.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import typax
from typax.hijax import HiPrim, HiType, ShapedArray, register_hitype

COLUMNS = ("typax", "raw hijax", "arrays")


# --- by hand ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """Int8 codes with a scale for each row."""

    code: jax.Array
    scale: jax.Array


@dataclass(frozen=True)
class CodesType(HiType):
    """The type of `Codes`."""

    shape: tuple[int, ...]
    sharding: Any

    def lo_ty(self) -> list[Any]:
        rows = self.sharding.update(spec=jax.P(*self.sharding.spec[:-1]))
        return [
            ShapedArray(self.shape, jnp.dtype("int8"), sharding=self.sharding),
            ShapedArray(self.shape[:-1], jnp.dtype("float32"), sharding=rows),
        ]

    def lower_val(self, value: Any, /) -> list[Any]:
        return [value.code, value.scale]

    def raise_val(self, *los: Any) -> Any:
        return Codes(*los)

    def to_tangent_aval(self) -> Any:
        return ShapedArray(self.shape, jnp.dtype("float32"), sharding=self.sharding)

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        return f"codes[{','.join(map(str, self.shape))}]"


register_hitype(Codes, lambda v: CodesType(v.code.shape, jax.typeof(v.code).sharding))


class Dense(HiPrim):
    """The array that codes stand for."""

    def __init__(self, ty: Any) -> None:
        self.in_avals, self.params = (ty,), {}
        self.out_aval = ty.to_tangent_aval()
        super().__init__()

    def expand(self, v: Any) -> Any:
        return v.code.astype(jnp.float32) * v.scale[..., None]

    def vjp_fwd(self, nzs_in: Any, v: Any) -> Any:
        return self(v), None

    def vjp_bwd_retval(self, res: Any, g: Any) -> Any:
        return (g,)


class Product(HiPrim):
    """An array times codes."""

    def __init__(self, x: Any, w: Any) -> None:
        if x.shape[1] != w.shape[0]:
            raise TypeError(f"bad operand types: {x} @ {w}")
        self.in_avals, self.params = (x, w), {}
        sharding = x.sharding.update(spec=jax.P(x.sharding.spec[0], w.sharding.spec[1]))
        self.out_aval = ShapedArray((x.shape[0], w.shape[1]), jnp.dtype("float32"), sharding=sharding)
        super().__init__()

    def expand(self, x: Any, w: Any) -> Any:
        return (x * w.scale) @ w.code.astype(jnp.float32)

    def vjp_fwd(self, nzs_in: Any, x: Any, w: Any) -> Any:
        return self(x, w), (x, w)

    def vjp_bwd_retval(self, res: Any, g: Any) -> Any:
        x, w = res
        dense = Dense(jax.typeof(w))(w)
        return g @ dense.T, x.T @ g


def raw_product(x: Any, w: Any) -> Any:
    return Product(jax.typeof(x), jax.typeof(w))(x, w)


def array_product(x: Any, w: Any) -> Any:
    code, scale = w
    return (x * scale) @ code.astype(jnp.float32)


# --- the program -----------------------------------------------------------------------------------------------------


def chain(product: Callable[[Any, Any], Any], ops: int) -> Callable[[Any, Any], Any]:
    def f(x: Any, w: Any) -> Any:
        for _ in range(ops):
            x = product(x, w)
        return x.sum()

    return f


def programs(ops: int) -> dict[str, dict[str, tuple[Callable[[], Any], tuple[Any, ...]]]]:
    """For each row and column, what makes a new function, and its arguments."""
    x, q = jnp.ones((8, 16)), typax.quantize(jnp.cos(jnp.arange(256.0)).reshape(16, 16))
    code, scale = q.components()[:2]
    forms = {
        "typax": (typax.matmul, q),
        "raw hijax": (raw_product, Codes(code, scale)),
        "arrays": (array_product, (code, scale)),
    }
    rows: dict[str, Callable[[Any], Any]] = {
        "forward": lambda f: f,
        "gradient by x": lambda f: jax.grad(f),
        "gradient by w": lambda f: jax.grad(f, 1),
    }
    found: dict[str, Any] = {}
    for row, transform in rows.items():
        found[row] = {}
        for name, (product, w) in forms.items():
            if row == "gradient by w" and name == "arrays":  # the codes are integers: by the scales alone
                make = lambda product=product, code=w[0]: jax.grad(
                    lambda x, s: chain(lambda x, s: product(x, (code, s)), ops)(x, s), 1
                )
                found[row][name] = make, (x, w[1])
            else:
                found[row][name] = (lambda p=product, t=transform: t(chain(p, ops))), (x, w)
    return found


def times(make: Callable[[], Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """Milliseconds to trace a new function, and to lower it."""
    f = jax.jit(make())
    start = time.perf_counter()
    traced = f.trace(*args)
    middle = time.perf_counter()
    traced.lower()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description="What tracing costs.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", type=int, default=200)
    arguments = parser.parse_args(argv)
    print(
        f"JAX {jax.__version__}, {jax.devices()[0].platform}: {arguments.ops} ops, milliseconds to trace + to lower, and the"
    )
    print(f"ratio of the sums to raw hijax. Medians of {arguments.rounds} interleaved rounds.\n")
    print(f"{'':16}" + "".join(f"{c:>28}" for c in COLUMNS))
    worst = 0.0
    for row, forms in programs(arguments.ops).items():
        rounds: dict[str, list[tuple[float, float]]] = {c: [] for c in COLUMNS}
        for k in range(arguments.rounds + 1):
            for c in COLUMNS:
                got = times(*forms[c])
                if k:  # the first round fills the caches of the ops
                    rounds[c].append(got)
        text = f"{row:16}"
        for c in COLUMNS:
            trace, lower = (median(r[i] for r in rounds[c]) for i in (0, 1))
            ratio = median(sum(a) / sum(b) for a, b in zip(rounds[c], rounds["raw hijax"], strict=True))
            text += f"{trace:9.1f} +{lower:7.1f}{ratio:7.2f} x"
            worst = max(worst, ratio) if c == "typax" else worst
        print(text, flush=True)
    print(f"\nAt most {worst:.2f} times raw hijax (wanted: at most 1).")
    return int(worst > 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
