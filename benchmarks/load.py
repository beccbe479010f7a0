"""What ``import typax`` costs beside ``import jax``.

    python -m benchmarks.load [--rounds 7]

Each import runs in a process of its own, by turns; what is reported is processor time.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

import jax

MOST = 0.2  # seconds
PROGRAM = "import time; start = time.process_time(); import jax, jax.numpy{more}; print(time.process_time() - start)"


def seconds(more: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(more=more)], text=True, capture_output=True, check=True)
    return float(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="What the import costs.")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    seconds(", typax")  # the byte code of both is written
    rounds = [(seconds(""), seconds(", typax")) for _ in range(min(arguments.rounds, 11))]
    alone, more = median(a for a, _ in rounds), median(b - a for a, b in rounds)
    print(f"JAX {jax.__version__}: import jax takes {alone:.2f} s of processor time, import typax {more:.2f} s more")
    print(f"(wanted: at most {MOST:g}). Medians of {len(rounds)} rounds.")
    return int(more > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
