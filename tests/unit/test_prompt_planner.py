"""Plans and prompts over a tokenizer of bytes, so that every number can be checked by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from cache.blocks import block_hashes
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.planner import TURNS_PER_CUT, Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.tokenizer import EstimateTokenizer
from prompt_builder.types import (
    ChunkOrder,
    Limits,
    Message,
    PastMessage,
    Plan,
    Prompt,
    PromptChunk,
    QuestionTooLong,
    Rendering,
    Transcript,
    TurnContext,
)
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, STRICT, ByteTokenizer

INSTRUCTIONS = "Answer from the passages."
TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(CHATML)
RENDERER = Renderer(TOKENIZER)
BUILDER = PromptBuilder(TOKENIZER, TEMPLATE, INSTRUCTIONS, 16)


def candidate(row_id: int, relevance: float, length: int = 60) -> Candidate:
    body = (f"Fact {row_id} about the ferry. " * 20)[:length]
    rendered = RENDERER.render(f"Page {row_id}", body)
    chunk = Chunk(
        row_id, "vs", f"file{row_id}", f"page{row_id}.md", 0, f"Page {row_id}", body, rendered.label, rendered, {}
    )
    return Candidate(chunk, relevance)


def found(count: int, length: int = 60) -> Candidates:
    return Candidates(tuple(candidate(place, 0.9 - place / 50, length) for place in range(count)))


def conversation(turns: int, length: int = 30) -> tuple[PastMessage, ...]:
    return tuple(
        message
        for turn in range(turns)
        for message in (
            PastMessage("user", f"Question {turn}? ".ljust(length, ".")),
            PastMessage("assistant", f"Answer {turn}. ".ljust(length, ".")),
        )
    )


def planner(rendering: Rendering = "stripped", evidence_lines: int = 0, template: ChatTemplate = TEMPLATE) -> Planner:
    return Planner(TOKENIZER, template, INSTRUCTIONS, rendering=rendering, evidence_lines=evidence_lines)


def limits(window: int | None, max_tokens: int | None = None, least: int = 50, top_k: int = 5) -> Limits:
    return Limits(window_tokens=window, max_tokens=max_tokens, min_answer_tokens=least, top_k=top_k)


def kinds(plan: Plan) -> list[str]:
    return [dropped.what for dropped in plan.dropped]


def turn_with(plan: Plan, answer: str = "Yes.") -> tuple[PastMessage, PastMessage]:
    context = TurnContext(plan.chunks, tuple(chunk.label for chunk in plan.references), plan.evidence, plan.facts)
    return PastMessage("user", plan.question, context), PastMessage("assistant", answer)


def text_of(prompt: Prompt) -> str:
    return "".join(segment.text for segment in prompt.segments)


def test_the_layout_goes_from_stable_to_volatile() -> None:
    transcript = Transcript("Be brief.", conversation(1), "What about the ferry?", facts="Today is Monday.")
    plan = planner(evidence_lines=1).plan(transcript, found(2), limits(None))
    prompt = BUILDER.render(plan)
    assert [segment.kind for segment in prompt.segments] == [
        *("scaffold", "system", "scaffold", "turn", "scaffold", "turn", "scaffold"),
        *("chunk", "chunk", "evidence", "facts", "question", "scaffold"),
    ]
    assert prompt.messages[0] == Message("system", "Answer from the passages.\n\nBe brief.")
    last = prompt.messages[-1].content
    first, second = (chunk.rendered.text for chunk in plan.chunks)
    assert last == f"{first}{second}{plan.evidence}\n\nToday is Monday.\n\nQuestion: What about the ferry?"
    assert plan.chunks[-1].relevance > plan.chunks[0].relevance


def test_b4_ids_are_those_of_the_segments_and_the_messages_say_the_same() -> None:
    plan = planner(evidence_lines=2).plan(Transcript("", conversation(2), "ferry?"), found(3), limits(None))
    prompt = BUILDER.render(plan, "salt")
    assert prompt.token_ids == tuple(i for segment in prompt.segments for i in segment.token_ids)
    assert prompt.tokens == len(prompt.token_ids) == planner().tokens(plan)
    rendered = "".join(f"<S>{message.role}\n{message.content}<E>" for message in prompt.messages) + "<S>assistant\n"
    assert text_of(prompt) == rendered
    assert prompt.block_hashes == block_hashes(prompt.token_ids, 16, "salt")
    assert prompt.block_hashes != BUILDER.render(plan, "other").block_hashes


def test_a2_two_questions_over_one_store_share_all_bytes_before_the_first_chunk() -> None:
    first = BUILDER.render(planner().plan(Transcript("Be kind.", (), "ferry?"), found(2), limits(None)))
    other = Candidates((candidate(30, 0.5),))
    second = BUILDER.render(planner().plan(Transcript("Be kind.", (), "dogs?"), other, limits(None)))
    assert text_of(first).partition("[k")[0] == text_of(second).partition("[k")[0]
    assert "Be kind." in text_of(first).partition("[k")[0]


def test_a4_shuffled_candidates_give_the_same_prompt() -> None:
    items = [candidate(place, 0.5) for place in range(6)]
    rng = random.Random(1)
    transcript = Transcript("", (), "What about the ferry?")
    plans = {
        planner(evidence_lines=2).plan(transcript, Candidates(tuple(rng.sample(items, 6))), limits(None))
        for _ in range(10)
    }
    assert len(plans) == 1


@pytest.mark.parametrize("order", ["relevance_last", "relevance_first", "label"])
def test_chunks_stand_in_the_order_that_is_set(order: ChunkOrder) -> None:
    plan = Planner(TOKENIZER, TEMPLATE, "", chunk_order=order, evidence_lines=0).plan(
        Transcript("", (), "q"), found(4), limits(None)
    )
    sort = {
        "relevance_last": lambda chunk: chunk.relevance,
        "relevance_first": lambda chunk: -chunk.relevance,
        "label": lambda chunk: chunk.label,
    }[order]
    assert list(plan.chunks) == sorted(plan.chunks, key=sort)


def test_only_the_top_k_most_relevant_are_taken() -> None:
    plan = planner().plan(Transcript("", (), "q"), found(9), limits(None, top_k=3))
    assert {chunk.file_id for chunk in plan.chunks} == {"file0", "file1", "file2"}
    assert plan.dropped == ()


def test_of_two_chunks_with_one_label_the_less_relevant_is_dropped_and_said() -> None:
    best, other = candidate(1, 0.9), candidate(2, 0.8)
    forged = replace(other.chunk, label=best.chunk.label)
    plan = planner().plan(Transcript("", (), "q"), Candidates((Candidate(forged, 0.8), best)), limits(None))
    assert [chunk.file_id for chunk in plan.chunks] == ["file1"]
    assert kinds(plan) == ["chunk"]
    assert "same label" in plan.dropped[0].reason


def test_a_chunk_that_would_not_be_sent_anyway_is_not_said_to_clash() -> None:
    best, next_best, other = candidate(1, 0.9), candidate(2, 0.8), candidate(3, 0.7)
    forged = replace(other.chunk, label=best.chunk.label)
    found_items = Candidates((best, next_best, Candidate(forged, 0.7)))
    assert kinds(planner().plan(Transcript("", (), "q"), found_items, limits(None, top_k=2))) == []
    assert kinds(planner().plan(Transcript("", (), "q"), found_items, limits(None, top_k=3))) == ["chunk"]


def test_the_same_chunk_from_two_files_stands_once() -> None:
    best = candidate(1, 0.9)
    twin = Candidate(replace(best.chunk, row_id=9, file_id="copy"), 0.8)
    plan = planner().plan(Transcript("", (), "q"), Candidates((twin, best)), limits(None))
    assert [chunk.file_id for chunk in plan.chunks] == ["file1"]


def test_a_kept_chunk_is_referred_to_and_a_stripped_one_is_sent_again() -> None:
    first = planner("kept").plan(Transcript("", (), "ferry?"), found(2), limits(None))
    transcript = Transcript("", turn_with(first), "and more?")
    kept = planner("kept").plan(transcript, found(3), limits(None))
    assert [chunk.file_id for chunk in kept.chunks] == ["file2"]
    assert {chunk.file_id for chunk in kept.references} == {"file0", "file1"}
    last = BUILDER.render(kept).messages[-1].content
    assert all(f"[{chunk.label}]" in last and chunk.rendered.text not in last for chunk in kept.references)
    stripped = planner().plan(transcript, found(3), limits(None))
    assert len(stripped.chunks) == 3
    assert stripped.references == ()
    assert BUILDER.render(stripped).messages[-3].content == "ferry?"


def test_a_kept_label_with_another_text_is_not_referred_to() -> None:
    first = planner("kept").plan(Transcript("", (), "ferry?"), found(1), limits(None))
    other = candidate(7, 0.9)
    forged = Candidate(replace(other.chunk, label=first.chunks[0].label), 0.9)
    plan = planner("kept").plan(Transcript("", turn_with(first), "more?"), Candidates((forged,)), limits(None))
    assert plan.chunks == plan.references == ()
    assert kinds(plan) == ["chunk"]


def test_a1_three_kept_turns_leave_the_earlier_bytes_as_they_were() -> None:
    past: tuple[PastMessage, ...] = ()
    before = ""
    for turn in range(3):
        candidates = Candidates((candidate(1, 0.9), candidate(10 + turn, 0.8)))
        plan = planner("kept", 2).plan(Transcript("Sys", past, f"ferry fact {turn}?"), candidates, limits(None))
        text = text_of(BUILDER.render(plan))
        assert text.startswith(before)
        before = text + "Yes."
        past = (*past, *turn_with(plan))


def test_b1_a_max_tokens_beyond_the_window_is_clamped_with_the_numbers() -> None:
    fixed = planner().tokens(planner().plan(Transcript("", (), ""), Candidates(()), limits(None)))
    question = "q" * (3_478 - fixed)
    plan = planner().plan(Transcript("", (), question), Candidates(()), limits(8_192, 5_120, 256))
    assert plan.max_tokens == 8_192 - 3_478
    assert [dropped.what for dropped in plan.dropped] == ["max_tokens"]
    assert all(number in plan.dropped[0].reason for number in ("3478", "5120", "8192", "4714"))


def test_b1_a_max_tokens_of_the_whole_window_does_not_cost_the_chunks() -> None:
    plan = planner().plan(Transcript("", conversation(2), "ferry?"), found(5), limits(2_000, 2_000))
    assert len(plan.chunks) == 5
    assert len(plan.past) == 4
    assert plan.max_tokens == 2_000 - planner().tokens(plan)


def test_a_max_tokens_that_fits_stays_and_one_not_given_stays_open() -> None:
    assert planner().plan(Transcript("", (), "q"), found(2), limits(2_000, 300)).max_tokens == 300
    assert planner().plan(Transcript("", (), "q"), found(2), limits(2_000)).max_tokens is None
    assert planner().plan(Transcript("", (), "q"), found(2), limits(None, 10**6)).max_tokens == 10**6


def test_b2_thirty_turns_in_a_small_window_keep_system_text_and_last_turns() -> None:
    transcript = Transcript("Always be kind.", conversation(30, 100), "And the ferry?")
    plan = planner(evidence_lines=2).plan(transcript, found(5, 200), limits(2_000))
    prompt = BUILDER.render(plan)
    assert prompt.tokens + 50 <= 2_000
    assert "Always be kind." in prompt.messages[0].content
    assert plan.past
    assert plan.past == transcript.past[-len(plan.past) :]
    assert plan.chunks
    assert "turn" in kinds(plan)


def test_b3_chunks_that_exceed_the_window_become_fewer_and_it_is_said() -> None:
    plan = planner().plan(Transcript("", (), "ferry?"), found(5, 400), limits(1_200))
    assert 0 < len(plan.chunks) < 5
    assert planner().tokens(plan) + 50 <= 1_200
    assert [dropped.name for dropped in plan.dropped] == [
        item.chunk.label for item in reversed(found(5, 400).items[len(plan.chunks) :])
    ]
    assert all("tokens do not fit" in dropped.reason and "1200" in dropped.reason for dropped in plan.dropped)


def test_things_leave_in_order_chunks_then_turns_then_max_tokens() -> None:
    transcript = Transcript("", conversation(12, 60), "ferry?")
    smallest = []
    for window in range(3_000, 200, -10):
        plan = planner().plan(transcript, found(5), limits(window, 200))
        chunks, turns = len(plan.chunks), len(plan.past) // 2
        if turns < 12:
            assert "chunk" in kinds(plan) or chunks == 5
        if plan.max_tokens != 200:
            assert turns == 0
        smallest.append((chunks, turns, plan.max_tokens))
    assert smallest[0] == (5, 12, 200)
    assert (1, 0) in [(chunks, turns) for chunks, turns, _ in smallest]
    assert smallest[-1][2] is not None
    assert smallest[-1][2] < 200


def test_turns_leave_in_steps_so_that_the_next_prompts_keep_their_front() -> None:
    past: tuple[PastMessage, ...] = ()
    fronts = []
    for turn in range(40):
        plan = planner().plan(Transcript("S", past, f"ferry {turn}?"), found(2, 100), limits(1_500))
        fronts.append(plan.past[0].content if plan.past else "")
        past = (*past, *turn_with(plan, "Yes, the ferry leaves. " * 2))
    breaks = sum(before != after for before, after in pairwise(fronts[1:]))
    assert 0 < breaks <= 40 / TURNS_PER_CUT


def test_references_die_with_the_turn_that_held_their_chunk() -> None:
    first = planner("kept").plan(Transcript("", (), "ferry?"), found(1, 400), limits(None))
    past: tuple[PastMessage, ...] = turn_with(first)
    for place in range(6):
        plan = planner("kept").plan(Transcript("", past, f"more {place}?"), found(1, 400), limits(None))
        past = (*past, *turn_with(plan, "y" * 60))
    assert past[-2].context is not None
    assert past[-2].context.references
    cut = planner("kept").plan(Transcript("", past, "again?"), found(1, 400), limits(1_100))
    assert 0 < len(cut.past) < len(past)
    assert [chunk.file_id for chunk in cut.chunks] == ["file0"]
    assert cut.references == ()
    assert all(message.context is None or not message.context.references for message in cut.past)


def test_only_a_question_that_cannot_fit_alone_is_refused_with_the_numbers() -> None:
    with pytest.raises(QuestionTooLong) as refusal:
        planner().plan(Transcript("Sys", conversation(3), "q" * 900), found(3), limits(800))
    assert refusal.value.question_tokens == 900
    assert refusal.value.window_tokens == 800
    plan = planner().plan(Transcript("Sys", conversation(3), "q" * 600), found(3, 400), limits(800))
    assert plan.chunks == ()
    assert plan.question == "q" * 600


def test_evidence_leaves_before_the_last_chunk_and_it_is_said() -> None:
    transcript = Transcript("", (), "What about the ferry?")
    seen = set()
    bare = planner().tokens(planner().plan(transcript, Candidates(()), limits(None)))
    for window in range(bare + 20, 600, 5):
        plan = planner(evidence_lines=1).plan(transcript, found(2, 80), limits(window, None, 20))
        assert planner().tokens(plan) + 20 <= window
        seen.add((len(plan.chunks), bool(plan.evidence)))
        if plan.chunks and not plan.evidence:
            assert "evidence" in kinds(plan)
    assert {(0, False), (1, False), (1, True), (2, True)} <= seen


@pytest.mark.parametrize("window", range(160, 1_600, 60))
def test_b6_what_remains_after_trimming_alternates_for_a_strict_template(window: int) -> None:
    strict = ChatTemplate(STRICT)
    transcript = Transcript("Sys", conversation(14), "ferry?")
    plan = planner(template=strict).plan(transcript, found(3), limits(window, None, 20))
    prompt = PromptBuilder(TOKENIZER, strict, INSTRUCTIONS, 16).render(plan)
    assert [message.role for message in prompt.messages] == ["user", "assistant"] * (len(plan.past) // 2) + ["user"]
    assert prompt.inexact_reason is None
    assert prompt.tokens == planner(template=strict).tokens(plan) <= window - 20
    assert prompt.messages[0].content.startswith(f"{INSTRUCTIONS}\n\nSys\n\n")


def test_a_refusing_template_gives_messages_without_ids_and_the_reason() -> None:
    strict = ChatTemplate(STRICT)
    past = (PastMessage("user", "one"), PastMessage("user", "two"))
    plan = planner(template=strict).plan(Transcript("", past, "three"), found(1), limits(None))
    prompt = PromptBuilder(TOKENIZER, strict, INSTRUCTIONS, 16).render(plan)
    assert prompt.token_ids is None
    assert prompt.block_hashes == ()
    assert "alternate" in (prompt.inexact_reason or "")
    assert prompt.tokens == planner(template=strict).tokens(plan)
    assert len(prompt.messages) == 3


@pytest.mark.parametrize("tokenizer", [TOKENIZER, EstimateTokenizer()])
def test_without_template_or_tokenizer_messages_go_and_the_reason_is_said(
    tokenizer: ByteTokenizer | EstimateTokenizer,
) -> None:
    plan = Planner(tokenizer, None, "").plan(Transcript("S", conversation(2), "q"), found(2), limits(4_000))
    prompt = PromptBuilder(tokenizer, None, "", 16).render(plan)
    assert prompt.token_ids is None
    assert "not known" in (prompt.inexact_reason or "")
    assert prompt.tokens > 0
    assert prompt.messages[-1].content.endswith("Question: q")


def test_the_pipeline_may_ask_for_messages_only() -> None:
    plan = planner().plan(Transcript("", (), "q"), found(1), limits(None))
    prompt = BUILDER.render(plan, exact=False, reason="The request has tools.")
    assert prompt.token_ids is None
    assert prompt.inexact_reason == "The request has tools."
    assert prompt.tokens == BUILDER.render(plan).tokens


def test_passed_through_messages_stand_unchanged_and_are_counted() -> None:
    messages = [Message("system", "S"), Message("user", "<S>hi<E>")]
    prompt = BUILDER.passthrough(messages)
    assert list(prompt.messages) == messages
    assert prompt.tokens == len("?system\nS??user\n<S>hi<E>??assistant\n")


def test_a_chunk_whose_ids_are_not_stored_is_tokenized_here() -> None:
    plan = planner().plan(Transcript("", (), "q"), found(1), limits(None))
    bare = replace(plan.chunks[0], rendered=replace(plan.chunks[0].rendered, token_ids=()))
    assert isinstance(bare, PromptChunk)
    assert BUILDER.render(replace(plan, chunks=(bare,))) == BUILDER.render(plan)
