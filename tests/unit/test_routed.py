"""The world of `bench.routing`: what its fleet, its rules and its figures must be like to be believed."""

from collections.abc import Sequence

import numpy as np

from bench.routed_arms import ConsistentHash, LeastOutstanding, LongestPrefix, Ours, RoundRobin
from bench.routed_engine import CARD, DECODE_STEP_S
from bench.routed_traffic import BLOCK_TOKENS, Asked, Traffic
from bench.routed_world import Arm, Death, Served, serve
from bench.routing import alone
from cache.blocks import block_hashes

OURS = Arm("ours", Ours, pictured=True, paced=True)
ROBIN = Arm("round robin", RoundRobin)


def asked(number: int, at_s: float, *, topic: int = 0, tokens: int = 1600, session: str = "") -> Asked:
    """Requests of one topic share all but their last 64 tokens."""
    shared = range(topic * 10_000, topic * 10_000 + tokens - 64)
    ids = (*shared, *range(10_000_000 + number * 64, 10_000_064 + number * 64))
    return Asked(number, session or f"s{number}", ids, block_hashes(ids, BLOCK_TOKENS), 20, at_s)


def many(count: int, gap_s: float, topics: int) -> list[Asked]:
    return [asked(number, number * gap_s, topic=number % topics) for number in range(count)]


def ttfts(served: Served) -> Sequence[float | None]:
    return [one.ttft_s for one in served.outcomes]


def test_one_request_takes_what_the_model_says() -> None:
    served = serve(ROBIN, [asked(0, 0.0)], 1)
    assert np.isclose(served.outcomes[0].ttft_s or 0.0, CARD.predict_s(1600), rtol=1e-6)


def test_the_same_run_gives_the_same_figures() -> None:
    requests = many(60, 0.02, topics=7)
    assert ttfts(serve(OURS, requests, 3)) == ttfts(serve(OURS, requests, 3))


def test_a_topic_stays_where_it_is_held_until_its_queue_costs_more() -> None:
    calm = serve(OURS, many(12, 1.0, topics=1), 4)
    assert all(one.cached_tokens > 0 for one in calm.outcomes[1:])
    crowd = serve(OURS, [asked(number, 1.0, tokens=9_000) for number in range(40)], 4)
    assert sum(one.cached_tokens == 0 for one in crowd.outcomes) > 1


def test_the_gateways_picture_agrees_with_the_engines_own_blocks() -> None:
    served = serve(OURS, many(80, 0.03, topics=9), 3)
    assert served.exact == 100.0


def test_ours_is_faster_than_round_robin_where_topics_can_be_placed() -> None:
    requests = many(200, 0.012, topics=13)
    assert serve(OURS, requests, 4).ttft_ms(90) < 0.8 * serve(ROBIN, requests, 4).ttft_ms(90)


def test_no_arm_passes_the_bound() -> None:
    requests = many(100, 0.02, topics=11)
    assert serve(OURS, requests, 4).ttft_ms(90) >= alone(requests).ttft_ms(90)


def test_the_longest_prefix_without_load_crowds_one_replica() -> None:
    requests = many(100, 0.01, topics=1)
    tree = serve(Arm("tree", LongestPrefix, pictured=True), requests, 4)
    assert tree.ttft_ms(90) > serve(Arm("least", LeastOutstanding), requests, 4).ttft_ms(90)


def test_a_session_stays_on_its_replica() -> None:
    requests = [asked(number, number * 0.5, session=f"s{number % 5}", topic=number % 5) for number in range(25)]
    hashed = serve(Arm("hash", ConsistentHash), requests, 4)
    assert all(one.cached_tokens > 0 for one in hashed.outcomes[5:])


def test_of_a_replica_that_dies_answers_break_off_and_the_rest_is_answered_elsewhere() -> None:
    requests = many(120, 0.02, topics=5)
    for arm in (ROBIN, OURS):
        served = serve(arm, requests, 2, Death(at_s=1.0, back_s=1.6))
        assert all(one.ttft_s is not None for one in served.outcomes)
        assert any(one.lost for one in served.outcomes)
        assert any(one.retries for one in served.outcomes)


def test_a_replica_that_comes_back_is_used_again_and_is_known_to_be_empty() -> None:
    requests = many(300, 0.02, topics=5)
    served = serve(OURS, requests, 2, Death(at_s=1.0, back_s=1.5))
    late = [one for one in served.outcomes if one.at_s > 3.0]
    assert all(one.cached_tokens == one.foreseen_tokens for one in late)
    assert float(np.mean([one.ttft_s for one in late])) < 1.5 * (CARD.predict_s(64, 1536) + 2 * DECODE_STEP_S)


def test_turns_keep_their_order_and_the_rate_is_the_one_asked_for() -> None:
    requests = tuple(asked(number, 0.0, session=f"s{number % 40}") for number in range(400))
    timed = Traffic(requests, np.sort(np.random.default_rng(1).exponential(size=400)).cumsum()).at_rate(50.0)
    assert np.isclose(timed[-1].at_s, 8.0)
    for session in range(40):
        turns = [one.number for one in timed if one.session == f"s{session}"]
        assert turns == sorted(turns)
