"""How fast a large store answers, how exact HNSW is, and how fast and in how much memory documents come in."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.corpus import TENANT, KnownQueries, fill_store, synthetic, synthetic_queries
from bench.datasets import DataMissing, xquad
from bench.report import Report
from retrieval.database import Database
from retrieval.dense import faiss
from retrieval.embedding import SentenceEmbedder
from retrieval.index import Indexes, IndexKind
from retrieval.ingestion import Ingestor
from retrieval.retriever import Retriever
from retrieval.store_view import StoreView
from retrieval.types import Query, RenderedChunk

MIB = 2**20
KINDS: tuple[IndexKind, ...] = ("flat", "hnsw")


@dataclass(slots=True)
class Peak:
    """Highest resident memory of this process while it was watched, in MiB, and what it was before."""

    before_mib: float = 0.0
    peak_mib: float = 0.0


@asynccontextmanager
async def watched_memory() -> AsyncIterator[Peak]:
    process = psutil.Process()
    peak = Peak(process.memory_info().rss / MIB, process.memory_info().rss / MIB)

    async def watch() -> None:
        while True:
            peak.peak_mib = max(peak.peak_mib, process.memory_info().rss / MIB)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    try:
        yield peak
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class PlainRenderer:
    """Counts four characters a token; the bench needs sizes, not a model."""

    fingerprint = "bench"

    def count(self, text: str) -> int:
        return -(-len(text) // 4)

    def render(self, title: str, text: str) -> RenderedChunk:
        return RenderedChunk("k000", f"[k000] {title}\n{text}", ())


async def measure_speed(report: Report, quick: bool) -> None:
    rows, asked = (4_500, 50) if quick else (100_000, 300)
    passages, vectors = synthetic(rows)
    queries = synthetic_queries(passages, vectors, asked)
    table: list[tuple[str | float | int, ...]] = []
    exact: list[set[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        database.bind_embedding_model("synthetic", vectors.shape[1])
        store_id = fill_store(database, "synthetic", passages, vectors)
        del passages
        for kind in KINDS:
            async with watched_memory() as peak:
                async with Indexes(database, Path(folder) / kind, kind, quiet_s=3600) as indexes:
                    retriever = Retriever(database, KnownQueries(queries), indexes)
                    began = time.perf_counter()
                    view = await indexes.view(store_id, 0)
                    build_s = time.perf_counter() - began
                    for text in list(queries)[:10]:
                        await retriever.search(Query(TENANT, (store_id,), text))
                    took_ms = []
                    for text in queries:
                        began = time.perf_counter()
                        await retriever.search(Query(TENANT, (store_id,), text))
                        took_ms.append((time.perf_counter() - began) * 1000)
                    dense_ms, lexical_ms, found = await asyncio.to_thread(_halves, view, queries)
                    await retriever.aclose()
                async with Indexes(database, Path(folder) / kind, kind) as again:
                    began = time.perf_counter()
                    await again.view(store_id, 0)
                    load_s = time.perf_counter() - began
            exact = exact or found
            recall = float(np.mean([len(mine & best) / 10 for mine, best in zip(found, exact, strict=True)]))
            p50, p95 = np.percentile(took_ms, (50, 95))
            table.append(
                (kind, float(p50), float(p95), dense_ms, lexical_ms, recall, build_s, load_s, round(peak.peak_mib))
            )
            report.at_most(f"{kind} p50 ms", float(p50), 20.0 if kind == "flat" else 5.0)
            if kind == "hnsw":
                report.at_least("hnsw recall@10", recall, 0.95)
        database.close()
    columns = ("index", "p50 ms", "p95 ms", "dense ms", "BM25 ms", "recall@10", "build s", "load s", "peak MiB")
    report.table(f"Search of {rows:,} chunks x {vectors.shape[1]}, {asked} queries, one at a time", columns, table)


def _halves(view: StoreView, queries: dict[str, np.ndarray]) -> tuple[float, float, list[set[int]]]:
    """Median milliseconds of the dense and the BM25 search alone, as the retriever's threads run them; top ten."""
    faiss.omp_set_num_threads(1)
    dense_ms, lexical_ms, found = [], [], []
    for text, vector in queries.items():
        began = time.perf_counter()
        neighbours = view.dense.search(vector, 10)
        middle = time.perf_counter()
        view.lexical.match({text: 1.0}).top(10)
        lexical_ms.append((time.perf_counter() - middle) * 1000)
        dense_ms.append((middle - began) * 1000)
        found.append({int(row_id) for row_id in neighbours.row_ids})
    return float(np.median(dense_ms)), float(np.median(lexical_ms)), found


async def measure_ingestion(report: Report, embedder: SentenceEmbedder, quick: bool) -> None:
    """Plain text (XQuAD's paragraphs, else synthetic ones) through parsing, chunking, embedding, the database."""
    files, paragraphs = (2, 15) if quick else (4, 60)
    try:
        passages = xquad("en").passages
    except DataMissing:
        passages = tuple(synthetic(files * paragraphs, dimension=8)[0])
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        database.bind_embedding_model(embedder.model_id, embedder.dimension)
        store = database.stores.create(TENANT, "ingested")
        async with watched_memory() as peak, Ingestor(database, embedder, PlainRenderer()) as ingestor:
            began = time.perf_counter()
            for number in range(files):
                part = passages[number * paragraphs : (number + 1) * paragraphs]
                content = "\n\n".join(passage.text for passage in part).encode()
                file = database.files.create(TENANT, f"text-{number}.txt", content)
                database.store_files.attach(TENANT, store.id, file.id)
                ingestor.enqueue(TENANT, store.id, file.id)
            await ingestor.wait_idle()
            took_s = time.perf_counter() - began
        chunks = len(database.chunks.live_row_ids(store.id))
        database.close()
    report.table(
        f"Ingestion of {files} text files, {embedder.model_id}",
        ("chunks", "seconds", "chunks/s", "MiB before", "peak MiB"),
        [(chunks, took_s, chunks / took_s, round(peak.before_mib), round(peak.peak_mib))],
    )
    report.require("every file ingested", chunks >= files * paragraphs // 3)
