"""Derived indexes: fresh after every change, snapshotted atomically, rebuilt when they cannot be trusted."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrieval.chunk_rows import text_sha256
from retrieval.database import Database
from retrieval.embedding import QueryEmbedding
from retrieval.index import Indexes, IndexKind
from retrieval.records import NewChunk
from retrieval.retriever import QUERY_CHARACTERS, Retriever, blend
from retrieval.snapshots import read_snapshot, write_snapshot
from retrieval.types import Candidates, Filter, NotFound, Query

DIMENSION = 32


class WordEmbedder:
    """A vector a word, summed: near for texts that share words, with no model to load."""

    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding:
        return QueryEmbedding(vector_of(text), cached=False)


class MeasuringEmbedder(WordEmbedder):
    """Notes how long the texts are that it is given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding:
        self.lengths.append(len(text))
        return await super().embed_query(text, tenant)


def vector_of(text: str) -> np.ndarray:
    total = np.full(DIMENSION, 0.01, dtype=np.float32)
    for word in text.lower().split():
        seed = int.from_bytes(word.encode()[:8], "big")
        total += np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
    return total / np.linalg.norm(total)


def ingest(database: Database, store_id: str, name: str, *texts: str, tenant: str = "t", **attributes: str) -> str:
    file = database.files.create(tenant, name, "\n".join(texts).encode())
    claimed = database.store_files.attach(tenant, store_id, file.id, attributes)
    rows = [
        NewChunk(
            ordinal=ordinal,
            title="",
            text=text,
            label=f"k{abs(hash(text)) % 9999}",
            prompt_text=text,
            token_ids=np.zeros(0, np.int32),
            renderer_fingerprint="fp",
            text_sha256=text_sha256("", text),
            embedding=vector_of(text),
        )
        for ordinal, text in enumerate(texts)
    ]
    database.chunks.replace(claimed, rows)
    return file.id


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path)
    database.bind_embedding_model("words", DIMENSION)
    yield database
    database.close()


@pytest.fixture
async def indexes(database: Database, tmp_path: Path) -> AsyncIterator[Indexes]:
    async with Indexes(database, tmp_path, quiet_s=0.05) as indexes:
        yield indexes


@pytest.fixture
async def retriever(database: Database, indexes: Indexes) -> AsyncIterator[Retriever]:
    retriever = Retriever(database, WordEmbedder(), indexes)
    yield retriever
    await retriever.aclose()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true within ten seconds")


def texts_of(found: Candidates) -> list[str]:
    return [candidate.chunk.text for candidate in found.items]


async def search(retriever: Retriever, store_id: str, text: str, **more: object) -> list[str]:
    return texts_of(await retriever.search(Query("t", (store_id,), text, **more)))  # type: ignore[arg-type]


async def test_the_chunk_that_answers_comes_first_with_ranks_and_relevance(
    database: Database, retriever: Retriever
) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry leaves at nine", "annual leave is twenty days", "mind the gap")
    found = await retriever.search(Query("t", (store,), "when does the ferry leave", top_k=2))
    assert texts_of(found)[0] == "the ferry leaves at nine"
    assert len(found.items) == 2
    first = found.items[0]
    assert (first.dense_rank, first.lexical_rank) == (1, 1)
    assert 1 >= first.relevance >= found.items[1].relevance >= 0
    assert found.search_ms > 0


async def test_an_empty_store_has_no_candidates(database: Database, retriever: Retriever) -> None:
    assert await search(retriever, database.stores.create("t").id, "anything") == []


async def test_f3_a_store_of_another_tenant_or_of_nobody_is_not_found(
    database: Database, retriever: Retriever
) -> None:
    store = database.stores.create("other").id
    ingest(database, store, "a.txt", "secret", tenant="other")
    for unknown in (store, "vs_nothing", "../../etc"):
        with pytest.raises(NotFound, match="vector store"):
            await retriever.search(Query("t", (unknown,), "secret"))


async def test_several_stores_are_searched_as_one(database: Database, retriever: Retriever) -> None:
    first, second = database.stores.create("t").id, database.stores.create("t").id
    ingest(database, first, "a.txt", "the ferry leaves at nine", "mind the gap", "no smoking on deck")
    ingest(database, second, "b.txt", "the bakery opens at six", "bread is baked daily", "cakes on order")
    found = await retriever.search(Query("t", (first, second, first), "when does the bakery open", top_k=6))
    assert texts_of(found)[0] == "the bakery opens at six"
    assert len(found.items) == 6


async def test_filters_see_attributes_as_they_are_now(database: Database, retriever: Retriever) -> None:
    store = database.stores.create("t").id
    file = ingest(database, store, "a.txt", "ferry one", lang="en")
    ingest(database, store, "b.txt", "ferry two", lang="vi")
    english = Filter("eq", "lang", "en")
    assert await search(retriever, store, "ferry", filters=english) == ["ferry one"]
    database.store_files.update_attributes("t", store, file, {"lang": "ko"})
    assert await search(retriever, store, "ferry", filters=english) == []


