"""`python -m bench.plan`: what a plan takes, in milliseconds of processor time, without an engine.

MTRAG's passages as 20 candidates, conversations of 40 turns, the packaged model's tokenizer; with and without a
budget, past turns stripped or as the fitted model says. Every plan is of a new question in a conversation that grew
by a turn, as the gateway meets it: the turns before are known, the last one and the question are not. Chunks that no
plan has met yet are cut into sentences first: that has rows of its own, and so have young conversations: their
budgets hold, so that what fills them is looked for among all forms of all chunks.

With several replicas the conversation's prompts go where the plan says; other conversations with the same chunks go
to all of them in turn.
"""

import asyncio
import gc
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.datasets import mtrag
from bench.report import Cell, Options, Report, bench_command
from bench.retrieved import Asked, as_stored, retrieve
from cache.prompt_tree import PromptTree
from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.cli.serve import settle_memory
from gateway.engine.prepare import MODEL_NAME
from gateway.serving import Serving, make_serving
from gateway.settings import Settings
from latency.model import CPU_135M
from latency.speed import SpeedEstimate
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.transcripts import context_of
from prompt_builder.types import Limits, PastMessage, Plan, Prompt, Transcript
from retrieval.types import Candidates

CANDIDATES = 20
TURNS, FEW_TURNS = 40, 4
TOP_K = 5
BLOCK_TOKENS, BLOCKS = 32, 1455
WINDOW_TOKENS = 8192
QUESTIONS = 100
QUICK_QUESTIONS = 20
BUDGETS_S = (None, 0.3, 0.75, 1.5, 3.0)
MOST_P95_MS = {1: 2.0, 8: 3.0, 32: 5.0}
"""By the number of replicas."""

SEED = 3
SALT = "bench"


@dataclass(frozen=True, slots=True)
class Case:
    rendering: str
    budget_s: float | None
    replicas: int = 1
    turns: int = TURNS

    @property
    def name(self) -> str:
        budget = "no budget" if self.budget_s is None else f"budget {self.budget_s:g} s"
        turns = "" if self.turns == TURNS else f", {self.turns} turns before"
        return f"{self.replicas} replica{'s' if self.replicas > 1 else ''}, {self.rendering}, {budget}{turns}"


async def run(options: Options) -> int:
    report = Report("plan")
    data = mtrag()
    questions = data.questions[: QUICK_QUESTIONS if options.quick else QUESTIONS]
    found = await retrieve(data.passages, [Asked(question.text) for question in questions], CANDIDATES)
    rows: list[list[Cell]] = []
    worst_ms = dict.fromkeys(MOST_P95_MS, 0.0)
    for rendering in ("stripped", "auto"):
        settings = Settings(tokenizer=MODEL_NAME, rendering=rendering)
        serving = await asyncio.to_thread(make_serving, settings, EngineFacts(reachable=False))
        if not serving.tokenizer.exact:
            raise SystemExit("The packaged model is not prepared: run 'headstart engine' or 'make demo' once.")
        candidates = as_stored(serving.renderer, found)
        texts = [question.text for question in questions]
        # As `headstart serve` does when it has started.
        settle_memory()
        cold = Case(rendering, BUDGETS_S[-1])
        rows.append(_row(f"{cold.name}, chunks met for the first time", *_measure(serving, cold, texts, candidates)))
        young = Case(rendering, BUDGETS_S[-1], turns=FEW_TURNS)
        rows.append(_row(young.name, *_measure(serving, young, texts, candidates)))
        for replicas, budget_s in itertools.product(MOST_P95_MS, BUDGETS_S):
            case = Case(rendering, budget_s, replicas)
            taken_ms, tokens = _measure(serving, case, texts, candidates)
            worst_ms[replicas] = max(worst_ms[replicas], float(np.percentile(taken_ms, 95)))
            rows.append(_row(case.name, taken_ms, tokens))
    report.table(
        f"{CANDIDATES} candidates, {TURNS} turns before, {len(questions)} questions: processor time of a plan",
        ("case", "p50 ms", "p95 ms", "longest ms", "prompt tokens p50"),
        rows,
    )
    gc.unfreeze()
    for replicas, most_ms in MOST_P95_MS.items():
        report.at_most(f"p95 ms of the slowest case, replicas: {replicas}", worst_ms[replicas], most_ms)
    return report.finish(options)


