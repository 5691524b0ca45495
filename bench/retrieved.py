"""What the product's retriever finds for the questions of a data set, once and up front."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.corpus import TENANT, KnownQueries, embedded, fill_store
from bench.datasets import Passage
from gateway.settings import Settings
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder
from retrieval.index import Indexes
from retrieval.retriever import Retriever
from retrieval.types import Candidates, ChunkRenderer, Query


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and the user turn before it, where there is one."""

    text: str
    previous: str | None = None


async def retrieve(passages: Sequence[Passage], questions: Sequence[Asked], top_k: int) -> list[Candidates]:
    """The candidates of each question, in order: one chunk a passage, under the settings of this machine.

    Embeddings are computed once and kept in the cache folder. Titles stay out, as in `bench.retrieval`.
    """
    settings = Settings()
    embedder = SentenceEmbedder(settings.embedding_model)
    kept = settings.cache_dir / "bench"
    texts = list(dict.fromkeys(text for asked in questions for text in (asked.text, asked.previous) if text))
    try:
        await embedder.start()
        vectors = await embedded(embedder, [passage.text for passage in passages], kept)
        known = dict(zip(texts, await embedded(embedder, texts, kept), strict=True))
    finally:
        await embedder.aclose()
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        try:
            database.bind_embedding_model(embedder.model_id, vectors.shape[1])
            untitled = [replace(passage, title="") for passage in passages]
            store_id = fill_store(database, "passages", untitled, vectors)
            async with Indexes(database, Path(folder)) as indexes:
                retriever = Retriever(database, KnownQueries(known), indexes, settings.previous_turn_weight)
                found = [
                    await retriever.search(Query(TENANT, (store_id,), asked.text, asked.previous, top_k))
                    for asked in questions
                ]
                await retriever.aclose()
        finally:
            database.close()
    return found


def as_stored(renderer: ChunkRenderer, found: Sequence[Candidates]) -> list[Candidates]:
    """The candidates with prompt blocks and token ids of this renderer, as ingestion would have stored them."""
    fingerprint = renderer.fingerprint
    stored = []
    for candidates in found:
        items = tuple(
            replace(
                item,
                chunk=replace(
                    item.chunk,
                    rendered=renderer.render(item.chunk.title, item.chunk.text),
                    renderer_fingerprint=fingerprint,
                ),
            )
            for item in candidates.items
        )
        stored.append(replace(candidates, items=items))
    return stored
