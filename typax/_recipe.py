"""Recipes: which leaves of a tree become quantized, and how.

    typax.quantize_tree(params, "int8")
    typax.quantize_tree(params, [("head", None), ("*.mlp", {"format": "int4", "group": 32}), ("*", "int8")])
    typax.quantize_tree(params, "recipe.toml")

The first rule whose pattern matches the path of a leaf decides.  A scale is shared along the axes that a matmul with the
weight contracts, so that it is one for each output.  Unless the rule names them, these follow from the layouts of Flax
(``kernel`` is [in, out], in attention [in, heads, width] and [heads, width, out], in convolutions [window..., in, out]) and
of PyTorch and Equinox ([out, in], in convolutions [out, in, window...]).  Where a ``bias`` lies beside the weight, its shape
tells outputs, and leading axes of layers that are stacked, from the rest:

    kernel [3,16,4,8], bias [3,4,8]    3 layers, 16 in      weight [5,4,3], bias [5] or [5,1]    a window of 3
    kernel [3,3,4,8],  bias [8]        a window of 3 x 3    weight [5,4,3], bias [5,4]           5 layers
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from typax import _jax
from typax._describe import show
from typax._paths import dotted, matches
from typax._receipt import nbytes
from typax._type import ValueType
from typax.quantized import quantize
from typax.quantized.format import format_of

Recipe = str | Sequence[tuple[str, Any]]
"""See `quantize_tree`."""


@dataclass(frozen=True)
class Treated:
    """A leaf: what it was, what it became, its bytes; ``why`` it was left alone, if it was, and which ``rule`` decided."""

    path: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    rule: str | None
    why: str | None = None


@dataclass(frozen=True)
class Report:
    """What became of the leaves of a tree, and the patterns that matched none. Prints as a table."""

    leaves: tuple[Treated, ...]
    unmatched: tuple[str, ...] = field(default=())

    @property
    def changed(self) -> tuple[Treated, ...]:
        return tuple(t for t in self.leaves if t.why is None)

    @property
    def left(self) -> tuple[Treated, ...]:
        return tuple(t for t in self.leaves if t.why is not None)

    @property
    def bytes_before(self) -> int:
        return sum(t.bytes_before for t in self.leaves)

    @property
    def bytes_after(self) -> int:
        return sum(t.bytes_after for t in self.leaves)

    def __str__(self) -> str:
        rows = [("path", "was", "is", "bytes")]
        rows += [(t.path, t.before, t.after, f"{t.bytes_before:,} -> {t.bytes_after:,}") for t in self.changed]
        rows += [(t.path, t.before, f"left: {t.why}", f"{t.bytes_before:,}") for t in self.left]
        rows.append(
            ("all", f"{len(self.changed)} of {len(self.leaves)}", "", f"{self.bytes_before:,} -> {self.bytes_after:,}")
        )
        widths = [max(len(r[i]) for r in rows) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        return "\n".join(lines + [f"The pattern {p!r} matched nothing." for p in self.unmatched])


def quantize_tree(tree: Any, recipe: Recipe = "int8") -> tuple[Any, Report]:
    """Put quantized arrays into a tree in place of arrays; the tree may be of any kind.

    Args:
      tree: arrays at its leaves, or types of arrays (``jax.ShapeDtypeStruct``), which become types.
      recipe: a format's name, the name of a TOML file, or pairs (or a dict) of a pattern and what to do with the leaves
        that it matches: a format's name, a dict of ``format`` and other arguments of `typax.quantize`, a function of the
        leaf (which keeps its shape), or ``None`` to leave it. A pattern is matched with the path of a leaf, joined by
        dots, or with the path of something that the leaf is in; ``*`` stands for anything. Unless it is the whole path,
        it passes over what is no float matrix: whole numbers, vectors, biases, scales of norms.

    Returns:
      the tree, and a report: ``leaves`` (what became of each, of which ``changed`` and ``left``), ``unmatched`` patterns,
      ``bytes_before`` and ``bytes_after``. It prints as a table.

    Raises:
      ValueError: for a recipe that cannot be understood, a leaf that its format cannot hold, or a function that raises or
        returns something else than an array or value of the leaf's shape.
    """
    rules = rules_of(recipe)
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, ValueType | jax.ShapeDtypeStruct) or _jax.is_hi_value(x)
    )
    paths = [path_of(k) for k, _ in flat]
    everything = {p: x for p, (_, x) in zip(paths, flat, strict=True)}
    used: set[int] = set()
    out, told = [], []
    for path, (_, x) in zip(paths, flat, strict=True):
        n = _rule(rules, path)
        if n is None:
            pattern, y, why = None, x, "no rule matches it"
        else:
            used.add(n)
            pattern, action = rules[n]
            y, why = _treat(path, x, action, pattern, everything)
        out.append(y)
        if hasattr(x, "dtype") or _is_hi(x):
            told.append(Treated(path, show(_type(x)), show(_type(y)), nbytes(_type(x)), nbytes(_type(y)), pattern, why))
    unmatched = tuple(p for i, (p, _) in enumerate(rules) if i not in used)
    return treedef.unflatten(out), Report(tuple(told), unmatched)


def quantizer(recipe: Recipe, everything: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """What `quantize_tree` makes of one leaf of a tree of these leaves, or types, as a function of its path and the leaf."""
    rules = rules_of(recipe)

    def one(path: str, x: Any) -> Any:
        n = _rule(rules, path)
        return x if n is None else _treat(path, x, rules[n][1], rules[n][0], everything)[0]

    return one


def _rule(rules: Any, path: str) -> int | None:
    """The number of the first rule that matches."""
    return next((i for i, (p, _) in enumerate(rules) if matches(p, path)), None)


def _is_hi(x: Any) -> bool:
    """Whether a leaf is a value, or the type of one."""
    return isinstance(x, ValueType) or (not isinstance(x, jax.ShapeDtypeStruct) and _jax.is_hi_value(x))


def path_of(keys: Any) -> str:
    """The path of a leaf, joined by dots, without what a Flax variable adds to it."""
    text = dotted(keys)
    for tail in (".value", ".raw_value"):
        text = text.removesuffix(tail)
    return text


def _treat(path: str, x: Any, action: Any, pattern: str, everything: Mapping[str, Any]) -> tuple[Any, str | None]:
    insist = pattern == path
    if _is_hi(x):
        return x, "it is a value already"
    if action is None:
        return x, "the rule says so"
    if callable(action):
        return _made(path, x, action, pattern), None
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        if insist:
            raise ValueError(f"{path} is {show(x)}, and only arrays of floats can be quantized")
        return x, "it is no array of floats"
    shape, name = everything[path].shape, path.rpartition(".")[2]  # the leaf may be some rows of it
    if not insist and (sum(n != 1 for n in shape) < 2 or name in _NO_WEIGHTS):
        named = f"it is called {name}" if name in _NO_WEIGHTS else "it is a vector"
        return x, f"its rank is {x.ndim}" if x.ndim < 2 else named
    given = dict(action)
    if "axis" not in given:
        given |= _axis_and_group(given, shape, *shared_axes(path, shape, everything))
    quantized = lambda a: quantize(a, given["format"], **{k: v for k, v in given.items() if k != "format"})
    try:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.make_jaxpr(quantized)(x).jaxpr.outvars[0].aval, None
        return quantized(x), None
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path}, {show(x)}: {e}") from None


def _made(path: str, x: Any, action: Any, pattern: str) -> Any:
    """What the function of a rule makes of a leaf: something that stands for an array of its shape."""
    where = f"{path}, {show(x)}: the function of the rule {pattern!r}"
    try:
        y = action(x)
    except Exception as e:
        raise ValueError(f"{where} raised {type(e).__name__}: {e}") from e
    if hasattr(x, "dtype") and (not hasattr(y, "dtype") or getattr(y, "shape", None) != x.shape):
        said = show(y) if hasattr(y, "dtype") else repr(y)
        raise ValueError(f"{where} returned {said}; return an array or a value of the shape {list(x.shape)}")
    return y


_NO_WEIGHTS = ("bias", "b", "scale", "cached_key", "cached_value")  # the latter two hold what Flax has attended to


def _axis_and_group(given: dict[str, Any], shape: Sequence[int], axes: tuple[int, ...], inputs: int) -> dict[str, Any]:
    """The axis and group for a weight: groups are of inputs, and none is larger than the axis that it splits."""
    group, told = given.get("group", format_of(given["format"]).group), given.get("group") is not None
    if len(axes) > 1 and (group is None or group > shape[inputs]):
        return {"axis": axes, "group": None}
    return {"axis": inputs} | ({"group": min(group, max(shape[inputs], 1))} if told else {})


def shared_axes(path: str, shape: Sequence[int], everything: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """The axes, from the last, that a matmul with the weight at ``path`` contracts, and which of them is of inputs."""
    parent, _, name = path.rpartition(".")
    ndim, first = len(shape), name != "kernel"  # whether outputs come before inputs
    if not first:
        above, _, layer = parent.rpartition(".")
        attention = f"{above}.query.kernel".lstrip(".") in everything
        if attention and layer in ("query", "key", "value") and ndim >= 3:
            return (-3,), -3
        if attention and layer == "out" and ndim >= 3:
            return (-3, -2), -2
    bias = getattr(everything.get(f"{parent}.bias".lstrip(".")), "shape", None) if name in ("kernel", "weight") else None
    axes = None if bias is None else _beside(tuple(bias), tuple(shape), first)
    if axes is None and ndim < 4:
        axes = (-1,) if first else (-2,)
    elif axes is None:
        axes = tuple(range(1 - ndim, 0)) if first else tuple(range(-ndim, -1))
    return axes, axes[0] if first else axes[-1]


def _beside(bias: tuple[int, ...], shape: tuple[int, ...], first: bool) -> tuple[int, ...] | None:
    """The axes of a weight that are neither outputs, which a bias of this shape is added to, nor stacked as the bias is."""
    ndim = len(shape)
    while first and len(bias) > 1 and bias[-1] == 1:
        bias = bias[:-1]  # Equinox's, of a convolution
    for stacked in range(len(bias)):
        outs = bias[stacked:]
        axes = range(stacked + len(outs) - ndim, 0) if first else range(stacked - ndim, -len(outs))
        begin = stacked if first else ndim - len(outs)
        if axes and bias[:stacked] == shape[:stacked] and shape[begin : begin + len(outs)] == outs:
            return tuple(axes)
    return None


# --- recipes ----------------------------------------------------------------------------------------------------


def rules_of(recipe: Recipe) -> list[tuple[str, Any]]:
    """The rules of a recipe: a pattern, and a dict of the arguments of `quantize`, a function or ``None``.

    Raises:
      ValueError: if it cannot be understood.
    """
    if isinstance(recipe, str | Path) and str(recipe).endswith(".toml"):
        return _from_toml(Path(recipe))
    if isinstance(recipe, str) or (isinstance(recipe, dict) and "format" in recipe):
        recipe = [("*", recipe)]
    rules = []
    for rule in recipe.items() if isinstance(recipe, dict) else recipe:
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ValueError(
                f"a recipe is made of pairs of a pattern and a format or function, [('layers.*', 'int8'), ('*', None)], "
                f"not of {rule!r}"
            )
        rules.append((rule[0], _action(rule[1], f"rule {rule[0]!r}")))
    return rules


_ARGUMENTS = ("format", "axis", "group", "zero_point", "scale", "exponents")


def _action(given: Any, where: str) -> Any:
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        given = {"format": given}
    if isinstance(given, dict):
        if unknown := sorted(given.keys() - set(_ARGUMENTS)):
            raise ValueError(f"{where}: there is no argument {unknown[0]!r} of quantize; there are {', '.join(_ARGUMENTS)}")
        if given.get("format") == "none":
            return None
        if "format" not in given:
            raise ValueError(f"{where} names no format; give format=, or 'none' to leave what it matches alone")
        try:
            format_of(given["format"])
        except (ValueError, TypeError) as e:
            raise ValueError(f"{where}: {e}") from None
        for name in ("axis", "group"):
            sizes = given.get(name)
            if not all(x is None or type(x) is int for x in (sizes if isinstance(sizes, list | tuple) else [sizes])):
                raise ValueError(f"{where}: {name} is {sizes!r}, neither a number nor a list of them")
        return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if not callable(given):
        raise ValueError(f"{where}: {given!r} is neither a format, a dict with one, a function, nor None")
    return given


def _from_toml(path: Path) -> list[tuple[str, Any]]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is no ordinary file: a pipe, or a device")
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror or e}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no TOML: {e}") from None
    rules = told.get("rule")
    if set(told) != {"rule"} or not isinstance(rules, list):
        raise ValueError(f"{path}: a recipe is a list of [[rule]] tables, each with paths, format and its arguments")
    out = []
    for i, rule in enumerate(rules):
        where = f"{path}, rule {i + 1}"
        if not isinstance(rule, dict) or "paths" not in rule:
            raise ValueError(f"{where} has no paths")
        patterns = [rule["paths"]] if isinstance(rule["paths"], str) else rule["paths"]
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise ValueError(f"{where}: paths must be a pattern or a list of patterns, not {patterns!r}")
        action = _action({k: v for k, v in rule.items() if k != "paths"}, where)
        out += [(p, action) for p in patterns]
    return out


def _type(x: Any) -> Any:
    """What has the dtype and shape of a leaf: the type of a value, or an array itself."""
    return _jax.typeof(x) if _is_hi(x) and not isinstance(x, ValueType) else x
