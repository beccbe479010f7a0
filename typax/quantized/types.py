"""Quantized arrays: rows of codes, one scale each, laid out as `layout` says.

    QArray     q8[k,n]       int8, the last axis shares a scale           qvalue [*batch, n]      scale [*batch]
    QColumns   q8t[k,n]      int8, the last axis but one does             qvalue [*batch, n, k]   scale [*batch, n]
    the rest   q4g128[k,n]   any format and layout: a class for each      qvalue [*batch, outer..., inner...]
                             kind of layout, made by `kind`               scale  [*batch, outer...]

The classes of the rest are read off a word with a letter for each axis:

    u   has scales of its own        a
    w   shared as a whole            a, or in packed bytes (k) with padding (q)
    g   in groups, or padded (p)     a groups, of w values or bytes

    "gu" of int4 by 128     qvalue "*batch a0 a1 w0"     scale "*batch a0 a1"     stands for "*batch a0*g0 a1"

so that the axis rule of `typax.Value` gives shapes, shardings and batching as it does for any class.
"""

import functools
import inspect
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Shaped

from typax._spec import Pspec
from typax._structural import dense
from typax._type import ValueType
from typax._value import Value
from typax.quantized import layout, packing, rounding
from typax.quantized.encode import Choice, Parts, encode
from typax.quantized.format import INT8, Format
from typax.quantized.layout import Groups


def accumulated(*dtypes: Any) -> Any:
    """The dtype in which products of numbers of these dtypes are made and summed: float32, or float64 if one has it."""
    return jnp.dtype("float64" if jnp.dtype("float64") in map(jnp.dtype, dtypes) else "float32")


def times(codes: Any, scale: Any, dtype: Any) -> Any:
    """``codes · scale`` in ``dtype``, multiplied in float32 or float64."""
    wide = accumulated(dtype)
    return (codes.astype(wide) * scale.astype(wide)).astype(dtype)


class QuantizedType(ValueType):
    """The type of a quantized array: its format (`of_format`) and `groups`, of its axes that are no batch axes."""

    @property
    def of_format(self) -> Format:
        return self.static("scheme") if self.decl.cls.general else INT8

    @functools.cached_property
    def groups(self) -> Groups:
        word = enumerate(self.decl.cls.word)
        return tuple(1 if c == "u" else self.static(f"g{i}") if c in "gp" else 0 for i, c in word)

    @property
    def padding(self) -> tuple[int, ...]:
        """Values of each own axis that are there to fill a group or a byte."""
        return tuple(self.static(f"p{i}") if c in "pq" else 0 for i, c in enumerate(self.decl.cls.word))

    @property
    def extra(self) -> str:
        """What there is beside codes and scales: a zero point ("z"), an offset ("m"), or nothing."""
        return self.decl.cls.extra

    def partition_spec(self, sharding: Any) -> tuple[Pspec, Any]:
        given, mesh = getattr(sharding, "spec", sharding), getattr(sharding, "mesh", None)
        if isinstance(given, jax.P):
            self._whole_groups(given, mesh or jax.sharding.get_abstract_mesh())
        spec, mesh = super().partition_spec(sharding)
        pairs = zip(self.leaves, spec.leaves, strict=True)
        leaves = [
            a.partition_spec(s)[0] if isinstance(a, ValueType) and isinstance(s, jax.P) else s for a, s in pairs
        ]  # scales that are quantized have a spec of their own class
        return Pspec(spec.decl, leaves, spec.shown, spec.tangents, spec.dense, spec.named), mesh

    def _whole_groups(self, parts: Any, mesh: Any) -> None:
        groups = all_groups(self)
        for a, (n, g, part) in enumerate(zip(self.shape, groups, (*parts, *(None,) * self.ndim), strict=False)):
            packs = self.of_format.per if g == 0 and a == layout.inner_axes(groups)[-1] else 1
            if part is not None and max(g, packs) > 1:
                layout.whole_groups(self, a, n, max(g, packs), part, mesh, f"{parts}")

    def check(self) -> "ValueType":
        super().check()
        if self.decl.cls.general:
            _check(self)
        return self

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        text = super().str_short(short_dtypes)
        if not self.decl.cls.general:
            return text
        dims = text[text.rindex("[") :]
        own = [] if self.dtype == jnp.dtype("float32") else [str(self.dtype)]
        scale = self.leaves[1]
        f = self.of_format
        usual = jnp.dtype("float32") if f.shown in (f"q{f.bits}", f"u{f.bits}") else f.scale_storage
        if not isinstance(scale, ValueType) and scale.dtype != usual:
            own.append(f"scale={scale.dtype if f.scale.dtype != 'e8m0' else 'e8m0'}")
        own_axes, mark = _shown(self.groups, self.shape, f)
        shown = own_axes + own
        name = f.shown + ("z" if self.extra == "z" else "") + mark
        return name + (f"<{','.join(shown)}>" if shown else "") + dims

    def __repr__(self) -> str:
        return self.str_short()

    __str__ = __repr__


