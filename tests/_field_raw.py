"""Hi types by hand of the kinds that people write: a packed graph, a picture of pictures, a quantity, rows of a file."""

from dataclasses import dataclass
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from _raw import Typed

from gallery.units import Unit
from typax.hijax import (
    HiType,
    MappingSpec,
    ShapedArray,
    Zero,
    is_zero,
    linearize_from_jvp,
    register_hitype,
    vjp_from_jvp,
)


@dataclass(frozen=True)
class First(MappingSpec):
    """Every array of a value is mapped along its first axis."""


class Led(HiType):
    """A type whose arrays all have the same leading axes in front: ``lead`` are their sizes."""

    def with_lead(self, lead):
        raise NotImplementedError

    def dec_rank(self, size, spec):
        assert spec == First() and self.lead[0] == size
        return self.with_lead(self.lead[1:])

    def inc_rank(self, size, spec):
        assert spec == First()
        return self.with_lead((size, *self.lead))

    def leading_axis_spec(self):
        return First()


def array(shape, dtype="float32"):
    return ShapedArray(tuple(shape), jnp.dtype(dtype))


def leading(dims):
    """The mapped axis of an array that is made of these operands: none where none of them is mapped."""
    return None if all(d is None for d in dims) else 0


# --- a packed graph, which has no tangent: edges ----------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """Edges of a graph of ``nodes`` nodes, from ``source[e]`` to ``target[e]``."""

    source: jax.Array
    target: jax.Array
    nodes: int

    def dense(self):
        return adjacency(self)


@dataclass(frozen=True)
class Still:
    """No movement."""


@dataclass(frozen=True)
class StillTy(HiType):
    """The type of the only tangent of a graph, which has no arrays."""

    def lo_ty(self):
        return []

    def lower_val(self, v):
        return []

    def raise_val(self):
        return Still()

    def to_tangent_aval(self):
        return self

    def vspace_zero(self):
        return Still()

    def vspace_add(self, x, y):
        return x

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return "still"

    dec_rank = inc_rank = lambda self, size, spec: self
    __repr__ = str_short


register_hitype(Still, lambda v: StillTy())


@dataclass(frozen=True)
class GraphTy(Led):
    nodes: int
    edges: int
    lead: tuple[int, ...] = ()

    def with_lead(self, lead):
        return GraphTy(self.nodes, self.edges, lead)

    def lo_ty(self):
        return [array((*self.lead, self.edges), "int32")] * 2

    def lower_val(self, v):
        return [v.source, v.target]

    def raise_val(self, source, target):
        return Graph(source, target, self.nodes)

    def to_tangent_aval(self):
        return StillTy()

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"graph[{','.join(map(str, (*self.lead, self.nodes)))};{self.edges}]"

    __repr__ = str_short


register_hitype(Graph, lambda v: GraphTy(v.nodes, v.source.shape[-1], v.source.shape[:-1]))


class Ends(Typed):
    """The arrays of a graph."""

    def result(self, g):
        return tuple(g.lo_ty())

    def expand(self, g):
        return g.source, g.target

    def vjp_fwd(self, nzs_in, g):
        return self(g), None

    def vjp_bwd_retval(self, _, ct):
        return (Zero(StillTy()),)

    def batch(self, axis_data, args, dims):
        return self.on(*args), (leading(dims),) * 2


class Spread(Typed):
    """``y[target] += x[source]``: the product of the adjacency matrix of a graph and a vector."""

    def result(self, g, x):
        if not isinstance(g, GraphTy) or g.lead or x.shape != (g.nodes,):
            raise TypeError(f"cannot spread {x} over {g}")
        return array(x.shape)

    def expand(self, g, x):
        return jnp.zeros_like(x).at[g.target].add(x[g.source])

    def vjp_fwd(self, nzs_in, g, x):
        return self(g, x), Ends.on(g)

    def vjp_bwd_retval(self, ends, ct):
        source, target = ends
        return Zero(StillTy()), jnp.zeros_like(ct).at[source].add(ct[target])

    def batch(self, axis_data, args, dims):
        g, x = args
        if leading(dims) is None:
            return self.on(g, x), None
        each = lambda s, t, x: jnp.zeros_like(x).at[t].add(x[s])
        return jax.vmap(each, (*(None if dims[0] is None else 0,) * 2, dims[1]))(*Ends.on(g), x), 0


