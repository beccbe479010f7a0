"""A format is data: which numbers the codes are, how they lie in memory, and what their scales are.

    x ≈ scale · number(code)                     codes: `Integers`, `Floats` or a `Table`
    x ≈ scale · (code - zero_point)              `Integers`, asked for with ``zero_point=True``
    scale ≈ a number in float32, a byte e8m0, ...; or again scale ≈ scale₂ · number(code₂): ``Scale.of`` is a format

`formats` lists those that are known by name; another one is made as these are, and given to `typax.quantize` itself.

Sources: OCP Microscaling Formats (MX) v1.0 (2023) for mxfp8 and mxfp4; OCP OFP8 v1.0 for fp8; Dettmers et al. 2023,
arXiv:2305.14314, appendix E for nf4; NVIDIA's NVFP4 for nvfp4.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

_BY_NAME: dict[str, "Format"] = {}


@dataclass(frozen=True)
class Integers:
    """The integers from ``low`` to ``high``; without a zero point from ``-high``, so that negation stays inside.

    `largest` and `least` are the numbers at the ends, `gap` is the largest distance of two neighbours.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.low <= 0 < self.high:
            raise ValueError(f"Integers({self.low}, {self.high}) are to begin at 0 or below it, and end above it")

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


_FLOAT8 = (
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz",
)  # fmt: skip


@dataclass(frozen=True)
class Floats:
    """The finite numbers of a float ``dtype`` of 8 bits, with `largest`, `least` and `gap` as of `Integers`."""

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _FLOAT8:
            raise ValueError(f"Floats({self.dtype!r}): there are {', '.join(_FLOAT8)}; others are a Table of their numbers")

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

    ``signed``: they are magnitudes, from 0 on, and the bit above those of the code is the sign.  ``ties``: a number in the
    middle of two takes the ``"lower"`` code, or the ``"even"`` one.
    """

    values: tuple[float, ...]
    signed: bool = False
    ties: Literal["lower", "even"] = "lower"

    def __post_init__(self) -> None:
        values = tuple(map(float, self.values))
        object.__setattr__(self, "values", values)
        if (
            0.0 not in values
            or len(values) < 2
            or not all(a < b for a, b in pairwise(values))
            or not np.isfinite(values).all()
        ):
            raise ValueError(f"Table: {values} are no finite numbers in ascending order with 0 among them")
        if self.signed and values[0] < 0:
            raise ValueError(f"Table: signed=True adds the sign to magnitudes, and {values[0]} is none")
        if self.ties not in ("lower", "even"):
            raise ValueError(f'Table: ties={self.ties!r}; they go to the "lower" or to the "even" code')

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

    ``of``: a format in which the scales themselves are quantized, in groups of ``group`` of them (``None``: all together, in
    ``fp8_e4m3``).  ``offset``: what is quantized is their distance from their mean, which is kept beside them.
    """

    dtype: str = "float32"
    of: Any = None
    group: int | None = None
    offset: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _SCALES:
            raise ValueError(f"Scale: dtype={self.dtype!r}; scales are {', '.join(_SCALES)}")
        of, group = self.of, self.group
        if of is None:
            if group is not None or self.offset:
                raise ValueError("Scale: group and offset are of scales that are quantized; give of=, their format")
        elif not isinstance(of, Format) or of.scale.of is not None:
            raise ValueError(f"Scale: of={of!r} is no Format whose own scales are numbers")
        elif self.dtype != "float32":
            raise ValueError(f"Scale: scales are of {of} or of dtype={self.dtype!r}, not both")
        elif group is None and (of.codes != Floats("float8_e4m3fn") or of.scale != Scale() or self.offset):
            raise ValueError(f"Scale: scales quantized all together are fp8_e4m3, without offset; give group= with {of}")
        _check_group("Scale", group)


_SCALES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "e8m0")


