"""`python -m bench.evidence`: do evidence lines help the model find the answer? XQuAD English on the real engine.

Every arm answers the same questions from the same chunks, greedily; only the order of the chunks and the evidence
lines differ. The score is the share of the gold answer's words that the answer holds. Arms whose prompts are the same
bytes are asked once. Small sums are rounded differently in other batches, so single answers may differ between runs.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.answer import Answer, share_found
from bench.datasets import Question, xquad
from bench.real_engine import RealEngine, bench_main, real_engine
from bench.report import Options, Report
from bench.retrieved import Asked, retrieve
from gateway.serving import Serving
from gateway.turns import rendered_by
from prompt_builder.types import Limits, Prompt, Transcript
from retrieval.types import Candidates

QUESTIONS = 150
QUICK_QUESTIONS = 4
CHUNKS = 5
ANSWER_TOKENS = 48
SEED = 20
PROGRESS_S = 15.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A name and the settings that differ from those of the product."""

    name: str
    changed: tuple[tuple[str, Any], ...]


PLAIN_ARMS = (
    Arm("relevance order", (("chunk_order", "relevance_first"), ("evidence_lines", 0))),
    Arm("most relevant last", (("chunk_order", "relevance_last"), ("evidence_lines", 0))),
    Arm("product's layout without evidence lines", (("evidence_lines", 0),)),
)
WITH_EVIDENCE = Arm("product's layout with evidence lines", ())
ARMS = (*PLAIN_ARMS, WITH_EVIDENCE)


@dataclass(frozen=True, slots=True)
class Scored:
    """One arm: per question, the score, the answer, and whether a gold answer stands in the prompt."""

    scores: tuple[float, ...]
    answers: tuple[Answer, ...]
    in_prompt: tuple[bool, ...]


async def run(options: Options) -> int:
    report = Report("evidence")
    data = xquad("en")
    count = options.extra.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS)
    questions = random.Random(SEED).sample(data.questions, count)
    found = await retrieve(data.passages, [Asked(question.text) for question in questions], CHUNKS)
    async with real_engine(options.extra.engine_url) as engine:
        scored = await score_arms(engine, ARMS, questions, found, options.extra.concurrency)
    print_arms(report, ARMS, scored)
    plain = {arm.name: float(np.mean(one.scores)) for arm, one in zip(ARMS[:-1], scored, strict=False)}
    report.at_least("answer words found with evidence lines", float(np.mean(scored[-1].scores)), max(plain.values()))
    return report.finish(options)


async def score_arms(
    engine: RealEngine,
    arms: Sequence[Arm],
    questions: Sequence[Question],
    found: Sequence[Candidates],
    concurrency: int,
) -> list[Scored]:
    """All arms, question by question, so that noise and the prefix cache treat them alike."""
    servings = [await engine.serving(**dict(arm.changed)) for arm in arms]
    turn = asyncio.Semaphore(concurrency)
    salt = f"{SEED:x}"

    async def ask(prompt: Prompt) -> Answer:
        async with turn:
            return await engine.ask(prompt, max_tokens=ANSWER_TOKENS, salt=salt)

    rows: list[list[tuple[float, Answer, bool]]] = [[] for _ in arms]
    began = said_s = time.monotonic()
    step = max(1, concurrency // 2)
    for start in range(0, len(questions), step):
        part = range(start, min(start + step, len(questions)))
        prompts = [[rendered(serving, questions[at], found[at]) for serving in servings] for at in part]
        distinct = list({prompt.token_ids: prompt for row in prompts for prompt in row}.values())
        answers = await asyncio.gather(*(ask(prompt) for prompt in distinct))
        by_ids = {prompt.token_ids: answer for prompt, answer in zip(distinct, answers, strict=True)}
        for at, row in zip(part, prompts, strict=True):
            for arm, prompt in enumerate(row):
                answer = by_ids[prompt.token_ids]
                golds = questions[at].answers
                holds = any(gold in prompt.messages[-1].content for gold in golds)
                rows[arm].append((share_found(golds, answer.text), answer, holds))
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print(f"  {part.stop} of {len(questions)} questions, {said_s - began:.0f} s", flush=True)
    return [Scored(*(tuple(column) for column in zip(*row, strict=True))) for row in rows]


def rendered(serving: Serving, question: Question, candidates: Candidates) -> Prompt:
    """The prompt that the gateway would send for a question that begins a conversation."""
    limits = Limits(serving.facts.max_model_len, ANSWER_TOKENS, ANSWER_TOKENS, CHUNKS)
    transcript = Transcript(system="", past=(), question=question.text)
    plan = serving.planner.plan(transcript, rendered_by(serving.renderer, candidates), limits)
    return serving.builder.render(plan)


def print_arms(report: Report, arms: Sequence[Arm], scored: Sequence[Scored]) -> None:
    means = [float(np.mean(one.scores)) for one in scored]
    plain = [at for at, arm in enumerate(arms) if arm in PLAIN_ARMS] or [0]
    best = max(plain, key=lambda at: means[at])
    rows = []
    for at, (arm, one) in enumerate(zip(arms, scored, strict=True)):
        difference, error = paired(one.scores, scored[best].scores)
        rows.append(
            (
                arm.name,
                means[at],
                "the best plain arm" if at == best else f"{difference:+.3f} ± {error:.3f}",
                float(np.mean([score >= 1 for score in one.scores])),
                float(np.mean(one.in_prompt)),
                float(np.median([answer.prompt_tokens for answer in one.answers])),
            )
        )
    columns = (
        "arm",
        "answer words found",
        "difference to the best plain arm",
        "whole answer found",
        "answer in the prompt",
        "prompt tokens",
    )
    report.table(f"{len(scored[0].scores)} questions, {CHUNKS} chunks each, greedy answers", columns, rows)


def paired(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences and its standard error."""
    differences = np.array(scores) - np.array(others)
    if len(differences) < 2:
        return float(differences.mean()), 0.0
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=0, metavar="N", help=f"ask N (default {QUESTIONS})")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="answers at once (default 8)")


if __name__ == "__main__":
    sys.exit(bench_main("evidence", __doc__, run, _extend))
