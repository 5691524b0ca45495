"""The official client, unmodified, against the document routes over a real socket."""

import asyncio
import hashlib
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray
from openai import AsyncOpenAI

from gateway.context import RequestContext
from gateway.door import Door
from gateway.errors import ApiError, ErrorKind, translate
from gateway.http import Receive, Scope, Send
from gateway.routes.dependencies import BodyLimits
from gateway.routes.files import files_router
from gateway.routes.vector_stores import vector_stores_router
from gateway.tenants import Tenants
from retrieval.database import Database
from retrieval.embedding import QueryEmbedding
from retrieval.index import Indexes
from retrieval.ingestion import Ingestor
from retrieval.records import ChunkingStrategy
from retrieval.retriever import Retriever
from retrieval.types import RenderedChunk, RetrievalError

DIMENSION = 64
MAX_UPLOAD_BYTES = 2 << 20


class HashedWords:
    """An embedder that needs no model: each word has its own direction."""

    async def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([_embed(text) for text in texts])

    async def embed_query(self, text: str, tenant: str) -> QueryEmbedding:
        return QueryEmbedding(_embed(text), cached=False)


def _embed(text: str) -> NDArray[np.float32]:
    vector = np.full(DIMENSION, 1e-3, np.float32)
    for word in re.findall(r"\w+", text.lower()):
        vector[hashlib.sha256(word.encode()).digest()[0] % DIMENSION] += 1
    return vector / np.linalg.norm(vector)


class WordRenderer:
    """One token per word."""

    fingerprint = "words"

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+|\S", text))

    def render(self, title: str, text: str) -> RenderedChunk:
        label = hashlib.sha256(f"{title}{text}".encode()).hexdigest()[:4]
        return RenderedChunk(label, f"[{label}] {title}\n{text}", tuple(range(self.count(text))))


