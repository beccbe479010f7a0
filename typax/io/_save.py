"""Trees of values in safetensors files: `save` and `load`.

    typax.io.save("model.safetensors", params)          one file
    typax.io.save("folder", params, shard_bytes=2**31)  model-…-00001-of-00003.safetensors, …, and an index
    typax.io.load("model.safetensors")                  the same tree, with the same types and bits

The tensors are ordinary ones under readable names, which any reader of the format finds; what they mean together stands in
the header's metadata under ``typax``, with the SHA-256 of each.  A file that typax did not write gives a flat dict.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from typax import _describe, _jax
from typax._describe import show
from typax._paths import dotted, matches
from typax._placement import device_put
from typax._type import ValueType
from typax.io import _tree
from typax.io._disk import FileError, fail, opened, replacing, shown
from typax.io._safetensors import DIGESTS, MAX_HEADER, Reader, parsed, sha256, write
from typax.io._tree import Kept, Leaf

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
PICKLE = "is a pickle, which could run anything: convert it to safetensors where it came from"


def save(path: Any, tree: Any, *, shard_bytes: int | None = None) -> None:
    """Save a tree of arrays and values.

    Args:
      path: the file; with ``shard_bytes``, a folder.
      tree: any tree of dicts, lists, tuples, named tuples, ``None``, numbers, strings, arrays and values. Of other nodes
        only the children are kept: load such a tree with ``like``.
      shard_bytes: write several files of about this many bytes, with an index.

    The old file stays as it is until the new one is whole.

    Raises:
      TypeError: if something in the tree cannot be kept.
      ValueError: if an array is spread over several processes, or the tree holds itself.
      FileError: if the file cannot be written there.
    """
    told, leaves, found = _tree.describe(tree)
    for leaf, x in zip(leaves, found, strict=True):
        if isinstance(x, ValueType | _jax.ShapedArray | jax.ShapeDtypeStruct):
            raise TypeError(f"{leaf.path or 'the tree'}: {show(leaf.type)} is a type, and what is saved has values")
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise ValueError(f"shard_bytes is {shard_bytes!r}, no number of bytes")
    save_leaves(path, told, leaves, lambda i: found[i], shard_bytes=shard_bytes)


def save_leaves(
    path: Any, told: Any, leaves: Sequence[Leaf], value: Callable[[int], Any], *, shard_bytes: int | None = None
) -> None:
    """Save what `describe` told of a tree, taking its leaves one at a time, as ``value(i)``."""

    def arrays(part: Iterable[int]) -> Iterator[np.ndarray]:
        for i in part:
            for kept, x in zip(leaves[i].arrays, _los(leaves[i], value(i)), strict=True):
                yield kept.stored(x)

    def planned(part: Iterable[int]) -> dict[str, Any]:
        return {a.name: a.planned for i in part for a in leaves[i].arrays}

    meta = {"typax": json.dumps({"version": _tree.VERSION, "tree": told}, separators=(",", ":"))}
    everything = range(len(leaves))
    if shard_bytes is None:
        write(path, planned(everything), arrays(everything), meta)
        return
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise FileError(f"{shown(folder)}: cannot be made a folder: {e.strerror or e}") from None
    parts = _parts(leaves, shard_bytes)
    tag = secrets.token_hex(4)  # an index never speaks of files of two kinds, whenever writing is interrupted
    files = [f"model-{tag}-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    old = set(_index_files(folder / INDEX)) if (folder / INDEX).exists() else set()
    digests = {}
    try:
        for name, part in zip(files, parts, strict=True):
            digests[name] = write(folder / name, planned(part), arrays(part), {})
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise
    total = sum(leaf.nbytes for leaf in leaves)
    where = {a.name: name for name, part in zip(files, parts, strict=True) for i in part for a in leaves[i].arrays}
    known = {"total_size": total, **meta}
    known[DIGESTS] = json.dumps({"": _index_digest(where, known), **digests})
    with replacing(folder / INDEX) as file:
        file.write(json.dumps({"metadata": known, "weight_map": where}, indent=1).encode())
    for name in old - set(files):
        (folder / name).unlink(missing_ok=True)


def _parts(leaves: Sequence[Leaf], shard_bytes: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    size = 0
    for i, leaf in enumerate(leaves):
        n = leaf.nbytes
        if size and size + n > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(i)
        size += n
    return parts


def _los(leaf: Leaf, x: Any) -> list[Any]:
    los = leaf.type.lower_val(x) if isinstance(leaf.type, ValueType) else [x]
    if any(isinstance(v, jax.Array) and not v.is_fully_addressable for v in los):
        raise ValueError(f"{leaf.path}: {leaf.type} is spread over several processes; gather it first, or save it by Orbax")
    return los


# --- load -----------------------------------------------------------------------------------------------------


class Checkpoint:
    """The tensors of a file, or of the files that an index names. ``tree`` is what typax told of them, or ``None``.

    ``absent`` tells of tensors in which files there are none, where that is allowed, for a ``part`` of them.

    Raises:
      FileError: if a file is not what it should be.
    """

    def __init__(self, path: Any, part: bool = False) -> None:
        path = Path(path)
        self.path = path = _in_folder(path) if path.is_dir() else path
        self.absent: dict[str, str] = {}
        if path.suffix == ".json":
            where, meta = _index(path)
            files = [name for name in sorted(set(where.values())) if not part or (path.parent / name).exists()]
            readers = {name: Reader(path.parent / name) for name in files}
            self.absent = {tensor: name for tensor, name in where.items() if name not in readers}
            for tensor, name in where.items():
                if name in readers and tensor not in readers[name].entries:
                    fail(path, f"it is said to be in {name}, which does not have it", tensor)
            _check_digests(path, where, meta, readers)
            self.readers = {tensor: readers[name] for tensor, name in where.items() if name in readers}
        else:
            reader = Reader(path)
            self.readers, meta = dict.fromkeys(reader.entries, reader), reader.metadata
        self.metadata = meta
        self.tree = told_in(path, meta)
        if self.tree is not None and DIGESTS not in meta:
            fail(path, f"its header tells of typax's values, but has no {DIGESTS}")

    def array(self, kept: Kept) -> np.ndarray:
        """An array, as a view of the file or unpacked."""
        self.present(kept.name)
        if (reader := self.readers.get(kept.name)) is None:
            fail(self.path, "there is no such tensor in it", kept.name)
        e, want = reader.entries[kept.name], kept.planned
        if (e.dtype, e.shape) != (want.dtype, want.shape):
            fail(self.path, f"it is {e.dtype}{list(e.shape)} where {want.dtype}{list(want.shape)} is told of", kept.name)
        return kept.restored(reader[kept.name])

    def present(self, name: str) -> None:
        if name in self.absent:
            fail(self.path, f"it is in {self.absent[name]}, which is not there", name)

    def value(self, leaf: Leaf, place: Callable[[str, Any], Any] = lambda *_: None) -> Any:
        """An array or a value, on the devices that ``place`` gives."""
        return _made(self, leaf, place)

    def release(self, leaf: Leaf) -> None:
        """Let go of the memory that the file's part takes."""
        for kept in leaf.arrays:
            self.readers[kept.name].release(kept.name)

    def retyped(self, types: Callable[[str, Leaf], Any]) -> tuple[Any, list[Leaf]]:
        """The description of the same tree with leaves of other types, and these leaves."""
        leaves = self.leaves()
        if self.tree is not None:
            return _tree.retyped(self.tree, types)
        told, new, _ = _tree.describe({p: types(p, x) for p, x in leaves.items()})
        return told, new

    def shown_metadata(self) -> dict[str, Any]:
        """What the header says beside what is typax's own."""
        return {k: v for k, v in self.metadata.items() if not k.startswith("typax")}

    def leaves(self) -> dict[str, Any]:
        """The leaves by their paths: a `Leaf` for arrays and values, or the number, string or ``None`` itself."""
        found, names = {}, _tree.Names()

        def see(path: str, x: Any) -> None:
            found[names.new(path) if path else path] = x

        if self.tree is None:
            for name, reader in self.readers.items():
                e = reader.entries[name]
                see(name, Leaf(name, jax.ShapeDtypeStruct(e.shape, e.dtype), (Kept(name, e.dtype, e.shape),)))
        else:
            with _about(self.path):
                _tree.rebuild(self.tree, see, lambda *_: None)
        return found


