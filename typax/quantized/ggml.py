"""The blocks of ggml, held as they are in a file: bytes that no step changes.

    a row of n values is n / 32 (or n / 256) blocks; in each, as little-endian bytes,

    Q8_0   d f16, 32 int8                     x = d · q
    Q4_0   d f16, 16 bytes                    x = d · (q - 8)            byte j holds values j (low) and j + 16 (high)
    Q4_1   d f16, m f16, 16 bytes             x = d · q + m
    Q5_0   d f16, 4 bytes, 16 bytes           x = d · (q - 16)           the fifth bits in the 4 bytes
    Q5_1   d f16, m f16, 4 bytes, 16 bytes    x = d · q + m
    Q2_K ... Q6_K                             256 values in 8 or 16 groups: x = (d · s) · q - (dmin · m), with small s, m

Source: ggml-common.h and ggml-quants.c of llama.cpp.  The products are exact in float32, so that fused and
separate sums agree.  Where ggml divides (by -8, 15, 127, ...), so does `quantize_ggml`, with one rounding.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from typax._op import op
from typax._value import Value
from typax.quantized.scales import divided


class Block(NamedTuple):
    """How many values a block has, and how many bytes."""

    values: int
    bytes: int


BLOCKS = {
    "Q4_0": Block(32, 18), "Q4_1": Block(32, 20), "Q5_0": Block(32, 22), "Q5_1": Block(32, 24), "Q8_0": Block(32, 34),
    "Q2_K": Block(256, 84), "Q3_K": Block(256, 110), "Q4_K": Block(256, 144), "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
}  # fmt: skip
"""The kinds of blocks."""


class Ggml(Value, name="ggml"):
    """An array whose rows are blocks of ggml: ``blocks``, uint8 ``[*batch, m, bytes]``, of one ``kind``, such as ``"Q4_1"``.

    ``values`` is how many a block has, ``dtype`` that of the array it stands for.

    Made of a file's bytes, or by `quantize_ggml`; its bytes go back into a file as they are.
    """

    blocks: UInt8[Array, "*batch m size"]
    kind: str
    values: int
    dtype: Any = jnp.dtype("float32")

    def dense(self) -> Float[Array, "*batch m*values"]:
        return decode(self.kind, self.blocks).reshape(-1).astype(self.dtype)

    @classmethod
    def from_dense(cls, x, kind, dtype):
        """Quantize; what `typax.retract` is made by."""
        return of_blocks(encode_ggml(x, kind), kind, dtype)

    @classmethod
    def _show_type(cls, ty: Any, short_dtypes: bool = False) -> str:
        kind, dtype = ty.static("kind"), ty.dtype
        dims = super()._show_type(ty, short_dtypes).rpartition("[")[2]
        return f"{kind.lower()}{'' if dtype == jnp.dtype('float32') else f'<{dtype}>'}[{dims}"


def of_blocks(blocks: Any, kind: str, dtype: Any = "float32") -> Ggml:
    """The value of blocks as they are in a file: uint8 ``[*batch, m, bytes]`` or ``[*batch, m * bytes]``.

    Raises:
      ValueError: for a kind that there is not, or bytes that are no whole blocks.
    """
    block = _block(kind)
    size = blocks.shape[-1]
    if size != block.bytes or blocks.ndim < 2:
        if size % block.bytes:
            raise ValueError(f"{size} bytes are no whole number of {kind} blocks, of {block.bytes} bytes")
        blocks = blocks.reshape(*blocks.shape[:-1], size // block.bytes, block.bytes)
    return Ggml(blocks, kind, block.values, dtype=dtype)


def _block(kind: str) -> Block:
    if kind not in BLOCKS:
        raise ValueError(f"ggml has no blocks {kind!r} here; there are {', '.join(BLOCKS)}")
    return BLOCKS[kind]


# --- decode ----------------------------------------------------------------------------------------------------------


def _f16(b: Any) -> Any:
    """Pairs of bytes as float16, then float32."""
    bits = b[..., 0::2].astype(jnp.uint16) | b[..., 1::2].astype(jnp.uint16) << np.uint16(8)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _low(b: Any) -> Any:
    return b & np.uint8(15)


def _high(b: Any) -> Any:
    return b >> np.uint8(4)


def _fields(b: Any, bits: int, count: int) -> list[Any]:
    """The ``count`` fields of ``bits`` bits of each byte, lowest first."""
    return [b >> np.uint8(bits * i) & np.uint8(2**bits - 1) for i in range(count)]


def _f32(q: Any) -> Any:
    return q.astype(jnp.float32)


def decode(kind: str, b: Any) -> Any:
    """What blocks stand for: float32 ``[..., values]`` of uint8 ``[..., bytes]``; the same bits as ggml."""
    return _DECODE[kind](b)


def _small(b: Any, fifth: bool, shifted: bool) -> Any:
    """Q4_0, Q4_1, Q5_0 and Q5_1."""
    head = 4 if shifted else 2
    qs = b[..., head + 4 * fifth :]
    q = jnp.concatenate([_low(qs), _high(qs)], -1).astype(jnp.int8)
    if fifth:
        bits = b[..., head : head + 4, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
        q = q | (bits.reshape(*b.shape[:-1], 32) << np.uint8(4)).astype(jnp.int8)
    d = _f16(b[..., :head])
    if shifted:
        return d[..., :1] * _f32(q) + d[..., 1:]
    return d * _f32(q - np.int8(16 if fifth else 8))


def _q8_0(b: Any) -> Any:
    return _f16(b[..., :2]) * _f32(lax.bitcast_convert_type(b[..., 2:], jnp.int8))


def _grouped(q: Any, scale: Any) -> Any:
    """Numbers by groups, times one scale for each."""
    return (q.reshape(*q.shape[:-1], scale.shape[-1], -1) * scale[..., None]).reshape(q.shape)


def _minus(a: Any, low: Any) -> Any:
    shape = a.shape
    return (a.reshape(*shape[:-1], low.shape[-1], -1) - low[..., None]).reshape(shape)


def _q2_k(b: Any) -> Any:
    scales, qs, d = b[..., :16], b[..., 16:80], _f16(b[..., 80:])
    q = jnp.concatenate([f for half in (qs[..., :32], qs[..., 32:]) for f in _fields(half, 2, 4)], -1)
    return _minus(_grouped(_f32(q), d[..., :1] * _f32(_low(scales))), d[..., 1:] * _f32(_high(scales)))


def _q3_k(b: Any) -> Any:
    mask, qs, packed, d = b[..., :32], b[..., 32:96], b[..., 96:108], _f16(b[..., 108:])
    low = jnp.concatenate([_low(packed[..., :8]), _high(packed[..., :8])], -1)
    high = jnp.concatenate(_fields(packed[..., 8:], 2, 4), -1)
    scale = (low | high << np.uint8(4)).astype(jnp.int8) - np.int8(32)
    q = jnp.concatenate([f for half in (qs[..., :32], qs[..., 32:]) for f in _fields(half, 2, 4)], -1).astype(jnp.int8)
    third = jnp.concatenate(_fields(mask, 1, 8), -1).astype(jnp.int8)
    return _grouped(_f32(q - (np.int8(4) - third * np.int8(4))), d * _f32(scale))


def _six_bits(s: Any) -> tuple[Any, Any]:
    """The 8 scales and 8 minima of Q4_K and Q5_K, in 12 bytes."""
    a, m, last = s[..., :4], s[..., 4:8], s[..., 8:]
    two = np.uint8(6)
    first = (a & np.uint8(63), m & np.uint8(63))
    then = (_low(last) | a >> two << np.uint8(4), _high(last) | m >> two << np.uint8(4))
    return tuple(jnp.concatenate(pair, -1) for pair in zip(first, then, strict=True))  # type: ignore[return-value]


def _nibbles(qs: Any) -> Any:
    """Runs of 32 bytes: the low nibbles of a run, then its high ones."""
    runs = qs.reshape(*qs.shape[:-1], -1, 32)
    return jnp.concatenate([_low(runs), _high(runs)], -1).reshape(*qs.shape[:-1], -1)


def _q45_k(b: Any, fifth: bool) -> Any:
    d = _f16(b[..., :4])
    scale, low = _six_bits(b[..., 4:16])
    q = _nibbles(b[..., 48:] if fifth else b[..., 16:])
    if fifth:
        q = q | jnp.concatenate(_fields(b[..., 16:48], 1, 8), -1) << np.uint8(4)
    return _minus(_grouped(_f32(q), d[..., :1] * _f32(scale)), d[..., 1:] * _f32(low))


def _q6_k(b: Any) -> Any:
    ql, qh, scale, d = b[..., :128], b[..., 128:192], b[..., 192:208], _f16(b[..., 208:])
    low = jnp.concatenate([f(half) for half in (ql[..., :64], ql[..., 64:]) for f in (_low, _high)], -1)
    high = jnp.concatenate([f for half in (qh[..., :32], qh[..., 32:]) for f in _fields(half, 2, 4)], -1)
    q = (low | high << np.uint8(4)).astype(jnp.int8) - np.int8(32)
    return _grouped(_f32(q), d * _f32(lax.bitcast_convert_type(scale, jnp.int8)))


_DECODE = {
    "Q4_0": lambda b: _small(b, False, False), "Q4_1": lambda b: _small(b, False, True),
    "Q5_0": lambda b: _small(b, True, False), "Q5_1": lambda b: _small(b, True, True), "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": lambda b: _q45_k(b, False), "Q5_K": lambda b: _q45_k(b, True), "Q6_K": _q6_k,
}  # fmt: skip


# --- encode ----------------------------------------------------------------------------------------------------------


def encode_ggml(x: Any, kind: str) -> Any:
    """The blocks of rows: uint8 ``[..., n / 32, bytes]`` of float ``[..., n]``; the bytes of ggml's reference quantizer.

    A block of zeros has d = 0; one that holds NaN or an infinity, or values beyond 65504 times the largest code, has d = NaN
    and stands for NaN.

    Raises:
      ValueError: for K-quants, which are held and decoded only, or if the rows are no whole blocks.
    """
    block = _block(kind)
    if kind.endswith("_K"):
        raise ValueError(f"{kind} is held and decoded, not made; quantize to one of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0")
    if not x.ndim or x.shape[-1] % block.values:
        raise ValueError(
            f"rows of {x.shape[-1] if x.ndim else 1} values are no whole number of {kind} blocks, of {block.values}"
        )
    if x.dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, 8, 7)
    rows = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block.values)
    bad = jnp.isnan(jnp.sum(rows * 0.0, -1, keepdims=True))
    rows = jnp.where(bad, np.float32(0), rows)
    if kind == "Q8_0":
        d = divided(jnp.max(jnp.abs(rows), -1, keepdims=True), np.float32(127))
        y = rows * _inverse(d)
        q = lax.round(y)  # half away from zero
        return jnp.concatenate([_bytes16(d, bad), lax.bitcast_convert_type(q.astype(jnp.int8), jnp.uint8)], -1)
    fifth, shifted = kind[1] == "5", kind[3] == "1"
    top = 31 if fifth else 15
    if shifted:
        low, high = jnp.min(rows, -1, keepdims=True), jnp.max(rows, -1, keepdims=True)
        d = divided(high - low, np.float32(top))
        y = lax.optimization_barrier((rows - low) * _inverse(d)) + np.float32(0.5)
        head = [_bytes16(d, bad), _bytes16(low, bad)]
    else:
        at = jnp.argmax(jnp.abs(rows), -1, keepdims=True)
        d = jnp.take_along_axis(rows, at, -1) * np.float32(-2.0 / (top + 1))
        y = lax.optimization_barrier(rows * _inverse(d)) + np.float32((top + 1) / 2 + 0.5)
        head = [_bytes16(d, bad)]
    q = jnp.clip(jnp.trunc(y), 0, top).astype(jnp.uint8)
    half = block.values // 2
    packed = q[..., :half] & np.uint8(15) | q[..., half:] << np.uint8(4)
    if fifth:
        bits = (q >> np.uint8(4)).reshape(*q.shape[:-1], 4, 8) << np.arange(8, dtype=np.uint8)
        head.append(jnp.sum(bits, -1, dtype=jnp.uint8))
    return jnp.concatenate([*head, packed], -1)


def _inverse(d: Any) -> Any:
    return jnp.where(d == 0, np.float32(0), 1 / jnp.where(d == 0, np.float32(1), d))


def _bytes16(d: Any, bad: Any) -> Any:
    """float32 as the two bytes of float16; NaN for what is bad or does not fit."""
    h = d.astype(jnp.float16)
    h = jnp.where(bad | jnp.isinf(h), jnp.asarray(jnp.nan, jnp.float16), h)
    bits = lax.bitcast_convert_type(h, jnp.uint16)[..., 0]
    return jnp.stack([bits.astype(jnp.uint8), (bits >> np.uint16(8)).astype(jnp.uint8)], -1)


def _identity(x: Any) -> Any:
    return x


@op(reference=_identity, within=lambda q, x, *, kind: jnp.max(jnp.abs(x)) / (100 if kind == "Q8_0" else 7))
def quantize_ggml(x: Float[Array, "*batch n"], *, kind: str) -> Ggml:
    """Rows as blocks of ggml, one of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0; differentiates as the identity.

    Raises:
      ValueError: for a kind that is not made here, or rows that are no whole number of blocks.
    """
    return of_blocks(encode_ggml(x, kind), kind, x.dtype)
