"""A checkpoint of any kind that typax reads, by its path."""

from pathlib import Path
from typing import Any

from typax.io._disk import fail
from typax.io._save import Checkpoint
from typax.io.gguf import GgufCheckpoint
from typax.io.hf import HfCheckpoint, is_quantized


def open_checkpoint(path: Any) -> Any:
    """The checkpoint at a path: a safetensors or GGUF file, an index, or a folder with one, quantized already or not.

    Raises:
      FileError: if there is none.
    """
    path = Path(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"):
        fail(path, "is a pickle, which could run anything: convert it to safetensors where it came from")
    if path.suffix == ".gguf" or _magic(path) == b"GGUF":
        return GgufCheckpoint(path)
    ck = Checkpoint(path)
    return HfCheckpoint(ck) if ck.tree is None and is_quantized(ck.path.parent) else ck


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError:
        return b""
