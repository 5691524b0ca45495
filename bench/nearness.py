"""Where in a passage the answer stands: examples from XQuAD, and the constants that fit them best.

The likelihood of an example is the probability that `prompt_builder.extracts` gives to the pieces that hold a gold
answer. Questions with an even index are fitted; the others tell how the fit holds.
"""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from bench.datasets import RetrievalSet
from prompt_builder.extracts import Extracts, Nearness, Pieces, chances_of
from prompt_builder.sentences import terms_of
from prompt_builder.types import PromptChunk

STEPS = (2.0, 1.0, 0.5, 0.2, 0.1, 0.05)
# These are shares: their steps are smaller.
SHARES = ("floor", "straddle")


@dataclass(frozen=True, slots=True)
class Example:
    """A question's terms and candidates; the piece (`alone`) or the pair of pieces (`across`) that hold an answer."""

    wanted: frozenset[str]
    chunks: tuple[Pieces, ...]
    gold: int
    alone: tuple[int, ...]
    across: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces whose probability lies in one range: how many, what was said, how often it was true."""

    count: int
    said: float
    true: float


def normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def examples(data: RetrievalSet, candidates: Sequence[Sequence[PromptChunk]], extracts: Extracts) -> list[Example]:
    """One for each question whose passage is among its candidates and whose answer is found in pieces or pairs."""
    made = []
    for question, chunks in zip(data.questions, candidates, strict=True):
        texts = {data.passages[at].text for at in question.relevant}
        gold = next((at for at, chunk in enumerate(chunks) if chunk.body in texts), None)
        if gold is None:
            continue
        pieces = tuple(extracts.pieces(chunk) for chunk in chunks)
        golds = [normalised(answer) for answer in question.answers]
        found = pieces[gold].texts

        def holds(text: str, golds: Sequence[str] = golds) -> bool:
            return any(answer in normalised(text) for answer in golds)

        alone = tuple(at for at, text in enumerate(found) if holds(text))
        across = () if alone else tuple(at for at in range(len(found) - 1) if holds(found[at] + found[at + 1]))
        if alone or across:
            made.append(Example(terms_of(question.text), pieces, gold, alone, across))
    return made


def mean_loss(chosen: Sequence[Example], weights: Nearness) -> float:
    """Mean negative log likelihood, nats."""
    loss = 0.0
    for example in chosen:
        chances = chances_of(example.wanted, example.chunks, weights)[example.gold]
        right = sum(chances.alone[at] for at in example.alone) + sum(chances.across[at] for at in example.across)
        loss -= float(np.log(max(right, 1e-6)))
    return loss / len(chosen)


def fit(chosen: Sequence[Example], start: Nearness, loss: Callable[[Sequence[Example], Nearness], float]) -> Nearness:
    """Coordinate descent in shrinking steps; the loss is smooth, and steps below 0.05 change nothing that shows."""
    best, least = start, loss(chosen, start)
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
                    reached = loss(chosen, tried)
                    if reached < least:
                        best, least, improved = tried, reached, True
                        break
    return best


def calibration(chosen: Sequence[Example], weights: Nearness, edges: Sequence[float]) -> list[Bucket]:
    """How often pieces said to hold the answer with a probability between two `edges` do hold it."""
    said: list[float] = []
    true: list[bool] = []
    for example in chosen:
        chances = chances_of(example.wanted, example.chunks, weights)[example.gold]
        said.extend(chances.alone)
        true.extend(at in example.alone for at in range(len(chances.alone)))
    bucket = np.clip(np.searchsorted(edges, said, side="right") - 1, 0, len(edges) - 2)
    buckets = []
    for at in range(len(edges) - 1):
        inside = bucket == at
        if inside.any():
            buckets.append(
                Bucket(
                    int(inside.sum()), float(np.mean(np.array(said)[inside])), float(np.mean(np.array(true)[inside]))
                )
            )
    return buckets


def constants(weights: Nearness) -> str:
    return ", ".join(f"{value:g}" for value in astuple(weights))
