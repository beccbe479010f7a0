"""Files with bytes changed, cut out, put in, doubled; and the peak of a process's memory, which none of them moves."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typax.io import FileError

NUMBERS = (0, 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1, 10**9)
MB = 2**20


def mutate(good: bytes, rng: Any, within: int | None = None) -> bytes:
    """One to three changes, at random, within the first bytes."""
    raw = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        at, kind = int(rng.integers(max(1, min(within or len(raw), len(raw))))), rng.integers(8)
        n = int(rng.integers(1, 20))
        if kind == 0:
            raw[at : at + 1] = bytes([raw[at] ^ 1 << int(rng.integers(8))]) if raw else b""
        elif kind == 1:
            del raw[at : at + n]
        elif kind == 2:
            raw[at:at] = rng.bytes(n)
        elif kind == 3:
            raw[at : at + 1] = rng.choice(list('0123456789{}[]",:-.e/\\')).encode()
        elif kind == 4:
            raw[at : at + 8] = NUMBERS[int(rng.integers(len(NUMBERS)))].to_bytes(8, "little")
        elif kind == 5:
            raw[at : at + 4] = int(rng.integers(45)).to_bytes(4, "little")
        elif kind == 6:
            raw[at:at] = raw[at : at + 10 * n]
        else:
            del raw[at if n == 1 else max(at, len(raw) - n) :]
    return bytes(raw)


@contextlib.contextmanager
def little_memory(most: int = 100 * MB) -> Iterator[None]:
    """What is done takes no more memory at its peak."""
    before = _peak()
    yield
    assert _peak() - before <= most


def _peak() -> int:
    with contextlib.suppress(OSError):
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    return 0  # elsewhere than on Linux


class Tally:
    """How many files were refused, each by its name; anything else that is raised is a mistake of ours."""

    def __init__(self, name: Any) -> None:
        self.name, self.refused, self.read = str(name), 0, 0

    def of(self, load: Any) -> Any:
        try:
            got = load()
        except FileError as e:
            assert self.name in str(e)
            self.refused += 1
            return None
        self.read += 1
        return got
