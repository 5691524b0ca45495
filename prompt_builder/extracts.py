"""The forms that a chunk can take in a prompt: whole, or its sentences that are nearest to the question."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter

from prompt_builder.bodies import SentenceMemo
from prompt_builder.knapsack import Form
from prompt_builder.nearness import FITTED, Chances, Nearness, chances_of
from prompt_builder.pieces import GAP, NEWLINE, Cutter, Pieces
from prompt_builder.sentences import terms_of
from prompt_builder.types import PromptChunk, Tokenizer
from retrieval.types import RenderedChunk

# Pieces of an extract at most: many for chunks that matter, few for those behind.
MOST_PIECES = 6
MOST_PIECES_BEHIND = 2
FRONT_CHUNKS = 4
# Larger extracts that hold hardly more are not worth a look.
LEAST_GAIN = 0.005


class Extracts:
    """Forms of chunks for a question; safe to share between threads.

    An extract's token ids are those of its text, as if it were tokenized in one piece: pieces are joined only where
    that gives the same.
    """

    def __init__(self, tokenizer: Tokenizer, nearness: Nearness = FITTED, memo: SentenceMemo | None = None) -> None:
        self._tokenizer = tokenizer
        self._nearness = nearness
        self._cutter = Cutter(tokenizer, memo)
        # By whether the text before ends a line, and whether the piece behind begins one.
        self._between = {
            (ended, begins): self._mark(f"{'' if ended else ' '}{GAP}{NEWLINE if begins else ''}")
            for ended in (False, True)
            for begins in (False, True)
        }
        self._behind = {ended: self._mark(f"{'' if ended else ' '}{GAP}\n\n") for ended in (False, True)}

    def forms(self, question: str, chunks: Sequence[PromptChunk], most: int | None = None) -> list[tuple[Form, ...]]:
        """For each chunk, most relevant first, its useful forms: each costs and is worth more than the one before.

        The value of the whole, which is the last, is the chunk's relevance; that of an extract is the part of it that
        the extract is expected to hold. With `most` of the first so many chunks; what words are rare in hangs on all.
        """
        pieces = [self._cutter.of(chunk) for chunk in chunks]
        chances = chances_of(terms_of(question), pieces, self._nearness, most)
        return [
            self._forms(chunk, parts, chance, MOST_PIECES if rank < FRONT_CHUNKS else MOST_PIECES_BEHIND)
            for rank, (chunk, parts, chance) in enumerate(zip(chunks, pieces, chances, strict=False))
        ]

    def _forms(self, chunk: PromptChunk, pieces: Pieces, chances: Chances, most_pieces: int) -> tuple[Form, ...]:
        whole_tokens = len(chunk.rendered.token_ids) or self._tokenizer.count(chunk.rendered.text)
        forms: list[Form] = []
        if len(pieces.texts) > 1 and chunk.relevance > 0:
            measured = sorted(
                self._measured(pieces, chances, places) for places in _sets(pieces, chances, most_pieces)
            )
            best = 0.0
            for tokens, missing, places in measured:
                inside = 1 - missing
                if tokens >= whole_tokens:
                    break
                if inside > best + LEAST_GAIN:
                    best = inside
                    extract = partial(self.extract, chunk.label, pieces, places)
                    count = tokens if pieces.additive else self._count(extract())
                    if count < whole_tokens:
                        forms.append(Form(chunk, count, chunk.relevance * inside, extract))
        return (*forms, Form(chunk, whole_tokens, chunk.relevance))

    def _measured(
        self, pieces: Pieces, chances: Chances, places: tuple[int, ...]
    ) -> tuple[int, float, tuple[int, ...]]:
        """Tokens of an extract, and the probability that it lacks the answer."""
        tokens, inside, expected, ended = pieces.head_tokens, 0.0, 0, True
        for place in places:
            if place != expected:
                tokens += self._between[ended, pieces.begins_line[place]].tokens
            elif place:
                inside += chances.across[place - 1]
            tokens += pieces.tokens[place]
            inside += chances.alone[place]
            expected, ended = place + 1, pieces.ends_line[place]
        if expected != len(pieces.texts):
            tokens += self._behind[ended].tokens
        return tokens, 1 - inside, places

    def extract(self, label: str, pieces: Pieces, places: Sequence[int]) -> RenderedChunk:
        """The block of these pieces, in order, with a mark where text is missing."""
        texts, ids = [pieces.head], [pieces.head_ids]
        expected, ended = 0, True
        for place in places:
            if place != expected:
                mark = self._between[ended, pieces.begins_line[place]]
                texts.append(mark.text)
                ids.append(mark.ids)
            texts.append(pieces.texts[place])
            ids.append(pieces.ids[place])
            expected, ended = place + 1, pieces.ends_line[place]
        if expected != len(pieces.texts):
            texts.append(self._behind[ended].text)
            ids.append(self._behind[ended].ids)
        text = "".join(texts)
        joined = tuple(chain.from_iterable(ids)) if pieces.additive else self._tokenizer.encode(text)
        return RenderedChunk(label, text, joined)

    def _mark(self, text: str) -> "_Mark":
        return _Mark(text, self._tokenizer.encode(text), self._tokenizer.count(text))

    def _count(self, rendered: RenderedChunk) -> int:
        return len(rendered.token_ids) or self._tokenizer.count(rendered.text)


@dataclass(frozen=True, slots=True)
class _Mark:
    text: str
    ids: tuple[int, ...]
    tokens: int


def _sets(pieces: Pieces, chances: Chances, most: int) -> set[tuple[int, ...]]:
    """Pieces that are worth a look together: the likeliest for their tokens, more and more of them, by pieces and by
    whole sentences; and each of the likeliest two alone."""
    alone, tokens = chances.alone, pieces.tokens
    rates = [chance / size for chance, size in zip(alone, tokens, strict=True)]
    order = sorted(range(len(tokens)), key=rates.__getitem__, reverse=True)
    sets: set[tuple[int, ...]] = {(place,) for place in sorted(order, key=alone.__getitem__, reverse=True)[:2]}
    taken: list[int] = []
    for place in order[:most]:
        insort(taken, place)
        sets.add(tuple(taken))
    if len(pieces.spans) == len(tokens):
        return sets
    sentences = []
    first = 0
    for span in pieces.spans:
        last = first + span
        inside = sum(alone[first:last]) + sum(chances.across[first:last])
        sentences.append((-inside / sum(tokens[first:last]), range(first, last)))
        first = last
    taken = []
    for _, places in sorted(sentences, key=itemgetter(0))[:most]:
        taken = sorted([*taken, *places])
        sets.add(tuple(taken))
    return sets
