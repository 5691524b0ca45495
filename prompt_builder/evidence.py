"""Evidence lines: the few sentences of the chunks that are nearest to the question, quoted with labels."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prompt_builder.labels import EVIDENCE_MARK, as_data
from prompt_builder.types import PromptChunk

TOKEN_BUDGET = 60
MAX_SENTENCE_CHARS = 320
LENGTH_WEIGHT = 0.5

_SENTENCE_END = re.compile(r"(?<=[.!?…۔؟।॥։።])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？｡])|\n+")
_CLAUSE_END = re.compile(r"(?<=[,;:،、，；])\s*|\s+")
_ABBREVIATION = re.compile(r"(?:^|[\s(])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|vs|e\.g|i\.e)\.$")
# Scripts written without spaces are compared by pairs of letters, all others by words.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af"
_TERMS = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")
_UNSPACED_START = re.compile(f"[{_UNSPACED}]")


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
) -> str:
    """At most `lines` sentences over all chunks, most relevant last; empty when none shares a word.

    A sentence scores the rarity of the question's words in it, over its length. Together the quotes stay
    within `token_budget` by `count`; a long one is cut at the end of a word. Does not depend on the order
    of `chunks`.
    """
    wanted = _terms_of(question)
    if lines <= 0 or not wanted:
        return ""
    sentences = [sentence for chunk in chunks for sentence in _sentences_of(chunk)]
    scores = _scores(wanted, sentences)
    ranked = sorted((place for place, score in enumerate(scores) if score > 0), key=lambda i: (
        -scores[i], -sentences[i].relevance, sentences[i].place,
    ))  # fmt: skip
    quoted: dict[str, str] = {}
    left = token_budget
    for place in ranked:
        if len(quoted) == lines or left <= 4:
            break
        sentence = sentences[place]
        if sentence.text in quoted:
            continue
        share = left // (lines - len(quoted))
        text = _cut(sentence.text, share, count)
        if text:
            quoted[sentence.text] = f"[{sentence.label}] “{text}”"
            left -= count(text)
    if not quoted:
        return ""
    return "\n".join([EVIDENCE_MARK, *reversed(quoted.values())])


def most_tokens(lines: int, count: Callable[[str], int], token_budget: int = TOKEN_BUDGET) -> int:
    """More than evidence of this many lines can have, its heading, labels and quotation marks included."""
    if lines <= 0:
        return 0
    return token_budget + count(f"{EVIDENCE_MARK}\n\n") + lines * (count("[k0a1b] “”\n") + 4)


def sentences(text: str) -> list[str]:
    """Sentences of text in any script, white space collapsed; very long ones are cut between words."""
    found: list[str] = []
    held = ""
    for part in _SENTENCE_END.split(text):
        joined = f"{held} {part}".strip() if held else part.strip()
        if _ABBREVIATION.search(joined[-8:]):
            held = joined
            continue
        held = ""
        found.extend(_pieces(" ".join(joined.split())))
    found.extend(_pieces(" ".join(held.split())))
    return found


def _sentences_of(chunk: PromptChunk) -> list[_Sentence]:
    return [
        _Sentence(text, chunk.label, _terms_of(text), chunk.relevance, (chunk.label, place))
        for place, text in enumerate(sentences(as_data(chunk.body)))
    ]


def _scores(wanted: frozenset[str], found: Sequence[_Sentence]) -> list[float]:
    if not found:
        return []
    seen_in = Counter(term for sentence in found for term in sentence.terms & wanted)
    rarity = {term: math.log(1 + len(found) / times) for term, times in seen_in.items()}
    mean_terms = sum(len(sentence.terms) for sentence in found) / len(found) or 1.0
    return [
        sum(sorted(rarity[term] for term in sentence.terms & wanted))
        / (1 + LENGTH_WEIGHT * len(sentence.terms) / mean_terms)
        for sentence in found
    ]


def _terms_of(text: str) -> frozenset[str]:
    """Words cut to six letters, which forgives most endings; pairs of letters where words are not spaced."""
    terms: set[str] = set()
    for run in _TERMS.findall(text.casefold()):
        if _UNSPACED_START.match(run):
            terms.update(run[place : place + 2] for place in range(max(1, len(run) - 1)))
        else:
            terms.add(run[:6])
    return frozenset(terms)


def _pieces(sentence: str) -> list[str]:
    """Long sentences, and text without full stops (Thai, lists), in pieces that end between clauses or words."""
    if not sentence:
        return []
    if len(sentence) <= MAX_SENTENCE_CHARS:
        return [sentence]
    pieces: list[str] = []
    piece = ""
    for clause in _CLAUSE_END.split(sentence):
        for part in (clause[at : at + MAX_SENTENCE_CHARS] for at in range(0, len(clause), MAX_SENTENCE_CHARS)):
            if piece and len(piece) + len(part) >= MAX_SENTENCE_CHARS // 2:
                pieces.append(piece)
                piece = part
            else:
                piece = f"{piece} {part}".strip()
    return [*pieces, piece] if piece else pieces


def _cut(text: str, most_tokens: int, count: Callable[[str], int]) -> str:
    """The longest start of `text` that ends after a word and has at most `most_tokens` with its ellipsis."""
    if count(text) <= most_tokens:
        return text
    ends = [match.end() for match in re.finditer(r"\S+", text)][:-1]
    if not ends or len(text) / len(ends) > 20:
        ends = list(range(1, len(text)))
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[: ends[middle - 1]] + " …") <= most_tokens:
            low = middle
        else:
            high = middle - 1
    return text[: ends[low - 1]].rstrip() + " …" if low else ""