async def _no_chat(scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
    raise ApiError(ErrorKind.INTERNAL, "no chat here")


def _respond(error: ApiError) -> Response:
    return Response(error.body_bytes(), error.http_status, media_type="application/json")


@asynccontextmanager
async def serving(app: Door) -> AsyncIterator[str]:
    """The app on a free port of the loopback address; its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        # It listens already: a client that comes early waits for the server.
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        await task


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    database = Database(tmp_path)
    database.bind_embedding_model("hashed-words", DIMENSION)
    embedder, renderer = HashedWords(), WordRenderer()
    retriever = Retriever(database, embedder, Indexes(database, tmp_path, "flat"))
    limits = BodyLimits(1 << 20, MAX_UPLOAD_BYTES, 5.0)
    app = FastAPI()

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _respond(error)

    @app.exception_handler(RetrievalError)
    async def retrieval_error(request: Request, error: RetrievalError) -> Response:
        return _respond(translate(error))

    digests = {hashlib.sha256(f"key-{tenant}".encode()).digest(): tenant for tenant in "ab"}
    async with Ingestor(database, embedder, renderer) as ingestor:
        app.include_router(files_router(database, limits))
        app.include_router(vector_stores_router(database, ingestor, retriever, limits, ChunkingStrategy(64, 8)))
        async with serving(Door(app, _no_chat, Tenants(digests, b"secret"))) as url:
            yield url
    await retriever.aclose()
    database.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="key-a", max_retries=0) as client:
        yield client


@pytest.fixture
async def other_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="key-b", max_retries=0) as client:
        yield client


FERRY = b"# Ferry\n\nThe last ferry to Pellen leaves at nineteen forty.\n"
KITCHEN = "# Bếp\n\nBếp chung mở cửa lúc sáu giờ sáng.\n".encode()


async def test_upload_and_poll_then_search_work_unmodified(client: AsyncOpenAI) -> None:
    store = await client.vector_stores.create(name="handbook", metadata={"team": "deck"})
    for name, content in (("ferry.md", FERRY), ("bếp.md", KITCHEN)):
        done = await client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id,
            file=(name, content),
            attributes={"name": name, "year": 2026},
            poll_interval_ms=20,
        )
        assert (done.status, done.last_error, done.attributes) == ("completed", None, {"name": name, "year": 2026})
    page = await client.vector_stores.search(store.id, query="when does the last ferry to Pellen leave")
    assert page.object == "vector_store.search_results.page"
    assert page.data[0].filename == "ferry.md"
    assert "nineteen forty" in page.data[0].content[0].text
    assert 0 <= page.data[0].score <= 1
    narrowed = await client.vector_stores.search(
        store.id,
        query=["ferry", "bếp chung"],
        max_num_results=1,
        filters={"type": "and", "filters": [{"type": "eq", "key": "name", "value": "bếp.md"}]},
        ranking_options={"ranker": "auto", "score_threshold": 0.0},
        rewrite_query=False,
    )
    assert [result.filename for result in narrowed.data] == ["bếp.md"]
    counted = await client.vector_stores.retrieve(store.id)
    assert (counted.status, counted.file_counts.completed, counted.file_counts.total) == ("completed", 2, 2)
    assert counted.usage_bytes > 0


async def test_create_and_poll_takes_a_chunking_strategy(client: AsyncOpenAI) -> None:
    store = await client.vector_stores.create(expires_after={"anchor": "last_active_at", "days": 3})
    file = await client.files.create(file=("a.txt", b"word " * 500), purpose="assistants")
    done = await client.vector_stores.files.create_and_poll(
        file.id,
        vector_store_id=store.id,
        chunking_strategy={
            "type": "static",
            "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 10},
        },
        poll_interval_ms=20,
    )
    assert done.status == "completed"
    assert done.chunking_strategy is not None
    assert done.chunking_strategy.type == "static"
    assert done.chunking_strategy.static.max_chunk_size_tokens == 100


async def test_batches_are_uploaded_and_polled(client: AsyncOpenAI) -> None:
    store = await client.vector_stores.create(name="batch")
    done = await client.vector_stores.file_batches.upload_and_poll(
        store.id,
        files=[("ferry.md", FERRY), ("bếp.md", KITCHEN), ("broken.pdf", b"%PDF-1.7 broken")],
        poll_interval_ms=20,
    )
    assert (done.status, done.file_counts.completed, done.file_counts.failed) == ("completed", 2, 1)
    listed = [
        file
        async for file in client.vector_stores.file_batches.list_files(done.id, vector_store_id=store.id, limit=2)
    ]
    assert sorted(file.status for file in listed) == ["completed", "completed", "failed"]
    second = await client.vector_stores.file_batches.create_and_poll(
        store.id, file_ids=[file.id for file in listed if file.status == "completed"], poll_interval_ms=20
    )
    assert second.file_counts.total == 2


async def test_files_list_page_and_content_round_trip(client: AsyncOpenAI) -> None:
    made = [await client.files.create(file=(f"{n}.txt", b"%d" % n), purpose="user_data") for n in range(5)]
    listed = [file.id async for file in client.files.list(limit=2, order="asc", purpose="user_data")]
    assert listed == [file.id for file in made]
    assert (await client.files.content(made[3].id)).content == b"3"
    assert (await client.files.retrieve(made[0].id)).filename == "0.txt"
    assert (await client.files.delete(made[0].id)).deleted
    with pytest.raises(openai.NotFoundError) as missing:
        await client.files.retrieve(made[0].id)
    assert made[0].id in missing.value.message


async def test_stores_and_their_files_are_listed_changed_and_deleted(client: AsyncOpenAI) -> None:
    stores = [await client.vector_stores.create(name=str(n)) for n in range(3)]
    assert [store.id async for store in client.vector_stores.list(limit=2, order="asc")] == [s.id for s in stores]
    assert (await client.vector_stores.update(stores[0].id, name="new", metadata={"k": "v"})).name == "new"
    file = await client.vector_stores.files.upload_and_poll(
        vector_store_id=stores[0].id, file=("a.md", FERRY), poll_interval_ms=20
    )
    changed = await client.vector_stores.files.update(file.id, vector_store_id=stores[0].id, attributes={"n": 1.5})
    assert changed.attributes == {"n": 1.5}
    kept = [entry.id async for entry in client.vector_stores.files.list(stores[0].id, filter="completed")]
    assert kept == [file.id]
    assert (await client.vector_stores.files.delete(file.id, vector_store_id=stores[0].id)).deleted
    assert (await client.vector_stores.search(stores[0].id, query="ferry")).data == []
    assert (await client.vector_stores.delete(stores[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.vector_stores.search(stores[0].id, query="ferry")


@pytest.mark.parametrize("content", [b" \n\t ", b"\xef\xbb\xbf\n"], ids=["whitespace", "byte order mark"])
async def test_e1_a_file_without_text_fails_and_the_queue_goes_on(client: AsyncOpenAI, content: bytes) -> None:
    store = await client.vector_stores.create(name="s")
    empty = await client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("empty.txt", content), poll_interval_ms=20
    )
    assert empty.status == "failed"
    assert empty.last_error is not None
    assert empty.last_error.code == "invalid_file"
    full = await client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("ferry.md", FERRY), poll_interval_ms=20
    )
    assert full.status == "completed"


async def test_e10_a_broken_pdf_says_what_is_wrong_with_it(client: AsyncOpenAI) -> None:
    store = await client.vector_stores.create(name="s")
    broken = await client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("broken.pdf", b"%PDF-1.7\nnot really"), poll_interval_ms=20
    )
    assert broken.status == "failed"
    assert broken.last_error is not None
    assert broken.last_error.message


async def test_e10_an_upload_far_over_the_limit_gets_its_413_and_the_next_is_taken(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=("big.txt", b"x" * (20 * MAX_UPLOAD_BYTES)), purpose="assistants")
    assert refused.value.status_code == 413
    assert (await client.files.create(file=("a.txt", b"x"), purpose="assistants")).bytes == 1


async def test_e10_a_chunked_upload_without_a_length_is_stopped_at_the_limit(url: str, tmp_path: Path) -> None:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: multipart/form-data; boundary=cut\r\n\r\n"
    )
    head = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    sent = 0
    answer = asyncio.create_task(reader.readline())
    for piece in [head, *[b"x" * 65_536] * 1000]:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        sent += len(piece)
        try:
            await asyncio.wait_for(writer.drain(), 5)
        except (TimeoutError, ConnectionError):
            break
        await asyncio.sleep(0)
        if answer.done():
            break
    assert b" 413 " in await asyncio.wait_for(answer, 5)
    assert sent < 8 * MAX_UPLOAD_BYTES
    writer.close()
    assert list((tmp_path / "files").iterdir()) == []


async def test_h9_hostile_names_are_stored_safely(client: AsyncOpenAI, tmp_path: Path) -> None:
    for name in (
        "../../../etc/passwd",
        "..",
        "<script>alert(1)</script>.md",
        'quo"te\\.md',
        "메뉴 เมนู.md",
        "ệ" * 5000,
    ):
        file = await client.files.create(file=(name, FERRY), purpose="assistants")
        assert 0 < len(file.filename) <= 255
        assert "/" not in file.filename
    stored = {path.name for path in (tmp_path / "files").iterdir()}
    assert all(re.fullmatch(r"file-[0-9a-f]{24}", name) for name in stored)


async def test_f3_the_other_tenant_sees_nothing(client: AsyncOpenAI, other_client: AsyncOpenAI) -> None:
    store = await client.vector_stores.create(name="s")
    file = await client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("ferry.md", FERRY), poll_interval_ms=20
    )
    with pytest.raises(openai.NotFoundError):
        await other_client.vector_stores.search(store.id, query="ferry")
    with pytest.raises(openai.NotFoundError):
        await other_client.vector_stores.files.retrieve(file.id, vector_store_id=store.id)
    with pytest.raises(openai.NotFoundError):
        await other_client.files.content(file.id)
    assert [entry async for entry in other_client.vector_stores.list()] == []
