"""Learns a replica's speed from the requests that it served."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from latency.beside import BesideDecode
from latency.conformal import ErrorWindow, PredictionError
from latency.decode import DecodeRate
from latency.drift import DriftTest
from latency.fit import fit_prefill
from latency.kept import CorruptSpeed, KeptSpeed, read, written
from latency.model import PrefillModel
from latency.samples import PrefillSample, Reach, SampleWindow
from latency.speed import SpeedEstimate, SpeedSource

__all__ = ["CorruptSpeed", "SpeedLearner"]

LEAST_SAMPLES = 5
LEAST_SIZES = 3
REFIT_ALWAYS_BELOW = 32
REFIT_EVERY = 4
MOST_LEFT_OUT = 64
LEARNED_AFTER = 20
SETTLED_AFTER = 20
SPREAD_UNKNOWN = 0.1


class SpeedLearner:
    """One per replica; pure and synchronous, to be used from one thread. State is bounded: 880 prefills, 256 beside
    running answers, 400 errors of each kind, 100 answers. An observation costs about a millisecond at most."""

    def __init__(self, quantile: float = 0.95) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, not {quantile}")
        self._quantile = quantile
        self._source: SpeedSource = "learned"
        self._observed = 0
        self._since_source = 0
        self._since_start = 0
        self._window = SampleWindow()
        self._reach: Reach | None = None
        self._model: PrefillModel | None = None
        self._anchor: PrefillModel | None = None
        self._fit_spread = SPREAD_UNKNOWN
        self._errors = ErrorWindow()
        self._beside = BesideDecode()
        self._decode = DecodeRate()
        self._idle_drift, self._beside_drift = DriftTest(), DriftTest()
        self._drifting = False
        self._drifts = 0
        self._settling: deque[float] = deque(maxlen=SETTLED_AFTER)
        self._estimate: SpeedEstimate | None = None
        self._stale = False
        self._together = self._refit_due = False

    @property
    def estimate(self) -> SpeedEstimate | None:
        """None until five prefills of three sizes have been seen on an engine that decodes nothing."""
        if self._stale:
            self._estimate, self._stale = self._described(), False
        return self._estimate

    @property
    def drifts(self) -> int:
        """How often the engine was found to have changed its speed."""
        return self._drifts

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is observed inside came together: one fit at the end serves all of it.

        The errors are of the model that was known before, as it foretold these requests.
        """
        self._together = True
        try:
            yield
        finally:
            self._together = False
            if self._refit_due:
                self._refit()
                self._stale = True

    def observe_prefill(self, uncached_tokens: int, cached_tokens: int, seconds: float, *, decoding: int = 0) -> None:
        """A prefill that ran alone but for `decoding` answers being decoded beside it.

        No uncached token counts as one: the engine always computes the last. Raises ValueError for a negative count
        or a time that is not positive and finite.
        """
        if min(uncached_tokens, cached_tokens, decoding) < 0:
            raise ValueError("token and answer counts must not be negative")
        _require_time(seconds)
        self._observed += 1
        self._since_source += 1
        self._since_start += 1
        self._stale = True
        if self._source != "learned" and self._since_source > LEARNED_AFTER:
            self._source = "learned"
        sample = PrefillSample(max(uncached_tokens, 1), cached_tokens, seconds, self._observed, decoding)
        if decoding == 0:
            self._take_idle(sample, self._model)
        elif self._model is not None:
            self._take_beside(sample, self._model)

    def observe_decode(self, output_tokens: int, seconds: float) -> None:
        """An answer's tokens after its first, and the time they took together."""
        _require_time(seconds)
        self._decode.observe(output_tokens, seconds)
        self._stale = True

    def calibrated(self) -> None:
        """What was seen so far was a calibration: later fits keep to it where new samples say nothing."""
        self._refit()
        self._source, self._since_source = "calibrated", 0
        self._anchor = self._model
        self._retake_errors()
        self._stale = True

    def dump(self) -> bytes:
        """At most about 100 KiB."""
        state = KeptSpeed(
            observed=self._observed,
            model=_numbers(self._model),
            anchor=_numbers(self._anchor),
            samples=tuple(_sample_row(sample) for sample in sorted(self._window, key=lambda s: s.number)),
            errors=tuple(_error_row(error) for error in self._errors),
            beside=self._beside.load,
            beside_samples=tuple(_sample_row(sample) for sample in self._beside),
            beside_errors=tuple(_error_row(error) for error in self._beside.errors),
            token_seconds=self._decode.token_seconds,
        )
        return written(state)

    @classmethod
    def load(cls, raw: bytes, quantile: float) -> Self:
        """A learner that goes on from `dump`. Raises CorruptSpeed."""
        state = read(raw)
        learner = cls(quantile)
        learner._source = "kept"
        learner._observed = learner._since_start = state.observed
        learner._model, learner._anchor = _model(state.model), _model(state.anchor)
        for row in state.samples:
            learner._window.add(PrefillSample(*row))
        if state.samples:
            learner._reach = learner._window.observations().reach()
        learner._errors = ErrorWindow(PredictionError(*row) for row in state.errors)
        learner._beside = BesideDecode(
            (PrefillSample(*row) for row in state.beside_samples),
            (PredictionError(*row) for row in state.beside_errors),
            state.beside,
        )
        learner._decode = DecodeRate(state.token_seconds)
        learner._stale = True
        return learner

    def _take_idle(self, sample: PrefillSample, model: PrefillModel | None) -> None:
        if model is not None:
            u, c = sample.uncached_tokens, sample.cached_tokens
            predicted_s = model.predict_s(u, c)
            self._errors.add(PredictionError(predicted_s, sample.seconds / predicted_s, sample.number))
            # Beyond what was measured an error says that the model was extended too far, not that the engine changed.
            if self._reach is not None and self._reach.surrounds(u, c):
                spread = self._errors.spread() or self._fit_spread
                onset = self._judged(self._idle_drift, sample, math.log(sample.seconds / predicted_s), spread)
                if onset is not None:
                    self._window.add(sample)
                    self._start_again(onset, model)
                    return
        self._window.add(sample)
        if self._since_start < REFIT_ALWAYS_BELOW or self._observed % REFIT_EVERY == 0:
            self._refit_due = True
            if not self._together or self._model is None:
                self._refit()

    def _take_beside(self, sample: PrefillSample, idle: PrefillModel) -> None:
        log_error = self._beside.observe(sample, idle)
        spread = self._beside.errors.spread()
        if log_error is None or spread is None:
            return
        onset = self._judged(self._beside_drift, sample, log_error, spread)
        if onset is not None:
            self._start_again(onset, idle)

    def _judged(self, test: DriftTest, sample: PrefillSample, log_error: float, spread: float) -> int | None:
        if self._drifting:
            self._settling.append(abs(log_error))
            limit = max(2 * spread, SPREAD_UNKNOWN)
            if len(self._settling) == SETTLED_AFTER and float(np.median(self._settling)) <= limit:
                self._drifting = False
        return test.add(log_error, spread, sample.number)

    def _refit(self) -> None:
        self._refit_due = False
        samples = self._window.observations()
        if len(samples) == 0 or (self._anchor is None and not self._enough()):
            return
        fit = fit_prefill(samples, self._anchor, self._model)
        self._model, self._fit_spread, self._reach = fit.model, fit.spread, samples.reach()

    def _enough(self) -> bool:
        return len(self._window) >= LEAST_SAMPLES and self._window.sizes() >= LEAST_SIZES

    def _start_again(self, onset: int, old: PrefillModel) -> None:
        """A changed engine has the shape of the old one at another scale, until its own samples say otherwise."""
        ratios = [
            s.seconds / old.predict_s(s.uncached_tokens, s.cached_tokens) for s in self._window if s.number >= onset
        ]
        for sample in self._beside:
            predicted_s = self._beside.predict_s(sample, old)
            if sample.number >= onset and predicted_s is not None:
                ratios.append(sample.seconds / predicted_s)
        ratio = float(np.median(ratios))
        self._model = PrefillModel(old.fixed_s * ratio, old.per_token_s * ratio, old.per_pair_s * ratio)
        self._anchor = self._model
        self._window.keep_since(onset)
        self._errors.drop_since(onset)
        self._beside.rescale(ratio, onset)
        self._idle_drift, self._beside_drift = DriftTest(), DriftTest()
        self._drifting, self._drifts, self._since_start = True, self._drifts + 1, 0
        self._settling.clear()
        self._refit()

    def _retake_errors(self) -> None:
        """Foretells each of the newest samples by a fit of all others: out of sample, and without the errors of the
        first fits, which had a handful of samples. So a calibration of 20 has the 19 errors that the factor needs."""
        samples = self._window.observations()
        rows = list(self._window)
        newest = sorted(range(len(rows)), key=lambda position: rows[position].number)[-MOST_LEFT_OUT:]
        if self._model is None or len(rows) <= LEAST_SAMPLES:
            return
        self._errors.clear()
        for position in newest:
            sample = rows[position]
            model = fit_prefill(samples.without(position), None, self._model).model
            predicted_s = model.predict_s(sample.uncached_tokens, sample.cached_tokens)
            self._errors.add(PredictionError(predicted_s, sample.seconds / predicted_s, sample.number))

    def _described(self) -> SpeedEstimate | None:
        if self._model is None:
            return None
        return SpeedEstimate(
            prefill=self._model,
            factor=self._errors.factor(self._quantile),
            quantile=self._quantile,
            samples=len(self._window),
            source=self._source,
            drifting=self._drifting,
            token_s=self._decode.token_s,
            safe_token_s=self._decode.safe_token_s(self._quantile),
            size_factors=self._errors.size_factors(self._quantile),
            beside=self._beside.described(self._quantile),
        )


def _require_time(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, not {seconds}")


def _numbers(model: PrefillModel | None) -> tuple[float, float, float] | None:
    return None if model is None else (model.fixed_s, model.per_token_s, model.per_pair_s)


def _model(numbers: tuple[float, float, float] | None) -> PrefillModel | None:
    return None if numbers is None else PrefillModel(*numbers)


def _sample_row(sample: PrefillSample) -> tuple[int, int, float, int, int]:
    return sample.uncached_tokens, sample.cached_tokens, sample.seconds, sample.number, sample.decoding


def _error_row(error: PredictionError) -> tuple[float, float, int]:
    return error.predicted_s, error.ratio, error.number
