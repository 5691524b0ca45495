"""Evidence lines: the few sentences of the chunks that are nearest to the question, quoted with labels."""

import math
import re
from collections.abc import Callable, Sequence
from operator import itemgetter

from prompt_builder.bodies import Body, SentenceMemo, body_of
from prompt_builder.labels import EVIDENCE_MARK
from prompt_builder.sentences import terms_of
from prompt_builder.types import PromptChunk

TOKEN_BUDGET = 60
LENGTH_WEIGHT = 2.0
RELEVANCE_WEIGHT = 0.5
LEAST_QUOTE_TOKENS = 10


def evidence_lines(
    question: str,
    chunks: Sequence[PromptChunk],
    *,
    lines: int,
    count: Callable[[str], int],
    token_budget: int = TOKEN_BUDGET,
    memo: SentenceMemo | None = None,
) -> str:
    """At most `lines` sentences over all chunks, most relevant last; empty when none shares a word.

    A sentence scores the rarity of the question's words in it, over its length; up to half of that hangs on its
    chunk's relevance. The best sentence may take the whole `token_budget` (by `count`), the next what is left; one
    that is too long is cut between words, around those of the question. The order of `chunks` does not matter.
    """
    wanted = terms_of(question)
    if lines <= 0 or not wanted:
        return ""
    of = body_of if memo is None else memo.of
    bodies = [of(chunk.body) for chunk in chunks]
    ranked = sorted(
        (-score, -chunk.relevance, chunk.label, place, at)
        for at, (chunk, scores) in enumerate(zip(chunks, _scores(wanted, chunks, bodies), strict=True))
        for place, score in scores.items()
    )
    quoted: dict[str, str] = {}
    left = token_budget
    for _, _, label, place, at in ranked:
        if len(quoted) == lines or left < LEAST_QUOTE_TOKENS:
            break
        sentence = bodies[at].sentences[place].text
        if sentence in quoted:
            continue
        text = _cut(sentence, left, wanted, count)
        quoted[sentence] = f"[{label}] “{text}”"
        left -= count(text)
    if not quoted:
        return ""
    return "\n".join([EVIDENCE_MARK, *reversed(quoted.values())])


def sentence_scores(question: str, chunks: Sequence[PromptChunk]) -> list[list[float]]:
    """For each chunk the scores by which its sentences, in order, are quoted; 0 for those that share no word."""
    bodies = [body_of(chunk.body) for chunk in chunks]
    return [
        [scores.get(place, 0.0) for place in range(len(body.sentences))]
        for body, scores in zip(bodies, _scores(terms_of(question), chunks, bodies), strict=True)
    ]


def most_tokens(lines: int, count: Callable[[str], int], token_budget: int = TOKEN_BUDGET) -> int:
    """More than evidence of this many lines can have, its heading, labels and quotation marks included."""
    if lines <= 0:
        return 0
    return token_budget + count(f"{EVIDENCE_MARK}\n\n") + lines * (count("[k0a1b] “”\n") + 4)


def _scores(wanted: frozenset[str], chunks: Sequence[PromptChunk], bodies: Sequence[Body]) -> list[dict[int, float]]:
    """For each chunk the scores of the sentences that hold a wanted term, by their numbers."""
    total = sum(len(body.sentences) for body in bodies)
    mean_terms = sum(sum(body.terms) for body in bodies) / (total or 1) or 1.0
    rarities = []
    for term in wanted:
        holding = [body.places.get(term, ()) for body in bodies]
        times = sum(map(len, holding))
        if times:
            rarities.append((math.log(1 + total / times), holding))
    sums: list[dict[int, float]] = [{} for _ in bodies]
    # Sorted: sums of floats must not hang on the order of a set.
    for rarity, holding in sorted(rarities, key=itemgetter(0)):
        for places, held in zip(holding, sums, strict=True):
            for place in places:
                held[place] = held.get(place, 0.0) + rarity
    return [
        {
            place: (1 - RELEVANCE_WEIGHT + RELEVANCE_WEIGHT * chunk.relevance)
            * rarity
            / (1 + LENGTH_WEIGHT * body.terms[place] / mean_terms)
            for place, rarity in held.items()
        }
        for chunk, body, held in zip(chunks, bodies, sums, strict=True)
    ]


def _cut(text: str, most_tokens: int, wanted: frozenset[str], count: Callable[[str], int]) -> str:
    """The longest run of words of at most `most_tokens` around the question's words; `…` where text is missing."""
    if count(text) <= most_tokens:
        return text
    words = [match.span() for match in re.finditer(r"\S+", text)]
    if len(text) > 20 * len(words):
        words = [(place, place + 1) for place in range(len(text))]
    hits = [place for place, (start, end) in enumerate(words) if terms_of(text[start:end]) & wanted]
    middle = (hits[0] + hits[-1]) // 2 if hits else 0

    def window(size: int) -> str:
        first = max(0, min(middle - size // 2, len(words) - size))
        start, end = words[first][0], words[first + size - 1][1]
        return f"{'… ' if first else ''}{text[start:end]}{' …' if end < len(text) else ''}"

    low, high = 1, len(words)
    while low < high:
        size = (low + high + 1) // 2
        if count(window(size)) <= most_tokens:
            low = size
        else:
            high = size - 1
    return window(low)
