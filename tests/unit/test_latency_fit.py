"""The fit of the prefill model: exact where it can be, sober where it cannot."""

import random
import time

import pytest

from latency.fit import PrefillFit, fit_prefill
from latency.model import CPU_135M, PrefillModel
from latency.samples import PrefillSample, SampleWindow, observations, stratum_of
from tests.support.speeds import LARGE_CARD, Noise, a_size, noisy

NOISELESS = noisy(0.0)
ENGINES = [CPU_135M, LARGE_CARD, PrefillModel(0.0, 0.001, 0.0), PrefillModel(0.05, 0.0, 1e-6)]


def samples(engine: PrefillModel, count: int, noise: Noise = NOISELESS, seed: int = 1) -> list[PrefillSample]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        u, c = a_size(rng)
        found.append(PrefillSample(u, c, noise(rng, engine.predict_s(u, c)), number))
    return found


def worst_error(found: PrefillModel, engine: PrefillModel) -> float:
    sizes = [(u, c) for u in (30, 100, 300, 1000, 1500) for c in (0, 500, 2000)]
    return max(abs(found.predict_s(u, c) / engine.predict_s(u, c) - 1) for u, c in sizes)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_noiseless_engine_is_recovered(engine: PrefillModel) -> None:
    found = fit_prefill(observations(samples(engine, 40))).model
    assert worst_error(found, engine) < 0.02


def test_a_noiseless_engine_is_recovered_to_its_coefficients() -> None:
    found = fit_prefill(observations(samples(CPU_135M, 100))).model
    assert found.fixed_s == pytest.approx(CPU_135M.fixed_s, rel=0.01)
    assert found.per_token_s == pytest.approx(CPU_135M.per_token_s, rel=0.01)
    assert found.per_pair_s == pytest.approx(CPU_135M.per_pair_s, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_is_averaged_out(seed: int) -> None:
    found = fit_prefill(observations(samples(CPU_135M, 200, noisy(0.05), seed)))
    assert worst_error(found.model, CPU_135M) < 0.05
    assert found.spread == pytest.approx(0.05, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_stalls_of_ten_times_move_nothing(seed: int) -> None:
    clean = fit_prefill(observations(samples(CPU_135M, 100, noisy(0.03), seed))).model
    stalled = [
        PrefillSample(s.uncached_tokens, s.cached_tokens, s.seconds * (10 if s.number % 10 == 3 else 1), s.number)
        for s in samples(CPU_135M, 100, noisy(0.03), seed)
    ]
    assert worst_error(fit_prefill(observations(stalled)).model, clean) < 0.03


def test_one_stall_among_the_first_few_samples_does_not_move_the_fit() -> None:
    first = samples(CPU_135M, 12, noisy(0.02))
    stall = PrefillSample(first[6].uncached_tokens, first[6].cached_tokens, first[6].seconds * 10, 6)
    assert worst_error(fit_prefill(observations([*first[:6], stall, *first[7:]])).model, CPU_135M) < 0.12


@pytest.mark.parametrize("seed", range(40))
def test_no_coefficient_is_negative_however_noisy(seed: int) -> None:
    found = fit_prefill(observations(samples(CPU_135M, 6, noisy(1.0), seed))).model
    assert min(found.fixed_s, found.per_token_s, found.per_pair_s) >= 0
    assert found.predict_s(100) > 0


def test_a_fit_of_two_near_sizes_does_not_extrapolate_wildly() -> None:
    """Noise that would tilt a free line to nought or to double at ten times the size."""
    near = [
        PrefillSample(u, 0, s, n) for n, (u, s) in enumerate([(100, 0.15), (110, 0.14), (100, 0.14), (110, 0.15)])
    ]
    found = fit_prefill(observations(near), anchor=CPU_135M).model
    assert found.predict_s(1000) == pytest.approx(CPU_135M.predict_s(1000), rel=0.15)


def test_without_an_anchor_few_sizes_give_the_shape_of_engines_known_so_far() -> None:
    near = [PrefillSample(u, 0, LARGE_CARD.predict_s(u), n) for n, u in enumerate([300, 320, 340, 310, 330])]
    found = fit_prefill(observations(near)).model
    assert 0.4 < found.predict_s(1000) / LARGE_CARD.predict_s(1000) < 2.5
    assert found.predict_s(320) == pytest.approx(LARGE_CARD.predict_s(320), rel=0.02)


def test_many_samples_free_the_fit_from_a_wrong_anchor() -> None:
    found = fit_prefill(observations(samples(CPU_135M, 150, noisy(0.03))), anchor=LARGE_CARD).model
    assert worst_error(found, CPU_135M) < 0.06


def test_a_full_window_is_fitted_in_milliseconds() -> None:
    window = SampleWindow()
    rng = random.Random(0)
    for number in range(20_000):
        u, c = rng.randrange(1, 30_000), rng.choice((0, rng.randrange(1, 40_000)))
        window.add(PrefillSample(u, c, noisy(0.1)(rng, CPU_135M.predict_s(u, c)), number))
    table = window.observations()
    took_s = []
    for _ in range(5):
        began_s = time.process_time()
        fit: PrefillFit = fit_prefill(table)
        took_s.append(time.process_time() - began_s)
    assert fit.model.per_token_s > 0
    assert len(table) > 300
    assert min(took_s) < 0.02


def test_a_flood_of_one_kind_leaves_the_other_kinds_in_the_window() -> None:
    window = SampleWindow()
    window.add(PrefillSample(1500, 0, 2.0, 0))
    window.add(PrefillSample(100, 4000, 0.5, 1))
    for number in range(2, 5000):
        window.add(PrefillSample(100, 0, 0.1, number))
    kinds = {stratum_of(sample.uncached_tokens, sample.cached_tokens) for sample in window}
    assert len(kinds) == 3
    assert len(window) == 2 + 16


def test_the_oldest_of_a_kind_leave_first() -> None:
    window = SampleWindow(per_stratum=3)
    for number in range(10):
        window.add(PrefillSample(100, 0, 0.1, number))
    assert [sample.number for sample in window] == [9, 8, 7]
    window.keep_since(9)
    assert [sample.number for sample in window] == [9]


def test_the_window_is_bounded_whatever_is_asked() -> None:
    window = SampleWindow()
    rng = random.Random(0)
    for number in range(50_000):
        window.add(
            PrefillSample(
                rng.randrange(2 ** rng.randrange(1, 24)), rng.randrange(2 ** rng.randrange(1, 24)), 1.0, number
            )
        )
    assert len(window) <= 880
