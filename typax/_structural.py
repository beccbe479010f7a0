"""The structural ops: build a value from components, open it, see what it stands for; and the derivation of linear parts.

Derivatives live on *views*.  The view of a value is the array that it stands for; the views of a record, or of a value
with componentwise tangents, are those of its components.  A function of views (the reference of an op) or of component
leaves (its implementation) gives every linear part through JAX's own differentiation, evaluated on the hi values that
stand for the views.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from typax import _interpret, _jax, _jaxpr, _prim
from typax._byhand import is_raw, own_spec
from typax._prim import Application, Cache, Calls, Linear, Mask
from typax._type import ValueType, dense_type, record_view

# --- views and tangents --------------------------------------------------------------------------------------------


def by_components(ty: Any) -> bool:
    return isinstance(ty, ValueType) and ty.decl.tangent.by_components


def splits(ty: Any, whole: bool = False) -> bool:
    """Whether the views are those of the components. ``whole``: of a value that is not differentiated, so that it stays
    the value it is wherever it stands for an array."""
    return by_components(ty) and not (whole and not ty.decl.is_record)


def views(ty: Any, whole: bool = False) -> list[Any]:
    """The types on which derivatives with respect to a value of type ``ty`` are taken."""
    if splits(ty, whole):
        return [v for leaf in ty.leaves for v in views(leaf, whole)]
    return [dense_type(ty)]


def operands(ty: Any, value: Any, whole: bool = False) -> list[Any]:
    """The values that stand for the views: arrays, and hi values in place of the arrays they stand for."""
    if splits(ty, whole):
        pairs = zip(ty.leaves, component_leaves(value), strict=True)
        return [x for leaf, c in pairs for x in operands(leaf, c, whole)]
    return [value]


def leaves_of(ty: Any, value: Any) -> list[Any]:
    """The component leaves of a value; an array, or a value of a type written by hand, is its own."""
    return component_leaves(value) if isinstance(ty, ValueType) else [value]


def leaf_types(ty: Any) -> tuple[Any, ...]:
    return ty.leaves if isinstance(ty, ValueType) else (ty,)


def moving(ty: Any, whole: bool = False) -> list[bool]:
    """Whether each view can be perturbed: not an integer one, nor that of a value without tangents."""
    if splits(ty, whole):
        return [m for leaf in ty.leaves for m in moving(leaf, whole)]
    return [_prim.has_tangent(ty)]


def tangent_leaf_count(ty: Any) -> int:
    return len(tangent_views(ty))


def tangent_views(ty: Any) -> list[Any]:
    """The types of the views that have tangents."""
    return [v for v, m in zip(views(ty), moving(ty), strict=True) if m] if _prim.has_tangent(ty) else []


def open_tangent(ty: Any, t: Any) -> list[Any]:
    """The arrays that make up a tangent (or cotangent) of a value of type ``ty``."""
    if not _prim.has_tangent(ty):
        return []
    if by_components(ty):
        parts = component_leaves(t)
        return [x for leaf, part in zip(ty.leaves, parts, strict=True) for x in open_tangent(leaf, part)]
    if isinstance(ty, ValueType):
        return [ty.decl.tangent.open(_jax.typeof(t), t)]
    return [t]


def close_tangent(ty: Any, leaves: Sequence[Any], ct: bool = False) -> Any:
    """The tangent of a value of type ``ty`` made of these arrays."""
    tangent_ty = ty.to_ct_aval() if ct else ty.to_tangent_aval()
    if not _prim.has_tangent(ty):
        return np.zeros(tangent_ty.shape, _jax.float0)
    if by_components(ty):
        return from_leaves(tangent_ty, _prim.close_all(ty.leaves, leaves, ct))
    (leaf,) = leaves
    return ty.decl.tangent.close(tangent_ty, leaf) if isinstance(ty, ValueType) else leaf


_prim.open_tangent, _prim.close_tangent, _prim.tangent_leaf_count = open_tangent, close_tangent, tangent_leaf_count


# --- linear parts from a function --------------------------------------------------------------------------------


class Rule:
    """The linear parts of ``fn``: of some leaves of each operand (its views, or its components) to views of the results,
    components where these have componentwise tangents."""

    def __init__(
        self,
        name: str,
        in_tys: Sequence[Any],
        out_tys: Sequence[Any],
        leaves: Callable[[Any], Sequence[Any]],
        expand: Callable[[Any, Any], list[Any]],
        fn: Callable[..., Sequence[Any]],
        whole: Sequence[bool] = (),
    ) -> None:
        """`whole` tells the operands that are not differentiated, for a rule over views."""
        self.name, self.in_tys, self.fn = name, tuple(in_tys), fn
        whole = tuple(whole) or (False,) * len(self.in_tys)
        self.expand = lambda i, value: operands(in_tys[i], value, True) if whole[i] else expand(in_tys[i], value)
        per = [tuple(views(t, True) if w else leaves(t)) for t, w in zip(in_tys, whole, strict=True)]
        outs = [(v, _prim.has_tangent(t)) for t in out_tys for v in (t.leaves if by_components(t) else [dense_type(t)])]
        # a result without a tangent ends the derivative, whatever it stands for
        self.out_avals, self.live = [v for v, _ in outs], [m for _, m in outs]
        self.leaves = [a for tys in per for a in tys]
        flags = [moving(t, w) if w or leaves is views else map(_prim.has_tangent, tys)
                 for t, w, tys in zip(in_tys, whole, per, strict=True)]  # fmt: skip
        self.moving = [m for ms in flags for m in ms]
        self.owner = [i for i, tys in enumerate(per) for _ in tys]
        self.cache = Cache(64)

    def _split(self, mask: Mask) -> tuple[list[int], Callable[..., Sequence[Any]]]:
        """The leaves that have tangents, and ``fn`` of these, the others given."""
        own = [i for i, o in enumerate(self.owner) if mask[o] and self.moving[i]]

        def fn(primals: Sequence[Any], some: Sequence[Any]) -> Sequence[Any]:
            full = list(primals)
            for i, x in zip(own, some, strict=True):
                full[i] = x
            return list(self.fn(*full))

        return own, fn

    def _tangents(self, own: Sequence[int], leaves: Sequence[Any]) -> list[Any]:
        return list(_prim.close_all([self.leaves[i] for i in own], leaves))

    def _cotangents(self, leaves: Sequence[Any]) -> list[Any]:
        it = iter(leaves)
        tys = zip(self.out_avals, self.live, strict=True)
        counts = [(t, m, tangent_leaf_count(t)) for t, m in tys]
        return [
            close_tangent(
                t, [next(it) for _ in range(n)] if m else list(map(_jax.zeros, self._leaf_avals([t], ct=True))), ct=True
            )
            for t, m, n in counts
        ]

    @property
    def _live_avals(self) -> list[Any]:
        return [t for t, m in zip(self.out_avals, self.live, strict=True) if m]

    def _leaf_avals(self, tys: Sequence[Any], ct: bool = False) -> list[Any]:
        flat = [v for t in tys for v in tangent_views(t)]
        return [v.to_ct_aval() if ct else v.to_tangent_aval() for v in flat]

    def pushforward(self, nonzero: Mask) -> Linear:
        own, fn = self._split(nonzero)

        def push(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            some = [primals[i] for i in own]
            outs, dots = jax.jvp(lambda *xs: fn(primals, xs), some, self._tangents(own, tangents))
            live = zip(outs, dots, self.live, strict=True)
            return [x for o, t, m in live if m for x in open_tangent(_jax.typeof(o), t)]

        avals = self._leaf_avals([self.leaves[i] for i in own])
        return self._linear(("push", nonzero), f"{self.name}_jvp", push, avals)

    def pullback(self, nonzero: Mask) -> Linear:
        own, fn = self._split(nonzero)

        def pull(primals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            _, vjp = jax.vjp(lambda *xs: fn(primals, xs), *(primals[i] for i in own))
            grads = vjp(self._cotangents(cts))
            return [x for i, g in zip(own, grads, strict=True) for x in open_tangent(self.leaves[i], g)]

        return self._linear(("pull", nonzero), f"{self.name}_vjp", pull, self._leaf_avals(self._live_avals, ct=True))

    def transposed(self, linear: Mask) -> Linear:
        own, fn = self._split(linear)

        def moved(outs: Sequence[Any]) -> list[Any]:  # an integer component of a record has no part in it
            return [x for x, t in zip(outs, self.out_avals, strict=True) if _prim.has_tangent(t)]

        def transpose(primals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            some = [self.leaves[i] for i in own]
            flip = jax.linear_transpose(lambda *xs: moved(fn(primals, xs)), *some)
            grads = flip(moved(self._cotangents(cts)))
            return [x for i, g in zip(own, grads, strict=True) for x in open_tangent(self.leaves[i], g)]

        avals = self._leaf_avals(self._live_avals, ct=True)
        return self._linear(("trans", linear), f"{self.name}_transpose", transpose, avals)

    def _linear(self, key: Any, name: str, f: Callable[..., list[Any]], avals: Sequence[Any]) -> Linear:
        def make() -> Linear:
            with _jax.without_anonymous_axes():
                traced = jax.jit(f).trace(list(self.leaves), list(avals))
            jaxpr, used = _jax.dce(traced.jaxpr)
            n = len(self.leaves)
            reads = tuple(sorted({o for o, u in zip(self.owner, used, strict=False) if u}))

            def run(residuals: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
                parts = dict(zip(reads, residuals, strict=True))
                open_ = {i: iter(self.expand(i, parts[i])) for i in reads}
                args = [next(open_[o]) if o in open_ else None for o in self.owner]
                picked = [x for x, u in zip([*args, *leaves], used, strict=True) if u]
                return _interpret.evaluate(jaxpr, picked)

            run.__name__ = run.__qualname__ = name
            assert len(used) == n + len(avals)
            return Linear(reads, jax.jit(run))

        return self.cache.get((key, _jax.trace_key()), make)


def over_views(
    name: str, in_tys: Sequence[Any], out_tys: Sequence[Any], fn: Callable[..., Sequence[Any]], whole: Sequence[bool] = ()
) -> Rule:
    return Rule(name, in_tys, out_tys, views, operands, fn, whole)


def over_components(name: str, in_tys: Sequence[Any], out_tys: Sequence[Any], fn: Callable[..., Sequence[Any]]) -> Rule:
    return Rule(name, in_tys, out_tys, leaf_types, leaves_of, fn)


def over_operands(name: str, in_tys: Sequence[Any], out_tys: Sequence[Any], fn: Callable[..., Sequence[Any]]) -> Rule:
    return Rule(name, in_tys, out_tys, lambda t: [t], lambda _, value: [value], fn)


class Derived(Application):
    """An application whose linear parts come from one rule."""

    def __init__(self, name: str, in_tys: Sequence[Any], out_tys: Sequence[Any], fn: Any, rule: Rule | None) -> None:
        """`fn` maps component leaves to component leaves; it may be traced already."""
        self.name, self.shown, self.in_tys, self.out_tys, self.rule = name, {}, tuple(in_tys), tuple(out_tys), rule
        traced = jax.jit(fn).trace(*(a for t in in_tys for a in leaf_types(t))) if callable(fn) else fn
        self.lo, self.deps, self.effects = from_traced(name, traced)

    def _rule(self) -> Rule:
        if self.rule is None:
            raise NotImplementedError(
                f"{self.name} of {self.in_tys[0]} cannot be differentiated: a {self.in_tys[0].decl.tangent.name} tangent "
                f"has no components. Differentiate typax.dense(v) instead"
            )
        return self.rule

    def pushforward(self, nonzero: Mask) -> Linear:
        return self._rule().pushforward(nonzero)

    def pullback(self, nonzero: Mask) -> Linear:
        return self._rule().pullback(nonzero)

    def transposed(self, linear: Mask) -> Linear:
        return self._rule().transposed(linear)


def refuse_closure(what: str, traced: Any, avals: Sequence[Any]) -> None:
    """Raise a TypeError if what was traced on these types used values of a program being traced around it."""
    if _jax.closes_over_tracers(traced, len(avals)):
        raise TypeError(f"{what} closes over a value of a program being traced; pass it as an argument instead")


def from_traced(name: str, traced: Any) -> tuple[Any, list[frozenset[int]], frozenset[Any]]:
    """A traced function on arrays: jitted, with what each result depends on, and its effects."""
    with _jax.eval_context():  # lowering must not see the trace that asks for it
        jaxpr = traced.lojax.jaxpr
    return _prim._jitted(name, jaxpr), _jaxpr.dependences(jaxpr), _jax.jaxpr_effects(jaxpr)


# --- build and open ----------------------------------------------------------------------------------------------

structural = Cache()


def made(kind: Any, ty: ValueType, make: Callable[[], Application]) -> Application:
    with _jax.without_anonymous_axes():
        return structural.get((kind, ty, _jax.trace_key()), make)


def _identity(*xs: Any) -> list[Any]:
    return list(xs)


def from_leaves(ty: ValueType, leaves: Sequence[Any]) -> Any:
    """A value of type ``ty`` with these component leaves: traced code's way to build one."""

    def make() -> Application:
        # With componentwise tangents the components are the views; else the value's view is a function of them.
        if by_components(ty):
            rule = over_operands("from_components", ty.leaves, (ty,), _identity)
        else:
            rule = over_views("from_components", ty.leaves, (ty,), lambda *xs: [dense_fn(ty)(*xs)])
        return Derived("from_components", ty.leaves, (ty,), _identity, rule)

    if _jax.trace_is_clean() and not any(isinstance(x, _jax.Tracer) for x in leaves):
        return ty.of_leaves([pack_open(x) for x in leaves])
    (value,) = made("build", ty, make).apply([pack_open(x) for x in leaves])
    return value


