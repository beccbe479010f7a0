"""The reference: what the docstrings of typax say, as pages, by pdoc.

    python tests/_reference.py build/docs        builds them, and prints what is wrong

Every public name has a docstring, unless it is JAX's own. A name between single backticks refers to something: to a public
name (`typax.Value`, `Value.components`, `matmul`), to a neighbour in the same class, or to a parameter. pdoc must not warn.
"""

import importlib
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import typax

REFERENCE = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)`(?![`\w])")
EXAMPLE = re.compile(r"^ {4}.*$", re.MULTILINE)


INNER = ("typax.quantized.", "typax.cli.", "typax.io.gguf", "typax.io.hf")
"""Modules of which the package has all that is public."""


def modules(package: str = "typax") -> list[str]:
    """The public modules, the package first."""
    inner = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    shown = (m.name for m in inner if not any(p.startswith("_") for p in m.name.split(".")))
    return [package, *(name for name in shown if not name.startswith(INNER))]


def public(module: str) -> Iterator[tuple[Any, Any]]:
    """What pdoc shows of a module: it, its public names, and the members of the classes among them; each in its parent."""
    from pdoc.doc import Module

    doc = Module(importlib.import_module(module))
    yield None, doc
    exported = getattr(doc.obj, "__all__", None)
    for member in doc.own_members:
        here = getattr(member.obj, "__module__", module) == module and not member.name.startswith("_")
        if member.kind != "module" and (member.name in exported if exported is not None else here):
            yield doc, member
            if member.kind == "class" and is_ours(member.obj):
                yield from ((member, m) for m in member.own_members if not m.name.startswith("_"))


def is_ours(cls: Any) -> bool:
    return cls.__module__.partition(".")[0] == "typax"


def is_said_elsewhere(parent: Any, member: Any) -> bool:
    """Whether its class names this attribute in its docstring, or a base class (of typax or JAX) has this member too."""
    if parent is None or parent.kind != "class":
        return False
    if member.kind == "variable" and re.search(rf"\b{member.name}\b", parent.docstring):
        return True
    is_dense = issubclass(parent.obj, typax.Value) and member.name == "dense"
    return is_dense or any(hasattr(b, member.name) for b in parent.obj.__mro__[1:-1])


def missing(module: str) -> list[str]:
    """The public names without a docstring."""
    found = ((p, m) for p, m in public(module) if not m.docstring.strip())
    return [f"{m.fullname} has no docstring" for p, m in found if not is_said_elsewhere(p, m)]


def broken(module: str) -> list[str]:
    """The references that lead nowhere."""
    spaces = [vars(typax) | {"typax": typax, "jax": jax}, vars(importlib.import_module(module))]
    wrong = []
    for parent, member in public(module):
        local = {*getattr(parent, "members", ()), *getattr(member, "members", ()), member.name}
        if member.kind == "function":
            local |= {*member.signature.parameters}
        for name in REFERENCE.findall(EXAMPLE.sub("", member.docstring)):
            if name.partition(".")[0] not in local and not any(_finds(s, name) for s in spaces):
                wrong.append(f"{member.fullname}: `{name}` is no public name; write ``{name}`` if it is code")
    return wrong


def _finds(space: dict[str, Any], name: str) -> bool:
    first, *rest = name.split(".")
    if first not in space or any(part.startswith("_") for part in (first, *rest)):
        return False
    obj = space[first]
    for part in rest:
        if not hasattr(obj, part):
            return part in getattr(obj, "__annotations__", {})
        obj = getattr(obj, part)
    return True


def build(folder: Path, names: list[str]) -> None:
    """Write the pages. A warning of pdoc is raised."""
    import pdoc

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="Error parsing type annotation")  # of functions of other libraries
        listed = [*pdoc.extract.walk_specs(names[:1])]
        more = (n for n in names if n not in listed)
        pdoc.render.configure(docformat="google")
        pdoc.pdoc(names[0], *more, *(f"!{re.escape(name)}" for name in INNER), output_directory=folder)


def main(folder: str) -> int:
    names = modules()
    wrong = [w for n in names for w in [*missing(n), *broken(n)]]
    print(*wrong, sep="\n", file=sys.stderr)
    build(Path(folder), names)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
