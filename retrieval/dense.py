"""Nearest embeddings by inner product: FAISS flat (exact), FAISS HNSW, and brute force in numpy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

# The library's own stubs miss half of what is used here.
faiss: Any = _faiss

Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]

MAX_NEWER_ROWS = 500
MAX_NEWER_SHARE = 0.1
MAX_DEAD_SHARE = 0.2

# Measured on 100,000 clustered vectors: recall@10 0.999 at a tenth of a flat search's time.
HNSW_LINKS = 16
HNSW_BUILD_WIDTH = 80
HNSW_SEARCH_WIDTH = 96
# A filter that leaves fewer rows than this share is answered exactly: a graph search would wander among rows
# that it may not return.
HNSW_EXACT_BELOW_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Best first, lower row id first among equals. `scores` are inner products: cosines of unit vectors."""

    row_ids: Rows
    scores: Vectors


@dataclass(frozen=True, slots=True)
class _Part:
    """Vectors in row order. `index` is FAISS's, over positions, or None for plain numpy."""

    row_ids: Rows
    vectors: Vectors
    alive: NDArray[np.bool_]
    index: Any = None


class _Partitioned(ABC):
    """A main part, a small part of newer rows that is searched exactly, and masks for deleted rows.

    An immutable set of vectors by row id; `changed` gives the next one. Blocking; usable from any thread.
    FAISS indexes are not safe to read while they are written, so nothing here is ever written again: a change makes
    a new small part, and now and then a new main part, while searches go on in the old ones.
    """

    def __init__(self, main: _Part, newer: _Part) -> None:
        self._main = main
        self._newer = newer

    @classmethod
    def empty(cls, dimension: int) -> Self:
        return cls.restored(np.zeros(0, np.int64), np.zeros((0, dimension), np.float32))

    @classmethod
    def restored(cls, row_ids: Rows, vectors: Vectors) -> Self:
        """An index of these rows, all in the main part."""
        return cls._of(cls._main_part(row_ids, vectors))

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Self:
        """From what `state` gave, as a snapshot kept it."""
        newer = _Part(state["newer_row_ids"], state["newer_vectors"], np.ones(len(state["newer_row_ids"]), bool))
        main = cls._main_from_state(state)
        return cls(replace(main, alive=state["main_alive"].astype(bool)), newer)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that a snapshot must keep, as arrays."""
        keep = self._newer.alive
        return {
            "main_row_ids": self._main.row_ids,
            "main_alive": self._main.alive,
            "newer_row_ids": self._newer.row_ids[keep],
            "newer_vectors": self._newer.vectors[keep],
            **self._main_state(),
        }

    @classmethod
    def _of(cls, main: _Part) -> Self:
        return cls(main, _Part(np.zeros(0, np.int64), main.vectors[:0], np.zeros(0, bool)))

    @classmethod
    def _main_from_state(cls, state: Mapping[str, NDArray[Any]]) -> _Part:
        return cls._main_part(state["main_row_ids"], state["main_vectors"])

    def _main_state(self) -> dict[str, NDArray[Any]]:
        return {"main_vectors": self._main.vectors}

    @classmethod
    def _merged(cls, main: _Part, row_ids: Rows, vectors: Vectors) -> _Part:
        """A main part with the newer rows in it and the dead ones gone."""
        return cls._main_part(
            np.concatenate((main.row_ids[main.alive], row_ids)), np.concatenate((main.vectors[main.alive], vectors))
        )

    @classmethod
    @abstractmethod
    def _main_part(cls, row_ids: Rows, vectors: Vectors) -> _Part: ...

    @abstractmethod
    def _search_main(self, vector: Vectors, k: int, wanted: NDArray[np.bool_] | None) -> tuple[Rows, Vectors]:
        """Positions in the main part and scores, at least the best `k` of `wanted` (None: all)."""

    def __len__(self) -> int:
        return int(np.count_nonzero(self._main.alive) + np.count_nonzero(self._newer.alive))

    @property
    def dimension(self) -> int:
        return int(self._main.vectors.shape[1])

    @property
    def held_bytes(self) -> int:
        """About what the index takes in memory."""
        return self._main.vectors.nbytes + self._newer.vectors.nbytes

    def search(self, vector: Vectors, k: int, allowed: Rows | None = None) -> Neighbours:
        """At most `k` neighbours of `vector` (float32 [dimension]); `allowed` (ascending) limits the rows."""
        found = []
        for part, search in ((self._main, self._search_main), (self._newer, self._search_newer)):
            wanted: NDArray[np.bool_] | None = part.alive
            if allowed is not None:
                wanted = part.alive & np.isin(part.row_ids, allowed, assume_unique=True)
            elif part.alive.all():
                wanted = None
            held = len(part.row_ids) if wanted is None else int(np.count_nonzero(wanted))
            if held:
                positions, scores = search(vector, min(k, held), wanted)
                found.append((part.row_ids[positions], scores))
        if not found:
            return Neighbours(np.zeros(0, np.int64), np.zeros(0, np.float32))
        row_ids, scores = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((row_ids, -scores))[:k]
        return Neighbours(row_ids[order], scores[order])

    def vectors_of(self, row_ids: Rows) -> tuple[NDArray[np.bool_], Vectors]:
        """Which of these rows are held, and the vectors of all (zeros where not held)."""
        held = np.zeros(len(row_ids), dtype=bool)
        vectors = np.zeros((len(row_ids), self._main.vectors.shape[1]), dtype=np.float32)
        for part in (self._main, self._newer):
            if not len(part.row_ids):
                continue
            positions = np.minimum(np.searchsorted(part.row_ids, row_ids), len(part.row_ids) - 1)
            here = (part.row_ids[positions] == row_ids) & part.alive[positions]
            vectors[here] = part.vectors[positions[here]]
            held |= here
        return held, vectors

    def changed(self, row_ids: Rows, vectors: Vectors, removed: Rows) -> Self:
        """Rows added (ascending, above all known ones; float32 [n, dimension]) and rows removed."""
        main = replace(self._main, alive=self._main.alive & ~np.isin(self._main.row_ids, removed))
        keep = self._newer.alive & ~np.isin(self._newer.row_ids, removed)
        newer_ids = np.concatenate((self._newer.row_ids[keep], row_ids))
        newer_vectors = np.concatenate((self._newer.vectors[keep], vectors.astype(np.float32, copy=False)))
        outgrown = len(newer_ids) > max(MAX_NEWER_ROWS, MAX_NEWER_SHARE * len(main.row_ids))
        if outgrown or _worn(main):
            return self._of(self._merged(main, newer_ids, newer_vectors))
        return type(self)(main, _Part(newer_ids, newer_vectors, np.ones(len(newer_ids), bool)))

    def _search_newer(self, vector: Vectors, k: int, wanted: NDArray[np.bool_] | None) -> tuple[Rows, Vectors]:
        return _exact(self._newer.vectors, vector, k, wanted)


class BruteForce(_Partitioned):
    """Exact, numpy alone: the yardstick of the others."""

    @classmethod
    def _main_part(cls, row_ids: Rows, vectors: Vectors) -> _Part:
        return _Part(row_ids, vectors, np.ones(len(row_ids), bool))

    def _search_main(self, vector: Vectors, k: int, wanted: NDArray[np.bool_] | None) -> tuple[Rows, Vectors]:
        return _exact(self._main.vectors, vector, k, wanted)


class FlatIndex(_Partitioned):
    """Exact: FAISS's flat index. Time grows with the number of rows (5 ms for 100,000 x 384 on one core)."""

    @classmethod
    def _main_part(cls, row_ids: Rows, vectors: Vectors) -> _Part:
        index = faiss.IndexFlatIP(vectors.shape[1])
        if len(vectors):
            index.add(np.ascontiguousarray(vectors))
        return _Part(row_ids, _stored_vectors(index), np.ones(len(row_ids), bool), index)

    def _search_main(self, vector: Vectors, k: int, wanted: NDArray[np.bool_] | None) -> tuple[Rows, Vectors]:
        selector = None if wanted is None else _selector(wanted)
        parameters = None if selector is None else faiss.SearchParameters(sel=selector)
        scores, positions = self._main.index.search(vector[None, :], k, params=parameters)
        return _found(positions[0], scores[0])


