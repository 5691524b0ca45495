"""Files become answers in the background; failures, deletions and restarts leave nothing half there."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.database import Database
from retrieval.ingestion import Ingestor
from retrieval.records import ChunkingStrategy, FileStatus, StoreFile
from retrieval.types import NotFound, RenderedChunk

TENANT = "t"


class WordRenderer:
    def __init__(self, fingerprint: str = "words:1") -> None:
        self.fingerprint = fingerprint

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))

    def render(self, title: str, text: str) -> RenderedChunk:
        block = f"[{self.fingerprint}] {title}\n{text}\n\n"
        return RenderedChunk(self.fingerprint, block, tuple(range(self.count(block))))


class HashEmbedder:
    """Four numbers from a text's bytes; remembers what it was asked, and can fail or wait."""

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.broken = False
        self.before: Callable[[], None] | None = None

    async def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        await asyncio.sleep(0)
        if self.before is not None:
            self.before()
        if self.broken:
            raise RuntimeError("out of memory while reading: secret text")
        self.embedded.extend(texts)
        return np.array([[len(t), sum(t.encode()) % 97, t.count("e"), 1.0] for t in texts], dtype=np.float32)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path)
    database.bind_embedding_model("hash", 4)
    yield database
    database.close()


@pytest.fixture
def embedder() -> HashEmbedder:
    return HashEmbedder()


def attach(database: Database, ingestor: Ingestor, store_id: str, content: str | bytes, name: str = "a.txt") -> str:
    data = content.encode() if isinstance(content, str) else content
    file = database.files.create(TENANT, name, data)
    database.store_files.attach(TENANT, store_id, file.id)
    ingestor.enqueue(TENANT, store_id, file.id)
    return file.id


def texts(database: Database, store_id: str) -> list[str]:
    row_ids = database.chunks.live_row_ids(store_id).tolist()
    return [chunk.text for chunk in database.chunks.by_row_ids(store_id, row_ids)]


def record(database: Database, store_id: str, file_id: str) -> StoreFile:
    return database.store_files.get(TENANT, store_id, file_id)


