"""Files in vector stores, and where their ingestion stands."""

import secrets
import sqlite3
import time
from collections.abc import Callable

import orjson

from retrieval.connections import Connections
from retrieval.files import require_file
from retrieval.paging import select_page
from retrieval.records import ChunkingStrategy, FileError, FileStatus, Page, PageRequest, StoreFile
from retrieval.stores import bump_generation, require_store
from retrieval.types import Attributes, NotFound

_SELECT = (
    "SELECT sf.*, f.filename, f.tenant FROM store_files sf JOIN files f ON f.id = sf.file_id"
    " JOIN vector_stores s ON s.id = sf.store_id"
)
_OWNED = "s.tenant = ? AND f.tenant = s.tenant AND sf.store_id = ?"


class StoreFiles:
    """Blocking; usable from any thread. Whatever belongs to another tenant is NotFound."""

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.time) -> None:
        self._connections = connections
        self._clock = clock

    def attach(
        self,
        tenant: str,
        store_id: str,
        file_id: str,
        attributes: Attributes | None = None,
        strategy: ChunkingStrategy | None = None,
    ) -> StoreFile:
        """Puts a file into a store with status in_progress.

        Attached again, a completed file with the same strategy stays completed (given attributes replace the
        old ones); otherwise it starts anew, without its old chunks.
        """
        now, chosen = int(self._clock()), strategy or ChunkingStrategy()
        with self._connections.write() as connection:
            require_store(connection, tenant, store_id)
            require_file(connection, tenant, file_id)
            found = _find(connection, tenant, store_id, file_id)
            if found is None:
                connection.execute(
                    "INSERT INTO store_files (store_id, file_id, status, attributes, created_at, max_tokens,"
                    " overlap_tokens, revision) VALUES (?, ?, 'in_progress', ?, ?, ?, ?, ?)",
                    (
                        store_id,
                        file_id,
                        _json(attributes),
                        now,
                        chosen.max_tokens,
                        chosen.overlap_tokens,
                        _revision(),
                    ),
                )
                bump_generation(connection, store_id, now)
                return _get(connection, tenant, store_id, file_id)
            if attributes is not None:
                _set_attributes(connection, found, attributes)
            unfinished = found.status in (FileStatus.FAILED, FileStatus.CANCELLED)
            if unfinished or found.strategy != chosen:
                connection.execute("DELETE FROM chunks WHERE store_id = ? AND file_id = ?", (store_id, file_id))
                connection.execute(
                    "UPDATE store_files SET status = 'in_progress', error_code = NULL, error_message = NULL,"
                    " usage_bytes = 0, max_tokens = ?, overlap_tokens = ?, revision = ?"
                    " WHERE store_id = ? AND file_id = ?",
                    (chosen.max_tokens, chosen.overlap_tokens, _revision(), store_id, file_id),
                )
                bump_generation(connection, store_id, now)
            return _get(connection, tenant, store_id, file_id)

    def answers(self, tenant: str, file_id: str) -> bool:
        """Whether the file stands in any of the tenant's stores; text of one that does not must answer no more."""
        with self._connections.read() as connection:
            row = connection.execute(
                "SELECT 1 FROM store_files sf JOIN vector_stores s ON s.id = sf.store_id"
                " WHERE sf.file_id = ? AND s.tenant = ? LIMIT 1",
                (file_id, tenant),
            ).fetchone()
        return row is not None

    def get(self, tenant: str, store_id: str, file_id: str) -> StoreFile:
        with self._connections.read() as connection:
            require_store(connection, tenant, store_id)
            return _get(connection, tenant, store_id, file_id)

    def list(
        self, tenant: str, store_id: str, page: PageRequest | None = None, status: FileStatus | None = None
    ) -> Page[StoreFile]:
        where, parameters = _OWNED, [tenant, store_id]
        if status is not None:
            where, parameters = f"{where} AND sf.status = ?", [tenant, store_id, status.value]
        with self._connections.read() as connection:
            require_store(connection, tenant, store_id)
            rows, more = select_page(
                connection,
                _SELECT,
                where,
                parameters,
                "sf",
                "file_id",
                page or PageRequest(),
                "vector store file",
            )
        return Page(tuple(_store_file(row) for row in rows), more)

    def update_attributes(self, tenant: str, store_id: str, file_id: str, attributes: Attributes) -> StoreFile:
        """Replaces the attributes. Chunks and embeddings stay; filters see the new values at once."""
        with self._connections.write() as connection:
            require_store(connection, tenant, store_id)
            _set_attributes(connection, _get(connection, tenant, store_id, file_id), attributes)
            return _get(connection, tenant, store_id, file_id)

    def detach(self, tenant: str, store_id: str, file_id: str) -> None:
        """Takes the file and its chunks out of the store; the file itself stays."""
        with self._connections.write() as connection:
            require_store(connection, tenant, store_id)
            _get(connection, tenant, store_id, file_id)
            connection.execute("DELETE FROM store_files WHERE store_id = ? AND file_id = ?", (store_id, file_id))
            bump_generation(connection, store_id, int(self._clock()))

    def fail(self, claimed: StoreFile, error: FileError) -> bool:
        """Records why ingestion of `claimed` failed; False if it was deleted or started anew meanwhile."""
        return self._finish(claimed, FileStatus.FAILED, error)

    def cancel(self, tenant: str, store_id: str, file_id: str) -> StoreFile:
        """Cancels an ingestion that is not done; anything else is left as it is."""
        claimed = self.get(tenant, store_id, file_id)
        self._finish(claimed, FileStatus.CANCELLED, None)
        return self.get(tenant, store_id, file_id)

    def unfinished(self) -> tuple[StoreFile, ...]:
        """Every tenant's files that are in progress, oldest first: the work to do after a start."""
        with self._connections.read() as connection:
            rows = connection.execute(f"{_SELECT} WHERE sf.status = 'in_progress' ORDER BY sf.seq").fetchall()
        return tuple(_store_file(row) for row in rows)

    def _finish(self, claimed: StoreFile, status: FileStatus, error: FileError | None) -> bool:
        with self._connections.write() as connection:
            changed = connection.execute(
                "UPDATE store_files SET status = ?, error_code = ?, error_message = ?"
                " WHERE store_id = ? AND file_id = ? AND revision = ? AND status = 'in_progress'",
                (
                    status.value,
                    error and error.code,
                    error and error.message,
                    claimed.store_id,
                    claimed.file_id,
                    claimed.revision,
                ),
            ).rowcount
        return changed == 1


