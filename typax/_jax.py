"""The only door to ``jax.experimental.hijax`` and to JAX's private modules.

Every difference between JAX versions lives here.  Features are probed for, never version numbers, so that a
workaround steps aside as soon as JAX closes the hole it is for.
"""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax._src import (
    ad_checkpoint,
    ad_util,
    api,
    config,
    core,
    custom_derivatives,
    dtypes,
    flattree,
    pjit,
    shard_map,
    source_info_util,
    tree_util,
)
from jax._src.hijax import Static
from jax._src.interpreters import batching, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax as _lax
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import guard_lib
from jax._src.named_sharding import UNSPECIFIED
from jax.experimental import hijax

ShapedArray = core.ShapedArray
Tracer = core.Tracer
Primitive = core.Primitive
Literal = core.Literal
Zero = hijax.Zero
GradAccum = hijax.GradAccum
NullAccum = hijax.NullAccum
RefAccum = hijax.RefAccum
ValAccum = hijax.ValAccum
AbstractValue = hijax.AbstractValue
AbstractRef = hijax.AbstractRef
TransformedRef = hijax.TransformedRef
HiType = hijax.HiType
HiPspec = hijax.HiPspec
MappingSpec = hijax.MappingSpec
aval_method = hijax.aval_method
aval_property = hijax.aval_property
register_hitype = hijax.register_hitype
instantiate_zeros = hijax.instantiate_zeros
is_undefined_primal = hijax.is_undefined_primal
control_flow_allowed_effects = hijax.control_flow_allowed_effects
linearize_from_jvp = hijax.linearize_from_jvp
vjp_from_jvp = hijax.vjp_from_jvp
jvp_from_lin = hijax.jvp_from_lin
ShardingTypeError = core.ShardingTypeError
float0 = jax.dtypes.float0
jit_p = pjit.jit_p
reshard_p = pjit.reshard_p
sharding_constraint_p = pjit.sharding_constraint_p
transpose_p = jax.lax.transpose_p
ragged_dot_general_p = _lax.ragged_dot_general_p
eval_jaxpr_p = core.eval_jaxpr_p
remat_p = ad_checkpoint.remat_p
shard_map_p, name_p, pvary_p = shard_map.shard_map_p, ad_checkpoint.name_p, core.pvary_p
all_gather_p = jax.lax.all_gather_p
custom_jvp_call_p = custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = custom_derivatives.custom_vjp_call_p
unspecified = UNSPECIFIED
convert_element_type = _lax._convert_element_type
user_frames = source_info_util.user_frames
is_user_file = source_info_util.is_user_filename
typeof = core.typeof
separate_consts = pe.separate_consts
sum_axis = batching.sum_axis
eval_context = core.eval_context


_operands: dict[type, Callable[[Any], Any]] = {}


def register(cls: type, typeof: Callable[[Any], Any], canonicalize: Callable[[Any], Any]) -> None:
    """Tell JAX about a class of hi values: the type of each, and what to make of one that is an operand."""
    core.pytype_aval_mappings[cls] = typeof
    _operands[cls] = canonicalize
    dtypes.register_canonicalize_value_handler(cls, canonicalize)


def is_hi(aval: Any) -> bool:
    return isinstance(aval, HiType)


_ARRAY_PACKAGES = {"builtins", "jax", "jaxlib", "ml_dtypes", "numpy"}


def is_hi_class(cls: Any) -> bool:
    """Whether ``cls`` is registered as the class of values of a hi type."""
    return (
        isinstance(cls, type)
        and cls in core.pytype_aval_mappings
        and cls.__module__.partition(".")[0] not in _ARRAY_PACKAGES
    )


@functools.lru_cache(maxsize=4096)
def value_class(aval: Any) -> type:
    """The class of the values of a hi type: that of what it raises."""
    found: list[type] = []

    def raises(*los: Any) -> tuple[()]:
        found.append(type(aval.raise_val(*los)))
        return ()

    jax.jit(raises).trace(*aval.lo_ty())
    return found[0]


def trace_key() -> Any:
    """Everything beside the argument types that a trace depends on: mesh, named axes, x64, promotion rules."""
    return config.trace_context()


