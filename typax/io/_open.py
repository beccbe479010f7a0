"""A checkpoint of any kind that typax reads, by its path."""

from pathlib import Path
from typing import Any

from typax.io._disk import fail
from typax.io._save import Checkpoint


def open_checkpoint(path: Any) -> Checkpoint:
    """The checkpoint at a path: a safetensors file, an index, or a folder with one.

    Raises:
      FileError: if there is none.
    """
    path = Path(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"):
        fail(path, "is a pickle, which could run anything: convert it to safetensors where it came from")
    return Checkpoint(path)
