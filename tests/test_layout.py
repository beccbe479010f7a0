"""The layout holds: modules stand in one order, one of them is the door to JAX's private names, and each is short."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "typax"

# A module imports only from those before it.
ORDER = [
    "_paths",
    "_jax",
    "_repairs",
    "_jaxpr",
    "hijax",
    "_axes",
    "_spec",
    "_tangent",
    "_declaration",
    "_byhand",
    "_partition",
    "_type",
    "_interpret",
    "_prim",
    "_structural",
    "_moves",
    "_natively",
    "_indexing",
    "_stacks",
    "_shapes",
    "_arithmetic",
    "_control_flow",
    "_derivatives",
    "_callbacks",
    "debug",
    "_placement",
    "_jit",
    "_policies",
    "_optimize",
    "_override",
    "_match",
    "_misfit",
    "_op",
    "_again",
    "_collectives",
    "_control",
    "_through",
    "_receipt",
    "_closures",
    "_lift",
    "_declare",
    "_refuse",
    "_build",
    "_value",
    "_describe",
    "_export",
    "_show",
    "quantized.format",
    "quantized.rounding",
    "quantized.packing",
    "quantized.layout",
    "quantized.scales",
    "quantized.encode",
    "quantized.types",
    "quantized.axes",
    "quantized.quantizing",
    "quantized.measure",
    "quantized.ggml",
    "quantized.kernels",
    "quantized.contract",
    "quantized.pairs",
    "quantized.given",
    "quantized.products",
    "quantized",
    "_codes",
    "_rows",
    "_convolutions",
    "_blocks",
    "lowrank",
    "_factors",
    "tup",
    "sums",
    "io._disk",
    "io._safetensors",
    "io._tree",
    "io._save",
    "io._gguf",
    "io.gguf",
    "io.hf",
    "io._open",
    "io",
    "io.orbax",
    "equinox",
    "flax",
    "_recipe",
    "",  # typax/__init__.py
    "laws._law",
    "laws._values",
    "laws._calls",
    "laws._draw",
    "laws.identity",
    "laws.mapping",
    "laws.tangents",
    "laws.ops",
    "laws.derivatives",
    "laws.batching",
    "laws.sharding",
    "laws.exporting",
    "laws._subjects",
    "laws._run",
    "laws",
    "cli._common",
    "cli.check",
    "cli.compare",
    "cli.files",
    "cli",
    "__main__",
]
DOORS = ("_jax", "_repairs")  # what typax reads of JAX, and what it changes in it
PRIVATE = ("jax._src", "jax.experimental.hijax")
LINES = 600
OPTIONAL = {
    "click", "equinox", "flax", "gguf", "hypothesis", "matplotlib", "onnx", "optax", "orbax", "rich", "safetensors",
    "tokenizers", "transformers",
}  # fmt: skip

MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix("."): p
    for p in sorted(ROOT.rglob("*.py"))
}
modules = pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "__init__")


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Each import statement, with the dotted names that it may make available."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield node, [start, *(f"{start}.{alias.name}" for alias in node.names)]


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def out_of_order(source: str, name: str) -> list[str]:
    """The imports of a module of typax that it must not make, by line."""
    tree, wrong = ast.parse(source), []
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    before = ORDER[: ORDER.index(name)]
    for node, names in imports(tree):
        ours = [n for n in names if is_in(n, "typax")]
        if any(n.startswith(".") for n in names):
            wrong.append(f"line {node.lineno}: an import by dots")
        elif ours and id(node) in inner:
            wrong.append(f"line {node.lineno}: {ours[-1]} is imported in a function")
        elif ours and not any(is_in(n, f"typax.{m}") for n in ours for m in before if m):
            wrong.append(f"line {node.lineno}: {ours[-1]} does not come before typax.{name}")
        elif isinstance(node, ast.ImportFrom) and node.module == "typax":
            late = [n for n in ours[1:] if n.removeprefix("typax.") not in before]
            wrong += [f"line {node.lineno}: {n} does not come before typax.{name}" for n in late]
    return wrong


def private(source: str) -> list[str]:
    """The places where a module reaches for JAX's private or experimental names, by line."""
    tree = ast.parse(source)
    reached = [(node.lineno, n) for node, names in imports(tree) for n in names]
    reached += [(n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    lines = {line: n for line, n in reached if any(is_in(n, p) for p in PRIVATE)}
    return [f"line {line}: {n}" for line, n in lines.items()]


@modules
def test_a_module_has_its_place_in_the_order(name):
    assert name in ORDER, f"typax.{name} has no place in the order of imports (tests/test_layout.py): add it"
    assert not out_of_order(MODULES[name].read_text(), name)


@modules
def test_one_module_reaches_for_private_names(name):
    assert bool(private(MODULES[name].read_text())) == (name in DOORS)


@modules
def test_a_module_is_short(name):
    assert len(MODULES[name].read_text().splitlines()) <= LINES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from typax import _jax, _axes\nfrom typax._type import ValueType\nimport jax", []),
        ("from typax import _jax, _op", ["line 1: typax._op"]),
        ("from typax._structural import dense", ["line 1: typax._structural.dense"]),
        ("import typax", ["line 1: typax "]),
        ("from typax import QArray", ["line 1: typax.QArray"]),
        ("from . import _jax", ["line 1: an import by dots"]),
        ("def f():\n    from typax import _jax", ["line 2: typax._jax is imported in a function"]),
    ],
)
def test_an_import_out_of_order_is_found(source, found):
    wrong = out_of_order(source, "_structural")
    assert len(wrong) == len(found) and all(w.startswith(f) for w, f in zip(wrong, found, strict=True))


@pytest.mark.parametrize(
    "source",
    [
        "from jax._src import core",
        "from jax import _src",
        "import jax._src.core as c",
        "x = jax._src.core",
        "from jax.experimental import hijax",
        "def f(): return jax.experimental.hijax.HiType",
    ],
)
def test_a_private_name_is_found(source):
    assert private(source) and not private("from jax.experimental import pallas\nx = jax.lax._foo")


@pytest.mark.core
def test_typax_imports_nothing_optional():
    """Nor anything heavy: beside JAX, itself and the notation of shapes."""
    program = (
        "import sys, jax, jax.numpy; before = {*sys.modules}; import typax; new = {*sys.modules} - before;"
        "print(*sorted({m.partition('.')[0] for m in new} - sys.stdlib_module_names));"
        "print(*sorted(m for m in new if m.partition('.')[0] in ('jax', 'jaxlib', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, text=True, capture_output=True, check=True)
    packages, of_jax = (line.split() for line in done.stdout.splitlines())
    assert set(packages) <= {"typax", "jaxtyping", "wadler_lindig", "jax", "numpy"} and not OPTIONAL & set(packages)
    assert len(of_jax) <= 12, of_jax


@pytest.mark.parametrize(
    ("name", "library"), [("equinox", "equinox"), ("flax", "flax"), ("io.orbax", "orbax.checkpoint")], ids=lambda x: x
)
def test_a_module_for_a_library_names_what_brings_it(name, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    spec = importlib.util.spec_from_file_location("without_it", MODULES[name])
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=rf"^typax\.{name} needs \w+: pip install 'typax\[libraries\]'$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
