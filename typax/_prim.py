"""The one hi primitive, and what it applies.

An `Application` is one op at given operand types: its result types, its implementation on arrays, and its linear
parts.  Every rule that JAX asks a primitive for follows from these, and mapping an application gives an application,
so that any nesting of transformations is the same few lines.

    lo            arrays -> arrays                              the implementation, traced once, jitted
    pushforward   residuals, tangents -> tangents               for a set of operands that have tangents
    pullback      residuals, cotangents -> cotangents
    transposed    the other operands, cotangents -> cotangents  for a set of operands in which it is linear

The linear parts speak of *tangent leaves*, the arrays that make up a tangent (`_structural.open_tangent`).  `reads` tells
which operands a linear part needs: they are the residuals, kept as the hi values they are.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from typax import _jax, _jaxpr
from typax._axes import static_key
from typax._byhand import is_raw, own_spec, tangent_axis
from typax._spec import Axes
from typax._type import ValueType, by_type, lo_axes, open_vals, with_los

type Mask = tuple[bool, ...]


class Linear(NamedTuple):
    """A linear part: the operands that it reads, and the function of their values and of tangent leaves.

    With ``save`` it is a function of what that keeps instead: ``save(operands)`` gives the results and one residual.
    """

    reads: tuple[int, ...]
    fn: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    save: Callable[[Sequence[Any]], tuple[list[Any], Any]] | None = None

    def run(self, prim: Any, primals: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The results of the primitive, and the residuals."""
        if self.save is None:
            return prim(*primals), [primals[i] for i in self.reads]
        outs, kept = self.save(primals)
        return tuple(outs), [kept]


class Cache:
    """A bounded cache: the entry used longest ago goes first."""

    def __init__(self, maxsize: int = 4096) -> None:
        self.maxsize, self.entries = maxsize, OrderedDict[Any, Any]()
        self.calls: Any = None  # the `Calls` that go by it

    def find(self, key: Any) -> Any:
        """The entry, or ``None``."""
        value = self.entries.get(key)
        if value is not None:
            self.entries.move_to_end(key)
        return value

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The entry, made if there is none."""
        value = self.find(key)
        if value is not None:
            return value
        value = self.entries[key] = make()
        if len(self.entries) > self.maxsize:
            self.entries.popitem(last=False)
        return value


class Application:
    """One op at given operand types; see the module's docstring."""

    name: str
    shown: dict[str, Any]
    in_tys: tuple[Any, ...]
    out_tys: tuple[Any, ...]
    lo: Callable[..., list[Any]]
    deps: list[frozenset[int]]
    effects: frozenset[Any] = frozenset()
    refuses: str = ""  # why it cannot be run, if it stands for something that does not exist
    rules: dict[str, Any] = {}  # noqa: RUF012
    for_lift = False  # whether it stands in a program that `lift` traces, for what its operands will be

    def pushforward(self, nonzero: Mask) -> Linear:
        raise NotImplementedError

    def pullback(self, nonzero: Mask) -> Linear:
        raise NotImplementedError

    def transposed(self, linear: Mask) -> Linear:
        raise NotImplementedError

    @functools.cached_property
    def prim(self) -> Any:
        return prim_class(self.name)(self)

    @functools.cached_property
    def opens_in_calls(self) -> bool:
        """Whether calls in C++ can open its operands and close its results."""
        return all(map(opens_in_calls, (*self.in_tys, *self.out_tys)))

    def lower(self, args: Sequence[Any]) -> list[Any]:
        return [lo for t, x in zip(self.in_tys, args, strict=True) for lo in t.lower_val(x)]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The results on concrete values, or while a program is lowered."""
        if self.refuses:
            raise TypeError(self.refuses)
        return open_vals(self.out_tys, self.lo(*self.lower(args)))

    def apply(self, args: Sequence[Any]) -> list[Any]:
        """The results on any values: run the implementation if all are concrete, else bind the primitive."""
        if _jax.trace_is_clean() and not any(isinstance(x, _jax.Tracer) for x in args):
            return self.run(args)
        return list(self.prim(*args))


# --- calls -------------------------------------------------------------------------------------------------------


_LOWERING = ("lo_ty", "lower_val", "raise_val", "open_val", "of_leaves")


def opens_in_calls(ty: Any) -> bool:
    """Whether calls in C++ can open and close values of a type: an array, or a value that is its leaves."""
    if not isinstance(ty, ValueType):
        return not _jax.is_hi(ty)
    return opens_by_leaves(type(ty)) and all(map(opens_in_calls, ty.leaves))


def opens_by_leaves(hitype: type[ValueType]) -> bool:
    """Whether a class of types leaves as it is how values become arrays and arrays values."""
    return all(getattr(hitype, n) is getattr(ValueType, n) for n in _LOWERING)


class Statics:
    """The keyword arguments of a call, told apart by `static_key`. Raises a TypeError if one is not hashable."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.key = given, static_key(tuple(given.items()))
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statics) and self.key == other.key


