"""The arithmetic of folding, and what a summary without an engine keeps."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency.model import CPU_135M, PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.history import (
    LEAST_HIGH_TOKENS,
    Marks,
    is_usable,
    marks,
    mean_uncached_tokens,
    summary_of,
    turns_to_fold,
)
from prompt_builder.types import PastMessage

CPU = SpeedEstimate(CPU_135M, 1.1, 0.95, 50, "calibrated")
CARD = SpeedEstimate(PrefillModel(0.008, 31e-6, 1.3e-9), 1.1, 0.95, 50, "calibrated")


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("speed", [CPU, CARD], ids=["cpu", "card"])
@pytest.mark.parametrize("budget_s", [0.75, 1.5, 3.0])
def test_a_history_at_the_high_mark_can_be_computed_anew_within_the_budget(
    speed: SpeedEstimate, budget_s: float
) -> None:
    found = marks(131_072, budget_s, speed)
    assert found.high_tokens == LEAST_HIGH_TOKENS or speed.safe_s(found.high_tokens) <= budget_s
    # It is not smaller than it must be: attention over it, or computing it anew, uses what it may.
    attention_s = speed.factor * speed.prefill.per_pair_s * 200 * (found.high_tokens * 1.01)
    capped = found.high_tokens in (LEAST_HIGH_TOKENS, 65_536)
    assert capped or speed.safe_s(int(found.high_tokens * 1.01) + 1) > budget_s or attention_s > 0.2 * budget_s


def test_history_leaves_half_of_the_window_to_chunks_and_answer() -> None:
    assert marks(4096, 1.0, CARD).high_tokens == 2048
    assert marks(4096, None, None) == Marks(2048, 1024)
    assert marks(600, 0.1, CPU).high_tokens == 300
    assert marks(None, None, None).high_tokens > 0


def test_settings_win_over_the_arithmetic() -> None:
    assert marks(8192, 1.0, CPU, high_setting=3000, low_setting=500) == Marks(3000, 500)
    assert marks(8192, 1.0, CPU, high_setting=3000) == Marks(3000, 1500)
    assert marks(8192, 1.0, CPU, high_setting=9000, low_setting=9000) == Marks(6144, 4608)
    assert marks(8192, 1.0, CPU, low_setting=100).low_tokens == 100


@given(
    st.one_of(st.none(), st.integers(1, 200_000)),
    st.one_of(st.none(), st.floats(0.001, 3600)),
    st.sampled_from([None, CPU, CARD]),
    st.integers(0, 20_000),
    st.integers(0, 20_000),
)
def test_marks_are_always_in_order(
    window: int | None, budget_s: float | None, speed: SpeedEstimate | None, high: int, low: int
) -> None:
    found = marks(window, budget_s, speed, high, low)
    assert found.high_tokens > found.low_tokens >= found.summary_tokens >= 1 or found.high_tokens <= 2


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(0, 200), st.integers(50, 4000))
def test_a_fold_leaves_a_tail_within_the_low_mark_and_always_the_last_turn(
    sizes: list[int], summary: int, high: int
) -> None:
    at = Marks(high, high // 2)
    folded = turns_to_fold(sizes, summary, at)
    assert 0 <= folded <= max(0, len(sizes) - 1)
    total = summary + sum(sizes)
    if total <= high:
        assert folded == 0
    elif len(sizes) > 1 and sum(sizes) > at.low_tokens:
        assert folded > 0
        assert len(sizes) - folded == 1 or at.summary_tokens + sum(sizes[folded:]) <= at.low_tokens


@pytest.mark.parametrize("growth", [60, 150, 300])
def test_a5_the_prefix_breaks_at_most_once_in_the_turns_of_a_fold(growth: int) -> None:
    at = Marks(2048, 1024)
    sizes: list[int] = []
    breaks, summary = 0, 0
    for _ in range(200):
        sizes.append(growth)
        if folded := turns_to_fold(sizes, summary, at):
            sizes, summary = sizes[folded:], at.summary_tokens
            breaks += 1
    turns_per_fold = (at.high_tokens - at.low_tokens) // growth
    assert 0 < breaks <= 200 / turns_per_fold


def test_the_mean_follows_the_formula() -> None:
    """u + L·g/(H − L), by counting what a conversation computes."""
    at, new, growth = Marks(8192, 4096), 60, 400
    history, uncached = at.low_tokens, []
    for _ in range(500):
        history += growth
        recomputed = 0
        if history > at.high_tokens:
            recomputed, history = at.low_tokens, at.low_tokens
        uncached.append(new + recomputed)
    assert mean_uncached_tokens(new, growth, at) == pytest.approx(sum(uncached) / len(uncached), rel=0.1)


FACTS = (
    "My name is Ada and I live in Porto.",
    "The key to the shed is under the blue pot.",
    "Our budget is 45,000 euros.",
    "Con chó của tôi tên là Mực, nó ba tuổi.",
    "我的狗叫小白，它今年三岁。",
    "Мою кошку зовут Мурка, ей 7 лет.",
    "내 고양이 이름은 나비이고 다섯 살이다.",
)


def chat(*facts: str) -> list[PastMessage]:
    """Each fact in a turn of its own, answered with many words that say little."""
    past = []
    for place, fact in enumerate(facts):
        past.append(PastMessage("user", f"{fact} What do you think of that, and what would you do about it?"))
        filler = f"That sounds good to me in every way number {place}. There is much that one can say about it. " * 3
        past.append(PastMessage("assistant", filler))
    return past


def test_what_users_state_is_kept_before_what_was_answered() -> None:
    summary = summary_of(chat(*FACTS), "", most_tokens=100, count=words)
    assert words(summary) <= 100
    assert [fact for fact in FACTS if fact not in summary] == []
    assert [line.split(":")[0] for line in summary.splitlines() if any(fact in line for fact in FACTS)] == [
        "User"
    ] * len(FACTS)


def test_an_instruction_in_the_middle_of_a_chat_outlives_its_turn() -> None:
    past = [*chat(*FACTS), PastMessage("system", "From now on answer in verse."), *chat(*FACTS[:2])]
    summary = summary_of(past, "", most_tokens=20, count=words, prose="They talked about many things.")
    assert "System: From now on answer in verse." in summary
    assert "From now on answer in verse." in summary_of(chat(*FACTS), summary, most_tokens=20, count=words)


def test_facts_outlive_fold_after_fold() -> None:
    summary = ""
    for fact in FACTS:
        summary = summary_of(chat(fact), summary, most_tokens=120, count=words)
    assert [fact for fact in FACTS if fact not in summary] == []


def test_the_engines_words_come_first_and_are_completed() -> None:
    prose = "The user, Ada, lives in Porto. They talked about boats."
    summary = summary_of(chat(*FACTS[:3]), "", most_tokens=60, count=words, prose=prose)
    assert summary.startswith(prose)
    assert "45,000" in summary
    assert words(summary) <= 60


def test_prose_gives_way_to_new_prose_and_facts_do_not() -> None:
    """Also where the first prose told a fact: what comes after it may not."""
    first = summary_of(chat(FACTS[2]), "", most_tokens=60, count=words, prose=f"{FACTS[2]} They met.")
    second = summary_of(chat(FACTS[0]), first, most_tokens=60, count=words, prose="They talked about old sails.")
    assert "They met." not in second
    assert [fact in second for fact in (FACTS[0], FACTS[2])] == [True, True]
    extracted = summary_of(chat(FACTS[0]), "They like boats from 1950.", most_tokens=60, count=words)
    assert "boats from 1950" in extracted


@given(
    st.lists(st.text(alphabet="abcA 1.?\n:[]我👍", max_size=200), max_size=12),
    st.integers(1, 80),
    st.text(max_size=200),
)
def test_summaries_are_bounded_and_the_same_again(texts: list[str], most: int, prose: str) -> None:
    past = [PastMessage("user" if at % 2 == 0 else "assistant", text) for at, text in enumerate(texts)]
    first, second = itertools.islice(
        iter(lambda: summary_of(past, "User: We met.", most_tokens=most, count=len, prose=prose), None), 2
    )
    assert first == second
    assert len(first) <= most


@pytest.mark.parametrize("prose", ["", "  ", "....", "1. 2. 3.", "ok", "the same " * 40])
def test_garbage_is_no_summary(prose: str) -> None:
    assert not is_usable(prose)


@pytest.mark.parametrize(
    "prose", ["Ada lives in Porto.", "我的狗叫小白，它今年三岁。", "They met. " + "new words here " * 3]
)
def test_sentences_are_a_summary(prose: str) -> None:
    assert is_usable(prose)


@pytest.mark.parametrize(
    "texts",
    [
        [f"My boat number {at} lies in berth {at * 7} beside Person{at}." for at in range(3000)],
        ["a" * 600_000 + ".", "?" * 600_000 + "x."],
    ],
    ids=["many facts", "endless words"],
)
def test_h7_a_summary_takes_time_with_the_length_of_the_history_not_with_its_square(texts: list[str]) -> None:
    began_s = time.process_time()
    summary_of([PastMessage("user", text) for text in texts], "", most_tokens=100, count=words)
    assert time.process_time() - began_s < 1.5