def load(path: Any, *, sharding: Any = None, only: Any = None, like: Any = None) -> Any:
    """Load what `save` wrote: the same tree, with the same types and bits.

    Args:
      path: a file, an index, or a folder with an index or one file, as Hugging Face lays them out.
      sharding: where to put the arrays: a device, a ``jax.sharding.Sharding`` of what each leaf stands for (whose components
        follow it), ``None``, a tree of these, as deep as they differ, or a function of path and type that gives one.
      only: load a part: a pattern, several, or a predicate on paths. ``"layers.0"`` has all that is below it, ``*`` stands
        for anything. The result is a flat dict by path. Files of an index in which none of it is need not be there.
      like: a tree of the same structure, for a file with nodes other than dicts, lists and tuples; its leaves may be arrays,
        values or types, whose types are then compared.

    Returns:
      the tree; a flat dict of arrays by name if typax did not write the file.

    Raises:
      FileError: if the file is damaged, of a later version, or holds other paths or types than those asked for.
      TypeError: if the values cannot be sharded so.
    """
    ck = Checkpoint(path, part=only is not None)
    place = placing(sharding)

    def make(x: Any) -> Any:
        return ck.value(x, place) if isinstance(x, Leaf) else x

    if only is not None:
        return flat(ck, only, place)
    if like is not None:
        return into(ck, like, make)
    if ck.tree is None:
        return flat(ck, None, place)
    ck.leaves()  # what is no description is found out here
    return _tree.rebuild(ck.tree, lambda _, x: make(x), lambda name, xs: node(ck.path, name, xs))