def _trace_is_clean() -> bool:
    """`core.trace_state_clean`, without its calls: it is asked before each eager call."""
    trace = _trace_state.value
    return trace is None or (trace is core.eval_trace and _axes_state.value is core.top_axis_env)


trace_is_clean: Callable[[], bool] = core.trace_state_clean
if all(hasattr(core, n) for n in ("trace_state_strong_ref", "axis_env_state", "eval_trace", "top_axis_env")):
    _trace_state, _axes_state = core.trace_state_strong_ref, core.axis_env_state
    trace_is_clean = _trace_is_clean


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
    return instantiate_zeros(x) if isinstance(x, Zero) else x


def zeros(aval: Any) -> Any:
    """The zero of a tangent type."""
    return hijax.instantiate_zeros(Zero(aval))


def add(x: Any, y: Any) -> Any:
    """The sum of two tangents, hi or not."""
    return ad_util.add_jaxvals(x, y)


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
    return ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=like.mat)


def in_device_get() -> bool:
    """Whether ``jax.device_get`` is running: it asks a value for ``__array__``, and takes what it gives."""
    return bool(guard_lib.thread_local_state().explicit_device_get)


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


def revarying(aval: Any, less: frozenset[str], more: frozenset[str]) -> Any:
    """``aval``, varying no longer over the manual axes ``less``, but over ``more``."""
    mat = aval.mat.update(varying=aval.mat.varying - less | more)
    return aval if mat == aval.mat else aval.update(manual_axis_type=mat)


def called_by_batching() -> bool:
    """Whether the caller's caller is JAX's machinery of ``vmap``."""
    return sys._getframe(2).f_globals.get("__name__") == batching.__name__


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


def closes_over_tracers(traced: Any, n_args: int) -> bool:
    """Whether a function that was traced on ``n_args`` arrays uses values of a program being traced around it."""
    jaxpr = traced.jaxpr
    return len(jaxpr.invars) != n_args or any(isinstance(c, Tracer) for c in jaxpr.consts)