ValueType.pack = staticmethod(from_leaves)  # type: ignore[method-assign]


def is_open(x: Any) -> bool:
    """Whether ``x`` is a value that holds traced components: one inside an implementation."""
    ty = getattr(x, "_type", None)
    return isinstance(ty, ValueType) and any(isinstance(c, _jax.Tracer) or is_open(c) for c in x._leaves)


def pack_open(x: Any) -> Any:
    """A value that holds traced components becomes one traced value; anything else is returned as it is."""
    if is_open(x):
        return from_leaves(x._type, x._leaves)
    if _jax.in_manual_mesh() and isinstance(ty := getattr(x, "_type", None), ValueType):
        return _closed_over(ty, x)
    return x


def _closed_over(ty: ValueType, value: Any) -> Any:
    """A concrete value inside a ``shard_map``: its components are cast to the manual mesh, as arrays are."""
    if all(_jax.mesh_of(a).empty for a in ty.lo_ty()):
        return value
    leaves = [
        pack_open(x) if isinstance(a, ValueType) else jax.numpy.copy(x)
        for a, x in zip(ty.leaves, value._leaves, strict=True)
    ]
    return from_leaves(ty.with_leaves(list(map(_jax.typeof, leaves))), leaves)


def as_operand(x: Any) -> Any:
    """What JAX is to make of a value that it binds: open values become traced ones, but while a program is lowered,
    where values over arrays are what it works on."""
    return x if getattr(_jax.current_trace(), "requires_low", False) else pack_open(x)


