"""Joins the lexical and the dense result of one store, so that a half that is lost does not ruin the answer.

A score is the lexical share (0 to 1: how much of the query's BM25 mass the chunk holds) plus the weighted, trusted
standing of its cosine. Standing is measured against the crowd: how many standard deviations the cosine lies above the
store's mean, in units of what the best of as many random draws would reach, sqrt(2 ln n). An embedder that knows the
language lifts the right chunks far out of the crowd; one that does not gives all chunks like cosines, and then the
best of them stands no higher than chance would put it. That is how far the dense half is trusted, per query.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Crowd:
    """The query's cosines over a store: mean, standard deviation, and the number of rows."""

    mean: float
    deviation: float
    rows: int

    def standing(self, cosines: NDArray[np.floating]) -> Floats:
        """1 is what the best of `rows` draws from a normal distribution would reach; 0 is the mean."""
        if self.deviation <= 0:
            return np.zeros(len(cosines), dtype=np.float64)
        expected_best = math.sqrt(2 * math.log(max(self.rows, 2)))
        return (cosines.astype(np.float64) - self.mean) / (self.deviation * expected_best)


def crowd(cosines: NDArray[np.float32], rows: int) -> Crowd:
    """From the cosines of a sample of the store's `rows`."""
    if not len(cosines):
        return Crowd(0.0, 0.0, rows)
    deviation = float(cosines.std())
    # Equal vectors differ by rounding alone, and nothing stands out of rounding.
    return Crowd(float(cosines.mean()), deviation if deviation > 1e-5 else 0.0, rows)


@dataclass(frozen=True, slots=True)
class Fusion:
    """One setting for all languages; `python -m bench.retrieval` shows how little its figures hang on the values.

    `dense_weight` weighs the standing of a cosine against a lexical share. The standing of the best chunk at which
    the dense half counts as lost is `lost_standing`; from `sure_standing` on it is trusted in full. `least_trust`
    remains where it is lost: where no word matches either, a doubtful order is better than none.
    """

    dense_weight: float = 0.5
    lost_standing: float = 0.7
    sure_standing: float = 1.2
    least_trust: float = 0.05

    def trust(self, best_standing: float) -> float:
        """`least_trust` (lost) to 1 (sure): how far the dense half can be believed for this query."""
        slope = (best_standing - self.lost_standing) / (self.sure_standing - self.lost_standing)
        return min(1.0, max(self.least_trust, slope))

    def scores(self, shares: NDArray[np.floating], cosines: NDArray[np.floating], of: Crowd) -> Floats:
        """Scores of candidates (higher is better) from their lexical shares and cosines, in the same order."""
        if not len(cosines):
            return np.zeros(0, dtype=np.float64)
        standing = of.standing(cosines)
        weight = self.dense_weight * self.trust(float(standing.max()))
        scores: Floats = shares.astype(np.float64) + weight * standing
        return scores


DEFAULT_FUSION = Fusion()
