"""GGUF files: ggml's blocks as values, as they are, and back, byte for byte.

    model = typax.io.load_gguf("model.gguf")         model.tensors: {name: q4_1[576,576], ...}   model.metadata: {key: ...}
    typax.io.save_gguf("again.gguf", model)          the same bytes

A tensor [rows, n] lies in a file as rows of blocks; none becomes a float here.  Sizes in the file are in reverse order.

Source: the GGUF specification in the repository ggml-org/ggml.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from typax import _jax
from typax._type import ValueType
from typax.io import _gguf
from typax.io._gguf import PLAIN, Reader
from typax.io._save import chooser, own, placing, put
from typax.io._tree import Kept, Leaf, describe
from typax.quantized.ggml import BLOCKS, Ggml, of_blocks, quantize_ggml


@dataclass
class Gguf:
    """What is in a GGUF file.

    Attributes:
      tensors: arrays and values (`typax.quantized.Ggml`) by name, in the order of the file.
      metadata: the model's parameters, the tokenizer and so on: numbers, strings, bools and lists of them, by key.
      kinds: the types of the metadata, as GGUF numbers them, for an array with those of its entries; what is not in it is
        written as int32 (or a wider one), float32, bool, string, or arrays of them.
    """

    tensors: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, tuple[int, ...]] = field(default_factory=dict)


def load_gguf(path: Any, *, sharding: Any = None, only: Any = None) -> Gguf:
    """Load a GGUF file.

    Args:
      path: the file.
      sharding, only: as for `typax.io.load`.

    Raises:
      FileError: if the file is damaged, or a tensor is of a type that is none of F32, F16, BF16, F64, I8 to I64, Q4_0, Q4_1,
        Q5_0, Q5_1, Q8_0, and Q2_K to Q6_K.
    """
    ck = GgufCheckpoint(path)
    wanted, place = chooser(only) if only is not None else lambda _: True, placing(sharding)
    chosen = {n: x for n, x in ck.leaves().items() if wanted(n)}
    return Gguf({n: ck.value(x, place) for n, x in chosen.items()}, ck.metadata, ck.kinds)


class GgufCheckpoint:
    """A GGUF file as `typax.io`'s checkpoints are: its leaves, and the value of each when it is asked for."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        self._reader = Reader(path)
        self.metadata, self.kinds = self._reader.metadata, self._reader.kinds
        self._leaves = {n: _leaf(n, type_of(e.kind, e.shape)) for n, e in self._reader.entries.items()}

    def leaves(self) -> dict[str, Any]:
        """The leaves by name."""
        return self._leaves

    def value(self, leaf: Leaf, place: Callable[[str, Any], Any] = lambda *_: None) -> Any:
        """An array, or a value of blocks."""
        raw, ty = self._reader[leaf.path], leaf.type  # a view of the file, of which one copy is made
        x = raw.view(leaf.arrays[0].dtype).reshape(leaf.arrays[0].shape)
        if isinstance(ty, ValueType):
            return put(of_blocks(jax.device_put(own(x)), ty.static("kind")), place, leaf.path)
        wide = x.dtype.itemsize == 8 and not jax.config.jax_enable_x64
        return x.copy() if wide else put(jax.device_put(own(x)), place, leaf.path)

    def release(self, leaf: Leaf) -> None:
        """Let go of the memory that the file's part takes."""
        self._reader.release(leaf.path)

    def retyped(self, types: Callable[[str, Leaf], Any]) -> tuple[Any, list[Leaf]]:
        """The description of a flat dict of leaves of other types, and these leaves."""
        told, new, _ = describe({n: types(n, x) for n, x in self._leaves.items()})
        return told, new

    def shown_metadata(self) -> dict[str, Any]:
        """The metadata, without long lists."""
        return {k: v if not isinstance(v, list) or len(v) <= 16 else f"{len(v)} entries" for k, v in self.metadata.items()}


def save_gguf(path: Any, model: Gguf | Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a GGUF file. What `load_gguf` gave is written back byte for byte.

    Args:
      path: the file; the old one stays until the new one is whole.
      model: a `Gguf`, or tensors by name: arrays, and values of blocks (`typax.quantized.quantize_ggml`).
      metadata: more of it, or all; ``general.architecture`` must be there.

    Raises:
      TypeError: if a tensor is neither an array of a type that GGUF has, nor a value of blocks.
      ValueError: if the metadata names no architecture, or holds what GGUF does not.
    """
    whole = model if isinstance(model, Gguf) else Gguf(dict(model))
    each = {n: x if isinstance(x, jax.Array) or _jax.is_hi_value(x) else np.asarray(x) for n, x in whole.tensors.items()}
    types = {n: x if isinstance(x, np.ndarray) else _jax.typeof(x) for n, x in each.items()}
    save_each(path, types, lambda n: each[n], {**whole.metadata, **(metadata or {})}, whole.kinds)


def save_each(
    path: Any,
    types: Mapping[str, Any],
    value: Callable[[str], Any],
    metadata: Mapping[str, Any],
    kinds: Mapping[str, tuple[int, ...]],
) -> None:
    """Write a GGUF file of tensors of these types, taking them one at a time, as ``value(name)``."""
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError(f"{path}: the metadata has no general.architecture, which every reader asks for")
    planned = {n: _kept(n, ty) for n, ty in types.items()}
    _gguf.write(path, metadata, kinds, planned, (_parts(value(n), kind) for n, (kind, _) in planned.items()))


def type_of(kind: str, shape: tuple[int, ...]) -> Any:
    """The type of a tensor of this type in the file."""
    if kind in PLAIN:
        return jax.ShapeDtypeStruct(shape, PLAIN[kind])
    block = BLOCKS[kind]
    m = shape[-1] // block.values
    return Ggml.type(shape, "float32", kind=kind, values=block.values, m=m, size=block.bytes)


def _leaf(name: str, ty: Any) -> Leaf:
    aval = ty.lo_ty()[0] if isinstance(ty, ValueType) else ty
    return Leaf(name, ty, (Kept(name, np.dtype(aval.dtype), tuple(aval.shape)),))


def _kept(name: str, ty: Any) -> tuple[str, tuple[int, ...]]:
    """The type and the shape in the file of a type."""
    if isinstance(ty, ValueType) and ty.decl.cls is Ggml:
        return ty.static("kind"), tuple(ty.shape)
    if _jax.is_hi(ty):
        raise TypeError(
            f"{name} is {ty}, which GGUF does not hold; make blocks: typax.quantized.quantize_ggml(dense, kind=...)"
        )
    kind = next((k for k, d in PLAIN.items() if d == ty.dtype), None)
    if kind is None:
        raise TypeError(f"{name} is {ty.dtype}{list(ty.shape)}, and GGUF holds {', '.join(map(str, PLAIN.values()))}")
    return kind, tuple(ty.shape)


PART = 2**25
"""Bytes of the rows that become blocks at a time."""


def _parts(x: Any, kind: str) -> Iterator[np.ndarray]:
    """The bytes of a tensor, in parts: of blocks, or of an array that becomes such."""
    if isinstance(x, Ggml):
        yield np.asarray(x.blocks)
    elif kind in PLAIN:
        yield np.asarray(x)
    else:
        rows = x.reshape(-1, x.shape[-1])
        step = max(1, PART // max(1, rows.shape[-1] * rows.dtype.itemsize))
        for i in range(0, rows.shape[0], step):
            yield np.asarray(quantize_ggml(rows[i : i + step], kind=kind).blocks)
