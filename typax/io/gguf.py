"""GGUF files: ggml's blocks as values, as they are, and back, byte for byte.

    model = typax.io.load_gguf("model.gguf")         model.tensors: {name: q4_1[576,576], ...}   model.metadata: {key: ...}
    typax.io.save_gguf("again.gguf", model)          the same bytes

A tensor [rows, n] lies in a file as rows of blocks; none becomes a float here.  Sizes in the file are in reverse order.

Source: the GGUF specification in the repository ggml-org/ggml; read and written by the package gguf.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from typax import _jax
from typax._type import ValueType
from typax.io._disk import FileError, fail, let_go, replacing
from typax.io._save import chooser, own, placing, put
from typax.io._tree import Kept, Leaf, describe
from typax.quantized.ggml import BLOCKS, Ggml, of_blocks

PLAIN = {
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The tensor types that are arrays."""


@dataclass
class Gguf:
    """What is in a GGUF file.

    Attributes:
      tensors: arrays and values (`typax.quantized.Ggml`) by name, in the order of the file.
      metadata: the model's parameters, the tokenizer and so on: numbers, strings, bools and lists of them, by key.
      kinds: the GGUF types of the metadata, as the package gguf numbers them, in the order of the file; what is not in it is
        written as int32, float32, bool, string, or arrays of them.
    """

    tensors: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, tuple[int, ...]] = field(default_factory=dict)


