"""Values in files: `save` and `load` (safetensors)."""

from typax.io._disk import FileError
from typax.io._save import load, save

__all__ = ["FileError", "load", "save"]
