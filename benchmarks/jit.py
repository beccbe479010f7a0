"""What a warm call of `typax.jit` costs with hi arguments and results.

    python -m benchmarks.jit [--rounds 61] [--calls 20]

Beside it the same program on the components, jitted by `jax.jit`: in a registered dataclass (a pytree), the base of the
ratios, and as flat arrays; and on the hi values, jitted by `jax.jit` (raw hijax). The arrays are small, so that it is the
call that is measured.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import typax
from benchmarks._measure import measure

MOST = {"array": 1.2, "hi": 1.2, "100 hi": 1.4}  # times the pytree
COLUMNS = ("typax.jit", "pytree", "arrays", "jax.jit")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pair:
    """A quantized array as a pytree."""

    qvalue: jax.Array
    scale: jax.Array

    def dense(self) -> jax.Array:
        return self.qvalue.astype(jnp.float32) * self.scale[..., None]


def added_up(dense: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    """The first entries of all, added."""
    return lambda vs: sum((dense(v)[0, 0] for v in vs), jnp.float32(0))


def passed_on(vs: Any) -> Any:
    return [*vs[1:], vs[0]]


def cases(counts: Sequence[int]) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each row a function without arguments for each column; they compute the same."""
    found = {}
    for n in counts:
        values = [typax.quantize(jnp.sin(jnp.arange(32.0) + k).reshape(4, 8)) for k in range(n)]
        pairs = [Pair(*v.components()[:2]) for v in values]
        flat = [(p.qvalue, p.scale) for p in pairs]
        for result, hi, lo in (("array", added_up(typax.dense), added_up(Pair.dense)), ("hi", passed_on, passed_on)):
            arrays = lambda ps, lo=lo: lo([Pair(*p) for p in ps])
            fs = (typax.jit(hi), jax.jit(lo), jax.jit(arrays if result == "array" else passed_on), jax.jit(hi))
            given = (values, pairs, flat, values)
            found[f"{n} hi, {result} results"] = {
                c: (lambda f=f, vs=vs: f(vs)) for c, f, vs in zip(COLUMNS, fs, given, strict=True)
            }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jit", description="What a warm jitted call costs.")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--calls", type=int, default=20, help="in a round, of one argument; fewer of more")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100], help="how many hi arguments")
    arguments = parser.parse_args(argv)
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}: microseconds, and times the pytree of the components.")
    print(f"Medians of {arguments.rounds} interleaved rounds.\n")
    print(f"{'':24}" + "".join(f"{c:>18}" for c in COLUMNS) + f"{'wanted':>10}")
    missed = []
    for name, functions in cases(arguments.counts).items():
        n, kind = int(name.split()[0]), name.split()[2]
        times = measure(functions, arguments.rounds, max(2, arguments.calls // max(1, n // 5)))
        most = MOST.get(f"{n} {kind}", MOST[kind])
        row = [f"{times.us(c):9.1f}{times.ratio(c, 'pytree'):7.2f} x" for c in COLUMNS]
        print(f"{name:24}" + "".join(row) + f"{most:10g}", flush=True)
        if times.ratio("typax.jit", "pytree") > most:
            missed.append(name)
    print(f"\nAbove what is wanted: {', '.join(missed) or 'none'}.")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
