"""Several workers on one data folder: one ingests and writes indexes, all see what any of them changed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.database import Database
from retrieval.embedding import QueryEmbedding
from retrieval.folder import FolderInUse, SharedOwner, owned_folder, shared_folder, supervised_folder
from retrieval.index import Indexes
from retrieval.ingestion import Ingestor
from retrieval.records import FileStatus
from retrieval.retriever import Retriever
from retrieval.types import Query, RenderedChunk

WORKER = (
    "import sys,time\nfrom pathlib import Path\nfrom retrieval.folder import shared_folder\n"
    "with shared_folder(Path(sys.argv[1])) as owner:\n    print(owner.owned, flush=True)\n    time.sleep(60)\n"
)
OPEN = (
    "import sys\nfrom pathlib import Path\nfrom retrieval.database import Database\n"
    "Database(Path(sys.argv[1])).close()\nprint('ok')\n"
)


class Words:
    fingerprint = "words:1"

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))

    def render(self, title: str, text: str) -> RenderedChunk:
        return RenderedChunk(self.fingerprint, text, tuple(range(self.count(text))))


class Letters:
    async def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([[text.count(letter) + 0.1 for letter in "aeiou"] for text in texts], dtype=np.float32)

    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding:
        return QueryEmbedding((await self.embed_documents([text]))[0], cached=False)


class Worker:
    """What a worker has of the data folder, all its own as in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self.owner: SharedOwner = self._stack.enter_context(shared_folder(folder))
        self.database = Database(folder)
        self.database.bind_embedding_model("letters", 5)
        self.indexes = Indexes(self.database, folder, quiet_s=0.05, ownership=self.owner)
        self.retriever = Retriever(self.database, Letters(), self.indexes)
        self.ingestor = Ingestor(self.database, Letters(), Words(), self.indexes.refresh_soon, ownership=self.owner)

    async def __aenter__(self) -> "Worker":
        await self.indexes.__aenter__()
        await self.ingestor.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ingestor.__aexit__(None, None, None)
        await self.indexes.__aexit__()
        await self.retriever.aclose()
        self.database.close()
        self._stack.close()

    def take_in(self, store_id: str, text: str) -> str:
        file = self.database.files.create("t", "a.txt", text.encode())
        self.database.store_files.attach("t", store_id, file.id)
        self.ingestor.enqueue("t", store_id, file.id)
        return file.id

    async def found(self, store_id: str, question: str) -> list[str]:
        candidates = await self.retriever.search(Query("t", (store_id,), question, None, 5))
        return [candidate.chunk.text for candidate in candidates.items]

    async def until_ingested(self, store_id: str, file_id: str) -> None:
        files = self.database.store_files
        await until(lambda: files.get("t", store_id, file_id).status is FileStatus.COMPLETED)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_a_file_taken_in_by_one_worker_is_found_by_the_others_within_a_second(tmp_path: Path) -> None:
    async with Worker(tmp_path) as owner, Worker(tmp_path) as other:
        assert (owner.owner.owned, other.owner.owned) == (True, False)
        store_id = other.database.stores.create("t", "harbour").id
        assert await other.found(store_id, "ferry") == []
        for worker in (other, owner):
            began_s = time.monotonic()
            file_id = worker.take_in(store_id, f"The ferry leaves at {worker.owner.owned}.")
            await other.until_ingested(store_id, file_id)
            for reader in (owner, other):
                assert f"The ferry leaves at {worker.owner.owned}." in await reader.found(store_id, "ferry leaves")
            assert time.monotonic() - began_s < 1.0
        assert not other.ingestor.busy
        assert other.ingestor.queued == 0


async def test_e6_what_one_worker_deleted_no_worker_finds_from_that_moment(tmp_path: Path) -> None:
    async with Worker(tmp_path) as owner, Worker(tmp_path) as other:
        store_id = owner.database.stores.create("t", "harbour").id
        for number in range(10):
            deleter, reader = (owner, other) if number % 2 else (other, owner)
            file_id = owner.take_in(store_id, f"Ferry {number} leaves at noon.")
            await other.until_ingested(store_id, file_id)
            assert len(await reader.found(store_id, "ferry")) == 1
            deleter.database.files.delete("t", file_id)
            assert await reader.found(store_id, "ferry") == []


async def test_when_the_owner_ends_another_takes_over_with_what_is_unfinished(tmp_path: Path) -> None:
    owner, other = Worker(tmp_path), Worker(tmp_path)
    await owner.__aenter__()
    async with other:
        store_id = other.database.stores.create("t", "harbour").id
        await owner.__aexit__()
        file_id = other.take_in(store_id, "The ferry leaves at seven.")
        await other.until_ingested(store_id, file_id)
        assert other.owner.owned
        await until(lambda: (tmp_path / "indexes").is_dir() or not other.indexes.counters()["stores"])
        assert await other.found(store_id, "ferry") == ["The ferry leaves at seven."]
        await until(lambda: (tmp_path / "indexes" / store_id / "snapshot.bin").exists())


async def test_only_the_owner_writes_and_sweeps_index_files(tmp_path: Path) -> None:
    async with Worker(tmp_path) as owner, Worker(tmp_path) as other:
        store_id = owner.database.stores.create("t", "harbour").id
        file_id = owner.take_in(store_id, "The ferry leaves at seven.")
        await owner.until_ingested(store_id, file_id)
        await other.found(store_id, "ferry")
        await other.indexes.save(quiet_s=0)
        assert other.indexes.counters()["saved"] == 0
        await owner.found(store_id, "ferry")
        await owner.indexes.save(quiet_s=0)
        assert owner.indexes.counters()["saved"] >= 1


def test_workers_share_a_folder_that_a_process_alone_cannot_have(tmp_path: Path) -> None:
    with supervised_folder(tmp_path):
        with shared_folder(tmp_path) as one, shared_folder(tmp_path) as two:
            assert (one.owned, two.owned) == (True, False)
            with pytest.raises(FolderInUse), owned_folder(tmp_path):
                pass
        with pytest.raises(FolderInUse), supervised_folder(tmp_path):
            pass
    with owned_folder(tmp_path), pytest.raises(FolderInUse), shared_folder(tmp_path):
        pass


def test_e7_a_killed_owner_hands_over_and_a_worker_left_behind_keeps_the_folder(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE)]
    try:
        assert workers[0].stdout is not None
        assert workers[0].stdout.readline() == b"True\n"
        with shared_folder(tmp_path) as second:
            assert not second.owned
            os.kill(workers[0].pid, signal.SIGKILL)
            workers[0].wait()
            asyncio.run(asyncio.wait_for(second.taken(), 5))
            assert second.owned
            with pytest.raises(FolderInUse), owned_folder(tmp_path):
                pass
        with owned_folder(tmp_path):
            pass
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_e7_many_processes_may_make_the_database_at_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", OPEN, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert out == b"ok\n", error.decode()
