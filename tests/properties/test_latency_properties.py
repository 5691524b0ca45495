"""What holds of every speed estimate, every drift test and every factor."""

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from latency.conformal import conformal_factor
from latency.drift import DriftTest
from latency.fit import fit_prefill
from latency.learner import CorruptSpeed, SpeedLearner
from latency.model import UNBOUNDED_TOKENS, PrefillModel
from latency.samples import PrefillSample, observations
from latency.speed import DecodeLoad, SizeFactor, SpeedEstimate

coefficients = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))
models = st.builds(PrefillModel, st.floats(0, 1), coefficients, st.one_of(st.just(0.0), st.floats(1e-15, 1e-3)))
factors = st.floats(1.0, 3.0)


@st.composite
def classes(draw: st.DrawFn) -> tuple[SizeFactor, ...]:
    edges = sorted(draw(st.sets(st.floats(1e-3, 10.0), max_size=3)))
    if not edges:
        return ()
    return tuple(SizeFactor(edge, draw(factors)) for edge in [*edges, math.inf])


loads = st.none() | st.builds(DecodeLoad, st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 1e-3), factors)
estimates = st.builds(
    SpeedEstimate,
    prefill=models,
    factor=factors,
    quantile=st.just(0.95),
    samples=st.just(50),
    source=st.just("learned"),
    size_factors=classes(),
    beside=loads,
)
cached_counts = st.integers(0, 100_000)


@settings(max_examples=500, deadline=None)
@given(estimates, st.floats(0, 100), cached_counts, st.integers(0, 8))
def test_most_uncached_is_the_last_that_is_safe(
    estimate: SpeedEstimate, seconds: float, cached: int, decoding: int
) -> None:
    most = estimate.most_uncached(seconds, cached, decoding=decoding)
    assert -1 <= most <= UNBOUNDED_TOKENS
    if most >= 0:
        assert estimate.safe_s(most, cached, decoding=decoding) <= seconds
    if most < UNBOUNDED_TOKENS:
        assert estimate.safe_s(most + 1, cached, decoding=decoding) > seconds


@settings(max_examples=300, deadline=None)
@given(estimates, st.integers(0, 100_000), st.integers(0, 1000), cached_counts, st.integers(0, 8))
def test_a_safe_time_never_falls_as_tokens_or_answers_are_added_and_covers_the_prediction(
    estimate: SpeedEstimate, uncached: int, more: int, cached: int, decoding: int
) -> None:
    safe_s = estimate.safe_s(uncached, cached, decoding=decoding)
    assert safe_s <= estimate.safe_s(uncached + more, cached, decoding=decoding)
    assert safe_s <= estimate.safe_s(uncached, cached + more, decoding=decoding)
    assert safe_s <= estimate.safe_s(uncached, cached, decoding=decoding + 1)
    assert safe_s >= estimate.predict_s(uncached, cached, decoding=decoding)


@settings(max_examples=500, deadline=None)
@given(models, st.floats(0, 1e6), cached_counts)
@example(PrefillModel(0.0, 0.0, 1e-9), 1.0, 0)
def test_the_model_inverts_itself_exactly(model: PrefillModel, seconds: float, cached: int) -> None:
    most = model.most_uncached(seconds, cached)
    if most >= 0:
        assert model.predict_s(most, cached) <= seconds or most == UNBOUNDED_TOKENS
    if most < UNBOUNDED_TOKENS:
        assert model.predict_s(most + 1, cached) > seconds


def test_endless_time_has_room_for_anything() -> None:
    assert PrefillModel(0.1, 0.001, 1e-6).most_uncached(math.inf) == UNBOUNDED_TOKENS


sizes = st.tuples(st.integers(1, 50_000), st.integers(0, 50_000), st.floats(1e-5, 1e4))


@settings(max_examples=200, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=40), st.none() | models.filter(lambda model: model.predict_s(1) > 1e-9))
def test_any_samples_give_a_finite_model_without_negative_coefficients(
    rows: list[tuple[int, int, float]], anchor: PrefillModel | None
) -> None:
    samples = observations(PrefillSample(u, c, s, n) for n, (u, c, s) in enumerate(rows))
    model = fit_prefill(samples, anchor).model
    found = (model.fixed_s, model.per_token_s, model.per_pair_s)
    assert all(0 <= value < math.inf for value in found)
    assert sum(found) > 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(0, 3)), max_size=60))
def test_any_requests_leave_an_estimate_that_can_be_used_and_kept(
    requests: list[tuple[tuple[int, int, float], int]],
) -> None:
    learner = SpeedLearner()
    for (uncached, cached, seconds), decoding in requests:
        learner.observe_prefill(uncached, cached, seconds, decoding=decoding)
    learner.calibrated()
    estimate = learner.estimate
    if estimate is not None:
        assert 0 < estimate.predict_s(100) <= estimate.safe_s(100) < math.inf
        assert estimate.factor >= 1
    assert SpeedLearner.load(learner.dump(), 0.95).dump() == learner.dump()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_named_corrupt(raw: bytes) -> None:
    try:
        SpeedLearner.load(raw, 0.95)
    except CorruptSpeed:
        return
    raise AssertionError("random bytes were taken for a kept speed")


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=300), st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99]))
def test_the_factor_covers_the_share_of_ratios_that_the_rule_asks(ratios: list[float], quantile: float) -> None:
    factor = conformal_factor(np.array(ratios), quantile)
    assert sum(ratio <= factor for ratio in ratios) >= min(len(ratios), (len(ratios) + 1) * quantile - 1e-6)
    assert 1 <= factor <= max(*ratios, 1.25)


@given(st.lists(st.floats(-0.05, 0.05), max_size=2000), st.floats(0.0, 0.5))
def test_errors_within_half_a_scale_never_raise_the_alarm(errors: list[float], spread: float) -> None:
    test = DriftTest()
    assert all(test.add(error, spread, number) is None for number, error in enumerate(errors))


@given(st.floats(0.45, 3.0), st.booleans(), st.floats(0.0, 0.1), st.integers(0, 100))
def test_a_lasting_change_raises_the_alarm_at_its_onset(
    change: float, faster: bool, spread: float, calm: int
) -> None:
    test = DriftTest()
    for number in range(calm):
        assert test.add(0.0, spread, number) is None
    found = [test.add(-change if faster else change, spread, calm + step) for step in range(12)]
    assert found == [None] * 11 + [calm]
