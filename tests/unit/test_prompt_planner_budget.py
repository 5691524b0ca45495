"""Plans under a budget and over replicas, over a tokenizer of bytes and a replica of a millisecond a token."""

import statistics
import time
from dataclasses import replace

import pytest

from cache.residency import Residency
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.memo import MemoTokenizer
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.tokenizer import EstimateTokenizer
from prompt_builder.types import Limits, PastMessage, Plan, RenderingChoice, Tokenizer, Transcript, TurnContext
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, ByteTokenizer

INSTRUCTIONS = "Answer from the passages."
TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(CHATML)
RENDERER = Renderer(TOKENIZER)
BUILDER = PromptBuilder(TOKENIZER, TEMPLATE, INSTRUCTIONS, 16)
SALT = "salt"
QUESTION = Transcript("", (), "What about the ferry?")
UNLIMITED = Limits(None, None, 16, 5)
# On a large card a cached token costs next to nothing; on two cores as much as a thousandth of a new one.
CARD = PrefillModel(0.008, 31e-6, 1.3e-9)
CORES = PrefillModel(0.03, 1e-3, 1e-6)
MILLISECOND = PrefillModel(0.0, 1e-3, 0.0)


def candidate(row_id: int, relevance: float, sentences: int = 6) -> Candidate:
    body = " ".join(f"Fact {row_id}.{place} is told here." for place in range(sentences - 1))
    body = f"The ferry {row_id} leaves at nine. {body}"
    rendered = RENDERER.render(f"Page {row_id}", body)
    chunk = Chunk(
        row_id, "vs", f"file{row_id}", f"page{row_id}.md", 0, f"Page {row_id}", body, rendered.label, rendered, {}
    )
    return Candidate(chunk, relevance)


def found(count: int, sentences: int = 6, first: int = 0) -> Candidates:
    return Candidates(
        tuple(candidate(first + place, round(0.9 - place / 25, 3), sentences) for place in range(count))
    )


def planner(rendering: RenderingChoice = "stripped", evidence_lines: int = 0, pin_last: int = 0) -> Planner:
    return Planner(
        TOKENIZER, TEMPLATE, INSTRUCTIONS, rendering=rendering, evidence_lines=evidence_lines, pin_last=pin_last
    )


def outlook(
    residency: Residency | None = None, model: PrefillModel = MILLISECOND, name: str = "r", queue_s: float = 0.0
) -> Outlook:
    speed = SpeedEstimate(model, 1.0, 0.95, 99, "learned")
    return Outlook(name, speed, lambda prefill_s: queue_s, (residency or Residency(16, 1_000)).prefix(SALT))


def computed(residency: Residency, plan: Plan) -> None:
    lease = residency.begin(BUILDER.render(plan, SALT).token_ids or (), SALT)
    residency.generated(lease, [0])
    residency.end(lease)


def answered(plan: Plan, answer: str = "At nine.") -> tuple[PastMessage, PastMessage]:
    context = TurnContext(plan.chunks, tuple(chunk.label for chunk in plan.references), plan.evidence, plan.facts)
    return PastMessage("user", plan.question, context), PastMessage("assistant", answer)


def budget_for(tokens: int) -> Clock:
    return Clock(tokens / 1000 + 1e-6, 0.0)


def converse(model: PrefillModel, turns: int, repeated: bool) -> list[Plan]:
    """A conversation in which the planner chooses; every turn wants new chunks, or the same ones."""
    residency = Residency(16, 10_000)
    past: tuple[PastMessage, ...] = ()
    stripped = 0
    plans = []
    for turn in range(turns):
        transcript = Transcript("", past, f"Ferry {turn}?", stripped=stripped)
        wanted = found(3, 8, first=0 if repeated else 10 * turn)
        plan = planner("auto").plan(transcript, wanted, UNLIMITED, (outlook(residency, model),))
        computed(residency, plan)
        stripped = plan.stripped
        past = (*past, *answered(plan))
        plans.append(plan)
    return plans


def test_without_a_budget_everything_wanted_stands_whole_and_is_foretold() -> None:
    plan = planner().plan(QUESTION, found(8), UNLIMITED, (outlook(),), Clock(None, 0.02))
    assert len(plan.chunks) == 5
    assert {chunk.form for chunk in plan.chunks} == {"whole"}
    forecast = plan.forecast
    assert forecast is not None
    assert forecast.uncached_tokens == BUILDER.render(plan).tokens
    assert forecast.cached_tokens == 0
    assert forecast.ttft_s == pytest.approx(0.02 + forecast.uncached_tokens / 1000)
    assert forecast.fits
    sixth = found(8).items[5].chunk.rendered
    assert forecast.next_chunk_s == pytest.approx(len(sixth.token_ids) / 1000)


