"""`show`: what a class statement or an op was understood as, and what JAX is told of it.

    >>> typax.show(QArray)
    QArray, a hi type: q8
      components   qvalue: Int8[Array, '*batch n']
                   scale: Float32[Array, '*batch']
      stands for   Float32[Array, '*batch n']
      ...

Nothing is kept for this: it is read off the declaration, and the answers are asked of an example of the type.
"""

import ast
import inspect
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from typax import _axes, _jax
from typax._declaration import MISSING, Component, Declaration
from typax._op import Op
from typax._policies import Componentwise, Dense, Itself, NoTangent
from typax._type import ValueType, typing_tree
from typax._value import Value

type Rows = Iterator[tuple[str, list[str]]]


def show(x: Any) -> None:
    """Print what typax has made of a declared class, or of an op.

    For a class: its components, statics, what it stands for, its tangents, how it is mapped and partitioned, its methods;
    and what JAX is told of an example of the type. Of a value or a type that example is the type at hand. For an op: its
    reference, its implementations, and where the rules of the transformations come from.

    Raises:
      TypeError: for anything else.
    """
    print(describe(x))


def describe(x: Any) -> str:
    """What `show` prints."""
    if isinstance(x, Op):
        return _table(f"{x.name}, an op", _op_rows(x))
    if isinstance(x, type) and issubclass(x, Value) and x is not Value:
        ty = _example(x._declaration)
    elif isinstance(x, ValueType):
        ty = x
    elif isinstance(x, Value) or _jax.is_hi_value(x):
        ty = _jax.typeof(x)
    else:
        raise TypeError(f"typax.show takes a subclass of typax.Value, a value or type of one, or an op, not {x!r}")
    if ty is not None and not isinstance(ty, ValueType):
        raise TypeError(f"typax.show: {ty} is a type written by hand: what it says to JAX stands in its class")
    decl: Any = x._declaration if ty is None else ty.decl  # pyright: ignore[reportAttributeAccessIssue]
    kind = "a record" if decl.is_record else "a hi type"
    return _table(f"{decl.cls.__name__}, {kind}: {decl.name}", _class_rows(decl, ty))


def _table(title: str, rows: Rows) -> str:
    found = [(name, lines) for name, lines in rows if lines]
    width = max(len(name) for name, _ in found) + 3
    body = [f"  {name if i == 0 else '':{width}}{line}" for name, lines in found for i, line in enumerate(lines)]
    return "\n".join([title, *body])


# --- classes -------------------------------------------------------------------------------------------------------------


def _class_rows(decl: Declaration, ty: ValueType | None) -> Rows:
    cls = decl.cls
    yield "components", [str(c) for c in decl.components]
    yield "statics", [s.name if s.default is MISSING else f"{s.name} = {s.default}" for s in decl.statics]
    if decl.stands_for is None:
        yield "stands for", ["what its components stand for, one by one"]
    else:
        dtype = {None: "", "dtype": "; the static dtype gives the dtype"}.get(
            decl.dtype_from, f"; {decl.dtype_from} gives the dtype"
        )
        yield "stands for", [f"{decl.stands_for.text}{dtype}"]
    yield "tangent", [_tangent(decl)]
    yield "mapped by", [_mapped(decl)]
    yield "partitioned", [_partitioned(decl)]
    yield "methods", [f"{name}: {what}" for name, what in _methods(cls)]
    yield "replaced", [f"{name} of the type, by {base.__name__}" for base, name in _replaced(cls)]
    if ty is None:
        yield "told to JAX", [f"depends on the components; ask of a value: typax.show(v) with a {cls.__name__} v"]
        return
    yield "for example", [f"{ty} over {', '.join(map(str, ty.leaves)) or 'nothing'}"]
    yield from ((f"  {question}", [str(answer)]) for question, answer in _answers(ty))


