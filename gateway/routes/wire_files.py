"""Uploaded files on the wire."""

from typing import Literal

from gateway.routes.wire_lists import Listed, ListPage, list_page
from retrieval.records import Page, StoredFile

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")


class FileObject(Listed):
    """OpenAI's `file`. Its `status` is deprecated there; ingestion is told by the file in a vector store."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None
    status_details: str | None = None


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.size_bytes,
        created_at=file.created_at,
        filename=file.filename,
        purpose=file.purpose,
    )


def file_page(page: Page[StoredFile]) -> ListPage[FileObject]:
    return list_page([file_object(file) for file in page.items], page.has_more)
