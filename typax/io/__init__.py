"""Values in files.

`save` and `load`: any tree, in safetensors files.  `load_gguf` and `save_gguf`: ggml's blocks.  `load_hf`: quantized
checkpoints of Hugging Face's layout.
"""

from typax.io._disk import FileError
from typax.io._save import load, save
from typax.io.gguf import Gguf, load_gguf, save_gguf
from typax.io.hf import Permuted, load_hf

__all__ = ["FileError", "Gguf", "Permuted", "load", "load_gguf", "load_hf", "save", "save_gguf"]
