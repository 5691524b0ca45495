"""From a question to ranked candidates: embed, search every store, fuse, drop repeats, read the truth, calibrate."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.calibration import FITTED, duplicates
from retrieval.database import Database
from retrieval.dense import faiss
from retrieval.embedding import QueryEmbedding
from retrieval.filters import matches
from retrieval.index import Indexes
from retrieval.store_view import Hit, StoreView
from retrieval.types import Candidate, Candidates, Chunk, Filter, NotFound, Query

log = logging.getLogger("headstart.retriever")

Vector = NDArray[np.float32]
Rows = NDArray[np.int64]
Result = TypeVar("Result")

# Rows that each half offers for fusion.
POOL_ROWS = 60
# Chunks read beyond those asked for: some repeat others, some were deleted a moment ago.
SPARE_CHUNKS = 8
# The embedding model reads a few hundred tokens; a pasted book would only keep the threads of all queries busy.
QUERY_CHARACTERS = 32_768


class QueryEmbedder(Protocol):
    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding: ...


@dataclass(frozen=True, slots=True)
class _Found:
    chunk: Chunk
    hit: Hit


class Retriever:
    """Searches stores of one tenant. Nothing heavy runs on the event loop.

    `previous_turn_weight` is the weight of the user turn before, in the query's embedding and its words; the
    current turn has weight 1.
    """

    def __init__(
        self,
        database: Database,
        embedder: QueryEmbedder,
        indexes: Indexes,
        previous_turn_weight: float = 0.3,
    ) -> None:
        self._database = database
        self._embedder = embedder
        self._indexes = indexes
        self._previous_turn_weight = previous_turn_weight
        self._touches: set[asyncio.Future[None]] = set()
        self._pool = ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1)), "search", initializer=_one_core)

    async def search(self, query: Query) -> Candidates:
        """At most `query.top_k` candidates, most relevant first. Raises NotFound for a store of another tenant.

        Of texts over QUERY_CHARACTERS the beginning and the end are searched for.
        """
        query = _bounded(query)
        store_ids = tuple(dict.fromkeys(query.store_ids))
        loop = asyncio.get_running_loop()
        # Ownership first: nothing of the question is computed or cached for a store that is not the tenant's.
        generations = await loop.run_in_executor(self._pool, self._generations, query.tenant, store_ids)
        began = time.perf_counter()
        vector, cached = await self._query_vector(query)
        embedded = time.perf_counter()
        views = await asyncio.gather(
            *(
                self._indexes.view(store_id, generation)
                for store_id, generation in zip(store_ids, generations, strict=True)
            )
        )
        texts = self._weighted_texts(query)
        searches = [
            partial(self._search_store, store_id, view, vector, texts, query)
            for store_id, view in zip(store_ids, views, strict=True)
        ]

        async def run(call: Callable[[], Result]) -> Result:
            return await loop.run_in_executor(self._pool, call)

        if len(searches) == 1:
            # As most requests: nothing is handed from thread to thread in between.
            items, dropped = await run(lambda: self._read(store_ids, [searches[0]()], query.top_k))
        else:
            hits = await asyncio.gather(*map(run, searches))
            items, dropped = await run(lambda: self._read(store_ids, hits, query.top_k))
        done = time.perf_counter()
        self._touch(query.tenant, store_ids)
        return Candidates(
            items=items,
            embed_ms=(embedded - began) * 1000,
            search_ms=(done - embedded) * 1000,
            embedding_cached=cached,
            dropped_duplicates=dropped,
        )

    async def aclose(self) -> None:
        await asyncio.gather(*self._touches)
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    def _touch(self, tenant: str, store_ids: Sequence[str]) -> None:
        """Note the use of the stores, which moves their expiry; no search waits for that write."""
        touch = asyncio.get_running_loop().run_in_executor(self._pool, self._touch_stores, tenant, store_ids)
        self._touches.add(touch)
        touch.add_done_callback(self._touches.discard)

    async def _query_vector(self, query: Query) -> tuple[Vector, bool]:
        if query.previous_text is None or self._previous_turn_weight == 0:
            only = await self._embedder.embed_query(query.text, query.tenant)
            return only.vector, only.cached
        current, previous = await asyncio.gather(
            self._embedder.embed_query(query.text, query.tenant),
            self._embedder.embed_query(query.previous_text, query.tenant),
        )
        return blend(current.vector, previous.vector, self._previous_turn_weight), current.cached and previous.cached

    def _weighted_texts(self, query: Query) -> dict[str, float]:
        texts = {query.text: 1.0}
        if query.previous_text is not None and self._previous_turn_weight > 0:
            texts.setdefault(query.previous_text, self._previous_turn_weight)
        return texts

    # What follows runs in a thread.

    def _generations(self, tenant: str, store_ids: Sequence[str]) -> list[int]:
        return [self._database.stores.generation(tenant, store_id) for store_id in store_ids]

    def _touch_stores(self, tenant: str, store_ids: Sequence[str]) -> None:
        for store_id in store_ids:
            try:
                self._database.stores.touch(tenant, store_id)
            except NotFound:
                log.debug("a store was deleted while it was searched", extra={"store_id": store_id})

    def _search_store(
        self, store_id: str, view: StoreView, vector: Vector, texts: dict[str, float], query: Query
    ) -> list[Hit]:
        allowed = None if query.filters is None else self._allowed(store_id, query.filters)
        most = query.top_k + SPARE_CHUNKS
        return view.search(vector, texts, max(POOL_ROWS, 2 * most), allowed, most=most)

    def _allowed(self, store_id: str, condition: Filter) -> Rows:
        """Rows of the files whose attributes, read now, satisfy the condition; ascending."""
        parts = [
            file.row_ids for file in self._database.chunks.files(store_id) if matches(condition, file.attributes)
        ]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)

    def _read(
        self, store_ids: Sequence[str], hits: Sequence[Sequence[Hit]], top_k: int
    ) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """The best chunks as the database has them now, without repeats, and the labels of the repeats."""
        best = sorted(
            ((hit, store_id) for store_id, found in zip(store_ids, hits, strict=True) for hit in found),
            key=lambda entry: (-round(entry[0].score, 6), entry[0].row_id),
        )[: top_k + SPARE_CHUNKS]
        chunks: dict[int, Chunk] = {}
        for store_id in store_ids:
            row_ids = [hit.row_id for hit, owner in best if owner == store_id]
            if row_ids:
                chunks.update((chunk.row_id, chunk) for chunk in self._database.chunks.by_row_ids(store_id, row_ids))
        found = [_Found(chunks[hit.row_id], hit) for hit, _ in best if hit.row_id in chunks]
        repeats = duplicates([entry.chunk.text for entry in found])
        kept = [entry for index, entry in enumerate(found) if index not in repeats]
        relevances = FITTED.relevances([entry.hit.score for entry in kept])
        items = tuple(
            Candidate(entry.chunk, relevance, entry.hit.dense_rank, entry.hit.lexical_rank)
            for entry, relevance in zip(kept[:top_k], relevances, strict=False)
        )
        return items, tuple(found[index].chunk.label for index in sorted(repeats))


def _bounded(query: Query) -> Query:
    previous = query.previous_text
    return replace(query, text=_ends(query.text), previous_text=None if previous is None else _ends(previous))


def _ends(text: str) -> str:
    """A question in a long text stands before or behind what was pasted."""
    half = QUERY_CHARACTERS // 2
    return text if len(text) <= QUERY_CHARACTERS else f"{text[:half]}\n{text[-half:]}"


def blend(current: Vector, previous: Vector, weight: float) -> Vector:
    """`current + weight * previous`, of length 1; float32 [dimension]."""
    mixed = current + np.float32(weight) * previous
    length = float(np.linalg.norm(mixed))
    return current if length == 0 else (mixed / np.float32(length)).astype(np.float32)


def _one_core() -> None:
    # A search is short; a team of threads would wait for its slowest member on a busy machine.
    faiss.omp_set_num_threads(1)
