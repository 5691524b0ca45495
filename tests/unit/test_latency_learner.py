"""What a learner says before each request, on engines whose speed is known."""

import math
import random

import pytest

from latency.learner import SpeedLearner
from latency.model import CPU_135M, PrefillModel
from latency.speed import SpeedEstimate
from tests.support.speeds import LARGE_CARD, Noise, a_size, mean_error, noisy, serve, times_slower


def known(learner: SpeedLearner) -> SpeedEstimate:
    estimate = learner.estimate
    assert estimate is not None
    return estimate


def test_nothing_is_said_before_five_samples_of_several_sizes() -> None:
    learner = SpeedLearner()
    for uncached in (100, 200, 300, 400):
        learner.observe_prefill(uncached, 0, CPU_135M.predict_s(uncached))
        assert learner.estimate is None
    learner.observe_prefill(500, 0, CPU_135M.predict_s(500))
    assert known(learner).samples == 5


def test_one_size_over_and_over_says_nothing_of_the_others() -> None:
    learner = SpeedLearner()
    for _ in range(50):
        learner.observe_prefill(100, 0, 0.14)
    assert learner.estimate is None


@pytest.mark.parametrize("engine", [CPU_135M, LARGE_CARD])
def test_twenty_samples_foretell_the_next_to_little_more_than_the_noise(engine: PrefillModel) -> None:
    learner, rng = SpeedLearner(), random.Random(3)
    serve(learner, 20, rng, engine, noisy(0.03))
    assert mean_error(serve(learner, 100, rng, engine, noisy(0.03))) < 0.035


def test_a_first_sight_of_long_prompts_is_followed_without_an_alarm() -> None:
    learner, rng = SpeedLearner(), random.Random(4)
    serve(learner, 200, rng, size=lambda rng: (rng.randrange(30, 60), 0))
    said = serve(learner, 60, rng, size=lambda rng: (rng.randrange(800, 1500), rng.choice((0, 1800))))
    assert mean_error(said[20:]) < 0.06
    assert learner.drifts == 0


@pytest.mark.parametrize("engine", [CPU_135M, LARGE_CARD])
def test_prompts_far_beyond_all_that_was_measured_are_no_alarm(engine: PrefillModel) -> None:
    learner, rng = SpeedLearner(), random.Random(2)
    serve(learner, 200, rng, engine, size=lambda rng: (rng.randrange(30, 60), 0))
    serve(learner, 60, rng, engine, size=far_beyond)
    assert learner.drifts == 0


def far_beyond(rng: random.Random) -> tuple[int, int]:
    return round(math.exp(rng.uniform(math.log(500), math.log(20_000)))), rng.choice((0, 300, 1000, 4000, 20_000))


