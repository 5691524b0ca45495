"""What holds the answer within a budget: XQuAD's questions, fixed policies and the product's planner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from bench.datasets import Question, RetrievalSet
from bench.nearness import normalised
from bench.report import Report
from bench.retrieved import Asked, as_stored, retrieve
from gateway.serving import Serving
from gateway.settings import Settings
from latency.model import CPU_135M, PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.choice import distinct
from prompt_builder.evidence import sentence_scores
from prompt_builder.extracts import Extracts
from prompt_builder.nearness import FITTED, chances_of
from prompt_builder.outlook import Clock, Outlook, Prefix
from prompt_builder.pieces import Cutter, Pieces
from prompt_builder.sentences import terms_of
from prompt_builder.types import Limits, Plan, Prompt, PromptChunk, Transcript
from retrieval.types import Candidates

BUDGETS = (200, 300, 500, 900)
CANDIDATES = 20
FIXED_CHUNKS = 5
ANSWER_TOKENS = 48
WINDOW_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Material:
    """A question with its candidates, most relevant first.

    `scores` are those of each chunk's sentences by which evidence lines are quoted, `chances` the probabilities that
    they hold the answer. `asked_tokens` are those of the prompt without chunks, behind the `front_tokens` that the
    engine holds.
    """

    question: Question
    candidates: Candidates
    chunks: tuple[PromptChunk, ...]
    pieces: tuple[Pieces, ...]
    scores: tuple[tuple[float, ...], ...]
    chances: tuple[tuple[float, ...], ...]
    front_tokens: int
    asked_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """What one policy puts into the prompt: the chunks' texts, and the tokens that the engine must compute."""

    texts: tuple[str, ...]
    uncached_tokens: int


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def held(self, material: Material, budget_tokens: int) -> Held: ...


@dataclass(frozen=True, slots=True)
class WholeChunks:
    """The most relevant chunks, at most `most` and as many as fit."""

    most: int

    @property
    def name(self) -> str:
        return f"{self.most} whole chunk{'s' if self.most > 1 else ''}"

    def held(self, material: Material, budget_tokens: int) -> Held:
        used, texts = material.asked_tokens, []
        for chunk in material.chunks[: self.most]:
            size = len(chunk.rendered.token_ids)
            if used + size > budget_tokens:
                break
            used += size
            texts.append(chunk.rendered.text)
        return Held(tuple(texts), used)


@dataclass(frozen=True, slots=True)
class BestSentences:
    """Of the five most relevant chunks the best sentences until nothing more fits.

    By the scores of evidence lines; or, `by_chance`, by the planner's own estimate of what they are worth.
    """

    name: str
    extracts: Extracts
    by_chance: bool = False

    def held(self, material: Material, budget_tokens: int) -> Held:
        """A sentence that does not fit is passed over for the next."""
        ranked = sorted(
            (-worth, at, number)
            for at, chunk in enumerate(material.chunks[:FIXED_CHUNKS])
            for number, worth in enumerate(
                [chunk.relevance * chance for chance in material.chances[at]]
                if self.by_chance
                else material.scores[at]
            )
        )
        taken: dict[int, list[int]] = {}
        best = Held((), material.asked_tokens)
        for _, at, number in ranked:
            tried = taken | {at: sorted([*taken.get(at, ()), number])}
            held = _sentences_held(self.extracts, material, tried)
            if held.uncached_tokens <= budget_tokens:
                taken, best = tried, held
        return best


@dataclass(frozen=True, slots=True)
class TwoEach:
    """The two best sentences of each of the five most relevant chunks, as many chunks as fit."""

    extracts: Extracts
    name: str = "two sentences of each"

    def held(self, material: Material, budget_tokens: int) -> Held:
        taken: dict[int, list[int]] = {}
        best = Held((), material.asked_tokens)
        for at, scores in enumerate(material.scores[:FIXED_CHUNKS]):
            taken[at] = sorted(sorted(range(len(scores)), key=lambda number: -scores[number])[:2])
            held = _sentences_held(self.extracts, material, taken)
            if held.uncached_tokens > budget_tokens:
                break
            best = held
        return best


