"""`/v1/vector_stores`: stores, the files in them, and search."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends
from fastapi import Query as QueryParameters
from starlette.concurrency import run_in_threadpool

from gateway.budgets import check_store_metadata
from gateway.routes.dependencies import BodyLimits, Context, json_body
from gateway.routes.file_batches import add_batch_routes
from gateway.routes.wire_lists import Deleted, ListPage, ListQuery, StoreFileListQuery
from gateway.routes.wire_vector_stores import (
    AttachFile,
    CreateStore,
    SearchPage,
    SearchRequest,
    StoreFileObject,
    UpdateAttributes,
    UpdateStore,
    VectorStoreObject,
    chosen_strategy,
    search_page,
    store_file_object,
    store_file_page,
    store_object,
    store_page,
)
from retrieval.database import Database
from retrieval.records import ChunkingStrategy, FileStatus, StoreFile
from retrieval.stores import StoreUpdate
from retrieval.types import Candidate, Candidates, Query


class Ingestion(Protocol):
    def enqueue(self, tenant: str, store_id: str, file_id: str) -> None:
        """Sees to it that a file in progress is ingested; returns before that is done."""


class Search(Protocol):
    async def search(self, query: Query) -> Candidates:
        """Raises NotFound for a store that the tenant does not have."""


class Attachments:
    """Puts files into stores and their ingestion into the queue."""

    def __init__(self, database: Database, ingestion: Ingestion, default_strategy: ChunkingStrategy) -> None:
        self._database = database
        self._ingestion = ingestion
        self._default_strategy = default_strategy

    async def attach(self, tenant: str, store_id: str, files: Iterable[AttachFile]) -> list[StoreFile]:
        """All or none: raises NotFound before anything is attached."""
        wanted = list(files)
        attached = await run_in_threadpool(self._attach, tenant, store_id, wanted)
        for store_file in attached:
            if store_file.status is FileStatus.IN_PROGRESS:
                self._ingestion.enqueue(tenant, store_file.store_id, store_file.file_id)
        return attached

    def require_files(self, tenant: str, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            self._database.files.get(tenant, file_id)

    def _attach(self, tenant: str, store_id: str, wanted: list[AttachFile]) -> list[StoreFile]:
        self._database.stores.generation(tenant, store_id)
        self.require_files(tenant, (file.file_id for file in wanted))
        return [
            self._database.store_files.attach(
                tenant,
                store_id,
                file.file_id,
                file.attributes,
                chosen_strategy(file.chunking_strategy, self._default_strategy),
            )
            for file in wanted
        ]


def vector_stores_router(
    database: Database,
    ingestion: Ingestion,
    search: Search,
    limits: BodyLimits,
    default_strategy: ChunkingStrategy,
    clock: Callable[[], float] = time.time,
) -> APIRouter:
    """`default_strategy` is what files get whose request does not say. `clock` is Unix time, for expiry."""
    router = APIRouter(prefix="/v1/vector_stores", tags=["vector stores"])
    attachments = Attachments(database, ingestion, default_strategy)
    _add_store_routes(router, database, attachments, limits, clock)
    _add_file_routes(router, database, attachments, limits)
    add_batch_routes(router, database, attachments.attach, limits, clock)
    _add_search_route(router, search, limits)
    return router


def _add_store_routes(
    router: APIRouter, database: Database, attachments: Attachments, limits: BodyLimits, clock: Callable[[], float]
) -> None:
    stores = database.stores

    @router.post("")
    async def create(
        context: Context, body: Annotated[CreateStore, Depends(json_body(CreateStore, limits))]
    ) -> VectorStoreObject:
        check_store_metadata(body.metadata)
        files = [AttachFile(file_id=id_, chunking_strategy=body.chunking_strategy) for id_ in body.file_ids]
        # First, so that an unknown file leaves no half-made store behind.
        await run_in_threadpool(attachments.require_files, context.tenant, body.file_ids)
        days = body.expires_after.days if body.expires_after else None
        store = await run_in_threadpool(stores.create, context.tenant, body.name or "", body.metadata, days)
        await attachments.attach(context.tenant, store.id, files)
        return store_object(await run_in_threadpool(stores.get, context.tenant, store.id), clock())

    @router.get("")
    def list_stores(context: Context, query: Annotated[ListQuery, QueryParameters()]) -> ListPage[VectorStoreObject]:
        return store_page(stores.list(context.tenant, query.page()), clock())

    @router.get("/{store_id}")
    def retrieve(store_id: str, context: Context) -> VectorStoreObject:
        return store_object(stores.get(context.tenant, store_id), clock())

    @router.post("/{store_id}")
    def update(
        store_id: str, context: Context, body: Annotated[UpdateStore, Depends(json_body(UpdateStore, limits))]
    ) -> VectorStoreObject:
        check_store_metadata(body.metadata)
        change = StoreUpdate(
            name=body.name,
            metadata=body.metadata,
            expires_after_days=body.expires_after.days if body.expires_after else None,
            never_expires="expires_after" in body.model_fields_set and body.expires_after is None,
        )
        return store_object(stores.update(context.tenant, store_id, change), clock())

    @router.delete("/{store_id}")
    def delete(store_id: str, context: Context) -> Deleted:
        stores.delete(context.tenant, store_id)
        return Deleted(id=store_id, object="vector_store.deleted")


def _add_file_routes(router: APIRouter, database: Database, attachments: Attachments, limits: BodyLimits) -> None:
    store_files = database.store_files

    @router.post("/{store_id}/files")
    async def attach(
        store_id: str, context: Context, body: Annotated[AttachFile, Depends(json_body(AttachFile, limits))]
    ) -> StoreFileObject:
        (attached,) = await attachments.attach(context.tenant, store_id, [body])
        return store_file_object(attached)

    @router.get("/{store_id}/files")
    def list_files(
        store_id: str, context: Context, query: Annotated[StoreFileListQuery, QueryParameters()]
    ) -> ListPage[StoreFileObject]:
        return store_file_page(store_files.list(context.tenant, store_id, query.page(), query.filter))

    @router.get("/{store_id}/files/{file_id}")
    def retrieve_file(store_id: str, file_id: str, context: Context) -> StoreFileObject:
        return store_file_object(store_files.get(context.tenant, store_id, file_id))

    @router.post("/{store_id}/files/{file_id}")
    def update_file(
        store_id: str,
        file_id: str,
        context: Context,
        body: Annotated[UpdateAttributes, Depends(json_body(UpdateAttributes, limits))],
    ) -> StoreFileObject:
        updated = store_files.update_attributes(context.tenant, store_id, file_id, body.attributes or {})
        return store_file_object(updated)

    @router.delete("/{store_id}/files/{file_id}")
    def detach(store_id: str, file_id: str, context: Context) -> Deleted:
        store_files.detach(context.tenant, store_id, file_id)
        return Deleted(id=file_id, object="vector_store.file.deleted")


def _add_search_route(router: APIRouter, search: Search, limits: BodyLimits) -> None:
    @router.post("/{store_id}/search")
    async def search_store(
        store_id: str, context: Context, body: Annotated[SearchRequest, Depends(json_body(SearchRequest, limits))]
    ) -> SearchPage:
        filters = body.filters.to_filter() if body.filters else None
        found = await asyncio.gather(
            *(
                search.search(Query(context.tenant, (store_id,), text, top_k=body.max_num_results, filters=filters))
                for text in body.query
            )
        )
        best = _best(candidate for candidates in found for candidate in candidates.items)
        kept = [candidate for candidate in best if candidate.relevance >= body.ranking_options.score_threshold]
        return search_page(body.query, kept[: body.max_num_results])


def _best(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Each chunk once, with its highest relevance over all queries, most relevant first."""
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.chunk.row_id)
        if known is None or candidate.relevance > known.relevance:
            best[candidate.chunk.row_id] = candidate
    return sorted(best.values(), key=lambda candidate: -candidate.relevance)
