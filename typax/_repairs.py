"""What typax changes in JAX: plain bugs that only hi values meet, and hooks that arrays have and hi values lack.

Each is probed for where JAX may have closed the hole, does nothing for arrays, and is listed in ``docs/limits.md``.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
from jax._src import ad_checkpoint, ad_util, core, custom_derivatives, pjit, shard_map
from jax._src.interpreters import ad, batching, pxla
from jax._src.lax import lax as _lax
from jax._src.lax.control_flow import conditionals, solves

from typax import _jax


def _repair_remat() -> None:
    """``jax.checkpoint`` does not raise its results when it is lowered, so that a hi result (for instance a hi
    cotangent in the backward pass of a checkpointed function) would reach its users as separate arrays.  Only
    calls that hold hi values come here; a JAX version that raises the results itself is left alone.
    """
    lower = ad_checkpoint.remat_p.to_lojax

    def to_lojax(*hi_args: Any, jaxpr: Any, **params: Any) -> list[Any]:
        out = list(lower(*hi_args, jaxpr=jaxpr, **params))
        if any(_jax.is_hi(_jax.typeof(x)) for x in out):
            return out
        los = iter(out)
        return [a.raise_val(*(next(los) for _ in a.lo_ty())) for a in jaxpr.out_avals]

    ad_checkpoint.remat_p.to_lojax = to_lojax


_repair_remat()


def _repair_identities() -> None:
    """``stop_gradient``, ``optimization_barrier`` and ``checkpoint_name`` of a hi value are not lowered, though they act on
    each array alike."""

    def to_lojax(primitive: Any) -> Callable[..., Any]:
        def run(*args: Any, **params: Any) -> Any:
            tys = [_jax.typeof(x) for x in args]
            los = [lo for t, x in zip(tys, args, strict=True) for lo in t.lower_val(x)]
            if primitive.multiple_results:
                out = iter(primitive.bind(*los, **params))
            else:
                out = iter([primitive.bind(x, **params) for x in los])
            raised = [t.raise_val(*(next(out) for _ in t.lo_ty())) for t in tys]
            return raised if primitive.multiple_results else raised[0]

        return run

    for primitive in (ad_util.stop_gradient_p, jax.lax.optimization_barrier_p, ad_checkpoint.name_p):
        if "to_lojax" not in vars(primitive):
            primitive.is_high = lambda *avals, **_: any(map(_jax.is_hi, avals))
            primitive.to_lojax = to_lojax(primitive)


_repair_identities()


def _repair_linear_solve() -> None:
    """``custom_linear_solve``, and ``custom_root`` by it, is not lowered where its functions close over a hi value or
    compute with one.  When it is lowered nothing is differentiated any more: it is what its solver computes."""
    primitive = solves.linear_solve_p
    if "to_lojax" not in vars(primitive):
        primitive.is_high = lambda *avals, jaxprs, **_: (
            any(map(_jax.is_hi, avals)) or any(j is not None and _jax.is_high(j) for j in jaxprs)
        )
        primitive.to_lojax = primitive.impl


_repair_linear_solve()
select_hi: Callable[..., Any]  # set by _indexing: the value of a number, for each entry of the leading axis
_stop_gradient = _lax._stop_gradient


def stop_gradient(x: Any) -> Any:
    """``lax.stop_gradient`` asks each leaf for its dtype, which a record has not; arrays are left alone."""
    if not _jax.is_hi_value(x):
        return _stop_gradient(x)
    return stop_gradient(x.primal) if isinstance(x, ad.JVPTracer) else ad_util.stop_gradient_p.bind(x)


_lax._stop_gradient = stop_gradient


def _repair_cond() -> None:
    """``cond`` makes an array of what its branches return as they got it, which a hi value is not; and where ``vmap`` maps
    its predicate, it selects between the branches' results by an operation for arrays."""

    class Lax(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(_lax, name)

        def asarray(self, x: Any) -> Any:
            return x if _jax.is_hi_value(x) else _lax.asarray(x)

    select, select_n = conditionals._bcast_select, conditionals._bcast_select_n

    def bcast_select(pred: Any, on_true: Any, on_false: Any) -> Any:
        return select_hi(pred, on_false, on_true) if _jax.is_hi_value(on_true) else select(pred, on_true, on_false)

    def bcast_select_n(pred: Any, *cases: Any) -> Any:
        return select_hi(pred, *cases) if _jax.is_hi_value(cases[0]) else select_n(pred, *cases)

    if vars(conditionals).get("lax") is _lax:
        setattr(conditionals, "lax", Lax("lax"))  # noqa: B010
        conditionals._bcast_select, conditionals._bcast_select_n = bcast_select, bcast_select_n


_repair_cond()


_mismatch = core.aval_mismatch_extra


def aval_mismatch_extra(a: Any, b: Any) -> str:
    """What the error about a rule of ``jax.custom_vjp`` adds on how a cotangent differs from the *operand*: of a hi value
    they may be of one type, for which it fails before it says anything."""
    return "" if core.typematch(a, b) else _mismatch(a, b)


core.aval_mismatch_extra = aval_mismatch_extra

_to_meta_ty = pjit.convert_to_metaty


def convert_to_metaty(arg: Any) -> Any:
    """What ``jax.jit(f).lower`` knows of an argument: the sharding of a hi argument is taken for that of each array to which
    it lowers, whatever its rank, though these have their own in their types.  Everything else is left alone."""
    meta = _to_meta_ty(arg)
    return meta.replace(sharding=None) if _jax.is_hi(meta.aval) else meta


_probe = type("_probe", (_jax.HiType,), {"sharding": ..., "__hash__": object.__hash__, "__eq__": object.__eq__})()
if _to_meta_ty(_probe).sharding is not None:
    pjit.convert_to_metaty = convert_to_metaty

_broadcast, _matchaxis = batching.broadcast, batching.matchaxis
broadcast_hi: Callable[..., Any]  # these two are set by _structural
rebatch_hi: Callable[..., Any]


def broadcast(x: Any, size: int, axis: int, mesh_axis: Any) -> Any:
    """``batching.broadcast``, which makes a batch of what ``vmap`` did not map, hands hi values to an operation for arrays.
    Those are stacked instead; everything else is left alone."""
    if not _jax.is_hi_value(x):
        return _broadcast(x, size, axis, mesh_axis)
    return broadcast_hi(x, size, axis, mesh_axis)


def matchaxis(axis_data: Any, src: Any, dst: Any, x: Any, sum_match: bool = False) -> Any:
    """``batching.matchaxis`` moves a batch axis to where a loop or a caller wants it, but does not know the mapping specs of
    hi values; everything else is left alone."""
    if (isinstance(src, _jax.MappingSpec) or isinstance(dst, _jax.MappingSpec)) and src != dst and _jax.is_hi_value(x):
        moved = rebatch_hi(x, axis_data.size, src, dst, axis_data.explicit_mesh_axis)
        if moved is not None:
            return moved
    return _matchaxis(axis_data, src, dst, x, sum_match)


batching.broadcast, batching.matchaxis = broadcast, matchaxis

_unmapped_aval = core.unmapped_aval


def unmapped_aval(size: Any, axis: Any, aval: Any, explicit_mesh_axis: Any = None) -> Any:
    """``core.unmapped_aval`` forgets the mesh axis of a batch axis where a hi type gets one; arrays are left alone."""
    if explicit_mesh_axis is not None and getattr(aval, "is_declared", False):
        return aval.inc_rank(size, axis, explicit_mesh_axis)
    return _unmapped_aval(size, axis, aval, explicit_mesh_axis)


core.unmapped_aval = unmapped_aval

_mapped_leading_aval = core.mapped_leading_aval


def mapped_leading_aval(size: Any, aval: Any) -> Any:
    """``core.mapped_leading_aval``: the type of one step of a scan. A loop slices every array that a value is made of."""
    if getattr(aval, "is_declared", False):
        aval.check_sliceable()
    return _mapped_leading_aval(size, aval)


core.mapped_leading_aval = mapped_leading_aval


def _repair_shard_map() -> None:
    """``vmap`` of a ``shard_map`` inserts the mapped axis into specs for arrays; a hi type's knows how for its own."""
    batch_spec, used, trace_class = pxla.batch_spec, shard_map.used_axis_names, vars(batching)["BatchTrace"]
    process = trace_class.process_shard_map

    def batched(spec: Any, dim: Any, name: Any) -> Any:
        return spec.batched(dim, name) if hasattr(spec, "batched") else batch_spec(spec, dim, name)

    def used_axis_names(spec: Any) -> frozenset[Any]:
        return spec.mesh_axes if hasattr(spec, "mesh_axes") else used(spec)

    def process_shard_map(trace: Any, prim: Any, fun: Any, in_tracers: Any, *args: Any, **params: Any) -> Any:
        def leading(x: Any) -> Any:  # the mapped axis is the first of every component, where its spec gets it
            if not _jax.is_hi_value(x):
                return x
            value, dim = trace.to_batch_info(x)
            if dim is None or (isinstance(dim, int) and dim == 0):
                return x
            with core.set_current_trace(trace.parent_trace):
                value = matchaxis(trace.axis_data, dim, 0, value)
            return batching.BatchTracer(trace, value, 0, None)

        return process(trace, prim, fun, list(map(leading, in_tracers)), *args, **params)

    pxla.batch_spec, shard_map.used_axis_names = batched, used_axis_names
    trace_class.process_shard_map = process_shard_map


_repair_shard_map()


def _repair_custom_vjp() -> None:
    """``custom_vjp`` asks the type of each cotangent for its dtype, which a record has not."""

    def get(x: Any, name: str, *default: Any) -> Any:
        if name == "dtype" and not default and getattr(x, "is_declared", False):
            return getattr(x, name, None)
        return getattr(x, name, *default)

    if "getattr" not in vars(custom_derivatives):
        setattr(custom_derivatives, "getattr", get)  # noqa: B010


_repair_custom_vjp()
