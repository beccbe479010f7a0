"""How near one set of embeddings is to another: by direction, and by what one would use them for.

With rows aᵢ and bᵢ for the same sentence i: the cosine of aᵢ to bᵢ, and, over all pairs i < j, how far the
similarity cos(aᵢ, aⱼ) agrees with cos(bᵢ, bⱼ): their largest difference, and Spearman's correlation of their
ranks, which is 1 if every search by similarity gives its hits in the same order.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata


class Quality(NamedTuple):
    mean_cosine: float
    min_cosine: float
    spearman: float  # of the similarities of all pairs
    max_difference: float  # of the similarity of any pair


def compare(a: ArrayLike, b: ArrayLike) -> Quality:
    """Compare embeddings float[N, D] with embeddings float[N, D] of the same N >= 3 sentences."""
    a, b = unit(a), unit(b)
    if a.shape != b.shape:
        raise ValueError(f"embeddings of different shapes cannot be compared: {a.shape} and {b.shape}")
    cosines = np.sum(a * b, axis=1)
    s, t = similarities(a), similarities(b)
    rank = float(np.corrcoef(rankdata(s), rankdata(t))[0, 1])
    return Quality(float(cosines.mean()), float(cosines.min()), rank, float(np.abs(s - t).max()))


def similarities(a: ArrayLike) -> np.ndarray:
    """Cosines of all pairs i < j of rows of a[N, D], float64[N (N - 1) / 2]."""
    a = unit(a)
    return (a @ a.T)[np.triu_indices(len(a), k=1)]


def unit(a: ArrayLike) -> np.ndarray:
    """The rows of a[N, D], in float64 and of length 1."""
    a = np.asarray(a, np.float64)
    return a / np.linalg.norm(a, axis=1, keepdims=True)
