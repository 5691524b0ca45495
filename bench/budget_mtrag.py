"""What a TTFT budget buys in conversations: MTRAG on the real engine, the planner beside fixed numbers of chunks.

Every arm holds all conversations, turn by turn, with the data's own answers as history. Ours gets a budget and plans
with what the engine holds and a model that is calibrated first and learns from every request of the run. The fixed
arms are the product without a budget: so many chunks a turn, in the cheapest rendering of the past.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.datasets import RetrievalSet, mtrag, mtrag_conversations
from bench.real_engine import EngineUnusable, RealEngine
from bench.report import Cell, Report
from bench.retrieved import Asked, as_stored, retrieve
from cache.memory import MemoryStore
from cache.residency import Residency
from gateway.serving import Serving
from gateway.settings import Settings
from latency.learner import SpeedLearner
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.transcripts import Transcripts
from prompt_builder.types import Limits, Message, Plan
from retrieval.types import Candidates

BUDGETS_S = (0.75, 1.5, 3.0)
FIXED = (1, 2, 3, 5)
CANDIDATES = 20
TENANT = "bench"
# What the gateway does between a plan and the engine's first look at the request.
RENDER_S = 0.003
MOST_TOP_K = 10
PROGRESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as it is asked; `relevant` are the texts of its reference passages, empty where it has none."""

    question: str
    answer: str
    candidates: Candidates
    relevant: frozenset[str]


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn in one arm. `recall` None: no reference passage. `foretold_fit`: the plan was predicted to keep it."""

    ttft_s: float
    uncached_tokens: int
    chunks: int
    extracts: int
    recall: float | None
    whole_recall: float | None
    foretold_fit: bool


@dataclass(frozen=True, slots=True)
class Arm:
    """`budget_s` None: `top_k` chunks whatever they take."""

    name: str
    budget_s: float | None
    top_k: int


class Talks:
    """One engine, what it holds and how fast it is, as the gateway would know it."""

    def __init__(self, engine: RealEngine, serving: Serving, learner: SpeedLearner) -> None:
        facts = engine.facts
        if facts.block_size is None or facts.num_blocks is None:
            raise EngineUnusable("It does not tell its KV blocks at /metrics.")
        self._engine = engine
        self._serving = serving
        self._learner = learner
        self._residency = Residency(facts.block_size, facts.num_blocks - 1)
        self._settings = Settings()

    async def hold(self, arm: Arm, turns: Sequence[Turn], salt: str) -> list[Answered]:
        """A whole conversation in one arm, with nothing of it in the engine's cache before."""
        transcripts = Transcripts(MemoryStore(2**26), ttl_s=86_400.0)
        stated: list[Message] = []
        asked = []
        for turn in turns:
            stated.append(Message("user", turn.question))
            asked.append(await self._ask(arm, turn, stated, transcripts, salt))
            stated.append(Message("assistant", turn.answer))
        return asked

    async def _ask(
        self, arm: Arm, turn: Turn, stated: Sequence[Message], transcripts: Transcripts, salt: str
    ) -> Answered:
        began_s = time.perf_counter()
        model = str(self._serving.facts.model)
        limits = Limits(
            self._engine.window_tokens, self._settings.min_answer_tokens, self._settings.min_answer_tokens, arm.top_k
        )
        transcript = await transcripts.resume(TENANT, None, model, list(stated))
        outlook = Outlook("engine", self._learner.estimate, lambda _: 0.0, self._residency.prefix(salt))
        spent_s = time.perf_counter() - began_s + RENDER_S
        plan = self._serving.planner.plan(
            transcript, turn.candidates, limits, (outlook,), Clock(arm.budget_s, spent_s)
        )
        prompt = self._serving.builder.render(plan)
        if prompt.token_ids is None:
            raise EngineUnusable(prompt.inexact_reason or "It does not take token ids.")
        lease = self._residency.begin(prompt.token_ids, salt)
        own_s = time.perf_counter() - began_s
        answer = await self._engine.ask(prompt, max_tokens=1, salt=salt)
        self._residency.reconcile(lease, answer.cached_tokens)
        self._residency.end(lease)
        self._learner.observe_prefill(answer.uncached_tokens, answer.cached_tokens, answer.ttft_s)
        await transcripts.record(TENANT, None, model, transcript, plan, turn.answer)
        return Answered(
            ttft_s=own_s + answer.ttft_s,
            uncached_tokens=answer.uncached_tokens,
            chunks=len(plan.chunks) + len(plan.references),
            extracts=sum(chunk.form == "extract" for chunk in plan.chunks),
            recall=_recall(turn, plan, whole_only=False),
            whole_recall=_recall(turn, plan, whole_only=True),
            foretold_fit=plan.forecast is None or plan.forecast.fits,
        )


