"""The matrix of docs/limits.md: every row of tests/_matrix, through raw JAX and through typax.

    python scripts/matrix.py --side typax WORD   the rows whose name holds the word, on this JAX, with tracebacks
    python scripts/matrix.py --write             both sides on this JAX, into tests/data/matrix.json and docs/limits.md
    python scripts/matrix.py --write --side raw  one side
    python scripts/matrix.py --docs              docs/limits.md alone, from tests/data/matrix.json

`make matrix` writes it on every supported JAX.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def run(side: str, words: list[str], trace: bool, refused: bool = False) -> dict[str, str]:
    """The cells of one side, in this process; of those alone that are expected to be errors, with ``refused``."""
    import _matrix  # pyright: ignore[reportMissingImports]
    from _matrix import _table  # pyright: ignore[reportMissingImports]
    from _matrix.sides import SIDES  # pyright: ignore[reportMissingImports]

    if side == "raw":
        _matrix.alone()
    here, plain = SIDES[side](), SIDES["plain"]()
    cells = {}
    rows = list(_matrix.chosen(words))
    if refused:
        rows = [r for r in rows if r.kind != "processes" and _table.expected(r.key, side) != "works"]
    for r in (r for r in rows if r.kind != "processes"):
        began = time.perf_counter()
        cells[r.key] = _matrix.cell(r, here, plain, trace)
        if trace:
            print(f"{time.perf_counter() - began:6.2f} s  {r.key}\n          {cells[r.key]}", flush=True)
    if any(r.kind == "processes" for r in rows):
        from _matrix import processes

        cells |= processes.cells(side, words)
    return cells


def in_process_of_its_own(side: str) -> dict[str, str]:
    """The cells of one side; the raw one needs a process in which typax has not repaired JAX."""
    done = subprocess.run(
        [sys.executable, __file__, "--side", side, "--json"], capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["raw", "typax"])
    parser.add_argument("--json", action="store_true", help="print the cells of one side as JSON")
    parser.add_argument("--refused", action="store_true", help="only the calls that are expected to be errors")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.side and not args.write:
        cells = run(args.side, args.words, trace=not args.json, refused=args.refused)
        print(json.dumps(cells) if args.json else f"{sum(c == 'works' for c in cells.values())} of {len(cells)} work")
        return
    from _matrix import _table  # pyright: ignore[reportMissingImports]

    if args.write:
        cells = {side: in_process_of_its_own(side) for side in ([args.side] if args.side else _table.SIDES)}
        _table.store(cells)
    if args.write or args.docs:
        _table.write_page()
    print(_table.summary())


if __name__ == "__main__":
    main()
