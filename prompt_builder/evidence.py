"""Evidence lines: the few sentences of the chunks that are nearest to the question, quoted with labels."""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from prompt_builder.labels import EVIDENCE_MARK, as_data
from prompt_builder.sentences import sentences, terms_of
from prompt_builder.types import PromptChunk

TOKEN_BUDGET = 60
LENGTH_WEIGHT = 2.0
RELEVANCE_WEIGHT = 0.5
LEAST_QUOTE_TOKENS = 10


MEMO_BODIES = 1024

# The sentences of a text with their terms.
Split = tuple[tuple[str, frozenset[str]], ...]


class SentenceMemo:
    """The sentences of the MEMO_BODIES chunks last used. Safe to share between threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Split] = OrderedDict()
        self._lock = Lock()

    def of(self, body: str) -> Split:
        with self._lock:
            kept = self._kept.get(body)
            if kept is not None:
                self._kept.move_to_end(body)
                return kept
        made = _split(body)
        with self._lock:
            self._kept[body] = made
            while len(self._kept) > MEMO_BODIES:
                self._kept.popitem(last=False)
        return made


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    label: str
    terms: frozenset[str]
    relevance: float
    place: tuple[str, int]


def evidence_lines(
    question: str,
    chunks: Sequence[PromptChunk],
    *,
    lines: int,
    count: Callable[[str], int],
    token_budget: int = TOKEN_BUDGET,
    memo: "SentenceMemo | None" = None,
) -> str:
    """At most `lines` sentences over all chunks, most relevant last; empty when none shares a word.

    A sentence scores the rarity of the question's words in it, over its length; up to half of that hangs on its
    chunk's relevance. The best sentence may take the whole `token_budget` (by `count`), the next what is left; one
    that is too long is cut between words, around those of the question. The order of `chunks` does not matter.
    """
    wanted = terms_of(question)
    if lines <= 0 or not wanted:
        return ""
    split = _split if memo is None else memo.of
    found = [sentence for chunk in chunks for sentence in _found(chunk, split(chunk.body))]
    scores = _scores(wanted, found)
    ranked = sorted(
        (place for place, score in enumerate(scores) if score > 0),
        key=lambda place: (-scores[place], -found[place].relevance, found[place].place),
    )
    quoted: dict[str, str] = {}
    left = token_budget
    for place in ranked:
        if len(quoted) == lines or left < LEAST_QUOTE_TOKENS:
            break
        sentence = found[place]
        if sentence.text in quoted:
            continue
        text = _cut(sentence.text, left, wanted, count)
        quoted[sentence.text] = f"[{sentence.label}] “{text}”"
        left -= count(text)
    if not quoted:
        return ""
    return "\n".join([EVIDENCE_MARK, *reversed(quoted.values())])


def sentence_scores(question: str, chunks: Sequence[PromptChunk]) -> list[list[float]]:
    """For each chunk the scores by which its sentences, in order, are quoted; 0 for those that share no word."""
    found = [_found(chunk, _split(chunk.body)) for chunk in chunks]
    scores = iter(_scores(terms_of(question), [sentence for chunk in found for sentence in chunk]))
    return [[next(scores) for _ in chunk] for chunk in found]


def most_tokens(lines: int, count: Callable[[str], int], token_budget: int = TOKEN_BUDGET) -> int:
    """More than evidence of this many lines can have, its heading, labels and quotation marks included."""
    if lines <= 0:
        return 0
    return token_budget + count(f"{EVIDENCE_MARK}\n\n") + lines * (count("[k0a1b] “”\n") + 4)


def _found(chunk: PromptChunk, sentences: Split) -> list[_Sentence]:
    return [
        _Sentence(text, chunk.label, terms, chunk.relevance, (chunk.label, place))
        for place, (text, terms) in enumerate(sentences)
    ]


def _split(body: str) -> Split:
    return tuple((text, terms_of(text)) for text in sentences(as_data(body)))


def _scores(wanted: frozenset[str], found: Sequence[_Sentence]) -> list[float]:
    if not found:
        return []
    seen_in = Counter(term for sentence in found for term in sentence.terms & wanted)
    rarity = {term: math.log(1 + len(found) / times) for term, times in seen_in.items()}
    mean_terms = sum(len(sentence.terms) for sentence in found) / len(found) or 1.0
    return [
        (1 - RELEVANCE_WEIGHT + RELEVANCE_WEIGHT * sentence.relevance)
        * sum(sorted(rarity[term] for term in sentence.terms & wanted))
        / (1 + LENGTH_WEIGHT * len(sentence.terms) / mean_terms)
        for sentence in found
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