def component_leaves(value: Any) -> list[Any]:
    """The component leaves of a value, traced or not."""
    if not isinstance(value, _jax.Tracer):
        return list(value._leaves)
    ty = _jax.typeof(value)

    def opened(*xs: Any) -> list[Any]:  # a rule speaks of the components of its results where these have such tangents
        pairs = zip(ty.leaves, xs, strict=True)
        return [c for leaf, x in pairs for c in (component_leaves(x) if by_components(leaf) else [x])]

    def make() -> Application:
        rule = over_components("components", (ty,), ty.leaves, opened) if by_components(ty) else None
        return Derived("components", (ty,), ty.leaves, _identity, rule)

    return made("open", ty, make).apply([value])


# --- what it stands for ------------------------------------------------------------------------------------------


class _Stack(threading.local):
    """The traces in which bodies run, in this thread."""

    def __init__(self) -> None:
        self.traces: list[Any] = []


class Opened:
    """Inside a body (``dense``, an implementation) components are open: while the trace that entered it is current."""

    stack: ClassVar[_Stack] = _Stack()

    def __enter__(self) -> None:
        self.stack.traces.append(_jax.current_trace())

    def __exit__(self, *_: Any) -> None:
        self.stack.traces.pop()

    @classmethod
    def here(cls) -> bool:
        traces = cls.stack.traces
        return bool(traces) and _jax.current_trace() is traces[-1]


