"""`python -m bench.turns`: what four layouts of the same conversations cost on the real engine.

MTRAG's conversations, the same retrieved chunks in each arm: (i) chunks in the system message, all history;
(ii) chunks in the last user message, plain history; (iii) ours, past turns kept with their chunks; (iv) ours, past
turns stripped. The first two go to the engine as messages, as any client sends them; ours as token ids, through the
product's transcripts, planner, builder and engine client. They do not pass the gateway's HTTP: the next turn must
follow the data's reference answer, which no engine gives. The time to plan and render ours counts in their TTFT.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bench.answer import Answer
from bench.datasets import ConversationTurn, mtrag, mtrag_conversations
from bench.real_engine import RealEngine, bench_main, real_engine
from bench.report import Options, Report
from bench.retrieved import Asked, as_stored, retrieve
from cache.memory import MemoryStore
from gateway.serving import Serving
from gateway.settings import Settings
from prompt_builder.labels import QUESTION_MARK
from prompt_builder.layout import system_text
from prompt_builder.transcripts import Transcripts
from prompt_builder.types import Limits, Message, Prompt, Rendering, Transcript
from retrieval.types import Candidates

CHUNKS = 5
QUICK_CONVERSATIONS = 1
QUICK_TURNS = 3
QUICK_CHUNKS = 2
SEED = 20
TENANT = "bench"
PROGRESS_S = 15.0


@dataclass(frozen=True, slots=True)
class Built:
    """A prompt ready to send. `left_out` counts the past turns and chunks that its window had no room for."""

    prompt: Prompt
    as_messages: bool
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: what was predicted of it and what the engine said. Times in seconds, gateway's work included."""

    ttft_s: float
    predicted_tokens: int
    answer: Answer
    left_out: int


class Arm(Protocol):
    @property
    def name(self) -> str: ...

    async def build(self, past: Sequence[Message], question: str, candidates: Candidates, answer: str) -> Built:
        """The prompt of a turn. `answer` is the reference that will follow it in the history."""


class SystemChunks:
    """(i): the chunks, most relevant first, behind the instructions in the system message."""

    name = "(i) chunks in the system message"

    def __init__(self, serving: Serving, instructions: str) -> None:
        self._serving = serving
        self._instructions = instructions

    async def build(self, past: Sequence[Message], question: str, candidates: Candidates, answer: str) -> Built:
        system = system_text(self._instructions, _blocks(candidates).rstrip())
        return _plain(self._serving, [Message("system", system), *past, Message("user", question)])


class UserChunks:
    """(ii): the chunks, most relevant first, before the question; the history holds none."""

    name = "(ii) chunks in the last user message"

    def __init__(self, serving: Serving, instructions: str) -> None:
        self._serving = serving
        self._instructions = instructions

    async def build(self, past: Sequence[Message], question: str, candidates: Candidates, answer: str) -> Built:
        asked = f"{_blocks(candidates)}{QUESTION_MARK} {question}"
        return _plain(self._serving, [Message("system", self._instructions), *past, Message("user", asked)])


class Ours:
    """(iii) and (iv): the product's prompt, its transcripts found again in the history that is sent again."""

    def __init__(self, name: str, serving: Serving, min_answer_tokens: int, top_k: int) -> None:
        self.name = name
        self._serving = serving
        self._transcripts = Transcripts(MemoryStore(2**28), ttl_s=86_400.0)
        self._limits = Limits(serving.facts.max_model_len, 1, min_answer_tokens, top_k)

    async def build(self, past: Sequence[Message], question: str, candidates: Candidates, answer: str) -> Built:
        model = str(self._serving.facts.model)
        stated = [*past, Message("user", question)]
        transcript: Transcript = await self._transcripts.resume(TENANT, None, model, stated)
        plan = self._serving.planner.plan(transcript, candidates, self._limits)
        prompt = self._serving.builder.render(plan)
        await self._transcripts.record(TENANT, None, model, transcript, plan, answer)
        left_out = sum(item.what in ("turn", "chunk") for item in plan.dropped)
        return Built(prompt, as_messages=False, left_out=left_out)


async def run(options: Options) -> int:
    report = Report("turns")
    data = mtrag()
    conversations = mtrag_conversations()
    if options.quick:
        conversations = tuple(turns[:QUICK_TURNS] for turns in conversations[:QUICK_CONVERSATIONS])
    if options.extra.conversations:
        conversations = conversations[: options.extra.conversations]
    asked = [
        Asked(turn.user, turns[at - 1].user if at else None)
        for turns in conversations
        for at, turn in enumerate(turns)
    ]
    top_k = QUICK_CHUNKS if options.quick else CHUNKS
    found = await retrieve(data.passages, asked, top_k)
    async with real_engine(options.extra.engine_url) as engine:
        arms = await _arms(engine, top_k)
        stored = iter(as_stored((await engine.serving()).renderer, found))
        with_candidates = [[(turn, next(stored)) for turn in turns] for turns in conversations]
        sent = await _hold(engine, arms, with_candidates)
    _print(report, arms, sent, top_k)
    return report.finish(options)


