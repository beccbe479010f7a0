"""The only door to ``jax.experimental.hijax`` and to JAX's private modules.

Every difference between JAX versions lives here.  Features are probed for, never version numbers, so that a
workaround steps aside as soon as JAX closes the hole it is for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import ad_checkpoint, api, config, core, dtypes, source_info_util
from jax._src.ad_util import add_jaxvals as _add_jaxvals
from jax._src.hijax import fake_linear_op as _fake_linear_op
from jax._src.interpreters import batching
from jax._src.interpreters import partial_eval as pe
from jax._src.pjit import jit_p as _jit_p
from jax.experimental import hijax

ShapedArray = core.ShapedArray
Tracer = core.Tracer
Primitive = core.Primitive
Literal = core.Literal
Zero = hijax.Zero
GradAccum = hijax.GradAccum
HiType = hijax.HiType
HiPspec = hijax.HiPspec
MappingSpec = hijax.MappingSpec
aval_method = hijax.aval_method
aval_property = hijax.aval_property
# The class of primitives was called VJPHiPrimitive until JAX 0.11.2.
HiPrim: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009
ShardingTypeError = core.ShardingTypeError
float0 = jax.dtypes.float0
jit_p = _jit_p
transpose_p = jax.lax.transpose_p
typeof = core.typeof
sum_axis = batching.sum_axis
eval_context = core.eval_context


def register(cls: type, typeof: Callable[[Any], Any], canonicalize: Callable[[Any], Any]) -> None:
    """Tell JAX about a class of hi values: the type of each, and what to make of one that is an operand."""
    core.pytype_aval_mappings[cls] = typeof
    dtypes.register_canonicalize_value_handler(cls, canonicalize)


def is_hi(aval: Any) -> bool:
    return isinstance(aval, HiType)


def trace_key() -> Any:
    """Everything beside the argument types that a trace depends on: mesh, named axes, x64, promotion rules."""
    return config.trace_context()


def trace_is_clean() -> bool:
    return core.trace_state_clean()


@contextmanager
def without_anonymous_axes() -> Iterator[None]:
    """Hide the axes of ``jax.vmap`` that have no name: nothing can refer to them, but each is a new object, so that
    a cache keyed by the tracing context would never hit under ``vmap``."""
    env = core.get_axis_env()
    anonymous = [n for n in env.axis_sizes if isinstance(n, core._TempAxisName)]
    if not anonymous:
        yield
        return
    clean = env
    for name in anonymous:
        clean = clean.pop_pure(name)
    try:
        core.trace_ctx.set_axis_env(clean)
        yield
    finally:
        core.trace_ctx.set_axis_env(env)


def axis_key(axis_data: Any) -> Any:
    """What a batch rule depends on, hashable and the same for each anonymous axis."""
    name = None if isinstance(axis_data.name, core._TempAxisName) else axis_data.name
    return name, axis_data.size, axis_data.spmd_name, axis_data.explicit_mesh_axis


def current_trace() -> Any:
    return core.trace_ctx.trace


def instantiate(x: Any) -> Any:
    return hijax.instantiate_zeros(x) if isinstance(x, Zero) else x


def zeros(aval: Any) -> Any:
    """The zero of a tangent type."""
    return hijax.instantiate_zeros(Zero(aval))


def add(x: Any, y: Any) -> Any:
    """The sum of two tangents, hi or not."""
    return _add_jaxvals(x, y)


def partition(aval: Any) -> tuple[Any, ...]:
    """The mesh axes that partition each axis of an array type; ``None`` for an axis that is whole."""
    spec = aval.sharding.spec
    parts = tuple(getattr(spec, "partitions", spec))
    return parts + (None,) * (aval.ndim - len(parts))


def varying(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which an array type varies."""
    return frozenset(aval.mat.varying)


def array_type(shape: tuple[int, ...], dtype: Any, like: Any, parts: tuple[Any, ...]) -> Any:
    """An array type on the mesh of ``like``, partitioned by ``parts``, varying as ``like`` does."""
    sharding = like.sharding.update(spec=jax.P(*parts))
    return ShapedArray(shape, jax.numpy.dtype(dtype), sharding=sharding, manual_axis_type=like.mat)


def partitioned_otherwise(aval: Any, spec: Any) -> bool:
    """Whether an array type, where its mesh is explicit, is not partitioned by ``spec``."""
    explicit = set(aval.sharding.mesh.explicit_axes)

    def only(part: Any) -> tuple[Any, ...]:
        names = part if isinstance(part, tuple) else (part,)
        return tuple(n for n in names if n in explicit)

    want = (*spec, *(None,) * (aval.ndim - len(spec)))
    return bool(explicit) and any(only(p) != only(q) for p, q in zip(partition(aval), want, strict=True))


def repartitioned(aval: Any, spec: Any, mesh: Any = None) -> Any:
    """An array type, partitioned otherwise, on ``mesh`` or that in force."""
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    mesh = getattr(mesh, "abstract_mesh", mesh)
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, jax.P(*spec, *(None,) * (aval.ndim - len(spec)))))


def with_varying(aval: Any, others: list[Any]) -> Any:
    """``aval``, varying over the union of the manual axes over which ``others`` vary."""
    widest = max((o for o in others), key=lambda o: len(varying(o)), default=None)
    union = frozenset().union(*map(varying, others)) if others else frozenset()
    if widest is None or varying(aval) == union:
        return aval
    if varying(widest) == union:
        return aval.update(manual_axis_type=widest.mat)
    return aval.update(manual_axis_type=type(aval.mat)(varying=union))