async def test_a_file_is_completed_with_its_chunks_and_the_change_is_told(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    changed: list[str] = []
    async with Ingestor(database, embedder, WordRenderer(), changed.append) as ingestor:
        file_id = attach(database, ingestor, store.id, "# Leave\n\nThirty days.\n\n# Pay\n\nMonthly.", "a.md")
        await ingestor.wait_idle()
    assert record(database, store.id, file_id).status is FileStatus.COMPLETED
    assert embedder.embedded == ["Leave\nThirty days.", "Pay\nMonthly."]
    assert changed == [store.id]
    changes = database.chunks.changes(store.id)
    row_ids, embeddings = changes.row_ids, changes.embeddings
    assert embeddings[0].tolist()[0] == len("Leave\nThirty days.")
    (leave, _) = database.chunks.by_row_ids(store.id, row_ids.tolist())
    assert leave.rendered == WordRenderer().render("Leave", "Thirty days.")
    assert leave.renderer_fingerprint == "words:1"


async def test_e1_files_without_text_fail_clearly_and_the_queue_goes_on(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        failed = [attach(database, ingestor, store.id, content) for content in ("", " \n\t ", b"\0\1\2" * 99)]
        good = attach(database, ingestor, store.id, "Good text.")
        await ingestor.wait_idle()
    for file_id in failed:
        error = record(database, store.id, file_id).last_error
        assert error is not None
        assert error.code == "invalid_file"
        assert "pload" in error.message
    assert record(database, store.id, good).status is FileStatus.COMPLETED
    assert texts(database, store.id) == ["Good text."]


async def test_e2_a_failure_leaves_nothing_behind_and_the_retry_succeeds(
    database: Database, embedder: HashEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    store = database.stores.create(TENANT)
    embedder.broken = True
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        file_id = attach(database, ingestor, store.id, "Some text.")
        await ingestor.wait_idle()
        error = record(database, store.id, file_id).last_error
        assert error is not None
        assert error.code == "server_error"
        assert "secret" not in error.message + caplog.text
        assert texts(database, store.id) == []
        embedder.broken = False
        database.store_files.attach(TENANT, store.id, file_id)
        ingestor.enqueue(TENANT, store.id, file_id)
        await ingestor.wait_idle()
    done = record(database, store.id, file_id)
    assert (done.status, done.last_error) == (FileStatus.COMPLETED, None)
    assert texts(database, store.id) == ["Some text."]


async def test_e3_the_same_text_is_embedded_once_in_a_tenant(database: Database, embedder: HashEmbedder) -> None:
    first, second = database.stores.create(TENANT), database.stores.create(TENANT)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        for store in (first, first, second):
            attach(database, ingestor, store.id, "The same text.")
        await ingestor.wait_idle()
        assert embedder.embedded == ["The same text."]
        assert texts(database, first.id) == ["The same text."] * 2
        assert texts(database, second.id) == ["The same text."]
        foreign = database.stores.create("other")
        file = database.files.create("other", "a.txt", b"The same text.")
        database.store_files.attach("other", foreign.id, file.id)
        ingestor.enqueue("other", foreign.id, file.id)
        await ingestor.wait_idle()
    assert embedder.embedded == ["The same text."] * 2


async def test_e3_the_same_file_with_new_metadata_is_not_embedded_again(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        file_id = attach(database, ingestor, store.id, "Text.")
        await ingestor.wait_idle()
        database.store_files.attach(TENANT, store.id, file_id, {"year": 2027})
        ingestor.enqueue(TENANT, store.id, file_id)
        await ingestor.wait_idle()
    (row_id,) = database.chunks.live_row_ids(store.id).tolist()
    assert database.chunks.by_row_ids(store.id, [row_id])[0].attributes == {"year": 2027}
    assert len(embedder.embedded) == 1


@pytest.mark.parametrize("what", ["file", "store", "detach", "cancel"])
async def test_deleting_during_ingestion_is_no_error_and_nothing_answers(
    database: Database, embedder: HashEmbedder, what: str
) -> None:
    store, other = database.stores.create(TENANT), database.stores.create(TENANT)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        file_id = database.files.create(TENANT, "a.txt", b"Doomed text.").id
        database.store_files.attach(TENANT, store.id, file_id)
        deletions: dict[str, Callable[[], object]] = {
            "file": lambda: database.files.delete(TENANT, file_id),
            "store": lambda: database.stores.delete(TENANT, store.id),
            "detach": lambda: database.store_files.detach(TENANT, store.id, file_id),
            "cancel": lambda: database.store_files.cancel(TENANT, store.id, file_id),
        }

        def delete_once() -> None:
            embedder.before = None
            deletions[what]()

        embedder.before = delete_once
        ingestor.enqueue(TENANT, store.id, file_id)
        good = attach(database, ingestor, other.id, "Good text.")
        await ingestor.wait_idle()
    assert texts(database, store.id) == []
    assert record(database, other.id, good).status is FileStatus.COMPLETED
    if what == "cancel":
        assert record(database, store.id, file_id).status is FileStatus.CANCELLED
    else:
        with pytest.raises(NotFound):
            record(database, store.id, file_id)


async def test_a_file_attached_anew_during_ingestion_gets_the_new_chunks(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    content = " ".join(f"Sentence number {n} is here." for n in range(60))
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:

        def attach_anew() -> None:
            embedder.before = None
            database.store_files.attach(TENANT, store.id, file_id, strategy=ChunkingStrategy(40, 0))
            ingestor.enqueue(TENANT, store.id, file_id)

        embedder.before = attach_anew
        file_id = attach(database, ingestor, store.id, content)
        await ingestor.wait_idle()
    assert len(texts(database, store.id)) > 8
    assert record(database, store.id, file_id).strategy == ChunkingStrategy(40, 0)


async def test_another_renderer_renders_stored_chunks_anew_without_embedding(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    renderer = WordRenderer()
    async with Ingestor(database, embedder, renderer) as ingestor:
        attach(database, ingestor, store.id, "Text.")
        await ingestor.wait_idle()
        row_ids = database.chunks.live_row_ids(store.id).tolist()
        renderer.fingerprint = "words:2"
        ingestor.renderer_changed()
        await ingestor.wait_idle()
        assert database.chunks.by_row_ids(store.id, row_ids)[0].rendered.text.startswith("[words:2]")
    async with Ingestor(database, embedder, WordRenderer("words:3")) as ingestor:
        await ingestor.wait_idle()
    (chunk,) = database.chunks.by_row_ids(store.id, row_ids)
    assert (chunk.label, chunk.renderer_fingerprint) == ("words:3", "words:3")
    assert len(embedder.embedded) == 1


async def test_stopping_in_the_middle_leaves_the_rest_for_the_next_start(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        ids = [attach(database, ingestor, store.id, f"Text {n}.") for n in range(20)]
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        await ingestor.wait_idle()
    assert sorted(texts(database, store.id)) == sorted(f"Text {n}." for n in range(20))
    assert all(record(database, store.id, file_id).status is FileStatus.COMPLETED for file_id in ids)


async def test_f1_the_event_loop_stays_free_while_a_large_file_is_ingested(
    database: Database, embedder: HashEmbedder
) -> None:
    store = database.stores.create(TENANT)
    rows = "\n".join(f"{n},item {n},some words about the item,{n * 3}" for n in range(40_000))
    waits: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            waits.append(time.perf_counter() - before - 0.005)

    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        file_id = attach(database, ingestor, store.id, "number,name,words,price\n" + rows, "a.csv")
        watcher = asyncio.create_task(watch())
        await ingestor.wait_idle()
        watcher.cancel()
    assert record(database, store.id, file_id).status is FileStatus.COMPLETED
    assert len(texts(database, store.id)) > 1000
    assert len(waits) > 20
    assert sorted(waits)[int(len(waits) * 0.95)] < 0.1


async def test_a_file_whose_bytes_vanished_fails_and_the_queue_goes_on(
    database: Database, embedder: HashEmbedder, tmp_path: Path
) -> None:
    store = database.stores.create(TENANT)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        lost = database.files.create(TENANT, "a.txt", b"Bytes that vanish.")
        (tmp_path / "files" / lost.id).unlink()
        database.store_files.attach(TENANT, store.id, lost.id)
        ingestor.enqueue(TENANT, store.id, lost.id)
        good = attach(database, ingestor, store.id, "Good text.")
        await ingestor.wait_idle()
    assert record(database, store.id, good).status is FileStatus.COMPLETED
    assert record(database, store.id, lost.id).status is FileStatus.FAILED


CRASHING = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_ingestion import HashEmbedder, WordRenderer
from retrieval.database import Database
from retrieval.ingestion import Ingestor

class Hanging(HashEmbedder):
    async def embed_documents(self, texts):
        found = await super().embed_documents(texts)
        if any("hang" in text for text in texts):
            print("hanging", flush=True)
            await asyncio.sleep(60)
        return found

async def main():
    database = Database(Path({data!r}))
    database.bind_embedding_model("hash", 4)
    store = database.stores.create("t", "s")
    async with Ingestor(database, Hanging(), WordRenderer()) as ingestor:
        for text in ("acknowledged text.", "please hang here.", "still queued."):
            file = database.files.create("t", "a.txt", text.encode())
            database.store_files.attach("t", store.id, file.id)
            ingestor.enqueue("t", store.id, file.id)
        await ingestor.wait_idle()

asyncio.run(main())
"""


async def test_e7_kill_9_in_the_middle_of_ingestion_then_a_restart_finishes_the_job(tmp_path: Path) -> None:
    source = CRASHING.format(tests=str(Path(__file__).parent), data=str(tmp_path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"hanging\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()

    database, embedder = Database(tmp_path), HashEmbedder()
    store = database.stores.find_by_name(TENANT, "s")
    assert store is not None
    assert texts(database, store.id) == ["acknowledged text."]
    assert (store.file_counts.completed, store.file_counts.in_progress) == (1, 2)
    async with Ingestor(database, embedder, WordRenderer()) as ingestor:
        await ingestor.wait_idle()
    assert texts(database, store.id) == ["acknowledged text.", "please hang here.", "still queued."]
    assert embedder.embedded == ["please hang here.", "still queued."]
    database.close()
