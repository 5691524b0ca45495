"""Where in a chunk the answer to a question stands: a probability for each of its pieces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from prompt_builder.pieces import Pieces

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Nearness:
    """Where in a chunk that holds the answer it stands: a softmax over its pieces, mixed with one by length.

    The logit of a piece is the sum of the weights times: its overlap with the question (the share of the question's
    rarity that its words hold, see `overlaps`), that of its whole sentence, those of the piece before and after it,
    and the logarithm of its tokens. `floor` is the part by length. `straddle` of what two neighbouring clauses of a
    sentence hold lies across the cut between them, and is there only when both are.
    """

    overlap: float
    sentence: float
    before: float
    after: float
    length: float
    floor: float
    straddle: float


# Fitted on every second question of XQuAD English and Vietnamese; `python -m bench.budget --fit` fits them anew and
# prints how they hold on the other half.
FITTED = Nearness(overlap=4.72, sentence=7.29, before=1.88, after=1.14, length=-0.17, floor=0.04, straddle=0.0275)


@dataclass(frozen=True, slots=True)
class Chances:
    """Of one chunk that holds the answer: the probability that a piece holds it (`alone`), or only the piece with the
    next one (`across`). Together they sum to 1."""

    alone: list[float]
    across: list[float]


def chances_of(
    wanted: frozenset[str], chunks: Sequence[Pieces], weights: Nearness, most: int | None = None
) -> list[Chances]:
    """Where each of the chunks, or of the first `most`, would hold the answer to a question of the terms `wanted`."""
    overlap, of_sentences = overlaps(wanted, chunks, most)
    return located(overlap, of_sentences, chunks[:most], weights)


def located(overlap: Values, of_sentences: Values, chunks: Sequence[Pieces], weights: Nearness) -> list[Chances]:
    """As `chances_of`, from the overlaps of all pieces and of their sentences."""
    if not chunks:
        return []
    starts = list(accumulate((len(pieces.texts) for pieces in chunks), initial=0))
    firsts = np.array(starts[:-1])
    logits = weights.overlap * overlap + weights.sentence * of_sentences
    logits += weights.length * np.concatenate([pieces.log_tokens for pieces in chunks])
    # No neighbours across chunks.
    before, after = weights.before * overlap[:-1], weights.after * overlap[1:]
    before[firsts[1:] - 1] = 0.0
    after[firsts[1:] - 1] = 0.0
    logits[1:] += before
    logits[:-1] += after
    # Overlaps are at most 1 and lengths bounded: no power overflows.
    powers = np.exp(logits)
    whole = (1 - weights.floor) * powers / np.repeat(np.add.reduceat(powers, firsts), np.diff(starts))
    whole += weights.floor * np.concatenate([pieces.share for pieces in chunks])
    cut = weights.straddle / 2 * np.concatenate([pieces.inner for pieces in chunks])
    across = cut * whole
    across[:-1] += cut[:-1] * whole[1:]
    alone = whole - cut * whole
    alone[1:] -= cut[:-1] * whole[1:]
    flat_alone, flat_across = alone.tolist(), across.tolist()
    return [Chances(flat_alone[start:end], flat_across[start:end]) for start, end in pairwise(starts)]


def overlaps(wanted: frozenset[str], chunks: Sequence[Pieces], most: int | None = None) -> tuple[Values, Values]:
    """For each piece of all chunks, or of the first `most`, the share of the question's rarity that its words hold,
    and that those of its sentence hold, 0 to 1. A word is the rarer the fewer pieces of all chunks hold it."""
    first_chunks = chunks[:most]
    tables = [pieces.places for pieces in chunks]
    total = sum(len(pieces.texts) for pieces in chunks)
    of_pieces = [[0.0] * len(pieces.texts) for pieces in first_chunks]
    of_sentences = [[0.0] * len(pieces.spans) for pieces in first_chunks]
    whole = 0.0
    # Sorted: sums of floats must not hang on the order of a set.
    for term in sorted(wanted):
        found = [places.get(term) for places in tables]
        holding = sum(len(held[0]) for held in found if held is not None)
        if not holding:
            continue
        rarity = math.log(1 + total / holding)
        whole += rarity
        for held, pieces, sentences in zip(found, of_pieces, of_sentences, strict=False):
            if held is not None:
                for place in held[0]:
                    pieces[place] += rarity
                for number in held[1]:
                    sentences[number] += rarity
    spans = [span for pieces in first_chunks for span in pieces.spans]
    scale = 1 / (whole or 1.0)
    flat, flat_sentences = list(chain.from_iterable(of_pieces)), list(chain.from_iterable(of_sentences))
    return np.array(flat) * scale, np.repeat(np.array(flat_sentences), spans) * scale
