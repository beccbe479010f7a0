"""What typax ships, found rather than listed: every value class, and every op with examples of the primitive ones.

``make laws`` checks all laws on all of it, and puts into docs/laws.md where they have nothing to say, and why.
"""

import copy
import dataclasses
import importlib
import math
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import _gallery
import conftest  # noqa: F401  the ground that tests stand on: devices, strict promotion
import jax
import jax.numpy as jnp

import typax
import typax.laws as laws
from typax import Op, Value, quantize
from typax._prim import Cache
from typax.quantized import Quantized
from typax.quantized.ggml import Ggml, quantize_ggml


def modules() -> list[Any]:
    """All modules that ship types and ops; those for other libraries, which need not be installed, do not."""
    others = ("laws", "cli", "equinox", "flax")
    names = [m.name for m in pkgutil.iter_modules(typax.__path__) if not m.name.startswith(others)]
    return [importlib.import_module(f"typax.{n}") for n in names]


def types() -> list[Any]:
    """All value classes of one's own modules that stand for something one can build: not those of tangents."""
    found = [c for m in modules() for c in vars(m).values() if isinstance(c, type) and issubclass(c, Value)]
    own = [c for c in dict.fromkeys(found) if c not in (Value, Quantized) and not c.__module__.startswith("typax._")]
    return sorted(own, key=lambda c: c.__name__)


def _floats(*shape: int, shift: float = 0.0) -> Any:
    """Numbers of which each row is larger than the one before."""
    size = math.prod(shape)
    rows = jnp.arange(1.0, 1 + shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    return rows * jnp.sin(jnp.arange(float(size)) + 1.7 * shift).reshape(shape)


def _quantized(*shape: int) -> list[Any]:
    return [quantize(_floats(*shape, shift=k)) for k in (0.0, 1.0, 2.0)]


FORMATS = {
    "int4 in groups": {"format": "int4", "group": 2},
    "int4 with zero points": {"format": "int4", "group": 2, "zero_point": True},
    "nf4": {"format": "nf4", "group": 4},
    "mxfp8": {"format": "mxfp8", "group": 32},
}
"""Formats of the general class of quantized arrays, and how the page names them."""


def _formatted(how: dict[str, Any]) -> list[Any]:
    return [quantize(_floats(2, max(4, how["group"]), shift=k), **how) for k in (0.0, 1.0, 2.0)]


def _blocks() -> list[Any]:
    return [quantize_ggml(_floats(2, 32, shift=k), kind="Q8_0") for k in (0.0, 1.0, 2.0)]


def _columns(*shape: int) -> list[Any]:
    return [typax.transpose(q, permutation=(1, 0)) for q in _quantized(*shape[::-1])]


def _low(m: int, n: int) -> list[Any]:
    return [typax.outer(_floats(m, 2, shift=k), _floats(2, n, shift=k + 1)) for k in (0.0, 1.0, 2.0)]


def _sums(m: int, n: int) -> list[Any]:
    return [typax.Sum(q, w, 0.5) for q, w in zip(_quantized(m, n), _low(m, n), strict=True)]


def _params(fn: Any, *args: Any) -> dict[str, Any]:
    """The parameters with which a function of arrays calls its only primitive."""
    *_, eqn = jax.make_jaxpr(fn)(*args).eqns
    while "jaxpr" in eqn.params:
        *_, eqn = eqn.params["jaxpr"].eqns
    return dict(eqn.params)


def _call(op: Any, fn: Any, *operands: Any) -> Any:
    """An example: operands, each a list of three or one for all, with the parameters that ``fn`` gives the primitive."""
    rows = [x if isinstance(x, list) else [x] * 3 for x in operands]
    first, *others = zip(*rows, strict=True)
    return laws.Call(op, first, tuple(others), _params(fn, *map(typax.dense, first)))


def given() -> dict[Any, list[Any]]:
    """Examples of the ops on primitives, whose statics are the primitive's parameters."""
    from typax import _codes
    from typax import _rows as c

    q, qc, low, sums = _quantized(2, 4), _columns(2, 4), _low(2, 4), _sums(2, 4)
    x, y = ([_floats(*s, shift=k) for k in (0.0, 1.0, 2.0)] for s in ((6, 2), (4, 6)))
    rounded = [((_floats(2, 4),), {}), *(((_floats(2, max(4, how["group"])),), how) for how in FORMATS.values())]
    ggml = [laws.Call(None, args, (args, args), {"kind": kind}) for args in [(_floats(2, 32),)] for kind in ("Q8_0", "Q4_1")]
    product = lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())))
    square = _quantized(4, 4)
    dot = [(x, q), (x, qc), (q, y), (square, square), (x, low), (low, y), (x, sums), (sums, y)]
    turn = lambda a: jax.lax.transpose(a, (1, 0))
    rows = [jnp.array([[k], [0]]) for k in (1, 0, 1)]
    blocks, few = _blocks(), [_floats(2, 32, shift=k) for k in (2.0, 1.0, 0.0)]
    onto_rows = lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())))
    lookups = lambda n: lambda a, i: jax.lax.gather(a, i, _ROWS, (1, n), mode="clip")
    return {
        quantize: [laws.Call(None, args, (args, args), statics) for args, statics in rounded],
        quantize_ggml: ggml,
        typax.requantize: [laws.Call(None, (q[0],), ((q[1],), (q[2],)), {"format": "int4", "group": 2})],
        _codes.dot_general: [
            *(_call(_codes.dot_general, product, *o) for o in dot),
            _call(_codes.dot_general, onto_rows, few, blocks),
        ],
        c.transpose: [_call(c.transpose, turn, o) for o in (q, qc, low, sums)],
        c.gather: [
            _call(c.gather, lookups(4), q, rows),
            _call(c.gather, lookups(4), low, rows),
            _call(c.gather, lookups(32), blocks, rows),
        ],
        c.reshape: [
            _call(c.reshape, lambda a: jax.lax.reshape(a, (2, 1, 4)), q),
            _call(c.reshape, lambda a: jax.lax.reshape(a, (2, 2, 2)), low),
        ],
        c.broadcast_in_dim: [_call(c.broadcast_in_dim, lambda a: jax.lax.broadcast_in_dim(a, (6, 2, 4), (1, 2)), q)],
        c.squeeze: [_call(c.squeeze, lambda a: jax.lax.squeeze(a, (0,)), _quantized(1, 4))],
        c.slice_: [_call(c.slice_, lambda a: jax.lax.slice(a, (1, 0), (2, 2)), q)],
        c.concatenate: [
            _call(c.concatenate, lambda a, b: jax.lax.concatenate([a, b], 0), q, q[::-1]),
            _call(c.concatenate, lambda a, b: jax.lax.concatenate([a, b], 1), low, low[::-1]),
        ],
        c.rev: [_call(c.rev, lambda a: jax.lax.rev(a, (0,)), q)],
        c.neg: [_call(c.neg, jax.lax.neg, q)],
        c.convert_element_type: [_call(c.convert_element_type, lambda a: jax.lax.convert_element_type(a, "bfloat16"), q)],
    }