async def measure_mtrag(
    report: Report, engine: RealEngine, serving: Serving, learner: SpeedLearner, conversations: int, turns: int
) -> None:
    """`conversations` and `turns` of each at most; 0 is all of them."""
    talks_of = await _turns(serving, conversations, turns)
    talks = Talks(engine, serving, learner)
    arms = [
        *(Arm(f"{count} chunk{'s' if count > 1 else ''}", None, count) for count in FIXED),
        *(Arm(f"headstart, {budget:g} s", budget, MOST_TOP_K) for budget in BUDGETS_S),
    ]
    run_id = f"{time.time_ns():x}"
    asked: list[list[Answered]] = [[] for _ in arms]
    began_s = said_s = time.monotonic()
    for number, talk in enumerate(talks_of):
        # One arm after the other: together they would evict each other from the engine's cache.
        for at, arm in enumerate(arms):
            asked[at].extend(await talks.hold(arm, talk, f"{run_id}{number:04x}{at:x}"))
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(f"  {number} of {len(talks_of)} conversations, {said_s - began_s:.0f} s", flush=True)
    _judge(report, arms, asked)


async def _turns(serving: Serving, conversations: int, turns: int) -> list[list[Turn]]:
    data = mtrag()
    talks = [talk[: turns or None] for talk in mtrag_conversations()[: conversations or None]]
    pairs = [(turn, talk[at - 1].user if at else None) for talk in talks for at, turn in enumerate(talk)]
    found = await retrieve(data.passages, [Asked(turn.user, previous) for turn, previous in pairs], CANDIDATES)
    relevant = _relevant(data)
    made = iter(
        Turn(turn.user, turn.answer, candidates, relevant.get((turn.user, previous), frozenset()))
        for (turn, previous), candidates in zip(pairs, as_stored(serving.renderer, found), strict=True)
    )
    return [[next(made) for _ in talk] for talk in talks]


def _relevant(data: RetrievalSet) -> dict[tuple[str, str | None], frozenset[str]]:
    return {
        (question.text, question.previous): frozenset(data.passages[at].text for at in question.relevant)
        for question in data.questions
    }


def _recall(turn: Turn, plan: Plan, *, whole_only: bool) -> float | None:
    if not turn.relevant:
        return None
    shown = {chunk.body for chunk in (*plan.chunks, *plan.references) if not whole_only or chunk.form == "whole"}
    return len(turn.relevant & shown) / len(turn.relevant)


def _judge(report: Report, arms: Sequence[Arm], asked: Sequence[Sequence[Answered]]) -> None:
    rows: list[list[Cell]] = []
    for arm, turns in zip(arms, asked, strict=True):
        ttft_s = np.array([turn.ttft_s for turn in turns])
        rows.append(
            [
                arm.name,
                float(np.median(ttft_s)),
                float(np.percentile(ttft_s, 95)),
                float(np.mean([turn.uncached_tokens for turn in turns])),
                float(np.mean([turn.chunks for turn in turns])),
                float(np.mean([turn.extracts for turn in turns])),
                _mean_recall(turns),
                float(np.mean([turn.whole_recall for turn in turns if turn.whole_recall is not None])),
                *(float(np.mean(ttft_s <= budget)) for budget in BUDGETS_S),
            ]
        )
    columns = (
        "arm",
        "TTFT p50 s",
        "TTFT p95 s",
        "uncached mean",
        "chunks",
        "of them extracts",
        "recall",
        "recall, whole",
        *(f"within {budget:g} s" for budget in BUDGETS_S),
    )
    report.table(f"MTRAG, {len(asked[0])} turns, answers of one token", columns, rows)
    better = 0
    fixed = [(arm, turns) for arm, turns in zip(arms, asked, strict=True) if arm.budget_s is None]
    for arm, turns in zip(arms, asked, strict=True):
        if arm.budget_s is None:
            continue
        budget_s = arm.budget_s
        fitting = [turn for turn in turns if turn.foretold_fit]
        kept = float(np.mean([turn.ttft_s <= budget_s for turn in fitting])) if fitting else 1.0
        report.at_least(f"{arm.name}: attainment of {len(fitting)} turns that fit", kept, 0.99)
        refused = [turn for turn in turns if not turn.foretold_fit]
        false_refusals = sum(turn.ttft_s <= budget_s for turn in refused)
        report.at_most(f"{arm.name}: false refusals of {len(refused)}", float(false_refusals), 0.0)
        ours = float(np.mean([turn.ttft_s <= budget_s for turn in turns]))
        rivals = [
            (_mean_recall(others), other.name)
            for other, others in fixed
            if float(np.mean([turn.ttft_s <= budget_s for turn in others])) >= ours
        ]
        recall, name = max(rivals, default=(0.0, "no chunk"))
        report.at_least(f"{arm.name}: recall beside {name}, as punctual", _mean_recall(turns), recall)
        better += _mean_recall(turns) > recall
    report.at_least("MTRAG: budgets with a strictly better recall", float(better), 1.0)


def _mean_recall(turns: Sequence[Answered]) -> float:
    found = [turn.recall for turn in turns if turn.recall is not None]
    return float(np.mean(found)) if found else 0.0
