"""What a warm call costs beside its arithmetic: an op called eagerly, and `jax.jit` itself with hi values.

    python -m benchmarks.eager [--rounds 61] [--calls 20]

Both are compared with the same arithmetic, written on arrays and jitted. The arrays are small, so that it is the call that
is measured.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import typax
from benchmarks._measure import measure

MOST = 1.5  # times the jitted function on arrays, for an eager op
BASE = "the same arithmetic on arrays, jitted"


def matmul_arrays(x: jax.Array, qvalue: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.matmul(x * scale, qvalue.astype(jnp.float32))


def dense_arrays(qvalue: jax.Array, scale: jax.Array) -> jax.Array:
    return qvalue.astype(jnp.float32) * scale[..., None]


def quantize_arrays(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    absmax = jnp.max(jnp.abs(x), axis=-1, initial=0.0)
    bad = jnp.isnan(jnp.sum(x * 0.0, axis=-1))
    scale = jnp.maximum(absmax * jnp.float32(1 / 127), jnp.float32(2.0**-126))
    codes = jnp.round(jnp.clip(x * (1 / scale)[..., None], -127, 127))
    codes = jnp.where(bad[..., None], jnp.float32(0), codes).astype(jnp.int8)
    return codes, jnp.where(bad, jnp.float32(jnp.nan), scale)


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each call its function and the one on arrays, both without arguments; they compute the same."""
    x = jnp.sin(jnp.arange(8 * 64.0)).reshape(8, 64)
    w = typax.quantize(jnp.cos(jnp.arange(64.0 * 64)).reshape(64, 64))
    q, s = w.components()[:2]
    matmul, quantize, dense = map(jax.jit, (matmul_arrays, quantize_arrays, dense_arrays))
    hi_matmul, hi_quantize, hi_dense = map(jax.jit, (typax.matmul, typax.quantize, typax.dense))
    closed = jax.jit(lambda x: typax.matmul(x, w))
    inside = jax.jit(lambda x, q, s: typax.matmul(x, typax.QArray.from_components(q, s)))
    ten = [typax.quantize(x + k) for k in range(10)]
    pairs = [v.components()[:2] for v in ten]
    hi_ten = jax.jit(lambda vs: sum(map(typax.dense, vs)))
    lo_ten = jax.jit(lambda ps: sum(dense_arrays(*p) for p in ps))
    return {
        "eager matmul": (lambda: typax.matmul(x, w), lambda: matmul(x, q, s)),
        "eager quantize": (lambda: typax.quantize(x), lambda: quantize(x)),
        "eager dense": (lambda: typax.dense(w), lambda: dense(q, s)),
        "jax.jit, a hi argument": (lambda: hi_matmul(x, w), lambda: matmul(x, q, s)),
        "jax.jit, a hi result": (lambda: hi_quantize(x), lambda: quantize(x)),
        "jax.jit, only a hi argument": (lambda: hi_dense(w), lambda: dense(q, s)),
        "jax.jit, hi values closed over": (lambda: closed(x), lambda: matmul(x, q, s)),
        "jax.jit, hi values only inside": (lambda: inside(x, q, s), lambda: matmul(x, q, s)),
        "jax.jit, ten hi arguments": (lambda: hi_ten(ten), lambda: lo_ten(pairs)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description="What a warm call costs.")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--calls", type=int, default=20, help="in a round")
    arguments = parser.parse_args(argv)
    functions = {}
    for name, (f, g) in cases().items():
        functions |= {name: f, f"{name}, on arrays": g}
    times = measure(functions, arguments.rounds, arguments.calls)
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}; compared with {BASE}.")
    print(f"Medians of {arguments.rounds} interleaved rounds of {arguments.calls} calls.\n")
    print(f"{'':32}{'us':>8}{'arrays, us':>12}{'ratio':>8}{'more, us':>10}")
    worst = 0.0
    for name in cases():
        base = f"{name}, on arrays"
        ratio = times.ratio(name, base)
        print(f"{name:32}{times.us(name):8.1f}{times.us(base):12.1f}{ratio:8.2f}{times.more(name, base):10.1f}")
        worst = max(worst, ratio) if name.startswith("eager") else worst
    print(f"\nAn eager op takes at most {worst:.2f} times its arithmetic on arrays (wanted: at most {MOST:g}).")
    return int(worst > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