def _row(name: str, taken_ms: Sequence[float], tokens: Sequence[int]) -> list[Cell]:
    p95_ms = float(np.percentile(taken_ms, 95))
    return [name, float(np.median(taken_ms)), p95_ms, max(taken_ms), float(np.median(tokens))]


def _measure(
    serving: Serving, case: Case, questions: Sequence[str], candidates: Sequence[Candidates]
) -> tuple[list[float], list[int]]:
    """Milliseconds of each plan; prompt tokens of each. The first plans warm up what a gateway has warm."""
    holdings = {f"replica {number}": Residency(BLOCK_TOKENS, BLOCKS) for number in range(case.replicas)}
    speed = SpeedEstimate(CPU_135M, factor=1.1, quantile=0.95, samples=100, source="learned")
    limits = Limits(WINDOW_TOKENS, 256, 256, TOP_K)
    rng = random.Random(SEED)
    past = _conversation(rng, candidates, case.turns)
    taken_ms: list[float] = []
    tokens: list[int] = []
    stripped = 0
    last = next(iter(holdings))
    elsewhere = itertools.cycle(holdings)
    for number, (text, wanted) in enumerate(zip(questions, candidates, strict=True)):
        # No other case has met this question.
        question = f"{text} ({case.replicas}, {case.budget_s}, {case.turns})"
        transcript = Transcript("Answer briefly.", tuple(past), question, known=len(past), stripped=stripped)
        tree = PromptTree(BLOCK_TOKENS, SALT)
        outlooks = [
            Outlook(name, speed, lambda seconds: 0.0, holdings[name].prefix(SALT, tree))
            for name in (last, *(name for name in holdings if name != last))
        ]
        began_s = time.thread_time()
        plan = serving.planner.plan(transcript, wanted, limits, outlooks, Clock(case.budget_s, 0.02))
        took_ms = (time.thread_time() - began_s) * 1000
        prompt = serving.builder.render(plan, SALT)
        last = plan.forecast.replica if plan.forecast is not None else last
        _sent(holdings[last], prompt)
        if case.replicas > 1:
            other = serving.planner.plan(Transcript("Answer briefly.", (), text), wanted, limits)
            for _ in range(2):
                _sent(holdings[next(elsewhere)], serving.builder.render(other, SALT))
        stripped = plan.stripped
        past = [*past[2:], *_turn(question, plan, number)]
        stripped = max(0, stripped - 2)
        if number >= len(questions) // 10:
            taken_ms.append(took_ms)
            tokens.append(prompt.tokens)
    return taken_ms, tokens


def _sent(residency: Residency, prompt: Prompt) -> None:
    if prompt.token_ids is not None:
        lease = residency.begin(prompt.token_ids, SALT)
        residency.generated(lease, ())
        residency.end(lease)


def _conversation(rng: random.Random, candidates: Sequence[Candidates], turns: int) -> list[PastMessage]:
    """Turns of an ordinary length: a question, and an answer of some sentences out of the passages."""
    past: list[PastMessage] = []
    for turn in range(turns):
        text = rng.choice(rng.choice(candidates).items).chunk.text
        past += [PastMessage("user", f"{turn}: {text[:80]}?"), PastMessage("assistant", text[:400])]
    return past


def _turn(question: str, plan: Plan, number: int) -> list[PastMessage]:
    return [
        PastMessage("user", question, context_of(plan)),
        PastMessage("assistant", f"Answer {number}: {plan.chunks[0].body[:300] if plan.chunks else 'unknown'}"),
    ]


if __name__ == "__main__":
    sys.exit(bench_command("plan", __doc__, lambda options: asyncio.run(run(options))))
