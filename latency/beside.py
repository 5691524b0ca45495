"""What running answers add to a prefill: learned apart, so that it never bends the model of the idle engine."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from latency.conformal import ErrorWindow, PredictionError
from latency.fit import Belief, robust_fit
from latency.model import PrefillModel
from latency.samples import PrefillSample, observations
from latency.speed import DecodeLoad

WINDOW = 256
LEAST_SAMPLES = 8
REFIT_EVERY = 4
WIDTH = 3.0


class BesideDecode:
    """The last 256 prefills that ran beside answers being decoded, and the load fitted on what they took too long."""

    def __init__(
        self,
        samples: Iterable[PrefillSample] = (),
        errors: Iterable[PredictionError] = (),
        load: tuple[float, float, float] | None = None,
    ) -> None:
        self._samples = deque(samples, maxlen=WINDOW)
        self.errors = ErrorWindow(errors)
        self.load = load
        self._taken = 0

    def __iter__(self) -> Iterator[PrefillSample]:
        return iter(self._samples)

    def observe(self, sample: PrefillSample, idle: PrefillModel) -> float | None:
        """Takes in a sample; log(actual / predicted) where a prediction was possible before it."""
        predicted_s = self.predict_s(sample, idle)
        self._samples.append(sample)
        self._taken += 1
        if predicted_s is not None:
            self.errors.add(PredictionError(predicted_s, sample.seconds / predicted_s, sample.number))
        if len(self._samples) >= LEAST_SAMPLES and (self.load is None or self._taken % REFIT_EVERY == 0):
            self._fit(idle)
        return None if predicted_s is None else float(np.log(sample.seconds / predicted_s))

    def predict_s(self, sample: PrefillSample, idle: PrefillModel) -> float | None:
        if self.load is None:
            return None
        u, n = sample.uncached_tokens, sample.decoding
        extra_s = DecodeLoad(*self.load, factor=1.0).extra_s(u, n)
        return idle.predict_s(u, sample.cached_tokens) + extra_s

    def described(self, quantile: float) -> DecodeLoad | None:
        return None if self.load is None else DecodeLoad(*self.load, factor=self.errors.factor(quantile))

    def rescale(self, ratio: float, since: int) -> None:
        """The engine has become `ratio` times slower: forgets what was measured before the request `since`."""
        self._samples = deque((s for s in self._samples if s.number >= since), maxlen=WINDOW)
        self.errors.drop_since(since)
        if self.load is not None:
            fixed_s, per_answer_s, per_answer_token_s = self.load
            self.load = (fixed_s * ratio, per_answer_s * ratio, per_answer_token_s * ratio)

    def _fit(self, idle: PrefillModel) -> None:
        table = observations(self._samples)
        u, n = table.uncached, table.decoding
        idle_s = idle.fixed_s + idle.per_token_s * u + idle.per_pair_s * u * (table.cached + u / 2)
        columns = np.stack([np.ones_like(u), n, n * u], axis=1)
        # Nothing is added until samples say so; the width is what would multiply a usual prefill.
        usual_s, usual_n, usual_u = (max(float(np.median(x)), 1e-6) for x in (idle_s, n, u))
        width = WIDTH * usual_s * np.array([1.0, 1 / usual_n, 1 / (usual_n * usual_u)])
        belief = Belief(np.zeros(3), width)
        start = np.zeros(3) if self.load is None else np.array(self.load)
        theta, _ = robust_fit(columns, table.seconds, idle_s, table.weight, n.astype(np.int64), belief, start)
        self.load = (float(theta[0]), float(theta[1]), float(theta[2]))
