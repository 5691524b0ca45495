"""`python -m bench.turns`: what five layouts of the same conversations cost on the real engine.

MTRAG's conversations, the same retrieved chunks in each arm: (i) chunks in the system message, all history;
(ii) chunks in the last user message, plain history; (iii) ours, past turns kept with their chunks; (iv) ours, past
turns stripped; (v) ours, the planner choosing by the engine's measured speed. The first two go to the engine as
messages, as any client sends them; ours as token ids, through the product's transcripts, planner, builder and engine
client. They do not pass the gateway's HTTP: the next turn must follow the data's reference answer, which no engine
gives. The time to plan and render ours counts in their TTFT.
A second table computes our arms for a large card, whose prices are others.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.answer import Answer
from bench.calibrated import measured_speed
from bench.datasets import ConversationTurn, mtrag, mtrag_conversations
from bench.real_engine import RealEngine, bench_main, real_engine
from bench.report import Options, Report
from bench.retrieved import Asked, as_stored, retrieve
from bench.turn_arms import Arm, AskedTurn, Ours, Sight, SystemChunks, UserChunks
from bench.turns_card import BLOCKS, MOST_OF_BEST, print_card
from cache.residency import Residency
from gateway.serving import Serving
from gateway.settings import Settings
from latency.model import CPU_135M
from latency.speed import SpeedEstimate
from prompt_builder.types import Limits, Message, RenderingChoice
from retrieval.types import Candidates

CHUNKS = 5
QUICK_CONVERSATIONS = 1
QUICK_TURNS = 3
QUICK_CHUNKS = 2
SEED = 20
PROGRESS_S = 15.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: what was predicted of it and what the engine said. Times in seconds, gateway's work included."""

    ttft_s: float
    predicted_tokens: int
    answer: Answer
    left_out: int


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
        ours = await _ours(engine)
        sight = await _sight(engine, options.quick)
        arms = await _arms(engine, ours, sight, top_k)
        stored = iter(as_stored((await engine.serving()).renderer, found))
        with_candidates = [[(turn, next(stored)) for turn in turns] for turns in conversations]
        sent = await _hold(engine, arms, sight, with_candidates)
    _print(report, arms, sent, top_k)
    await print_card(report, ours, with_candidates, Settings().min_answer_tokens, top_k)
    return report.finish(options)


async def _ours(engine: RealEngine) -> list[tuple[str, Serving]]:
    """Our arms: the two fixed renderings, then the one that the planner chooses."""
    renderings: tuple[tuple[str, RenderingChoice], ...] = (
        ("(iii) ours, kept", "kept"),
        ("(iv) ours, stripped", "stripped"),
        ("(v) ours, as the planner chooses", "auto"),
    )
    return [(name, await engine.serving(rendering=rendering)) for name, rendering in renderings]


async def _sight(engine: RealEngine, quick: bool) -> Sight:
    """A smoke run takes the speed that the packaged model is known for instead of measuring it."""
    speed = SpeedEstimate(CPU_135M, 1.1, 0.95, 0, "kept") if quick else await measured_speed(engine)
    return Sight(speed, Residency(engine.block_tokens, (engine.facts.num_blocks or BLOCKS) - 1))


async def _arms(engine: RealEngine, ours: Sequence[tuple[str, Serving]], sight: Sight, top_k: int) -> list[Arm]:
    settings = Settings()
    plain = await engine.serving()
    limits = Limits(engine.facts.max_model_len, 1, settings.min_answer_tokens, top_k)
    return [
        SystemChunks(plain, settings.instructions),
        UserChunks(plain, settings.instructions),
        *(Ours(name, serving, limits, sight) for name, serving in ours),
    ]


async def _hold(
    engine: RealEngine,
    arms: Sequence[Arm],
    sight: Sight,
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
                asked = AskedTurn(tuple(past), turn.user, candidates, turn.answer, salt)
                sent[arm].append(await _send(engine, arms[arm], sight, asked))
            past += [Message("user", turn.user), Message("assistant", turn.answer)]
            done += 1
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(f"  {done} of {total} turns in {len(arms)} arms, {said_s - began:.0f} s", flush=True)
    return sent


async def _send(engine: RealEngine, arm: Arm, sight: Sight, turn: AskedTurn) -> Sent:
    began = time.perf_counter()
    built = await arm.build(turn)
    own_s = time.perf_counter() - began
    answer = await engine.ask(built.prompt, max_tokens=1, salt=turn.salt, as_messages=built.as_messages)
    if not built.as_messages:
        sight.computed(built.prompt, turn.salt, answer.cached_tokens)
    # A client has its prompt ready; only ours is work that the gateway does on the way.
    ttft_s = answer.ttft_s if built.as_messages else answer.ttft_s + own_s
    return Sent(ttft_s, built.prompt.tokens, answer, built.left_out)


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
    report.at_most("median TTFT of (iv) / (i)", float(medians[3]), 1.0)
    report.at_most("TTFT of (iv) / (i), median of the same turns", float(paired[3]), 1.0)
    report.at_most("mean TTFT of (iv) / (i)", float(of_means[3]), 1.0)
    report.at_most("median TTFT of (v) / best fixed arm", float(medians[4] / medians[:4].min()), MOST_OF_BEST)
    exact = all(_exact(request) for requests in sent[2:] for request in requests)
    report.require("prompt tokens predicted = reported on every request of ours", exact)


def _exact(request: Sent) -> bool:
    return request.predicted_tokens == request.answer.prompt_tokens


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=0, metavar="N", help="the first N of 20")


if __name__ == "__main__":
    sys.exit(bench_main("turns", __doc__, run, _extend))
