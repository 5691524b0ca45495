"""The order `reuse` in whole plans: behind what a replica holds, beside what other requests had."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.residency import Residency
from latency.speed import SpeedEstimate
from prompt_builder.companions import NOTHING_KNOWN, Companions, Together
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.types import ChunkOrder, Limits, PastMessage, Plan, Transcript
from tests.support.ferries import BUILDER, PLANNER, SPEED, chunk, found, names

LIMITS = Limits(None, None, 16, 5)
KEY = b"tenant"
QUESTION = Transcript("", (), "When?")


def planned(
    names: str,
    residency: Residency | None = None,
    *,
    limits: Limits = LIMITS,
    speed: SpeedEstimate | None = SPEED,
    past: Together = NOTHING_KNOWN,
    budget_s: float | None = None,
    transcript: Transcript = QUESTION,
) -> Plan:
    outlooks = () if residency is None else (Outlook("r", speed, lambda prefill_s: 0.0, residency.prefix()),)
    return PLANNER.plan(transcript, found(names), limits, outlooks, Clock(budget_s, 0.0), past)


def holding(*plans: Plan) -> Residency:
    residency = Residency(16, 1000)
    for plan in plans:
        lease = residency.begin(BUILDER.render(plan).token_ids or ())
        residency.generated(lease, [0])
        residency.end(lease)
    return residency


def known(*requests: str) -> Companions:
    companions = Companions()
    for request in requests:
        companions.observe(KEY, [(chunk(name).label, 100) for name in request])
    return companions


@pytest.mark.parametrize("speed", [SPEED, None], ids=["speed known", "speed unknown"])
@pytest.mark.parametrize("budget_s", [None, 60.0], ids=["no budget", "budget"])
def test_a_plan_continues_what_the_replica_holds(speed: SpeedEstimate | None, budget_s: float | None) -> None:
    residency = holding(planned("abc"))
    plan = planned("cabde", residency, speed=speed, budget_s=budget_s)
    assert names(plan) == "cbaed"
    cached = residency.prefix().extended(BUILDER.render(plan).token_ids or ()).cached_tokens()
    assert cached > sum(len(chunk(name).rendered.token_ids) for name in "cba")
    assert plan.forecast is None or plan.forecast.cached_tokens == cached


def test_behind_what_is_held_stands_what_others_asked_for_and_the_forecast_is_of_that_prompt() -> None:
    residency = holding(planned("xa", limits=replace(LIMITS, chunk_order="relevance_first")), planned("ax"))
    past = known("xd", "xd", "xd", "bc").of(KEY)
    plan = planned("abcdx", residency, past=past)
    assert names(plan)[:2] == "xa"
    assert names(planned("bcdx", residency, past=past))[:2] == "xd"
    prompt = BUILDER.render(plan)
    assert plan.forecast is not None
    assert plan.forecast.cached_tokens + plan.forecast.uncached_tokens == prompt.tokens
    assert plan.forecast.cached_tokens == residency.prefix().extended(prompt.token_ids or ()).cached_tokens()


def test_the_most_relevant_are_held_back_where_that_is_asked_for() -> None:
    residency = holding(planned("abc"))
    past = known("ab", "abc").of(KEY)
    for pin_last, last in ((1, "a"), (2, "ba")):
        plan = planned("abcd", residency, limits=replace(LIMITS, pin_last=pin_last), past=past)
        assert names(plan).endswith(last)
        assert sorted(names(plan)) == list("abcd")


def test_behind_past_turns_of_its_own_a_conversation_keeps_the_most_relevant_last() -> None:
    past = known("ab", "ab", "ac").of(KEY)
    history = (PastMessage("user", "Hello."), PastMessage("assistant", "Hello!"))
    assert names(planned("abc", past=past))[0] == "a"
    assert names(planned("abc", past=past, transcript=Transcript("", history, "When?"))) == "cba"
    folded = Transcript("", history, "When?", summary="They greeted.", folded=2)
    assert names(planned("abc", past=past, transcript=folded)) == "cba"


def test_a4_retrieval_in_another_order_gives_the_same_prompt_again() -> None:
    first = planned("abcde")
    residency = holding(first)
    for again in ("edcba", "badce", "caebd"):
        assert names(planned(again, residency)) == names(first)


@pytest.mark.parametrize("order", ["relevance_last", "relevance_first", "label"])
def test_other_orders_take_no_notice_of_caches_and_counts(order: ChunkOrder) -> None:
    limits = replace(LIMITS, chunk_order=order)
    plain = planned("abcde", limits=limits)
    residency = holding(planned("edcba"), planned("cab"))
    assert names(planned("abcde", residency, limits=limits, past=known("ce", "ce").of(KEY))) == names(plain)


@given(
    st.lists(st.permutations("abcdefg").map(lambda letters: "".join(letters[:4])), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from([None, SPEED]),
)
@settings(deadline=None, max_examples=30)
def test_no_order_changes_which_chunks_are_sent(
    requests: list[str], pin_last: int, speed: SpeedEstimate | None
) -> None:
    residency, companions = Residency(16, 60), Companions()
    for asked in requests:
        past = companions.of(KEY)
        plan = planned(asked, residency, limits=replace(LIMITS, pin_last=pin_last), speed=speed, past=past)
        assert sorted(names(plan)) == sorted(asked)
        assert names(plan).endswith(asked[:pin_last][::-1])
        lease = residency.begin(BUILDER.render(plan).token_ids or ())
        residency.generated(lease, [0])
        residency.end(lease)
        companions.observe(KEY, [(one.label, 100) for one in plan.chunks])
