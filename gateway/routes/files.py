"""`/v1/files`: documents as they were uploaded."""

from collections.abc import Iterator, Mapping
from typing import Annotated, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from gateway.errors import ApiError, ErrorKind
from gateway.routes.dependencies import BodyLimits, Context
from gateway.routes.uploads import Upload, read_upload
from gateway.routes.wire_files import PURPOSES, FileObject, file_object, file_page
from gateway.routes.wire_lists import Deleted, FileListQuery, ListPage
from gateway.wire import invalid
from retrieval.database import Database

_PIECE_BYTES = 1 << 18


def files_router(database: Database, limits: BodyLimits) -> APIRouter:
    """Plain `def` endpoints block on the database and run in the framework's threads."""
    router = APIRouter(prefix="/v1/files", tags=["files"])
    files = database.files

    @router.post("")
    async def create(request: Request, context: Context) -> FileObject:
        with await read_upload(request, limits) as upload:
            purpose = _purpose(upload.fields)
            if upload.size_bytes == 0:
                raise ApiError(ErrorKind.INVALID, "The file is empty.", param="file", code="empty_file")
            return await run_in_threadpool(store, context.tenant, upload, purpose)

    def store(tenant: str, upload: Upload, purpose: str) -> FileObject:
        return file_object(files.create(tenant, upload.filename, upload.content, purpose))

    @router.get("")
    def list_files(context: Context, query: Annotated[FileListQuery, Query()]) -> ListPage[FileObject]:
        return file_page(files.list(context.tenant, query.page(), query.purpose))

    @router.get("/{file_id}")
    def retrieve(file_id: str, context: Context) -> FileObject:
        return file_object(files.get(context.tenant, file_id))

    @router.get("/{file_id}/content")
    def content(file_id: str, context: Context) -> StreamingResponse:
        file = files.get(context.tenant, file_id)
        headers = {
            "content-length": str(file.size_bytes),
            # A document must never be run by a browser in the console's origin.
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
            "content-security-policy": "sandbox; default-src 'none'",
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(
            _pieces(files.open(context.tenant, file_id)), headers=headers, media_type="application/octet-stream"
        )

    @router.delete("/{file_id}")
    def delete(file_id: str, context: Context) -> Deleted:
        files.delete(context.tenant, file_id)
        return Deleted(id=file_id, object="file")

    return router


def _purpose(fields: Mapping[str, str]) -> str:
    unknown = next((name for name in fields if name != "purpose"), None)
    if unknown is not None:
        raise invalid(f"The field '{unknown[:64]}' is not supported; send 'file' and 'purpose'.", unknown[:64])
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        raise invalid(f"purpose must be one of {', '.join(PURPOSES)}.", "purpose")
    return purpose


def _pieces(content: BinaryIO) -> Iterator[bytes]:
    with content:
        while piece := content.read(_PIECE_BYTES):
            yield piece
