"""Where in a passage the answer stands: examples from XQuAD, and the constants that fit them best.

The likelihood of an example is the probability that `prompt_builder.nearness` gives to the pieces that hold a gold
answer. Questions with an even index are fitted; the others tell how the fit holds.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import numpy as np

from bench.datasets import Question
from prompt_builder.nearness import Chances, Nearness, Values, located, overlaps
from prompt_builder.pieces import Pieces
from prompt_builder.sentences import terms_of

STEPS = (2.0, 1.0, 0.5, 0.2, 0.1, 0.05)
# These are shares: their steps are smaller.
SHARES = ("floor", "straddle")


@dataclass(frozen=True, slots=True)
class Example:
    """A passage that answers a question: its overlaps, beside those of the other candidates, and the pieces (`alone`)
    or the first of two (`across`) that hold a gold answer."""

    pieces: Pieces
    overlap: Values
    of_sentences: Values
    alone: tuple[int, ...]
    across: tuple[int, ...]

    def chances(self, weights: Nearness) -> Chances:
        return located(self.overlap, self.of_sentences, (self.pieces,), weights)[0]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces whose probability lies in one range: how many, what was said, how often it was true."""

    low: float
    high: float
    count: int
    said: float
    true: float


def normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def examples(
    questions: Sequence[Question], candidates: Sequence[Sequence[Pieces]], golds: Sequence[int | None]
) -> list[Example]:
    """One for each question whose passage holds the answer in a piece, or in two.

    `candidates` are those of each question in pieces, `golds` the place of the passage among them.
    """
    made = []
    for question, chunks, gold in zip(questions, candidates, golds, strict=True):
        if gold is None:
            continue
        answers = [normalised(answer) for answer in question.answers]
        texts = chunks[gold].texts
        alone = tuple(at for at, text in enumerate(texts) if _holds(text, answers))
        pairs = [texts[at] + texts[at + 1] for at in range(len(texts) - 1)]
        across = () if alone else tuple(at for at, text in enumerate(pairs) if _holds(text, answers))
        if alone or across:
            overlap, of_sentences = overlaps(terms_of(question.text), chunks)
            first = sum(len(pieces.texts) for pieces in chunks[:gold])
            own = slice(first, first + len(texts))
            made.append(Example(chunks[gold], overlap[own], of_sentences[own], alone, across))
    return made


def mean_loss(chosen: Sequence[Example], weights: Nearness) -> float:
    """Mean negative log likelihood, nats."""
    loss = 0.0
    for example in chosen:
        chances = example.chances(weights)
        right = sum(chances.alone[at] for at in example.alone) + sum(chances.across[at] for at in example.across)
        loss -= float(np.log(max(right, 1e-6)))
    return loss / len(chosen)


def fit(chosen: Sequence[Example], start: Nearness) -> Nearness:
    """Coordinate descent in shrinking steps; the loss is smooth, and steps below 0.05 change nothing that shows."""
    best, least = start, mean_loss(chosen, start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in Nearness.__dataclass_fields__:
                width = step / 20 if name in SHARES else step
                for sign in (1, -1):
                    value = round(getattr(best, name) + sign * width, 4)
                    if name in SHARES and not 0 < value < 1:
                        continue
                    tried = replace(best, **{name: value})
                    reached = mean_loss(chosen, tried)
                    if reached < least:
                        best, least, improved = tried, reached, True
                        break
    return best


def calibration(chosen: Sequence[Example], weights: Nearness, edges: Sequence[float]) -> list[Bucket]:
    """How often pieces said to hold the answer with a probability between two `edges` do hold it."""
    rows = [
        (chance, at in example.alone)
        for example in chosen
        for at, chance in enumerate(example.chances(weights).alone)
    ]
    buckets = []
    for low, high in pairwise(edges):
        inside = [row for row in rows if low <= row[0] < high]
        if inside:
            said, true = (float(np.mean(column)) for column in zip(*inside, strict=True))
            buckets.append(Bucket(low, high, len(inside), said, true))
    return buckets


def _holds(text: str, answers: Sequence[str]) -> bool:
    return any(answer in normalised(text) for answer in answers)


def constants(weights: Nearness) -> str:
    return ", ".join(f"{value:g}" for value in astuple(weights))