def adjacency(g):
    """The adjacency matrix, ``[target, source]``."""
    source, target = Ends.on(g)
    nodes = g.nodes if isinstance(g, Graph) else jax.typeof(g).nodes
    place = lambda s, t: jnp.zeros((nodes, nodes)).at[t, s].add(1.0)
    for _ in source.shape[1:]:
        place = jax.vmap(place)
    return place(source, target)


spread = Spread.on


# --- a picture, made of pictures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """``disc(centre, radius)``, ``moved(offset, picture)`` or ``both(picture, picture)``."""

    tag: str
    parts: tuple


@dataclass(frozen=True)
class Each(MappingSpec):
    """A spec for each part."""

    of: tuple


@dataclass(frozen=True)
class PictureTy(HiType):
    """The tree of tags is the type; the numbers in it are the arrays."""

    tag: str
    parts: tuple

    def lo_ty(self):
        return [lo for t in self.parts for lo in t.lo_ty()]

    def lower_val(self, v):
        return [lo for t, x in zip(self.parts, v.parts, strict=True) for lo in t.lower_val(x)]

    def raise_val(self, *los):
        it = iter(los)
        return Picture(self.tag, tuple(t.raise_val(*islice(it, len(t.lo_ty()))) for t in self.parts))

    def each(self, f, *more):
        return PictureTy(self.tag, tuple(f(t, *m) for t, *m in zip(self.parts, *more, strict=True)))

    def to_tangent_aval(self):
        return self.each(lambda t: t.to_tangent_aval())

    def vspace_zero(self):
        return make(self.tag, *(t.vspace_zero() if isinstance(t, PictureTy) else jnp.zeros(t.shape) for t in self.parts))

    def vspace_add(self, x, y):
        return make(self.tag, *(t.vspace_add(a, b) for t, a, b in zip(self.parts, parts(x), parts(y), strict=True)))

    def dec_rank(self, size, spec):
        return self.each(lambda t, s: t if s is None else t.dec_rank(size, s), spec.of)

    def inc_rank(self, size, spec):
        return self.each(lambda t, s: t if s is None else t.inc_rank(size, s), spec.of)

    def leading_axis_spec(self):
        return Each(tuple(t.leading_axis_spec() for t in self.parts))

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"{self.tag}({','.join(map(str, self.parts))})"

    __repr__ = str_short


register_hitype(Picture, lambda v: PictureTy(v.tag, tuple(map(jax.typeof, v.parts))))


def known(xs):
    return [jnp.zeros(x.aval.shape) if is_zero(x) and not isinstance(x.aval, PictureTy) else
            x.aval.vspace_zero() if is_zero(x) else x for x in xs]  # fmt: skip


class Make(Typed):
    def result(self, *parts, tag):
        return PictureTy(tag, parts)

    def expand(self, *parts):
        return Picture(self.tag, parts)

    def jvp(self, primals, tangents):
        return self(*primals), self(*known(tangents))

    def transpose(self, ct, *accums):
        for a, p in zip(accums, parts(ct), strict=True):
            a.accum(p)

    def batch(self, axis_data, args, dims):
        return self.on(*args, tag=self.tag), None if leading(dims) is None else Each(tuple(dims))

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_jvp


class Parts(Typed):
    def result(self, v):
        return tuple(v.parts)

    def expand(self, v):
        return v.parts

    def jvp(self, primals, tangents):
        return self(*primals), self(*known(tangents))

    def transpose(self, ct, v):
        v.accum(make(self.in_avals[0].tag, *known(ct)))

    def batch(self, axis_data, args, dims):
        return self.on(*args), tuple(dims[0].of) if dims[0] else (None,) * len(self.out_aval)

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_jvp


def make(tag, *parts):
    return Make.on(*parts, tag=tag)


parts = Parts.on


def distance(picture, at):
    """How far the point ``at`` is from the picture; negative inside."""
    a, b = parts(picture)
    match jax.typeof(picture).tag:
        case "disc":
            return jnp.sqrt(jnp.sum((at - a) ** 2)) - b
        case "moved":
            return distance(b, at - a)
    return jnp.minimum(distance(a, at), distance(b, at))