_ROWS = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))


def subjects() -> list[Any]:
    """Every shipped type and op as laws take them, each example of an op on a primitive by itself."""
    out = [s for c in types() for s in (_of_values(_blocks()) if c is Ggml else laws.subjects(c))]
    for name, how in FORMATS.items():
        (s,) = _of_values(_formatted(how))
        out.append(_named(s, name))
    examples = given()
    for op in ops():
        if op in examples:
            for call in examples[op]:
                (s,) = laws.subjects(None, [op], examples={op: [call]})
                shown = [f"{k}={v}" for k, v in call.statics.items()] if op.primitive is None else []
                shown = [type(x).__name__ for x in call.args] + shown
                out.append(_named(s, f"{op.name}({', '.join(shown)})"))
        elif op.primitive is None:
            out += [_where_scales_fit(_named(s, s.name)) for s in laws.subjects(None, [_as_shipped(op)])]
    return out


def _as_shipped(op: Any) -> Any:
    """The op with the implementations that typax ships, whatever else is imported beside."""
    own = [i for i in op.impls if i.fn.__module__.startswith("typax.")]
    if own == op.impls:
        return op
    alone = copy.copy(op)
    alone.impls, alone.cache = own, Cache()
    return alone


def _of_values(values: list[Any]) -> list[Any]:
    return laws.subjects(type(values[0]), examples=[laws.Values(values[0], tuple(values[1:]))])