class Calls:
    """The ways to call an op. ``find(statics, operands)`` gives the application, the flat operands, and what makes the
    result of its results; or a function without arguments that is all there is to do.

    `run` takes any values.  `call` is the same outside of any trace, where it goes by what it did for operands of these
    types: in C++, if it can (`_jax.fast_call`).
    """

    def __init__(self, name: str, find: Callable[[Statics | None, tuple[Any, ...]], Any]) -> None:
        def run(statics: Statics | None, *args: Any) -> Any:
            found = find(statics, args)
            if callable(found):
                return found()
            app, flat, shape = found
            return shape(app.apply(flat))

        def miss(statics: Statics | None, *args: Any) -> Any:
            found = find(statics, args)
            if callable(found):
                return found(), None, False
            app, flat, shape = found
            if app.refuses or not app.opens_in_calls or any(isinstance(x, _jax.Tracer) for x in flat):
                return shape(app.apply(flat)), None, False
            return _jax.call_miss(app.lo, app.lower(flat), lambda los: shape(open_vals(app.out_tys, los)))

        run.__name__ = run.__qualname__ = name
        self.run = run
        self.call = run if _jax.call_path is None else _jax.fast_call(run, miss, nums=(0,))


# --- mapping -----------------------------------------------------------------------------------------------------


def view_axes(ty: Any, spec: Any, size: int) -> list[Any]:
    """The mapped axis of each tangent leaf of a value that is mapped by ``spec``."""
    if not has_tangent(ty):
        return []
    if isinstance(ty, ValueType) and ty.decl.tangent.by_components:
        return [s for leaf, own in zip(ty.leaves, ty.leaf_specs(spec), strict=True) for s in view_axes(leaf, own, size)]
    if isinstance(ty, ValueType) and isinstance(spec, Axes):
        spec = next((e for e in spec.entries if e is not None), None)
    return [tangent_axis(ty, spec, size)]


def join_spec(ty: Any, axes: Sequence[int | None]) -> Any:
    """The spec of a result whose lowered arrays are mapped along ``axes`` (each 0 or ``None``)."""
    if all(a is None for a in axes):
        return None
    if is_raw(ty):
        return own_spec(ty, 0)
    if not isinstance(ty, ValueType) or ty.has_own_axes:
        return 0
    if all(a is not None for a in axes) and not any(map(is_raw, ty.leaves)):
        return 0
    return Axes(*(join_spec(leaf, own) for leaf, own in by_type(ty.leaves, axes)))


