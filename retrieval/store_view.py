"""One store as search sees it at one generation: dense and lexical halves over the same rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import FlatIndex, HnswIndex, inner_products
from retrieval.fusion import DEFAULT_FUSION, Fusion, crowd
from retrieval.lexical import LexicalIndex
from retrieval.postings import Postings
from retrieval.records import ChunkText, StoreChanges

Rows = NDArray[np.int64]
Vector = NDArray[np.float32]

KINDS: Mapping[str, type[FlatIndex] | type[HnswIndex]] = {"flat": FlatIndex, "hnsw": HnswIndex}

# Enough to know the mean of a query's cosines to 3 % of their deviation.
CROWD_ROWS = 1_024


@dataclass(frozen=True, slots=True)
class Hit:
    """A row with its fused score (higher is better); ranks are 1-based, None where a half did not find it."""

    row_id: int
    score: float
    cosine: float
    share: float
    dense_rank: int | None
    lexical_rank: int | None


class StaleRows(Exception):
    """The view lacks rows that it should hold; it has to be made from all rows."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """Immutable; `changed` makes the next one while searches go on in this one. Blocking; any thread."""

    kind: str
    generation: int
    row_ids: Rows
    dense: FlatIndex | HnswIndex
    lexical: LexicalIndex
    sample: Vector

    @staticmethod
    def empty(kind: str, dimension: int) -> "StoreView":
        nothing = np.zeros(0, dtype=np.int64)
        dense = KINDS[kind].empty(dimension)
        return StoreView(kind, -1, nothing, dense, LexicalIndex.empty(), np.zeros((0, dimension), np.float32))

    @property
    def last_row_id(self) -> int:
        return int(self.row_ids[-1]) if len(self.row_ids) else 0

    @property
    def held_bytes(self) -> int:
        """About what the view takes in memory."""
        return self.dense.held_bytes + self.lexical.held_bytes + self.row_ids.nbytes

    def changed(self, changes: StoreChanges) -> "StoreView":
        """The view of `changes.generation`. Raises StaleRows if a live row is neither held nor among the new."""
        removed = np.setdiff1d(self.row_ids, changes.live_row_ids, assume_unique=True)
        expected = len(self.row_ids) - len(removed) + len(changes.row_ids)
        if expected != len(changes.live_row_ids):
            raise StaleRows
        dense = self.dense.changed(changes.row_ids, changes.embeddings, removed)
        return StoreView(
            self.kind,
            changes.generation,
            changes.live_row_ids,
            dense,
            self.lexical.changed(((text.row_id, searched_text(text)) for text in changes.texts), removed),
            _sample(dense, changes.live_row_ids),
        )

    def search(
        self,
        vector: Vector,
        texts: Mapping[str, float],
        k: int,
        allowed: Rows | None = None,
        fusion: Fusion = DEFAULT_FUSION,
        most: int | None = None,
    ) -> list[Hit]:
        """The best of the first `k` of each half, best first, lower row id first among equals; at most `most`.

        `vector` is float32 [dimension] of length 1; `texts` are the query's texts with their weights; `allowed`
        (ascending row ids) limits the rows.
        """
        if not len(self.row_ids):
            return []
        match = self.lexical.match(texts)
        lexical_ids = match.top(k, allowed)
        dense_ids = self.dense.search(vector, k, allowed).row_ids
        pool = np.union1d(lexical_ids, dense_ids)
        shares = match.of(pool)
        cosines = inner_products(self.dense.vectors_of(pool)[1], vector)
        scores = fusion.scores(shares, cosines, crowd(inner_products(self.sample, vector), len(self.row_ids)))
        dense_ranks, lexical_ranks = _ranks(dense_ids), _ranks(lexical_ids)
        # Rounded, so that the last bits of a sum, which depend on the layout of memory, decide nothing.
        order = np.lexsort((pool, -np.round(scores, 6)))[:most]
        columns = (pool[order].tolist(), scores[order].tolist(), cosines[order].tolist(), shares[order].tolist())
        return [
            Hit(row_id, score, cosine, share, dense_ranks.get(row_id), lexical_ranks.get(row_id))
            for row_id, score, cosine, share in zip(*columns, strict=True)
        ]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What a snapshot keeps."""
        postings = self.lexical.compacted()
        vocabulary = "\n".join(self.lexical.vocabulary).encode()
        return {
            "row_ids": self.row_ids,
            "vocabulary": np.frombuffer(vocabulary, dtype=np.uint8),
            "posting_row_ids": postings.row_ids,
            "posting_lengths": postings.lengths,
            "posting_rows": postings.rows,
            "posting_counts": postings.counts,
            "posting_starts": postings.starts,
            **self.dense.state(),
        }

    @staticmethod
    def from_arrays(kind: str, generation: int, arrays: Mapping[str, NDArray[Any]]) -> "StoreView":
        joined = arrays["vocabulary"].tobytes().decode()
        postings = Postings(
            arrays["posting_row_ids"],
            arrays["posting_lengths"],
            arrays["posting_rows"],
            arrays["posting_counts"],
            arrays["posting_starts"],
        )
        dense = KINDS[kind].from_state(arrays)
        row_ids = arrays["row_ids"]
        lexical = LexicalIndex.restored(joined.split("\n") if joined else [], postings)
        return StoreView(kind, generation, row_ids, dense, lexical, _sample(dense, row_ids))


def searched_text(chunk: ChunkText) -> str:
    """What BM25 sees of a chunk: its heading path, where the body does not begin with it, and the body."""
    return chunk.text if not chunk.title or chunk.text.startswith(chunk.title) else f"{chunk.title}\n{chunk.text}"


def _sample(dense: FlatIndex | HnswIndex, row_ids: Rows) -> Vector:
    step = max(1, -(-len(row_ids) // CROWD_ROWS))
    vectors: Vector = dense.vectors_of(row_ids[::step])[1]
    return vectors


def _ranks(row_ids: Rows) -> dict[int, int]:
    return {row_id: rank for rank, row_id in enumerate(row_ids.tolist(), start=1)}
