"""Quantized arrays: codes of few bits and a scale for each row of them.

    q = typax.quantize(w, "int4", axis=0, group=128)        q4g128t[4096,4096]
    typax.matmul(x, q)                                      on the codes
    typax.dense(q)                                          what it stands for

`formats` lists the formats; one of your own is a `Format`.  Every quantized value is a `Quantized`.
"""

from typax.quantized.format import Floats, Format, Integers, Scale, Table, formats
from typax.quantized.products import along, matmul
from typax.quantized.quantizing import quantize
from typax.quantized.types import QArray, QColumns, Quantized, QuantizedType, accumulated, times

__all__ = [
    "Floats", "Format", "Integers", "QArray", "QColumns", "Quantized", "QuantizedType", "Scale", "Table", "accumulated",
    "along", "formats", "matmul", "quantize", "times",
]  # fmt: skip
