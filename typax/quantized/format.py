"""A format is data: which numbers the codes are, how they lie in memory, and what their scales are.

    x ≈ scale · number(code)                     codes: `Integers`, `Floats` or a `Table`
    x ≈ scale · (code - zero_point)              `Integers`, asked for with ``zero_point=True``
    scale ≈ a number in float32, a byte e8m0, ...; or again scale ≈ scale₂ · number(code₂): ``Scale.of`` is a format

`formats` lists those that are known by name; another one is made as these are, and given to `typax.quantize` itself.

Sources: OCP Microscaling Formats (MX) v1.0 (2023) for mxfp8 and mxfp4; OCP OFP8 v1.0 for fp8; Dettmers et al. 2023,
arXiv:2305.14314, appendix E for nf4; NVIDIA's NVFP4 for nvfp4.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Integers:
    """The integers from ``low`` to ``high``; without a zero point from ``-high``, so that negation stays inside.

    `largest` and `least` are the numbers at the ends, `gap` is the largest distance of two neighbours.
    """

    low: int
    high: int

    @property
    def largest(self) -> float:
        return float(self.high)

    @property
    def least(self) -> float:
        """The least number without a zero point."""
        return -self.largest if self.low < 0 else 0.0

    @property
    def gap(self) -> float:
        """The largest distance of two neighbours."""
        return 1.0


@dataclass(frozen=True)
class Floats:
    """The finite numbers of a float ``dtype`` of 8 bits, with `largest`, `least` and `gap` as of `Integers`."""

    dtype: str

    @property
    def largest(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    @property
    def least(self) -> float:
        return -self.largest

    @property
    def gap(self) -> float:
        below = (np.asarray(self.largest, self.dtype).view(np.uint8) - 1).astype(np.uint8).view(self.dtype)
        return self.largest - float(below)


@dataclass(frozen=True)
class Table:
    """Numbers, ``values``, by their codes 0, 1, ..., ascending, with `largest`, `least` and `gap` as of `Integers`.

    ``signed``: they are magnitudes, and the bit above those of the code is the sign.  ``ties``: a number in the middle of
    two takes the ``"lower"`` code, or the ``"even"`` one.
    """

    values: tuple[float, ...]
    signed: bool = False
    ties: Literal["lower", "even"] = "lower"

    @property
    def largest(self) -> float:
        return max(map(abs, self.values))

    @property
    def least(self) -> float:
        return -self.largest if self.signed else self.values[0]

    @property
    def gap(self) -> float:
        return max(b - a for a, b in pairwise(self.values))

    @property
    def zero(self) -> int:
        """The code of the number 0."""
        return self.values.index(0.0)


@dataclass(frozen=True)
class Scale:
    """What scales are: a float dtype, or bytes ``"e8m0"`` (powers of two, 255 is NaN).

    ``of``: a format in which the scales themselves are quantized, in groups of ``group`` of them (``None``: all together).
    ``offset``: what is quantized is their distance from their mean, which is kept beside them.
    """

    dtype: str = "float32"
    of: Any = None
    group: int | None = None
    offset: bool = False


@dataclass(frozen=True)
class Format:
    """A way to store floats as codes with scales.

    Attributes:
      name: by which `typax.quantize` knows it.
      shown: how types print; with another format that prints so, types would differ and print alike.
      codes: the numbers that codes stand for.
      bits: of a code; less than 8 are packed into bytes, along the last of the axes that share a scale.
      order: which bits of a byte the first code takes, the ``"low"`` ones or the ``"high"`` ones.
      scale: what scales are.
      group: how many values share a scale where `typax.quantize` is not told; ``None`` is the whole axis.
    """

    name: str
    shown: str
    codes: Integers | Floats | Table
    bits: int = 8
    order: Literal["low", "high"] = "low"
    scale: Scale = field(default_factory=Scale)
    group: int | None = None

    def __post_init__(self) -> None:
        number = Table if isinstance(self.codes, Table) else None
        count = len(self.codes.values) << self.codes.signed if number else 0  # type: ignore[union-attr]
        if isinstance(self.codes, Integers):
            count = max(self.codes.high + 1, -self.codes.low) << (self.codes.low < 0)
        if not 1 <= self.bits <= 8 or count > 1 << self.bits:
            raise ValueError(f"format {self.name}: {count} codes do not fit {self.bits} bits; a code has 1 to 8 bits")
        if self.order == "high" and self.bits not in (1, 2, 4, 8):
            raise ValueError(f"format {self.name}: codes of {self.bits} bits straddle bytes, from the low bits on only")

    def __repr__(self) -> str:
        return self.name

    def to_json(self) -> Any:
        """How a file keeps it: by its name, if it is known by that."""
        return self.name if _KNOWN.get(self.name) == self else NotImplemented

    @classmethod
    def from_json(cls, name: Any) -> "Format":
        """The format that `to_json` named; raises a ValueError if there is none."""
        return format_of(str(name))

    @property
    def storage(self) -> Any:
        """The dtype in which codes are held: bytes where they are packed."""
        if self.bits < 8 or isinstance(self.codes, Table):
            return jnp.dtype("uint8")
        if isinstance(self.codes, Floats):
            return jnp.dtype(self.codes.dtype)
        return jnp.dtype("int8" if self.codes.low < 0 else "uint8")

    @property
    def per(self) -> int:
        """Codes are packed so many at a time."""
        return {8: 1, 4: 2, 2: 4, 6: 4}.get(self.bits, 8)

    @property
    def scale_storage(self) -> Any:
        """The dtype in which scales are held."""
        return jnp.dtype("uint8" if self.scale.dtype == "e8m0" else self.scale.dtype)


FP4 = Table((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), signed=True, ties="even")
"""The numbers of e2m1, by magnitude."""

NF4 = Table(
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )
)  # fmt: skip
"""NormalFloat: quantiles of the normal distribution, with an exact 0 (Dettmers et al. 2023, appendix E)."""


def _dynamic() -> Table:
    """A sign, a run of zero bits that is a power of ten, a fraction (Dettmers 2016, arXiv:1511.04561, section 2.1).

    Rounded as bitsandbytes rounds them: the step, the edges, their middles and the products, each to float32.
    """
    f32, numbers = np.float32, [0.0, 1.0]
    for zeros in range(7):
        steps = 2 ** (6 - zeros)
        step, i = float((f32(1) - f32(0.1)) / f32(steps)), np.arange(steps + 1)
        from_below, from_above = float(f32(0.1)) + step * i, 1 - step * (steps - i)
        edges = np.where(i < (steps + 1) // 2, from_below, from_above).astype(f32)
        middles = (edges[1:] + edges[:-1]) / f32(2) * f32(10.0**-zeros)
        numbers += [*map(float, middles), *map(float, -middles)]
    return Table(tuple(sorted(numbers)))


INT8 = Format("int8", "q8", Integers(-128, 127))
INT4 = Format("int4", "q4", Integers(-8, 7), bits=4)
UINT8 = Format("uint8", "u8", Integers(0, 255))
UINT4 = Format("uint4", "u4", Integers(0, 15), bits=4)
E4M3 = Format("fp8_e4m3", "f8e4m3", Floats("float8_e4m3fn"))
E5M2 = Format("fp8_e5m2", "f8e5m2", Floats("float8_e5m2"))
_DYNAMIC8 = Format("dynamic8", "dyn8", _dynamic(), group=256)
_NF4 = Format("nf4", "nf4", NF4, 4, "high", group=64)
_NF4_DOUBLE = Format("nf4_double", "nf4d", NF4, 4, "high", Scale(of=_DYNAMIC8, group=256, offset=True), 64)
_MXFP8 = Format("mxfp8", "mxfp8", E4M3.codes, scale=Scale("e8m0"), group=32)
_MXFP8_E5M2 = Format("mxfp8_e5m2", "mxfp8e5m2", E5M2.codes, scale=Scale("e8m0"), group=32)
_MXFP4 = Format("mxfp4", "mxfp4", FP4, 4, scale=Scale("e8m0"), group=32)
_NVFP4 = Format("nvfp4", "nvfp4", FP4, 4, scale=Scale(of=E4M3), group=16)
_NVFP4_BLOCK = Format("nvfp4_block", "nvfp4b", FP4, 4, scale=Scale("float8_e4m3fn"), group=16)

_ALL = (
    INT8, INT4, UINT8, UINT4, E4M3, E5M2, _NF4, _NF4_DOUBLE, _DYNAMIC8, _MXFP8, _MXFP8_E5M2, _MXFP4, _NVFP4, _NVFP4_BLOCK,
)  # fmt: skip
_KNOWN = MappingProxyType({f.name: f for f in _ALL})


def formats() -> MappingProxyType[str, Format]:
    """The formats that `typax.quantize` knows by name."""
    return _KNOWN


def signed(bits: int) -> Format:
    """Integers of two's complement, of so many bits."""
    name = f"int{bits}"
    return _KNOWN.get(name) or Format(name, f"q{bits}", Integers(-(1 << bits - 1), (1 << bits - 1) - 1), bits)


def unsigned(bits: int) -> Format:
    """Integers from 0 on, of so many bits."""
    name = f"uint{bits}"
    return _KNOWN.get(name) or Format(name, f"u{bits}", Integers(0, (1 << bits) - 1), bits)


def format_of(format: str | Format) -> Format:
    """A format, by its name or itself.

    Raises:
      ValueError: for a name that no format has.
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str) or format not in _KNOWN:
        raise ValueError(
            f"no format is called {format!r}; the formats are {', '.join(_KNOWN)}, or give a Format of your own"
        )
    return _KNOWN[format]