def test_where_no_replica_is_known_nothing_is_foretold_and_the_plan_is_as_ever() -> None:
    plain = planner(evidence_lines=1).plan(QUESTION, found(3), UNLIMITED)
    unknown = replace(outlook(), speed=None)
    budget = planner(evidence_lines=1).plan(QUESTION, found(3), UNLIMITED, (unknown,), Clock(0.001, 0.0))
    assert plain == budget
    assert plain.forecast is None
    estimate: Tokenizer = EstimateTokenizer()
    counted = Planner(estimate, None, "").plan(QUESTION, found(3), UNLIMITED, (outlook(),), Clock(0.001, 0.0))
    assert counted.forecast is None
    assert len(counted.chunks) == 3


def test_a_smaller_budget_gives_extracts_then_fewer_chunks_then_none_and_says_what_each_would_have_cost() -> None:
    whole = BUILDER.render(planner().plan(QUESTION, found(5), UNLIMITED)).tokens
    bare = BUILDER.render(planner().plan(QUESTION, Candidates(()), UNLIMITED)).tokens
    shown = []
    for tokens in range(whole + 20, bare, -20):
        plan = planner().plan(QUESTION, found(5), UNLIMITED, (outlook(),), budget_for(tokens))
        assert plan.forecast is not None
        assert plan.forecast.fits
        assert BUILDER.render(plan).tokens <= tokens
        absent = {item.chunk.label for item in found(5).items} - {chunk.label for chunk in plan.chunks}
        assert {dropped.name for dropped in plan.dropped} == absent
        if absent:
            assert all("ms" in dropped.reason and "budget" in dropped.reason for dropped in plan.dropped)
            assert plan.forecast.next_chunk_s is not None
        shown.append((len(plan.chunks), sum(chunk.form == "extract" for chunk in plan.chunks)))
    assert shown[0] == (5, 0)
    assert any(extracts for _, extracts in shown)
    assert shown[-1] == (0, 0)


def test_what_was_left_is_said_in_milliseconds() -> None:
    plan = planner().plan(QUESTION, found(2), replace(UNLIMITED, top_k=2), (outlook(),), budget_for(160))
    assert plan.forecast is not None
    left_ms = 160 - plan.forecast.ttft_s * 1000
    assert plan.dropped
    whole = next(item for item in found(2).items if item.chunk.label == plan.dropped[0].name)
    cost_ms = len(whole.chunk.rendered.token_ids)
    assert plan.dropped[0].reason == (
        f"Would have cost {cost_ms} ms; {left_ms:.0f} ms were left of the budget of 160 ms."
    )


def test_the_gateways_time_and_the_queue_are_part_of_the_budget() -> None:
    whole = BUILDER.render(planner().plan(QUESTION, found(5), UNLIMITED)).tokens
    clock = budget_for(whole)
    plans = [
        planner().plan(QUESTION, found(5), UNLIMITED, (outlook(),), clock),
        planner().plan(QUESTION, found(5), UNLIMITED, (outlook(),), replace(clock, spent_s=0.3)),
        planner().plan(QUESTION, found(5), UNLIMITED, (outlook(queue_s=0.6),), clock),
    ]
    tokens = [BUILDER.render(plan).tokens for plan in plans]
    assert tokens[0] == whole
    assert whole - 400 < tokens[1] <= whole - 300
    assert tokens[2] <= whole - 600
    assert all(plan.forecast is not None and plan.forecast.fits for plan in plans)


def test_a_wait_that_grows_with_the_prefill_leaves_room_for_what_still_fits() -> None:
    busy = replace(outlook(), queue_s=lambda prefill_s: 0.0 if prefill_s <= 0.5 else 10.0)
    plan = planner().plan(QUESTION, found(5), UNLIMITED, (busy,), Clock(2.0, 0.0))
    assert plan.forecast is not None
    assert plan.forecast.fits
    assert plan.forecast.queue_s == 0.0
    assert 300 < plan.forecast.uncached_tokens <= 500


def test_when_nothing_fits_the_smallest_plan_runs_and_says_so() -> None:
    past = (PastMessage("user", "x" * 400), PastMessage("assistant", "y" * 400))
    transcript = Transcript("", past, "What about the ferry?")
    plan = planner("auto").plan(transcript, found(5), UNLIMITED, (outlook(),), Clock(0.2, 0.0))
    assert plan.forecast is not None
    assert not plan.forecast.fits
    assert len(plan.chunks) <= 1
    assert len(plan.past) == 2
    assert all("exceeds the budget of 200 ms" in dropped.reason for dropped in plan.dropped)
    hopeless = planner().plan(QUESTION, found(5), UNLIMITED, (outlook(),), Clock(0.0, 5.0))
    assert hopeless.forecast is not None
    assert not hopeless.forecast.fits
    assert hopeless.chunks == ()


