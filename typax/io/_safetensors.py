"""The safetensors format: a header, then the bytes of every tensor.

    8 bytes: length n of the header | n bytes of JSON | payload
    {"__metadata__": {str: str}, "layer.weight": {"dtype": "I8", "shape": [2, 3], "data_offsets": [0, 6]}, ...}

Offsets count from the start of the payload; tensors follow each other without gaps.  A header is checked whole before any
tensor is touched; tensors are views of the mapped file.  Writing takes the tensors one at a time, so that a file may be
larger than memory; what is only known at the end (digests) fills fields that the header keeps free for it.

Source: the format's description in the repository huggingface/safetensors.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from typax._describe import brief
from typax.io._disk import fail, let_go, opened, replacing

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(bool),
    **{f"{k}{8 * n}": np.dtype(f"{k.lower()}{n}") for k in "UI" for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "C64": np.dtype("c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The dtypes of the format that have whole bytes, by their names in it."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
"""Bytes of a header; the format's own limit."""


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor: its dtype, its shape, and where its bytes lie in the payload."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Reader:
    """A safetensors file, mapped: ``reader.entries`` and ``reader.metadata`` from its header, ``reader[name]`` a tensor.

    ``reader.digest`` is the SHA-256 of the header, and so of all that it has digests of.

    Raises:
      FileError: if the header is not that of a safetensors file, or does not fit the file.
    """

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        with opened(self.path) as file:
            self.size = file.seek(0, 2)
            file.seek(0)
            raw = _header(self.path, file, self.size)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._start, self.digest = len(raw), sha256(raw)
        header = parsed(self.path, raw[8:], "the header")
        self.metadata, self.entries = _checked(self.path, header, self.size - self._start)
        self._digests  # noqa: B018  a header that was tampered with is no header

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, as a read-only view of the file.

        Raises:
          FileError: if the file has digests and the tensor is not what was written.
        """
        e = self.entries[name]
        flat = np.frombuffer(self._map, np.uint8, e.nbytes, self._start + e.start) if e.nbytes else np.empty(0, np.uint8)
        if name in self._digests and self._digests[name] != sha256(flat.data):
            fail(self.path, "its bytes are not those that were written (their SHA-256 differs)", name)
        return flat.view(e.dtype).reshape(e.shape)

    def release(self, name: str) -> None:
        """Let go of the memory that a tensor's part of the map takes; it is read again when it is used again."""
        e = self.entries[name]
        let_go(self._map, self._start + e.start, self._start + e.stop)

    @cached_property
    def _digests(self) -> dict[str, str]:
        if (text := self.metadata.get(DIGESTS)) is None:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or set(found) != {"", *self.entries}:
            fail(self.path, f"{DIGESTS} in its header does not name every tensor")
        rest = {k: v for k, v in self.metadata.items() if k != DIGESTS}
        if found[""] != sha256(_render(self.entries, rest)):
            fail(self.path, "its header is not what was written (its SHA-256 differs)")
        return found


def _header(path: Path, file: BinaryIO, size: int) -> bytes:
    """The header as it is in the file, with its length."""
    head = file.read(8)
    if len(head) < 8:
        fail(path, f"is no safetensors file: {size} bytes are less than a header's length takes")
    if head[:4] == b"GGUF":
        fail(path, "is a GGUF file, which typax.io.load_gguf reads")
    if head[:4] == b"PK\x03\x04":
        fail(path, "is no safetensors file but a zip archive, as PyTorch's pickles and NumPy's .npz are")
    n = int.from_bytes(head, "little")
    if n > MAX_HEADER:
        fail(path, f"is no safetensors file: its header would take {n} bytes, more than the {MAX_HEADER} that may be")
    if 8 + n > size:
        fail(path, f"is cut off, or no safetensors file: its header takes {n} bytes, but the file has only {size}")
    return head + file.read(n)


