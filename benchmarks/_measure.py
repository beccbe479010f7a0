"""Warm times of small functions, so measured that a busy machine slows all of them alike.

In a round each function runs once, as a loop of many calls that ends when the last result is there.  What is reported is
the median over rounds: of a function's time, and of its ratio to another's *in the same round*.
"""

import contextlib
import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax


def machine() -> str:
    """What processors this machine has, and how many other things run on it."""
    kinds = {platform.processor() or platform.machine()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        kinds = {line.split(":")[1].strip() for line in f if line.startswith("model name")} or kinds
    return f"{os.cpu_count()} x {', '.join(sorted(kinds))} (load {os.getloadavg()[0]:.1f})"


class Times:
    """Microseconds for one call, of each function in each round."""

    def __init__(self, rounds: Mapping[str, list[float]]) -> None:
        self.rounds = rounds

    def us(self, name: str) -> float:
        return median(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        return median(a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))

    def more(self, name: str, base: str) -> float:
        return median(a - b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))


def measure(functions: Mapping[str, Callable[[], Any]], rounds: int, calls: int, warm: int = 5) -> Times:
    for f in functions.values():
        for _ in range(warm):  # compile, and fill every cache
            jax.block_until_ready(f())
    found: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    gc.collect()
    gc.disable()  # as timeit does: a collection falls on one function, whoever left the garbage
    try:
        for _ in range(rounds):
            order.append(order.pop(0))  # each comes after each other
            for name, f in order:
                out, start = None, time.perf_counter()
                for _ in range(calls):
                    out = f()
                jax.block_until_ready(out)
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    finally:
        gc.enable()
    return Times(found)