def _tangent(decl: Declaration) -> str:
    policy = decl.tangent
    said = {
        Dense: "an array, like what it stands for",
        Componentwise: "a record of the tangents of its components",
        Itself: "a value of the same class, by from_dense",
        NoTangent: "a value is a constant",
    }
    return f"{policy.name}: {said.get(type(policy), f'as {type(policy).__name__} says')}"


def _mapped(decl: Declaration) -> str:
    names = ", ".join(c.name for c in decl.components)
    if all(c.axes is None for c in decl.components):
        own = "each element" if len(decl.components) == 1 else names
        return f"an int, for all alike; typax.Axes with an entry for {own}"
    built = "batch axes lead" if decl.stackable else "stacks arise under vmap and scan only"
    return f"an int ({built}); typax.Axes({names})"


def _partitioned(decl: Declaration) -> str:
    cls = decl.cls.__name__
    if all(c.axes is None for c in decl.components):
        one = "a spec for each element" if len(decl.components) == 1 else ", ".join(c.name for c in decl.components)
        return f"{cls}.P({one})"
    names = dict.fromkeys(d.leading for c in decl.components if c.axes for d in c.axes.dims if d.leading)
    lead = next((c.axes.variadic for c in decl.components if c.axes and c.axes.variadic), None)
    return f"{cls}.P({', '.join([*([f'*{lead}'] if lead else []), *(f'{n}=' for n in names)])})"


def _methods(cls: Any) -> Iterator[tuple[str, str]]:
    for name, member in inspect.getmembers_static(cls):
        if isinstance(member, staticmethod) and isinstance(member.__func__, Op):
            yield name, "an op that stands for its argument"
        elif isinstance(member, Op):
            yield name, "an op without a reference" if member.reference is None else f"an op that means {_called(member)}"
        elif isinstance(member, property) and not hasattr(Value, name):
            yield name, "a property, an op where it reads components"


def _replaced(cls: Any) -> Iterator[tuple[Any, str]]:
    for base in cls._base_hitype.__mro__[: cls._base_hitype.__mro__.index(ValueType)]:
        yield from ((base, name) for name in vars(base) if hasattr(ValueType, name) and not name.startswith("__"))


def _answers(ty: ValueType) -> Iterator[tuple[str, Any]]:
    yield "lo_ty()", ", ".join(map(str, ty.lo_ty()))
    if not ty.decl.is_record:
        yield "shape, dtype", f"{ty.shape}, {ty.dtype}"
    yield "to_tangent_aval()", ty.to_tangent_aval()
    if ty.to_ct_aval() != ty.to_tangent_aval():
        yield "to_ct_aval()", ty.to_ct_aval()
    yield "inc_rank(8, 0)", ty.inc_rank(8, 0)
    if ty.n_batch:
        yield f"dec_rank({ty.batch[0].size}, 0)", ty.dec_rank(ty.batch[0].size, 0)
    yield "leading_axis_spec()", ty.leading_axis_spec()
    if ty.n_batch:
        yield 'P("i").to_lo()', ty.decl.cls.P("i").to_lo()


# --- an example of a type ------------------------------------------------------------------------------------------------


def _example(decl: Declaration) -> ValueType | None:
    """A small type of the class; ``None`` if its components' sizes cannot be chosen from their axes alone."""
    if any(s.default is MISSING for s in decl.statics):
        return None
    env = {s.name: s.default for s in decl.statics if isinstance(s.default, int) and not isinstance(s.default, bool)}
    dims = [d for c in decl.components if c.axes for d in c.axes.dims]
    names = [n for n in dict.fromkeys(n for d in dims for n in sorted(d.names)) if n not in env]
    unit = math.lcm(*(k for d in dims if "//" in d.text for k in _integers(d, env)), 1)
    divided = {d.leading for d in dims if "//" in d.text}
    sizes = env | {n: (i + 3) * (unit if n in divided else 1) for i, n in enumerate(names)}
    try:
        comps = tuple(_example_component(c, {n: _axes.Axis(k) for n, k in sizes.items()}) for c in decl.components)
        leaves, tree = jax.tree.flatten(comps)
        statics = tuple(jnp.dtype(s.default) if s.name == "dtype" else s.default for s in decl.statics)
        return decl.cls._hitype(decl, leaves, tree, statics).check()
    except (TypeError, ValueError):
        return None