def load_gguf(path: Any, *, sharding: Any = None, only: Any = None) -> Gguf:
    """Load a GGUF file. Needs the extra ``typax[io]``.

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
        gguf = _gguf()
        with _about(self.path):
            if self.path.stat().st_size < 24:
                fail(self.path, "is no GGUF file: it is shorter than a header")
            self._reader = gguf.GGUFReader(self.path)
            self._tensors = {t.name: t for t in self._reader.tensors}
            own = {k: f for k, f in self._reader.fields.items() if not k.startswith("GGUF.")}
            self.metadata = {k: f.contents() for k, f in own.items()}
            self.kinds = {k: tuple(int(t) for t in f.types) for k, f in own.items()}
        self._leaves = {n: self._leaf(n, t) for n, t in self._tensors.items()}
        last = max((t.data_offset + t.n_bytes for t in self._tensors.values()), default=0)
        if last > self.path.stat().st_size:
            fail(self.path, f"is cut off: its tensors take {last} bytes, and it has {self.path.stat().st_size}")

    def _leaf(self, name: str, t: Any) -> Leaf:
        kind = t.tensor_type.name
        shape = tuple(int(n) for n in reversed(t.shape))
        if kind in PLAIN:
            if t.data.nbytes != int(np.prod(shape, dtype=object)) * PLAIN[kind].itemsize:
                fail(self.path, f"its {t.data.nbytes} bytes are not those of {kind}{list(shape)}", name)
            return Leaf(name, jax.ShapeDtypeStruct(shape, PLAIN[kind]), (Kept(name, PLAIN[kind], shape),))
        if kind not in BLOCKS:
            fail(self.path, f"its type is {kind}, none of {', '.join([*PLAIN, *BLOCKS])}", name)
        block = BLOCKS[kind]
        if not shape or shape[-1] % block.values:
            fail(self.path, f"rows of {shape[-1:]} are no whole number of {kind} blocks of {block.values}", name)
        m = shape[-1] // block.values
        ty = Ggml.type(shape, "float32", kind=kind, values=block.values, m=m, size=block.bytes)
        return Leaf(name, ty, (Kept(name, np.dtype("u1"), (*shape[:-1], m, block.bytes)),))

    def leaves(self) -> dict[str, Any]:
        """The leaves by name."""
        return self._leaves

    def value(self, leaf: Leaf, place: Callable[[str, Any], Any] = lambda *_: None) -> Any:
        """An array, or a value of blocks."""
        t, ty = self._tensors[leaf.path], leaf.type
        raw = np.asarray(t.data)  # a view of the file, of which one copy is made
        if isinstance(ty, ValueType):
            block = BLOCKS[ty.static("kind")]
            blocks = jax.device_put(own(raw.reshape(*ty.shape[:-1], -1, block.bytes)))
            return put(of_blocks(blocks, ty.static("kind")), place, leaf.path)
        x = raw.reshape(-1).view(np.uint8).view(ty.dtype).reshape(ty.shape)
        wide = x.dtype.itemsize == 8 and not jax.config.jax_enable_x64
        return x.copy() if wide else put(jax.device_put(own(x)), place, leaf.path)

    def release(self, leaf: Leaf) -> None:
        """Let go of the memory that the file's part takes."""
        t = self._tensors[leaf.path]
        let_go(getattr(self._reader.data, "_mmap", None), int(t.data_offset), int(t.data_offset + t.n_bytes))

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
    gguf = _gguf()
    path = Path(path)
    whole = model if isinstance(model, Gguf) else Gguf(dict(model))
    told = {**whole.metadata, **(metadata or {})}
    if not isinstance(told.get("general.architecture"), str):
        raise ValueError(f"{path}: the metadata has no general.architecture, which every reader asks for")
    tensors = {n: _stored(n, x) for n, x in whole.tensors.items()}
    with replacing(path) as file:
        writer = gguf.GGUFWriter(None, "")
        writer.kv_data[0].clear()  # what the constructor puts there, in an order of its own
        for key, value in told.items():
            types = whole.kinds.get(key) or _types(gguf, key, value)
            if key == "general.alignment":
                writer.data_alignment = int(value)
            kinds = [gguf.GGUFValueType(t) for t in types]
            writer.add_key_value(key, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
        for name, (raw, kind) in tensors.items():
            if kind in BLOCKS or kind == "BF16":
                writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType[kind])
            else:
                writer.add_tensor(name, raw)
        writer.fout = [file]
        writer.state = gguf.gguf_writer.WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _stored(name: str, x: Any) -> tuple[np.ndarray, str]:
    ty = x._type if _jax.is_hi_value(x) else None
    if isinstance(x, Ggml):
        raw = np.asarray(x.blocks)
        return raw.reshape(*raw.shape[:-2], raw.shape[-2] * raw.shape[-1]), x.kind
    if ty is not None:
        raise TypeError(
            f"{name} is {ty}, which GGUF does not hold; make blocks: typax.quantized.quantize_ggml(dense, kind=...)"
        )
    raw = np.asarray(x)
    kind = next((k for k, d in PLAIN.items() if d == raw.dtype), None)
    if kind is None:
        raise TypeError(f"{name} is {raw.dtype}{list(raw.shape)}, and GGUF holds {', '.join(map(str, PLAIN.values()))}")
    return (raw.view(np.uint8).reshape(*raw.shape[:-1], -1) if kind == "BF16" else raw), kind


def _types(gguf: Any, key: str, value: Any) -> tuple[int, ...]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list | tuple):
        inner = {_types(gguf, key, v) for v in value}
        if len(inner) != 1:
            raise ValueError(f"{key}: an array of GGUF has entries of one type, and at least one")
        return (kinds.ARRAY, *inner.pop())
    for t, kind in ((bool, kinds.BOOL), (str, kinds.STRING), (float, kinds.FLOAT32)):
        if isinstance(value, t):
            return (kind,)
    if isinstance(value, int):
        return (kinds.INT32 if -(2**31) <= value < 2**31 else kinds.INT64,)
    raise ValueError(f"{key}: {value!r} is neither a number, a string, a bool, nor a list of these")


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError("GGUF files need the package gguf: pip install 'typax[io]'") from None
    return gguf


@contextlib.contextmanager
def _about(path: Path) -> Iterator[None]:
    try:
        with np.errstate(all="ignore"):
            yield
    except FileError:
        raise
    except OSError as e:
        raise FileError(f"{path}: {os.strerror(e.errno) if e.errno else e}") from None
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, AttributeError, MemoryError, RuntimeError) as e:
        fail(path, f"is no GGUF file, or damaged: {str(e).splitlines()[0] if str(e) else type(e).__name__}")