class Batched(Application):
    """An application mapped over an axis; ``dims`` holds the mapping spec of each operand."""

    def __init__(self, base: Application, in_tys: Sequence[Any], dims: tuple[Any, ...], axis: Any) -> None:
        self.base, self.dims, self.axis = base, dims, axis
        self.name, self.shown, self.effects, self.refuses = base.name, base.shown, base.effects, base.refuses
        self.in_tys = tuple(in_tys)
        size = axis[1]
        in_axes = [a for t, d in zip(in_tys, dims, strict=True) for a in lo_axes(t, d, size)]
        mapped = {i for i, a in enumerate(in_axes) if a is not None}
        out = [0 if deps & mapped else None for deps in base.deps]
        self.out_dims = tuple(join_spec(t, own) for t, own in by_type(base.out_tys, out))
        tys = [t if d is None else t.inc_rank(size, d) for t, d in zip(base.out_tys, self.out_dims, strict=True)]
        out_axes = [a for t, d in zip(tys, self.out_dims, strict=True) for a in lo_axes(t, d, size)]
        run = _jax.vmap(base.lo, tuple(in_axes), out_axes, axis)
        traced = jax.jit(run).trace(*(lo for t in in_tys for lo in t.lo_ty()))
        self.lo = _jitted(self.name, traced.jaxpr)
        self.deps = _jaxpr.dependences(traced.jaxpr)
        self.out_tys = tuple(with_los(t, own) for t, own in by_type(tys, traced.jaxpr.out_avals))
        self.linears = Cache(64)

    def _saving(self, part: Linear) -> Any:
        """What a rule keeps is mapped along its first axis."""
        if part.save is None:
            return None
        mapped = _jax.vmap(part.save, (list(self.dims),), (list(self.out_dims), 0), self.axis)
        return lambda primals: mapped(list(primals))

    def _kept_axes(self, part: Linear) -> list[Any]:
        return [0] if part.save is not None else self._in_axes(part.reads)

    def _in_axes(self, which: Sequence[int]) -> list[Any]:
        return [self.dims[i] for i in which]

    def _in_leaves(self, mask: Mask) -> list[Any]:
        rows = zip(self.in_tys, self.dims, mask, strict=True)
        return [a for t, d, m in rows if m for a in view_axes(t, d, self.axis[1])]

    def _out_leaves(self) -> list[Any]:
        return [a for t, d in zip(self.out_tys, self.out_dims, strict=True) for a in view_axes(t, d, self.axis[1])]

    def pushforward(self, nonzero: Mask) -> Linear:
        def make() -> Linear:
            part = self.base.pushforward(nonzero)
            in_axes = (self._kept_axes(part), self._in_leaves(nonzero))
            return Linear(part.reads, _jax.vmap(part.fn, in_axes, self._out_leaves(), self.axis), self._saving(part))

        return self.linears.get(("push", nonzero), make)

    def pullback(self, nonzero: Mask) -> Linear:
        return self.linears.get(("pull", nonzero), lambda: self._summing(self.base.pullback(nonzero), nonzero))

    def transposed(self, linear: Mask) -> Linear:
        return self.linears.get(("trans", linear), lambda: self._summing(self.base.transposed(linear), linear))

    def _summing(self, part: Linear, mask: Mask) -> Linear:
        """Cotangents of what is not mapped are summed over the axis."""
        fn, save, kept_axes = part.fn, self._saving(part), self._kept_axes(part)
        ct_axes = self._out_leaves()
        out_axes = [_jax.sum_axis if a is None else a for a in self._in_leaves(mask)]
        mapped = _jax.vmap(fn, (kept_axes, ct_axes), out_axes, self.axis)
        if None not in ct_axes or _jax.sum_axis not in out_axes:
            return Linear(part.reads, mapped, save)

        def both(residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            # A cotangent that is not mapped is a total already: it must not be summed again.
            zeros = [jax.numpy.zeros_like(c) for c in cts]
            of_mapped = [z if a is None else c for c, z, a in zip(cts, zeros, ct_axes, strict=True)]
            of_others = [c if a is None else z for c, z, a in zip(cts, zeros, ct_axes, strict=True)]
            first = [None if a is None else a for a in ct_axes]
            outs = [a if a is not _jax.sum_axis else 0 for a in out_axes]
            once = _jax.vmap(fn, (kept_axes, first), outs, self.axis)(residuals, of_others)
            picked = [x[0] if a is _jax.sum_axis else x for x, a in zip(once, out_axes, strict=True)]
            return [x + y for x, y in zip(mapped(residuals, of_mapped), picked, strict=True)]

        return Linear(part.reads, both, save)


def _jitted(name: str, jaxpr: Any) -> Callable[..., list[Any]]:
    run = _jax.eval_jaxpr_fun(jaxpr)

    def call(*los: Any) -> list[Any]:
        return run(*los)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, inline=True)


