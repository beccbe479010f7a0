"""Flax with values among the parameters.

NNX     ``nnx.Param(value)``, ``nnx.split`` and ``merge``, ``state``, ``jit``, ``grad``, ``vmap`` take values as they are; a
        value is read as ``param[...]`` and replaced by ``param.set_value(...)``. ``nnx.Optimizer`` adds updates to
        parameters; here is an `Optimizer` that moves them.
Linen   ``init`` and ``apply`` take values as they are: ``self.param(name, lambda key: typax.quantize(...))``. A layer that
        knows arrays only runs on them by ``typax.lift(model.apply)``. A train state that moves them is `TrainState`.
files   After ``register(QArray)``, those of ``flax.serialization`` hold values of that class.
"""

import json
from typing import Any

import jax
import numpy as np

from typax import _describe, _jax
from typax._optimize import apply_updates, optimizer
from typax._value import Value
from typax.io import _save, _tree

try:
    from flax import nnx, serialization
    from flax.training import train_state
except ImportError as e:
    raise ImportError("typax.flax needs Flax: pip install 'typax[libraries]'") from e

__all__ = ["Optimizer", "TrainState", "register"]


class Optimizer(nnx.Optimizer):
    """``nnx.Optimizer`` for models with values: their state and updates are tangents, and they move by `typax.retract`.

    ``Optimizer(model, tx, wrt=nnx.Param)`` and ``update(model, grads)`` as there.

    Raises:
      TypeError: as `typax.optimizer` and `typax.apply_updates` do.
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, **kwargs: Any) -> None:
        super().__init__(model, optimizer(tx), wrt=wrt, **kwargs)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Move the parameters of a model against their gradients; returns the updates."""
        params = nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph))
        gradients = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        old = jax.tree.map(lambda v: v.get_value(), self.opt_state, is_leaf=_is_variable)
        updates, new = self.tx.update(gradients, old, params, **nnx.as_pure(kwargs))
        nnx.update(model, apply_updates(params, updates))
        jax.tree.map(lambda v, x: v.set_value(x), self.opt_state, new, is_leaf=_is_variable)
        self.step[...] += 1
        return updates


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


class TrainState(train_state.TrainState):
    """Flax's ``TrainState`` for parameters with values: ``create`` and ``apply_gradients`` as there."""

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Any:
        """A new state, whose `tx` is ``typax.optimizer(tx)``."""
        return super().create(apply_fn=apply_fn, params=params, tx=optimizer(tx), **kwargs)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        """The state after one step."""
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)


def register(*classes: type[Value]) -> None:
    """Let ``flax.serialization`` (``to_bytes``, ``from_bytes``, ``to_state_dict``, ...) take values of these classes.

    A value is kept as its type and its components; a target of another type is refused.

    Raises:
      TypeError: for what is no class of values.
    """
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, Value)):
            raise TypeError(f"typax.flax.register takes classes of values, not {cls!r}")
        serialization.register_serialization_state(cls, _to_state, _from_state, override=True)


def _to_state(value: Any) -> dict[str, Any]:
    leaf = _tree.leaf_of(value, "", _tree.Names())
    assert leaf is not None
    stored = zip(leaf.arrays, leaf.type.lower_val(value), strict=True)
    return {"type": json.dumps(_describe.type_to_json(leaf.type))} | {kept.name: kept.stored(lo) for kept, lo in stored}


def _from_state(target: Any, state: Any) -> Any:
    ty = _jax.typeof(target)
    leaf = _tree.leaf_of(ty, "", _tree.Names())
    assert leaf is not None
    if not isinstance(state, dict) or state.get("type") != json.dumps(_describe.type_to_json(ty)):
        got = state.get("type") if isinstance(state, dict) else type(state).__name__
        raise TypeError(f"flax.serialization: the target is {ty}, but what was kept is {_shown(got)}")
    return _save.value_of(leaf, [kept.restored(np.asarray(state[kept.name])) for kept in leaf.arrays])


def _shown(told: Any) -> str:
    try:
        return str(_describe.type_from_json(json.loads(told)))
    except (ValueError, TypeError):
        return f"{told}, no value"