def _shown(groups: Groups, shape: tuple[Any, ...], format: Format) -> tuple[list[str], str]:
    """How a layout prints: by a mark where it is a usual one, else by its axes; a group that a format has of its own, for an
    array of this ``shape``, is not shown."""
    rank = len(groups)
    shared = [a - rank for a in layout.inner_axes(groups)]
    sizes = [groups[a] for a in shared]
    usual = len(shared) == 1 and sizes == [format.group_of(shape, shared[0]) or 0]
    mark = "g" + "x".join(map(str, sizes)) if all(sizes) and not usual else ""
    if shared == [-1] and (mark or usual):
        return [], mark
    if shared == [-2] and (mark or usual):
        return [], mark + "t"
    if shared == [-2, -1] and mark:
        return [], mark
    axes = ",".join(map(str, shared))
    mixed = "" if mark or not any(sizes) else f",group=({','.join(str(g or None) for g in sizes)})"
    return [f"axis=({axes}){mixed}"], mark


def _check(ty: QuantizedType) -> None:
    who, f = ty.decl.name, ty.of_format
    codes, scale = ty.leaves[0], ty.leaves[1]
    group = row_group(ty.groups)
    if ty.static("bits") != f.bits:
        raise TypeError(f"{who}: codes of {f.name} have {f.bits} bits, got bits={ty.static('bits')}")
    if codes.dtype != f.storage:
        raise TypeError(f"{who}: codes of {f.name} are {f.storage}, got {codes}")
    if group and codes.shape[-1] != (want := packing.width(f, group)):
        raise TypeError(f"{who}: {group} codes of {f.name} take {want} bytes, got {codes}")
    if f.scale.of is None and not isinstance(scale, ValueType) and f.scale.dtype == "e8m0" and scale.dtype != jnp.uint8:
        raise TypeError(f"{who}: scales of {f.name} are bytes, uint8, got {scale}")


class Quantized(Value, name="quantized", hitype=QuantizedType):
    """The class of all quantized arrays. Made by `typax.quantize`; what a value stands for is `typax.dense` of it.

    ``qvalue`` are the codes, ``scale`` is one for each row of them, an array or again a quantized one. A class says how it
    is laid out: `general`, whether it is of any format; `word`, a letter for each axis; `extra`, what there is beside codes
    and scales.
    """

    qvalue: Shaped[Array, "*batch n"]
    scale: Shaped[Array, "*batch"]

    general: ClassVar[bool] = False
    word: ClassVar[str] = "w"
    extra: ClassVar[str] = ""

    def dense(self) -> Float32[Array, "*batch n"]:
        return times(self.qvalue, self.scale[..., None], jnp.float32)


class QArray(Quantized, name="q8"):
    """Row-wise int8: x ≈ scale · qvalue.

    Components: ``qvalue``, int8 of the shape that the value stands for; ``scale``, float32, one for each row (all but the
    last axis).  ``dtype`` is that of the array it stands for.
    """

    qvalue: Int8[Array, "*batch n"]
    scale: Float32[Array, "*batch"]
    dtype: Any = jnp.dtype("float32")

    def dense(self) -> Float[Array, "*batch n"]:
        return times(self.qvalue, self.scale[..., None], self.dtype)

    @classmethod
    def from_dense(cls, x, dtype=None):
        """Quantize; what `typax.retract` and quantized tangents are made by."""
        parts = encode(INT8, x, (0,), Choice())
        return cls(parts.qvalue, parts.scale, dtype=dtype or x.dtype)


class QColumns(Quantized, name="q8t"):
    """Column-wise int8: the rows of ``qvalue`` are the columns of what it stands for, with one ``scale`` each.

    ``dtype`` is that of the array it stands for.
    """

    qvalue: Int8[Array, "*batch n k"]
    scale: Float32[Array, "*batch n"]
    dtype: Any = jnp.dtype("float32")

    word: ClassVar[str] = "wu"

    def dense(self) -> Float[Array, "*batch k n"]:
        return times(self.qvalue, self.scale[..., None], self.dtype).mT

    @classmethod
    def from_dense(cls, x, dtype=None):
        """Quantize; what `typax.retract` and quantized tangents are made by."""
        parts = encode(INT8, x, (0, 1), Choice())
        return cls(parts.qvalue, parts.scale, dtype=dtype or x.dtype)