def eqn_context(eqn: Any) -> tuple[Any, Any]:
    """The contexts in which JAX's own evaluator binds an equation: its source line and name stack, and its mesh."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager


def bind_scan(operands: Sequence[Any], jaxpr: Any, params: dict[str, Any]) -> list[Any]:
    """Bind a scan with another body, whose own constants become operands."""
    extra = list(jaxpr.consts)
    jaxpr, _ = pe.separate_consts(jaxpr) if extra else (jaxpr, ())
    consts, carry, xs = params["ft_in"].unpack()
    ft_in = flattree.pack((flattree.nones(len(extra) + len(consts)), carry, xs))
    return jax.lax.scan_p.bind(*extra, *operands, **(params | {"jaxpr": jaxpr, "ft_in": ft_in}))


def bind_shard_map(
    operands: Sequence[Any],
    body: Callable[..., list[Any]],
    in_specs: Any,
    out_specs: Callable[[], Any],
    params: dict[str, Any],
) -> list[Any]:
    """Bind a ``shard_map`` with another body; the specs of its results are asked for once it has run."""
    run = lambda *xs: flattree.flatten(body(*xs)).with_aux(tuple(out_specs()))
    own = shard_map_p.get_bind_params(params) | {"in_specs": tuple(in_specs), "subfuns": (run,)}
    return list(shard_map_p.bind(*operands, **own).unflatten())


def vmap(f: Callable[..., Any], in_axes: Any, out_axes: Any, axis: Any) -> Callable[..., Any]:
    """``jax.vmap`` along the axis of a batch rule (see `axis_key`); ``out_axes`` may hold ``sum_axis``: such a result is
    summed over the mapped axis."""
    name, size, spmd_name, mesh_axis = axis
    return api.vmap(
        f, in_axes, out_axes, axis_name=name, axis_size=size, spmd_axis_name=spmd_name or mesh_axis, sum_match=True
    )


def is_hi_value(x: Any) -> bool:
    """Whether ``x`` is a hi value or a tracer of one."""
    try:
        return is_hi(typeof(x))
    except (TypeError, ValueError, OverflowError):
        return False


# --- the raw API, with one signature on every version (its names are listed in typax.hijax) ---------------------------

# The class of primitives was called VJPHiPrimitive until JAX 0.11.2.
_HiPrim: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009
_DCE_SEES_INPUTS = "live_ins" in inspect.signature(_HiPrim.dce).parameters
_REMAT_HAS_RESIDUALS = len(_HiPrim.remat(lambda: None, None)) == 3
_LOGS_ARE_A_METHOD = callable(_HiPrim.vjp_bwd_retval_logs)
_SHOWS_PARAMS = hasattr(_HiPrim, "pp_params")


class HiPrim(_HiPrim):
    """Base class of primitives on hi values, applied by calling an instance.

    A subclass sets these in ``__init__``, then calls ``super().__init__()``: ``in_avals``, a tuple with the type (or pytree
    of types) of each operand; ``out_aval``, that of the result; ``params``, a dict of hashable values, which become
    attributes; ``effects``, if it has any.  Two primitives are equal if their classes, parameters and effects are.

    ``expand(*args)`` is the implementation; values are open in it.  The other methods are rules, traced code, each needed by
    the transformations named; ``nzs_in`` tells which operands have tangents, and `Zero` stands for a tangent that vanishes:

    - ``vjp_fwd(nzs_in, *args) -> (out, residuals)``, ``vjp_bwd_retval(residuals, ct) -> cts``: grad.  Instead of the second,
      ``vjp_bwd(residuals, ct, *accums)``, which adds to a `GradAccum` for each operand, or
      ``vjp_bwd_retval_logs(residuals, ct) -> (cts, logs)``.
    - ``jvp(primals, tangents) -> (out, tangent)``: jvp, checkpoint.
    - ``lin(nzs_in, *args) -> (out, residuals)``, ``linearized(residuals, *tangents) -> tangent``: linearize.
    - ``transpose(ct, *args)``: transposition; a linear operand is a `GradAccum`, to which its cotangent is added.
    - ``batch(axis_data, args, dims) -> (out, out_dims)``: vmap; a dim is ``None``, an int, or a `MappingSpec` of a hi value.
    - ``remat(trace, *args) -> (out, residuals, again)``, with ``again(residuals, *args) -> out``: what a checkpoint keeps.
    - ``dce(used_outs, live_ins) -> (used_ins, produced_outs, primitive or None)``: dead code.
    - ``pp_params() -> dict``: what is shown.

    Where an older JAX calls a rule otherwise, those that a subclass defines are wrapped.
    """

    __module__ = "typax.hijax"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "dce" in own and not _DCE_SEES_INPUTS:
            cls.dce = _dce_with_inputs(own["dce"])
        if "remat" in own and not _REMAT_HAS_RESIDUALS:
            cls.remat = _remat_with_residuals(own["remat"])
        if callable(own.get("vjp_bwd_retval_logs")) and not _LOGS_ARE_A_METHOD:
            cls.vjp_bwd_retval, cls.vjp_bwd_retval_logs = own["vjp_bwd_retval_logs"], True

    def __call__(self, *args: Any) -> Any:
        if any(type(x) in _operands for x in jax.tree.leaves(args)):
            args = jax.tree.map(_as_operand, args)
        return super().__call__(*args)

    if not _DCE_SEES_INPUTS:

        def dce(self, used_outs: Any, live_ins: Any = None) -> Any:
            # An effect counts, whether or not a result is used.
            return (True, True, self) if self.effects else super().dce(used_outs)

    if not _REMAT_HAS_RESIDUALS:

        def remat(self, trace: Any, *args: Any) -> Any:
            if type(self).remat is HiPrim.remat:  # JAX calls
                return super().remat(trace, *args)
            return self(*args), (), lambda _, *args: self(*args)

    if not _SHOWS_PARAMS:

        def pp_params(self) -> dict[str, Any]:
            return {k: v for k, v in self.params.items() if not k.startswith("_")}

        def __repr__(self) -> str:
            return f"{type(self).__name__}[{self.pp_params()}]"


def _dce_with_inputs(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def dce(self: Any, used_outs: Any, live_ins: Any = None) -> Any:
        if live_ins is None:  # JAX does not say: all may be read
            live_ins = self.in_tree.unflatten([True] * self.in_tree.num_leaves)
        return rule(self, used_outs, live_ins)

    return dce


def _remat_with_residuals(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def remat(self: Any, trace: Any, *args: Any) -> Any:
        out, residuals, again = rule(self, trace, *args)
        if type(self).remat is not remat:  # a subclass calls
            return out, residuals, again
        return out, lambda *args: again(residuals, *args)

    return remat


def _as_operand(x: Any) -> Any:
    handler = _operands.get(type(x))
    return x if handler is None else handler(x)


def _unmap_avals(axis_data: Any, avals: Any, dims: Any) -> Any:
    def unmap(a: Any, d: Any) -> Any:
        return core.unmapped_aval(axis_data.size, d, a, axis_data.explicit_mesh_axis)

    return jax.tree.map(unmap, avals, dims)


def _bdims_at_front(axis_data: Any, args: Any, dims: Any) -> Any:
    def front(x: Any, d: Any) -> Any:
        return batching.bdim_at_front(x, d, axis_data.size, axis_data.explicit_mesh_axis)

    return jax.tree.map(front, args, dims)


def _vmap_rule(
    axis_data: Any, f: Callable[..., Any], in_axes: Any, out_axes: Any, *, sum_match: bool = False
) -> Callable[..., Any]:
    special = (batching.sum_axis, batching.infer)
    infer = any(d is batching.infer for d in jax.tree.leaves(out_axes))
    spmd = axis_data.spmd_name or axis_data.explicit_mesh_axis
    vmapped = api.vmap(
        f, in_axes, out_axes, axis_name=axis_data.name, axis_size=axis_data.size, spmd_axis_name=spmd, sum_match=sum_match
    )

    def mapped(d: Any, x: Any) -> Any:
        return Zero(core.mapped_aval(axis_data.size, d, x.aval)) if isinstance(x, Zero) else x

    def unmapped(d: Any, x: Any) -> Any:
        known = isinstance(x, Zero) and not any(d is s for s in special)
        return Zero(_unmap_avals(axis_data, x.aval, d)) if known else x

    def batched(*args: Any) -> Any:
        args = jax.tree.map(mapped, in_axes, args, is_leaf=_is_none)
        out, inferred = vmapped(*args) if infer else (vmapped(*args), None)
        out = jax.tree.map(unmapped, out_axes, out, is_leaf=_is_none)
        return (out, inferred) if infer else out

    return batched


def _is_none(x: Any) -> bool:
    return x is None


unmap_avals: Callable[..., Any] = getattr(hijax, "unmap_avals", _unmap_avals)
bdims_at_front: Callable[..., Any] = getattr(hijax, "bdims_at_front", _bdims_at_front)
vmap_rule: Callable[..., Any] = getattr(hijax, "vmap_rule", _vmap_rule)


def _vjp_fwd_from_lin(self: Any, nzs_in: Any, *primals: Any) -> Any:
    out, residuals, *rest = self.lin(nzs_in, *primals)
    return out, (residuals, Static(nzs_in)), *rest


def _vjp_bwd_from_lin(self: Any, residuals: Any, out_ct: Any) -> Any:
    """Transposes the linear map in the operands that have tangents; the others' are symbolic zeros."""
    residuals, nonzero = residuals[0], self.in_tree.flatten_up_to(residuals[1].val)

    def with_zeros(ts: Any) -> Any:
        it = iter(ts)
        pairs = zip(self.in_avals_flat, nonzero, strict=True)
        return self.in_tree.unflatten([next(it) if n else Zero(a.to_tangent_aval()) for a, n in pairs])

    def filled(tree: Any) -> Any:
        return jax.tree.map(instantiate, tree, is_leaf=is_zero)

    def linear(*ts: Any) -> Any:
        return filled(self.linearized(residuals, *with_zeros(ts)))

    own = [a.to_tangent_aval() for a, n in zip(self.in_avals_flat, nonzero, strict=True) if n]
    return with_zeros(api.linear_transpose(linear, *map(ad_util.zeros_like_aval, own))(filled(out_ct)))


