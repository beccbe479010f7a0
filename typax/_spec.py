"""How values are mapped and partitioned, component by component.

    jax.vmap(f, in_axes=Axes(None, 0))              the first component is shared, the second mapped along its axis 0
    jax.shard_map(f, in_specs=QArray.P("i"), ...)   batch axes by position; named axes by name: QArray.P(None, n="i")

JAX asks for a partition spec before it sees a type, so it is made from the class: one ``jax.P`` for each component, by the
one axis rule (``n//64`` is partitioned as ``n``, ``a*b`` as ``a``).  It knows the specs of its tangents and cotangents.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from typax import _jax


class Axes(_jax.MappingSpec):
    """A mapping spec with one entry for each component: ``typax.Axes(None, 0)``.

    Where all components are mapped alike it is that one entry: ``typax.Axes(0, 0)`` is ``0``. `entries` are as given.
    """

    entries: tuple[Any, ...]

    def __new__(cls, *entries: Any) -> Any:
        first = entries[0] if entries else Axes
        if not isinstance(first, Axes) and all(type(e) is type(first) and e == first for e in entries):
            return first if entries else None
        self = super().__new__(cls)
        self.entries = entries
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return f"Axes({', '.join(map(repr, self.entries))})"


@dataclass(frozen=True)
class OnMesh:
    """A partition spec of a class on a mesh, as ``jax.NamedSharding`` is one of arrays; made by ``Cls.P(...).on(mesh)``."""

    spec: Any
    mesh: Any


def on_mesh(spec: Any, mesh: Any) -> Any:
    """A spec on a mesh, if one is given."""
    if mesh is None or spec is None:
        return spec
    return jax.NamedSharding(mesh, spec) if isinstance(spec, jax.P) else OnMesh(spec, mesh)


class Pspec(_jax.HiPspec):
    """A partition spec for the values of one class, made by ``Cls.P(...)``: ``leaves`` has a spec for each component.

    `to_lo` gives JAX a ``jax.P`` for each array, `to_tangent_spec` and `to_ct_spec` the specs of tangents and cotangents.
    With `by_user`, operands must be partitioned so already; `of_stack`: `jax.vmap` has added an axis to it.
    """

    def __init__(
        self,
        decl: Any,
        leaves: Sequence[Any],
        shown: str,
        tangents: Callable[["Pspec"], tuple[Any, Any]],
        dense: Any = None,
        named: Mapping[str, Any] | None = None,
    ) -> None:
        # `tangents` gives the specs of a tangent and of a cotangent; `dense` is that of what a value stands for
        self.decl, self.leaves, self.shown, self.tangents = decl, tuple(leaves), shown, tangents
        self.dense, self.named = dense, dict(named or {})
        self.by_user = False  # whether it was written by hand, so that operands must match it
        self.of_stack = False  # whether `jax.vmap` has added an axis to it
        self._as_it_is = False  # whether it is of a residual, whose parts only the same devices see again

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pspec) and self.decl is other.decl and self.leaves == other.leaves

    def __hash__(self) -> int:
        return hash((self.decl, self.leaves))

    def __repr__(self) -> str:
        return self.shown

    def on(self, mesh: Any) -> OnMesh:
        """This spec on a mesh, for `typax.device_put` and `typax.reshard` where none is in force."""
        return OnMesh(self, mesh)

    def to_lo(self) -> tuple[Any, ...]:
        return tuple(lo for s in self.leaves for lo in s.to_lo())

    def to_tangent_spec(self) -> Any:
        return self.tangents(self)[0]

    def to_ct_spec(self) -> Any:
        return self.tangents(self)[1]

    @property
    def partitions(self) -> Any:
        """Asked for by an eager ``shard_map``, which does not take hi values: raises a TypeError that says so."""
        raise TypeError(f"{self}: a hi value crosses a shard_map under jax.jit only; wrap the mapped function in jax.jit")

    @property
    def mesh_axes(self) -> frozenset[Any]:
        """The mesh axes that partition any component."""
        parts = [p for s in self.leaves for p in (s.mesh_axes if isinstance(s, Pspec) else [*tuple(s)])]
        return frozenset(n for p in parts if p is not None for n in (p if isinstance(p, tuple) else (p,)))

    def batched(self, dim: Any, name: Any) -> "Pspec":
        """The spec of a stack: with an axis at ``dim`` (an int, or `Axes`), partitioned by ``name``."""
        if isinstance(dim, Axes) and len(dim.entries) != len(self.leaves):
            raise TypeError(f"{dim!r} has {len(dim.entries)} entries, but {self} has {len(self.leaves)} components")
        dims = dim.entries if isinstance(dim, Axes) else [dim] * len(self.leaves)
        first = next((d for d in dims if d is not None), None)
        spec = Pspec(
            self.decl,
            [_with_axis(s, d, name) for s, d in zip(self.leaves, dims, strict=True)],
            f"{self.shown} with axis {dim} by {name!r}",
            lambda _: tuple(_with_axis(t, dim if isinstance(t, Pspec) else first, name) for t in self.tangents(self)),
            _with_axis(self.dense, first, name),
            self.named,
        )
        spec.by_user, spec.of_stack = self.by_user, True
        return spec


def _with_axis(spec: Any, dim: Any, name: Any) -> Any:
    if spec is None or dim is None:
        return spec
    if isinstance(spec, Pspec):
        return spec.batched(dim, name)
    parts = (*spec, *(None,) * (dim - len(spec)))
    return jax.P(*parts[:dim], name, *parts[dim:])


def by_policy(spec: Pspec) -> tuple[Any, Any]:
    policy = spec.decl.tangent
    return policy.tangent_spec(spec), policy.cotangent_spec(spec)


def of_class(decl: Any, batch: tuple[Any, ...], named: dict[str, Any]) -> Pspec:
    """The partition spec of a class: of its batch axes by position, of its named axes by name."""
    who = f"{decl.cls.__name__}.P"
    shown = f"{who}({', '.join([*map(repr, batch), *(f'{n}={v!r}' for n, v in named.items())])})"
    if all(c.axes is None for c in decl.components):
        return Pspec(decl, _each_component(decl, batch, named, who), shown, by_policy)
    own, axes = {c.name for c in decl.components}, decl.axis_names
    if unknown := named.keys() - own - axes:
        raise TypeError(f"{who}: no axis is named {', '.join(sorted(unknown))}; the axes are {', '.join(sorted(axes))}")
    cut = {named[n] for n in named.keys() & decl.shown_names} | {None}
    if hidden := [n for n in named.keys() - own - decl.shown_names if named[n] not in cut]:
        raise TypeError(
            f"{who}: no component shows the axis {hidden[0]}; partition that in which it is packed as well, likewise"
        )
    for part in (*batch, *(named[n] for n in named.keys() - own)):
        _check_part(who, part)
    leaves: list[Any] = []
    # without declared batch axes, a stack has them in every component
    for c in decl.components:
        if c.name in named and c.name not in axes:
            leaves += _as_specs(who, c.name, named[c.name])
        elif c.axes is None:
            raise TypeError(f"{who}: component {c.name} has no axes of its own; give its spec, {c.name}=...")
        else:
            parts = (
                *(batch if c.axes.variadic or not decl.stackable else ()),
                *(part_of(d, named, who) for d in c.axes.dims),
            )
            leaves.append(of_array(c.patterns[0].cls, parts))
    dense = None
    if decl.stands_for is not None:
        lead = batch if decl.stands_for.axes.variadic or not decl.stackable else ()
        dense = jax.P(*lead, *(part_of(d, named, who) for d in decl.stands_for.axes.dims))
    for spec in (dense, *leaves):
        if isinstance(spec, jax.P) and (name := twice(tuple(spec))):
            raise TypeError(f"{shown} partitions two axes of one array by the mesh axis {name!r}")
    return Pspec(decl, leaves, shown, by_policy, dense, {n: v for n, v in named.items() if n in axes and v is not None})


def of_array(cls: Any, parts: Sequence[Any]) -> Any:
    """The spec of a component of class ``cls`` that stands for an array partitioned by ``parts``."""
    decl = getattr(cls, "_declaration", None)
    if decl is None or decl.stands_for is None:
        return jax.P(*parts)
    dims = decl.stands_for.axes.dims
    lead = len(parts) - len(dims)
    named = {d.leading: p for d, p in zip(dims, parts[lead:], strict=True) if p is not None}
    return of_class(decl, tuple(parts[:lead]), named)


def part_of(dim: Any, named: Mapping[str, Any], who: str) -> Any:
    """The partition of an axis, by those of the names in it."""
    given = [n for n in dim.names if named.get(n) is not None]
    if not given:
        return None
    if given != [dim.leading] or any(s in dim.text for s in "+-"):
        raise TypeError(f"{who}: axis {dim.text!r} cannot be partitioned by {', '.join(sorted(given))}")
    return named[given[0]]


def _each_component(decl: Any, specs: tuple[Any, ...], named: dict[str, Any], who: str) -> list[Any]:
    """For a record whose components have no declared axes: one spec for each."""
    names = [c.name for c in decl.components]
    if len(names) == 1 and not named:
        return _as_specs(who, names[0], specs)
    if len(specs) > len(names) or not named.keys() <= set(names[len(specs) :]):
        raise TypeError(f"{who} takes one spec for each component: {', '.join(names)}")
    given = dict(zip(names, specs, strict=False)) | named
    if missing := [n for n in names if n not in given]:
        raise TypeError(f"{who}: no spec for {', '.join(missing)}")
    return [s for n in names for s in _as_specs(who, n, given[n])]


def _as_specs(who: str, name: str, given: Any) -> list[Any]:
    many = list(given) if isinstance(given, tuple) and not isinstance(given, jax.P) else [given]
    for s in many:
        if not isinstance(s, jax.P | _jax.HiPspec):
            raise TypeError(f"{who}: {name} takes a partition spec (jax.P, or P of a class) for each value, got {s!r}")
    return many


def twice(parts: Iterable[Any]) -> Any:
    """A mesh axis that partitions two axes, or ``None``."""
    names = [n for p in parts if p is not None for n in (p if isinstance(p, tuple) else (p,))]
    return next((n for n in names if names.count(n) > 1), None)


def _check_part(who: str, part: Any) -> None:
    names = part if isinstance(part, tuple) else (part,)
    if not all(n is None or isinstance(n, str) for n in names):
        raise TypeError(
            f"{who}: an axis is partitioned by the name of a mesh axis, by a tuple of names, or None, not {part!r}"
        )
