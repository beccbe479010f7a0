"""Quantized arrays: codes of few bits and a scale for each row of them.

    q = typax.quantize(w, "int4", axis=0, group=128)        q4g128t[4096,4096]
    typax.matmul(x, q)                                      on the codes
    typax.dense(q)                                          what it stands for

`formats` lists the formats; one of your own is a `Format`.  All these values are `Quantized`; blocks of ggml are `Ggml`.
"""

from typax.quantized.format import Floats, Format, Integers, Scale, Table, formats
from typax.quantized.ggml import Ggml, of_blocks, quantize_ggml
from typax.quantized.given import from_codes
from typax.quantized.measure import Error, error, fake, limits
from typax.quantized.products import along, matmul
from typax.quantized.quantizing import quantize, requantize
from typax.quantized.types import QArray, QColumns, Quantized, QuantizedType, accumulated, times

__all__ = [
    "Error", "Floats", "Format", "Ggml", "Integers", "QArray", "QColumns", "Quantized", "QuantizedType", "Scale", "Table",
    "accumulated", "along", "error", "fake", "formats", "from_codes", "limits", "matmul", "of_blocks", "quantize",
    "quantize_ggml", "requantize", "times",
]  # fmt: skip