def parsed(path: Path, raw: bytes, what: str) -> Any:
    """JSON in a file, in which no name stands twice and all text is Unicode."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        fail(path, f"{what} is not valid JSON: {e}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} stands there twice")
    for text in (x for pair in pairs for x in pair if isinstance(x, str)):
        text.encode()  # a UnicodeEncodeError, and so a ValueError, of halves of a character
    return out


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _checked(path: Path, header: Any, payload: int) -> tuple[dict[str, str], dict[str, Entry]]:
    if not isinstance(header, dict):
        fail(path, "the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail(path, "__metadata__ is not an object of strings")
    entries = {name: _entry(path, name, told, payload) for name, told in header.items()}
    end, last = 0, None
    for name, e in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if e.start < end:
            fail(path, f"its bytes overlap those of {last!r}", name)
        if e.start > end:
            fail(path, f"there are {e.start - end} bytes before it that belong to no tensor", name)
        end, last = e.stop, name
    if end != payload:
        fail(path, f"there are {payload - end} bytes after the last tensor that belong to none")
    return metadata, entries


def _entry(path: Path, name: str, told: Any, payload: int) -> Entry:
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data_offsets"}:
        fail(path, "it is not described by a dtype, a shape and data_offsets", name)
    shape, offsets = told["shape"], told["data_offsets"]
    if not isinstance(told["dtype"], str) or told["dtype"] not in DTYPES:
        fail(path, f"dtype {told['dtype']!r} is none of {', '.join(DTYPES)}", name)
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape) or len(shape) > 64:
        fail(path, f"shape {brief(shape)} is not a list of sizes", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        fail(path, f"data_offsets {brief(offsets)} are not two numbers", name)
    start, stop = offsets
    if not 0 <= start <= stop <= payload:
        fail(path, f"data_offsets {offsets} lie outside of the {payload} bytes of the payload (is the file cut off?)", name)
    dtype = DTYPES[told["dtype"]]
    want = math.prod(shape) * dtype.itemsize
    if want != stop - start:
        fail(path, f"{told['dtype']}{shape} takes {want} bytes, but its data_offsets give {stop - start}", name)
    return Entry(dtype, tuple(shape), start, stop)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its dtype and shape, before its bytes are there."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


BLANK = "0" * 64
"""What stands for a digest until it is known."""
DIGESTS = "typax.sha256"
"""Where the metadata has a JSON object with the SHA-256 of every tensor, and under ``""`` of the rest of the header."""


def write(path: Any, planned: Mapping[str, Planned], tensors: Iterable[np.ndarray], metadata: Mapping[str, str]) -> str:
    """Write a file with digests, taking the tensors one at a time in the order of ``planned``; the SHA-256 of its header."""
    path = Path(path)
    for name, p in planned.items():
        if p.dtype not in NAMES:
            raise TypeError(f"{path}: tensor {name!r}: the format has no dtype {p.dtype}")
    found = {"": sha256(_render(planned, metadata)), **dict.fromkeys(planned, BLANK)}
    with replacing(path) as file:
        header = _render(planned, {**metadata, DIGESTS: _json(found)})
        file.write(header)
        for (name, want), x in zip(planned.items(), tensors, strict=True):
            assert (x.dtype, x.shape) == (want.dtype, want.shape), (name, x.dtype, x.shape, want)
            raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            file.write(raw.data)
            found[name] = sha256(raw.data)
        file.seek(0)
        file.write(header := _render(planned, {**metadata, DIGESTS: _json(found)}))
    return sha256(header)


def sha256(x: Any) -> str:
    return hashlib.sha256(x).hexdigest()


def _json(x: Any) -> str:
    return json.dumps(x, separators=(",", ":"), ensure_ascii=False)


def _render(planned: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, p in planned.items():
        header[name] = {"dtype": NAMES[p.dtype], "shape": list(p.shape), "data_offsets": [at, at + p.nbytes]}
        at += p.nbytes
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)  # the payload starts aligned
    return len(text).to_bytes(8, "little") + text
