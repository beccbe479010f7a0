"""Products with quantized arrays, beside the float32 product of XLA on the same shapes.

    python -m benchmarks.matmul [--only int8] [--shapes 4096x4096] [--rows 1 8 64 512] [--rounds 3] [--calls 5]

In a round each function runs `calls` times; what is printed is the median, over rounds, of the ratio of its time to that of
float32 in the same round, and what is wanted. ``naive`` dequantizes the weights, then multiplies; ``qwix`` is its product,
where it can be imported. Then two layers with a gelu between them under one jit, small contractions, and what it
takes to compile a stack of layers.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import typax
from benchmarks._measure import Times, machine, measure

try:
    import qwix  # pyright: ignore[reportMissingImports]
except ImportError:  # it is in the extra "bench"
    qwix = None

ROWS = (1, 8, 64, 512)
COLUMN = {"axis": 0}
# format and layout; activations for each number of rows; times float32 that are wanted
TABLE: dict[str, tuple[str, dict[str, Any], Sequence[str], Sequence[float]]] = {
    "int8, float": ("int8", COLUMN, ("float",) * 4, (0.65, 0.30, 0.33, 0.45)),
    "int8, dynamic": ("int8", COLUMN, ("dynamic",) * 4, (0.65, 0.25, 0.18, 0.16)),
    "int4, float": ("int4", COLUMN, ("float",) * 4, (0.75, 0.40, 0.40, 0.50)),
    "int4, dynamic": ("int4", COLUMN, ("dynamic",) * 4, (0.75, 0.40, 0.26, 0.20)),
    "int4 by 128, float to 8 rows, then bfloat16": (
        "int4", {"axis": 0, "group": 128}, ("float", "float", "bfloat16", "bfloat16"), (0.78, 0.45, 0.50, 0.33),
    ),
    "nf4 by 64, dynamic to 8 rows, then bfloat16": (
        "nf4", {"axis": 0, "group": 64}, ("dynamic", "dynamic", "bfloat16", "bfloat16"), (1.4, 0.70, 0.62, 0.36),
    ),
    "fp8 e4m3, bfloat16": ("fp8_e4m3", COLUMN, ("bfloat16",) * 4, (1.5, 0.80, 0.45, 0.33)),
}  # fmt: skip
SMALL = {"384x1536": (384, 1536), "1536x384": (1536, 384)}
SMALL_WANTED = {"dynamic": 0.50, "float": 1.15}
COMPILED_WANTED = 2.0  # times float32, of a scanned stack


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def naive(x: Any, q: Any) -> Any:
    return jnp.matmul(x, typax.dense(q))


def product(activations: str) -> Callable[[Any, Any], Any]:
    return typax.jit(lambda x, q: typax.matmul(x, q, activations=activations))


def qwix_int8(x: Any, w: Any, dynamic: bool) -> Callable[[], Any] | None:
    """Its int8 product, of weights or of both, with one scale for each column and row."""
    if qwix is None:
        return None
    int8 = qwix.quantize
    f = jax.jit(lambda x, w: qwix.dot(int8(x, jnp.int8, channelwise_axes=(0,)) if dynamic else x, w))
    return functools.partial(f, x, int8(w, jnp.int8, channelwise_axes=(1,)))


def one_table(k: int, n: int, arguments: Any, missed: list[str]) -> None:
    w = normal(0, k, n)
    of_floats, dense = jax.jit(jnp.matmul), typax.jit(naive)
    names = [name for name in TABLE if any(o in name for o in arguments.only)]
    print(f"\n{f'{k} x {n}':44}" + "".join(f"{f'M={m}':>16}" for m in arguments.rows), flush=True)
    found: dict[str, list[str]] = {"float32, ms": [], **{name: [] for name in names}}
    values = {name: typax.quantize(w, TABLE[name][0], **TABLE[name][1]) for name in names}
    for m in arguments.rows:
        x = normal(1, m, k)
        at = min(range(4), key=lambda i: abs(np.log(ROWS[i] / m)))
        functions: dict[str, Callable[[], Any]] = {"float32, ms": lambda x=x: of_floats(x, w)}
        for name in names:
            f, q = product(TABLE[name][2][at]), values[name]
            functions[name] = lambda f=f, x=x, q=q: f(x, q)
        for name in names:
            if name == "int8, float":
                functions["naive int8"] = lambda x=x, q=values[name]: dense(x, q)
            if name.startswith("int8") and (f := qwix_int8(x, w, "dynamic" in name)):
                functions[f"qwix {name}"] = f
        times = measure(functions, arguments.rounds, arguments.calls, warm=1)
        for name in functions:
            wanted = TABLE[name][3][at] if name in TABLE and m in ROWS else None
            found.setdefault(name, []).append(_cell(times, name, wanted, f"{name}, {k}x{n}, M={m}", missed))
    show(found)


def _cell(times: Times, name: str, wanted: float | None, where: str, missed: list[str]) -> str:
    if name == "float32, ms":
        return f"{times.us(name) / 1e3:.2f} ms"
    ratio = times.ratio(name, "float32, ms")
    if wanted is None:
        return f"{ratio:.2f}       "
    if ratio > wanted:
        missed.append(f"{where}: {ratio:.2f} (wanted {wanted:g})")
    return f"{ratio:.2f} ({wanted:.2f})"


def show(rows: dict[str, list[str]]) -> None:
    for name, row in rows.items():
        print(f"{name:44}" + "".join(f"{c:>16}" for c in row), flush=True)


def two_layers(product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return typax.jit(lambda x, a, b: x + product(jax.nn.gelu(product(x, a)), b))


def inside(k: int, n: int, arguments: Any) -> None:
    a, b = normal(2, k, n) * k**-0.5, normal(3, n, k) * n**-0.5
    forms: dict[str, tuple[Any, Any, Any]] = {"float32, ms": (two_layers(jnp.matmul), a, b)}
    for activations in ("float", "dynamic"):
        f = lambda x, w, activations=activations: typax.matmul(x, w, activations=activations)
        forms[f"int8, {activations}"] = (two_layers(f), *(typax.quantize(w, axis=0) for w in (a, b)))
    rows: dict[str, list[str]] = {name: [] for name in forms}
    for m in arguments.rows:
        x = normal(4, m, k)
        functions = {name: lambda f=f, x=x, v=v, w=w: f(x, v, w) for name, (f, v, w) in forms.items()}
        times = measure(functions, arguments.rounds, arguments.calls, warm=1)
        for name in forms:
            rows[name].append(_cell(times, name, None, "", []))
    print(f"\nx + gelu(x w) v, {k} x {n}")
    show(rows)


def small(arguments: Any, missed: list[str]) -> None:
    print("\nM=2048" + " " * 38 + "".join(f"{s:>16}" for s in SMALL))
    rows: dict[str, list[str]] = {name: [] for name in ("float32, ms", *SMALL_WANTED)}
    for shape, (k, n) in SMALL.items():
        x, w = normal(5, 2048, k), normal(6, k, n)
        functions: dict[str, Callable[[], Any]] = {"float32, ms": functools.partial(jax.jit(jnp.matmul), x, w)}
        for activations in SMALL_WANTED:
            functions[activations] = functools.partial(product(activations), x, typax.quantize(w, axis=0))
        times = measure(functions, 3 * arguments.rounds, arguments.calls, warm=1)
        for name in rows:
            rows[name].append(_cell(times, name, SMALL_WANTED.get(name), f"{name}, {shape}, M=2048", missed))
    show(rows)


def compiling(arguments: Any, missed: list[str]) -> None:
    """Seconds to compile 24 layers of width 512 and 2048, scanned and one after the other."""
    layers, k, n = 24, 512, 2048
    x, a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, k), (k, n), (n, k)))
    quantized = [jax.eval_shape(lambda w: typax.quantize(w, axis=0), w) for w in (a, b)]
    dynamic = lambda x, w: typax.matmul(x, w, activations="dynamic")
    forms = {
        "float32": (jnp.matmul, (a, b)),
        "int8, float": (typax.matmul, quantized),
        "int8, dynamic": (dynamic, quantized),
    }
    layer = lambda product, x, v, w: x + product(jax.nn.gelu(product(x, v)), w)

    def scanned(product: Any) -> Callable[..., Any]:
        return lambda x, v, w: jax.lax.scan(lambda x, p: (layer(product, x, *p), None), x, (v, w), length=layers)[0]

    def unrolled(product: Any) -> Callable[..., Any]:
        def f(x: Any, v: Any, w: Any) -> Any:
            for p in zip(v, w, strict=True):
                x = layer(product, x, *p)
            return x

        return f

    stacked = lambda w: jax.eval_shape(lambda w: typax.stack([w] * layers), w)
    print(f"\n{layers} layers, {k} x {n}, M=64: s to compile, and times float32")
    for name, way, parts in (("scanned", scanned, stacked), ("unrolled", unrolled, lambda w: [w] * layers)):
        rounds: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(arguments.rounds):
            for form, (f, of_layer) in forms.items():
                lowered = typax.jit(way(f)).lower(x, *map(parts, of_layer))
                start = time.perf_counter()
                lowered.compile()
                rounds[form].append(time.perf_counter() - start)
        times = Times(rounds)
        cells = [f"{form} {times.us(form):.2f} s, {times.ratio(form, 'float32'):.2f}" for form in forms]
        print(f"{name:12}" + "; ".join(cells), flush=True)
        worst = max(times.ratio(form, "float32") for form in forms)
        if way is scanned and worst > COMPILED_WANTED:
            missed.append(f"compiling, scanned: {worst:.2f} (wanted {COMPILED_WANTED:g})")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matmul", description="Products with quantized arrays.")
    parser.add_argument("--only", nargs="+", default=[""], help="rows of the table whose names hold one of these")
    parser.add_argument("--shapes", nargs="*", default=["4096x4096", "2048x8192"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=5, help="in a round")
    parser.add_argument("--products-alone", action="store_true", help="leave out what comes after the tables")
    arguments = parser.parse_args(argv)
    beside = "qwix is not installed: left out." if qwix is None else f"qwix {qwix.__version__} beside it."
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}, {machine()}; {beside}")
    print(f"Times float32 (and what is wanted); medians of {arguments.rounds} rounds of {arguments.calls} calls.")
    missed: list[str] = []
    for shape in arguments.shapes:
        one_table(*map(int, shape.split("x")), arguments, missed)
    if not arguments.products_alone:
        for shape in arguments.shapes:
            inside(*map(int, shape.split("x")), arguments)
        small(arguments, missed)
        compiling(arguments, missed)
    print("\nAbove what is wanted: " + ("; ".join(missed) or "none") + ".")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
