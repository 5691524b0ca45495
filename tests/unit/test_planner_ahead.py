"""A transcript that is measured while candidates are looked for gives the plan that it gives otherwise."""

import pytest

from cache.residency import Residency
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.planner import Planner
from prompt_builder.types import Limits, PastMessage, PromptChunk, RenderingChoice, Transcript, TurnContext
from tests.support.ferries import TEMPLATE, TOKENIZER, chunk, found

SPEED = SpeedEstimate(PrefillModel(0.001, 1e-4, 1e-9), 1.0, 0.95, 99, "learned")


def kept(name: str) -> PromptChunk:
    one = chunk(name)
    return PromptChunk(one.label, one.file_id, one.filename, one.title, 0.5, one.text, one.rendered)


def past(turns: int) -> tuple[PastMessage, ...]:
    messages = []
    for turn in range(turns):
        context = TurnContext((kept(chr(ord("a") + turn)),), (), "", "")
        messages += [PastMessage("user", f"Question {turn}?", context), PastMessage("assistant", f"Answer {turn}.")]
    return tuple(messages)


@pytest.mark.parametrize("rendering", ["kept", "stripped", "auto"])
@pytest.mark.parametrize("speed", [None, SPEED])
@pytest.mark.parametrize("budget_s", [None, 0.12, 1.0])
@pytest.mark.parametrize("window_tokens", [None, 500])
def test_the_plan_is_the_same(
    rendering: RenderingChoice, speed: SpeedEstimate | None, budget_s: float | None, window_tokens: int | None
) -> None:
    planner = Planner(TOKENIZER, TEMPLATE, "Answer.", rendering=rendering)
    limits = Limits(window_tokens, 32, 16, 3)
    transcript = Transcript("Be brief.", past(4), "And when does it come back?", known=8)
    candidates = found("bxyz")

    def outlooks() -> tuple[Outlook, ...]:
        return (Outlook("r", speed, lambda prefill_s: 0.0, Residency(16, 1000).prefix("s")),)

    clock = Clock(budget_s, 0.0)
    plan = planner.plan(transcript, candidates, limits, outlooks(), clock)
    material = planner.ahead(transcript, limits)
    assert planner.plan(transcript, candidates, limits, outlooks(), clock, material=material) == plan
