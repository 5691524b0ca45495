"""`python -m bench.order_quality`: what each order of the chunks does to answers, and what it costs in tokens.

XQuAD English on the real engine, through a whole gateway: its paragraphs are the store, questions come in bursts by
article, five chunks each, greedy answers of at most 32 tokens. Each arm is a tenant of its own: none finds what
another left in the engine's cache, and each counts for itself. An arm asks one question at a time; the arms run
beside each other. Scores are paired: the same question, the same chunks, another order.
Small sums are rounded differently in other batches, so single answers may differ between runs.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.answer import share_found
from bench.datasets import Passage, Question, xquad
from bench.evidence import paired
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.real_engine import bench_main, real_engine
from bench.reply import read_reply
from bench.report import Cell, Options, Report
from gateway.tenants import key_digest

QUESTIONS, QUICK_QUESTIONS = 300, 20
BURST = 12
CHUNKS = 5
ANSWER_TOKENS = 32
SEED = 20
# A paragraph is one chunk: an order of halves would measure the cutting.
CHUNK_TOKENS = 1_024
PROGRESS_S = 15.0
# Five arms share two cores: a slow answer is not a failed one.
MOST_ANSWER_S = 600.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A tenant whose requests carry these wishes."""

    name: str
    chunk_order: str
    evidence_lines: int
    pin_last: int = 0

    def wishes(self) -> dict[str, Any]:
        return {
            "chunk_order": self.chunk_order,
            "evidence_lines": self.evidence_lines,
            "pin_last": self.pin_last,
            "top_k": CHUNKS,
        }


PLAIN = (Arm("relevance order", "relevance_first", 0), Arm("most relevant last", "relevance_last", 0))
OURS = Arm("ours, with evidence lines", "reuse", 1)
ARMS = (
    *PLAIN,
    Arm("ours, without evidence lines", "reuse", 0),
    OURS,
    Arm("ours, with evidence lines, pin_last 1", "reuse", 1, pin_last=1),
)


@dataclass(frozen=True, slots=True)
class Scored:
    score: float
    prompt_tokens: int
    cached_tokens: int
    labels: frozenset[str]


async def run(options: Options) -> int:
    report = Report("order_quality")
    data = xquad("en")
    count = options.extra.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS)
    questions = bursts(data.passages, data.questions, count)
    passages: Sequence[Passage] = data.passages
    if options.quick:
        articles = {data.passages[question.relevant[0]].title for question in questions}
        passages = [passage for passage in passages if passage.title in articles]
    async with real_engine(options.extra.engine_url) as engine:
        with tempfile.TemporaryDirectory() as folder:
            secret = f"{time.time_ns():x}"
            keys = ",".join(f"arm{at}:{key_digest(_key(at))}" for at in range(len(ARMS)))
            settings = settings_for(
                Path(folder), engine.url, api_keys=keys, salt_secret=secret, chunk_tokens=CHUNK_TOKENS
            )
            async with run_gateway(settings) as gateway:
                stores = [await _stored(gateway, passages, at) for at in range(len(ARMS))]
                model = engine.facts.model or ""
                scored = await asyncio.gather(
                    *(_asked(gateway, model, store, at, questions) for at, store in enumerate(stores))
                )
    _print(report, scored)
    return report.finish(options)


def bursts(passages: Sequence[Passage], questions: Sequence[Question], count: int) -> list[Question]:
    """`count` questions, at most BURST of an article one after the other; articles and questions drawn."""
    rng = random.Random(SEED)
    by_article: dict[str, list[Question]] = {}
    for question in questions:
        by_article.setdefault(passages[question.relevant[0]].title, []).append(question)
    articles = rng.sample(sorted(by_article), len(by_article))
    drawn = [rng.sample(by_article[article], min(BURST, len(by_article[article]))) for article in articles]
    return [question for burst in drawn for question in burst][:count]