def flat(ck: Any, only: Any, place: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What ``only`` chooses of a checkpoint, by path; all of it if that is ``None``."""
    wanted = chooser(only) if only is not None else lambda _: True
    for name in ck.absent if ck.tree is None else ():
        if wanted(name):
            ck.present(name)
    chosen = {p: x for p, x in ck.leaves().items() if wanted(p)}
    if not chosen and only is not None:
        some = ", ".join(list(ck.leaves())[:5])
        raise FileError(f"{ck.path}: no path is chosen by {only!r}; it has {some}, …")
    out = {}
    for p, x in chosen.items():
        out[p] = ck.value(x, place) if isinstance(x, Leaf) else x
        if isinstance(x, Leaf):
            ck.release(x)
    return out


def node(path: Path, name: str, children: list[Any]) -> Any:
    kind, _, name = name.partition(" ")
    if kind == "namedtuple":
        try:
            found = _describe.find_global(name)
        except ValueError as e:
            fail(path, str(e))
        fields = getattr(found, "_fields", None)
        if isinstance(found, type) and issubclass(found, tuple) and fields is not None and len(fields) == len(children):
            return found._make(children)  # type: ignore[attr-defined]
    fail(path, f"it has a {name} in its tree, which only load(path, like=tree) can make, of a tree that has one too")


def into(ck: Checkpoint, like: Any, make: Callable[[Any], Any]) -> Any:
    """The leaves of a checkpoint in the structure of another tree."""
    have = {p: x for p, x in ck.leaves().items() if x is not None}
    is_type = lambda x: isinstance(x, ValueType | _jax.ShapedArray)
    paths, tree = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_type)
    want = {dotted(k): x for k, x in paths}
    if len(want) < len(paths) or any("~" in p for p in have):
        fail(ck.path, "two of its leaves have the same path, so that they cannot be told apart in `like`")
    if missing := [p for p in want if p not in have]:
        fail(ck.path, f"it has no {missing[0]!r}, which `like` has" + _and_more(missing))
    if extra := [p for p in have if p not in want]:
        fail(ck.path, f"it has {extra[0]!r}, which `like` has not" + _and_more(extra))
    for p, x in want.items():
        asked = _tree.leaf_of(x, p, _tree.Names())
        if asked is None:
            continue
        got = have[p].type if isinstance(have[p], Leaf) else have[p]
        if not _same_type(got, asked.type):
            fail(ck.path, f"{p} is {show(got)}, where `like` has {show(asked.type)}")
    return tree.unflatten([make(have[p]) for p in want])


def _same_type(a: Any, b: Any) -> bool:
    if isinstance(a, ValueType) and isinstance(b, ValueType):
        return _describe.type_to_json(a) == _describe.type_to_json(b)  # wherever they are
    arrays = hasattr(a, "dtype") and not isinstance(a, ValueType) and not isinstance(b, ValueType)
    return arrays and (a.shape, a.dtype) == (b.shape, b.dtype)


def _and_more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} more such" if len(names) > 1 else ""


def chooser(only: Any) -> Callable[[str], bool]:
    """The predicate on paths of a pattern, of several, or itself."""
    if callable(only):
        return lambda p: bool(only(p))
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, list | tuple | set | frozenset) or not all(isinstance(x, str) for x in patterns):
        raise TypeError(f"only is {only!r}, neither a pattern, several, nor a predicate on paths")
    return lambda p: any(matches(x, p) for x in patterns)


# --- arrays on devices ------------------------------------------------------------------------------------------


def _made(ck: Checkpoint, leaf: Leaf, place: Callable[[str, Any], Any]) -> Any:
    ty = leaf.type
    views = [ck.array(a) for a in leaf.arrays]
    if leaf.numpy:
        return views[0].copy() if ty.shape else views[0].copy()[()]
    to = place(leaf.path, ty)
    if not isinstance(ty, ValueType):
        return _on_device(views[0], leaf, leaf.arrays[0], to)
    if any(np.dtype(a.planned.dtype).itemsize == 8 for a in leaf.arrays) and not jax.config.jax_enable_x64:
        fail(ck.path, f"{ty} has components of 64 bits: set jax_enable_x64 to load it", leaf.arrays[0].name)
    return value_of(leaf, views, to)


def value_of(leaf: Leaf, views: Sequence[np.ndarray], to: Any = None) -> Any:
    """The value of a leaf over these components, as NumPy has them; what it stands for goes to ``to``."""
    each = zip(views, leaf.arrays, targets(leaf.type, to), strict=True)
    return over(leaf.type, [_on_device(v, leaf, a, t) for v, a, t in each])


def targets(ty: ValueType, to: Any) -> list[Any]:
    """Where the arrays of a value go, if what it stands for goes there."""
    if not isinstance(to, jax.sharding.NamedSharding):
        return [to] * len(ty.lo_ty())
    spec, mesh = ty.partition_spec(to)
    return [jax.sharding.NamedSharding(mesh, s) for s in spec.to_lo()]


def over(ty: ValueType, los: Sequence[Any]) -> Any:
    """A value of this type over these arrays, wherever they lie."""
    return ty.with_los([_jax.typeof(x) for x in los]).check().open_val(*los)


def _on_device(view: np.ndarray, leaf: Leaf, kept: Kept, to: Any) -> Any:
    """An array that owns its memory, from a view of a file."""
    if _tree.is_key(kept.dtype):
        key = jax.random.wrap_key_data(jnp.array(view), impl=_describe.key_impl(kept.dtype))
        return key if to is None else jax.device_put(key, to)
    if view.dtype.itemsize >= 8 and jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
        return view.copy()  # 64 bits, which JAX does not hold: NumPy does
    if isinstance(to, jax.sharding.NamedSharding) and to.num_devices > 1:
        try:
            return jax.make_array_from_callback(view.shape, to, lambda i: np.array(view[i]))
        except (ValueError, IndexError) as e:
            why = f"{to.spec} is of more axes than {view.ndim}" if len(to.spec) > view.ndim else str(e).splitlines()[0]
            raise TypeError(f"{leaf.path}: {show(leaf.type)} cannot be put as {to.spec}: {why}") from None
    return jax.device_put(own(view), to)


def own(view: np.ndarray) -> np.ndarray:
    """A copy where JAX takes arrays as they are, on a border of 64 bytes: elsewhere it would make another."""
    raw = np.empty(view.nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    copy = raw[at : at + view.nbytes].view(view.dtype).reshape(view.shape)
    copy[...] = view
    return copy


def put(x: Any, place: Callable[[str, Any], Any], path: str) -> Any:
    """An array or a value, moved to where ``place`` has it."""
    if isinstance(x, np.ndarray) or (to := place(path, _jax.typeof(x))) is None:
        return x
    return device_put(x, to)


def placing(sharding: Any) -> Callable[[str, Any], Any]:
    """The function of path and type that a sharding, a device, a tree of these, or such a function stands for."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding | jax.Device):
        return lambda *_: sharding
    if callable(sharding):
        return sharding
    last = lambda x: x is None or isinstance(x, jax.sharding.Sharding | jax.Device)
    found = {dotted(k): x for k, x in jax.tree_util.tree_flatten_with_path(sharding, is_leaf=last)[0]}
    if wrong := [x for x in found.values() if not last(x)]:
        raise TypeError(
            "sharding must be a device, a jax.sharding.Sharding, a tree of these, or a function of path and type, "
            f"not {wrong[0]!r}"
        )

    def place(path: str, _: Any) -> Any:
        names = path.split(".")
        for n in range(len(names), 0, -1):
            if (above := ".".join(names[:n])) in found:
                return found[above]
        raise TypeError(f"{path}: the tree of shardings has nothing for it; None stands for the default device")

    return place


# --- headers and indices ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _about(path: Path) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except (ValueError, TypeError, RecursionError) as e:
        fail(path, str(e) or "its description is nested too deeply")


def told_in(path: Path, meta: Mapping[str, Any]) -> Any:
    if (text := meta.get("typax")) is None:
        return None
    with _about(path):
        told = json.loads(text)
    if not isinstance(told, dict) or type(told.get("version")) is not int or "tree" not in told:
        fail(path, "what it says of its tree has no version or no tree")
    if told["version"] > _tree.VERSION:
        fail(path, f"it is of version {told['version']} of the layout, and this typax reads {_tree.VERSION}; update typax")
    return told["tree"]


def _index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    with opened(path) as file:
        if (size := file.seek(0, 2)) > MAX_HEADER:
            fail(path, f"an index of {size} bytes is no index")
        file.seek(0)
        told = parsed(path, file.read(), "the index")
    where = told.get("weight_map") if isinstance(told, dict) else None
    meta = told.get("metadata", {}) if isinstance(told, dict) else {}
    if not isinstance(where, dict) or not isinstance(meta, dict):
        fail(path, "it has no weight_map of tensors to files")
    for tensor, name in where.items():
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0", ":"}:
            fail(path, f"it is said to be in {name!r}, which is no file of the same folder", tensor)
        if not name.endswith(".safetensors"):
            fail(path, f"it is said to be in {name!r}, which is no .safetensors file", tensor)
    return where, meta


def _index_digest(where: Mapping[str, str], meta: Mapping[str, Any]) -> str:
    """The SHA-256 of what an index says."""
    return sha256(json.dumps([where, {k: v for k, v in meta.items() if k != DIGESTS}], sort_keys=True).encode())


def _check_digests(path: Path, where: Mapping[str, str], meta: Mapping[str, Any], readers: Mapping[str, Reader]) -> None:
    """That an index, and the files that it names, are those that were written."""
    if (text := meta.get(DIGESTS)) is None:
        if part := [name for name, r in readers.items() if DIGESTS in r.metadata and "typax" not in r.metadata]:
            fail(path, f"it has no {DIGESTS}, with which {part[0]} was written")
        return
    with _about(path):
        found = json.loads(text)
    if not isinstance(found, dict) or found.get("") != _index_digest(where, meta):
        fail(path, "it is not what was written (its SHA-256 differs)")
    for name, reader in readers.items():
        if found.get(name) != reader.digest:
            fail(path, f"{name} is not the file that was written with it (its SHA-256 differs)")


def _in_folder(folder: Path) -> Path:
    """The index or the file in a folder."""
    for name in (INDEX, ONE):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob("*.safetensors.index.json")) or sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        fail(folder, f"has several, {found[0].name} and {found[1].name}, and no {INDEX} to say which: name one of them")
    if not found:
        others = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".gguf", *PICKLES))
        told = "is to be named itself" if others and others[0].suffix.lower() == ".gguf" else PICKLE
        fail(folder, "has no safetensors file" + (f", but {others[0].name}, which {told}" if others else ""))
    return found[0]


def _index_files(path: Path) -> list[str]:
    try:
        return list(_index(path)[0].values())
    except FileError:
        return []
