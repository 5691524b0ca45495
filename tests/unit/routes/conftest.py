"""A small gateway of the real door, the real routers and a real database, with its two slow parts played."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from gateway.app import translate_errors
from gateway.context import RequestContext
from gateway.door import Door
from gateway.errors import ApiError, ErrorKind
from gateway.http import Receive, Scope, Send
from gateway.routes.dependencies import BodyLimits
from gateway.routes.files import files_router
from gateway.routes.vector_stores import vector_stores_router
from gateway.tenants import Tenants
from retrieval.database import Database
from retrieval.records import ChunkingStrategy, NewChunk, StoreFile
from retrieval.types import Candidate, Candidates, Query

MAX_UPLOAD_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 16
DIMENSION = 4


@dataclass
class HeldIngestion:
    """Remembers what was submitted; a test decides what becomes of it."""

    database: Database
    submitted: list[StoreFile] = field(default_factory=list)

    def enqueue(self, tenant: str, store_id: str, file_id: str) -> None:
        self.submitted.append(self.database.store_files.get(tenant, store_id, file_id))

    def complete(self, store_file: StoreFile, *texts: str) -> None:
        rows = [
            NewChunk(
                ordinal=ordinal,
                title="",
                text=text,
                label="k1",
                prompt_text=text,
                token_ids=np.ones(1, np.int32),
                renderer_fingerprint="test",
                text_sha256=hashlib.sha256(text.encode()).digest(),
                embedding=np.ones(DIMENSION, np.float32),
            )
            for ordinal, text in enumerate(texts)
        ]
        self.database.chunks.replace(store_file, rows)


@dataclass
class WordSearch:
    """Finds the chunks that hold a word of the query; relevance is the share of its words."""

    database: Database
    queries: list[Query] = field(default_factory=list)

    async def search(self, query: Query) -> Candidates:
        self.queries.append(query)
        return await asyncio.to_thread(self._search, query)

    def _search(self, query: Query) -> Candidates:
        words = query.text.lower().split()
        found: list[Candidate] = []
        for store_id in query.store_ids:
            self.database.stores.generation(query.tenant, store_id)
            row_ids = self.database.chunks.live_row_ids(store_id).tolist()
            for chunk in self.database.chunks.by_row_ids(store_id, row_ids):
                share = sum(word in chunk.text.lower() for word in words) / len(words)
                if share:
                    found.append(Candidate(chunk, share))
        found.sort(key=lambda candidate: -candidate.relevance)
        return Candidates(tuple(found[: query.top_k]))


async def _no_chat(scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
    raise ApiError(ErrorKind.INTERNAL, "no chat here")


def as_app(*routers: APIRouter) -> Door:
    """Two tenants, `a` with the key `key-a` and `b` with `key-b`."""
    app = FastAPI()
    for router in routers:
        app.include_router(router)
    translate_errors(app)
    digests = {hashlib.sha256(f"key-{tenant}".encode()).digest(): tenant for tenant in "ab"}
    return Door(app, _no_chat, Tenants(digests, b"secret"))


def as_tenant(app: Door, tenant: str) -> TestClient:
    return TestClient(app, headers={"authorization": f"Bearer key-{tenant}"}, raise_server_exceptions=False)


AsClients = Callable[..., tuple[TestClient, TestClient]]


@pytest.fixture
def as_clients() -> AsClients:
    """Clients of the two tenants for an app of the given routers."""

    def make(*routers: APIRouter) -> tuple[TestClient, TestClient]:
        app = as_app(*routers)
        return as_tenant(app, "a"), as_tenant(app, "b")

    return make


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path)
    database.bind_embedding_model("test", DIMENSION)
    yield database
    database.close()


@pytest.fixture
def ingestion(database: Database) -> HeldIngestion:
    return HeldIngestion(database)


@pytest.fixture
def search(database: Database) -> WordSearch:
    return WordSearch(database)


@pytest.fixture
def documents_app(database: Database, ingestion: HeldIngestion, search: WordSearch) -> Door:
    limits = BodyLimits(MAX_BODY_BYTES, MAX_UPLOAD_BYTES, 5.0)
    return as_app(
        files_router(database, limits),
        vector_stores_router(database, ingestion, search, limits, ChunkingStrategy(200, 20)),
    )


@pytest.fixture
def client(documents_app: Door) -> TestClient:
    return as_tenant(documents_app, "a")


@pytest.fixture
def other_client(documents_app: Door) -> TestClient:
    """The other tenant."""
    return as_tenant(documents_app, "b")