class HnswIndex(_Partitioned):
    """Approximate: FAISS's HNSW graph. A filter that leaves few rows is answered exactly."""

    @classmethod
    def _main_part(cls, row_ids: Rows, vectors: Vectors) -> _Part:
        index = faiss.IndexHNSWFlat(vectors.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD_WIDTH
        if len(vectors):
            index.add(np.ascontiguousarray(vectors))
        return _Part(
            row_ids, _stored_vectors(faiss.downcast_index(index.storage)), np.ones(len(row_ids), bool), index
        )

    @classmethod
    def _main_from_state(cls, state: Mapping[str, NDArray[Any]]) -> _Part:
        return _hnsw_part(state["main_row_ids"], faiss.deserialize_index(state["main_graph"]))

    def _main_state(self) -> dict[str, NDArray[Any]]:
        return {"main_graph": faiss.serialize_index(self._main.index)}

    @classmethod
    def _merged(cls, main: _Part, row_ids: Rows, vectors: Vectors) -> _Part:
        if _worn(main) or not len(main.row_ids):
            return super()._merged(main, row_ids, vectors)
        # Adding to a copy of the graph takes a tenth of building it anew; dead rows stay masked in it.
        index = faiss.clone_index(main.index)
        index.add(np.ascontiguousarray(vectors))
        part = _hnsw_part(np.concatenate((main.row_ids, row_ids)), index)
        return replace(part, alive=np.concatenate((main.alive, np.ones(len(row_ids), bool))))

    def _search_main(self, vector: Vectors, k: int, wanted: NDArray[np.bool_] | None) -> tuple[Rows, Vectors]:
        selector = None if wanted is None else _selector(wanted)
        if wanted is not None and np.count_nonzero(wanted) < HNSW_EXACT_BELOW_SHARE * len(wanted):
            return _exact(self._main.vectors, vector, k, wanted)
        parameters = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH_WIDTH, 2 * k), sel=selector)
        scores, positions = self._main.index.search(vector[None, :], k, params=parameters)
        return _found(positions[0], scores[0])


