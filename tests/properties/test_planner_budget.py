"""What holds for every plan under a budget, against all the plans that there are, on small cases."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.residency import Residency
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.builder import PromptBuilder
from prompt_builder.extracts import Extracts
from prompt_builder.labels import Renderer
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.types import (
    Limits,
    PastMessage,
    Plan,
    PromptChunk,
    QuestionTooLong,
    RenderingChoice,
    Transcript,
    TurnContext,
)
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, ByteTokenizer

# How long one example takes says more about the machine's load than about the code.
RELAXED = settings(deadline=None)

TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(CHATML)
RENDERER = Renderer(TOKENIZER)
BUILDER = PromptBuilder(TOKENIZER, TEMPLATE, "Answer.", 16)
QUESTION = "When does the ferry leave?"
SENTENCES = st.sampled_from(
    ["The ferry leaves at nine.", "Dogs travel free.", "A refund takes a week.", "Storms stop the ferry.", "No."]
)
BODIES = st.lists(SENTENCES, min_size=1, max_size=5).map(" ".join)
RENDERINGS: st.SearchStrategy[RenderingChoice] = st.sampled_from(["kept", "stripped", "auto"])


@st.composite
def found(draw: st.DrawFn, most: int = 5) -> Candidates:
    items = []
    for row_id in range(draw(st.integers(0, most))):
        title, body = f"Page {row_id}", draw(BODIES)
        rendered = RENDERER.render(title, body)
        chunk = Chunk(row_id, "vs", f"f{row_id}", "n.md", 0, title, body, rendered.label, rendered, {})
        items.append(Candidate(chunk, draw(st.sampled_from([0.05, 0.2, 0.5, 0.5, 0.9]))))
    return Candidates(tuple(items))


def speed(per_pair_s: float = 0.0) -> SpeedEstimate:
    """A millisecond a token: a budget in seconds is one in thousands of tokens."""
    return SpeedEstimate(PrefillModel(0.01, 0.001, per_pair_s), 1.1, 0.95, 99, "learned")


def outlook(residency: Residency, per_pair_s: float = 0.0) -> Outlook:
    return Outlook("r", speed(per_pair_s), lambda prefill_s: prefill_s / 4, residency.prefix("salt"))


def answered(plan: Plan) -> tuple[PastMessage, PastMessage]:
    context = TurnContext(plan.chunks, tuple(chunk.label for chunk in plan.references), plan.evidence, plan.facts)
    return PastMessage("user", plan.question, context), PastMessage("assistant", "Yes.")


def computed(residency: Residency, plan: Plan) -> None:
    prompt = BUILDER.render(plan, "salt")
    lease = residency.begin(prompt.token_ids or (), "salt")
    residency.generated(lease, [0])
    residency.end(lease)


def value(chunks: tuple[PromptChunk, ...], candidates: Candidates) -> float:
    """Relevance of wholes, and of extracts the part that they are expected to hold."""
    ranked = Planner(TOKENIZER, TEMPLATE, "Answer.").plan(
        Transcript("", (), QUESTION), candidates, Limits(None, None, 1, 50)
    )
    wholes = sorted(ranked.chunks, key=lambda chunk: (-chunk.relevance, chunk.label))
    values = {
        form.chunk.rendered.text: form.value
        for group in Extracts(TOKENIZER).forms(QUESTION, wholes)
        for form in group
    }
    return sum(values[chunk.rendered.text] for chunk in chunks)


@RELAXED
@given(
    st.lists(found(3), max_size=3),
    found(),
    RENDERINGS,
    st.floats(0.05, 1.2),
    st.integers(1, 5),
    st.integers(0, 1),
    st.none() | st.integers(500, 2_500),
    st.sampled_from([0.0, 2e-7]),
)
def test_a_plan_is_never_worse_than_the_best_run_of_ranked_chunks_that_fits(
    turns: list[Candidates],
    candidates: Candidates,
    rendering: RenderingChoice,
    budget_s: float,
    top_k: int,
    lines: int,
    window: int | None,
    per_pair_s: float,
) -> None:
    residency = Residency(16, 400)
    past: tuple[PastMessage, ...] = ()
    planner = Planner(TOKENIZER, TEMPLATE, "Answer.", rendering=rendering, evidence_lines=lines)
    for earlier in turns:
        plan = planner.plan(
            Transcript("", past, "And the ferry?"), earlier, Limits(None, None, 16, 3), (outlook(residency),)
        )
        computed(residency, plan)
        past = (*past, *answered(plan))
    transcript = Transcript("", past, QUESTION)
    limits = Limits(window, None, 16, top_k)
    outlooks = (outlook(residency, per_pair_s),)
    try:
        plan = planner.plan(transcript, candidates, limits, outlooks, Clock(budget_s, 0.02))
    except QuestionTooLong:
        return
    prompt = BUILDER.render(plan, "salt")
    cached = residency.prefix("salt").extended(prompt.token_ids or ()).cached_tokens()
    forecast = plan.forecast
    assert forecast is not None
    assert (forecast.cached_tokens, forecast.uncached_tokens) == (cached, prompt.tokens - cached)
    assert window is None or prompt.tokens + 16 <= window
    assert len(plan.chunks) + len(plan.references) <= top_k
    assert len({chunk.label for chunk in plan.chunks}) == len(plan.chunks)
    got = value((*plan.chunks, *plan.references), candidates)
    fixed: RenderingChoice
    for fixed in ("kept", "stripped") if rendering == "auto" else (rendering,):
        single = Planner(TOKENIZER, TEMPLATE, "Answer.", rendering=fixed, evidence_lines=0)
        for count in range(1, top_k + 1):
            run = single.plan(transcript, candidates, Limits(window, None, 16, count), outlooks)
            assert run.forecast is not None
            if len(run.past) != len(plan.past):
                # A window that is too small leaves room for evidence when it cuts turns; here it cuts without.
                continue
            if run.forecast.safe_ttft_s + 0.02 <= budget_s:
                assert forecast.fits
                assert got >= value((*run.chunks, *run.references), candidates) - 1e-9


@RELAXED
@given(found(4), st.floats(0.05, 0.8), st.integers(1, 4))
def test_without_anything_resident_no_choice_of_forms_that_fits_is_better(
    candidates: Candidates, budget_s: float, top_k: int
) -> None:
    residency = Residency(16, 400)
    planner = Planner(TOKENIZER, TEMPLATE, "Answer.", evidence_lines=0)
    transcript = Transcript("", (), QUESTION)
    clock = Clock(budget_s, 0.0)
    plan = planner.plan(transcript, candidates, Limits(None, None, 16, top_k), (outlook(residency),), clock)
    everything = planner.plan(transcript, candidates, Limits(None, None, 16, 50))
    ranked = sorted(everything.chunks, key=lambda chunk: (-chunk.relevance, chunk.label))
    bare = planner.tokens(planner.plan(transcript, Candidates(()), Limits(None, None, 16, 1)))
    asked = TOKENIZER.count("Question: ")
    best = 0.0
    for forms in product(*((None, *group) for group in Extracts(TOKENIZER).forms(QUESTION, ranked))):
        taken = [form for form in forms if form is not None]
        prefill_s = 0.01 + 0.001 * (bare + sum(form.tokens for form in taken) + (asked if taken else 0))
        if len(taken) <= top_k and prefill_s / 4 + 1.1 * prefill_s <= budget_s - 1e-9:
            best = max(best, sum(form.value for form in taken))
    if plan.forecast is not None and plan.forecast.fits:
        assert value(plan.chunks, candidates) >= best - 1e-9
    else:
        assert best == 0.0


@RELAXED
@given(found(5), st.floats(0.05, 0.8))
def test_more_time_never_gives_less_relevance(candidates: Candidates, budget_s: float) -> None:
    residency = Residency(16, 400)
    planner = Planner(TOKENIZER, TEMPLATE, "Answer.", evidence_lines=0)
    before = -1.0
    for times in (1.0, 1.3, 2.0, 4.0):
        plan = planner.plan(
            Transcript("", (), QUESTION),
            candidates,
            Limits(None, None, 16, 3),
            (outlook(residency),),
            Clock(budget_s * times, 0.0),
        )
        if plan.forecast is not None and plan.forecast.fits:
            got = value(plan.chunks, candidates)
            assert got >= before - 1e-9
            before = got