def _find(connection: sqlite3.Connection, tenant: str, store_id: str, file_id: str) -> StoreFile | None:
    row = connection.execute(f"{_SELECT} WHERE {_OWNED} AND sf.file_id = ?", (tenant, store_id, file_id)).fetchone()
    return None if row is None else _store_file(row)


def _get(connection: sqlite3.Connection, tenant: str, store_id: str, file_id: str) -> StoreFile:
    found = _find(connection, tenant, store_id, file_id)
    if found is None:
        raise NotFound("vector store file", file_id)
    return found


def _set_attributes(connection: sqlite3.Connection, store_file: StoreFile, attributes: Attributes) -> None:
    connection.execute(
        "UPDATE store_files SET attributes = ? WHERE store_id = ? AND file_id = ?",
        (_json(attributes), store_file.store_id, store_file.file_id),
    )


def _store_file(row: sqlite3.Row) -> StoreFile:
    error = None if row["error_code"] is None else FileError(row["error_code"], row["error_message"])
    return StoreFile(
        store_id=row["store_id"],
        file_id=row["file_id"],
        tenant=row["tenant"],
        filename=row["filename"],
        status=FileStatus(row["status"]),
        last_error=error,
        attributes=orjson.loads(row["attributes"]),
        created_at=row["created_at"],
        usage_bytes=row["usage_bytes"],
        strategy=ChunkingStrategy(row["max_tokens"], row["overlap_tokens"]),
        revision=row["revision"],
    )


def _revision() -> int:
    """Random, so that a file that was detached and attached again is never taken for its former self."""
    return secrets.randbits(62)


def _json(attributes: Attributes | None) -> str:
    return orjson.dumps(dict(attributes or {})).decode()
