"""Integers of 3 bits, eight of them in three bytes: a format of one's own is a page of data.

Codes -3 to 3, one scale for each 32 of them, 3.5 bits a value with scales in float16.  From here on it is a format like the
others: `typax.quantize(w, INT3, axis=0)`, `typax.matmul`, `typax.dense`, gradients, stacks, shards.

In raw hijax: a type, its packing, a quantizer that keeps its head at zeros and NaN, and the products, about 400 lines.
"""

from typax.quantized import Format, Integers, Scale

INT3 = Format("int3", "q3", Integers(-4, 3), bits=3, scale=Scale("float16"), group=32)
