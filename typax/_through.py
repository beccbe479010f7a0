"""Primitives that say of a value where it is, or nothing: they hold for every type, component by component.

copy, stop_gradient, optimization_barrier, name, pvary      on each component
sharding_constraint, reshard, all_gather                    as typax's functions of these names
"""

from collections.abc import Callable
from typing import Any

import jax

from typax import _jax
from typax._collectives import all_gather
from typax._moves import reshard
from typax._op import Op, Refused
from typax._placement import with_sharding_constraint
from typax._structural import component_leaves, from_leaves
from typax._type import ValueType


def _on_components(primitive: Any) -> None:
    op = Op(primitive, primitive.name)
    many = primitive.multiple_results

    def implementation(*operands: Any, **params: Any) -> Any:
        declared = [isinstance(_jax.typeof(x), ValueType) for x in operands]
        leaves = [component_leaves(x) if d else [x] for x, d in zip(operands, declared, strict=True)]
        flat = [x for part in leaves for x in part]
        one = lambda x: (op if _jax.is_hi(_jax.typeof(x)) else primitive.bind)(x, **params)  # a component may be a value
        out = iter(primitive.bind(*flat, **params) if many else map(one, flat))
        back = []
        for x, d, part in zip(operands, declared, leaves, strict=True):
            new = [next(out) for _ in part]
            back.append(from_leaves(_jax.typeof(x).with_leaves(list(map(_jax.typeof, new))), new) if d else new[0])
        return back if many else back[0]

    op.impl(implementation)


for _primitive in (
    jax.lax.copy_p, jax.lax.stop_gradient_p, jax.lax.optimization_barrier_p, _jax.name_p, _jax.pvary_p,
):  # fmt: skip
    _on_components(_primitive)


def _placing(primitive: Any, place: Callable[..., Any], *told: str) -> None:
    """A primitive that says where its operand lies is the function of typax for values."""
    op = Op(primitive, primitive.name)

    def implementation(x: Any, **params: Any) -> Any:
        return place(x, *(params[k] for k in told))

    op.impl(implementation)


def _gather(x: Any, axis_name: Any, axis: int, groups: Any, tiled: bool) -> Any:
    try:
        return all_gather(x, axis_name, axis=axis, axis_index_groups=groups, tiled=tiled)
    except TypeError as e:  # along an axis of one component alone
        raise Refused(str(e)) from None


_placing(_jax.reshard_p, reshard, "dst_sharding")
_placing(_jax.sharding_constraint_p, with_sharding_constraint, "sharding")
_placing(_jax.all_gather_p, _gather, "axis_name", "all_gather_dimension", "axis_index_groups", "tiled")
