"""Chunks in sentences and clauses, each tokenized by itself."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from prompt_builder.bodies import Body, SentenceMemo
from prompt_builder.labels import as_data, first_line
from prompt_builder.sentences import Sentence, clauses, terms_of
from prompt_builder.types import PromptChunk, Tokenizer

# Sentences longer than this are cut into clauses of at least so many tokens: in languages that the tokenizer knows
# little of, one sentence may be half of the budget.
LONG_SENTENCE_TOKENS = 60
LEAST_CLAUSE_TOKENS = 24
MEMO_CHUNKS = 512
GAP = "…"
NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class Pieces:
    """A chunk in sentences and clauses, tokenized one by one.

    `places` gives the pieces and the sentences that hold a term; `sentence` the sentence of each piece, and `spans`
    the number of pieces of each sentence; `inner` is 1 for a piece that the next one continues. `additive`:
    the ids of neighbouring pieces joined are those of their text.
    """

    head: str
    head_ids: tuple[int, ...]
    head_tokens: int
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    begins_line: tuple[bool, ...]
    ends_line: tuple[bool, ...]
    sentence: tuple[int, ...]
    additive: bool
    places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    spans: tuple[int, ...]
    log_tokens: NDArray[np.float64]
    share: NDArray[np.float64]
    inner: NDArray[np.float64]


class Cutter:
    """Cuts chunks, whose sentences `memo` keeps. Keeps the pieces of the MEMO_CHUNKS last used; safe to share."""

    def __init__(self, tokenizer: Tokenizer, memo: SentenceMemo | None = None) -> None:
        self._tokenizer = tokenizer
        self._sentences = memo or SentenceMemo()
        self._memo: OrderedDict[tuple[str, str, str], Pieces] = OrderedDict()
        self._lock = Lock()
        self._additive = _joins(tokenizer)

    def of(self, chunk: PromptChunk) -> Pieces:
        """The chunk's sentences and clauses."""
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

    def _made(self, chunk: PromptChunk) -> Pieces:
        body = self._sentences.of(chunk.body)
        cut = [self._cut(sentence) for sentence in body.sentences] or [[Sentence("", "")]]
        flat = [piece for sentence in cut for piece in sentence]
        befores = [NEWLINE, *(piece.after for piece in flat[:-1])]
        afters = [*(NEWLINE if piece.after == NEWLINE else "" for piece in flat[:-1]), NEWLINE * 2]
        texts = tuple(
            f"{' ' if before == ' ' else ''}{as_data(piece.text) if before == NEWLINE else piece.text}{after}"
            for before, piece, after in zip(befores, flat, afters, strict=True)
        )
        sentence = tuple(number for number, parts in enumerate(cut) for _ in parts)
        ids = tuple(self._tokenizer.encode(text) for text in texts)
        tokens = tuple(len(known) or self._tokenizer.count(text) for known, text in zip(ids, texts, strict=True))
        lengths = np.maximum(np.array(tokens, dtype=np.float64), 1.0)
        head = f"{first_line(chunk.label, chunk.title)}\n"
        return Pieces(
            head=head,
            head_ids=self._tokenizer.encode(head),
            head_tokens=self._tokenizer.count(head),
            texts=texts,
            ids=ids,
            tokens=tokens,
            begins_line=tuple(before == NEWLINE for before in befores),
            ends_line=tuple(after != "" for after in afters),
            sentence=sentence,
            additive=self._additive and "" not in befores,
            places=_places(body, cut),
            spans=tuple(map(len, cut)),
            log_tokens=np.log(lengths),
            share=lengths / lengths.sum(),
            inner=np.array([*(one == other for one, other in pairwise(sentence)), False], dtype=np.float64),
        )

    def _cut(self, sentence: Sentence) -> list[Sentence]:
        """A long sentence in clauses, each with at least LEAST_CLAUSE_TOKENS."""
        if self._tokenizer.count(sentence.text) <= LONG_SENTENCE_TOKENS:
            return [sentence]
        parts: list[Sentence] = []
        held: Sentence | None = None
        for clause in clauses(sentence.text):
            joined = clause if held is None else Sentence(f"{held.text}{held.after}{clause.text}", clause.after)
            held = None if self._tokenizer.count(joined.text) >= LEAST_CLAUSE_TOKENS else joined
            if held is None:
                parts.append(joined)
        if held is not None and parts:
            last = parts.pop()
            held = Sentence(f"{last.text}{last.after}{held.text}", "")
        if held is not None:
            parts.append(held)
        return [*parts[:-1], Sentence(parts[-1].text, sentence.after)]


def _places(body: Body, cut: Sequence[Sequence[Sentence]]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each term the pieces and the sentences that hold it."""
    starts = list(accumulate(map(len, cut), initial=0))
    in_parts = {number: [terms_of(part.text) for part in parts] for number, parts in enumerate(cut) if len(parts) > 1}
    found = {}
    for term, numbers in body.places.items():
        at: list[int] = []
        for number in numbers:
            if number in in_parts:
                at += [starts[number] + part for part, terms in enumerate(in_parts[number]) if term in terms]
            else:
                at.append(starts[number])
        found[term] = (tuple(at), numbers)
    return found


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