# --- the rest --------------------------------------------------------------------------------------------------------

_AXES = {  # in the codes: among the outer axes, among the inner ones; in what it stands for
    "u": ("a{i}", "", "a{i}"),
    "w": ("", "a{i}", "a{i}"),
    "k": ("", "a{i}", "a{i}*8//bits"),
    "q": ("", "a{i}", "a{i}*8//bits-p{i}"),
    "g": ("a{i}", "w{i}", "a{i}*g{i}"),
    "p": ("a{i}", "w{i}", "a{i}*g{i}-p{i}"),
}


@functools.cache
def kind(word: str, extra: str = "") -> Any:
    """The class of a layout: a letter for each axis, and what there is beside codes and scales (see above)."""
    outer, inner, whole = (" ".join(filter(None, (_AXES[c][k].format(i=i) for i, c in enumerate(word)))) for k in range(3))
    codes, scales, stands_for = (" ".join(filter(None, ("*batch", *p))) for p in ((outer, inner), (outer,), (whole,)))
    name = f"Q_{word}{extra}"
    notes: dict[str, Any] = {
        "qvalue": Shaped[Array, codes],
        "scale": Shaped[Array, scales] | Shaped[Quantized, scales],
    }
    if extra:
        notes["zero_point" if extra == "z" else "offset"] = Shaped[Array, scales]
    notes |= {"dtype": Any, "scheme": Any, "bits": int}
    body: dict[str, Any] = {"dtype": jnp.dtype("float32"), "scheme": INT8, "bits": 8}
    sizes = [f"g{i}" for i, c in enumerate(word) if c in "gp"] + [f"p{i}" for i, c in enumerate(word) if c in "pq"]
    notes |= dict.fromkeys(sizes, int)
    body |= dict.fromkeys(sizes, 1)

    def dense_of(self: Any) -> Any:
        return _dense(self)

    dense_of.__annotations__ = {"return": Float[Array, stands_for]}
    dense_of.__name__ = "dense"
    space = {
        "__annotations__": notes, "__module__": __name__, "__qualname__": name, "__doc__": f"{codes} -> {stands_for}",
        "general": True, "word": word, "extra": extra, "dense": dense_of, "from_dense": _way_in(word, extra, sizes), **body,
    }  # fmt: skip
    make: Any = type(Quantized)
    return make(name, (Quantized,), space, name=name)


def _way_in(word: str, extra: str, sizes: list[str]) -> Any:
    """``from_dense`` of a class: quantize in the same format and layout."""

    def from_dense(cls: Any, x: Any, **statics: Any) -> Any:
        groups = tuple(1 if c == "u" else statics[f"g{i}"] if c in "gp" else 0 for i, c in enumerate(word))
        format, dtype = statics["scheme"], statics["dtype"]
        parts = encode(format, x, groups, Choice(zero_point=extra == "z"))
        return build(format, groups, x.shape, parts, dtype)

    names = ["cls", "x", "scheme", "dtype", *(s for s in sizes if s[0] == "g")]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    from_dense.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return classmethod(from_dense)


def __getattr__(name: str) -> Any:
    """The classes of the rest by name, as pickle asks for them."""
    if name.startswith("Q_"):
        word = name[2:].rstrip("zm")
        return kind(word, name[2 + len(word) :])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _dense(q: Any) -> Any:
    ty = q._type
    rows = numbers(q, accumulated(q.dtype))
    return layout.merge(rows, ty.groups, ty.padding).astype(q.dtype)


def all_groups(ty: QuantizedType) -> Groups:
    """The group of each axis, batch axes too: a stack is a value of more axes."""
    return (1,) * ty.n_batch + ty.groups


def row_group(groups: Groups) -> int:
    """The group of the last axis along which values share a scale, 0 for the whole of it or if there is none."""
    inner = layout.inner_axes(groups)
    return groups[inner[-1]] if inner else 0


def codes_of(q: Any) -> Any:
    """The codes, unpacked: rows, without what fills bytes at the end of a group."""
    ty = q._type
    codes = packing.unpack(ty.of_format, q.qvalue)
    group = row_group(ty.groups)
    return codes[..., :group] if group and codes.shape[-1] != group else codes


def scale_of(q: Any) -> Any:
    """The scales as an array, as they are held, with axes for those of a row."""
    return _over_rows(q, _scale(q))


def _scale(q: Any) -> Any:
    return dense(q.scale) if isinstance(q._type.leaves[1], ValueType) else q.scale