@dataclass(frozen=True, slots=True)
class Planned:
    """The product's planner, under the TTFT that so many uncached tokens are predicted to take."""

    name: str
    serving: Serving
    top_k: int
    evidence_lines: int = 0
    model: PrefillModel = CPU_135M

    def held(self, material: Material, budget_tokens: int) -> Held:
        plan = self.plan(material, budget_tokens)
        uncached = plan.forecast.uncached_tokens if plan.forecast is not None else 0
        return Held(tuple(chunk.rendered.text for chunk in plan.chunks), uncached)

    def plan(self, material: Material, budget_tokens: int) -> Plan:
        budget_s = self.model.predict_s(budget_tokens, material.front_tokens)
        speed = SpeedEstimate(self.model, factor=1.0, quantile=0.5, samples=0, source="kept")
        outlook = Outlook("replica", speed, lambda _: 0.0, FrontHeld(material.front_tokens))
        limits = Limits(WINDOW_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS, self.top_k, evidence_lines=self.evidence_lines)
        transcript = Transcript(system="", past=(), question=material.question.text)
        # A hair more than the budget, as it is the sum of floats that is compared.
        return self.serving.planner.plan(
            transcript, material.candidates, limits, (outlook,), Clock(budget_s * (1 + 1e-9), 0.0)
        )


@dataclass(frozen=True, slots=True)
class FrontHeld:
    """A prompt's beginning on an engine that holds the first `held` tokens of every prompt, and nothing else."""

    held: int
    tokens: int = 0

    @property
    def resident_tokens(self) -> int:
        return min(self.held, self.tokens)

    def extended(self, token_ids: Sequence[int]) -> Prefix:
        return replace(self, tokens=self.tokens + len(token_ids))

    def cached_tokens(self) -> int:
        return min(self.held, max(0, self.tokens - 1))


async def materials(data: RetrievalSet, serving: Serving) -> list[Material]:
    """The questions with what the product's retriever finds for them."""
    asked = [Asked(question.text) for question in data.questions]
    cutter = Cutter(serving.tokenizer)
    found = as_stored(serving.renderer, await retrieve(data.passages, asked, CANDIDATES))
    return [
        _material(question, candidates, serving, cutter)
        for question, candidates in zip(data.questions, found, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Arms:
    """`fixed` are what `ours` is held against; `others` are printed beside them."""

    fixed: tuple[Policy, ...]
    others: tuple[Policy, ...]
    ours: Policy

    @property
    def all(self) -> tuple[Policy, ...]:
        return (*self.fixed, *self.others, self.ours)


def arms(serving: Serving) -> Arms:
    """No arm has evidence lines but the one that says so."""
    extracts = Extracts(serving.tokenizer)
    top_k = Settings().top_k
    wholes = [WholeChunks(most) for most in range(1, FIXED_CHUNKS + 1)]
    return Arms(
        fixed=(*wholes, BestSentences("best sentences", extracts), TwoEach(extracts)),
        others=(
            BestSentences("best sentences by headstart's estimate", extracts, by_chance=True),
            Planned("headstart with evidence lines", serving, top_k, Settings().evidence_lines),
        ),
        ours=Planned("headstart", serving, top_k),
    )


def measure(report: Report, data: RetrievalSet, asked: Sequence[Material], chosen: Arms) -> None:
    """Tables of one language and its checks; on all questions, and on those that fitted no constant."""
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
    report.at_least(f"{data.name}: budgets with a strictly better share", float((shares[-1] > best).sum()), 2.0)


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


def _sentences_held(extracts: Extracts, material: Material, taken: dict[int, list[int]]) -> Held:
    texts, tokens = [], material.asked_tokens
    for at, numbers in taken.items():
        pieces = material.pieces[at]
        places = [place for place, number in enumerate(pieces.sentence) if number in numbers]
        rendered = extracts.extract(material.chunks[at].label, pieces, places)
        texts.append(rendered.text)
        tokens += len(rendered.token_ids)
    return Held(tuple(texts), tokens)
