"""What the references and typax are given: the same numbers wherever they are made, of integers and one rounding."""

import numpy as np

F = np.float32
USUAL = slice(0, 20)
"""The rows of `edges` on which nothing is peculiar but their values."""

ZEROS, SUBNORMAL, NAN, INF = 20, 21, 22, 23


def normal(seed, *shape):
    """About normal numbers: sums of four integers of 16 bits."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))).reshape(shape)
    total = sum(((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    return ((total - 2 * 65535) * (0.7310585 / 32768)).astype(F)


def edges(table):
    """Rows of 64 values [24, 64]; ``table`` is that of nf4, whose middles are in one of them."""
    k, x = 64, normal(1, 24, 64)
    x[:8] *= F(2.0) ** np.arange(-12, 20, 4)[:, None].astype(F)
    steps = np.arange(k)
    x[8] = (steps - 32) * F(0.5) * np.where(steps % 2, -1, 1)
    x[9] = np.where(steps == 0, F(127), (steps - 20) + F(0.5))  # ties of int8
    x[10] = np.where(steps == 63, F(-7), (steps % 14 - 7) + F(0.5))  # of int4
    x[11] = np.where(steps % 16 == 0, F(6), (steps % 25) * F(0.25) * np.where(steps % 2, -1, 1))  # of fp4
    middles = ((table[1:].astype(np.float64) + table[:-1]) / 2).astype(F)
    x[12] = np.resize(np.concatenate([middles, [1.0]]).astype(F), k)  # of nf4
    x[13, 5] = 1e4
    x[14], x[15] = np.abs(x[14]), -np.abs(x[15])
    x[16] *= F(1e-25)
    x[17] *= F(1e25)
    x[18] = np.nextafter(F(2.0) ** (steps % 7).astype(F), F(np.inf))
    x[19] = np.nextafter(F(2.0) ** (steps // 8).astype(F), F(0))
    x[ZEROS] = np.where(steps % 3 == 0, F(-0.0), F(0))
    x[SUBNORMAL] = np.where(steps % 2, F(1e-40), F(-3e-39))
    x[NAN, 3], x[INF, 7], x[INF, 9] = np.nan, np.inf, -np.inf
    return x
