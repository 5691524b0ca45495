"""Which rows hold which words, as arrays, and their BM25 scores by the bm25s library."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import bm25s
import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]

K1 = 1.2
B = 0.75


@dataclass(frozen=True, slots=True)
class Postings:
    """Which rows hold which words, sorted by word, then row: `counts[i]` times in row position `rows[i]`.

    `starts[w]` to `starts[w + 1]` is the part of word id `w`; `lengths` holds each row's number of words.
    """

    row_ids: Rows
    lengths: NDArray[np.int32]
    rows: NDArray[np.int32]
    counts: NDArray[np.uint16]
    starts: NDArray[np.int64]

    def document_frequencies(self) -> NDArray[np.int64]:
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class Part:
    """Postings with their BM25 scores; `alive` is 1.0 for a row that still exists, 0.0 for a deleted one."""

    postings: Postings
    bm25: bm25s.BM25
    alive: Scores

    @property
    def dead_rows(self) -> int:
        return int(len(self.alive) - np.count_nonzero(self.alive))

    def scores(self, word_ids: NDArray[np.int64]) -> Scores:
        known = word_ids[word_ids < len(self.postings.starts) - 1]
        if not len(known) or not len(self.alive):
            return np.zeros(len(self.alive), dtype=np.float32)
        found: Scores = self.bm25.get_scores_from_ids(known, weight_mask=self.alive)
        return found


def postings_of(row_ids: Rows, documents: Sequence[NDArray[np.int32]], word_count: int) -> Postings:
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    flat = np.concatenate(documents) if documents else np.zeros(0, np.int32)
    rows = np.repeat(np.arange(len(documents), dtype=np.int64), lengths)
    keys, counts = np.unique((flat.astype(np.int64) << 32) | rows, return_counts=True)
    return _sorted_postings(row_ids, lengths, keys, counts, word_count)


def _sorted_postings(
    row_ids: Rows, lengths: NDArray[np.int32], keys: NDArray[np.int64], counts: NDArray[np.int64], word_count: int
) -> Postings:
    """`keys` are word id << 32 | row position, ascending and distinct."""
    starts = np.zeros(word_count + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys >> 32, minlength=word_count), out=starts[1:])
    return Postings(
        row_ids,
        lengths,
        (keys & 0xFFFFFFFF).astype(np.int32),
        np.minimum(counts, np.iinfo(np.uint16).max).astype(np.uint16),
        starts,
    )


def joined(parts: Sequence[Postings], alive_first: Scores | None, word_count: int) -> Postings:
    """One set of postings, the rows of the parts in turn, without the dead rows of the first part."""
    keys, counts, row_ids, lengths = [], [], [], []
    offset = 0
    for number, part in enumerate(parts):
        keep = np.ones(len(part.row_ids), dtype=bool)
        if number == 0 and alive_first is not None:
            keep = alive_first > 0
        renumbered = np.cumsum(keep) - 1 + offset
        word_ids = np.repeat(np.arange(len(part.starts) - 1, dtype=np.int64), part.document_frequencies())
        kept = keep[part.rows]
        keys.append((word_ids[kept] << 32) | renumbered[part.rows[kept]])
        counts.append(part.counts[kept])
        row_ids.append(part.row_ids[keep])
        lengths.append(part.lengths[keep])
        offset += int(keep.sum())
        word_count = max(word_count, len(part.starts) - 1)
    joined_keys, joined_counts = np.concatenate(keys), np.concatenate(counts).astype(np.int64)
    order = np.argsort(joined_keys, kind="stable")
    return _sorted_postings(
        np.concatenate(row_ids), np.concatenate(lengths), joined_keys[order], joined_counts[order], word_count
    )


def scored(postings: Postings, weights_by_word: NDArray[np.float64], mean_length: float | None = None) -> Part:
    """Scores as bm25s computes them (Lucene's variant), laid out as its index, without its loop over documents."""
    average = mean_length or average_length(postings)
    bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
    counts = postings.counts.astype(np.float32)
    norm = (K1 * (1 - B + B * postings.lengths / average)).astype(np.float32)
    weights = np.repeat(
        weights_by_word[: len(postings.starts) - 1].astype(np.float32), postings.document_frequencies()
    )
    bm25.nonoccurrence_array = None
    bm25.scores = {
        "data": weights * counts / (norm[postings.rows] + counts),
        "indices": postings.rows,
        "indptr": postings.starts,
        "num_docs": len(postings.row_ids),
    }
    return Part(postings, bm25, np.ones(len(postings.row_ids), dtype=np.float32))


def without(part: Part, removed: Rows) -> Part:
    gone = np.isin(part.postings.row_ids, removed)
    return replace(part, alive=np.where(gone, np.float32(0), part.alive)) if gone.any() else part


def idf(*parts: Postings) -> NDArray[np.float64]:
    frequencies = np.zeros(0, dtype=np.int64)
    for part in parts:
        frequencies = add_frequencies(frequencies, part.document_frequencies())
    return idf_of(frequencies, max(1, sum(len(part.row_ids) for part in parts)))


def idf_of(frequencies: NDArray[np.generic], rows: int) -> NDArray[np.float64]:
    seen = np.minimum(frequencies.astype(np.float64), rows)
    return np.log(1 + (rows - seen + 0.5) / (seen + 0.5))


def average_length(*parts: Postings) -> float:
    rows = sum(len(part.lengths) for part in parts)
    total = sum(int(part.lengths.sum()) for part in parts)
    return total / rows if total else 1.0


def add_frequencies(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(max(len(first), len(second)), dtype=np.int64)
    total[: len(first)] += first
    total[: len(second)] += second
    return total