def _where_scales_fit(subject: Any) -> Any:
    """Two quantized operands have a product only where no scale lies along the contracted axis."""
    if subject.name != "matmul(Quantized, Quantized)":
        return subject
    first, *others = zip(_quantized(2, 4), _columns(4, 3), strict=True)
    call = laws.Call(subject.what, first, tuple(others), {})
    return dataclasses.replace(subject, given=(call,), draw=lambda o: None)


def mutated() -> list[Any]:
    """Those of which mutants are made. Formats and ggml's kinds of blocks, whose examples are given, are left out: the laws
    that find a wrong `QArray` or `quantize` find them."""
    return [s for s in subjects() if not (s.name in (*FORMATS, "Ggml") or re.search("format=|kind=|Ggml", s.name))]


def sample(found: list[Any]) -> list[Any]:
    """The types, and of each op the first subject: what the tests check, where `make laws` checks all."""
    of: dict[Any, Any] = {}
    for s in found:
        of.setdefault(s.name if s.kind == "type" else s.what, s)
    return list(of.values())


def _named(subject: Any, name: str) -> Any:
    return dataclasses.replace(subject, name=name.replace("ArrayImpl", "Array").replace("|", " or "))


def ops() -> list[Any]:
    """All ops, by name."""
    found = [o for m in modules() for o in vars(m).values() if isinstance(o, Op)]
    return sorted(dict.fromkeys(found), key=lambda o: (o.primitive is not None, o.name))


# --- the cells where laws have nothing to say --------------------------------------------------------------------------

PAGE = Path(__file__).parent.parent / "docs" / "laws.md"
ALL = "all ops"
BEGIN, END = "<!-- not applicable: made by a program -->\n", "<!-- end of not applicable -->"


def cells(subject: Any) -> list[Any]:
    """What all laws say of a subject, each on its plainest example."""
    out = []
    for law in laws.LAWS.values():
        if law.kind == subject.kind:
            with laws.settled():
                out.append(laws.check_cell(law, subject, 0, ("plain",)))
    return out


def not_applicable() -> set[tuple[str, str]]:
    """The law and the subject of each cell that the page lists."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line[2:-2].split(" | ") for line in table.splitlines() if line.startswith("| `")]
    every = sorted(named(BEGIN) & {s.name for s in subjects() if s.kind == "op"})
    those = lambda text: every if text == ALL else re.findall(r"`([^`]+)`", text)
    return {(law, of) for these, ofs, _ in rows for law in those(these) for of in those(ofs)}


def told(names: list[str]) -> str:
    """The line that names the subjects of a table."""
    return f"Of {', '.join(f'`{n}`' for n in names)}:"


def named(begin: str) -> set[str]:
    """The subjects of the table with this mark."""
    return set(re.findall(r"`([^`]+)`", PAGE.read_text().partition(begin)[2].partition("\n\n")[0]))


def table(found: list[Any]) -> str:
    """Rows of laws, subjects and the reason that they share."""
    silent = [c for c in found if c.status == "not applicable"]
    by: dict[tuple[str, str], list[str]] = {}  # the subjects of a law and a reason
    for c in silent:
        by.setdefault((c.law, c.why), []).append(c.subject)
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # the laws of a reason and its subjects
    for (law, why), of in by.items():
        rows.setdefault((why, tuple(of)), []).append(law)
    lines = [told(list(dict.fromkeys(c.subject for c in found))), "", "| law | of | why |", "| --- | --- | --- |"]
    every = tuple(dict.fromkeys(c.subject for c in found if laws.LAWS[c.law].kind == "op"))
    for (why, of), names in rows.items():
        whose = ALL if of == every else ", ".join(f"`{s}`" for s in of)
        lines.append(f"| {', '.join(f'`{n}`' for n in names)} | {whose} | {why} |")
    return "\n".join(lines)


def main() -> int:
    found, broken = [], 0
    for s in subjects():
        found += cells(s)
        print(
            s.name,
            [f"{c.law}: {c.why}" for c in found if c.subject == s.name and c.status in ("fail", "no example")] or "",
            flush=True,
        )
    for name, s in _gallery.subjects():
        said = cells(s)
        print(
            f"gallery/{name}.py",
            s.name,
            [f"{c.law}: {c.why}" for c in said if c.status in ("fail", "no example")] or "",
            flush=True,
        )
        broken += sum(c.status in ("fail", "no example") for c in said)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(found)}\n{END}{rest.partition(END)[2]}")
    return broken + sum(c.status in ("fail", "no example") for c in found)


if __name__ == "__main__":
    sys.exit(main())
