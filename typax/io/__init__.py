"""Values in files: `save` and `load` (safetensors), `load_hf` (quantized checkpoints of Hugging Face's layout)."""

from typax.io._disk import FileError
from typax.io._save import load, save
from typax.io.hf import Permuted, load_hf

__all__ = ["FileError", "Permuted", "load", "load_hf", "save"]
