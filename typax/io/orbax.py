"""Trees of values in Orbax checkpoints: `save` and `load`, and `Save` and `Restore` for Orbax's own managers.

    typax.io.orbax.save(folder, params)              each component as it lies on its devices, from all processes
    typax.io.orbax.load(folder, sharding=...)        the same types and bits, on another mesh
    manager.save(step, args=Save(params));  manager.restore(step, args=Restore())

A checkpoint has one array for each component, under the names that `typax.io` gives them (``layers.0.w.qvalue``), and the
description of the tree and its types as Orbax's custom metadata, under ``typax``. Nothing in it is executed on reading.
What Orbax does not store is kept as what it does: keys of random numbers as their words, small numbers as bytes.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _describe, _jax
from typax._describe import show
from typax._paths import dotted
from typax._type import ValueType
from typax.io import _save, _tree
from typax.io._disk import FileError
from typax.io._tree import Kept, Leaf

try:
    import orbax.checkpoint as ocp
except ImportError as e:
    raise ImportError("typax.io.orbax needs Orbax: pip install 'typax[libraries]'") from e


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's standard handler, for trees with values: for ``ocp.Checkpointer(Handler())``; managers find it by `Save`."""

    async def async_save(self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None) -> Any:
        """Called by Orbax: write the components, and tell of their types."""
        told, leaves, found = _tree.describe(item if args is None else args.tree)
        arrays = {
            kept.name: _stored(kept, lo)
            for leaf, x in zip(leaves, found, strict=True)
            for kept, lo in zip(leaf.arrays, _los(leaf, x), strict=True)
        }
        arrays |= {} if arrays else {_EMPTY: np.zeros(1, np.uint8)}  # Orbax stores no empty trees
        meta: Any = {"typax": {"version": _tree.VERSION, "tree": told}}
        return await super().async_save(directory, args=ocp.args.StandardSave(arrays, custom_metadata=meta))

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Called by Orbax: read what `Save` wrote."""
        args = args if args is not None else Restore()
        try:
            metadata = self.metadata(directory).custom_metadata
        except FileNotFoundError as e:
            raise FileError(f"{directory}: no Orbax checkpoint: {e}") from None
        ck = _Checkpoint(directory, metadata)
        if args.like is not None:
            _save.into(ck, args.like, lambda x: x)  # says what does not fit, before anything is read
        leaves = [x for x in ck.leaves().values() if isinstance(x, Leaf)]
        place = _placing(ck, args.sharding, args.like)
        asked = {a.name: _asked(a, s) for x in leaves for a, s in zip(x.arrays, place(x), strict=True)}
        read = super().restore(directory, args=ocp.args.StandardRestore(asked)) if asked else {}

        def make(x: Any) -> Any:
            return _made(x, [_restored(a, read[a.name]) for a in x.arrays]) if isinstance(x, Leaf) else x

        if args.like is not None:
            return _save.into(ck, args.like, make)
        return _tree.rebuild(ck.tree, lambda _, x: make(x), lambda name, xs: _save.node(ck.path, name, xs))


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """What to save, for ``args=`` of Orbax: `tree` is one that `typax.io.save` takes; its arrays may span processes."""

    tree: Any


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """How to restore, for ``args=`` of Orbax: see `load`."""

    sharding: Any = None
    """Where to put the arrays."""
    like: Any = None
    """A tree of the same structure."""


def save(path: Any, tree: Any, *, force: bool = False) -> None:
    """Save a tree of arrays and values as an Orbax checkpoint, and wait until it is on disk.

    Args:
      path: the folder to make.
      tree: what `typax.io.save` takes; arrays may be sharded over several processes, each of which calls this.
      force: overwrite a checkpoint that is there.

    Raises:
      TypeError: if something in the tree cannot be kept.
      ValueError: if the folder exists.
    """
    with ocp.Checkpointer(Handler()) as checkpointer:
        checkpointer.save(Path(path).absolute(), args=Save(tree), force=force)


def load(path: Any, *, sharding: Any = None, like: Any = None) -> Any:
    """Load what `save` (or a manager, with `Save`) wrote: the same tree, with the same types and bits.

    Args:
      path: the folder of the checkpoint; of a manager's, that of the item.
      sharding: where to put the arrays: a device, a ``jax.sharding.Sharding`` of what each leaf stands for (whose components
        follow it), or a function of path and type that gives one of these, or ``None`` for the default device.
      like: a tree of the same structure, for one with nodes other than dicts, lists and tuples. Its leaves are arrays,
        values or types; their types are compared. Without `sharding`, arrays and values are put where these lie.

    Raises:
      FileError: if the folder is no such checkpoint, or holds other paths or types than `like`.
      TypeError: if the values cannot be sharded so.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise FileError(f"{path}: there is no such folder")
    with ocp.Checkpointer(Handler()) as checkpointer:
        return checkpointer.restore(path, args=Restore(sharding, like))