def unit_type(ty: ValueType) -> ValueType:
    """The type of one value of a stack."""
    for axis in ty.batch:
        ty = ty.dec_rank(axis.size, 0)
    return ty


def over_batch(ty: ValueType, body: Callable[[Any], Any]) -> Callable[..., Any]:
    """``body``, a function of one value, as a function of component leaves mapped over every batch axis."""

    def run(*leaves: Any) -> Any:
        own = unit_type(ty).with_leaves([_jax.typeof(x) for x in leaves])
        with Opened():
            return body(own.of_leaves(leaves))

    for k in reversed(range(ty.n_batch)):
        in_axes = tuple(own_spec(a, 0) if m[k] else None for a, m in zip(ty.leaves, ty.masks, strict=True))
        run = jax.vmap(run, in_axes=in_axes, axis_size=ty.batch[k].size)
    return run


def over_axes(body: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    """``body``, which makes a value of an array, mapped over the ``n`` leading axes of it."""

    def run(x: Any) -> Any:
        types: list[ValueType] = []

        def one(x: Any) -> list[Any]:
            with Opened():
                out = body(x)
            types.append(_jax.typeof(out))
            return component_leaves(out)

        f = one
        for _ in range(n):
            f = jax.vmap(f)
        leaves = f(x)
        (ty,) = types
        for size in reversed(x.shape[:n]):
            ty = ty.inc_rank(size, 0)
        return ty.with_leaves(list(map(_jax.typeof, leaves))).of_leaves(leaves)

    return run if n else body


def dense_fn(ty: ValueType) -> Callable[..., Any]:
    """What a value stands for, as a function of its component leaves.

    The body of a class that says ``_dense_of_stacks`` takes stacks as they are: its components may share along their axes.
    """
    body = ty.decl.dense
    assert body is not None
    if not (getattr(ty.decl.cls, "_dense_of_stacks", False) and all(all(m) for m in ty.masks)):
        return over_batch(ty, body)

    def whole(*leaves: Any) -> Any:
        with Opened():
            return body(ty.with_leaves(list(map(_jax.typeof, leaves))).of_leaves(leaves))

    return whole


def dense(value: Any) -> Any:
    """The array that a value stands for; of a record, the pytree of what its components stand for; of a tree, one of these.

    An array is returned as it is, and so is a leaf of a tree that is no value: a function, a string.
    Differentiating goes through as if it were the identity: the tangent of a value with dense tangents *is* the tangent of
    this array.

    Raises:
      TypeError: if ``value`` is neither an array nor a value of a declared type, or if the body of `dense` gives
        another type than its annotation says.
    """
    return (_dense.call if _jax.trace_is_clean() else _dense.run)(None, value)


def _dense_record(ty: ValueType, value: Any) -> Any:
    leaves = zip(ty.leaves, component_leaves(value), strict=True)
    subs = [x if is_raw(a) else dense(x) for a, x in leaves]  # one written by hand stands for itself
    return record_view(ty.decl, ty.tree.unflatten(subs))


def _find_dense(_: Any, operands: tuple[Any, ...]) -> Any:
    value = pack_open(*operands)
    try:
        ty = _jax.typeof(value)
    except TypeError:
        if jax.tree_util.all_leaves([value]):
            raise
        return lambda: jax.tree.map(lambda x: dense(x) if is_value(x) else x, value)
    if not isinstance(ty, ValueType):
        if _jax.is_hi(ty):
            raise TypeError(
                f"typax.dense: {ty} is not a declared type, so what it stands for is not known; apply its own primitive"
            )
        return lambda: value
    if ty.decl.is_record:
        return lambda: _dense_record(ty, value)

    def make() -> Application:
        fn = dense_fn(ty)
        rule = (
            over_components("dense", (ty,), (ty.dense_type,), lambda *xs: [fn(*xs)])
            if by_components(ty)
            else over_views("dense", (ty,), (ty.dense_type,), _identity)
        )

        def one(*xs: Any) -> list[Any]:
            out = fn(*xs)
            if not is_value(out):
                raise TypeError(
                    f"{ty.decl.cls.__name__}.dense: the body gives {type(out).__name__} where its annotation says one "
                    f"array, {ty.decl.stands_for.text}"
                )
            return [out]

        try:
            traced = jax.jit(one).trace(*ty.leaves)
        except _jax.ShardingTypeError as e:
            raise TypeError(f"{ty.decl.cls.__name__}.dense of {ty}: {e}") from e
        (got,) = traced.jaxpr.out_avals
        if difference := type_difference(ty.dense_type, got):
            raise TypeError(
                f"{ty.decl.cls.__name__}.dense: its annotation says that {ty} stands for {ty.dense_type}, but the body "
                f"gives {got} ({difference})"
            )
        return Derived("dense", (ty,), (ty.dense_type,), traced, rule)

    return made("dense", ty, make), [value], operator.itemgetter(0)


_dense = Calls("dense", _find_dense)
_interpret.densify = dense


def is_value(x: Any) -> bool:
    """Whether ``x`` is one array, number or hi value."""
    try:
        return jax.tree_util.all_leaves([x]) and _jax.typeof(x) is not None
    except (TypeError, ValueError, OverflowError):
        return False


def type_difference(want: Any, got: Any) -> str:
    """What tells two array types apart, in words; empty if nothing does."""
    if _jax.is_hi(got) or _jax.is_hi(want):
        return "" if want == got else "another type"
    if tuple(want.shape) != tuple(got.shape):
        return "another shape"
    if want.dtype != got.dtype:
        return "another dtype"
    meshes = _jax.mesh_of(want), _jax.mesh_of(got)
    parts = _jax.partition(want), _jax.partition(got)
    if not all(m.empty for m in meshes) and parts[0] != parts[1]:
        return "another sharding"
    if not all(m.empty for m in meshes) and _jax.varying(want) != _jax.varying(got):
        return "it varies over other manual axes"
    return ""
