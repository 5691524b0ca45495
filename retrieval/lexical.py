"""BM25 over the words of chunks: a large main part, a small part of newer rows, and masks for deleted ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from retrieval.postings import (
    Part,
    Postings,
    Rows,
    Scores,
    add_frequencies,
    average_length,
    idf,
    idf_of,
    joined,
    postings_of,
    scored,
    without,
)
from retrieval.words import words

# Below this many rows everything is one part, so that scores are exact; above, new rows wait in a part of their own.
SMALL_ROWS = 4_000
MAX_NEWER_ROWS = 500
MAX_NEWER_SHARE = 0.1
MAX_DEAD_SHARE = 0.2
# Where a query would touch more postings than this, its most common words are left out: they cost the most time
# and tell chunks apart the least.
POSTINGS_BUDGET = 120_000


@dataclass(frozen=True, slots=True)
class LexicalMatch:
    """Every row's share of the query: 0 (no word of it) to 1 (all words, each saturated).

    `row_ids` is ascending; `shares` stands beside it.
    """

    row_ids: Rows
    shares: Scores

    def of(self, row_ids: Rows) -> Scores:
        """Shares of these rows; 0 for a row that the index does not hold."""
        if not len(self.row_ids):
            return np.zeros(len(row_ids), dtype=np.float32)
        positions = np.minimum(np.searchsorted(self.row_ids, row_ids), len(self.row_ids) - 1)
        return np.where(self.row_ids[positions] == row_ids, self.shares[positions], np.float32(0))

    def top(self, k: int, allowed: Rows | None = None) -> Rows:
        """The best `k` rows with a share above 0, best first, lower row id first among equals.

        `allowed` (ascending) limits them to these rows.
        """
        shares = self.shares
        if allowed is not None:
            shares = np.where(np.isin(self.row_ids, allowed, assume_unique=True), shares, np.float32(0))
        if len(shares) > k:
            # Everything equal to the k-th best takes part, so that ties are cut by row id and not by chance.
            threshold = np.partition(shares, len(shares) - k)[len(shares) - k]
            positions = np.flatnonzero(shares >= max(threshold, np.float32(1e-9)))
        else:
            positions = np.flatnonzero(shares > 0)
        best = positions[np.lexsort((self.row_ids[positions], -shares[positions]))]
        found: Rows = self.row_ids[best[:k]]
        return found


class LexicalIndex:
    """Immutable: `changed` returns the next one, and searches go on in this one. Blocking; any thread.

    Row ids only grow, so the newer part stands behind the main part and row ids stay ascending. The vocabulary is
    shared by all generations of one store and only grows; a word unknown to a part has no postings in it.
    """

    def __init__(self, vocabulary: dict[str, int], main: Part, newer: Part) -> None:
        self._vocabulary = vocabulary
        self._main = main
        self._newer = newer
        self._frequencies = add_frequencies(
            main.postings.document_frequencies(), newer.postings.document_frequencies()
        )
        self._row_ids = np.concatenate((main.postings.row_ids, newer.postings.row_ids))

    @staticmethod
    def empty() -> "LexicalIndex":
        return LexicalIndex._of({}, postings_of(np.zeros(0, np.int64), [], 0))

    @staticmethod
    def restored(vocabulary: Sequence[str], postings: Postings) -> "LexicalIndex":
        """From what `compacted` gave, as a snapshot kept it."""
        return LexicalIndex._of({word: word_id for word_id, word in enumerate(vocabulary)}, postings)

    @staticmethod
    def _of(vocabulary: dict[str, int], postings: Postings) -> "LexicalIndex":
        nothing = postings_of(np.zeros(0, np.int64), [], 0)
        return LexicalIndex(vocabulary, scored(postings, idf(postings)), scored(nothing, idf(nothing)))

    def __len__(self) -> int:
        return len(self._row_ids) - self._main.dead_rows - self._newer.dead_rows

    @property
    def held_bytes(self) -> int:
        """About what the index takes in memory: a posting is 10 bytes, a word of the vocabulary about 150."""
        postings = len(self._main.postings.rows) + len(self._newer.postings.rows)
        return 10 * postings + 20 * len(self._row_ids) + 150 * len(self._frequencies)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Words by their id, as far as the postings know them."""
        return tuple(self._vocabulary)[: len(self._frequencies)]

    def match(self, weighted_texts: Mapping[str, float]) -> LexicalMatch:
        """Score all rows against one or more texts, each with its weight; the query's own weight is 1."""
        total = np.zeros(len(self._row_ids), dtype=np.float32)
        possible = 0.0
        for text, weight in weighted_texts.items():
            word_ids, mass = self._query(text)
            total += np.float32(weight) * np.concatenate((self._main.scores(word_ids), self._newer.scores(word_ids)))
            possible += weight * mass
        if possible > 0:
            total /= np.float32(possible)
        return LexicalMatch(self._row_ids, total)

    def changed(self, added: Iterable[tuple[int, str]], removed: Rows) -> "LexicalIndex":
        """The next index: `added` are (row id, text) by ascending row id above all known ones."""
        main, newer = without(self._main, removed), without(self._newer, removed)
        fresh = self._tokenized(added)
        grown = joined([newer.postings, fresh], newer.alive, len(self._vocabulary))
        rows = len(main.alive) + len(grown.row_ids)
        small = rows <= SMALL_ROWS
        outgrown = len(grown.row_ids) > max(MAX_NEWER_ROWS, MAX_NEWER_SHARE * len(main.alive))
        worn = main.dead_rows > MAX_DEAD_SHARE * len(main.alive)
        if small or outgrown or worn:
            whole = joined([main.postings, grown], main.alive, len(self._vocabulary))
            return LexicalIndex._of(*_pruned(self._vocabulary, whole))
        # The newer rows are scored by the words' frequencies in the whole store, as the main rows are.
        weights = idf(main.postings, grown)
        return LexicalIndex(self._vocabulary, main, scored(grown, weights, average_length(main.postings, grown)))

    def compacted(self) -> Postings:
        """All live rows as one part, for a snapshot."""
        live = joined([self._main.postings], self._main.alive, len(self._frequencies))
        return joined([live, joined([self._newer.postings], self._newer.alive, len(self._frequencies))], None, 0)

    def _query(self, text: str) -> tuple[NDArray[np.int64], float]:
        """Word ids to score, and the highest score that a chunk can get for the text's words."""
        distinct = dict.fromkeys(words(text))
        rows = max(len(self), 1)
        known: list[tuple[int, int]] = []
        unknown = 0
        for word in distinct:
            word_id = self._vocabulary.get(word)
            frequency = 0 if word_id is None or word_id >= len(self._frequencies) else int(self._frequencies[word_id])
            if word_id is None or frequency == 0:
                unknown += 1
            else:
                known.append((frequency, word_id))
        known.sort()
        rarity = idf_of(np.array([0, *(frequency for frequency, _ in known)]), rows).tolist()
        chosen: list[int] = []
        mass: float = unknown * rarity[0]
        postings = 0
        for (frequency, word_id), weight in zip(known, rarity[1:], strict=True):
            postings += frequency
            if chosen and postings > POSTINGS_BUDGET:
                break
            chosen.append(word_id)
            mass += weight
        return np.array(chosen, dtype=np.int64), mass

    def _tokenized(self, added: Iterable[tuple[int, str]]) -> Postings:
        vocabulary = self._vocabulary
        row_ids: list[int] = []
        documents: list[NDArray[np.int32]] = []
        for row_id, text in added:
            row_ids.append(row_id)
            # setdefault evaluates the length before it adds, which is the next free id.
            documents.append(
                np.fromiter((vocabulary.setdefault(word, len(vocabulary)) for word in words(text)), dtype=np.int32)
            )
        return postings_of(np.array(row_ids, dtype=np.int64), documents, len(vocabulary))


def _pruned(vocabulary: dict[str, int], postings: Postings) -> tuple[dict[str, int], Postings]:
    """The vocabulary without words that no row holds any more, once they are the majority."""
    used = postings.document_frequencies() > 0
    if np.count_nonzero(used) * 2 >= len(used):
        return vocabulary, postings
    kept = [word for word, is_used in zip(vocabulary, used, strict=True) if is_used]
    # Unused words have no postings, so dropping their ends from `starts` renumbers the rest.
    starts = np.concatenate((postings.starts[:1], postings.starts[1:][used]))
    return {word: word_id for word_id, word in enumerate(kept)}, replace(postings, starts=starts)