batched_cache = Cache()


def batched(base: Application, args: Sequence[Any], dims: tuple[Any, ...], axis_data: Any) -> Batched:
    tys = tuple(map(_jax.typeof, args))
    axis = _jax.axis_key(axis_data)
    with _jax.without_anonymous_axes():
        key = (base, tys, dims, axis, _jax.trace_key())
        return batched_cache.get(key, lambda: Batched(base, tys, dims, axis))


# --- the primitive -----------------------------------------------------------------------------------------------


class TypaxPrim(_jax.HiPrim):
    """JAX's view of an application. Each op name has a subclass of its own, since jaxprs print its name."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self.in_avals, self.out_aval = app.in_tys, app.out_tys
        self.params = {"_app": app}
        self.effects = app.effects
        super().__init__()

    def pp_params(self) -> dict[str, Any]:
        return self.app.shown

    def __repr__(self) -> str:
        shown = " ".join(f"{k}={v}" for k, v in self.app.shown.items())
        return f"{self.app.name}[{shown}]"

    def __hash__(self) -> int:
        return id(self.app)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypaxPrim) and self.app is other.app

    def expand(self, *args: Any) -> Any:
        return tuple(self.app.run(args))

    # forward mode
    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        nonzero = tuple(_is_nonzero(t) for t in tangents)
        if not any(nonzero):
            return self(*primals), self._no_tangents()
        part = self.app.pushforward(nonzero)
        out, residuals = part.run(self, primals)
        return out, self._push(part, nonzero, residuals, tangents)

    def _no_tangents(self) -> tuple[Any, ...]:
        return tuple(_jax.Zero(t.to_tangent_aval()) for t in self.app.out_tys)

    def _push(self, part: Linear, nonzero: Mask, residuals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        leaves = [x for t, v, m in zip(self.app.in_tys, tangents, nonzero, strict=True) if m for x in open_tangent(t, v)]
        return close_all(self.app.out_tys, part.fn(residuals, leaves))

    def lin(self, nzs_in: Sequence[bool], *primals: Any) -> Any:
        return self._forward(self.app.pushforward, nzs_in, primals)

    def _forward(self, part_of: Callable[[Mask], Linear], nzs_in: Sequence[bool], primals: Sequence[Any]) -> Any:
        nonzero = tuple(bool(n) and has_tangent(t) for n, t in zip(nzs_in, self.app.in_tys, strict=True))
        if not any(nonzero):
            return self(*primals), Residuals([], nonzero)
        out, kept = part_of(nonzero).run(self, primals)
        return out, Residuals(kept, nonzero)

    def linearized(self, res: Any, *tangents: Any) -> Any:
        if not any(res.nonzero):
            return self._no_tangents()
        ts = [_jax.instantiate(t) if m else t for t, m in zip(tangents, res.nonzero, strict=True)]
        return self._push(self.app.pushforward(res.nonzero), res.nonzero, res.values, ts)

    # reverse mode
    def vjp_fwd(self, nzs_in: Sequence[bool], *primals: Any) -> Any:
        return self._forward(self.app.pullback, nzs_in, primals)

    def vjp_bwd_retval(self, res: Any, cts: Sequence[Any]) -> Any:
        zeros = [_jax.Zero(t.to_ct_aval()) for t in self.app.in_tys]
        if not any(res.nonzero) or all(isinstance(c, _jax.Zero) for c in cts):
            return tuple(zeros)
        leaves = self.app.pullback(res.nonzero).fn(res.values, open_cotangents(self.app.out_tys, cts))
        closed = iter(close_all([t for t, m in zip(self.app.in_tys, res.nonzero, strict=True) if m], leaves, ct=True))
        return tuple(next(closed) if m else z for z, m in zip(zeros, res.nonzero, strict=True))

    def transpose(self, cts: Sequence[Any], *args: Any) -> None:
        linear = tuple(isinstance(a, _jax.GradAccum) for a in args)
        if all(isinstance(c, _jax.Zero) for c in cts):
            return
        part = self.app.transposed(linear)
        leaves = part.fn([args[i] for i in part.reads], open_cotangents(self.app.out_tys, cts))
        closed = iter(close_all([t for t, m in zip(self.app.in_tys, linear, strict=True) if m], leaves, ct=True))
        for accum, m in zip(args, linear, strict=True):
            if m:
                accum.accum(next(closed))

    # batching
    def batch(self, axis_data: Any, args: Sequence[Any], dims: Sequence[Any]) -> Any:
        if "batch" in self.app.rules:
            return batch_rule(self.app, _jax.axis_key(axis_data), args, dims)
        dims = [t.mapping(d) if isinstance(t, ValueType) else d for t, d in zip(self.app.in_tys, dims, strict=True)]
        app = batched(self.app, args, tuple(dims), axis_data)
        return tuple(app.apply(args)), app.out_dims

    # a checkpoint, and dead code
    def remat(self, trace: Any, *args: Any) -> Any:
        return remat_rule(self.app, args) if "remat" in self.app.rules else super().remat(trace, *args)

    def dce(self, used_outs: Any, live_ins: Any = None) -> Any:
        if "dce" in self.app.rules and any(used_outs) and not all(used_outs):
            made = dce_rule(self.app, used_outs)
            if made is not None:
                return made[0], tuple(used_outs), made[1].prim
        return super().dce(used_outs, live_ins)


@jax.tree_util.register_pytree_node_class
class Residuals:
    """The operands that a linear part reads; which operands have tangents is static."""

    def __init__(self, values: Sequence[Any], nonzero: Mask) -> None:
        self.values, self.nonzero = list(values), nonzero

    def tree_flatten(self) -> Any:
        return self.values, self.nonzero

    @classmethod
    def tree_unflatten(cls, nonzero: Mask, values: Any) -> "Residuals":
        return cls(values, nonzero)


open_tangent: Callable[[Any, Any], list[Any]]  # these two are set by _structural
close_tangent: Callable[[Any, list[Any], bool], Any]
tangent_leaf_count: Callable[[Any], int]
batch_rule: Callable[..., Any]  # these by _override
remat_rule: Callable[..., Any]
dce_rule: Callable[..., Any]


def close_all(tys: Sequence[Any], leaves: Sequence[Any], ct: bool = False) -> tuple[Any, ...]:
    it = iter(leaves)
    return tuple(close_tangent(t, [next(it) for _ in range(tangent_leaf_count(t))], ct) for t in tys)


def open_cotangents(tys: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
    return [x for t, c in zip(tys, cts, strict=True) for x in open_tangent(t, _jax.instantiate(c))]


def _is_nonzero(t: Any) -> bool:
    return not isinstance(t, _jax.Zero) and _inexact(_jax.typeof(t))


def has_tangent(ty: Any) -> bool:
    """Whether values of this type can be perturbed (integers and constants cannot)."""
    return _inexact(ty.to_tangent_aval())


def _inexact(tangent_ty: Any) -> bool:
    return _jax.is_hi(tangent_ty) or tangent_ty.dtype != _jax.float0


@functools.cache
def prim_class(name: str) -> type[TypaxPrim]:
    return type(name, (TypaxPrim,), {})