_EMPTY = "nothing"


class _Checkpoint(_save.Checkpoint):
    """What the metadata tells of a checkpoint."""

    def __init__(self, path: Any, metadata: Any) -> None:
        self.path = Path(str(path))
        if not isinstance(metadata, dict) or "typax" not in metadata:
            raise FileError(f"{path}: this Orbax checkpoint tells of no values; restore it with Orbax")
        self.tree = _save.told_in(self.path, {"typax": json.dumps(metadata["typax"])})


def _los(leaf: Leaf, x: Any) -> list[Any]:
    return leaf.type.lower_val(x) if isinstance(leaf.type, ValueType) else [x]


# --- one array --------------------------------------------------------------------------------------------------


def _is_small(kept: Kept) -> bool:
    """Whether Orbax does not store the dtype, which is one of at most a byte."""
    name = np.dtype(kept.dtype).name
    return np.dtype(kept.dtype).itemsize == 1 and name not in ("bool", "int8", "uint8")


def _stored(kept: Kept, x: Any) -> Any:
    if _tree.is_key(kept.dtype):
        return jax.random.key_data(x)
    if not _is_small(kept):
        return x
    return np.asarray(x).view(np.uint8) if isinstance(x, np.ndarray | np.generic) else _as_bytes(x)


@jax.jit
def _as_bytes(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, f"uint{_width(x.dtype)}").astype(jnp.uint8)


@functools.partial(jax.jit, static_argnums=1)
def _from_bytes(x: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(x.astype(f"uint{_width(dtype)}"), dtype)


def _width(dtype: Any) -> int:
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def _asked(kept: Kept, sharding: Any) -> Any:
    """What to ask Orbax for."""
    if _tree.is_key(kept.dtype):
        return jax.ShapeDtypeStruct(kept.planned.shape, kept.planned.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(kept.shape, np.uint8 if _is_small(kept) else kept.dtype, sharding=sharding)


def _restored(kept: Kept, x: Any) -> Any:
    """The array that is stored so."""
    if _tree.is_key(kept.dtype):
        return jax.random.wrap_key_data(x, impl=_describe.key_impl(kept.dtype))
    if not _is_small(kept):
        return x
    return kept.restored(x) if isinstance(x, np.ndarray) else _from_bytes(x, np.dtype(kept.dtype))


def _made(leaf: Leaf, los: list[Any]) -> Any:
    if isinstance(leaf.type, ValueType):
        return _save.over(leaf.type, los)
    return np.asarray(los[0])[()] if leaf.numpy else los[0]


# --- shardings --------------------------------------------------------------------------------------------------


def _placing(ck: _Checkpoint, sharding: Any, like: Any) -> Callable[[Leaf], list[Any]]:
    """Where to put each array of a leaf."""
    asked = _save.placing(sharding)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    lying = {}
    if like is not None and sharding is None:
        paths, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_type)
        lying = {dotted(k): x for k, x in paths}

    def place(leaf: Leaf) -> list[Any]:
        ty = leaf.type
        if leaf.numpy:
            return [None]
        if (own := _where(lying.get(leaf.path))) is not None and len(own) == len(leaf.arrays):
            return own
        to = asked(leaf.path, ty)
        if isinstance(to, jax.Device):
            to = jax.sharding.SingleDeviceSharding(to)
        shardings = [to if to is not None else default] * len(leaf.arrays)
        if isinstance(ty, ValueType) and to is not None:
            shardings = _save.targets(ty, to)
        for kept, s in zip(leaf.arrays, shardings, strict=True):
            try:
                s.shard_shape(kept.shape)
            except ValueError as e:
                raise TypeError(f"{leaf.path}: {show(ty)} cannot be put as {to}: {kept.name}: {e}") from None
        return shardings

    return place


def _is_type(x: Any) -> bool:
    return isinstance(x, ValueType | _jax.ShapedArray)


def _where(x: Any) -> list[Any] | None:
    """The shardings of the arrays of a value, an array, or of one of that type on the mesh in force."""
    if isinstance(x, ValueType):
        mesh = jax.sharding.get_mesh()
        explicit = [not _jax.mesh_of(a).empty for a in x.lo_ty()]
        if not any(explicit):
            return None
        return [jax.sharding.NamedSharding(mesh, jax.P(*_jax.partition(a))) for a in x.lo_ty()]
    if _jax.is_hi_value(x):
        return [lo.sharding for lo in _jax.typeof(x).lower_val(x)]
    sharding = getattr(x, "sharding", None)
    return None if sharding is None or isinstance(x, _jax.ShapedArray) else [sharding]
