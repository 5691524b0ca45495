"""The arithmetic before buying a card: the figures that it must give, and how they hang together."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency.sizing import (
    GB,
    KIB,
    TEXT_RATES,
    KvShape,
    answer_time,
    batch_rate,
    conversations,
    decode_ceiling,
    kv_bytes,
    prefill_ceiling,
    saturating_batch,
    weight_bytes,
)

LLAMA_8B = KvShape(layers=32, kv_heads=8, head_dim=128)


def test_a_short_prompt_and_a_long_answer_are_nearly_all_decode() -> None:
    time = answer_time(1_000, 2_000, 300, 40)
    assert (time.prefill_s, time.total_s) == (0.5, 8.0)
    assert f"{time.decode_share:.0%}" == "94%"


def test_a_long_prompt_waits_for_its_first_token() -> None:
    time = answer_time(12_000, 1_500, 500, 40)
    assert (time.prefill_s, time.total_s) == (8.0, 20.5)
    assert f"{time.prefill_share:.0%}" == "39%"


def test_an_answer_of_nothing_takes_no_time_and_has_no_shares() -> None:
    time = answer_time(0, 1, 0, 1)
    assert (time.total_s, time.prefill_share, time.decode_share) == (0, 0, 0)


def test_the_kv_cache_of_32_layers_and_8_heads_of_128_in_fp16() -> None:
    assert LLAMA_8B.bytes_per_token == 128 * KIB
    assert round(kv_bytes(LLAMA_8B.bytes_per_token, 20_000) / GB, 1) == 2.6
    assert round(kv_bytes(LLAMA_8B.bytes_per_token, 128_000) / GB) == 17
    assert round(kv_bytes(LLAMA_8B.bytes_per_token, 131_072) / GB) == 17


def test_an_fp8_kv_cache_is_half_the_size() -> None:
    assert KvShape(32, 8, 128, bytes_per_value=1).bytes_per_token == 64 * KIB


def test_eight_gb_of_weights_at_400_gb_a_second_give_50_tokens_a_second() -> None:
    assert decode_ceiling(8 * GB, 400 * GB) == 50


def test_a_batch_of_eight_gives_eight_tokens_per_pass_of_the_weights() -> None:
    rate = batch_rate(8, 8 * GB, 400 * GB)
    assert rate.tokens_per_pass == 8
    assert (rate.tokens_per_s, rate.tokens_per_s_each, rate.compute_bound) == (400, 50, None)


def test_forty_tokens_a_second_as_characters_by_language() -> None:
    spans = {rate.language: rate.chars_per_s(40) for rate in TEXT_RATES}
    assert spans["English"] == (160, 160)
    assert spans["Korean"] == (40, 60)


def test_weights_follow_their_bits() -> None:
    assert weight_bytes(8e9, 16) == 16 * GB
    assert weight_bytes(8e9, 4.5) == 4.5 * GB


def test_conversations_fit_into_what_the_weights_leave() -> None:
    one = kv_bytes(LLAMA_8B.bytes_per_token, 20_000)
    assert conversations(24 * GB, 4.5 * GB, one) == 6
    assert conversations(24 * GB, 4.5 * GB, one, share=1.0) == 7
    assert conversations(16 * GB, 14.4 * GB, one) == 0
    assert conversations(16 * GB, 16 * GB, one) == -1


def test_batching_gains_until_computing_takes_as_long_as_reading() -> None:
    weights, bandwidth, parameters, flops = 8 * GB, 400 * GB, 4e9, 100e12
    crossover = saturating_batch(weights, bandwidth, parameters, flops)
    assert crossover == 250
    before, after = (
        batch_rate(batch, weights, bandwidth, parameters=parameters, flops=flops) for batch in (249, 500)
    )
    assert (before.compute_bound, after.compute_bound) == (False, True)
    assert after.tokens_per_s == pytest.approx(prefill_ceiling(parameters, flops))


def test_long_contexts_are_never_bound_by_computing() -> None:
    one = kv_bytes(LLAMA_8B.bytes_per_token, 20_000)
    assert saturating_batch(16 * GB, 400 * GB, 8e9, 100e12, conversation_bytes=one) is None
    rate = batch_rate(10_000, 16 * GB, 400 * GB, conversation_bytes=one, parameters=8e9, flops=100e12)
    assert rate.compute_bound is False


@given(
    weights=st.floats(1e6, 1e12),
    bandwidth=st.floats(1e9, 1e13),
    parameters=st.floats(1e6, 1e12),
    flops=st.floats(1e11, 1e16),
    one=st.floats(0, 1e9),
    batch=st.integers(1, 5_000),
)
def test_the_crossover_is_where_the_roofline_bends(
    weights: float, bandwidth: float, parameters: float, flops: float, one: float, batch: int
) -> None:
    crossover = saturating_batch(weights, bandwidth, parameters, flops, conversation_bytes=one)
    rate = batch_rate(batch, weights, bandwidth, conversation_bytes=one, parameters=parameters, flops=flops)
    assert rate.tokens_per_s <= prefill_ceiling(parameters, flops) * (1 + 1e-9)
    if crossover is None or batch < crossover:
        assert not rate.compute_bound
    elif batch > crossover:
        assert rate.compute_bound


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_rates_and_sizes_that_are_not_finite_and_positive_are_refused_by_name(wrong: float) -> None:
    with pytest.raises(ValueError, match="prefill_tokens_per_s"):
        answer_time(1, wrong, 1, 1)
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s"):
        decode_ceiling(1, wrong)
    with pytest.raises(ValueError, match="flops"):
        prefill_ceiling(1, wrong)
    with pytest.raises(ValueError, match="bytes_per_value"):
        KvShape(1, 1, 1, wrong)


def test_a_share_of_more_than_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="share"):
        conversations(1, 1, 1, share=1.1)