# --- a quantity: its cotangents have the inverse unit -----------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    number: jax.Array
    unit: Unit

    def dense(self):
        return Number.on(self)


@dataclass(frozen=True)
class MeasuredTy(Led):
    lead: tuple[int, ...]
    unit: Unit

    def with_lead(self, lead):
        return MeasuredTy(lead, self.unit)

    def lo_ty(self):
        return [array(self.lead)]

    def lower_val(self, v):
        return [v.number]

    def raise_val(self, number):
        return Measured(number, self.unit)

    def to_tangent_aval(self):
        return self

    def to_ct_aval(self):
        return MeasuredTy(self.lead, Unit(-p for p in self.unit))

    def vspace_zero(self):
        return measure(jnp.zeros(self.lead), self.unit)

    def vspace_add(self, x, y):
        return measure(Number.on(x) + Number.on(y), self.unit)

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"measured[{','.join(map(str, self.lead))}]({self.unit})"

    __repr__ = str_short


register_hitype(Measured, lambda v: MeasuredTy(v.number.shape, v.unit))


class Number(Typed):
    def result(self, q):
        return array(q.lead)

    def expand(self, q):
        return q.number

    def vjp_fwd(self, nzs_in, q):
        return self(q), None

    def vjp_bwd_retval(self, _, ct):
        return (measure(ct, self.in_avals[0].to_ct_aval().unit),)

    def batch(self, axis_data, args, dims):
        return self.on(*args), leading(dims)


class Measure(Typed):
    def result(self, x, *, unit):
        return MeasuredTy(x.shape, unit)

    def expand(self, x):
        return Measured(x, self.unit)

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, _, ct):
        return (Number.on(ct),)

    def batch(self, axis_data, args, dims):
        (x,), (d,) = args, dims
        return (measure(x, self.unit), None) if d is None else (measure(jnp.moveaxis(x, d, 0), self.unit), First())


class Times(Typed):
    def result(self, a, b):
        if a.lead != b.lead:
            raise TypeError(f"no product of {a} and {b}")
        return MeasuredTy(a.lead, Unit(p + q for p, q in zip(a.unit, b.unit, strict=True)))

    def expand(self, a, b):
        return Measured(a.number * b.number, self.out_aval.unit)

    def vjp_fwd(self, nzs_in, a, b):
        return self(a, b), (a, b)

    def vjp_bwd_retval(self, operands, ct):  # in 1/(ab); times b in 1/a
        a, b = operands
        return times(ct, b), times(ct, a)

    def batch(self, axis_data, args, dims):
        if leading(dims) is None:
            return times(*args), None
        size = axis_data.size
        a, b = (x if d is not None else measure(jnp.stack([Number.on(x)] * size), jax.typeof(x).unit)
                for x, d in zip(args, dims, strict=True))  # fmt: skip
        return times(a, b), First()


def measure(x, unit):
    return Measure.on(x, unit=unit)


times = Times.on


# --- rows of a file, which are read when they are needed --------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Rows ``row`` of the matrix in ``file``; the value holds the numbers of the rows alone."""

    row: jax.Array
    file: str
    width: int

    def dense(self):
        return read(self)


@dataclass(frozen=True)
class StoredTy(Led):
    file: str
    width: int
    lead: tuple[int, ...] = ()

    def with_lead(self, lead):
        return StoredTy(self.file, self.width, lead)

    def lo_ty(self):
        return [array(self.lead, "int32")]

    def lower_val(self, v):
        return [v.row]

    def raise_val(self, row):
        return Stored(row, self.file, self.width)

    def to_tangent_aval(self):
        return array((*self.lead, self.width))

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return f"stored[{','.join(map(str, (*self.lead, self.width)))}]({self.file})"

    __repr__ = str_short


register_hitype(Stored, lambda v: StoredTy(v.file, v.width, v.row.shape))


class Read(Typed):
    def result(self, v):
        return array((*v.lead, v.width))

    def expand(self, v):
        fetch = lambda row: np.load(v.file)[row]
        return jax.pure_callback(fetch, self.out_aval, v.row, vmap_method="expand_dims")

    def jvp(self, primals, tangents):
        (v,), (dv,) = primals, tangents
        return self(v), dv

    def batch(self, axis_data, args, dims):
        return self.on(*args), leading(dims)

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_jvp


read = Read.on