def _integers(dim: _axes.Dim, env: dict[str, int]) -> list[int]:
    values = [n.value for n in ast.walk(dim.expr) if isinstance(n, ast.Constant)] if dim.expr is not None else []
    return [v for v in (*values, *(env.get(n) for n in dim.names)) if isinstance(v, int) and v]


def _example_component(c: Component, env: _axes.Bindings) -> Any:
    pattern = c.patterns[0]
    if typing_tree(pattern.cls):
        return tuple(_jax.ShapedArray(shape, jnp.dtype("float32")) for shape in ((3,), ()))
    if pattern.axes is None:
        ty = _example(pattern.cls._declaration) if hasattr(pattern.cls, "_declaration") else None
        if ty is None and pattern.cls is not jax.Array:
            raise TypeError(f"no example of {pattern.text}")
        return ty or _jax.ShapedArray((3,), jnp.dtype("float32"))
    lead = (_axes.Axis(2),) if pattern.axes.variadic else ()
    shape = tuple(a.size for a in (*lead, *(_axes.evaluate(d, env, c.name) for d in pattern.axes.dims)))
    dtypes = pattern.dtypes or ("float32",)
    dtype = "float32" if "float32" in dtypes else dtypes[0]
    if hasattr(pattern.cls, "_declaration"):
        return pattern.cls.type(shape, dtype)
    return _jax.ShapedArray(shape, jnp.dtype(dtype))


# --- ops -------------------------------------------------------------------------------------------------------------------


def _op_rows(op: Op) -> Rows:
    yield "reference", [_called(op)]
    yield "implemented", [f"{impl}{_statics(impl)}  at {_place(impl.fn)}" for impl in op.impls]
    arrays = "a TypeError, as for operands that none fits" if op.reference is None else "the reference"
    yield "on arrays", [arrays if not _takes_arrays(op) else "the implementation that fits"]
    if op.reference is None:
        yield "typed by", ["the implementation"]
        yield "derivatives", ["with respect to componentwise operands, of the implementation; no others"]
    else:
        yield "typed by", ["the implementation, compared with the reference"]
        yield (
            "derivatives",
            [
                "jvp, linearize, vjp, transpose: of the reference, evaluated on the values",
                "with respect to componentwise operands: of the implementation",
            ],
        )
    yield "mapped", ["the implementation over the components, for any mix of operands"]
    yield (
        "by hand",
        [f"{kind}, at {_place(rule[0] if isinstance(rule, tuple) else rule)}" for kind, rule in op.rules.items()],
    )
    if op.primitive is not None:
        yield "found by", [f"typax.lift and derived rules, where a program has {op.primitive.name}"]


def _called(op: Op) -> str:
    if op.primitive is not None:
        return f"the primitive {op.primitive.name}"
    if op.reference is None:
        return "none: it has no meaning on what its operands stand for"
    fn = op.reference
    module = "" if getattr(fn, "__module__", None) in (None, "__main__") else f"{fn.__module__}."
    name = getattr(fn, "__name__", str(fn))
    return f"a lambda ({_place(fn)})" if name == "<lambda>" else f"{_public(module)}{name}"


def _public(module: str) -> str:
    """The module's public name: ``jax._src.numpy.`` is ``jax.numpy.``."""
    parts = module.split(".")
    return ".".join(p for p in parts if p != "_src") if parts[:3] == ["jax", "_src", "numpy"] else module


def _statics(impl: Any) -> str:
    names = [*impl.statics, *(["**"] if impl.any_static else [])]
    return f", statics {', '.join(names)}" if names else ""


def _place(fn: Any) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return "?" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _takes_arrays(op: Op) -> bool:
    plain: Sequence[Any] = (Any, inspect.Parameter.empty, jax.Array)
    return any(all(any(p.cls in plain for p in ps) for ps in impl.operands) for impl in op.impls)
