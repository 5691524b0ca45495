"""Policies that fill a prompt within a budget of uncached tokens: fixed ones, and the product's planner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.datasets import Question
from gateway.serving import Serving
from gateway.settings import Settings
from latency.model import CPU_135M, PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.extracts import Extracts
from prompt_builder.outlook import Clock, Outlook, Prefix
from prompt_builder.pieces import Pieces
from prompt_builder.types import Limits, Plan, PromptChunk, Transcript
from retrieval.types import Candidates

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


@dataclass(frozen=True, slots=True)
class Arms:
    """`fixed` are what `ours` is held against; `others` are printed beside them."""

    fixed: tuple[Policy, ...]
    others: tuple[Policy, ...]
    ours: "Planned"

    @property
    def all(self) -> tuple[Policy, ...]:
        return (*self.fixed, *self.others, self.ours)


def arms(serving: Serving) -> Arms:
    """Ours are the product's defaults; the fixed arms have no evidence lines, which would cost them chunks."""
    extracts = Extracts(serving.tokenizer)
    top_k = Settings().top_k
    wholes = [WholeChunks(most) for most in range(1, FIXED_CHUNKS + 1)]
    return Arms(
        fixed=(*wholes, BestSentences("best sentences", extracts), TwoEach(extracts)),
        others=(
            BestSentences("best sentences by headstart's estimate", extracts, by_chance=True),
            Planned("headstart without evidence lines", serving, top_k),
        ),
        ours=Planned("headstart", serving, top_k, Settings().evidence_lines),
    )


def _sentences_held(extracts: Extracts, material: Material, taken: dict[int, list[int]]) -> Held:
    texts, tokens = [], material.asked_tokens
    for at, numbers in taken.items():
        pieces = material.pieces[at]
        places = [place for place, number in enumerate(pieces.sentence) if number in numbers]
        rendered = extracts.extract(material.chunks[at].label, pieces, places)
        texts.append(rendered.text)
        tokens += len(rendered.token_ids)
    return Held(tuple(texts), tokens)
