"""Stores for benches: passages with embeddings that are computed once, and a synthetic store of any size."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Passage
from retrieval.chunk_rows import text_sha256
from retrieval.database import Database
from retrieval.embedding import QueryEmbedding, SentenceEmbedder
from retrieval.records import NewChunk

Vectors = NDArray[np.float32]

TENANT = "bench"
_ROWS_PER_FILE = 5_000


class KnownQueries:
    """A query embedder that knows the answers, so that a bench times the search alone."""

    def __init__(self, vectors: dict[str, Vectors]) -> None:
        self._vectors = vectors

    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding:
        return QueryEmbedding(self._vectors[text], cached=True)


async def embedded(embedder: SentenceEmbedder, texts: Sequence[str], cache_dir: Path) -> Vectors:
    """float32 [len(texts), dimension]; kept in `cache_dir` under the model and the texts."""
    digest = hashlib.sha256("\0".join((embedder.model_id, *texts)).encode()).hexdigest()[:32]
    path = cache_dir / f"{digest}.npy"
    if path.is_file():
        kept: Vectors = np.load(path)
        return kept
    found = await embedder.embed_documents(texts)
    await asyncio.to_thread(_keep, path, found)
    return found


def fill_store(
    database: Database, name: str, passages: Sequence[Passage], vectors: Vectors, tenant: str = TENANT
) -> str:
    """A store with one chunk a passage, in order; returns its id. Row ids ascend with the passages."""
    store = database.stores.create(tenant, name)
    for start in range(0, len(passages), _ROWS_PER_FILE):
        part = passages[start : start + _ROWS_PER_FILE]
        file = database.files.create(tenant, f"{name}-{start}.txt", f"{name} {start}".encode())
        claimed = database.store_files.attach(tenant, store.id, file.id)
        database.chunks.replace(
            claimed, [_chunk(start + at, part[at], vectors[start + at]) for at in range(len(part))]
        )
    return store.id


def synthetic(rows: int, dimension: int = 384, seed: int = 7) -> tuple[list[Passage], Vectors]:
    """Clustered unit vectors (a topic each 200 rows) and texts of 100 words from a Zipf vocabulary.

    Topics have words of their own beside the common ones, as real documents have.
    """
    random = np.random.default_rng(seed)
    topics = max(4, rows // 200)
    centres = random.standard_normal((topics, dimension)).astype(np.float32)
    topic = random.integers(0, topics, rows)
    vectors = 0.8 * centres[topic] + random.standard_normal((rows, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    # A Zipf-Mandelbrot distribution over 50,000 words: the commonest is in most texts, as "the" is.
    weights = 1 / (np.arange(50_000) + 2.7)
    common = random.choice(50_000, size=(rows, 85), p=weights / weights.sum())
    own = 50_000 + topic[:, None] * 40 + random.integers(0, 40, size=(rows, 15))
    passages = [
        Passage(str(row), "", " ".join(f"w{word}" for word in words))
        for row, words in enumerate(np.concatenate((common, own), axis=1))
    ]
    return passages, vectors


def synthetic_queries(
    passages: Sequence[Passage], vectors: Vectors, count: int, seed: int = 11
) -> dict[str, Vectors]:
    """Questions by their text: ten words of a random row, and that row's vector with noise."""
    random = np.random.default_rng(seed)
    queries: dict[str, Vectors] = {}
    for row in random.choice(len(passages), size=count, replace=False):
        text = " ".join(random.choice(passages[row].text.split(), size=10, replace=False))
        noisy = vectors[row] + 0.04 * random.standard_normal(vectors.shape[1])
        queries[text] = (noisy / np.linalg.norm(noisy)).astype(np.float32)
    return queries


def _keep(path: Path, vectors: Vectors) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = path.with_suffix(".tmp.npy")
    np.save(waiting, vectors)
    waiting.replace(path)


def _chunk(ordinal: int, passage: Passage, vector: Vectors) -> NewChunk:
    return NewChunk(
        ordinal=ordinal,
        title=passage.title,
        text=passage.text,
        label=f"k{ordinal}",
        prompt_text=f"[k{ordinal}] {passage.text}",
        token_ids=np.zeros(0, dtype=np.int32),
        renderer_fingerprint="bench",
        text_sha256=text_sha256(passage.title, passage.text),
        embedding=vector,
    )