@pytest.mark.parametrize("ratio", [1.6, 1 / 1.6, 3.0, 1 / 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_changed_engine_is_noticed_and_followed_within_thirty_requests(ratio: float, seed: int) -> None:
    learner, rng = SpeedLearner(), random.Random(seed)
    noise = noisy(0.05, stalls=0.01)
    serve(learner, 300, rng, noise=noise)
    assert not known(learner).drifting
    changed = times_slower(CPU_135M, ratio)
    said = serve(learner, 30, rng, changed, noise)
    assert any(one.drifting for one in said)
    after = [one.error for one in serve(learner, 40, rng, changed, noisy(0.05))]
    assert sum(after) / len(after) < 0.07
    assert not known(learner).drifting
    assert learner.drifts == 1


@pytest.mark.parametrize("ratio", [1.6, 1 / 1.6])
def test_a_changed_engine_is_noticed_on_a_noisy_machine_too(ratio: float) -> None:
    learner, rng = SpeedLearner(), random.Random(5)
    serve(learner, 150, rng, noise=noisy(0.15))
    assert any(one.drifting for one in serve(learner, 30, rng, times_slower(CPU_135M, ratio), noisy(0.15)))


def test_a_change_of_the_fixed_cost_alone_is_followed() -> None:
    learner, rng = SpeedLearner(), random.Random(5)
    serve(learner, 300, rng)
    farther = PrefillModel(CPU_135M.fixed_s + 0.06, CPU_135M.per_token_s, CPU_135M.per_pair_s)
    serve(learner, 30, rng, farther)
    assert mean_error(serve(learner, 60, rng, farther)) < 0.06


def test_after_a_change_seen_on_short_prompts_alone_long_ones_are_foretold() -> None:
    learner, rng, slower = SpeedLearner(), random.Random(5), times_slower(CPU_135M, 1.6)
    serve(learner, 300, rng)
    serve(learner, 40, rng, slower, size=lambda rng: (rng.randrange(30, 100), 0))
    assert mean_error(serve(learner, 10, rng, slower, size=lambda rng: (rng.randrange(900, 1500), 1500))) < 0.1


def test_an_engine_of_another_shape_is_followed_too() -> None:
    learner, rng = SpeedLearner(), random.Random(6)
    serve(learner, 300, rng)
    serve(learner, 60, rng, LARGE_CARD)
    assert mean_error(serve(learner, 100, rng, LARGE_CARD)) < 0.07


def test_ten_thousand_steady_requests_raise_no_alarm() -> None:
    learner = SpeedLearner()
    said = serve(learner, 10_000, random.Random(7), noise=noisy(0.05, stalls=0.01))
    assert learner.drifts == 0
    assert not any(one.drifting for one in said)


def test_a_noisy_machine_raises_no_alarm() -> None:
    learner = SpeedLearner()
    serve(learner, 3_000, random.Random(8), noise=noisy(0.25, stalls=0.03, stall=10.0))
    assert learner.drifts == 0


def jittery(rng: random.Random, seconds: float) -> float:
    """3 % of everything, and milliseconds that only short prefills feel."""
    return seconds * math.exp(rng.gauss(0.0, 0.03)) + rng.expovariate(1 / 0.008)


@pytest.mark.parametrize("noise", [noisy(0.05), noisy(0.2), noisy(0.05, stalls=0.02), jittery])
def test_the_safe_time_is_kept_as_often_as_promised(noise: Noise) -> None:
    learner, rng = SpeedLearner(0.95), random.Random(9)
    serve(learner, 100, rng, noise=noise)
    said = serve(learner, 4_000, rng, noise=noise)
    assert 0.92 <= sum(one.covered for one in said) / len(said) <= 0.98


def test_the_jitter_of_short_prefills_does_not_widen_the_long_ones() -> None:
    learner, rng = SpeedLearner(0.95), random.Random(10)
    serve(learner, 1_000, rng, noise=jittery)
    estimate = known(learner)
    short, long = (estimate.safe_s(u) / estimate.predict_s(u) for u in (35, 1400))
    assert short > 1.1
    assert long < 1.08
    covered = [jittery(rng, CPU_135M.predict_s(u)) <= estimate.safe_s(u) for u in (35, 1400) for _ in range(1_000)]
    assert min(sum(covered[:1_000]), sum(covered[1_000:])) > 900


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_other_quantiles_are_kept_too(quantile: float) -> None:
    learner, rng = SpeedLearner(quantile), random.Random(11)
    serve(learner, 300, rng)
    said = serve(learner, 2_000, rng)
    assert sum(one.covered for one in said) / len(said) == pytest.approx(
        quantile, abs=0.05 if quantile < 0.9 else 0.025
    )


def test_a_few_samples_leave_a_wide_margin() -> None:
    learner = SpeedLearner()
    serve(learner, 6, random.Random(12), noise=noisy(0.0))
    assert known(learner).factor > 1.15


def test_the_source_is_told() -> None:
    learner, rng = SpeedLearner(), random.Random(13)
    serve(learner, 20, rng)
    assert known(learner).source == "learned"
    learner.calibrated()
    assert known(learner).source == "calibrated"
    serve(learner, 21, rng)
    assert known(learner).source == "learned"


@pytest.mark.parametrize("engine", [CPU_135M, LARGE_CARD])
def test_twenty_samples_of_a_calibration_give_a_margin_of_the_noise_at_once(engine: PrefillModel) -> None:
    learner, rng, noise = SpeedLearner(), random.Random(14), noisy(0.01)
    for step in range(20):
        uncached, cached = round(32 * 1.25**step), 500 * (step % 3)
        learner.observe_prefill(uncached, cached, noise(rng, engine.predict_s(uncached, cached)))
    learner.calibrated()
    assert known(learner).factor < 1.045


def test_a_calibration_of_nothing_says_nothing() -> None:
    learner = SpeedLearner()
    learner.calibrated()
    assert learner.estimate is None


def beside_s(rng: random.Random, uncached: int, cached: int, decoding: int) -> float:
    extra_s = rng.uniform(0.0, 0.03) + decoding * (0.004 + 2e-5 * uncached) if decoding else 0.0
    return noisy(0.04, stalls=0.01)(rng, CPU_135M.predict_s(uncached, cached) + extra_s)


def test_running_answers_never_bend_the_idle_fit_and_what_they_add_is_learned() -> None:
    learner, rng = SpeedLearner(), random.Random(15)
    serve(learner, 40, rng, noise=noisy(0.04))
    idle = known(learner).prefill
    errors, covered = [], []
    for _ in range(400):
        (u, c), n = a_size(rng), rng.randrange(1, 6)
        seconds = beside_s(rng, u, c, n)
        errors.append(abs(known(learner).predict_s(u, c, decoding=n) / seconds - 1))
        covered.append(seconds <= known(learner).safe_s(u, c, decoding=n))
        learner.observe_prefill(u, c, seconds, decoding=n)
    estimate = known(learner)
    assert estimate.prefill == idle
    assert sum(errors[50:]) / len(errors[50:]) < 0.065
    assert 0.92 <= sum(covered[50:]) / len(covered[50:]) <= 0.98
    assert estimate.beside is not None
    assert estimate.beside.extra_s(1000, 4) == pytest.approx(0.015 + 4 * 0.024, rel=0.25)
    assert estimate.predict_s(1000) == idle.predict_s(1000)
    assert learner.drifts == 0


def test_a_slower_engine_is_noticed_where_answers_always_run() -> None:
    learner, rng = SpeedLearner(), random.Random(16)
    serve(learner, 40, rng)
    for _ in range(100):
        (u, c), n = a_size(rng), rng.randrange(1, 6)
        learner.observe_prefill(u, c, beside_s(rng, u, c, n), decoding=n)
    assert learner.drifts == 0
    for _ in range(30):
        (u, c), n = a_size(rng), rng.randrange(1, 6)
        learner.observe_prefill(u, c, 1.6 * beside_s(rng, u, c, n), decoding=n)
    assert learner.drifts == 1
    assert known(learner).predict_s(800) == pytest.approx(1.6 * CPU_135M.predict_s(800), rel=0.12)


def test_samples_beside_answers_alone_say_nothing_of_the_idle_engine() -> None:
    learner = SpeedLearner()
    for uncached in range(100, 1000, 100):
        learner.observe_prefill(uncached, 0, 1.0, decoding=3)
    assert learner.estimate is None


def test_decode_rate_is_the_median_and_its_quantile() -> None:
    learner, rng = SpeedLearner(), random.Random(17)
    serve(learner, 20, rng)
    assert known(learner).token_s is None
    for _ in range(500):
        tokens = rng.randrange(20, 200)
        learner.observe_decode(tokens, noisy(0.1, stalls=0.01)(rng, 0.025 * tokens))
    estimate = known(learner)
    assert estimate.token_s == pytest.approx(0.025, rel=0.05)
    assert estimate.safe_token_s == pytest.approx(0.025 * math.exp(1.645 * 0.1), rel=0.1)


def test_a_changed_decode_rate_is_followed() -> None:
    learner, rng = SpeedLearner(), random.Random(18)
    serve(learner, 20, rng)
    for token_s in (0.025, 0.040):
        for _ in range(100):
            learner.observe_decode(100, token_s * 100)
    assert known(learner).token_s == pytest.approx(0.040)


def test_answers_of_one_token_say_nothing_of_the_rate() -> None:
    learner = SpeedLearner()
    serve(learner, 20, random.Random(19))
    for _ in range(10):
        learner.observe_decode(1, 1e-6)
    assert known(learner).token_s is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    learner = SpeedLearner()
    with pytest.raises(ValueError, match="positive and finite"):
        learner.observe_prefill(100, 0, seconds)
    with pytest.raises(ValueError, match="positive and finite"):
        learner.observe_decode(100, seconds)


@pytest.mark.parametrize("counts", [(-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        SpeedLearner().observe_prefill(counts[0], counts[1], 1.0, decoding=counts[2])


@pytest.mark.parametrize("quantile", [0.0, 1.0, math.nan])
def test_a_quantile_is_between_nought_and_one(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        SpeedLearner(quantile)


def test_a_prompt_that_is_wholly_cached_counts_the_token_that_is_always_computed() -> None:
    learner = SpeedLearner()
    serve(learner, 20, random.Random(20))
    learner.observe_prefill(0, 320, CPU_135M.predict_s(1, 320))
    assert known(learner).samples == 21


def test_what_comes_together_is_fitted_once_and_judged_by_what_was_known_before() -> None:
    learner = SpeedLearner()
    for number, size in enumerate((40, 900, 200, 450, 120, 700) * 4):
        learner.observe_prefill(size, 0, (0.9, 1.1)[number % 4 // 2] * CPU_135M.predict_s(size, 0))
    before = learner.estimate
    assert before is not None
    with learner.at_once():
        for size in (60, 300, 1000, 80, 500, 650, 90, 110):
            learner.observe_prefill(size, 0, 1.15 * CPU_135M.predict_s(size, 0))
        inside = learner.estimate
    after = learner.estimate
    assert inside is not None
    assert after is not None
    assert inside.prefill == before.prefill
    assert after.prefill != before.prefill
