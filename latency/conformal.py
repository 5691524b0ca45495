"""How far recent predictions were off, and the factor that covers a given share of them."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from latency.samples import Floats
from latency.speed import SizeFactor

WINDOW = 400
MOST_CLASSES = 4
LEAST_IN_CLASS = 60
UNPROVEN_MARGIN = 0.25


@dataclass(frozen=True, slots=True)
class PredictionError:
    """`predicted_s` was said before the request `number` ran; `ratio` is actual / predicted."""

    predicted_s: float
    ratio: float
    number: int


class ErrorWindow:
    """The last 400 out-of-sample errors."""

    def __init__(self, errors: Iterable[PredictionError] = ()) -> None:
        self._errors = deque(errors, maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._errors)

    def __iter__(self) -> Iterator[PredictionError]:
        return iter(self._errors)

    def add(self, error: PredictionError) -> None:
        self._errors.append(error)

    def clear(self) -> None:
        self._errors.clear()

    def drop_since(self, number: int) -> None:
        """Forgets the errors of requests from `number` on."""
        kept = [error for error in self._errors if error.number < number]
        self._errors = deque(kept, maxlen=WINDOW)

    def spread(self) -> float | None:
        """Robust standard deviation of log(actual / predicted) about zero; None below 10 errors."""
        if len(self._errors) < 10:
            return None
        return float(1.4826 * np.median(np.abs(np.log([error.ratio for error in self._errors]))))

    def factor(self, quantile: float) -> float:
        return conformal_factor(np.array([error.ratio for error in self._errors]), quantile)

    def size_factors(self, quantile: float) -> tuple[SizeFactor, ...]:
        """Factors by predicted seconds, in at most four classes of equal counts; empty where errors are too few.

        Relative errors of short prefills are larger (a jitter of milliseconds); they must not widen the long ones'.
        """
        classes = min(MOST_CLASSES, len(self._errors) // max(LEAST_IN_CLASS, 2 * least_errors(quantile)))
        if classes < 2:
            return ()
        predicted = np.array([error.predicted_s for error in self._errors])
        ratios = np.array([error.ratio for error in self._errors])
        edges = np.unique(np.quantile(predicted, np.arange(1, classes) / classes)).tolist()
        found: list[SizeFactor] = []
        above = -math.inf
        for edge in [*edges, math.inf]:
            inside = ratios[(predicted > above) & (predicted <= edge)]
            found.append(SizeFactor(edge, conformal_factor(inside, quantile)))
            above = edge
        return tuple(found)


def least_errors(quantile: float) -> int:
    """The fewest errors with which the conformal rule gives a finite factor: ceil((n + 1)·q) ≤ n."""
    return math.ceil(quantile / (1 - quantile) - 1e-9)


def conformal_factor(ratios: Floats, quantile: float) -> float:
    """The ceil((n + 1)·q)-th smallest ratio: a new one is at most that with probability ≥ q (Vovk et al. 2005).

    With too few ratios for the rule: the greatest, and at least a margin that shrinks from 25 % as they come in.
    Never below 1, so that a safe time is never below the predicted one.
    """
    n = len(ratios)
    rank = math.ceil((n + 1) * quantile - 1e-9)
    if rank <= n:
        return max(1.0, float(np.partition(ratios, rank - 1)[rank - 1]))
    missing = 1 - n / least_errors(quantile)
    return max(1 + UNPROVEN_MARGIN * missing, float(ratios.max(initial=1.0)))
