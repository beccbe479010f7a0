"""The formats once more, in NumPy, from their specifications: what `typax.quantize` is compared with, bit by bit."""

import ml_dtypes
import numpy as np

F = np.float32
TINY = F(2.0**-126)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
# the table of the paper (appendix E), as bitsandbytes prints it
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], F)  # fmt: skip


def entering(x):
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(F)
    return np.where(np.abs(x) < TINY, np.copysign(F(0), x), x).astype(F)


def units(x, s):
    less = np.where(s > F(2.0**100), F(2.0**-32), F(1))
    return (x * less) * (F(1) / (s * less))


def fp4(y):
    """Codes of e2m1: nearest, ties to the even fraction, saturated."""
    m = np.minimum(np.abs(y), F(6))
    i = np.argmin(np.abs(FP4[:, None].astype(np.float64) - m.reshape(1, -1)), 0)  # the lower one at ties
    i = i.reshape(m.shape)
    up = np.minimum(i + 1, 7)
    tie = (m.astype(np.float64) - FP4[i] == FP4[up].astype(np.float64) - m) & (i < 7)
    i = np.where(tie & (i % 2 == 1), up, i)
    return (i | np.signbit(y) << 3).astype(np.uint8)


def pack4(c, high=False):
    lo, hi = (c[..., 1::2], c[..., 0::2]) if high else (c[..., 0::2], c[..., 1::2])
    return ((lo & 15) | (hi << 4)).astype(np.uint8)


def cast8(y, dtype):
    most = F(ml_dtypes.finfo(dtype).max)
    return np.clip(y, -most, most).astype(dtype)


def quantize(name, x, zero_point=False):
    """Codes (packed), scales (a tuple for two levels) and zero points of rows, ``x`` [..., g]."""
    x = entering(x)
    bad = ~np.isfinite(x).all(-1)
    x = np.where(bad[..., None], F(0), x)
    a = np.abs(x).max(-1, initial=F(0))
    with np.errstate(all="ignore"):
        return _quantize(name, x, a, bad, zero_point)


def _quantize(name, x, a, bad, zero_point):
    nan = lambda s: np.where(bad, np.array(np.nan, s.dtype), s)
    if name in ("int8", "int4", "uint8", "uint4"):
        signed, bits = name[0] == "i", int(name[-1])
        q = 2 ** (bits - signed) - 1
        low = -(q + 1) if signed else 0
        if zero_point:
            steps = q - low
            mn, mx = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
            s = np.maximum((mx * F(0.5) - mn * F(0.5)) * F(2 / steps), TINY)
            z = np.clip(np.rint(units(-mn, s)), 0, steps) + low
            c = np.clip(np.rint(units(x, s[..., None])) + z[..., None], low, q)
        else:
            s, z = np.maximum(a * F(1 / q), TINY), None
            c = np.rint(np.clip(units(x, s[..., None]), -q if signed else 0, q))
        c = c.astype(np.int8 if signed else np.uint8)
        z = None if z is None else z.astype(c.dtype)
        return (c if bits == 8 else pack4(c.view(np.uint8))), nan(s), z
    if name.startswith("fp8"):
        dtype = ml_dtypes.float8_e4m3fn if name == "fp8_e4m3" else ml_dtypes.float8_e5m2
        s = np.maximum(a * F(1 / float(ml_dtypes.finfo(dtype).max)), TINY)
        return cast8(units(x, s[..., None]), dtype), nan(s), None
    if name == "nf4":
        s = np.maximum(a, TINY)
        t = np.clip(units(x, s[..., None]), -1, 1)
        middles = ((NF4[1:].astype(np.float64) + NF4[:-1]) / 2).astype(F)
        return pack4((t[..., None] > middles).sum(-1).astype(np.uint8), high=True), nan(s), None
    if name.startswith("mx"):
        dtype = {"mxfp8": ml_dtypes.float8_e4m3fn, "mxfp8_e5m2": ml_dtypes.float8_e5m2}.get(name)
        emax = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp4": 2}[name]
        e = np.where(a == 0, -127, np.frexp(a)[1] - 1 - emax)
        e = np.clip(e, -127, 127)
        y = np.ldexp(x.astype(np.float64), -e[..., None]).astype(F)
        c = pack4(fp4(y)) if dtype is None else cast8(y, dtype)
        return c, np.where(bad, 255, e + 127).astype(np.uint8), None
    e4m3 = ml_dtypes.float8_e4m3fn
    if name == "nvfp4_block":
        s8 = np.clip(a / F(6), F(2.0**-6), F(448)).astype(e4m3)
        return pack4(fp4(x * (F(1) / s8.astype(F))[..., None])), nan(s8), None
    assert name == "nvfp4"
    g = np.maximum(a.max(initial=F(0)) / F(448 * 6), TINY)
    s8 = np.clip((a / F(6)) / g, F(2.0**-6), F(448)).astype(e4m3)
    return pack4(fp4(x * ((F(1) / g) / s8.astype(F))[..., None])), (nan(s8), g), None
