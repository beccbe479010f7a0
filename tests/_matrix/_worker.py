"""One of two processes: ``python -m _matrix._worker SIDE PORT RANK [WORDS]`` prints the cells that it sees."""

import json
import sys

import jax

import _matrix


def main(side: str, port: str, rank: str, *words: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    if side == "raw":
        _matrix.alone()
    from _matrix import processes  # it makes arrays: after the processes know each other
    from _matrix.sides import SIDES

    here, plain = SIDES[side](), SIDES["plain"]()
    mine = [r for r in _matrix.ROWS.values() if r.kind == processes.KIND and (not words or any(w in r.key for w in words))]
    print(json.dumps({r.key: _matrix.cell(r, here, plain, trace=bool(words)) for r in mine}), flush=True)


main(*sys.argv[1:])
