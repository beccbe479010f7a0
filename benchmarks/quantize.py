"""What it takes to quantize float32 rows, beside one read of them.

    python -m benchmarks.quantize [--shape 4096x4096] [--rounds 5] [--calls 5]

The read is the sum of each row. In a round each function runs `calls` times; what is printed is the median, over rounds, of
the ratio of its time to that of the read in the same round. Rows that hold NaN or an infinity are found on the way.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import typax
from benchmarks._measure import machine, measure
from benchmarks.matmul import normal

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {}, "int8, axis=0": {"axis": 0}, "int8, group=128": {"group": 128}, "int4, group=128": {"group": 128},
    "fp8_e4m3": {}, "nf4": {}, "mxfp4": {}, "nvfp4": {},
}  # fmt: skip
MOST = {"int8": 4.0}  # times the read
READ = "one read"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantize", description="What quantizing costs.")
    parser.add_argument("--shape", default="4096x4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="in a round")
    parser.add_argument("--only", nargs="+", default=list(FORMATS))
    arguments = parser.parse_args(argv)
    x = normal(0, *map(int, arguments.shape.split("x")))
    read = jax.jit(lambda x: jnp.sum(x, -1))
    functions: dict[str, Callable[[], Any]] = {READ: functools.partial(read, x)}
    for name in arguments.only:
        how = functools.partial(typax.quantize, format=name.partition(",")[0], **FORMATS[name])
        functions[name] = functools.partial(typax.jit(how), x)
    times = measure(functions, arguments.rounds, arguments.calls, warm=1)
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}, {machine()}; float32 of {arguments.shape}.")
    print(f"Medians of {arguments.rounds} rounds of {arguments.calls} calls.\n")
    print(f"{'':24}{'ms':>8}{'times the read':>18}{'wanted':>8}")
    missed = []
    for name in functions:
        ratio, most = times.ratio(name, READ), MOST.get(name)
        print(f"{name:24}{times.us(name) / 1e3:8.2f}{ratio:18.2f}{f'{most:g}' if most else '':>8}")
        if most and ratio > most:
            missed.append(name)
    print(f"\nAbove what is wanted: {', '.join(missed) or 'none'}.")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
