"""A checkpoint of any kind that typax reads, by its path."""

from pathlib import Path
from typing import Any

from typax.io._disk import fail, opened
from typax.io._save import PICKLE, PICKLES
from typax.io.gguf import GgufCheckpoint
from typax.io.hf import checkpoint


def open_checkpoint(path: Any) -> Any:
    """The checkpoint at a path: a safetensors or GGUF file, an index, or a folder with one, quantized already or not.

    Raises:
      FileError: if there is none.
    """
    path = Path(path)
    if path.suffix.lower() in PICKLES:
        fail(path, PICKLE)
    if path.suffix.lower() == ".gguf" or _magic(path) == b"GGUF":
        return GgufCheckpoint(path)
    return checkpoint(path)


def _magic(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with opened(path) as file:
        return file.read(4)