async def test_e6_deleted_text_never_answers_again_not_even_after_a_restart(
    database: Database, tmp_path: Path
) -> None:
    store = database.stores.create("t").id
    file = ingest(database, store, "a.txt", "the secret ferry")
    ingest(database, store, "b.txt", "the public ferry")
    async with Indexes(database, tmp_path) as indexes:
        retriever = Retriever(database, WordEmbedder(), indexes)
        assert len(await search(retriever, store, "secret ferry")) == 2
        await indexes.save(quiet_s=0)
        database.store_files.detach("t", store, file)
        assert await search(retriever, store, "secret ferry") == ["the public ferry"]
        await retriever.aclose()
    async with Indexes(database, tmp_path) as indexes:
        retriever = Retriever(database, WordEmbedder(), indexes)
        assert await search(retriever, store, "secret ferry") == ["the public ferry"]
        assert (indexes.counters()["loaded"], indexes.counters()["built"]) == (1, 0)
        await retriever.aclose()


async def test_an_older_snapshot_is_brought_up_to_date(database: Database, tmp_path: Path) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the first ferry")
    async with Indexes(database, tmp_path) as indexes:
        await indexes.view(store, 0)
    ingest(database, store, "b.txt", "the second ferry")
    async with Indexes(database, tmp_path) as indexes:
        retriever = Retriever(database, WordEmbedder(), indexes)
        assert sorted(await search(retriever, store, "ferry")) == ["the first ferry", "the second ferry"]
        assert indexes.counters()["loaded"] == 1
        await retriever.aclose()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(bytes(content))


def replace_by_text(path: Path) -> None:
    path.write_text("not an index at all")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def take_anothers(path: Path) -> None:
    kind = "hnsw" if b'"kind":"hnsw"' in path.read_bytes() else "flat"
    found = read_snapshot(path, path.parent.name, kind)
    assert found is not None
    write_snapshot(path, replace(found, store_id="vs_other"))


