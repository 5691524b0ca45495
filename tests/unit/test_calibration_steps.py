"""Which requests a calibration sends, played against engines of known speed."""

import pytest

from gateway.calibration_steps import LIMIT_S, LONGEST_S, MOST_REQUESTS, Bounds, Sample, Step, next_step
from latency.model import CPU_135M, PrefillModel

CARD = PrefillModel(fixed_s=0.008, per_token_s=31e-6, per_pair_s=1.3e-9)
SLOW = PrefillModel(fixed_s=0.2, per_token_s=0.012, per_pair_s=9e-6)


def played(
    model: PrefillModel, bounds: Bounds, error: float | None = 0.5, *, reuses: bool = True, token_s: float = 0.03
) -> list[Sample]:
    """A whole calibration of an engine that takes exactly what the model says."""
    done: list[Sample] = []
    while (step := next_step(done, bounds, error)) is not None:
        prompt = step.shared_tokens + step.new_tokens
        assert prompt + step.max_tokens <= bounds.window_tokens
        cached = 0
        if reuses:
            cached = min(step.shared_tokens, prompt - 1) // bounds.block_tokens * bounds.block_tokens
        ttft_s = model.predict_s(prompt - cached, cached)
        done.append(Sample(step, prompt - cached, cached, ttft_s, step.max_tokens, (step.max_tokens - 1) * token_s))
        assert len(done) < 50
    return done


def kinds(done: list[Sample]) -> set[str]:
    return {sample.step.kind for sample in done}


def test_the_cpu_engine_is_measured_in_under_8_seconds_with_and_without_cached_tokens() -> None:
    done = played(CPU_135M, Bounds(8192, 32, cached_known=True))
    assert sum(sample.total_s for sample in done) < 8.0
    assert 10 <= len(done) <= MOST_REQUESTS
    assert max(sample.uncached_tokens for sample in done) >= 700
    assert max(sample.cached_tokens for sample in done) >= 1300


@pytest.mark.parametrize("speed", [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0])
def test_engines_of_all_speeds_are_measured_in_a_few_seconds(speed: float) -> None:
    model = PrefillModel(speed * CPU_135M.fixed_s, speed * CPU_135M.per_token_s, speed * CPU_135M.per_pair_s)
    done = played(model, Bounds(32_768, 16, cached_known=True), token_s=speed * 0.03)
    assert sum(sample.total_s for sample in done) < 10.0
    assert max(sample.ttft_s for sample in done) < 2.5


def test_a_fast_card_gets_long_prompts_so_that_its_time_per_token_shows() -> None:
    done = played(CARD, Bounds(32_768, 16, cached_known=True))
    longest = max(done, key=lambda sample: sample.uncached_tokens)
    assert longest.ttft_s > 50 * CARD.fixed_s
    assert sum(sample.total_s for sample in done) < LIMIT_S


def test_on_a_slow_engine_no_request_grows_beyond_its_limit() -> None:
    done = played(SLOW, Bounds(8192, 32, cached_known=True))
    assert max(sample.ttft_s for sample in done) < 1.3 * LONGEST_S


@pytest.mark.parametrize("window", [64, 100, 256, 512, 2048])
def test_a_small_window_is_never_exceeded(window: int) -> None:
    assert played(CARD, Bounds(window, 16, cached_known=True))


def test_a_good_fit_ends_it_early_but_not_before_the_cached_part_was_measured() -> None:
    good = played(CARD, Bounds(32_768, 16, cached_known=True), error=0.01)
    assert len(good) < len(played(CARD, Bounds(32_768, 16, cached_known=True), error=0.5))
    assert {"cold", "chain", "probe", "decode"} <= kinds(good)


def test_an_engine_that_does_not_tell_what_it_reuses_is_measured_with_new_prompts_alone() -> None:
    done = played(CPU_135M, Bounds(8192, 16, cached_known=False))
    assert "chain" not in kinds(done)
    assert all(sample.step.shared_tokens == 0 for sample in done)


def test_an_engine_that_reuses_nothing_is_not_sent_a_longer_and_longer_prompt() -> None:
    done = played(CPU_135M, Bounds(8192, 16, cached_known=True), reuses=False)
    assert max(sample.step.shared_tokens for sample in done) < 1200
    assert kinds(done) >= {"probe", "decode"}


def test_a_block_larger_than_the_prompts_is_still_reused_whole() -> None:
    done = played(CPU_135M, Bounds(8192, 784, cached_known=True))
    assert any(sample.cached_tokens >= 784 for sample in done)


def test_a_prompt_that_something_was_in_the_way_of_is_sent_again_and_the_next_ones_still_grow() -> None:
    bounds = Bounds(8192, 32, cached_known=True)
    undisturbed = played(CPU_135M, bounds)
    disturbed: list[Sample] = []
    while (step := next_step(disturbed, bounds, 0.5)) is not None:
        ttft_s = CPU_135M.predict_s(step.new_tokens, step.shared_tokens)
        if len(disturbed) == 2:
            ttft_s += 3.0
        disturbed.append(Sample(step, step.new_tokens, step.shared_tokens, ttft_s, step.max_tokens, 0.03))
    assert disturbed[2].step == disturbed[3].step
    longest = [max(sample.uncached_tokens for sample in done) for done in (undisturbed, disturbed)]
    assert longest[0] == longest[1]


def test_the_same_measurements_ask_for_the_same_next_one() -> None:
    bounds = Bounds(8192, 32, cached_known=True)
    done = played(CPU_135M, bounds)
    for length in range(len(done)):
        assert next_step(done[:length], bounds, 0.5) == done[length].step


def test_the_first_request_only_warms_up() -> None:
    assert next_step([], Bounds(8192, 32, cached_known=True), None) == Step("warm", 0, 32)
