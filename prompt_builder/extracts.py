"""The forms that a chunk can take in a prompt: whole, or its sentences that are nearest to the question."""

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from prompt_builder.knapsack import Form
from prompt_builder.labels import as_data, first_line
from prompt_builder.sentences import Sentence, clauses, split, terms_of
from prompt_builder.types import PromptChunk, Tokenizer
from retrieval.types import RenderedChunk

# Sentences longer than this are cut into clauses of at least so many tokens: in languages that the tokenizer knows
# little of, one sentence may be half of the budget.
LONG_SENTENCE_TOKENS = 60
LEAST_CLAUSE_TOKENS = 24
# Pieces of an extract at most: many for chunks that matter, few for those behind.
MOST_PIECES = 6
MOST_PIECES_BEHIND = 2
FRONT_CHUNKS = 4
MEMO_CHUNKS = 1024
GAP = "…"
NEWLINE = "\n"
# Larger extracts that hold hardly more are not worth a look.
LEAST_GAIN = 0.005


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


@dataclass(frozen=True, slots=True)
class Chances:
    """Of one chunk that holds the answer: the probability that a piece holds it (`alone`), or only the piece with the
    next one (`across`). Together they sum to 1."""

    alone: list[float]
    across: list[float]


class Extracts:
    """Forms of chunks for a question. Keeps the sentences of the MEMO_CHUNKS last used chunks; safe to share.

    An extract's token ids are those of its text, as if it were tokenized in one piece: pieces are joined only where
    that gives the same.
    """

    def __init__(self, tokenizer: Tokenizer, nearness: Nearness = FITTED) -> None:
        self._tokenizer = tokenizer
        self._nearness = nearness
        self._memo: OrderedDict[tuple[str, str, str], Pieces] = OrderedDict()
        self._lock = Lock()
        self._additive = _joins(tokenizer)
        # By whether the text before ends a line, and whether the piece behind begins one.
        self._between = {
            (ended, begins): self._mark(f"{'' if ended else ' '}{GAP}{NEWLINE if begins else ''}")
            for ended in (False, True)
            for begins in (False, True)
        }
        self._behind = {ended: self._mark(f"{'' if ended else ' '}{GAP}\n\n") for ended in (False, True)}

    def forms(self, question: str, chunks: Sequence[PromptChunk]) -> list[tuple[Form, ...]]:
        """For each chunk, most relevant first, its useful forms: each costs and is worth more than the one before.

        The value of the whole, which is the last, is the chunk's relevance; that of an extract is the part of it that
        the extract is expected to hold.
        """
        pieces = [self.pieces(chunk) for chunk in chunks]
        chances = chances_of(terms_of(question), pieces, self._nearness)
        return [
            self._forms(chunk, parts, chance, MOST_PIECES if rank < FRONT_CHUNKS else MOST_PIECES_BEHIND)
            for rank, (chunk, parts, chance) in enumerate(zip(chunks, pieces, chances, strict=True))
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
                    rendered = self.extract(chunk.label, pieces, places)
                    count = tokens if pieces.additive else self._count(rendered)
                    if count < whole_tokens:
                        shown = replace(chunk, rendered=rendered, form="extract")
                        forms.append(Form(shown, count, chunk.relevance * inside))
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

    def pieces(self, chunk: PromptChunk) -> Pieces:
        """The chunk's sentences and clauses, kept for the next question."""
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
        cut = [self._cut(sentence) for sentence in split(as_data(chunk.body).strip())] or [[Sentence("", "")]]
        flat = [piece for sentence in cut for piece in sentence]
        befores = [NEWLINE, *(piece.after for piece in flat[:-1])]
        afters = [*(NEWLINE if piece.after == NEWLINE else "" for piece in flat[:-1]), NEWLINE * 2]
        texts = tuple(
            f"{' ' if before == ' ' else ''}{as_data(piece.text) if before == NEWLINE else piece.text}{after}"
            for before, piece, after in zip(befores, flat, afters, strict=True)
        )
        places: dict[str, list[int]] = {}
        for place, piece in enumerate(flat):
            for term in terms_of(piece.text):
                places.setdefault(term, []).append(place)
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
            places={
                term: (tuple(at), tuple(dict.fromkeys(sentence[place] for place in at)))
                for term, at in places.items()
            },
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


@dataclass(frozen=True, slots=True)
class _Mark:
    text: str
    ids: tuple[int, ...]
    tokens: int


def chances_of(wanted: frozenset[str], chunks: Sequence[Pieces], weights: Nearness) -> list[Chances]:
    """Where each chunk would hold the answer to a question of the terms `wanted`."""
    if not chunks:
        return []
    starts = list(accumulate((len(pieces.texts) for pieces in chunks), initial=0))
    firsts = np.array(starts[:-1])
    overlap, of_sentences = overlaps(wanted, chunks)
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


def _sets(pieces: Pieces, chances: Chances, most: int) -> set[tuple[int, ...]]:
    """Pieces that are worth a look together: the likeliest for their tokens, more and more of them, by pieces and by
    whole sentences; and each of the likeliest two alone."""
    alone, tokens = chances.alone, pieces.tokens
    order = sorted(range(len(tokens)), key=lambda place: -alone[place] / tokens[place])
    sets: set[tuple[int, ...]] = {(place,) for place in sorted(order, key=lambda place: -alone[place])[:2]}
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


def overlaps(wanted: frozenset[str], chunks: Sequence[Pieces]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each piece of all chunks the share of the question's rarity that its words hold, and that those of its
    sentence hold, 0 to 1. A word is the rarer the fewer pieces hold it."""
    total = sum(len(pieces.texts) for pieces in chunks)
    of_pieces = [0.0] * total
    of_sentences = [0.0] * sum(len(pieces.spans) for pieces in chunks)
    whole = 0.0
    # Sorted: sums of floats must not hang on the order of a set.
    for term in sorted(wanted):
        first_piece = first_sentence = 0
        in_pieces: list[int] = []
        in_sentences: list[int] = []
        for pieces in chunks:
            found = pieces.places.get(term)
            if found is not None:
                in_pieces += [first_piece + place for place in found[0]]
                in_sentences += [first_sentence + number for number in found[1]]
            first_piece += len(pieces.texts)
            first_sentence += len(pieces.spans)
        if not in_pieces:
            continue
        rarity = math.log(1 + total / len(in_pieces))
        whole += rarity
        for place in in_pieces:
            of_pieces[place] += rarity
        for number in in_sentences:
            of_sentences[number] += rarity
    spans = [span for pieces in chunks for span in pieces.spans]
    scale = 1 / (whole or 1.0)
    return np.array(of_pieces) * scale, np.repeat(np.array(of_sentences), spans) * scale


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
