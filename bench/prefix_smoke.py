"""`python -m bench.prefix_smoke`: a question asked first, and asked again in a new conversation, through the gateway.

The handbook of `examples/` is ingested over HTTP into a gateway of its own, whose salt is new: the engine holds
nothing of it. Asked again, all whole blocks of the prompt are in the engine's prefix cache.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from rich.console import Console

from bench.answer import share_found
from bench.processes import headstart_server
from bench.real_engine import EngineUnusable, bench_main, real_engine
from bench.report import Options, Report
from gateway.cli.client import GatewayClient
from gateway.cli.files import find_documents
from gateway.cli.ingest import ingest_documents

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = 40
QUICK_QUESTIONS = 3
QUICK_ANSWER_TOKENS = 8
ANSWER_TOKENS = 64
SEED = 20
STORE = "handbook"
PROGRESS_S = 15.0


@dataclass(frozen=True, slots=True)
class HandbookQuestion:
    """`document` is the name of the file that answers; `answer` its words."""

    text: str
    document: str
    answer: str
    language: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer. Times in milliseconds; `client_ms` is the time to the first token as the client saw it."""

    text: str
    ttft_ms: float
    client_ms: float
    prompt_tokens: int
    uncached_tokens: int
    cited: frozenset[str]
    named: bool


def handbook_questions() -> list[HandbookQuestion]:
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    return [
        HandbookQuestion(entry["question"], entry["document"], entry["answer"], entry["language"])
        for entry in map(json.loads, lines)
    ]


async def run(options: Options) -> int:
    report = Report("prefix_smoke")
    count = options.extra.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS)
    questions = random.Random(SEED).sample(handbook_questions(), count)
    documents = find_documents([EXAMPLES / STORE])
    if options.quick:
        wanted = {question.document for question in questions}
        documents = [document for document in documents if document.path.name in wanted]
    answer_tokens = QUICK_ANSWER_TOKENS if options.quick else ANSWER_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        async with real_engine(options.extra.engine_url) as engine:
            settings = {"HEADSTART_ENGINE_URL": engine.url, "HEADSTART_DATA_DIR": folder}
            async with headstart_server(settings) as server, GatewayClient(server.url) as client:
                began = time.monotonic()
                outcomes = await ingest_documents(client, STORE, documents, Console())
                failed = [outcome.document.name for outcome in outcomes if outcome.result == "failed"]
                report.note(
                    f"{len(outcomes) - len(failed)} documents ingested in {time.monotonic() - began:.1f} s"
                    + (f"; failed: {', '.join(failed)}" if failed else "")
                )
                pairs = await _ask_all(client, f"{engine.facts.model}@{STORE}", questions, answer_tokens)
            block_tokens = engine.block_tokens
    first, again = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    _print_times(report, first, again)
    _print_answers(report, questions, first)
    report.at_most("most uncached tokens, asked again", max(one.uncached_tokens for one in again), block_tokens)
    return report.finish(options)


async def _ask_all(
    client: GatewayClient, model: str, questions: Sequence[HandbookQuestion], answer_tokens: int
) -> list[tuple[Outcome, Outcome]]:
    """Each question, then the same again in a new conversation, one request at a time."""
    pairs = []
    began = said_s = time.monotonic()
    for number, question in enumerate(questions):
        first = await _ask(client, model, question, f"first-{number}", answer_tokens)
        again = await _ask(client, model, question, f"again-{number}", answer_tokens)
        pairs.append((first, again))
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print(f"  {len(pairs)} of {len(questions)} questions asked twice, {said_s - began:.0f} s", flush=True)
    return pairs


async def _ask(
    client: GatewayClient, model: str, question: HandbookQuestion, conversation: str, answer_tokens: int
) -> Outcome:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": answer_tokens,
        "temperature": 0,
        "headstart": {"conversation": conversation},
    }
    texts: list[str] = []
    extension: Mapping[str, Any] = {}
    began = time.perf_counter()
    client_ms = None
    async for delta in client.chat(body):
        if client_ms is None:
            client_ms = (time.perf_counter() - began) * 1000
        texts.append(delta.text)
        extension = delta.extension or extension
    timings = extension.get("timings") or {}
    if client_ms is None or timings.get("uncached_tokens") is None:
        raise EngineUnusable("The gateway's answer does not tell how many tokens were cached.")
    citations = extension["citations"]
    return Outcome(
        text="".join(texts),
        ttft_ms=timings["ttft_ms"],
        client_ms=client_ms,
        prompt_tokens=timings["prompt_tokens"],
        uncached_tokens=timings["uncached_tokens"],
        cited=frozenset(PurePosixPath(citation["filename"]).name for citation in citations),
        named=any(citation["named"] for citation in citations),
    )


def _print_times(report: Report, first: Sequence[Outcome], again: Sequence[Outcome]) -> None:
    rows = []
    medians = []
    for name, outcomes in (("asked first", first), ("asked again", again)):
        ttft_ms = [one.ttft_ms for one in outcomes]
        medians.append(float(np.median(ttft_ms)))
        prompt = sum(one.prompt_tokens for one in outcomes)
        rows.append(
            (
                name,
                medians[-1],
                float(np.percentile(ttft_ms, 95)),
                float(np.median([one.client_ms for one in outcomes])),
                float(np.median([one.prompt_tokens for one in outcomes])),
                float(np.median([one.uncached_tokens for one in outcomes])),
                max(one.uncached_tokens for one in outcomes),
                1 - sum(one.uncached_tokens for one in outcomes) / prompt,
            )
        )
    columns = (
        "arm",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "client's TTFT p50 ms",
        "prompt tokens p50",
        "uncached p50",
        "uncached max",
        "cached share",
    )
    report.table(f"{len(first)} questions through the gateway", columns, rows)
    report.note(f"Asked again, the first token comes {medians[0] / medians[1]:.1f} times sooner (median).")


def _print_answers(report: Report, questions: Sequence[HandbookQuestion], outcomes: Sequence[Outcome]) -> None:
    rows = []
    languages = sorted({question.language for question in questions})
    for language in (*languages, "all"):
        some = [
            (question, outcome)
            for question, outcome in zip(questions, outcomes, strict=True)
            if language in (question.language, "all")
        ]
        found = [share_found([question.answer], outcome.text) for question, outcome in some]
        rows.append(
            (
                language,
                len(some),
                float(np.mean([question.document in outcome.cited for question, outcome in some])),
                float(np.mean(found)),
                float(np.mean([share >= 1 for share in found])),
                float(np.mean([outcome.named for _, outcome in some])),
            )
        )
    columns = (
        "language",
        "questions",
        "document among the citations",
        "answer words found",
        "whole answer found",
        "names a passage",
    )
    report.table("Answers when asked first", columns, rows)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=0, metavar="N", help=f"ask N (default {QUESTIONS})")


if __name__ == "__main__":
    sys.exit(bench_main("prefix_smoke", __doc__, run, _extend))