@pytest.mark.parametrize("harm", [truncate, flip_a_bit, replace_by_text, empty, take_anothers])
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
async def test_e8_a_snapshot_that_cannot_be_trusted_is_rebuilt_and_said_once(
    database: Database,
    tmp_path: Path,
    harm: Callable[[Path], None],
    kind: IndexKind,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry leaves at nine", "mind the gap")
    async with Indexes(database, tmp_path, kind) as indexes:
        await indexes.view(store, 0)
    harm(tmp_path / "indexes" / store / "snapshot.bin")
    with caplog.at_level(logging.WARNING, "headstart.index"):
        async with Indexes(database, tmp_path, kind) as indexes:
            retriever = Retriever(database, WordEmbedder(), indexes)
            for _ in range(3):
                assert (await search(retriever, store, "ferry"))[0] == "the ferry leaves at nine"
            assert indexes.counters()["unusable"] == indexes.counters()["built"] == 1
            await retriever.aclose()
    assert len([record for record in caplog.records if store in str(record.__dict__)]) == 1
    async with Indexes(database, tmp_path, kind) as indexes:
        await indexes.view(store, 0)
        assert indexes.counters()["loaded"] == 1


async def test_e8_a_snapshot_of_another_kind_is_rebuilt(database: Database, tmp_path: Path) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry")
    for kind, unusable in (("flat", 0), ("hnsw", 1), ("hnsw", 0)):
        async with Indexes(database, tmp_path, kind) as indexes:  # type: ignore[arg-type]
            await indexes.view(store, 0)
            assert indexes.counters()["unusable"] == unusable


async def test_e7_a_half_written_snapshot_is_not_looked_at(database: Database, tmp_path: Path) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry")
    folder = tmp_path / "indexes" / store
    folder.mkdir(parents=True)
    (folder / "snapshot.tmp").write_bytes(b"headstart index 1\n half")
    async with Indexes(database, tmp_path) as indexes:
        assert len((await indexes.view(store, 0)).row_ids) == 1
        assert indexes.counters()["unusable"] == 0
    assert not (folder / "snapshot.tmp").exists()


async def test_a_snapshot_is_written_once_things_are_quiet(
    database: Database, indexes: Indexes, tmp_path: Path
) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry")
    await indexes.view(store, 0)
    await until(lambda: (tmp_path / "indexes" / store / "snapshot.bin").exists())


async def test_the_files_of_a_deleted_store_are_swept(database: Database, tmp_path: Path) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry")
    async with Indexes(database, tmp_path, quiet_s=3600) as indexes:
        await indexes.view(store, 0)
        await indexes.save(quiet_s=0)
        assert (tmp_path / "indexes" / store).exists()
        database.stores.delete("t", store)
        await indexes.sweep()
        assert not (tmp_path / "indexes" / store).exists()
        assert indexes.counters()["stores"] == 0


async def test_memory_is_bounded_and_the_least_recently_searched_store_goes(
    database: Database, tmp_path: Path
) -> None:
    stores = [database.stores.create("t").id for _ in range(3)]
    for store in stores:
        ingest(database, store, "a.txt", *(f"chunk {number} of many" for number in range(50)))
    async with Indexes(database, tmp_path, max_bytes=20_000) as indexes:
        for store in stores:
            await indexes.view(store, 0)
        assert indexes.counters()["evicted"] >= 1
        assert indexes.counters()["bytes"] <= 20_000 or indexes.counters()["stores"] == 1
        await indexes.view(stores[0], 0)
        assert indexes.counters()["loaded"] == 1


async def test_a_search_does_not_wait_for_a_slow_refresh(database: Database, tmp_path: Path) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the first ferry")
    async with Indexes(database, tmp_path, refresh_wait_s=0.0) as indexes:
        first = await indexes.view(store, 0)
        ingest(database, store, "b.txt", "the second ferry")
        generation = database.stores.generation("t", store)
        assert await indexes.view(store, generation) is first
        assert indexes.counters()["searched_behind"] == 1
        await until(lambda: indexes.counters()["refreshed"] == 1)
        assert (await indexes.view(store, generation)).generation == generation


async def test_refresh_soon_brings_a_loaded_store_up_to_date(database: Database, indexes: Indexes) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the first ferry")
    await indexes.view(store, 0)
    ingest(database, store, "b.txt", "the second ferry")
    indexes.refresh_soon(store)
    indexes.refresh_soon("vs_unknown")
    await until(lambda: indexes.counters()["refreshed"] == 1)
    assert len((await indexes.view(store, 0)).row_ids) == 2


async def test_repeats_are_dropped_and_named(database: Database, retriever: Retriever) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", "the ferry leaves at nine", "mind the gap")
    ingest(database, store, "b.txt", "The ferry  leaves at NINE")
    found = await retriever.search(Query("t", (store,), "ferry leaves at nine"))
    assert len(found.items) == 2
    assert len(found.dropped_duplicates) == 1


async def test_a4_the_order_is_the_same_each_time_and_by_row_among_equals(
    database: Database, retriever: Retriever
) -> None:
    store = database.stores.create("t").id
    ingest(database, store, "a.txt", *(f"same words {letter}" for letter in "fbdeac"))
    orders = {tuple(await search(retriever, store, "same words")) for _ in range(5)}
    assert len(orders) == 1


async def test_the_previous_turn_is_blended_in(database: Database, retriever: Retriever) -> None:
    store = database.stores.create("t").id
    others = [f"notice {number} about something else" for number in range(20)]
    ingest(database, store, "a.txt", "bicycles pay ten euros", "dogs pay five euros", *others)
    for animal in ("dogs", "bicycles"):
        found = await search(retriever, store, "and they pay", previous_text=f"can I take {animal}")
        assert found[0].startswith(animal)


async def test_a_question_behind_a_pasted_book_is_found_and_the_book_is_not_read_whole(
    database: Database, indexes: Indexes
) -> None:
    store = database.stores.create("t", "s")
    ingest(database, store.id, "a.txt", "parental leave lasts sixteen weeks", "the ferry sails at noon")
    embedder = MeasuringEmbedder()
    retriever = Retriever(database, embedder, indexes)
    try:
        book = "lorem ipsum dolor " * 100_000
        found = await retriever.search(Query("t", (store.id,), f"{book} how many weeks of parental leave", book))
    finally:
        await retriever.aclose()
    ranks = {item.chunk.text: item.lexical_rank for item in found.items}
    assert ranks["parental leave lasts sixteen weeks"] == 1
    assert max(embedder.lengths) <= QUERY_CHARACTERS + 1


def test_a_blend_has_length_one_and_opposites_leave_the_current_turn() -> None:
    first, second = vector_of("a b"), vector_of("c d")
    mixed = blend(first, second, 0.3)
    assert np.linalg.norm(mixed) == pytest.approx(1.0, abs=1e-6)
    assert mixed @ first > mixed @ second
    assert blend(first, -first, 1.0) is first


async def test_f2_add_delete_and_search_at_once_gives_no_error_and_no_stale_hit(
    database: Database, tmp_path: Path
) -> None:
    """A few seconds of eight clients; a stale hit is a text whose deletion was done before the search began."""
    store = database.stores.create("t").id
    ingest(database, store, "base.txt", *(f"ferry base {number}" for number in range(30)))
    deleted: set[str] = set()
    stop = asyncio.Event()
    searches = 0

    async with Indexes(database, tmp_path, quiet_s=0.1) as indexes:
        retriever = Retriever(database, WordEmbedder(), indexes)

        async def change(client: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                text = f"ferry client{client} number{number}"
                file = await asyncio.to_thread(ingest, database, store, f"{client}-{number}.txt", text)
                assert text in await search(retriever, store, text, top_k=50)
                await asyncio.to_thread(database.store_files.detach, "t", store, file)
                deleted.add(text)

        async def ask() -> None:
            nonlocal searches
            while not stop.is_set():
                gone = set(deleted)
                found = await search(retriever, store, "ferry client number", top_k=20)
                assert not gone & set(found)
                assert found
                searches += 1

        async with asyncio.TaskGroup() as group:
            for client in range(3):
                group.create_task(change(client))
            for _ in range(5):
                group.create_task(ask())
            await asyncio.sleep(3)
            stop.set()
        await retriever.aclose()
    assert searches > 10
    assert deleted