async def _stored(gateway: RunningGateway, passages: Sequence[Passage], arm: int) -> str:
    texts = {f"{passage.id}.txt": f"{passage.title.replace('_', ' ')}\n\n{passage.text}" for passage in passages}
    async with gateway.client(_key(arm)) as client:
        store = await client.vector_stores.create(name="xquad")
        files = [
            await client.files.create(file=(name, text.encode()), purpose="assistants")
            for name, text in texts.items()
        ]
        batch = await client.vector_stores.file_batches.create_and_poll(
            vector_store_id=store.id, file_ids=[file.id for file in files], poll_interval_ms=200
        )
        if batch.file_counts.completed != len(files):
            raise RuntimeError(f"{batch.file_counts.completed} of {len(files)} files were ingested")
        return store.id


async def _asked(
    gateway: RunningGateway, model: str, store: str, arm: int, questions: Sequence[Question]
) -> list[Scored]:
    scored: list[Scored] = []
    began = said_s = time.monotonic()
    headers = {"authorization": f"Bearer {_key(arm)}"}
    timeout = aiohttp.ClientTimeout(MOST_ANSWER_S)
    async with aiohttp.ClientSession(gateway.url, headers=headers, timeout=timeout) as session:
        for question in questions:
            scored.append(await _ask(session, model, store, arm, question))
            if not arm and time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(
                    f"  {len(scored)} of {len(questions)} questions in {len(ARMS)} arms, {said_s - began:.0f} s",
                    flush=True,
                )
    return scored


async def _ask(session: aiohttp.ClientSession, model: str, store: str, arm: int, question: Question) -> Scored:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "headstart": {"vector_store_ids": [store], **ARMS[arm].wishes()},
    }
    reply = await read_reply(session, body)
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.error}")
    usage, plan = reply.body["usage"], reply.body["headstart"]["plan"]
    return Scored(
        share_found(question.answers, reply.text),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        frozenset(chunk["label"] for chunk in plan["chunks"]),
    )


def _print(report: Report, scored: Sequence[Sequence[Scored]]) -> None:
    scores = [[one.score for one in arm] for arm in scored]
    uncached = [float(np.mean([one.prompt_tokens - one.cached_tokens for one in arm])) for arm in scored]
    rows: list[list[Cell]] = []
    for at, (arm, answers) in enumerate(zip(ARMS, scored, strict=True)):
        differences = [
            "-" if at == plain else "{:+.3f} ± {:.3f}".format(*paired(scores[at], scores[plain]))
            for plain in range(len(PLAIN))
        ]
        cached, prompt = sum(one.cached_tokens for one in answers), sum(one.prompt_tokens for one in answers)
        rows.append(
            [
                arm.name,
                float(np.mean(scores[at])),
                *differences,
                prompt / len(answers),
                uncached[at],
                float(np.median([one.prompt_tokens - one.cached_tokens for one in answers])),
                100 * cached / prompt,
            ]
        )
    columns = (
        "arm",
        "answer words found",
        *(f"difference to {arm.name}" for arm in PLAIN),
        "prompt tokens",
        "uncached mean",
        "uncached p50",
        "cached %",
    )
    report.table(f"{len(scored[0])} questions in bursts by article, {CHUNKS} chunks each", columns, rows)
    ours = ARMS.index(OURS)
    for plain, arm in enumerate(PLAIN):
        report.at_least(
            f"answer words, ours / {arm.name}",
            float(np.mean(scores[ours])) / max(float(np.mean(scores[plain])), 1e-9),
            1.0,
        )
        report.at_most(f"uncached tokens, ours / {arm.name}", uncached[ours] / uncached[plain], 1.0)
    same = all(len({one.labels for one in row}) == 1 for row in zip(*scored, strict=True))
    report.require("the same chunks in every arm", same)


def _key(arm: int) -> str:
    return f"hs-order-quality-{arm}"


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=0, metavar="N", help=f"ask N (default {QUESTIONS})")


if __name__ == "__main__":
    sys.exit(bench_main("order_quality", __doc__, run, _extend))
