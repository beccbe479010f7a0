"""The one hi type behind every declared class.

    class QArray(Value, name="q8"):            QArray(int8[2,3], float32[2])  is of type  q8[2,3]
        qvalue: Int8[Array, "*batch n"]
        scale: Float32[Array, "*batch"]        components: the leaves (int8[2,3], float32[2])
        def dense(self) -> ...                 stands for: float32[2,3]

A type is its declaration, the types of its component leaves, and its statics.  Everything else (what it stands for,
its batch axes, how it prints, how it is mapped) follows from these by the one axis rule of `_axes`.

Batch axes lead in every component.  A component may be shared along a batch axis (an unmapped scale): `masks` says,
for each leaf and each batch axis, whether the leaf has that axis.
"""

import math
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax

from typax import _axes, _jax, _repairs
from typax._axes import Axis, Bindings, Pattern, static_key
from typax._byhand import axes_type, has_axes, is_raw, mapped_axes, own_spec
from typax._declaration import Component, Declaration
from typax._partition import Partitioned
from typax._spec import Axes, twice


class ValueType(Partitioned, _jax.HiType):
    """The type of a value of a declared class, as ``jax.typeof(value)`` and ``Cls.type(...)`` give it. Hashable.

    It has the `shape`, `ndim`, `size`, `dtype` and `sharding` of what a value stands for, `dense_type`; `nbytes` and `mat`
    (which JAX asks for) are of the components. `decl` is what the class statement says; `leaves` are the types of the
    components and `tree` is how these nest; `statics` are the parameters. Of the `n_batch` leading axes, `batch`, `masks`
    says which leaf has which. As types of arrays do, it has `weak_type` and `is_fully_addressable`.
    """

    is_declared = True
    """It was made by a class statement."""
    pack: Callable[..., Any]  # set by _prim: how components become a value while a program is traced

    def __init__(
        self,
        decl: Declaration,
        leaves: Sequence[Any],
        tree: Any,
        statics: tuple[Any, ...],
        masks: tuple[tuple[bool, ...], ...] | None = None,
    ) -> None:
        self.decl = decl
        self.leaves = tuple(a.strip_weak_type() for a in leaves)
        self.tree = tree
        self.statics = statics
        self.masks = masks if masks is not None else self._default_masks()
        self._statics_key = static_key(statics)
        self._hash = hash((decl, self.leaves, tree, self._statics_key, self.masks))

    # --- identity ---------------------------------------------------------------------------------------------

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._hash

    def __eq__(self, other: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self is other or (
            isinstance(other, ValueType)
            and self.decl is other.decl
            and self._hash == other._hash
            and self.leaves == other.leaves
            and self.tree == other.tree
            and self._statics_key == other._statics_key
            and self.masks == other.masks
        )

    def normalize(self) -> "ValueType":
        """As arrays do: a mesh counts only where an axis is sharded on it or varies over it."""
        return self.with_leaves([_forget_mesh(a) for a in self.leaves])

    def with_leaves(self, leaves: Sequence[Any]) -> "ValueType":
        """The same type with components of other types."""
        return type(self)(self.decl, leaves, self.tree, self.statics, self.masks)

    def with_los(self, los: Sequence[Any]) -> "ValueType":
        """The same type over other array types: what tracing an implementation has found out about shardings."""
        return self.with_leaves([with_los(a, own) for a, own in by_type(self.leaves, los)])

    def with_statics(self, **statics: Any) -> "ValueType":
        """The same type with other statics."""
        names = [s.name for s in self.decl.statics]
        if unknown := statics.keys() - set(names):
            raise TypeError(f"{self.decl.cls.__name__} has no static {', '.join(sorted(unknown))}; it has {names}")
        values = tuple(statics.get(n, v) for n, v in zip(names, self.statics, strict=True))
        return type(self)(self.decl, self.leaves, self.tree, values, self.masks)

    def static(self, name: str) -> Any:
        """The value of a static."""
        return self.statics[[s.name for s in self.decl.statics].index(name)]

    # --- lowering ---------------------------------------------------------------------------------------------

    @cached_property
    def _lo_ty(self) -> list[Any]:
        return [lo for leaf in self.leaves for lo in leaf.lo_ty()]

    def lo_ty(self) -> list[Any]:
        return self._lo_ty

    def lower_val(self, value: Any, /) -> list[Any]:
        return [lo for leaf, x in zip(self.leaves, value._leaves, strict=True) for lo in leaf.lower_val(x)]

    def open_val(self, *los: Any) -> Any:
        """A value over these arrays, whatever they are; `raise_val` is for JAX."""
        return self.of_leaves(open_vals(self.leaves, los))

    def raise_val(self, *los: Any) -> Any:
        if any(isinstance(x, _jax.Tracer) for x in los) and not _jax.current_trace().requires_low:
            return ValueType.pack(self, self.open_val(*los)._leaves)
        # JAX raises the stacked results of a scan with the type of one step.
        extra = los[0].ndim - self.lo_ty()[0].ndim if los else 0
        ty = self
        for k in reversed(range(extra)):
            ty = ty.inc_rank(los[0].shape[k], 0)
        return ty.open_val(*los)

    def of_leaves(self, leaves: Sequence[Any]) -> Any:
        """A value of this type with these component leaves, unchecked."""
        value = object.__new__(self.decl.cls)
        value.__dict__["_type"], value.__dict__["_leaves"] = self, tuple(leaves)
        self.finish(value)
        return value

    def finish(self, value: Any) -> None:
        """Give a new value, which has its type and leaves, its other attributes."""
        statics, later = self._made_of
        if statics:
            value.__dict__.update(statics)
        if not later:
            self.fill(value)

    @cached_property
    def _made_of(self) -> tuple[dict[str, Any], bool]:
        """The statics, and whether components may be filled in when they are asked for."""
        statics = dict(zip((s.name for s in self.decl.statics), self.statics, strict=True))
        return statics, not any(hasattr(self.decl.cls, c.name) for c in self.decl.components)

    def fill(self, value: Any) -> None:
        """Give a value its components as attributes: most of those that calls make are passed on, never looked at."""
        value.__dict__.update(zip((c.name for c in self.decl.components), self.tree.unflatten(value._leaves), strict=True))

    # --- axes -------------------------------------------------------------------------------------------------

    @cached_property
    def fields(self) -> list[tuple[Component, Any]]:
        """Each leaf with the component it belongs to."""
        per = self.tree.children()
        names = [c for c, t in zip(self.decl.components, per, strict=True) for _ in range(t.num_leaves)]
        return list(zip(names, self.leaves, strict=True))

    def _default_masks(self) -> tuple[tuple[bool, ...], ...]:
        lead = [_ndim(a) - c.axes.rank for c, a in self.fields if c.axes is not None and c.axes.variadic]
        n = lead[0] if lead else 0
        whole = [c.axes is None or c.axes.variadic is not None for c, _ in self.fields]
        return tuple((w,) * n for w in whole)

    @property
    def n_batch(self) -> int:
        return len(self.masks[0]) if self.masks else 0

    @cached_property
    def batch(self) -> tuple[Axis, ...]:
        """The batch axes, read off the components that have them."""
        out: list[Axis | None] = [None] * self.n_batch
        first: dict[int, Any] = {}
        for (c, leaf), mask in zip(self.fields, self.masks, strict=True):
            axes = _leaf_axes(leaf)
            if axes is None:
                continue
            if len(axes) < sum(mask):
                raise TypeError(f"{self.decl.name}: component {c.name} has type {leaf}, which lacks a batch axis")
            for pos, k in enumerate(k for k, m in enumerate(mask) if m):
                if out[k] is None:
                    out[k], first[k] = axes[pos], (c, leaf)
                elif out[k] != axes[pos]:
                    c0, leaf0 = first[k]
                    raise TypeError(
                        f"{self.decl.cls.__name__}: batch axis {k} is {_axes.show((out[k],))} in {c0.name} ({leaf0}) but "  # type: ignore[arg-type]
                        f"{_axes.show((axes[pos],))} in {c.name} ({leaf})"
                    )
        return tuple(a if a is not None else Axis(1) for a in out)

    @cached_property
    def bindings(self) -> Bindings:
        """The size and partition of every named axis. Raises a TypeError if the components contradict each other."""
        who, env = self.decl.cls.__name__, self.static_bindings
        statics = frozenset(env)
        seen: dict[str, str] = {n: f"the static {n}" for n in env}
        todo = []
        for (c, leaf), mask in zip(self.fields, self.masks, strict=True):
            in_tangents = self.decl.is_record and isinstance(leaf, ValueType) and leaf.decl.is_record
            if c.axes is None or in_tangents:  # a record in place of a component shows no axes but those of a stack
                continue
            lead = sum(mask)
            if _ndim(leaf) != lead + c.axes.rank:
                raise TypeError(
                    f"{who}: component {c.name} has axes {str(c.axes)!r}, which does not fit {leaf} of rank {_ndim(leaf)}"
                )
            for dim, axis in zip(c.axes.dims, (_leaf_axes(leaf) or ())[lead:], strict=True):
                where = f"{c.name} ({leaf})"
                if dim.name is None:
                    todo.append((dim, axis, where))
                elif dim.name not in env:
                    env[dim.name], seen[dim.name] = axis, where
                elif env[dim.name] != axis:
                    raise TypeError(
                        f"{who}: axis {dim.name!r} is {_axes.show((env[dim.name],))} in {seen[dim.name]} but "
                        f"{_axes.show((axis,))} in {where}"
                    )
        for dim, axis, _ in todo:  # an axis that no component shows is sharded as the component that it sizes
            if axis.part is not None and (lead := dim.leading) in statics and env[lead].part is None:
                env[lead] = Axis(env[lead].size, axis.part)
        for dim, axis, where in todo:
            want = _axes.evaluate(dim, env, f"{who}: component {where}")
            if want != axis:
                raise TypeError(
                    f"{who}: axis {dim.text!r} must be {_axes.show((want,))} but is {_axes.show((axis,))} in {where}"
                )
        return env

    @property
    def static_bindings(self) -> Bindings:
        """The integer statics, as axes."""
        pairs = zip(self.decl.statics, self.statics, strict=True)
        return {s.name: Axis(v) for s, v in pairs if isinstance(v, int) and not isinstance(v, bool)}

    def check(self) -> "ValueType":
        """Raise a TypeError unless the components fit the declaration; return the type."""
        for c, leaf in self.fields:
            _check_leaf(self.decl.cls.__name__, c, leaf)
        self.batch, self.bindings, self.dense_type  # noqa: B018
        return self

    # --- what it stands for -----------------------------------------------------------------------------------

    @cached_property
    def dense_type(self) -> Any:
        """The array type that the value stands for; for a record the pytree of those of its components."""
        decl = self.decl
        if decl.stands_for is None:
            subs = self.tree.unflatten([dense_type(a) for a in self.leaves])
            return record_view(decl, subs)
        assert decl.stands_for.axes is not None
        env = self.bindings
        where = f"{decl.cls.__name__}.dense"
        axes = (*self.batch, *(_axes.evaluate(d, env, where) for d in decl.stands_for.axes.dims))
        shape, parts = tuple(a.size for a in axes), tuple(a.part for a in axes)
        if name := twice(parts):
            shown = f"{decl.name}[{_axes.show(axes)}]"
            raise TypeError(f"{where}: {shown} has two axes on the mesh axis {name!r}; reshard a component")
        like = max(self.lo_ty(), key=lambda a: not _jax.mesh_of(a).empty)
        out = _jax.array_type(shape, self.dtype, like, parts)
        return _jax.with_varying(out, [a for a in self.lo_ty() if not _jax.mesh_of(a).empty])

    @property
    def dtype(self) -> Any:
        decl = self.decl
        if decl.stands_for is None:
            raise AttributeError(f"{decl.name} is a record and has no dtype; its components have")
        if decl.stands_for.dtype is not None:
            return decl.stands_for.dtype
        if decl.dtype_from == "dtype":
            return _axes.dtype_of(self.static("dtype"))
        return next(axes_type(a).dtype for c, a in self.fields if c.name == decl.dtype_from)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it stands for; for a record, the leading axes that all components share."""
        if not self.decl.is_record:
            return tuple(self.dense_type.shape)
        if self.has_own_axes:
            return tuple(a.size for a in self.batch)
        shapes = [() if is_raw(a) and not has_axes(a) else tuple(axes_type(a).shape) for a in self.leaves]
        common = []
        for sizes in zip(*shapes, strict=False):
            if len(set(sizes)) != 1:
                break
            common.append(sizes[0])
        return tuple(common)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sharding(self) -> Any:
        if self.decl.is_record:
            raise AttributeError(f"{self.decl.name} is a record and has no sharding; its components have")
        return self.dense_type.sharding

    @property
    def mat(self) -> Any:
        return self.lo_ty()[0].mat

    @property
    def nbytes(self) -> int:
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.lo_ty())

    def update(self, **changes: Any) -> Any:
        """The same type, varying over other manual mesh axes, as ``jax.vmap`` asks with an ``spmd_axis_name``. Also asked
        for by operations of arrays that are applied to such values (``pallas_call``, collectives of ``jax.lax``): raises a
        TypeError."""
        if _jax.called_by_batching():
            before, after = self.mat.varying, changes["manual_axis_type"].varying
            return self.with_leaves([_jax.revarying(a, before - after, after - before) for a in self.leaves])
        raise TypeError(
            f"an operation of arrays was applied to a value of type {self}; use the function of typax of that name, if "
            "there is one, or apply it to the components, v.components()"
        )

    def _no_indexed_ref(self, *_: Any, **__: Any) -> Any:
        """Asked for by an indexed read or write of a ref of such values: raises a TypeError."""
        raise TypeError(
            f"a ref of {self} is read and written whole, ref[...]; index what it stands for: typax.dense(ref[...])[i]"
        )

    ref_get_abstract_eval = ref_swap_abstract_eval = ref_addupdate_abstract_eval = _no_indexed_ref
    ref_get_to_lojax = ref_swap_to_lojax = _no_indexed_ref

    weak_type = False
    is_fully_addressable = True

    # --- tangents ---------------------------------------------------------------------------------------------

    @cached_property
    def _tangent_types(self) -> tuple[Any, Any]:
        policy = self.decl.tangent
        tangent, cotangent = policy.tangent_type(self), policy.cotangent_type(self)
        if not _jax.is_hi(tangent) and cotangent != tangent.to_ct_aval():
            raise TypeError(
                f"{self}: the tangent policy {policy.name!r} has tangents of type {tangent}, whose cotangents are of that "
                f"type, not {cotangent}; a cotangent type of its own needs a hi type for tangents, and is that of its class"
            )
        return tangent, cotangent

    def to_tangent_aval(self) -> Any:
        return self._tangent_types[0]

    def to_ct_aval(self) -> Any:
        return self._tangent_types[1]

    def admits(self, leaves: Sequence[Any]) -> bool:
        """Whether the declaration admits components of these types."""
        named = zip((c for c, _ in self.fields), leaves, strict=True)
        return all(any(_admits(p, a) for p in c.patterns) for c, a in named)

    def vspace_zero(self) -> Any:
        return self.decl.tangent.zero(self)

    def vspace_add(self, x: Any, y: Any) -> Any:
        return self.decl.tangent.add(self, x, y)

    # --- mapping ----------------------------------------------------------------------------------------------

    def mapping(self, spec: Any) -> Any:
        """A mapping spec as an int, `typax.Axes` or ``None``: a type with specs of its own translates them here."""
        return spec

    def component_specs(self, spec: Any) -> list[Any]:
        """A spec for each leaf, from an int, `Axes` or ``None``."""
        if isinstance(spec, Axes):
            children = self.tree.children()
            entries = spec.entries
            if len(children) == 1 and children[0].num_leaves != 1:  # one component that is a tuple: its elements
                children = children[0].children()
            if len(entries) != len(children):
                raise TypeError(f"{spec!r} has {len(entries)} entries, but {self} has {len(children)} components")
            return [e for e, t in zip(entries, children, strict=True) for _ in range(t.num_leaves)]
        return [spec] * len(self.leaves)

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        if spec is None:
            return self
        specs, k = self._checked(spec, adding=False)
        if k is None:
            self._refuse_other_size(size, [(a, s) for a, s in zip(self.leaves, specs, strict=True) if isinstance(s, int)])
            return self.with_leaves(
                [a if s is None else a.dec_rank(size, own_spec(a, s)) for a, s in zip(self.leaves, specs, strict=True)]
            )
        if size is not None and self.batch[k].size != size:
            raise TypeError(f"cannot map batch axis {k} of {self}, of size {self.batch[k].size}, as if of size {size}")
        leaves, masks = [], []
        for (c, a), s, m in zip(self.fields, specs, self.masks, strict=True):
            if s is None and m[k]:
                raise TypeError(
                    f"{spec!r} leaves {c.name} of {self} unmapped, but it has batch axis {k} ({a}); map the value along {k}"
                )
            leaves.append(a.dec_rank(size, own_spec(a, sum(m[:k]))) if m[k] else a)
            masks.append(m[:k] + m[k + 1 :])
        return type(self)(self.decl, leaves, self.tree, self.statics, tuple(masks))

    def _refuse_other_size(self, size: int | None, mapped: Sequence[tuple[Any, int]]) -> None:
        for a, s in mapped:
            if size is None or not isinstance(a, _jax.ShapedArray) or (s < a.ndim and a.shape[s] == size):
                continue
            own = f"axis {s} of its component {a}"
            raise TypeError(
                f"cannot map {self} along an axis of size {size}: {own} " + ("differs" if s < a.ndim else "is none")
            )

    def inc_rank(self, size: int | None, spec: Any, mesh_axis: Any = None) -> Any:
        if spec is None:
            return self
        specs, k = self._checked(spec, adding=True)
        if k is None:
            grown = zip(self.leaves, specs, strict=True)
            return self.with_leaves([_repairs.unmapped_aval(size, own_spec(a, s), a, mesh_axis) for a, s in grown])
        leaves, masks = [], []
        for a, s, m in zip(self.leaves, specs, self.masks, strict=True):
            leaves.append(a if s is None else _repairs.unmapped_aval(size, own_spec(a, sum(m[:k])), a, mesh_axis))
            masks.append((*m[:k], s is not None, *m[k:]))
        return type(self)(self.decl, leaves, self.tree, self.statics, tuple(masks))

    @property
    def has_own_axes(self) -> bool:
        """Whether a component has declared axes; else each component is mapped on its own."""
        return any(c.axes is not None for c in self.decl.components)

    def _checked(self, spec: Any, adding: bool) -> tuple[list[Any], int | None]:
        """The spec of each leaf, and the batch axis they all speak of (``None``: each leaf has its own)."""
        spec = self.mapping(spec)
        if not isinstance(spec, int | Axes):
            raise TypeError(
                f"{self} is mapped along a batch axis named by an int, or by typax.Axes with one entry for each "
                f"component, not by {spec!r}"
            )
        specs = self.component_specs(spec)
        if not self.has_own_axes:
            grown = [_ndim(a) + adding if not is_raw(a) else 0 for a in self.leaves]
            return [s + n if isinstance(s, int) and s < 0 else s for s, n in zip(specs, grown, strict=True)], None
        ks = {s for s in specs if s is not None}
        n = self.n_batch + adding
        k = ks.pop() if len(ks) == 1 else None
        if k is not None and k < 0:
            k += self.ndim + adding
        if k is None or not 0 <= k < n:
            named = str(self.decl.components[0].axes) if self.decl.components else ""
            able = f"axes 0 to {n - 1} can" if n > 1 else "axis 0 can" if n == 1 else "it has no batch axis that could"
            raise TypeError(
                f"cannot map {self} along {spec!r}: only batch axes are mapped ({able} be), since mapping a named axis "
                f"({named}) changes what the value is"
            )
        return [None if s is None else k for s in specs], k

    def leading_axis_spec(self) -> Any:
        return 0

    def check_sliceable(self) -> None:
        """Raise a TypeError unless every component has the leading batch axis, as a scan needs it."""
        shared = [c.name for (c, _), m in zip(self.fields, self.masks, strict=True) if self.n_batch and not m[0]]
        if shared:
            raise TypeError(
                f"a scan slices every component, but {', '.join(shared)} of {self} is shared along the leading axis; scan "
                f"over typax.unshare(v), in which each step has its own"
            )

    def _batch_masks(self) -> tuple[int, tuple[tuple[bool, ...], ...]]:
        if self.has_own_axes:
            return self.n_batch, self.masks
        return self.ndim, ((True,) * self.ndim,) * len(self.leaves)

    def permuted(self, perm: Sequence[int]) -> tuple[list[list[int]], tuple[tuple[bool, ...], ...]]:
        """What a permutation of the batch axes is for each leaf, and the masks after it."""
        n, masks = self._batch_masks()
        if list(perm[n:]) != list(range(n, self.ndim)):
            raise TypeError(f"cannot permute {self} by {tuple(perm)}: only its batch axes (the first {n}) can be")
        perms = []
        for leaf, m in zip(self.leaves, masks, strict=True):
            present = [k for k in range(n) if m[k]]
            perms.append([*(present.index(k) for k in perm[:n] if m[k]), *range(len(present), _ndim(leaf))])
        return perms, tuple(tuple(m[k] for k in perm[:n]) for m in self.masks) if self.has_own_axes else self.masks

    def broadcasted(self, axis: int) -> tuple[list[int], tuple[tuple[bool, ...], ...]]:
        """Where a new batch axis comes in each leaf, and the masks with it."""
        n, masks = self._batch_masks()
        if not 0 <= axis <= n:
            raise TypeError(f"{self} can be stacked along axes 0 to {n}, not along {axis}: named axes stay last")
        if not self.has_own_axes:
            return [axis] * len(self.leaves), self.masks
        return [sum(m[:axis]) for m in masks], tuple((*m[:axis], True, *m[axis:]) for m in masks)

    def leaf_specs(self, spec: Any) -> list[Any]:
        """The spec of each component leaf, as positions in that leaf's own axes."""
        if spec is None:
            return [None] * len(self.leaves)
        specs, k = self._checked(spec, adding=False)
        return specs if k is None else [sum(m[:k]) if m[k] else None for m in self.masks]

    def lo_axes(self, spec: Any, size: int) -> list[int | None]:
        """For each lowered array the axis, of this size, that a mapping spec maps (``None``: it is not mapped)."""
        own = zip(self.leaves, self.leaf_specs(spec), strict=True)
        return [k for a, s in own for k in lo_axes(a, None if s is None else own_spec(a, s), size)]

    # --- printing ---------------------------------------------------------------------------------------------

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        return self.decl.cls._show_type(self, short_dtypes)

    def __repr__(self) -> str:
        return self.str_short()

    __str__ = __repr__


def _forget_mesh(aval: Any) -> Any:
    if not isinstance(aval, _jax.ShapedArray):
        return aval.normalize()
    if any(p is not None for p in _jax.partition(aval)) or _jax.varying(aval):
        return aval
    return _jax.ShapedArray(aval.shape, aval.dtype)


def _ndim(aval: Any) -> int:
    return int(axes_type(aval).ndim)


def _leaf_axes(aval: Any) -> tuple[Axis, ...] | None:
    if isinstance(aval, ValueType) and aval.decl.is_record:
        return aval.batch if aval.has_own_axes else tuple(map(Axis, aval.shape))
    if is_raw(aval) and not has_axes(aval):
        return None
    return _axes.of_type(dense_type(axes_type(aval)))


def dense_type(aval: Any) -> Any:
    """The array type that a type stands for (a pytree of them for a record); an array stands for itself."""
    return aval.dense_type if isinstance(aval, ValueType) else aval


def record_view(decl: Declaration, subs: Sequence[Any]) -> Any:
    """What a record stands for: its one component's pytree, or a dict of its components'."""
    if len(decl.components) == 1:
        return subs[0]
    return dict(zip((c.name for c in decl.components), subs, strict=True))


def by_type(tys: Iterable[Any], los: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """Each type with its own part of what has an entry for each lowered array."""
    it = iter(los)
    return [(t, [next(it) for _ in t.lo_ty()]) for t in tys]


def open_vals(tys: Iterable[Any], los: Iterable[Any]) -> list[Any]:
    """Values of these types over these arrays, whatever they are."""
    return [t.open_val(*own) if isinstance(t, ValueType) else t.raise_val(*own) for t, own in by_type(tys, los)]


def with_los(aval: Any, los: Sequence[Any]) -> Any:
    if isinstance(aval, ValueType):
        return aval.with_los(los)
    return los[0] if not _jax.is_hi(aval) else aval


def lo_axes(aval: Any, spec: Any, size: int) -> list[int | None]:
    """For each array that a type lowers to, the axis, of this size, that ``spec`` maps."""
    if isinstance(aval, ValueType):
        return aval.lo_axes(spec, size)
    if not _jax.is_hi(aval):
        return [spec]
    return [None] * len(aval.lo_ty()) if spec is None else mapped_axes(aval, spec, size, lambda t: t.lo_ty())


def _check_leaf(who: str, c: Component, leaf: Any) -> None:
    if not any(_admits(p, leaf) for p in c.patterns):
        raise TypeError(f"{who}: component {c} does not admit {leaf}")


def _admits(p: Pattern, leaf: Any) -> bool:
    return fits_class(p.cls, leaf) and (p.dtypes is None or p.admits(axes_type(leaf).dtype))


def fits_class(cls: Any, aval: Any) -> bool:
    """Whether a value of type ``aval`` is one of an annotation's class."""
    if cls is Any or cls is object:
        return True
    if typing_tree(cls):
        inner = (p for a in typing.get_args(cls) if a is not ... for p in _axes.patterns(a, ""))
        return any(_admits(p, aval) for p in inner)
    if _jax.is_hi(aval):
        own = aval.decl.cls if isinstance(aval, ValueType) else _jax.value_class(aval)
        return isinstance(cls, type) and issubclass(own, cls)
    return cls is jax.Array or (isinstance(cls, type) and issubclass(jax.Array, cls))


def typing_tree(cls: Any) -> bool:
    """``tuple[Any, ...]`` and the like: a component that is a pytree of values."""
    return getattr(cls, "__origin__", None) in (tuple, list, dict)
