"""Relevance in [0, 1] from fused scores, and candidates that say nothing new."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from retrieval.words import words

SHINGLE_WORDS = 4
DUPLICATE_SIMILARITY = 0.9


@dataclass(frozen=True, slots=True)
class Calibration:
    """A logistic over a candidate's fused score and its lead over the best other candidate.

    A lead is negative for all but the first. With `score` and `lead` not below 0, relevance falls with rank.
    """

    constant: float
    score: float
    lead: float

    def relevances(self, scores: Sequence[float]) -> list[float]:
        """Probability that each candidate answers the query; `scores` are fused, best first."""
        return [_logistic(self.constant + self.score * value + self.lead * lead) for value, lead in features(scores)]


# Fitted on every second question of XQuAD English and Vietnamese and every second turn of MTRAG, over the first ten
# candidates; `python -m bench.retrieval` fits them anew and prints how they hold on the other half.
FITTED = Calibration(constant=-2.6, score=2.0, lead=6.0)


def features(scores: Sequence[float]) -> list[tuple[float, float]]:
    """(score, lead) of each candidate; a single candidate leads by its whole score."""
    if not scores:
        return []
    second = scores[1] if len(scores) > 1 else 0.0
    return [(value, value - (second if rank == 0 else scores[0])) for rank, value in enumerate(scores)]


def duplicates(texts: Sequence[str]) -> set[int]:
    """Indexes of texts that repeat an earlier one: equal words, contained in it, or nearly the same.

    Nearly the same is a Jaccard similarity of word shingles of at least 0.9. A text is contained when its words
    stand in the other's in the same order without a gap.
    """
    dropped: set[int] = set()
    kept: list[tuple[str, frozenset[int]]] = []
    for index, text in enumerate(texts):
        found = words(text)
        line, shingles = f" {' '.join(found)} ", _shingles(found)
        if any(_repeats(line, shingles, *other) for other in kept):
            dropped.add(index)
        else:
            kept.append((line, shingles))
    return dropped


def _repeats(line: str, shingles: frozenset[int], other_line: str, other_shingles: frozenset[int]) -> bool:
    if len(line) <= len(other_line) and line in other_line:
        return True
    smaller, larger = sorted((len(shingles), len(other_shingles)))
    if smaller < DUPLICATE_SIMILARITY * larger:
        return False
    shared = len(shingles & other_shingles)
    union = len(shingles) + len(other_shingles) - shared
    return union > 0 and shared >= DUPLICATE_SIMILARITY * union


def _shingles(found: list[str]) -> frozenset[int]:
    if len(found) < SHINGLE_WORDS:
        return frozenset()
    return frozenset(
        hash(tuple(found[start : start + SHINGLE_WORDS])) for start in range(len(found) - SHINGLE_WORDS + 1)
    )


def _logistic(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)
