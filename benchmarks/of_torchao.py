"""torchao's int8 products, beside PyTorch's float32 product on the same shapes: what benchmarks/matmul.py is, over there.

    .venv-references/bin/python benchmarks/of_torchao.py [--shapes 4096x4096] [--rows 1 8 64 512] [--compile]

In a round each layer runs `calls` times; what is printed is the median, over rounds, of the ratio of its time to that of
float32 in the same round.  The environment is that of ``make references``: neither typax nor JAX is in it.
"""

import argparse
import logging
import platform
import time
import warnings
from statistics import median
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # pyright: ignore[reportMissingImports]  # noqa: E402
import torchao  # pyright: ignore[reportMissingImports]  # noqa: E402
from torchao import quantization as q  # pyright: ignore[reportMissingImports]  # noqa: E402

FORMS = {
    "float32, ms": None,
    "torchao int8, float": q.Int8WeightOnlyConfig,
    "torchao int8, dynamic": q.Int8DynamicActivationInt8WeightConfig,
}


def layer(weight: Any, form: Any, compiled: bool) -> Any:
    made = torch.nn.Linear(*weight.shape, bias=False)
    made.weight = torch.nn.Parameter(weight.t().contiguous(), requires_grad=False)
    if form is not None:
        q.quantize_(made, form(version=2))
    return torch.compile(made) if compiled else made


def ratios(layers: dict[str, Any], x: Any, rounds: int, calls: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in layers}
    for f in layers.values():
        f(x)
    for _ in range(rounds):
        for name, f in layers.items():
            start = time.perf_counter()
            for _ in range(calls):
                f(x)
            found[name].append((time.perf_counter() - start) / calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="torchao's int8 products, times PyTorch's of float32.")
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "2048x8192"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=5, help="in a round")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, which needs a C++ compiler")
    arguments = parser.parse_args()
    how = "compiled" if arguments.compile else "eager"
    print(
        f"torch {torch.__version__}, torchao {torchao.__version__}, {how}; {torch.get_num_threads()} x {platform.machine()}"
    )
    print(f"Times float32; medians of {arguments.rounds} rounds of {arguments.calls} calls.")
    torch.manual_seed(0)
    for shape in arguments.shapes:
        k, n = map(int, shape.split("x"))
        weight = torch.randn(k, n)
        print(f"\n{f'{k} x {n}':32}" + "".join(f"{f'M={m}':>14}" for m in arguments.rows))
        cells: dict[str, list[str]] = {name: [] for name in FORMS}
        for m in arguments.rows:
            torch.compiler.reset()  # beyond some programs of one function it would go on uncompiled
            layers = {name: layer(weight, form, arguments.compile) for name, form in FORMS.items()}
            found = ratios(layers, torch.randn(m, k), arguments.rounds, arguments.calls)
            base = found["float32, ms"]
            for name, times in found.items():
                of_base = f"{median(a / b for a, b in zip(times, base, strict=True)):.2f}"
                cells[name].append(f"{median(times) * 1e3:.2f} ms" if times is base else of_base)
        for name, row in cells.items():
            print(f"{name:32}" + "".join(f"{c:>14}" for c in row), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
