"""Plans over many replicas: two are planned on exactly, and they are the right ones."""

import random

import pytest

from cache.prompt_tree import PromptTree
from cache.residency import Residency
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.outlook import Clock, NothingHeld, Outlook, Prefix
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Limits, Plan, Transcript
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, ByteTokenizer

TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(CHATML)
RENDERER = Renderer(TOKENIZER)
BUILDER = PromptBuilder(TOKENIZER, TEMPLATE, "Answer from the passages.", 16)
PLANNER = Planner(TOKENIZER, TEMPLATE, "Answer from the passages.", evidence_lines=0)
LIMITS = Limits(None, None, 16, 4)
SPEED = SpeedEstimate(PrefillModel(0.01, 1e-3, 1e-7), 1.1, 0.95, 99, "learned")
SALT = "salt"


def candidate(row_id: int, relevance: float) -> Candidate:
    body = f"Ferry {row_id} leaves at nine. " + " ".join(f"Fact {row_id}.{place} is told." for place in range(8))
    rendered = RENDERER.render(f"Page {row_id}", body)
    chunk = Chunk(
        row_id, "vs", f"file{row_id}", f"page{row_id}.md", 0, f"Page {row_id}", body, rendered.label, rendered, {}
    )
    return Candidate(chunk, relevance)


def found(*row_ids: int) -> Candidates:
    return Candidates(tuple(candidate(row, 0.9 - place / 10) for place, row in enumerate(row_ids)))


def asked(question: str) -> Transcript:
    return Transcript("", (), question)


def outlooks(replicas: list[Residency | None], queues_s: list[float] | None = None) -> list[Outlook]:
    tree = PromptTree(16, SALT)
    made = []
    for number, residency in enumerate(replicas):
        wait_s = queues_s[number] if queues_s else 0.0
        prefix: Prefix = NothingHeld() if residency is None else residency.prefix(SALT, tree)
        made.append(Outlook(f"r{number}", SPEED, lambda prefill_s, wait_s=wait_s: wait_s, prefix))  # type: ignore[misc]
    return made


def computed(residency: Residency, plan: Plan) -> None:
    lease = residency.begin(BUILDER.render(plan, SALT).token_ids or (), SALT)
    residency.generated(lease, [0])
    residency.end(lease)


def ttft_s(plan: Plan) -> float:
    assert plan.forecast is not None
    return plan.forecast.ttft_s


def test_of_many_replicas_the_one_that_holds_the_chunks_is_planned_on() -> None:
    replicas: list[Residency | None] = [Residency(16, 1000) for _ in range(12)]
    holder = replicas[9]
    assert holder is not None
    computed(holder, PLANNER.plan(asked("When?"), found(1, 2, 3), LIMITS))
    plan = PLANNER.plan(asked("Why?"), found(3, 2, 1), LIMITS, outlooks(replicas))
    assert plan.forecast is not None
    assert plan.forecast.replica == "r9"
    assert plan.forecast.cached_tokens > 300


def test_where_all_are_alike_the_first_is_taken() -> None:
    plan = PLANNER.plan(asked("When?"), found(1, 2), LIMITS, outlooks([None] * 32))
    assert plan.forecast is not None
    assert plan.forecast.replica == "r0"


def test_a_queue_outweighs_what_is_held() -> None:
    replicas: list[Residency | None] = [Residency(16, 1000) for _ in range(8)]
    holder = replicas[0]
    assert holder is not None
    computed(holder, PLANNER.plan(asked("When?"), found(1, 2, 3), LIMITS))
    busy = [9.0, *[0.0] * 7]
    plan = PLANNER.plan(asked("Why?"), found(1, 2, 3), LIMITS, outlooks(replicas, busy))
    assert plan.forecast is not None
    assert plan.forecast.replica == "r1"


@pytest.mark.parametrize("budget_s", [None, 0.6])
def test_the_plan_is_hardly_later_than_the_best_of_exact_plans_on_every_replica(budget_s: float | None) -> None:
    draw = random.Random(4)
    replicas: list[Residency | None] = [Residency(16, 300) for _ in range(16)]
    clock = Clock(budget_s, 0.0)
    lost_s = total_s = 0.0
    for turn in range(60):
        first = draw.randrange(12)
        wanted = found(*draw.sample(range(first, first + 8), 4))
        queues_s = [draw.choice((0.0, 0.1, 0.4)) for _ in replicas]
        all_of_them = outlooks(replicas, queues_s)
        plan = PLANNER.plan(asked(f"Question {turn}?"), wanted, LIMITS, all_of_them, clock)
        alone = [PLANNER.plan(asked(f"Question {turn}?"), wanted, LIMITS, [one], clock) for one in all_of_them]
        fitting = [one for one in alone if len(one.chunks) >= len(plan.chunks)]
        best_s = min(map(ttft_s, fitting))
        lost_s += ttft_s(plan) - best_s
        total_s += best_s
        assert len(plan.chunks) >= max(map(len, (one.chunks for one in alone))) - 1
        assert plan.forecast is not None
        chosen = replicas[int(plan.forecast.replica[1:])]
        assert chosen is not None
        computed(chosen, plan)
    assert lost_s <= 0.02 * total_s