def _keeps_nonzero(pair: Any) -> bool:
    """Whether `vjp_from_lin` remembers which operands have tangents; else it transposes in integers too, and fails."""

    class Lin:
        def lin(self, nzs_in: Any, x: Any) -> Any:
            return x, None

    return pair.vjp_fwd(Lin(), (False,), 0)[1] is not None


vjp_from_lin = hijax.vjp_from_lin
if not _keeps_nonzero(vjp_from_lin):
    vjp_from_lin = type(vjp_from_lin)(_vjp_fwd_from_lin, _vjp_bwd_from_lin)


def is_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return isinstance(x, Zero)


# --- calls at the speed of arrays --------------------------------------------------------------------------------------
#
# `jax.jit` opens arguments and closes results in C++, by a registry in which JAX itself has typed keys.  Hi classes stand
# in that one alone: everywhere else (`jax.tree`, a trace) a hi value is one leaf.


class _CallPath(NamedTuple):
    """The private names of a call in C++."""

    make: Callable[..., Any]
    registry: Any
    shard: Callable[..., Any]
    cache: Any


def _call_path() -> _CallPath | None:
    """``None`` where this JAX has other names: then calls go through Python."""
    try:
        names = _CallPath(
            _jaxlib.pjit, tree_util.dispatch_registry, pxla.cc_shard_arg, _jaxlib.PjitFunctionCache(capacity=8192)
        )
        probe: Any = jax.jit(lambda: ())
        names.make("probe", probe, probe._cache_miss, (), (), (), names.registry, names.shard, names.cache)
        known = all(hasattr(names.registry, n) for n in ("register_dataclass_node", "register_node", "flatten"))
        return names if known and "out_pytree_def" in pxla.MeshExecutableFastpathData._fields else None
    except (AttributeError, TypeError):
        return None


