"""`/v1/vector_stores/{id}/file_batches`: many files at once, for the client's batch helpers."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool

from gateway.routes.dependencies import BodyLimits, Context, json_body
from gateway.routes.wire_lists import ListPage, StoreFileListQuery
from gateway.routes.wire_vector_stores import (
    AttachFile,
    BatchObject,
    CreateBatch,
    StoreFileObject,
    counts_object,
    store_file_page,
)
from retrieval.database import Database
from retrieval.records import FileCounts, FileStatus, Page, StoreFile
from retrieval.types import NotFound

BATCHES_KEPT = 1000

Attach = Callable[[str, str, Iterable[AttachFile]], Awaitable[list[StoreFile]]]


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    tenant: str
    store_id: str
    file_ids: tuple[str, ...]
    created_at: int


class Batches:
    """The last thousand batches, in memory: a batch only groups files whose state is in the database.

    The oldest leaves. Usable from any thread.
    """

    def __init__(self, kept: int = BATCHES_KEPT) -> None:
        self._kept = kept
        self._batches: OrderedDict[str, Batch] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, batch: Batch) -> None:
        with self._lock:
            self._batches[batch.id] = batch
            if len(self._batches) > self._kept:
                self._batches.popitem(last=False)

    def get(self, tenant: str, store_id: str, batch_id: str) -> Batch:
        """Raises NotFound, also for a batch of another tenant or store."""
        with self._lock:
            batch = self._batches.get(batch_id)
        if batch is None or (batch.tenant, batch.store_id) != (tenant, store_id):
            raise NotFound("file batch", batch_id)
        return batch


def add_batch_routes(
    router: APIRouter, database: Database, attach: Attach, limits: BodyLimits, clock: Callable[[], float]
) -> None:
    batches = Batches()
    prefix = "/{store_id}/file_batches"

    @router.post(prefix)
    async def create(
        store_id: str, context: Context, body: Annotated[CreateBatch, Depends(json_body(CreateBatch, limits))]
    ) -> BatchObject:
        attached = await attach(context.tenant, store_id, body.attachments())
        ids = tuple(dict.fromkeys(file.file_id for file in attached))
        batch = Batch(f"vsfb_{secrets.token_hex(12)}", context.tenant, store_id, ids, int(clock()))
        batches.add(batch)
        return await run_in_threadpool(_object, database, batch)

    @router.get(prefix + "/{batch_id}")
    def retrieve(store_id: str, batch_id: str, context: Context) -> BatchObject:
        return _object(database, batches.get(context.tenant, store_id, batch_id))

    @router.post(prefix + "/{batch_id}/cancel")
    def cancel(store_id: str, batch_id: str, context: Context) -> BatchObject:
        batch = batches.get(context.tenant, store_id, batch_id)
        for file in _files(database, batch):
            if file.status is FileStatus.IN_PROGRESS:
                database.store_files.cancel(batch.tenant, batch.store_id, file.file_id)
        return _object(database, batch)

    @router.get(prefix + "/{batch_id}/files")
    def list_files(
        store_id: str, batch_id: str, context: Context, query: Annotated[StoreFileListQuery, Query()]
    ) -> ListPage[StoreFileObject]:
        files = _files(database, batches.get(context.tenant, store_id, batch_id))
        listed = [file for file in files if query.filter in (None, file.status)]
        if query.order == "desc":
            listed.reverse()
        start, end = 0, len(listed)
        if query.after is not None:
            start = _position(listed, query.after) + 1
        if query.before is not None:
            end = _position(listed, query.before)
            start = start if query.after is not None else max(0, end - query.limit)
        items = tuple(listed[start:end][: query.limit])
        return store_file_page(Page(items, has_more=start + len(items) < end))


def _position(files: list[StoreFile], file_id: str) -> int:
    for position, file in enumerate(files):
        if file.file_id == file_id:
            return position
    raise NotFound("vector store file", file_id)


def _files(database: Database, batch: Batch) -> list[StoreFile]:
    """Those of the batch that are still in the store, in the order of the request."""
    found: list[StoreFile] = []
    database.stores.generation(batch.tenant, batch.store_id)
    for file_id in batch.file_ids:
        try:
            found.append(database.store_files.get(batch.tenant, batch.store_id, file_id))
        except NotFound:
            continue
    return found


def _object(database: Database, batch: Batch) -> BatchObject:
    files = _files(database, batch)
    tally = {status.value: sum(file.status is status for file in files) for status in FileStatus}
    counts = FileCounts(**tally)
    status = FileStatus.COMPLETED
    if counts.in_progress:
        status = FileStatus.IN_PROGRESS
    elif counts.cancelled:
        status = FileStatus.CANCELLED
    return BatchObject(
        id=batch.id,
        created_at=batch.created_at,
        vector_store_id=batch.store_id,
        status=status,
        file_counts=counts_object(counts),
    )
