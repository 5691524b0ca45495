"""What holds the answer within a budget: XQuAD's questions in all arms, and the fit of where answers stand."""

import random
import time
from collections.abc import Sequence

import numpy as np

from bench.budget_arms import ANSWER_TOKENS, FIXED_CHUNKS, Arms, Material
from bench.datasets import Question, RetrievalSet
from bench.nearness import Example, calibration, constants, examples, fit, mean_loss, normalised
from bench.real_engine import RealEngine
from bench.report import Cell, Report
from bench.retrieved import Asked, as_stored, retrieve
from gateway.serving import Serving
from latency.model import CPU_135M
from latency.speed import SpeedEstimate
from prompt_builder.choice import distinct
from prompt_builder.evidence import sentence_scores
from prompt_builder.nearness import FITTED, chances_of
from prompt_builder.pieces import Cutter
from prompt_builder.sentences import terms_of
from prompt_builder.types import Plan, Prompt, PromptChunk
from retrieval.types import Candidates

BUDGETS = (200, 300, 500, 900)
CANDIDATES = 20
SEED = 20
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


async def materials(data: RetrievalSet, serving: Serving) -> list[Material]:
    """The questions with what the product's retriever finds for them."""
    asked = [Asked(question.text) for question in data.questions]
    cutter = Cutter(serving.tokenizer)
    found = as_stored(serving.renderer, await retrieve(data.passages, asked, CANDIDATES))
    return [
        _material(question, candidates, serving, cutter)
        for question, candidates in zip(data.questions, found, strict=True)
    ]


def measure(report: Report, data: RetrievalSet, asked: Sequence[Material], chosen: Arms, *, strictly: bool) -> None:
    """Tables of one language and its checks; on all questions, and on those that fitted no constant.

    `strictly` better at two budgets can only be asked of many questions.
    """
    found = np.zeros((len(chosen.all), len(BUDGETS), len(asked)), dtype=bool)
    uncached = np.zeros(found.shape)
    for at, material in enumerate(asked):
        golds = [normalised(answer) for answer in material.question.answers]
        for arm, policy in enumerate(chosen.all):
            for place, budget in enumerate(BUDGETS):
                held = policy.held(material, budget)
                texts = [normalised(text) for text in held.texts]
                found[arm, place, at] = any(gold in text for gold in golds for text in texts)
                uncached[arm, place, at] = held.uncached_tokens
    shares = found.mean(axis=2)
    front = float(np.mean([material.front_tokens for material in asked]))
    _print(report, f"{data.name}, {len(asked)} questions: answer in the prompt", chosen, shares)
    _print(report, f"{data.name}, every second question, not fitted on", chosen, found[:, :, 1::2].mean(axis=2))
    rows: list[list[str]] = []
    for policy, means in zip(chosen.all, uncached.mean(axis=2), strict=True):
        rows.append([policy.name, *(_cost(float(mean), front) for mean in means)])
    report.table(f"{data.name}: mean uncached tokens, predicted TTFT", ("arm", *map(_heading, BUDGETS)), rows)
    best = shares[: len(chosen.fixed)].max(axis=0)
    for place, budget in enumerate(BUDGETS):
        report.at_least(f"{data.name} at {budget}", float(shares[-1, place]), float(best[place]))
        within = bool((uncached[-1, place] <= budget).all())
        report.require(f"{data.name} never above {budget}", within)
    if strictly:
        report.at_least(f"{data.name}: budgets with a strictly better share", float((shares[-1] > best).sum()), 2.0)


async def confirm(
    report: Report, engine: RealEngine, arms: Arms, asked: Sequence[Material], speed: SpeedEstimate, count: int
) -> None:
    """So many of our prompts, drawn over questions and budgets, sent to the engine: tokens and TTFT as predicted?"""
    rng = random.Random(SEED)
    salt = f"{time.time_ns():x}"
    errors, ratios = [], []
    exact = within = 0
    for material in rng.sample(asked, min(count, len(asked))):
        budget = rng.choice(BUDGETS)
        prompt = arms.ours.serving.builder.render(arms.ours.plan(material, budget))
        answer = await engine.ask(prompt, max_tokens=1, salt=salt)
        exact += answer.prompt_tokens == prompt.tokens
        # What the front's last block shares with the chunks is computed too, and all of it the first time.
        within += prompt.tokens - material.front_tokens <= budget
        predicted_s = speed.predict_s(answer.uncached_tokens, answer.cached_tokens)
        errors.append(abs(predicted_s / answer.ttft_s - 1))
        ratios.append(answer.ttft_s / predicted_s)
    report.note(
        f"{len(errors)} prompts on the engine: mean error of the predicted TTFT {np.mean(errors):.1%}, "
        f"actual / predicted p50 {np.median(ratios):.2f}, p95 {np.percentile(ratios, 95):.2f}"
    )
    report.require(f"prompt tokens predicted = reported on {len(errors)} prompts", exact == len(errors))
    report.require(f"{len(errors)} prompts on the engine within their tokens", within == len(errors))