call_path = _call_path()


def register_node(cls: type, leaves: str, static: str, close: Callable[[Any, Any], Any] | None) -> None:
    """Let calls in C++ open values of a class, by two attributes: the tuple of components, and the type.  They close them
    by ``cls(**attributes)``, which is fastest, or by ``close(type, components)``.
    """
    if call_path is None:
        return
    if close is None:
        call_path.registry.register_dataclass_node(cls, [leaves], [static])
    else:
        call_path.registry.register_node(cls, operator.attrgetter(leaves, static), close)


def fast_call(fun: Callable[..., Any], miss: Callable[..., Any], nums: Any = (), names: Any = (), key: Any = ()) -> Any:
    """A function called in C++ once ``miss(*args)`` has given the result, what to do from then on for arguments of these
    types (see `call_miss`; ``None``: ask again), and whether to forget the entry.

    Functions with equal ``key`` share what is known of ``fun``.  Needs `call_path`.
    """
    assert call_path is not None
    name = getattr(fun, "__name__", type(fun).__name__)
    return call_path.make(name, fun, miss, nums, names, key, call_path.registry, call_path.shard, call_path.cache)


def call_miss(jitted: Any, los: Sequence[Any], close: Callable[[list[Any]], Any]) -> tuple[Any, Any, bool]:
    """Call a jitted function of arrays, close its results; how to do both in C++ next time."""
    outs, data, forget = jitted._cache_miss(*los)
    out = close(outs)
    if data is not None:
        data = data._replace(out_pytree_def=call_path.registry.flatten(out)[1])  # type: ignore[union-attr]
    return out, data, forget


def own_miss(jitted: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """What `jax.jit` itself does the first time."""
    return jitted._cache_miss(*args, **kwargs)


def is_high(jaxpr: Any) -> bool:
    """Whether hi values stand anywhere in a jaxpr."""
    return jaxpr.is_high


def prepare_lowering(traced: Any, flat: Any) -> Any:
    """A traced function of hi values, to be lowered with the shardings of the same program on arrays.

    Where only results are hi, the compiled function expects each argument in a list.
    """
    lo, avals = traced.lojax, traced.jaxpr.in_avals
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    lo._params = lo._params | {k: flat._params[k] for k in names}
    lo._meta_tys_flat = flat._meta_tys_flat
    if not any(map(is_hi, avals)) and any(map(is_hi, traced.jaxpr.out_avals)):
        _, lo._in_tree = tree_util.tracing_registry.flatten(traced.in_tree.unflatten([[a] for a in avals]))
    return traced
