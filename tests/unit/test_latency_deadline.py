"""Deadlines on a monotonic clock."""

import math

import pytest

from latency.deadline import Deadline


def test_what_is_spent_and_left_follows_the_clock() -> None:
    now = [100.0]
    deadline = Deadline.starting_now(1.5, clock=lambda: now[0])
    now[0] += 1.0
    assert deadline.spent_s() == pytest.approx(1.0)
    assert deadline.left_s() == pytest.approx(0.5)
    now[0] += 1.0
    assert deadline.left_s() == pytest.approx(-0.5)


def test_without_a_budget_there_is_always_time_left() -> None:
    assert Deadline.starting_now(None).left_s() == math.inf


@pytest.mark.parametrize("budget_s", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_that_is_no_time_is_refused(budget_s: float) -> None:
    with pytest.raises(ValueError, match="budget"):
        Deadline.starting_now(budget_s)