def print_fit(report: Report, sets: Sequence[tuple[RetrievalSet, Sequence[Material]]], anew: bool) -> None:
    """How well the planner knows where an answer stands, on the questions that fitted no constant.

    `anew`: the constants are fitted again on the other half, and printed.
    """
    halves: tuple[list[Example], list[Example]] = ([], [])
    for data, asked in sets:
        for half in (0, 1):
            part = asked[half::2]
            golds = [_gold(data, material) for material in part]
            questions = [material.question for material in part]
            halves[half].extend(examples(questions, [material.pieces for material in part], golds))
    buckets = calibration(halves[1], FITTED, EDGES)
    rows: list[list[Cell]] = [
        [f"{bucket.low:.2f} to {bucket.high:.2f}", bucket.count, bucket.said, bucket.true] for bucket in buckets
    ]
    report.table("Pieces that hold the answer, every second question", ("said", "pieces", "mean said", "true"), rows)
    report.note(f"constants shipped {constants(FITTED)}; loss {mean_loss(halves[1], FITTED):.4f} nats")
    if anew:
        found = fit(halves[0], FITTED)
        report.note(f"fitted anew {constants(found)}; loss {mean_loss(halves[1], found):.4f} nats")


def _gold(data: RetrievalSet, material: Material) -> int | None:
    texts = {data.passages[at].text for at in material.question.relevant}
    return next((at for at, chunk in enumerate(material.chunks) if chunk.body in texts), None)


def _print(report: Report, title: str, chosen: Arms, shares: np.ndarray) -> None:
    rows = [[policy.name, *shares[arm].tolist()] for arm, policy in enumerate(chosen.all)]
    report.table(title, ("arm", *map(_heading, BUDGETS)), rows)


def _heading(budget: int) -> str:
    return f"{budget} tokens"


def _cost(tokens: float, front_tokens: float) -> str:
    return f"{tokens:.0f}, {CPU_135M.predict_s(round(tokens), round(front_tokens)):.2f} s"


def _material(question: Question, candidates: Candidates, serving: Serving, cutter: Cutter) -> Material:
    ranked, _ = distinct(candidates.items, len(candidates.items))
    pieces = tuple(cutter.of(chunk) for chunk in ranked)
    chances = chances_of(terms_of(question.text), pieces, FITTED)
    by_sentence = []
    for parts, chance in zip(pieces, chances, strict=True):
        sums = [0.0] * (parts.sentence[-1] + 1)
        for at, number in enumerate(parts.sentence):
            sums[number] += chance.alone[at] + chance.across[at]
        by_sentence.append(tuple(sums))
    front, asked = _fixed_tokens(serving.builder.render(_bare(question, ranked[0])))
    return Material(
        question=question,
        candidates=candidates,
        chunks=tuple(ranked),
        pieces=pieces,
        scores=tuple(map(tuple, sentence_scores(question.text, ranked[:FIXED_CHUNKS]))),
        chances=tuple(by_sentence),
        front_tokens=front,
        asked_tokens=asked,
    )


def _bare(question: Question, chunk: PromptChunk) -> Plan:
    return Plan(
        system="",
        past=(),
        rendering="stripped",
        chunks=(chunk,),
        references=(),
        evidence="",
        facts="",
        question=question.text,
        max_tokens=ANSWER_TOKENS,
        dropped=(),
    )


def _fixed_tokens(prompt: Prompt) -> tuple[int, int]:
    """Tokens before the chunk, and behind it."""
    kinds = [segment.kind for segment in prompt.segments]
    at = kinds.index("chunk")
    before = sum(len(segment.token_ids) for segment in prompt.segments[:at])
    return before, sum(len(segment.token_ids) for segment in prompt.segments[at + 1 :])