def _over_rows(q: Any, s: Any) -> Any:
    return jnp.expand_dims(s, tuple(range(s.ndim, s.ndim + len(layout.inner_axes(q._type.groups)))))


def numbers(q: Any, dtype: Any) -> Any:
    """What the rows stand for."""
    zero, offset = getattr(q, "zero_point", None), getattr(q, "offset", None)
    return decode(q._type.of_format, codes_of(q), _scale(q), zero, offset, dtype)


def decode(format: Format, codes: Any, scale: Any, zero_point: Any, offset: Any, dtype: Any) -> Any:
    """What rows of codes, unpacked, stand for; scales, zero points and offsets have an entry for each row."""
    over = lambda s: jnp.expand_dims(s, tuple(range(s.ndim, codes.ndim)))
    if zero_point is not None:
        codes = codes.astype(jnp.int32) - over(zero_point).astype(jnp.int32)
        return rounding.scaled(format.scale.dtype, codes.astype(dtype), over(scale))
    rows = rounding.scaled(format.scale.dtype, rounding.number(format, codes, dtype), over(scale))
    if offset is not None:  # a product that is summed would be rounded once, under jit only
        rows = jax.lax.optimization_barrier(rows) + over(offset).astype(dtype)
    return rows


def in_units(q: Any) -> Any:
    """For each entry of what a value stands for, the scale of its code."""
    ty = q._type
    ones = jnp.ones(codes_of(q).shape, jnp.float32)
    rows = rounding.scaled(ty.of_format.scale.dtype, ones, scale_of(q))
    return layout.merge(rows, all_groups(ty), (0,) * ty.n_batch + ty.padding)


def limits_of(q: Any) -> tuple[Any, Any]:
    """For each entry of what a value stands for, the least and the largest number of its codes."""
    ty, f = q._type, q._type.of_format
    ones, missing = jnp.ones(codes_of(q).shape, jnp.float32), (0,) * ty.n_batch + ty.padding
    low, high = f.codes.least, f.codes.largest
    if ty.extra == "z":
        z = _over_rows(q, q.zero_point).astype(jnp.float32)
        ends: tuple[Any, Any] = (ones * (f.codes.low - z), ones * (high - z))
    else:
        ends = (ones * np.float32(low), ones * np.float32(high))
    rows = (rounding.scaled(f.scale.dtype, e, scale_of(q)) for e in ends)
    ends = tuple(layout.merge(r, all_groups(ty), missing) for r in rows)
    return jnp.minimum(*ends), jnp.maximum(*ends)  # a scale may be negative


# --- making values ---------------------------------------------------------------------------------------------------


def build(format: Format, groups: Groups, shape: tuple[int, ...], parts: Parts, dtype: Any) -> Any:
    """The value of these parts, which stands for an array of this shape; its class follows from the layout."""
    n = next((i for i, g in enumerate(groups) if g != 1), len(groups))
    if format.scale.of is not None:  # the axes along which scales share one of the second level are no batch axes
        n = min(n, next((i for i, g in enumerate(parts.scale.scale_groups) if g != 1), n))
    own, missing = groups[n:], layout.pads(shape, groups)[n:]
    if format == INT8 and parts.zero_point is None and parts.scale.dtype == jnp.float32 and own in ((0,), (0, 1)):
        return (QArray if own == (0,) else QColumns)(parts.qvalue, parts.scale, dtype=dtype)
    inner = layout.inner_axes(own)
    filled = -shape[n + inner[-1]] % format.per if inner and own[inner[-1]] == 0 else 0
    word, sizes = "", {}
    for i, (g, p) in enumerate(zip(own, missing, strict=True)):
        packed = format.bits < 8 and i == inner[-1]
        word += "u" if g == 1 else ("gp"[p > 0] if g else "w" if not packed else "kq"[filled > 0])
        sizes |= {f"g{i}": g} if g > 1 else {}
        sizes |= {f"p{i}": p or filled} if word[-1] in "pq" else {}
    extra = "z" if parts.zero_point is not None else "m" if parts.offset is not None else ""
    scale = parts.scale
    if isinstance(scale, Parts):
        outer = tuple(shape[a] if g == 1 else -(-shape[a] // g) for a, g in enumerate(groups) if g != 0)
        of: Any = format.scale.of
        scale = build(of, scale.scale_groups, outer, scale, jnp.float32)
    more = [x for x in (parts.zero_point, parts.offset) if x is not None]
    return kind(word, extra)(parts.qvalue, scale, *more, dtype=dtype, scheme=format, bits=format.bits, **sizes)
