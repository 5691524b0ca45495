"""What a total budget makes of an answer's length, and what a strict one refuses."""

from dataclasses import replace

import pytest

from gateway.budgets import Budget
from gateway.errors import ApiError
from gateway.planning import refuse_if_late, within_total
from latency.model import PrefillModel
from latency.speed import Forecast, SpeedEstimate
from prompt_builder.types import Plan

SPEED = SpeedEstimate(PrefillModel(0.01, 1e-3, 0.0), 1.1, 0.95, 50, "learned", token_s=0.009, safe_token_s=0.01)


def forecast(queue_s: float = 0.0) -> Forecast:
    """600 tokens, safe after 0.5 seconds beside the queue."""
    return Forecast("engine", 200, 400, 0.05, queue_s, 0.4, 0.45, 0.95)


def plan(max_tokens: int | None = None) -> Plan:
    return Plan(
        system="",
        past=(),
        rendering="stripped",
        chunks=(),
        references=(),
        evidence="",
        facts="",
        question="?",
        max_tokens=max_tokens,
        dropped=(),
        forecast=forecast(),
    )


def test_the_answer_gets_what_the_first_token_leaves() -> None:
    found = within_total(plan(), Budget(total_s=1.5), SPEED, 8192)
    assert found.max_tokens == 101
    assert [item.what for item in found.dropped] == ["max_tokens"]


def test_a_budget_that_leaves_more_than_the_window_has_room_for_asks_for_nothing() -> None:
    assert within_total(plan(), Budget(total_s=3600.0), SPEED, 8192) == plan()


def test_what_was_asked_for_is_not_raised() -> None:
    assert within_total(plan(50), Budget(total_s=1.5), SPEED, 8192) == plan(50)


def test_best_effort_answers_with_one_token_when_no_time_is_left() -> None:
    assert within_total(plan(50), Budget(total_s=0.1), SPEED, 8192).max_tokens == 1


@pytest.mark.parametrize(("queue_s", "status"), [(0.0, 400), (0.3, 400), (2.0, 429)])
def test_a_strict_total_budget_is_refused_and_asked_to_come_again_only_where_the_queue_is_in_the_way(
    queue_s: float, status: int
) -> None:
    total_s = 0.4 if status == 400 else 1.0
    with pytest.raises(ApiError) as refusal:
        refuse_if_late([forecast(queue_s)], Budget(total_s=total_s, strict=True))
    assert (refusal.value.http_status, refusal.value.param) == (status, "headstart.total_budget_ms")
    assert (refusal.value.retry_after_s == queue_s) == (status == 429)


def test_a_budget_that_is_kept_refuses_nothing() -> None:
    refuse_if_late([forecast()], Budget(ttft_s=0.5, total_s=0.6, strict=True))
    refuse_if_late([replace(forecast(), queue_s=9.0)], Budget(total_s=0.6))