async def _arms(engine: RealEngine, top_k: int) -> list[Arm]:
    settings = Settings()
    plain = await engine.serving()
    ours: list[Arm] = []
    renderings: tuple[tuple[str, Rendering], ...] = (
        ("(iii) ours, kept", "kept"),
        ("(iv) ours, stripped", "stripped"),
    )
    for name, rendering in renderings:
        serving = await engine.serving(rendering=rendering)
        ours.append(Ours(name, serving, settings.min_answer_tokens, top_k))
    return [SystemChunks(plain, settings.instructions), UserChunks(plain, settings.instructions), *ours]


async def _hold(
    engine: RealEngine,
    arms: Sequence[Arm],
    conversations: Sequence[Sequence[tuple[ConversationTurn, Candidates]]],
) -> list[list[Sent]]:
    """Every turn in all arms one after the other, in an order drawn anew, so that noise hits all alike.

    Each arm of each conversation has a salt of its own: none finds what another left in the engine's cache.
    """
    rng = random.Random(SEED)
    run_id = f"{time.time_ns():x}"
    sent: list[list[Sent]] = [[] for _ in arms]
    began = said_s = time.monotonic()
    total = sum(len(turns) for turns in conversations)
    done = 0
    for number, turns in enumerate(conversations):
        past: list[Message] = []
        for turn, candidates in turns:
            for arm in rng.sample(range(len(arms)), len(arms)):
                salt = f"{run_id}{number:04x}{arm:x}"
                sent[arm].append(await _send(engine, arms[arm], past, turn, candidates, salt))
            past += [Message("user", turn.user), Message("assistant", turn.answer)]
            done += 1
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(f"  {done} of {total} turns in {len(arms)} arms, {said_s - began:.0f} s", flush=True)
    return sent


async def _send(
    engine: RealEngine,
    arm: Arm,
    past: Sequence[Message],
    turn: ConversationTurn,
    candidates: Candidates,
    salt: str,
) -> Sent:
    began = time.perf_counter()
    built = await arm.build(past, turn.user, candidates, turn.answer)
    own_s = time.perf_counter() - began
    answer = await engine.ask(built.prompt, max_tokens=1, salt=salt, as_messages=built.as_messages)
    # A client has its prompt ready; only ours is work that the gateway does on the way.
    ttft_s = answer.ttft_s if built.as_messages else answer.ttft_s + own_s
    return Sent(ttft_s, built.prompt.tokens, answer, built.left_out)


def _blocks(candidates: Candidates) -> str:
    """The chunks' blocks as ours renders them, most relevant first."""
    return "".join(item.chunk.rendered.text for item in candidates.items)


def _plain(serving: Serving, messages: Sequence[Message]) -> Built:
    return Built(serving.builder.passthrough(messages), as_messages=True)


def _print(report: Report, arms: Sequence[Arm], sent: Sequence[Sequence[Sent]], top_k: int) -> None:
    """Beside the medians their pairs: the same turn in two arms, sent within seconds of each other."""
    ttft_s = np.array([[request.ttft_s for request in requests] for requests in sent])
    paired = np.median(ttft_s / ttft_s[0], axis=1)
    of_means = ttft_s.mean(axis=1) / ttft_s[0].mean()
    rows = []
    for at, (arm, requests) in enumerate(zip(arms, sent, strict=True)):
        prompt = np.array([request.answer.prompt_tokens for request in requests])
        uncached = np.array([request.answer.uncached_tokens for request in requests])
        rows.append(
            (
                arm.name,
                float(np.median(ttft_s[at])) * 1000,
                float(np.percentile(ttft_s[at], 95)) * 1000,
                float(np.mean(ttft_s[at])) * 1000,
                float(paired[at]),
                float(of_means[at]),
                float(np.median(prompt)),
                float(np.median(uncached)),
                float(np.mean(uncached)),
                float(1 - uncached.sum() / prompt.sum()),
                float(np.mean([_exact(request) for request in requests])),
                sum(request.left_out > 0 for request in requests),
            )
        )
    columns = (
        "arm",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "TTFT mean ms",
        "paired / (i) p50",
        "mean / (i)",
        "prompt tokens p50",
        "uncached p50",
        "uncached mean",
        "cached share",
        "predicted = reported",
        "cut to the window",
    )
    report.table(f"{len(sent[0])} turns, {top_k} chunks each, answers of one token", columns, rows)
    medians = np.median(ttft_s, axis=1) / np.median(ttft_s[0])
    report.at_most("median TTFT of (iv) / (i)", float(medians[-1]), 1.0)
    report.at_most("TTFT of (iv) / (i), median of the same turns", float(paired[-1]), 1.0)
    report.at_most("mean TTFT of (iv) / (i)", float(of_means[-1]), 1.0)
    exact = all(_exact(request) for requests in sent[2:] for request in requests)
    report.require("prompt tokens predicted = reported on every request of ours", exact)


def _exact(request: Sent) -> bool:
    return request.predicted_tokens == request.answer.prompt_tokens


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=0, metavar="N", help="the first N of 20")


if __name__ == "__main__":
    sys.exit(bench_main("turns", __doc__, run, _extend))