def test_what_is_late_anyway_still_gets_the_extract_that_adds_a_tenth_of_the_budget() -> None:
    long = Transcript("s" * 3_000, (), "What about the ferry?")
    plan = planner().plan(long, found(3), UNLIMITED, (outlook(),), Clock(1.2, 0.0))
    assert plan.forecast is not None
    assert not plan.forecast.fits
    assert [chunk.form for chunk in plan.chunks] == ["extract"]
    bare = planner().plan(long, Candidates(()), UNLIMITED, (outlook(),)).forecast
    assert bare is not None
    assert plan.forecast.ttft_s <= bare.ttft_s + 0.12 + 0.01


def test_chunks_that_are_resident_behind_the_front_cost_nothing_and_come_first() -> None:
    residency = Residency(16, 1_000)
    before = planner().plan(QUESTION, Candidates(found(5).items[3:]), UNLIMITED)
    computed(residency, before)
    bare = BUILDER.render(planner().plan(QUESTION, Candidates(()), UNLIMITED)).tokens
    clock = budget_for(bare + 120)
    cold = planner().plan(QUESTION, found(5), UNLIMITED, (outlook(),), clock)
    warm = planner().plan(QUESTION, found(5), UNLIMITED, (outlook(residency),), clock)
    assert [chunk.label for chunk in warm.chunks[:2]] == [chunk.label for chunk in before.chunks]
    assert {chunk.form for chunk in warm.chunks[:2]} == {"whole"}
    assert len(warm.chunks) >= len(cold.chunks)
    assert warm.forecast is not None
    assert warm.forecast.fits
    assert warm.forecast.cached_tokens > 300


def test_of_two_replicas_the_one_that_allows_more_is_taken_then_the_quicker() -> None:
    residency = Residency(16, 1_000)
    computed(residency, planner().plan(QUESTION, found(5), UNLIMITED))
    holds, empty = outlook(residency, name="holds", queue_s=0.1), outlook(name="empty")
    for clock in (Clock(None, 0.0), budget_for(700)):
        plan = planner().plan(QUESTION, found(5), UNLIMITED, (empty, holds), clock)
        assert plan.forecast is not None
        assert plan.forecast.replica == "holds"
        assert len(plan.chunks) == 5
    late = replace(holds, queue_s=lambda prefill_s: 60.0)
    plan = planner().plan(QUESTION, found(5), UNLIMITED, (empty, late), budget_for(700))
    assert plan.forecast is not None
    assert plan.forecast.replica == "empty"


def test_evidence_takes_the_place_of_little_relevance_and_stands_beside_whole_chunks() -> None:
    whole = BUILDER.render(planner().plan(QUESTION, found(5), UNLIMITED)).tokens
    roomy = planner(evidence_lines=1).plan(QUESTION, found(5), UNLIMITED, (outlook(),), budget_for(whole + 200))
    assert roomy.evidence
    assert len(roomy.chunks) == 5
    tight = planner(evidence_lines=1).plan(QUESTION, found(5), UNLIMITED, (outlook(),), budget_for(160))
    assert not tight.evidence
    assert [chunk.form for chunk in tight.chunks] == ["extract"]


def test_the_most_relevant_chunks_are_held_back_for_the_last_places() -> None:
    by_label = replace(UNLIMITED, chunk_order="label")
    labels = sorted(item.chunk.label for item in found(5).items[1:])
    plan = planner(pin_last=1).plan(QUESTION, found(5), by_label)
    assert [chunk.label for chunk in plan.chunks] == [*labels, found(1).items[0].chunk.label]
    free = planner(pin_last=1).plan(QUESTION, found(5), replace(by_label, pin_last=0))
    assert [chunk.label for chunk in free.chunks] == sorted(chunk.label for chunk in plan.chunks)


def test_a_request_may_ask_for_evidence_of_its_own() -> None:
    assert planner(evidence_lines=0).plan(QUESTION, found(2), replace(UNLIMITED, evidence_lines=1)).evidence
    assert not planner(evidence_lines=1).plan(QUESTION, found(2), replace(UNLIMITED, evidence_lines=0)).evidence


def test_a_card_keeps_past_turns_and_slow_cores_strip_them() -> None:
    assert [plan.stripped for plan in converse(CARD, 8, repeated=True)] == [0] * 8
    kept = converse(CORES, 4, repeated=True)
    assert kept[-1].references, "chunks that are wanted again are worth keeping anywhere"
    stripped = converse(CORES, 8, repeated=False)
    assert stripped[-1].stripped >= 8
    assert stripped[-1].past[0].context is None


