"""The raw API of ``jax.experimental.hijax``, under the same names on every supported JAX.

For types and primitives written by hand:

    class MyTy(HiType):        lo_ty, lower_val, raise_val: how values become arrays;  to_tangent_aval: their tangents;
                               dec_rank, inc_rank, leading_axis_spec: vmap, scan;  shard, unshard, nospec: shard_map
    register_hitype(My, typeof_my)
    class MyOp(HiPrim):        in_avals, out_aval, params;  expand;  vjp_fwd, vjp_bwd_retval, jvp, lin, linearized,
                               transpose;  batch, dce, remat, pp_params

What a JAX version lacks or calls otherwise is supplied in the form of the newest one: a rule is written once, and
`HiPrim` hands it to JAX as that version wants it.

- ``dce(self, used_outs, live_ins)``; where JAX does not know which inputs are live, all are. An effect keeps a primitive.
- ``remat(self, trace, *args)`` returns ``(out, residuals, again)``, and ``again(residuals, *args)`` the results.
- ``vjp_bwd_retval_logs(self, res, ct)`` is a method that returns ``(cotangents, logs)``.
- ``pp_params(self)`` are the parameters that are shown; how a jaxpr prints an equation is JAX's.
- ``vjp_from_lin`` leaves operands without tangents alone.

Not supplied: ``HiType.reshard`` is called from JAX 0.12 on only, and ``batch_dim_rule``, which JAX 0.12 dropped, is not part
of this interface; write ``batch``.

A value of a declared type (`typax.Value`) may be an operand or a result of a `HiPrim`, and an element of a type written
by hand; a value of a type written by hand may be a component of a declared one, and an operand or result of a `typax.op`.
docs/raw.md shows both.
"""

from typax import _jax

# --- types ---------------------------------------------------------------------------------------------------------

HiType = _jax.HiType
"""Base class of types. Hashable and comparable; the methods that JAX asks for are named above."""

ShapedArray = _jax.ShapedArray
"""The type of an array: ``ShapedArray(shape, dtype, sharding=...)``."""

AbstractValue = _jax.AbstractValue
"""Base class of all types, of arrays and of hi values."""

register_hitype = _jax.register_hitype
"""``register_hitype(cls, typeof)``: ``typeof(value)`` is the type of a value of the class ``cls``."""

aval_method = _jax.aval_method
"""``name = aval_method(f)`` in the body of a type: ``x.name(...)`` on a traced value ``x`` is ``f(x, ...)``."""

aval_property = _jax.aval_property
"""``name = aval_property(f)`` in the body of a type: ``x.name`` on a traced value ``x`` is ``f(x)``."""

# --- mapping and sharding --------------------------------------------------------------------------------------------

MappingSpec = _jax.MappingSpec
"""Base class of what stands in ``in_axes`` and ``out_axes`` for a hi value."""

HiPspec = _jax.HiPspec
"""Base class of what stands in ``in_specs`` and ``out_specs`` of ``shard_map``; ``to_lo()`` gives one ``jax.P`` an array."""

# --- primitives ------------------------------------------------------------------------------------------------------

HiPrim = _jax.HiPrim
"""Base class of primitives on hi values."""

VJPHiPrimitive = HiPrim
"""The name of `HiPrim` before JAX 0.11.2."""

unmap_avals = _jax.unmap_avals
"""``unmap_avals(axis_data, avals, dims)``: the types with the mapped axis put back, for a ``batch`` rule."""

bdims_at_front = _jax.bdims_at_front
"""``bdims_at_front(axis_data, args, dims)``: the arrays with the mapped axis first, broadcast where there is none."""

vmap_rule = _jax.vmap_rule
"""``vmap_rule(axis_data, f, in_axes, out_axes)``: ``f`` mapped over the axis of a ``batch`` rule; symbolic zeros pass."""

# --- differentiation -------------------------------------------------------------------------------------------------

linearize_from_jvp = _jax.linearize_from_jvp
"""In the body of a primitive: ``lin, linearized = linearize_from_jvp``."""

vjp_from_jvp = _jax.vjp_from_jvp
"""In the body of a primitive: ``vjp_fwd, vjp_bwd_retval = vjp_from_jvp``."""

vjp_from_lin = _jax.vjp_from_lin
"""In the body of a primitive: ``vjp_fwd, vjp_bwd_retval = vjp_from_lin``."""

jvp_from_lin = _jax.jvp_from_lin
"""In the body of a primitive: ``jvp = jvp_from_lin``."""

Zero = _jax.Zero
"""A symbolic zero: a tangent or cotangent that is known to vanish; ``.aval`` is its type."""

is_zero = _jax.is_zero
"""``is_zero(x)``: whether a tangent or cotangent is a symbolic zero."""

instantiate_zeros = _jax.instantiate_zeros
"""``instantiate_zeros(x)``: zeros of its type if ``x`` is a symbolic zero, else ``x``."""

GradAccum = _jax.GradAccum
"""What ``vjp_bwd`` and ``transpose`` are given for an operand with a cotangent: ``.accum(ct)`` adds to it."""

ValAccum = _jax.ValAccum
"""A `GradAccum` that holds a value; ``.freeze()`` reads it."""

RefAccum = _jax.RefAccum
"""A `GradAccum` that adds into a ref."""

NullAccum = _jax.NullAccum
"""A `GradAccum` that forgets what it is given."""

is_undefined_primal = _jax.is_undefined_primal
"""``is_undefined_primal(x)``: whether ``x`` is the place of a linear operand in a transpose rule."""

# --- effects and refs ------------------------------------------------------------------------------------------------

control_flow_allowed_effects = _jax.control_flow_allowed_effects
"""The effects that may occur in loops and branches."""

AbstractRef = _jax.AbstractRef
"""The type of a ref."""

TransformedRef = _jax.TransformedRef
"""A ref seen through indexing."""

__all__ = [  # noqa: RUF022, in reading order
    "HiType", "ShapedArray", "AbstractValue", "register_hitype", "aval_method", "aval_property",
    "MappingSpec", "HiPspec",
    "HiPrim", "VJPHiPrimitive", "unmap_avals", "bdims_at_front", "vmap_rule",
    "linearize_from_jvp", "vjp_from_jvp", "vjp_from_lin", "jvp_from_lin",
    "Zero", "is_zero", "instantiate_zeros", "GradAccum", "ValAccum", "RefAccum", "NullAccum", "is_undefined_primal",
    "control_flow_allowed_effects", "AbstractRef", "TransformedRef",
]  # fmt: skip