def in_manual_mesh() -> bool:
    """Whether this is inside a ``shard_map``."""
    return jax.sharding.get_abstract_mesh()._any_axis_manual


def mesh_of(aval: Any) -> Any:
    return aval.sharding.mesh


def eval_jaxpr_fun(jaxpr: Any) -> Callable[..., list[Any]]:
    return core.jaxpr_as_fun(jaxpr)


def dce(jaxpr: Any) -> tuple[Any, list[bool]]:
    """``jaxpr`` without the equations that no result needs, and which of its arguments are still read."""
    new, used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return new, list(used)


def jaxpr_effects(jaxpr: Any) -> frozenset[Any]:
    return frozenset(jaxpr.effects)


def dependences(jaxpr: Any) -> list[frozenset[int]]:
    """For each result of a lowered jaxpr, the positions of the arguments it depends on (conservatively)."""
    env: dict[Any, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        deps = frozenset().union(*(env.get(v, frozenset()) for v in eqn.invars if not isinstance(v, Literal)))
        inner = eqn.params.get("jaxpr")
        if inner is not None and eqn.primitive.name in ("jit", "pjit") and len(inner.invars) == len(eqn.invars):
            atoms = [frozenset() if isinstance(v, Literal) else env.get(v, frozenset()) for v in eqn.invars]
            for var, out in zip(eqn.outvars, dependences(inner), strict=True):
                env[var] = frozenset().union(*(atoms[i] for i in out))
        else:
            env.update(dict.fromkeys(eqn.outvars, deps))
    return [frozenset() if isinstance(v, Literal) else env.get(v, frozenset()) for v in jaxpr.outvars]


def has_tracer_consts(jaxpr: Any) -> bool:
    return any(isinstance(c, Tracer) for c in jaxpr.consts)


@contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """The context in which JAX's own evaluator binds an equation: its source line, name stack and mesh."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind_eqn(eqn: Any, operands: list[Any]) -> list[Any]:
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def vmap(f: Callable[..., Any], in_axes: Any, out_axes: Any, axis: Any) -> Callable[..., Any]:
    """``jax.vmap`` along the axis of a batch rule (see `axis_key`); ``out_axes`` may hold ``sum_axis``: such a result is
    summed over the mapped axis."""
    name, size, spmd_name, mesh_axis = axis
    return api.vmap(
        f, in_axes, out_axes, axis_name=name, axis_size=size, spmd_axis_name=spmd_name or mesh_axis, sum_match=True
    )


def fake_linear_op(prim: Any, nz_in: list[bool], nz_out: list[bool], res: Any, tangents: list[Any]) -> list[Any]:
    """A linear stand-in for the tangents of a primitive that has reverse-mode rules only."""
    return _fake_linear_op(prim, nz_in, nz_out, res, None, *tangents)


def _repair_remat() -> None:
    """``jax.checkpoint`` does not raise its results when it is lowered, so that a hi result (for instance a hi
    cotangent in the backward pass of a checkpointed function) would reach its users as separate arrays.  Only
    calls that hold hi values come here; a JAX version that raises the results itself is left alone.
    """
    lower = ad_checkpoint.remat_p.to_lojax

    def to_lojax(*hi_args: Any, jaxpr: Any, **params: Any) -> list[Any]:
        out = list(lower(*hi_args, jaxpr=jaxpr, **params))
        if any(is_hi(typeof(x)) for x in out):
            return out
        los = iter(out)
        return [a.raise_val(*(next(los) for _ in a.lo_ty())) for a in jaxpr.out_avals]

    ad_checkpoint.remat_p.to_lojax = to_lojax


_repair_remat()


_broadcast, _matchaxis = batching.broadcast, batching.matchaxis
broadcast_hi: Callable[..., Any]  # these two are set by _structural
rebatch_hi: Callable[..., Any]


def broadcast(x: Any, size: int, axis: int, mesh_axis: Any) -> Any:
    """``batching.broadcast``, which makes a batch of what ``vmap`` did not map, hands hi values to an operation for arrays.
    Those of declared types are stacked instead; everything else is left alone."""
    if not is_hi_value(x):
        return _broadcast(x, size, axis, mesh_axis)
    return broadcast_hi(x, size, axis, mesh_axis)


def matchaxis(axis_data: Any, src: Any, dst: Any, x: Any, sum_match: bool = False) -> Any:
    """``batching.matchaxis`` moves a batch axis to where a loop or a caller wants it, but does not know the mapping specs of
    hi values; everything else is left alone."""
    if isinstance(src, MappingSpec) and src != dst and is_hi_value(x):
        moved = rebatch_hi(x, axis_data.size, src, dst, axis_data.explicit_mesh_axis)
        if moved is not None:
            return moved
    return _matchaxis(axis_data, src, dst, x, sum_match)


batching.broadcast, batching.matchaxis = broadcast, matchaxis


def is_hi_value(x: Any) -> bool:
    """Whether ``x`` is a hi value or a tracer of one."""
    try:
        return is_hi(typeof(x))
    except (TypeError, ValueError):
        return False
