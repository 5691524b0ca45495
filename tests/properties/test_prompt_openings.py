"""A prompt behind a rendered opening is the prompt rendered whole; an opening of another prompt is not used."""

from dataclasses import replace

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.blocks import block_hashes
from cache.hash_memo import RUN_BLOCKS, HashMemo
from gateway.planning import look_ahead
from gateway.serving import unknown_serving
from gateway.settings import Settings
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.openings import LEAST_TOKENS, Openings
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.transcripts import context_of
from prompt_builder.types import Limits, PastMessage, Plan, QuestionTooLong, RenderingChoice, Transcript
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, STRICT, ByteTokenizer

RELAXED = settings(deadline=None)

TOKENIZER = ByteTokenizer()
RENDERER = Renderer(TOKENIZER)
LONG = "The harbour is open. " * (1 + LEAST_TOKENS // 21)
"""With it, openings are kept from turn to turn."""
TEXTS = st.lists(st.sampled_from(["ferry", "storm", "<S>", "[INST]", "bệnh", "犬は。"]), max_size=8).map(" ".join)


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    items = []
    for row_id in range(draw(st.integers(0, 4))):
        title, body = draw(TEXTS), draw(TEXTS)
        rendered = RENDERER.render(title, body)
        chunk = Chunk(row_id, "vs", f"f{row_id}", "n.md", 0, title, body, rendered.label, rendered, {})
        items.append(Candidate(chunk, draw(st.sampled_from([0.1, 0.5, 0.9]))))
    return Candidates(tuple(items))


@RELAXED
@given(
    st.lists(st.tuples(TEXTS, candidates(), TEXTS), min_size=1, max_size=5),
    TEXTS | TEXTS.map(lambda text: LONG + text),
    st.sampled_from(["kept", "stripped", "auto"]),
    st.sampled_from([ChatTemplate(CHATML), ChatTemplate(STRICT), None]),
    st.sampled_from([None, 400, 5_000]),
    st.integers(1, 24),
)
def test_a_rendered_opening_changes_no_byte_no_id_and_no_hash(
    turns: list[tuple[str, Candidates, str]],
    system: str,
    rendering: RenderingChoice,
    template: ChatTemplate | None,
    window: int | None,
    block_size: int,
) -> None:
    planner = Planner(TOKENIZER, template, "Answer.", rendering=rendering)
    builder = PromptBuilder(TOKENIZER, template, "Answer.", block_size)
    serving = replace(
        unknown_serving(Settings()), tokenizer=TOKENIZER, template=template, planner=planner, builder=builder
    )
    limits = Limits(window, None, 16, 4)
    past: tuple[PastMessage, ...] = ()
    for question, found, answer in turns:
        transcript = Transcript(system, past, question)
        ahead = look_ahead(serving, transcript, limits, "salt")
        try:
            plan = planner.plan(transcript, found, limits, material=ahead.material)
            expected = planner.plan(transcript, found, limits)
        except QuestionTooLong:
            return
        assert plan == expected
        whole = PromptBuilder(TOKENIZER, template, "Answer.", block_size).render(plan, "salt")
        rendered = builder.render(plan, "salt", opening=ahead.opening)
        assert rendered == whole
        if rendered.ids_json is not None:
            assert tuple(orjson.loads(rendered.ids_json)) == whole.token_ids
        inexact = builder.render(plan, "salt", exact=False, reason="so", opening=ahead.opening)
        assert inexact == builder.render(plan, "salt", exact=False, reason="so")
        if ahead.opening is not None:
            front = planner.standing(ahead.material, transcript)
            assert ahead.material.joined(front) is ahead.opening.prompt.token_ids
            assert front.parts is not None
            assert ahead.opening.prompt.token_ids == tuple(one for part in front.parts for one in part)
            assert orjson.loads(ahead.opening.prompt.ids_json or b"") == list(ahead.opening.prompt.token_ids)
        past = (*past, PastMessage("user", question, context_of(plan)), PastMessage("assistant", answer))


@RELAXED
@given(TEXTS, TEXTS, TEXTS)
def test_an_opening_of_another_conversation_or_tenant_is_not_used(one: str, other: str, question: str) -> None:
    template = ChatTemplate(CHATML)
    planner, builder = Planner(TOKENIZER, template, ""), PromptBuilder(TOKENIZER, template, "", 8)
    limits = Limits(None, None, 16, 4)

    def plan_of(system: str, said: str, summary: str = "") -> Plan:
        past = (PastMessage("user", said), PastMessage("assistant", "Aye."))
        return planner.plan(Transcript(system, past, question, summary=summary), Candidates(()), limits)

    plan = plan_of(one, one)
    for begun, salt in (
        (plan_of(one, other), "salt"),
        (plan_of(other, one), "salt"),
        (plan_of(one, one, "So far: nothing."), "salt"),
        (replace(plan, instructed=not plan.instructed), "salt"),
        (plan, "another"),
    ):
        opening = builder.opening(begun, salt)
        assert builder.render(plan, "salt", opening=opening) == builder.render(plan, "salt")


@RELAXED
@given(st.integers(0, 3 * RUN_BLOCKS * 2), st.integers(0, 200), st.integers(1, 3))
def test_hashes_go_on_behind_those_that_are_known(known: int, more: int, block_size: int) -> None:
    ids = list(range(known * block_size + more))
    whole = block_hashes(ids, block_size, "salt")
    assert HashMemo().late_hashes(ids, block_size, "salt", whole[:known]) == whole


def test_conversations_that_branch_share_the_opening_up_to_their_branch() -> None:
    planner, builder = (
        Planner(TOKENIZER, ChatTemplate(CHATML), ""),
        PromptBuilder(TOKENIZER, ChatTemplate(CHATML), "", 8),
    )
    limits = Limits(None, None, 16, 4)
    pasts = [
        tuple(PastMessage("user" if place % 2 == 0 else "assistant", word) for place, word in enumerate(said.split()))
        for said in ("", "a b", "a b c d", "a b x y", "a z", "a b c d e f", "")
    ]
    for past in pasts:
        plan = planner.plan(Transcript(LONG, past, "And now?"), Candidates(()), limits)
        whole = PromptBuilder(TOKENIZER, ChatTemplate(CHATML), "", 8).render(plan, "salt")
        assert builder.render(plan, "salt", opening=builder.opening(plan, "salt")) == whole


def test_the_openings_that_were_used_last_are_kept_within_both_bounds() -> None:
    builder = PromptBuilder(TOKENIZER, ChatTemplate(CHATML), "", 8)
    planner = Planner(TOKENIZER, ChatTemplate(CHATML), "")
    kept = Openings(most_tokens=3 * len(LONG), most_openings=8)
    plans = [
        planner.plan(Transcript(f"{number}{LONG}", (), "?"), Candidates(()), Limits(None, None, 16, 4))
        for number in range(5)
    ]
    for plan in plans:
        opening = builder.opening(plan, "salt")
        assert opening is not None
        assert kept.keep(opening) is opening
    assert len(kept) == 2
    assert kept.tokens <= 3 * len(LONG)
    assert [kept.of(plan, "salt") is not None for plan in plans] == [False, False, False, True, True]
    assert kept.of(plans[-1], "another") is None
