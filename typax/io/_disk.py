"""Files that are written whole or not at all, and errors that name the file.

    write:  .name.XXXX.part beside the file  ->  flushed to the disk  ->  renamed to the name     (a rename is atomic)

An interrupted write leaves the old file as it was.
"""

import contextlib
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn


class FileError(ValueError):
    """A file is not what it should be; the message names the file, and the tensor if it is about one."""


def fail(path: Any, what: str, tensor: str | None = None) -> NoReturn:
    """Raise a `FileError` about a file, or about one tensor in it."""
    raise FileError(f"{shown(path)}: {f'tensor {tensor!r}: ' if tensor is not None else ''}{what}")


def opened(path: Path) -> BinaryIO:
    """An ordinary file, for reading.

    Raises:
      FileError: if there is none, or a folder, a pipe or a device in its place.
    """
    try:
        if not stat.S_ISREG(kind := path.stat().st_mode):
            fail(path, "is a folder, not a file" if stat.S_ISDIR(kind) else "is no ordinary file: a pipe, or a device")
        return path.open("rb")
    except FileError:
        raise
    except (OSError, ValueError) as e:  # a name that no file can have
        raise FileError(f"{shown(path)}: {getattr(e, 'strerror', None) or e}") from None


def shown(path: Any) -> str:
    """A path as text that can be printed."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def let_go(mapped: Any, start: int, stop: int) -> None:
    """Let go of the memory that a part of a map takes; it is read again when it is used again."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mapped, "madvise") and stop > start:
        mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends, and never exists if the block raises."""
    if "\0" in str(path):
        fail(path, "is a name that no file can have")
    path = Path(os.path.realpath(path))  # of a link, the file that it names is replaced
    if path.is_dir():
        fail(path, "is a folder, not a file")
    if not path.parent.is_dir():
        fail(path, "cannot be written, since its folder does not exist")
    if path.exists() and not path.is_file():
        fail(path, "cannot be written, since it is no ordinary file: a pipe, or a device")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, _mode(path))
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as e:
        raise FileError(f"{shown(path)}: cannot be written: {e.strerror or e}") from e
    _sync_folder(path.parent)


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, or those of a new one."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
