"""Uploaded files of a tenant."""

import mimetypes
import sqlite3
import time
import unicodedata
from collections.abc import Callable
from typing import BinaryIO

from retrieval.blobs import Blobs, new_file_id
from retrieval.connections import Connections
from retrieval.paging import select_page
from retrieval.records import Page, PageRequest, StoredFile
from retrieval.types import NotFound

NAME_LENGTH = 255
_SELECT = "SELECT f.* FROM files f"
# Embedding and override controls can make a shown name read as another one.
_SPOOFING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Files:
    """Blocking; usable from any thread. A file of another tenant is NotFound."""

    def __init__(self, connections: Connections, blobs: Blobs, clock: Callable[[], float] = time.time) -> None:
        self._connections = connections
        self._blobs = blobs
        self._clock = clock

    def create(
        self,
        tenant: str,
        filename: str,
        content: bytes | BinaryIO,
        purpose: str = "assistants",
        media_type: str | None = None,
    ) -> StoredFile:
        """Stores the content and its row. The name is kept for display only, cleaned by `clean_filename`."""
        file_id, name = new_file_id(), clean_filename(filename)
        size_bytes, sha256 = self._blobs.write(file_id, content)
        guessed = media_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
        file = StoredFile(file_id, tenant, name, purpose, size_bytes, int(self._clock()), sha256, guessed)
        try:
            with self._connections.write() as connection:
                connection.execute(
                    "INSERT INTO files (id, tenant, filename, purpose, size_bytes, created_at, sha256, media_type)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (file_id, tenant, name, purpose, size_bytes, file.created_at, sha256, guessed),
                )
        except BaseException:
            self._blobs.remove(file_id)
            raise
        return file

    def get(self, tenant: str, file_id: str) -> StoredFile:
        with self._connections.read() as connection:
            return _file(require_file(connection, tenant, file_id))

    def list(self, tenant: str, page: PageRequest | None = None, purpose: str | None = None) -> Page[StoredFile]:
        where, parameters = "f.tenant = ?", [tenant]
        if purpose is not None:
            where, parameters = f"{where} AND f.purpose = ?", [tenant, purpose]
        with self._connections.read() as connection:
            rows, more = select_page(connection, _SELECT, where, parameters, "f", "id", page or PageRequest(), "file")
        return Page(tuple(_file(row) for row in rows), more)

    def open(self, tenant: str, file_id: str) -> BinaryIO:
        """The content, to be read in pieces; the caller closes it. Readable to its end even if deleted meanwhile."""
        self.get(tenant, file_id)
        try:
            return self._blobs.open(file_id)
        except FileNotFoundError:
            raise NotFound("file", file_id) from None

    def read(self, tenant: str, file_id: str) -> bytes:
        with self.open(tenant, file_id) as content:
            return content.read()

    def delete(self, tenant: str, file_id: str) -> tuple[str, ...]:
        """Deletes the file and its chunks in every store at once; returns the ids of the stores that changed."""
        with self._connections.write() as connection:
            require_file(connection, tenant, file_id)
            stores = connection.execute("SELECT store_id FROM store_files WHERE file_id = ?", (file_id,)).fetchall()
            connection.execute(
                "UPDATE vector_stores SET generation = generation + 1"
                " WHERE id IN (SELECT store_id FROM store_files WHERE file_id = ?)",
                (file_id,),
            )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        # After the commit: a crash in between leaves bytes without a row, which `Database.recover` sweeps.
        self._blobs.remove(file_id)
        return tuple(row["store_id"] for row in stores)


def require_file(connection: sqlite3.Connection, tenant: str, file_id: str) -> sqlite3.Row:
    """Raises NotFound when the tenant has no such file."""
    row: sqlite3.Row | None = connection.execute(
        f"{_SELECT} WHERE f.tenant = ? AND f.id = ?", (tenant, file_id)
    ).fetchone()
    if row is None:
        raise NotFound("file", file_id)
    return row


def clean_filename(filename: str) -> str:
    """A name fit to be stored and shown: the last path component, NFC, no control characters, 255 characters.

    It keeps its extension when it is cut. It is never used as a path.
    """
    name = filename.replace("\\", "/").rstrip("/").rpartition("/")[2]
    name = unicodedata.normalize("NFC", name)
    name = "".join(c for c in name if unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") and c not in _SPOOFING)
    name = name.strip()
    if len(name) > NAME_LENGTH:
        stem, dot, extension = name.rpartition(".")
        ending = dot + extension if stem and len(extension) <= 16 else ""
        name = name[: NAME_LENGTH - len(ending)] + ending
    return "file" if name in ("", ".", "..") else name


def _file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(
        id=row["id"],
        tenant=row["tenant"],
        filename=row["filename"],
        purpose=row["purpose"],
        size_bytes=row["size_bytes"],
        created_at=row["created_at"],
        sha256=row["sha256"],
        media_type=row["media_type"],
    )
