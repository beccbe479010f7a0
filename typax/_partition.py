"""How a type is cut into shards and put together again: what ``shard_map`` and ``reshard`` ask of it.

Each component is cut by its own spec.  An axis that no component shows is a static, which changes with the shards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from typax import _jax
from typax._spec import Pspec, by_policy, of_array


def _names(spec: Any) -> list[str]:
    return [n for part in spec for n in (part if isinstance(part, tuple) else (part,)) if isinstance(n, str)]


class Partitioned:
    """A part of `ValueType`."""

    decl: Any
    leaves: tuple[Any, ...]
    statics: tuple[Any, ...]
    masks: tuple[tuple[bool, ...], ...]
    fields: Any
    n_batch: Any
    ndim: Any
    with_leaves: Any
    to_tangent_aval: Any
    to_ct_aval: Any

    def shard(self, mesh: Any, manual_axes: Any, check_vma: bool, spec: Any) -> Any:
        """The type that one device sees in a ``shard_map``."""
        pairs = list(zip(self.leaves, self._partition_specs(spec, mesh), strict=True))
        if spec.by_user and any(_jax.partitioned_otherwise(a, s) for a, s in pairs if not _jax.is_hi(a)):
            raise TypeError(
                f"{spec!r} does not match the sharding of its operand, {self}; move it first: typax.reshard(v, spec)"
            )
        leaves = [a.shard(mesh, manual_axes, check_vma, s) for a, s in pairs]
        return self._resized(leaves, spec, lambda size, shards: size // shards, mesh)

    def unshard(self, mesh: Any, check_vma: bool, spec: Any) -> Any:
        """The type of the whole, from what one device sees."""
        pairs = list(zip(self.leaves, self._partition_specs(spec, mesh), strict=True))
        if spec.by_user and check_vma:
            lost = {n for a, s in pairs if not _jax.is_hi(a) for n in _jax.varying(a) - set(_names(s))}
            if lost:
                raise TypeError(
                    f"{spec!r} leaves out the mesh axis {', '.join(sorted(lost))}, but {self} may differ along it: "
                    "partition an axis by it, or make the shards equal, for instance by a sum over it"
                )
        return self._resized(
            [a.unshard(mesh, check_vma, s) for a, s in pairs], spec, lambda size, shards: size * shards, mesh
        )

    def nospec(self, mesh: Any, check_vma: bool, all_names: Any) -> Any:
        """The partition spec of a residual of this type."""

        def tangents(_: Any) -> tuple[Any, Any]:
            return tuple(t.nospec(mesh, check_vma, all_names) for t in (self.to_tangent_aval(), self.to_ct_aval()))

        spec = Pspec(self.decl, [a.nospec(mesh, check_vma, all_names) for a in self.leaves], f"{self} as it is", tangents)
        spec._as_it_is = True
        return spec

    def reshard(self, sharding: Any) -> Any:
        """The type partitioned otherwise: by a spec of the class, or a sharding of what it stands for."""
        spec, mesh = self.partition_spec(sharding)
        pairs = zip(self.leaves, spec.leaves, strict=True)
        leaves = [a.reshard(s) if _jax.is_hi(a) else _jax.repartitioned(a, s, mesh) for a, s in pairs]
        return self.with_leaves(leaves)

    def partition_spec(self, sharding: Any) -> tuple[Pspec, Any]:
        """A spec of the class and a mesh (``None``: the one in force), from either or from a spec of what it stands for:
        of a record, what each component stands for."""
        mesh = getattr(sharding, "mesh", None)
        given = getattr(sharding, "spec", sharding)
        if isinstance(given, Pspec):
            self._partition_specs(given, mesh if mesh is not None else jax.sharding.get_abstract_mesh())
            return given, mesh
        if isinstance(given, jax.P) and self.decl.is_record:  # for each component, as for the leaves of a pytree
            leaves = [given if not getattr(a, "is_declared", False) else a.partition_spec(given)[0] for a in self.leaves]
            return Pspec(self.decl, leaves, f"{given!r} for each component", by_policy), mesh
        if not isinstance(given, jax.P):
            raise TypeError(f"{self} is partitioned by {self.decl.cls.__name__}.P(...), not by {sharding!r}")
        parts = (*given, *(None,) * (self.ndim - len(given)))
        full = of_array(self.decl.cls, parts)
        owns = [_of_own_class(a, s) for a, s in zip(self.leaves, full.leaves, strict=True)]
        full = Pspec(self.decl, owns, full.shown, full.tangents, full.dense, full.named)
        if not self.n_batch:
            return full, mesh
        leaves = []
        for (c, a), own, m in zip(self.fields, full.leaves, self.masks, strict=True):
            nested = own.dense if isinstance(own, Pspec) else None
            array = own if nested is None else nested
            if not isinstance(array, jax.P):
                leaves.append(own)
                continue
            rest = () if c.axes is None else tuple(array)[len(array) - c.axes.rank :]
            part = jax.P(*(p for p, k in zip(parts, m, strict=False) if k), *rest)
            leaves.append(part if nested is None else a.partition_spec(part)[0])
        return Pspec(self.decl, leaves, full.shown, full.tangents, full.dense, full.named), mesh

    def _partition_specs(self, spec: Any, mesh: Any) -> tuple[Any, ...]:
        cls = self.decl.cls
        if not isinstance(spec, Pspec) or cls not in (spec.decl.cls, getattr(spec.decl.cls, "_tangent_class", None)):
            raise TypeError(f"a value of type {self} is partitioned by {cls.__name__}.P(...), not by {spec!r}")
        if len(spec.leaves) != len(self.leaves):
            raise TypeError(f"{spec!r} has {len(spec.leaves)} entries, but {self} has {len(self.leaves)} components")
        for a, s in zip(self.leaves, spec.leaves, strict=True):
            if not isinstance(s, jax.P):
                continue
            if unknown := [n for n in _names(s) if n not in mesh.shape]:
                known = ", ".join(mesh.shape) or "none"
                raise TypeError(f"{spec!r}: the mesh has no axis {unknown[0]}; it has {known}")
            if spec.by_user and not spec.of_stack and spec.named and not _jax.is_hi(a) and len(s) != a.ndim:
                example = f"{self.decl.cls.__name__}.P({'None, ' * self.n_batch}{'=..., '.join(spec.named)}=...)"
                raise TypeError(
                    f"{spec!r} does not fit {self}: with named axes, each batch axis is given by position, None for one "
                    f"that is whole ({example})"
                )
        return spec.leaves

    def _resized(self, leaves: Sequence[Any], spec: Pspec, resize: Callable[[int, int], int], mesh: Any) -> Any:
        """An axis that no component shows is a static: it changes with the shards."""
        sizes = {}
        for s, value in zip(self.decl.statics, self.statics, strict=True):
            part = spec.named.get(s.name)
            if part is not None:
                sizes[s.name] = resize(
                    value, math.prod(mesh.shape[n] for n in (part if isinstance(part, tuple) else (part,)))
                )
        whole = self.with_leaves(leaves).with_statics(**sizes)
        return whole if spec._as_it_is else whole.check()  # what is put side by side as it is need not be one value


def _of_own_class(ty: Any, spec: Any) -> Any:
    """The spec of a component that is a value of another class than its annotation names, such as one below it."""
    if isinstance(spec, jax.P) and getattr(ty, "is_declared", False):  # of any class
        return ty.partition_spec(spec)[0]
    if isinstance(spec, Pspec) and getattr(ty, "is_declared", False) and ty.decl.cls is not spec.decl.cls:
        return spec if spec.dense is None else ty.partition_spec(spec.dense)[0]
    return spec
