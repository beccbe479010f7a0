"""Training a tree of parameters in which some leaves are values, with optimizers that know arrays only.

    what a leaf is            its gradient      what the optimizer sees        its update
    an array                  an array          both as they are               an array, added
    dense tangents            an array          gradient, dense(value)         retract(value, update)
    componentwise tangents    a record          a tuple of arrays each         a record: each component moved
    tangents of its class     a value           dense(gradient), dense(value)  a value: from_dense(sum)
    no tangents; no array     nothing           nothing: no state              None: left as it is

An optimizer (``init``, ``update``, as those of Optax) lives on the tangent space: its state and its updates are tangents.
Where it reads parameters (a weight decay, Lookahead, a trust ratio) it has to be shown what they stand for.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _jax
from typax._policies import retract
from typax._prim import close_all, has_tangent
from typax._structural import by_components, dense, is_value, moving, open_tangent, operands

keystr = jax.tree_util.keystr


def tangent_zeros(tree: Any) -> Any:
    """The zero tangent of each leaf of a tree: zeros like an array, and for a value the zero of its tangent type.

    With dense tangents these are arrays of the shape that the value stands for, on which an optimizer can start,
    ``tx.init(typax.tangent_zeros(params))``.  What has no tangents (integers, values of a class with ``tangent="none"``) has
    zeros of dtype float0, as its gradient.  A leaf that is neither an array nor a value, such as a function, is returned
    as it is.

    Raises:
      TypeError: for a leaf whose tangent type has no zero.
    """
    return jax.tree.map(lambda x: _zero(x) if is_value(x) else x, tree)


def _zero(x: Any) -> Any:
    ty = _jax.typeof(x)
    if not has_tangent(ty):
        return np.zeros(ty.to_tangent_aval().shape, _jax.float0)
    return _jax.zeros(ty.to_tangent_aval()) if _jax.is_hi(ty) else jnp.zeros_like(x)


def apply_updates(params: Any, updates: Any) -> Any:
    """Move each leaf by its update (`typax.retract`): what ``optax.apply_updates`` does, for values too.

    An update of ``None`` leaves a leaf as it is, whatever that is.

    Raises:
      TypeError: if an update is no tangent of its leaf, or its type cannot be moved; the message says where in the tree.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    moved = []
    for (path, p), u in zip(leaves, tree.flatten_up_to(updates), strict=True):
        try:
            moved.append(p if u is None else retract(p, u))
        except TypeError as e:
            raise TypeError(f"typax.apply_updates: params{keystr(path)}: {e}; an update of None leaves it as it is") from e
    return tree.unflatten(moved)


def optimizer(tx: Any, trainable: Any = True) -> Any:
    """An optimizer of trees of arrays (an ``optax.GradientTransformation``) as one of trees with values.

    ``init(params)``, ``update(grads, state, params, **extra)`` as before; ``params`` has to be given.  The state consists of
    arrays, the updates are tangents of the leaves, for `typax.apply_updates`.  Where ``tx`` reads parameters it sees what
    they stand for (`typax.dense`; of a value with componentwise tangents a tuple with what each component stands for).
    Leaves that have no tangents, or are no arrays, it does not see.

    Args:
      tx: the optimizer.
      trainable: which leaves move: a tree of booleans, or a prefix of one, or a function that makes it of the parameters.
        The others are frozen: they have no state, their gradients are not read, and their updates are ``None``.

    Returns:
      An optimizer of the class of ``tx``, so that it can be chained and masked on.

    Raises:
      TypeError: if ``tx`` is no pair of functions; in ``update``, if ``params`` are missing, or a gradient is, or is not one
        of its leaf.
    """
    if not hasattr(tx, "_replace"):
        raise TypeError(
            f"typax.optimizer takes an optax.GradientTransformation, not {type(tx).__name__}; an optax.MultiSteps has one, "
            "its gradient_transformation()"
        )

    def init(params: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        return tx.init(tree.unflatten([_view(x) if t else None for x, t in zip(leaves, flags(params), strict=True)]))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise TypeError(
                "typax.optimizer: update(grads, state, params) needs the parameters, whose types say what a gradient is"
            )
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        views, grads = [], []
        for (path, x), g, t in zip(leaves, tree.flatten_up_to(updates), flags(params), strict=True):
            views.append(_view(x) if t else None)
            grads.append(_opened(f"params{keystr(path)}", x, g) if t else None)
        new, state = tx.update(tree.unflatten(grads), state, tree.unflatten(views), **extra)
        pairs = zip(leaves, tree.flatten_up_to(new), strict=True)
        return tree.unflatten([None if u is None else _closed(x, u) for (_, x), u in pairs]), state

    def flags(params: Any) -> list[bool]:
        given = trainable(params) if callable(trainable) else trainable
        return jax.tree.leaves(jax.tree.broadcast(given, params))

    return tx._replace(init=init, update=update)


def _type(x: Any) -> Any:
    """The type of a leaf that can be trained, else ``None``. A Python number is a setting, not a parameter."""
    try:
        ty = None if isinstance(x, bool | int | float | complex) else _jax.typeof(x)
    except TypeError:
        return None
    return ty if ty is not None and has_tangent(ty) else None


def _view(x: Any) -> Any:
    """What an optimizer sees of a leaf: nothing, an array, or a tuple of arrays."""
    if (ty := _type(x)) is None:
        return None
    return _shown(ty, [dense(v) for v, m in zip(operands(ty, x), moving(ty), strict=True) if m])


def _shown(ty: Any, arrays: list[Any]) -> Any:
    return tuple(arrays) if by_components(ty) else arrays[0]


def _opened(where: str, x: Any, grad: Any) -> Any:
    """What an optimizer sees of a gradient."""
    if (ty := _type(x)) is None:
        if grad is None or getattr(grad, "dtype", None) == _jax.float0:
            return None
        raise TypeError(f"typax.optimizer: there is a gradient for {where}, which is {x!r} and no floating array")
    if grad is None:
        raise TypeError(f"typax.optimizer: there is no gradient for {where}, of type {ty}; freeze it, trainable=...")
    want, got = (ty.to_ct_aval(), ty.to_tangent_aval()), _jax.typeof(grad)
    arrays = not any(map(_jax.is_hi, (*want, got)))
    if not (want[0].shape == got.shape if arrays else got in want):
        raise TypeError(f"typax.optimizer: gradients of {where}, of type {ty}, are of type {want[0]}, not {got}")
    return _shown(ty, open_tangent(ty, grad))


def _closed(x: Any, update: Any) -> Any:
    """An update that the optimizer made, as a tangent of its leaf."""
    (tangent,) = close_all([_type(x)], update if isinstance(update, tuple) else [update])
    return tangent
