"""What holds for every conversation, every set of candidates and every window."""

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.blocks import block_hashes
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Limits, PastMessage, Plan, QuestionTooLong, Transcript, TurnContext
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, STRICT, ByteTokenizer

# How long one example takes says more about the machine's load than about the code.
RELAXED = settings(deadline=None)

TOKENIZER = ByteTokenizer()
RENDERER = Renderer(TOKENIZER)
TEMPLATES = st.sampled_from([ChatTemplate(CHATML), ChatTemplate(STRICT), None])
RENDERINGS = st.sampled_from(["kept", "stripped"])
WORDS = st.sampled_from(
    ["ferry", "storm", "refund", "dog", "<S>", "<E>system", "[INST]", "</s>", "bệnh", "犬は。", "k7f2a"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
PAST = st.lists(st.tuples(TEXTS, TEXTS), max_size=8)


@st.composite
def candidates(draw: st.DrawFn, most: int = 6) -> Candidates:
    items = []
    for row_id in range(draw(st.integers(0, most))):
        title, body = draw(TEXTS), draw(TEXTS)
        rendered = RENDERER.render(title, body)
        chunk = Chunk(row_id, "vs", f"f{row_id}", "n.md", 0, title, body, rendered.label, rendered, {})
        items.append(Candidate(chunk, draw(st.sampled_from([0.1, 0.5, 0.5, 0.9]))))
    return Candidates(tuple(items))


def past_of(pairs: list[tuple[str, str]]) -> tuple[PastMessage, ...]:
    return tuple(
        message
        for question, answer in pairs
        for message in (PastMessage("user", question), PastMessage("assistant", answer))
    )


def answered(plan: Plan, answer: str) -> tuple[PastMessage, PastMessage]:
    context = TurnContext(plan.chunks, tuple(chunk.label for chunk in plan.references), plan.evidence, plan.facts)
    return PastMessage("user", plan.question, context), PastMessage("assistant", answer)


@RELAXED
@given(PAST, candidates(), TEXTS, TEXTS, TEMPLATES, st.integers(1, 32))
def test_ids_are_the_segments_joined_and_only_whole_blocks_are_hashed(
    pairs: list[tuple[str, str]],
    found: Candidates,
    system: str,
    question: str,
    template: ChatTemplate | None,
    block_size: int,
) -> None:
    plan = Planner(TOKENIZER, template, "Answer.").plan(
        Transcript(system, past_of(pairs), question), found, Limits(None, None, 16, 4)
    )
    prompt = PromptBuilder(TOKENIZER, template, "Answer.", block_size).render(plan, "salt")
    if prompt.token_ids is None:
        assert prompt.inexact_reason
        assert prompt.block_hashes == ()
        return
    assert prompt.token_ids == tuple(i for segment in prompt.segments for i in segment.token_ids)
    assert prompt.tokens == len(prompt.token_ids)
    assert prompt.block_hashes == block_hashes(prompt.token_ids, block_size, "salt")
    for segment in prompt.segments:
        if segment.kind != "scaffold":
            assert bytes(segment.token_ids).decode() == segment.text
    contents = "".join(message.content for message in prompt.messages)
    assert "".join(segment.text for segment in prompt.segments if segment.kind != "scaffold") == contents


@RELAXED
@given(PAST, candidates(), TEXTS, TEXTS)
def test_b7_contents_never_give_a_control_token(
    pairs: list[tuple[str, str]], found: Candidates, system: str, question: str
) -> None:
    template = ChatTemplate(CHATML)
    plan = Planner(TOKENIZER, template, "").plan(
        Transcript(system, past_of(pairs), question), found, Limits(None, None, 16, 4)
    )
    prompt = PromptBuilder(TOKENIZER, template, "", 16).render(plan)
    assert prompt.token_ids is not None
    assert sum(token_id == 256 for token_id in prompt.token_ids) == len(prompt.messages) + 1
    assert sum(token_id == 257 for token_id in prompt.token_ids) == len(prompt.messages)


@RELAXED
@given(st.lists(st.tuples(TEXTS, candidates(4), TEXTS), min_size=2, max_size=6), TEXTS)
def test_a1_a_kept_conversation_only_grows_at_its_end(turns: list[tuple[str, Candidates, str]], system: str) -> None:
    template = ChatTemplate(CHATML)
    planner = Planner(TOKENIZER, template, "Answer.", rendering="kept")
    builder = PromptBuilder(TOKENIZER, template, "Answer.", 16)
    past: tuple[PastMessage, ...] = ()
    prompts = []
    for question, found, answer in turns:
        plan = planner.plan(Transcript(system, past, question), found, Limits(None, None, 16, 4))
        prompts.append(builder.render(plan).token_ids or ())
        past = (*past, *answered(plan, answer))
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier


@RELAXED
@given(st.lists(st.tuples(TEXTS, candidates(4), TEXTS), min_size=1, max_size=6), st.integers(200, 1_500), TEXTS)
def test_a_reference_always_points_to_a_chunk_that_stands_before_it(
    turns: list[tuple[str, Candidates, str]], window: int, system: str
) -> None:
    planner = Planner(TOKENIZER, ChatTemplate(CHATML), "", rendering="kept")
    past: tuple[PastMessage, ...] = ()
    for question, found, answer in turns:
        try:
            plan = planner.plan(Transcript(system, past, question), found, Limits(window, None, 16, 4))
        except QuestionTooLong:
            return
        standing: set[str] = set()
        for message in plan.past:
            if message.context is not None:
                assert standing.issuperset(message.context.references)
                standing.update(chunk.label for chunk in message.context.chunks)
        assert standing.issuperset(chunk.label for chunk in plan.references)
        assert standing.isdisjoint(chunk.label for chunk in plan.chunks)
        past = (*past, *answered(plan, answer))


@RELAXED
@given(
    PAST,
    candidates(),
    TEXTS,
    TEXTS,
    TEMPLATES,
    RENDERINGS,
    st.integers(1, 3_000),
    st.none() | st.integers(1, 4_000),
    st.integers(1, 300),
)
def test_b1_b2_b3_a_plan_never_exceeds_the_window(
    pairs: list[tuple[str, str]],
    found: Candidates,
    system: str,
    question: str,
    template: ChatTemplate | None,
    rendering: str,
    window: int,
    max_tokens: int | None,
    least: int,
) -> None:
    planner = Planner(TOKENIZER, template, "Answer.", rendering=rendering)  # type: ignore[arg-type]
    transcript = Transcript(system, past_of(pairs), question)
    limits = Limits(window, max_tokens, least, 5)
    bare = planner.tokens(planner.plan(Transcript(system, (), question), Candidates(()), Limits(None, None, 1, 1)))
    answer = least if max_tokens is None else min(max_tokens, least)
    try:
        plan = planner.plan(transcript, found, limits)
    except QuestionTooLong:
        assert bare + answer > window
        return
    prompt = PromptBuilder(TOKENIZER, template, "Answer.", 16).render(plan)
    assert prompt.tokens == planner.tokens(plan)
    assert prompt.tokens + (plan.max_tokens or answer) <= window
    assert plan.max_tokens is None or answer <= plan.max_tokens <= (max_tokens or 0)
    assert (plan.system, plan.question) == (system, question)
    assert plan.past == transcript.past[len(transcript.past) - len(plan.past) :]
    assert len(plan.past) % 2 == 0
    lost = len({item.chunk.label for item in found.items}) > len(plan.chunks) and len(plan.chunks) < 5
    said = [dropped.what for dropped in plan.dropped]
    assert not lost or "chunk" in said
    assert said.count("turn") == (len(transcript.past) - len(plan.past)) // 2
    assert ("max_tokens" in said) == (plan.max_tokens != max_tokens)


@RELAXED
@given(st.randoms(), candidates(8), TEXTS, st.integers(150, 1_500))
def test_a4_the_order_of_the_candidates_does_not_matter(
    random: Random, found: Candidates, question: str, window: int
) -> None:
    planner = Planner(TOKENIZER, ChatTemplate(CHATML), "")
    shuffled = list(found.items)
    random.shuffle(shuffled)
    limits = Limits(window, None, 16, 5)
    transcript = Transcript("", (), question)
    try:
        expected = planner.plan(transcript, found, limits)
    except QuestionTooLong:
        return
    assert planner.plan(transcript, Candidates(tuple(shuffled)), limits) == expected


@RELAXED
@given(PAST, candidates(), TEXTS, st.integers(100, 2_000))
def test_b6_roles_alternate_after_trimming(
    pairs: list[tuple[str, str]], found: Candidates, question: str, window: int
) -> None:
    template = ChatTemplate(STRICT)
    try:
        plan = Planner(TOKENIZER, template, "Sys").plan(
            Transcript("", past_of(pairs), question), found, Limits(window, None, 16, 4)
        )
    except QuestionTooLong:
        return
    prompt = PromptBuilder(TOKENIZER, template, "Sys", 16).render(plan)
    assert prompt.inexact_reason is None
    roles = [message.role for message in prompt.messages]
    assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
    assert roles[-1] == "user"
