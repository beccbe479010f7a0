"""The GGUF format: metadata, what is told of every tensor, then their bytes.

    "GGUF" | version u32 | tensors u64 | entries u64 | entries: key, type u32, value
           | tensors: name, axes u32, sizes u64 each, the last first, type u32, offset u64 | padding | bytes, each padded

    a string: length u64, UTF-8        an array: type u32, length u64, the values        all of it little-endian

Offsets count from the start of the bytes, in steps of ``general.alignment`` (32).  A header is checked whole before any
tensor is touched; tensors are views of the mapped file.  Writing takes the tensors one at a time.

Source: the GGUF specification in the repository ggml-org/ggml.
"""

import math
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from typax._describe import brief
from typax.io._disk import fail, let_go, opened, replacing
from typax.quantized.ggml import BLOCKS

PLAIN = {
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
}
"""The tensor types that are arrays."""

KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""The names of all tensor types, by their numbers."""

NUMBERS = {v: k for k, v in KINDS.items()}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of metadata that are numbers or bools, as `struct` has them."""
INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64 = 5, 6, 7, 8, 9, 10, 11
NAMED = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array", "uint64", "int64",
    "float64",
)  # fmt: skip
AXES = 4
"""How many a tensor may have."""
DEPTH = 8
"""How deep arrays of metadata may be nested."""
ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor: its type, its shape, and where its bytes lie in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Reader:
    """A GGUF file, mapped: ``reader.metadata``, the types of it, ``reader.entries``, and ``reader[name]``, bytes.

    Raises:
      FileError: if it is no GGUF file, or its header does not fit the file.
    """

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        with opened(self.path) as file:
            if (size := file.seek(0, 2)) < 24:
                fail(self.path, f"is no GGUF file: {size} bytes are less than a header takes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self.path, self._map)
        self.metadata, self.kinds, self.entries = header.read()

    def __getitem__(self, name: str) -> np.ndarray:
        """The bytes of a tensor, as a read-only view of the file."""
        e = self.entries[name]
        n = e.stop - e.start
        return np.frombuffer(self._map, np.uint8, n, e.start) if n else np.empty(0, np.uint8)

    def release(self, name: str) -> None:
        """Let go of the memory that a tensor's part of the map takes; it is read again when it is used again."""
        e = self.entries[name]
        let_go(self._map, e.start, e.stop)


class _Header:
    """A place in a file, which is never left, and what is being read there."""

    def __init__(self, path: Path, raw: Any) -> None:
        self.path, self.raw, self.at, self.doing = path, raw, 0, "its header"

    def fail(self, what: str, tensor: str | None = None) -> NoReturn:
        fail(self.path, what, tensor)

    def take(self, n: int) -> bytes:
        if n > len(self.raw) - self.at:
            fail(self.path, f"is cut off or damaged: {self.doing} would take {n} bytes at {self.at} of {len(self.raw)}")
        self.at += n
        return self.raw[self.at - n : self.at]

    def number(self, code: str = "I") -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def name(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            fail(self.path, f"{self.doing} has a name that is no UTF-8")

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, Entry]]:
        if (magic := self.take(4)) != b"GGUF":
            fail(self.path, f"is no GGUF file: it begins with {magic!r}")
        version = self.number()
        if version not in (2, 3):
            odd = " (is it big-endian?)" if not version % 2**16 else ""
            fail(self.path, f"is of version {version} of GGUF{odd}, and 2 and 3 are read")
        tensors, entries = self.number("Q"), self.number("Q")
        metadata, kinds = {}, {}
        for i in range(entries):  # as many as there may be: the end of the file ends it
            self.doing = f"entry {i} of its metadata"
            key = self.name()
            if key in metadata:
                fail(self.path, f"its metadata has {key!r} twice")
            self.doing = f"its metadata {key!r}"
            kinds[key], metadata[key] = self.value(self.number(), 0)
        return metadata, kinds, self.told(tensors, self.alignment(metadata, kinds))

    def alignment(self, metadata: Mapping[str, Any], kinds: Mapping[str, tuple[int, ...]]) -> int:
        n = metadata.get(ALIGNMENT, 32)
        if kinds.get(ALIGNMENT, (4,)) != (4,) or n == 0 or n & (n - 1):
            fail(self.path, f"its {ALIGNMENT} is {n!r}, no uint32 that is a power of two")
        return n

    def value(self, kind: int, depth: int) -> tuple[tuple[int, ...], Any]:
        """A value of metadata, and its types."""
        if kind == STRING:  # of tokens, some writers cut characters apart
            return (kind,), self.take(self.number("Q")).decode("utf-8", "surrogateescape")
        if kind in SCALARS:
            (x,) = self.scalars(kind, 1)
            return (kind,), x
        if kind != ARRAY or depth == DEPTH:
            fail(self.path, f"{self.doing} is of type {kind}" if kind != ARRAY else f"{self.doing} is nested too deeply")
        inner, n = self.number(), self.number("Q")
        if inner in SCALARS:
            return (kind, inner), self.scalars(inner, n)
        least = 8 if inner == STRING else 12
        if n * least > len(self.raw) - self.at:
            fail(self.path, f"is cut off or damaged: {self.doing} has {n} entries at {self.at} of {len(self.raw)} bytes")
        types: set[tuple[int, ...]] = {(inner,)} if not n else set()
        values = []
        for _ in range(n):
            told, x = self.value(inner, depth + 1)
            types.add(told)
            values.append(x)
        if len(types) > 1:
            fail(self.path, f"{self.doing} has entries of several types")
        return (kind, *types.pop()), values

    def scalars(self, kind: int, n: int) -> list[Any]:
        raw = np.frombuffer(self.take(n * struct.calcsize(SCALARS[kind])), np.dtype(f"<{SCALARS[kind]}"))
        if kind == BOOL and n and raw.view(np.uint8).max() > 1:
            fail(self.path, f"{self.doing} has bools that are neither 0 nor 1")
        return raw.tolist()

    def told(self, tensors: int, step: int) -> dict[str, Entry]:
        """The entries of the tensors, which lie where they may."""
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for i in range(tensors):
            self.doing = f"what it tells of tensor {i}"
            name = self.name()
            self.doing = f"what it tells of tensor {name!r}"
            if name in found:
                fail(self.path, "there are two of that name", name)
            n = self.number()
            if n > AXES:
                fail(self.path, f"it has {n} axes, more than the {AXES} that may be", name)
            shape = tuple(self.number("Q") for _ in range(n))[::-1]
            kind, offset = self.number(), self.number("Q")
            found[name] = (self.known(kind, name), shape, offset, self.size(self.known(kind, name), shape, name))
            if offset % step:
                fail(self.path, f"its offset {offset} is no multiple of the alignment {step}", name)
        start = -(-self.at // step) * step
        end, last = 0, None
        for name, (_, _, offset, size) in sorted(found.items(), key=lambda item: (item[1][2], item[1][3])):
            if start + offset + size > len(self.raw):
                fail(self.path, f"is cut off: its {size} bytes at {start + offset} are not in the {len(self.raw)}", name)
            if size and offset < end:
                fail(self.path, f"its bytes overlap those of {last!r}", name)
            if size:
                end, last = offset + size, name
        return {name: Entry(k, shape, start + o, start + o + n) for name, (k, shape, o, n) in found.items()}

    def known(self, kind: int, name: str) -> str:
        if (told := KINDS.get(kind, f"number {kind}")) not in PLAIN and told not in BLOCKS:
            fail(self.path, f"its type is {told}, none of {', '.join([*PLAIN, *BLOCKS])}", name)
        return told

    def size(self, kind: str, shape: tuple[int, ...], name: str) -> int:
        if (n := math.prod(shape)) >= 2**63:
            fail(self.path, f"its shape {list(shape)} is no array's", name)
        if kind in PLAIN:
            return n * PLAIN[kind].itemsize
        block = BLOCKS[kind]
        if not shape or shape[-1] % block.values:
            fail(self.path, f"rows of {list(shape[-1:])} are no whole number of {kind} blocks of {block.values}", name)
        return n // block.values * block.bytes


# --- writing ------------------------------------------------------------------------------------------------------


def write(
    path: Any,
    metadata: Mapping[str, Any],
    kinds: Mapping[str, tuple[int, ...]],
    planned: Mapping[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[Iterable[np.ndarray]],
) -> None:
    """Write a file; ``planned`` has the type and shape of each tensor, and ``tensors`` its bytes, in parts, in that order.

    Raises:
      ValueError: if the metadata holds what GGUF does not.
    """
    path = Path(path)
    told = [b"GGUF", struct.pack("<IQQ", 3, len(planned), len(metadata))]
    for key, value in metadata.items():
        types = kinds.get(key) or ((4,) if key == ALIGNMENT else types_of(value, key))
        told += [_string(key), struct.pack("<I", types[0]), *_packed(types, value, key)]
    step = _Header(path, b"").alignment(metadata, {k: t for k, t in kinds.items() if k == ALIGNMENT})
    sizes, at = {}, 0
    for name, (kind, shape) in planned.items():
        if len(shape) > AXES:
            raise ValueError(f"{name} has {len(shape)} axes, and a tensor of GGUF {AXES} at most")
        sizes[name] = _Header(path, b"").size(kind, shape, name)
        sides = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        told += [_string(name), struct.pack("<I", len(shape)), sides, struct.pack("<IQ", NUMBERS[kind], at)]
        at += -(-sizes[name] // step) * step
    header = b"".join(told)
    with replacing(path) as file:
        file.write(header + bytes(-len(header) % step))
        for (name, size), parts in zip(sizes.items(), tensors, strict=True):
            n = 0
            for x in parts:
                raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
                file.write(raw.data)
                n += raw.size
            assert n == size, (name, n, size)
            file.write(bytes(-n % step))


def types_of(value: Any, key: str) -> tuple[int, ...]:
    """The types that metadata is written with of which none are told."""
    if isinstance(value, bool | np.bool_):
        return (BOOL,)
    if isinstance(value, str):
        return (STRING,)
    if isinstance(value, float | np.floating):
        return (FLOAT32,)
    if isinstance(value, int | np.integer):
        return (INT32 if -(2**31) <= value < 2**31 else INT64 if value < 2**63 else UINT64,)
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if isinstance(value, list | tuple):
        inner = {types_of(v, key) for v in value}
        if inner <= {(INT32,), (INT64,), (UINT64,)} and inner:
            inner = {max(inner, key=lambda t: ((INT32,), (INT64,), (UINT64,)).index(t))}
        if len(inner) != 1:
            raise ValueError(f"{key}: an array of GGUF has entries of one type, and at least one")
        return (ARRAY, *inner.pop())
    raise ValueError(f"{key}: {brief(value)} is neither a number, a string, a bool, nor a list of these")


def _packed(types: Sequence[int], value: Any, key: str) -> Iterable[bytes]:
    kind, *inner = types
    if kind == STRING and isinstance(value, str):
        return [_string(value)]
    if kind in SCALARS:
        return [_numbers(kind, [value], key)]
    if kind != ARRAY or not inner or not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"{key}: {brief(value)} is no {NAMED[kind] if kind < len(NAMED) else f'value of type {kind}'}")
    head = struct.pack("<IQ", inner[0], len(value))
    if inner[0] in SCALARS:
        return [head, _numbers(inner[0], value, key)]
    return [head, *(part for v in value for part in _packed(inner, v, key))]


def _numbers(kind: int, values: Any, key: str) -> bytes:
    whole = all(isinstance(v, bool | np.bool_) == (kind == BOOL) for v in values)
    try:
        if whole:
            return struct.pack(f"<{len(values)}{SCALARS[kind]}", *values)
    except (struct.error, OverflowError, TypeError):
        pass
    raise ValueError(f"{key}: {brief(values if len(values) > 1 else values[0])} is no {NAMED[kind]}")


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw
