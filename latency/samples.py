"""A bounded window of prefill samples in which no kind of request pushes the others out."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PER_STRATUM = 16
LEAST_BITS, MOST_BITS = 5, 15
HALF_LIFE_REQUESTS = 1000
LEAST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill that was measured. `number` counts the observations of a learner; `decoding` the answers that
    were being decoded beside it."""

    uncached_tokens: int
    cached_tokens: int
    seconds: float
    number: int
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class Observations:
    """Samples as arrays of one length (float64): tokens, seconds, running answers, weight in (0, 1], and stratum
    (any number that is equal for samples of one kind)."""

    uncached: Floats
    cached: Floats
    seconds: Floats
    decoding: Floats
    weight: Floats
    stratum: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.seconds)

    def reach(self) -> "Reach":
        pairs = self.uncached * (self.cached + self.uncached / 2)
        return Reach(float(self.uncached.min()), float(self.uncached.max()), float(pairs.max()))

    def without(self, position: int) -> "Observations":
        others = np.arange(len(self)) != position
        return Observations(
            self.uncached[others],
            self.cached[others],
            self.seconds[others],
            self.decoding[others],
            self.weight[others],
            self.stratum[others],
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """The least and most uncached tokens, and the most attention pairs u·(c + u/2), of what was measured."""

    least_uncached: float
    most_uncached: float
    most_pairs: float

    def surrounds(self, uncached_tokens: int, cached_tokens: int) -> bool:
        """Whether a request lies within, or at most a factor of 2 beyond, what was measured."""
        pairs = uncached_tokens * (cached_tokens + uncached_tokens / 2)
        inside = self.least_uncached / 2 <= uncached_tokens <= 2 * self.most_uncached
        return inside and pairs <= 2 * self.most_pairs


def stratum_of(uncached_tokens: int, cached_tokens: int) -> tuple[int, int]:
    """Octaves of the uncached tokens, 32 to 16,384; cached tokens in steps of four: none, below 512, 2,048, 8,192."""
    octave = min(max(uncached_tokens.bit_length(), LEAST_BITS), MOST_BITS)
    depth = 0 if cached_tokens == 0 else min(max((cached_tokens.bit_length() - 6) // 2, 1), 4)
    return octave, depth


class SampleWindow:
    """At most `per_stratum` newest samples of each stratum: 55 strata at most, so 880 samples.

    A sample's weight halves every 1,000 requests, down to a tenth: what is rarely asked keeps its say about the
    shape, but not against what is measured now.
    """

    def __init__(self, per_stratum: int = PER_STRATUM) -> None:
        self._per_stratum = per_stratum
        self._strata: dict[tuple[int, int], deque[PrefillSample]] = {}

    def __len__(self) -> int:
        return sum(len(samples) for samples in self._strata.values())

    def __iter__(self) -> Iterator[PrefillSample]:
        """Stratum by stratum, newest first within each."""
        for samples in self._strata.values():
            yield from reversed(samples)

    def add(self, sample: PrefillSample) -> None:
        key = stratum_of(sample.uncached_tokens, sample.cached_tokens)
        self._strata.setdefault(key, deque(maxlen=self._per_stratum)).append(sample)

    def keep_since(self, number: int) -> None:
        """Forgets the samples whose number is below `number`."""
        for key, samples in list(self._strata.items()):
            kept = [sample for sample in samples if sample.number >= number]
            if kept:
                self._strata[key] = deque(kept, maxlen=self._per_stratum)
            else:
                del self._strata[key]

    def sizes(self) -> int:
        """How many different (uncached, cached) it holds."""
        return len({(sample.uncached_tokens, sample.cached_tokens) for sample in self})

    def observations(self) -> Observations:
        return observations(self)


def observations(samples: Iterable[PrefillSample]) -> Observations:
    """The samples as arrays; ages count from the newest."""
    rows = [
        (
            s.uncached_tokens,
            s.cached_tokens,
            s.seconds,
            s.decoding,
            s.number,
            *stratum_of(s.uncached_tokens, s.cached_tokens),
        )
        for s in samples
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 7)
    number = table[:, 4]
    age = number.max(initial=0.0) - number
    return Observations(
        uncached=table[:, 0],
        cached=table[:, 1],
        seconds=table[:, 2],
        decoding=table[:, 3],
        weight=np.maximum(0.5 ** (age / HALF_LIFE_REQUESTS), LEAST_WEIGHT),
        stratum=(table[:, 5] * 8 + table[:, 6]).astype(np.int64),
    )
