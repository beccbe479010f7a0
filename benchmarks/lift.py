"""What `typax.lift` costs on whole models: warm calls, and tracing.

    python -m benchmarks.lift [--rounds 7] [--only minilm]

Each model is a function that knows arrays only.  It runs on its float32 parameters, and lifted on the same with int8
weights (`typax.quantize_tree`); MiniLM with its activations as floats and quantized (``activations="dynamic"``).  The
parameters are random: time does not depend on them.  Models of Flax and Equinox are left out where those are not installed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import typax
from benchmarks._measure import machine, measure
from benchmarks._models import MODELS, Model

SHAPES = ((1, 32), (64, 32), (8, 256))  # sentences, tokens
FLOAT, DYNAMIC, TRACE = 1.15, 1.0, 2.0  # at most
LONG = 20.0  # ms: programs whose own trace takes as long are held to TRACE


def minilm(width: int = 384, layers: int = 6, words: int = 30522) -> tuple[Any, Any]:
    """The encoder of examples/minilm.py, with parameters of its sizes."""
    from examples import minilm

    keys = iter(jax.random.split(jax.random.key(0), 8 * layers + 3))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / 16
    norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    linear = lambda m, n: {"weight": draw(m, n), "bias": jnp.zeros(m)}
    square = ("query", "key", "value", "output")
    layer = lambda: {
        **{name: linear(width, width) for name in square},
        "up": linear(4 * width, width),
        "down": linear(width, 4 * width),
        "attention_norm": norm,
        "norm": norm,
    }
    tables = {"word": draw(words, width), "position": draw(512, width), "segment": draw(2, width)}
    return minilm.encode, {**tables, "norm": norm, "layers": [layer() for _ in range(layers)]}


def trace_ms(make: Callable[[], Any], args: Any) -> float:
    f = jax.jit(make())
    start = time.perf_counter()
    f.trace(*args)
    return (time.perf_counter() - start) * 1e3


def anew(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same, as another function: traced anew."""
    return lambda *args: f(*args)


def tracing(f: Any, dense: Any, small: Any, args: Any, rounds: int) -> tuple[float, float]:
    """Milliseconds to trace ``f``, and the ratio to that of ``f`` lifted on hi values."""
    pairs = []
    for k in range(rounds + 1):
        own = trace_ms(lambda: anew(f), (dense, *args))
        hi = trace_ms(lambda: typax.lift(anew(f), "allow"), (small, *args))
        pairs += [(own, hi)] * (k > 0)  # the first fills the caches of the ops
    return median(a for a, _ in pairs), median(b / a for a, b in pairs)


def warm(forms: dict[str, tuple[Any, Any]], args: Any, rounds: int) -> Any:
    calls = {name: (lambda f=f, p=p: f(p, *args)) for name, (f, p) in forms.items()}
    first = next(iter(calls.values()))
    jax.block_until_ready(first())
    start = time.perf_counter()
    jax.block_until_ready(first())
    return measure(calls, rounds, max(1, min(200, int(0.1 / (time.perf_counter() - start)))))


def of_minilm(rounds: int) -> bool:
    f, params = minilm()
    small, _ = typax.quantize_tree(params, "int8")
    forms = {
        "float32": (jax.jit(f), params),
        "int8": (typax.jit(typax.lift(f, "allow")), small),
        "dynamic": (typax.jit(typax.lift(f, "allow", activations="dynamic")), small),
    }
    print(f"{'MiniLM, 22.6 M parameters':28}{'float32':>12}{'int8':>11}{'dynamic':>11}")
    good = True
    for n, t in SHAPES:
        args = jnp.ones((n, t), jnp.int32), jnp.ones((n, t), jnp.int32)
        times = warm(forms, args, rounds)
        ratios = times.ratio("int8", "float32"), times.ratio("dynamic", "float32")
        print(
            f"{f'  {n} x {t} tokens':28}{times.us('float32') / 1e3:9.1f} ms{ratios[0]:9.2f} x{ratios[1]:9.2f} x", flush=True
        )
        good &= ratios[0] <= FLOAT and ratios[1] < DYNAMIC
    print(f"(wanted: int8 at most {FLOAT:g}, dynamic below {DYNAMIC:g})")
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lift", description="What lift costs on whole models.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="the models with this in their name")
    arguments = parser.parse_args(argv)
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}, {machine()}.")
    print("Warm calls as a ratio to float32, and the time to trace.")
    print(f"Medians of {arguments.rounds} interleaved rounds.\n")
    good = True
    if arguments.only in "minilm":
        good &= of_minilm(arguments.rounds)
    print(f"\n{'model':28}{'float32':>12}{'int8':>11}{'trace':>13}{'lifted':>11}")
    for name, make in {"MiniLM, 1 x 32 tokens": _minilm, **MODELS}.items():
        if arguments.only not in name.lower():
            continue
        try:
            model = make()
        except ImportError as error:
            print(f"{name:28} left out: {error}", file=sys.stderr)
            continue
        small, _ = typax.quantize_tree(model.params, model.recipe)
        forms = {
            "float32": (jax.jit(model.f), model.params),
            "int8": (typax.jit(typax.lift(model.f, "allow")), small),
        }
        times = warm(forms, model.args, arguments.rounds)
        own, ratio = tracing(model.f, model.params, small, model.args, arguments.rounds)
        good &= own < LONG or ratio <= TRACE
        ran = f"{times.us('float32') / 1e3:9.2f} ms{times.ratio('int8', 'float32'):9.2f} x"
        print(f"{name:28}{ran}{own:10.1f} ms{ratio:9.2f} x", flush=True)
    print(f"(wanted: tracing at most {TRACE:g} times that of the program, where that takes {LONG:g} ms or more)")
    return int(not good)


def _minilm() -> Model:
    f, params = minilm()
    return Model(f, params, (jnp.ones((1, 32), jnp.int32),) * 2)


if __name__ == "__main__":
    raise SystemExit(main())
