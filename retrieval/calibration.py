"""Relevance in [0, 1] from fused scores, and candidates that say nothing new."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

SHINGLE_WORDS = 4
DUPLICATE_SIMILARITY = 0.9
# A text whose words are longer than this on average is written without spaces between words.
_LONGEST_MEAN_WORD = 14


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
FITTED = Calibration(constant=-1.78, score=2.3, lead=12.65)


def features(scores: Sequence[float]) -> list[tuple[float, float]]:
    """(score, lead) of each candidate; a single candidate leads by its whole score."""
    if not scores:
        return []
    second = scores[1] if len(scores) > 1 else 0.0
    return [(value, value - (second if rank == 0 else scores[0])) for rank, value in enumerate(scores)]


def duplicates(texts: Sequence[str]) -> set[int]:
    """Indexes of texts that repeat an earlier one: equal but for case and spacing, contained in it, or nearly equal.

    Nearly equal is a Jaccard similarity of at least 0.9 between their shingles of four words, or of four pairs of
    letters where the script has no spaces. Of two texts of which the later contains the earlier, both stay.
    """
    dropped: set[int] = set()
    kept: list[_Content] = []
    for index, text in enumerate(texts):
        content = _Content.of(text)
        if any(_repeats(content, other) for other in kept):
            dropped.add(index)
        else:
            kept.append(content)
    return dropped


@dataclass(frozen=True, slots=True)
class _Content:
    line: str
    pieces: tuple[str, ...]
    distinct: frozenset[str]

    @staticmethod
    def of(text: str) -> "_Content":
        found = unicodedata.normalize("NFC", text).casefold().split()
        line = " ".join(found)
        unspaced = len(line) > _LONGEST_MEAN_WORD * len(found)
        pieces = tuple(map("".join, pairwise(line))) if unspaced else tuple(found)
        return _Content(line, pieces, frozenset(pieces))

    def shingles(self) -> frozenset[tuple[str, ...]]:
        return frozenset(
            self.pieces[start : start + SHINGLE_WORDS] for start in range(len(self.pieces) - SHINGLE_WORDS + 1)
        )


def _repeats(content: _Content, other: _Content) -> bool:
    if content.line in other.line:
        return True
    # Texts with nearly equal shingles have nearly equal words; sets of words are compared faster.
    if _similarity(content.distinct, other.distinct) < DUPLICATE_SIMILARITY - 0.1:
        return False
    return _similarity(content.shingles(), other.shingles()) >= DUPLICATE_SIMILARITY


def _similarity(first: frozenset[T], second: frozenset[T]) -> float:
    """Jaccard; 0 for two empty sets."""
    smaller, larger = len(first), len(second)
    if smaller > larger:
        smaller, larger = larger, smaller
    if smaller < (DUPLICATE_SIMILARITY - 0.1) * larger or not larger:
        return 0.0
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


def _logistic(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)
