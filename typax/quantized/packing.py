"""Codes of less than 8 bits, packed into bytes along the last axis.

    low    byte = c0 | c1 << 4                 4 bits; of 3 bits 8 codes in 3 bytes, c2 straddling the first two
    high   byte = c0 << 4 | c1

Codes from the lowest bit on are one stream of bits, so that any run of bytes that ends between codes can be cut out.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from typax.quantized.format import Format, Integers


def width(format: Format, n: int) -> int:
    """Bytes for ``n`` codes: whole packs."""
    per = format.per
    return -(-n // per) * (per * format.bits // 8)


def ends(format: Format) -> tuple[int, int]:
    """The least and the largest code that the bits hold."""
    if isinstance(format.codes, Integers) and format.codes.low < 0:
        return -(1 << format.bits - 1), (1 << format.bits - 1) - 1
    return 0, (1 << format.bits) - 1


def pack(format: Format, codes: Any) -> Any:
    """Pack along the last axis, of which the length is a multiple of ``format.per``."""
    bits = format.bits
    if bits == 8:
        return codes
    codes = codes.astype(jnp.uint8) & np.uint8((1 << bits) - 1)
    per, size = format.per, format.per * bits // 8
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per)
    if format.order == "high":
        parts = parts[..., ::-1]
    out: list[Any] = [None] * size
    for i in range(per):
        byte, shift = divmod(i * bits, 8)
        c = parts[..., i]
        out[byte] = _or(out[byte], c << np.uint8(shift))
        if shift + bits > 8:
            out[byte + 1] = _or(out[byte + 1], c >> np.uint8(8 - shift))
    return jnp.stack(out, -1).reshape(*codes.shape[:-1], -1) if size > 1 else out[0]


def _or(a: Any, b: Any) -> Any:
    return b if a is None else a | b


def unpack(format: Format, words: Any) -> Any:
    """The codes, of int8 if they are signed integers, else uint8."""
    bits = format.bits
    if bits == 8:
        return words
    per, size = format.per, format.per * bits // 8
    parts = words.reshape(*words.shape[:-1], words.shape[-1] // size, size)
    signed = isinstance(format.codes, Integers) and format.codes.low < 0
    codes = []
    for i in range(per):
        byte, shift = divmod(i * bits, 8)
        c = parts[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            c = c | parts[..., byte + 1] << np.uint8(8 - shift)
        c = c << np.uint8(8 - bits)  # away with what is not of this code; a sign bit comes to the top
        c = lax.bitcast_convert_type(c, jnp.int8) if signed else c
        codes.append(c >> c.dtype.type(8 - bits))
    if format.order == "high":
        codes.reverse()
    return jnp.stack(codes, -1).reshape(*words.shape[:-1], words.shape[-1] // size * per)