def _check_group(where: str, group: Any) -> None:
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group < 2):
        raise ValueError(f"{where}: group={group!r}; a group has at least 2 values, or is None")


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
      fixed: whether a shorter axis is filled up to such a group, as a block of a specification is; else it is one itself.
    """

    name: str
    shown: str
    codes: Integers | Floats | Table
    bits: int = 8
    order: Literal["low", "high"] = "low"
    scale: Scale = field(default_factory=Scale)
    group: int | None = None
    fixed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.codes, Integers | Floats | Table) or not isinstance(self.scale, Scale):
            raise ValueError(f"format {self.name}: codes are Integers, Floats or a Table, and scale is a Scale")
        if isinstance(self.codes, Floats) and self.bits != 8:
            raise ValueError(f"format {self.name}: {self.codes.dtype} has 8 bits, not {self.bits}")
        if self.order not in ("low", "high"):
            raise ValueError(
                f'format {self.name}: order={self.order!r}; the first code takes the "low" bits or the "high" ones'
            )
        _check_group(f"format {self.name}", self.group)
        for f in _BY_NAME.values():
            if f != self and (f.name == self.name or f.shown == self.shown):
                raise ValueError(
                    f"format {self.name}: typax's {f} is called so and prints {f.shown}; call another format otherwise"
                )
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
        return self.name if _BY_NAME.get(self.name) == self else NotImplemented

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

    def group_of(self, shape: Sequence[Any], axis: int) -> int | None:
        """How many values along an axis share a scale where nobody says: ``None`` is all."""
        n = shape[axis] if -len(shape) <= axis < len(shape) else 0
        alone = len(shape) == 1 and self.scale.group is not None  # scales that are quantized are several
        shorter = self.group is not None and isinstance(n, int) and n < self.group
        return None if shorter and not self.fixed and not alone else self.group

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
_MXFP8 = Format("mxfp8", "mxfp8", E4M3.codes, scale=Scale("e8m0"), group=32, fixed=True)
_MXFP8_E5M2 = Format("mxfp8_e5m2", "mxfp8e5m2", E5M2.codes, scale=Scale("e8m0"), group=32, fixed=True)
_MXFP4 = Format("mxfp4", "mxfp4", FP4, 4, scale=Scale("e8m0"), group=32, fixed=True)
_NVFP4 = Format("nvfp4", "nvfp4", FP4, 4, scale=Scale(of=E4M3), group=16, fixed=True)
_NVFP4_BLOCK = Format("nvfp4_block", "nvfp4b", FP4, 4, scale=Scale("float8_e4m3fn"), group=16, fixed=True)

_ALL = (
    INT8, INT4, UINT8, UINT4, E4M3, E5M2, _NF4, _NF4_DOUBLE, _DYNAMIC8, _MXFP8, _MXFP8_E5M2, _MXFP4, _NVFP4, _NVFP4_BLOCK,
)  # fmt: skip
_BY_NAME.update((f.name, f) for f in _ALL)


def formats() -> MappingProxyType[str, Format]:
    """The formats that `typax.quantize` knows by name."""
    return MappingProxyType(_BY_NAME)


def signed(bits: int) -> Format:
    """Integers of two's complement, of so many bits."""
    name = f"int{bits}"
    return _BY_NAME.get(name) or Format(name, f"q{bits}", Integers(-(1 << bits - 1), (1 << bits - 1) - 1), bits)


def unsigned(bits: int) -> Format:
    """Integers from 0 on, of so many bits."""
    name = f"uint{bits}"
    return _BY_NAME.get(name) or Format(name, f"u{bits}", Integers(0, (1 << bits) - 1), bits)


def format_of(format: str | Format) -> Format:
    """A format, by its name or itself.

    Raises:
      ValueError: for a name that no format has.
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str) or format not in _BY_NAME:
        if re.fullmatch(r"Q\d_[\dK]", str(format), re.IGNORECASE):
            raise ValueError(f"blocks of ggml are made by typax.quantized.quantize_ggml(x, kind={str(format).upper()!r})")
        raise ValueError(
            f"no format is called {format!r}; the formats are {', '.join(_BY_NAME)}, or give a Format of your own"
        )
    return _BY_NAME[format]