def _stored_vectors(flat: Any) -> Vectors:
    """A view of the vectors that the index holds, so that they are in memory once. The index must outlive it."""
    if not flat.ntotal:
        return np.zeros((0, flat.d), np.float32)
    view: Vectors = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d).reshape(flat.ntotal, flat.d)
    return view


def _hnsw_part(row_ids: Rows, index: Any) -> _Part:
    return _Part(row_ids, _stored_vectors(faiss.downcast_index(index.storage)), np.ones(len(row_ids), bool), index)


def _worn(main: _Part) -> bool:
    return int(np.count_nonzero(~main.alive)) > MAX_DEAD_SHARE * len(main.alive)


def _selector(wanted: NDArray[np.bool_]) -> Any:
    return faiss.IDSelectorBitmap(np.packbits(wanted, bitorder="little"))


def _found(positions: NDArray[np.int64], scores: Vectors) -> tuple[Rows, Vectors]:
    # FAISS fills what it did not find with -1.
    real = positions >= 0
    return positions[real], scores[real]


def inner_products(vectors: Vectors, vector: Vectors) -> Vectors:
    """float32 [n] of float32 [n, dimension] and [dimension], on this thread alone.

    Not `@`: the linear algebra library shares such a product among threads that wait for the slowest of them, and
    on a busy machine half a millisecond became fifty.
    """
    found: Vectors = np.einsum("nd,d->n", vectors, vector)
    return found


def _exact(vectors: Vectors, vector: Vectors, k: int, wanted: NDArray[np.bool_] | None) -> tuple[Rows, Vectors]:
    positions = np.arange(len(vectors)) if wanted is None else np.flatnonzero(wanted)
    scores = inner_products(vectors if wanted is None else vectors[positions], vector)
    if len(scores) > k:
        # Ties at the cut take part here and are ordered by row id by the caller.
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        chosen = scores >= threshold
        positions, scores = positions[chosen], scores[chosen]
    return positions, scores
