"""Both models of the examples, and what they give beside what the README says.

python -m examples.demo             some minutes
python -m examples.demo --full      with more of the novel
python -m examples.demo --write     puts the tables into README.md
"""

import argparse
import subprocess
import sys
import time

from rich.console import Console

from examples import assets, minilm_demo, results, smollm2_demo

DESCRIPTION = "Both models of the examples, on quantized weights."

console = Console()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=DESCRIPTION)
    parser.add_argument("--full", action="store_true", help="with more of the novel")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    arguments = parser.parse_args(argv)
    begun, bad = time.monotonic(), 0
    parts = {
        "MiniLM": (results.MINILM, minilm_demo.run),
        "SmolLM2": (results.SMOLLM2, lambda: smollm2_demo.run(32 if arguments.full else smollm2_demo.SEQUENCES)),
    }
    tables = {}
    for i, (name, (headings, run)) in enumerate(parts.items()):
        console.rule(f"{name}, {i + 1} of {len(parts)}, after {time.monotonic() - begun:.0f} s")
        try:
            tables[name] = results.markdown(headings, run())
        except (assets.AssetError, subprocess.CalledProcessError) as error:
            console.print(str(error), style="red", highlight=False, soft_wrap=True, markup=False)
            bad = 1
    console.rule(f"The tables of README.md, after {time.monotonic() - begun:.0f} s")
    for name, table in tables.items():
        print(f"\n{table}\n")
        if arguments.write:
            results.write(name, table)
        elif name != "SmolLM2" or not arguments.full:  # more of the novel has another perplexity
            lines = results.differences(table, results.written(name))
            print(
                "\n".join(["README.md differs:", *lines])
                if lines
                else "README.md says the same, but for columns with a star."
            )
    return bad


if __name__ == "__main__":
    sys.exit(main())
