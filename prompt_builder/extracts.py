"""The forms that a chunk can take in a prompt: whole, or its sentences that are nearest to the question."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from prompt_builder.knapsack import Form
from prompt_builder.labels import as_data, first_line
from prompt_builder.sentences import split, terms_of
from prompt_builder.types import PromptChunk, Tokenizer
from retrieval.types import RenderedChunk

MOST_EXTRACTS = 4
MEMO_CHUNKS = 1024
GAP = "…"


@dataclass(frozen=True, slots=True)
class Nearness:
    """Where in a chunk that holds the answer it stands: a softmax over its sentences, mixed with one by length.

    The logit of a sentence is `overlap` times its overlap with the question (the share of the question's rarity that
    its words hold, see `overlaps`) plus `length` times the logarithm of its tokens. `floor` is the part by length.
    """

    overlap: float
    length: float
    floor: float


FITTED = Nearness(overlap=11.69, length=-0.48, floor=0.047)


@dataclass(frozen=True, slots=True)
class _Split:
    """A chunk in pieces that are tokenized one by one. `places` gives the sentences that hold a term."""

    head: str
    head_ids: tuple[int, ...]
    head_tokens: int
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    opens_line: tuple[bool, ...]
    ends_line: tuple[bool, ...]
    additive: bool
    places: dict[str, tuple[int, ...]]
    log_tokens: NDArray[np.float64]
    share: NDArray[np.float64]


class Extracts:
    """Forms of chunks for a question. Keeps the sentences of the MEMO_CHUNKS last used chunks; safe to share.

    An extract's token ids are those of its text, as if it were tokenized in one piece: pieces are joined only where
    that gives the same.
    """

    def __init__(self, tokenizer: Tokenizer, nearness: Nearness = FITTED) -> None:
        self._tokenizer = tokenizer
        self._nearness = nearness
        self._memo: OrderedDict[tuple[str, str, str], _Split] = OrderedDict()
        self._lock = Lock()
        self._additive = _joins(tokenizer)
        self._gaps = {
            text: (tokenizer.encode(text), tokenizer.count(text))
            for text in (GAP, f" {GAP}", f"{GAP}\n", f" {GAP}\n", f"{GAP}\n\n", f" {GAP}\n\n")
        }

    def forms(self, question: str, chunks: Sequence[PromptChunk]) -> list[tuple[Form, ...]]:
        """For each chunk its useful forms, smallest first: each larger one is worth more; the last one is the whole.

        The value of the whole is the chunk's relevance, that of an extract the part of it that the extract is
        expected to hold.
        """
        splits = [self._split(chunk) for chunk in chunks]
        inside = self._inside(terms_of(question), splits)
        return [self._of(chunk, parts, chances) for chunk, parts, chances in zip(chunks, splits, inside, strict=True)]

    def chances(self, question: str, chunks: Sequence[PromptChunk]) -> list[list[float]]:
        """For each chunk the probability of each sentence to hold the answer, if the chunk holds it."""
        return self._inside(terms_of(question), [self._split(chunk) for chunk in chunks])

    def _inside(self, wanted: frozenset[str], splits: Sequence[_Split]) -> list[list[float]]:
        if not splits:
            return []
        starts = list(accumulate((len(parts.texts) for parts in splits), initial=0))
        overlap = overlaps(wanted, splits, starts)
        weights = self._nearness
        logits = weights.overlap * overlap
        logits += weights.length * np.concatenate([parts.log_tokens for parts in splits])
        # Overlaps are at most 1 and lengths bounded: no logit is near the end of floating point.
        powers = np.exp(logits)
        firsts = np.array(starts[:-1])
        sizes = np.diff(starts)
        chances = (1 - weights.floor) * powers / np.repeat(np.add.reduceat(powers, firsts), sizes)
        chances += weights.floor * np.concatenate([parts.share for parts in splits])
        flat = chances.tolist()
        return [flat[start:end] for start, end in pairwise(starts)]

    def _of(self, chunk: PromptChunk, parts: _Split, chances: Sequence[float]) -> tuple[Form, ...]:
        whole_tokens = len(chunk.rendered.token_ids) or self._tokenizer.count(chunk.rendered.text)
        whole = Form(chunk, whole_tokens, chunk.relevance)
        forms: list[Form] = []
        if len(parts.texts) > 1 and chunk.relevance > 0:
            tokens = parts.tokens
            order = sorted(range(len(tokens)), key=lambda place: -chances[place] / tokens[place])
            inside = 0.0
            for size, place in enumerate(order[:MOST_EXTRACTS], 1):
                inside += chances[place]
                text, ids, count = self._joined(parts, sorted(order[:size]))
                if count >= whole_tokens:
                    break
                rendered = RenderedChunk(chunk.label, text, ids)
                forms.append(
                    Form(replace(chunk, rendered=rendered, form="extract"), count, chunk.relevance * min(1.0, inside))
                )
        return (*forms, whole)

    def _joined(self, parts: _Split, places: Sequence[int]) -> tuple[str, tuple[int, ...], int]:
        texts, ids, count = [parts.head], [parts.head_ids], parts.head_tokens
        expected, open_line = 0, True
        for place in places:
            if place != expected:
                gap = f"{'' if open_line else ' '}{GAP}{chr(10) if parts.opens_line[place] else ''}"
                gap_ids, gap_tokens = self._gaps[gap]
                texts.append(gap)
                ids.append(gap_ids)
                count += gap_tokens
            texts.append(parts.texts[place])
            ids.append(parts.ids[place])
            count += parts.tokens[place]
            expected, open_line = place + 1, parts.ends_line[place]
        if expected != len(parts.texts):
            gap = f"{'' if open_line else ' '}{GAP}\n\n"
            gap_ids, gap_tokens = self._gaps[gap]
            texts.append(gap)
            ids.append(gap_ids)
            count += gap_tokens
        text = "".join(texts)
        if parts.additive:
            return text, tuple(token_id for piece in ids for token_id in piece), count
        whole_ids = self._tokenizer.encode(text)
        return text, whole_ids, len(whole_ids) or self._tokenizer.count(text)

    def _split(self, chunk: PromptChunk) -> _Split:
        key = (chunk.label, chunk.title, chunk.body)
        with self._lock:
            kept = self._memo.get(key)
            if kept is not None:
                self._memo.move_to_end(key)
                return kept
        made = self._made(chunk)
        with self._lock:
            self._memo[key] = made
            while len(self._memo) > MEMO_CHUNKS:
                self._memo.popitem(last=False)
        return made

    def _made(self, chunk: PromptChunk) -> _Split:
        found = split(as_data(chunk.body).strip())
        texts, opens_line, ends_line = [], [], []
        spaced, opens = True, True
        for place, sentence in enumerate(found):
            last = place == len(found) - 1
            end = "\n\n" if last else sentence.after.strip(" ")
            texts.append(f"{'' if opens else ' '}{sentence.text}{end}")
            opens_line.append(opens)
            ends_line.append(end != "")
            spaced = spaced and (last or sentence.after != "")
            opens = sentence.after != " "
        if not found:
            texts, opens_line, ends_line = ["\n\n"], [True], [True]
        places: dict[str, list[int]] = {}
        for place, sentence in enumerate(found):
            for term in terms_of(sentence.text):
                places.setdefault(term, []).append(place)
        ids = tuple(self._tokenizer.encode(text) for text in texts)
        tokens = tuple(len(piece) or self._tokenizer.count(text) or 1 for piece, text in zip(ids, texts, strict=True))
        head = f"{first_line(chunk.label, chunk.title)}\n"
        lengths = np.array(tokens, dtype=np.float64)
        return _Split(
            head=head,
            head_ids=self._tokenizer.encode(head),
            head_tokens=self._tokenizer.count(head),
            texts=tuple(texts),
            ids=ids,
            tokens=tokens,
            opens_line=tuple(opens_line),
            ends_line=tuple(ends_line),
            additive=self._additive and spaced,
            places={term: tuple(at) for term, at in places.items()},
            log_tokens=np.log(lengths),
            share=lengths / lengths.sum(),
        )


def overlaps(wanted: frozenset[str], splits: Sequence[_Split], starts: Sequence[int]) -> NDArray[np.float64]:
    """For each sentence of all chunks the share of the question's rarity that its words hold, 0 to 1."""
    total = starts[-1]
    overlap = [0.0] * total
    whole = 0.0
    # Sorted: sums of floats must not hang on the order of a set.
    for term in sorted(wanted):
        found = [
            start + place
            for parts, start in zip(splits, starts, strict=False)
            for place in parts.places.get(term, ())
        ]
        if not found:
            continue
        rarity = math.log(1 + total / len(found))
        whole += rarity
        for place in found:
            overlap[place] += rarity
    result = np.array(overlap)
    return result / whole if whole else result


def _joins(tokenizer: Tokenizer) -> bool:
    """Whether sentences that white space parts, tokenized one by one, give the ids of the text that they make."""
    pieces = (
        "[k7f2a] Fähre (2)\n",
        "Hunde fahren um 7:30 mit.",
        " “Why?” she asked…",
        f" {GAP}",
        " Bệnh viện mở cửa 24/24\n",
        f"{GAP}\n",
        "- कुत्ते मुफ़्त हैं।",
        f" {GAP}\n",
        "Собаки (да!)\n",
        f"{GAP}\n\n",
    )
    whole = "".join(pieces)
    joined = tuple(token_id for piece in pieces for token_id in tokenizer.encode(piece))
    return tokenizer.encode(whole) == joined and tokenizer.count(whole) == sum(map(tokenizer.count, pieces))
