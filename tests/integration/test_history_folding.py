"""Folding between a real replica and a simulated engine: what is asked, what is kept, what a failure leaves."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engine_sim import AnswerContext, Fault
from gateway.folding import FoldSettings
from gateway.idle_jobs import MOST_JOBS
from prompt_builder.layout import SUMMARY_MARK
from prompt_builder.types import PromptChunk, Transcript
from retrieval.types import RenderedChunk
from tests.support.chats import FILLER, INSTRUCTION_START, SUMMARY, SYSTEM, Chat, Chats, answer, chats_of, until

HIGH, LOW = 1000, 500
FOLD = FoldSettings("engine", HIGH, LOW)


def questions(count: int, start: int = 0) -> list[str]:
    return [f"Question {at}: my boat number {at} lies in berth {at * 7}." for at in range(start, start + count)]


async def talk(chat: Chat, count: int, start: int = 0) -> None:
    for text in questions(count, start):
        await chat.say(text)


async def until_folded(chat: Chat, chats: Chats, most: int = 40) -> int:
    """Turns until the first fold is in use."""
    before = chats.folder.counts.folded
    for at, text in enumerate(questions(most, len(chat.messages))):
        await chat.say(text)
        if chats.folder.counts.folded > before:
            return at + 1
    raise AssertionError("nothing was folded")


def contents(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


def summaries_asked(chats: Chats) -> list[Any]:
    return [r for r in chats.sim.generations if INSTRUCTION_START in r.body["messages"][-1]["content"]]


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


async def test_history_beyond_the_high_mark_is_folded_to_the_low_one(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD) as chats:
        chat = chats.chat()
        await until_folded(chat, chats)
        after = await chat.transcript()
        assert after.folded % 2 == 0
        assert 0 < after.folded < len(after.past)
        assert after.summary.startswith(SUMMARY)
        # What the engine's words leave out is there in the user's own.
        assert "berth 7" in after.summary
        turn = await chat.say("And now?")
        count = turn.serving.tokenizer.count
        tail = sum(count(message.content) + 5 for message in turn.plan.past[:-2])
        assert tail + count(after.summary) <= LOW * 1.1


async def test_the_summary_request_is_the_resident_conversation_plus_one_instruction(
    tmp_path: Path, model_dir: Path
) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD) as chats:
        chat = chats.chat()
        await until_folded(chat, chats)
        (asked,) = summaries_asked(chats)
        assert asked.body["temperature"] == 0
        assert asked.body["cache_salt"] == "5a17"
        assert asked.cached_tokens is not None
        uncached = len(asked.prompt_token_ids) - asked.cached_tokens
        instruction = len(chats.replicas.serving.tokenizer.encode(asked.body["messages"][-1]["content"]))
        assert uncached <= instruction + 16 + 10
        assert contents(asked.body["messages"])[:3] == contents(chat.messages)[:3] or asked.body["messages"][0][
            "content"
        ].endswith(SYSTEM)


async def test_the_next_turn_after_a_fold_finds_its_front_computed(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD) as chats:
        chat = chats.chat()
        await until_folded(chat, chats)
        question = "And what about the weather?"
        await chat.say(question, settle=False)
        sent = chats.sim.generations[-1]
        assert SUMMARY_MARK in sent.body["messages"][0]["content"]
        uncached = len(sent.prompt_token_ids) - (sent.cached_tokens or 0)
        assert uncached <= len(chats.replicas.serving.tokenizer.encode(question)) + 16 + 10


async def test_a7_a8_after_a_fold_the_system_text_and_the_retained_tail_stay_byte_for_byte(
    tmp_path: Path, model_dir: Path
) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD) as chats:
        chat = chats.chat()
        await until_folded(chat, chats)
        folded = (await chat.transcript()).folded
        tail = contents(chat.messages)[1 + folded :]
        system = set()
        for text in questions(2, 900):
            await chat.say(text)
            asked = [r for r in chats.sim.generations if r.body["messages"][-1]["content"] == text][-1]
            sent = contents(asked.body["messages"])
            assert sent[1 : 1 + len(tail)] == tail
            system.add(sent[0])
        assert len(system) == 1
        assert SYSTEM in system.pop().split(SUMMARY_MARK)[0]


@pytest.mark.parametrize("mode", ["engine", "extract"])
async def test_a5_in_200_turns_the_prefix_breaks_at_most_once_a_fold(
    tmp_path: Path, model_dir: Path, mode: Any
) -> None:
    async with chats_of(tmp_path, model_dir, fold=FoldSettings(mode, HIGH, LOW)) as chats:
        chat = chats.chat()
        breaks, last, growth = 0, list[int](), 0
        for text in questions(200):
            turn = await chat.say(text)
            ids = list(turn.prompt.token_ids or ())
            breaks += shared(last, ids) < len(last) - 10
            growth = max(growth, len(turn.serving.tokenizer.encode(text + FILLER)) + 10)
            last = ids
        turns_per_fold = (HIGH - LOW) // growth
        assert chats.folder.counts.folded >= 10
        assert breaks <= 200 / turns_per_fold
        assert breaks <= chats.folder.counts.folded
        assert len(last) < HIGH + 3 * growth


async def test_a6_a_title_request_extends_the_chat_and_changes_nothing_of_it(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD, answer=_title) as chats:
        chat = chats.chat()
        await talk(chat, 4)
        before, sent = await chat.transcript(), list(chats.sim.generations[-1].prompt_token_ids)
        assert chats.folder.counts.folded == 0
        for _ in range(3):
            await chat.ask("Give this chat a title of three to five words.")
            await chats.settled()
            asked = chats.sim.generations[-1]
            # All that the chat computed is used, and stays.
            assert asked.prompt_token_ids[: len(sent)] == sent
            assert asked.cached_tokens is not None
            assert asked.cached_tokens >= len(sent) - 16
        assert chats.folder.counts.folded == 0
        assert summaries_asked(chats) == []
        assert await chat.transcript() == before
        await chat.say("What next?")
        last = chats.sim.generations[-1]
        assert last.prompt_token_ids[: len(sent)] == sent
        assert (last.cached_tokens or 0) >= len(sent)


def _title(context: AnswerContext) -> str:
    return FILLER * 20 if "title" in context.question() else answer(context)


async def test_nobody_else_gets_the_fold_of_an_equal_conversation(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD) as chats:
        chat = chats.chat("ada")
        await until_folded(chat, chats)
        other = chats.chat("bob")
        other.messages = list(chat.messages)
        assert (await other.transcript()).folded == 0
        assert (await chat.transcript()).folded > 0


async def test_an_edit_within_the_folded_turns_gets_the_whole_history_back(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD) as chats:
        chat = chats.chat()
        await until_folded(chat, chats)
        chat.messages[1] = {"role": "user", "content": "Something else first."}
        turn, _ = await chat.ask("Go on.")
        assert turn.plan.summary == ""
        assert [message.content for message in turn.plan.past] == contents(chat.messages)[1:]


async def _failing(chats: Chats, chat: Chat, most: int = 40) -> Transcript:
    """Talks until a fold has failed."""
    for text in questions(most):
        await chat.say(text)
        if chats.folder.counts.failed:
            return await chat.transcript()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("said", ["", "...", "no " * 60])
async def test_a_summary_that_says_nothing_leaves_the_old_form_and_in_the_end_sentences_are_extracted(
    tmp_path: Path, model_dir: Path, said: str
) -> None:
    def source(context: AnswerContext) -> str:
        return said if INSTRUCTION_START in context.question() else FILLER

    async with chats_of(tmp_path, model_dir, fold=FOLD, answer=source) as chats:
        chat = chats.chat()
        assert (await _failing(chats, chat)).folded == 0
        await talk(chat, 1, 100)
        assert (chats.folder.counts.failed, chats.folder.counts.folded) == (2, 0)
        await talk(chat, 1, 200)
        assert (chats.folder.counts.failed, chats.folder.counts.folded) == (2, 1)
        lines = (await chat.transcript()).summary.splitlines()
        assert all(line.startswith(("User: ", "Assistant: ")) for line in lines)
        assert any("berth 7." in line for line in lines)
        assert len(summaries_asked(chats)) == 2


async def test_an_engine_that_refuses_the_prewarm_leaves_the_old_form(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FoldSettings("extract", HIGH, LOW)) as chats:
        chat = chats.chat()
        while True:
            # The answer to the user comes before: only what follows it in the background is struck.
            turn, said = await chat.ask(questions(1, len(chat.messages))[0])
            chats.sim.set_fault(Fault("status", after_chunks=None, status=500, probes=True))
            await chats.settled()
            chats.sim.clear_faults()
            chat.messages += [
                {"role": "user", "content": turn.transcript.question},
                {"role": "assistant", "content": said},
            ]
            if chats.folder.counts.failed:
                break
        assert (await chat.transcript()).folded == 0
        await chat.say("Go on.")
        assert (await chat.transcript()).folded > 0


async def test_off_folds_nothing(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FoldSettings("off", HIGH, LOW)) as chats:
        chat = chats.chat()
        await talk(chat, 16)
        assert (await chat.transcript()).folded == 0
        assert sum(request.body.get("cache_salt") == "5a17" for request in chats.sim.generations) == 16


async def test_extract_asks_the_engine_for_no_summary(tmp_path: Path, model_dir: Path) -> None:
    async with chats_of(tmp_path, model_dir, fold=FoldSettings("extract", HIGH, LOW)) as chats:
        chat = chats.chat()
        await until_folded(chat, chats)
        assert summaries_asked(chats) == []
        assert "berth 7" in (await chat.transcript()).summary


async def test_a_user_who_comes_ends_the_summary_at_once_and_a_later_answer_folds(
    tmp_path: Path, model_dir: Path
) -> None:
    def source(context: AnswerContext) -> str:
        return SUMMARY * 30 if INSTRUCTION_START in context.question() else FILLER

    async with chats_of(
        tmp_path, model_dir, fold=FOLD, answer=source, decode_tokens_per_s=30.0, time_scale=0.1
    ) as chats:
        chat = chats.chat()
        while not summaries_asked(chats):
            await chat.say(questions(1, len(chat.messages))[0], settle=False)
            await until(lambda: bool(summaries_asked(chats)) or not chats.folder.waiting)
        other = chats.chat("bob", "")
        began = asyncio.get_running_loop().time()
        await other.say("Hello?")
        assert chats.folder.counts.abandoned == 1
        (aborted,) = chats.sim.aborted
        assert INSTRUCTION_START in aborted.body["messages"][-1]["content"]
        assert aborted.aborted_s is not None
        assert aborted.aborted_s - began < 0.5
        assert (await chat.transcript()).folded == 0
        await chat.say("Go on.")
        assert (await chat.transcript()).folded > 0


async def test_a_finished_summary_is_not_asked_for_again_when_its_prewarm_is_interrupted(
    tmp_path: Path, model_dir: Path
) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD, time_scale=0.3) as chats:
        chat, other = chats.chat(), chats.chat("bob", "")
        await talk(chat, 7)
        while not chats.folder.counts.abandoned:
            await chat.say(questions(1, len(chat.messages))[0], settle=False)
            await until(lambda: not chats.folder.waiting or _prewarming(chats))
            if chats.folder.waiting:
                await other.say("Hello?")
        assert len(summaries_asked(chats)) == 1
        assert (await chat.transcript()).folded == 0
        await chat.say("Go on.")
        assert (await chat.transcript()).folded > 0
        assert len(summaries_asked(chats)) == 1


async def test_a_summary_from_an_interrupted_fold_goes_with_the_files_of_its_time(
    tmp_path: Path, model_dir: Path
) -> None:
    async with chats_of(tmp_path, model_dir, fold=FOLD, time_scale=0.3) as chats:
        chat, other = chats.chat(), chats.chat("bob", "")
        first = await chat.say(questions(1)[0])
        said = chat.messages[-1]["content"]
        rendered = RenderedChunk("k7f2a", "[k7f2a] Boats\nBerth 7 is free.\n\n", ())
        held = PromptChunk("k7f2a", "file-boats", "boats.md", "Boats", 0.5, "Berth 7 is free.", rendered)
        with_chunk = replace(first.plan, chunks=(held,))
        await chats.transcripts.record("t", chat.user, "sim-model", first.transcript, with_chunk, said)
        await talk(chat, 6, 1)
        while not chats.folder.counts.abandoned:
            await chat.say(questions(1, len(chat.messages))[0], settle=False)
            await until(lambda: not chats.folder.waiting or _prewarming(chats))
            if chats.folder.waiting:
                await other.say("Hello?")
        # The file is deleted: from now on the turn stands without what was taken from it.
        await chats.transcripts.record("t", chat.user, "sim-model", first.transcript, first.plan, said)
        await chat.say("Go on.")
        after = await chat.transcript()
        assert after.folded > 0
        assert len(summaries_asked(chats)) == 1
        assert after.summary_files == ("file-boats",)


def _prewarming(chats: Chats) -> bool:
    last = chats.sim.generations[-1]
    return bool(last.body["messages"][-1]["content"] == "." and not last.finished)


async def test_waiting_folds_are_bounded_and_end_with_the_folder(tmp_path: Path, model_dir: Path) -> None:
    async with (
        chats_of(tmp_path, model_dir, fold=FoldSettings("extract", 300, 100)) as chats,
        chats.replica.pacer.background(),
    ):
        for number in range(MOST_JOBS + 6):
            chat = chats.chat(f"user {number}")
            for text in questions(3):
                await chat.say(text, settle=False)
        assert chats.folder.waiting == MOST_JOBS
    # Leaving the block cancels and awaits what waits.
    assert chats.folder.waiting == 0