def test_a_turns_rendering_changes_only_from_kept_to_stripped() -> None:
    counts = [plan.stripped for plan in converse(CORES, 12, repeated=False)]
    assert counts == sorted(counts)
    for plan in converse(CORES, 6, repeated=False):
        contexts = [message.context is not None for message in plan.past]
        assert not any(contexts[: plan.stripped])
        assert plan.rendering == ("kept" if any(contexts) else "stripped")


def test_past_turns_are_stripped_before_any_of_them_is_cut() -> None:
    residency = Residency(16, 10_000)
    past: tuple[PastMessage, ...] = ()
    for turn in range(6):
        wanted = found(2, 8, first=10 * turn)
        transcript = Transcript("", past, f"Ferry {turn}?")
        plan = planner("auto").plan(transcript, wanted, Limits(1_800, None, 16, 2), (outlook(residency, CARD),))
        computed(residency, plan)
        past = (*past, *answered(plan))
        assert len(plan.chunks) == 2
        assert len(plan.past) == 2 * turn
    assert plan.stripped > 0


def test_folded_messages_are_not_rendered_and_their_summary_is_counted() -> None:
    past = tuple(PastMessage(role, f"{role} {turn} " * 20) for turn in range(4) for role in ("user", "assistant"))
    transcript = Transcript("Sys", past, "And the ferry?", summary="They spoke of ferries.", folded=4)
    plan = planner("auto").plan(transcript, found(2), UNLIMITED, (outlook(),), Clock(5.0, 0.0))
    assert plan.past == past[4:]
    assert (plan.summary, plan.folded) == (transcript.summary, 4)
    assert plan.forecast is not None
    assert plan.forecast.uncached_tokens == BUILDER.render(plan).tokens


def test_alternatives_rise_from_no_chunk_to_all() -> None:
    rows = planner(evidence_lines=1).alternatives(QUESTION, found(8), UNLIMITED, (outlook(),), Clock(0.2, 0.01))
    assert 2 <= len(rows) <= 8
    assert (rows[0].chunks, rows[0].relevance_kept) == (0, 0.0)
    assert rows[-1].relevance_kept == pytest.approx(1.0)
    assert [row.budget_s for row in rows] == sorted(row.budget_s for row in rows)
    assert [row.relevance_kept for row in rows] == sorted(row.relevance_kept for row in rows)
    for row in rows:
        plan = planner().plan(QUESTION, found(8), UNLIMITED, (outlook(),), Clock(row.budget_s + 1e-9, 0.01))
        assert plan.forecast is not None
        assert plan.forecast.fits
        assert len(plan.chunks) >= row.chunks or row.extracts
    assert planner().alternatives(QUESTION, found(8), UNLIMITED) == ()


def test_no_alternative_costs_more_than_one_that_holds_more() -> None:
    """What was just sent is cached to its end, and so costs less than no chunk at all."""
    residency = Residency(64, 1_000)
    computed(residency, planner().plan(QUESTION, found(2), UNLIMITED))
    rows = planner().alternatives(QUESTION, found(2), UNLIMITED, (outlook(residency),), Clock(0.2, 0.0))
    budgets = [row.budget_s for row in rows]
    assert budgets == sorted(set(budgets))
    assert rows[0].chunks > 0
    assert rows[-1].relevance_kept == pytest.approx(1.0)


@pytest.mark.parametrize("clock", [Clock(None, 0.0), Clock(1.0, 0.0), Clock(0.2, 0.0)])
def test_a_plan_over_twenty_candidates_and_forty_turns_is_quick(clock: Clock) -> None:
    """Two milliseconds on a quiet core, here in processor time and with room for a slow one."""
    quick = Planner(MemoTokenizer(TOKENIZER), TEMPLATE, INSTRUCTIONS, rendering="auto")
    residency = Residency(16, 10_000)
    past = tuple(
        PastMessage(role, f"{role} {turn} says this. " * 4) for turn in range(40) for role in ("user", "assistant")
    )
    first = quick.plan(Transcript("Sys", past[:-2], "Ferry?"), found(5), UNLIMITED, (outlook(residency),))
    computed(residency, first)
    past = (*past[:-2], *answered(first))
    taken_s = []
    for turn in range(40):
        transcript = Transcript("Sys", past, f"What about ferry {turn}?")
        outlooks = (outlook(residency, CORES),)
        wanted = found(20, 8)
        began_s = time.thread_time()
        quick.plan(transcript, wanted, Limits(8_192, 100, 16, 5), outlooks, clock)
        taken_s.append(time.thread_time() - began_s)
    p95_ms = statistics.quantiles(taken_s[5:], n=20)[-1] * 1000
    print(f"plan: p50 {statistics.median(taken_s[5:]) * 1000:.2f} ms, p95 {p95_ms:.2f} ms")
    assert p95_ms < 20
