"""Vector stores of a tenant."""

import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from retrieval.connections import Connections
from retrieval.paging import select_page
from retrieval.records import SECONDS_PER_DAY, FileCounts, FileStatus, Page, PageRequest, VectorStore
from retrieval.types import NotFound, StoreExpired

TOUCH_S = 60

_COUNTS = ", ".join(
    f"(SELECT count(*) FROM store_files sf WHERE sf.store_id = s.id AND sf.status = '{status}') AS {status}_files"
    for status in FileStatus
)
_SELECT = (
    f"SELECT s.*, {_COUNTS}, (SELECT coalesce(sum(sf.usage_bytes), 0) FROM store_files sf"
    f" WHERE sf.store_id = s.id) AS usage_bytes FROM vector_stores s"
)


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """What to change of a store; None leaves a field as it is. `never_expires` drops the expiry."""

    name: str | None = None
    metadata: Mapping[str, str] | None = None
    expires_after_days: int | None = None
    never_expires: bool = False


class VectorStores:
    """Blocking; usable from any thread. A store of another tenant is NotFound."""

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.time) -> None:
        self._connections = connections
        self._clock = clock

    def create(
        self,
        tenant: str,
        name: str = "",
        metadata: Mapping[str, str] | None = None,
        expires_after_days: int | None = None,
    ) -> VectorStore:
        store_id, now = f"vs_{secrets.token_hex(12)}", int(self._clock())
        with self._connections.write() as connection:
            connection.execute(
                "INSERT INTO vector_stores"
                " (id, tenant, name, metadata, created_at, last_active_at, expires_after_days)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (store_id, tenant, name, _json(metadata or {}), now, now, expires_after_days),
            )
        return VectorStore(
            store_id, tenant, name, dict(metadata or {}), now, now, expires_after_days, 0, FileCounts(), 0
        )

    def get(self, tenant: str, store_id: str) -> VectorStore:
        """With counts of its files; `generation` is cheaper where only access and freshness matter."""
        with self._connections.read() as connection:
            return _get(connection, tenant, store_id)

    def generation(self, tenant: str, store_id: str) -> int:
        """Grows with every change of the store's chunks. One row read; raises NotFound like `get`, StoreExpired."""
        with self._connections.read() as connection:
            row = require_store(connection, tenant, store_id)
        days = row["expires_after_days"]
        if days is not None and self._clock() >= row["last_active_at"] + days * SECONDS_PER_DAY:
            raise StoreExpired(store_id)
        return int(row["generation"])

    def metadata(self, tenant: str, store_id: str) -> Mapping[str, str]:
        """One row read; raises NotFound like `get`."""
        with self._connections.read() as connection:
            row = require_store(connection, tenant, store_id)
        return dict(orjson.loads(row["metadata"]))

    def find_by_name(self, tenant: str, name: str) -> VectorStore | None:
        """The tenant's oldest store of this name, so that a later namesake never takes its place."""
        with self._connections.read() as connection:
            row = connection.execute(
                f"{_SELECT} WHERE s.tenant = ? AND s.name = ? ORDER BY s.seq LIMIT 1", (tenant, name)
            ).fetchone()
        return None if row is None else _store(row)

    def list(self, tenant: str, page: PageRequest | None = None) -> Page[VectorStore]:
        with self._connections.read() as connection:
            rows, more = select_page(
                connection, _SELECT, "s.tenant = ?", [tenant], "s", "id", page or PageRequest(), "vector store"
            )
        return Page(tuple(_store(row) for row in rows), more)

    def ids(self) -> tuple[str, ...]:
        """Ids of every store of every tenant, for the housekeeping of derived indexes."""
        with self._connections.read() as connection:
            return tuple(row["id"] for row in connection.execute("SELECT id FROM vector_stores ORDER BY seq"))

    def update(self, tenant: str, store_id: str, change: StoreUpdate) -> VectorStore:
        now = int(self._clock())
        with self._connections.write() as connection:
            row = require_store(connection, tenant, store_id)
            days = change.expires_after_days
            if days is None and not change.never_expires:
                days = row["expires_after_days"]
            connection.execute(
                "UPDATE vector_stores SET name = ?, metadata = ?, expires_after_days = ?, last_active_at = ?"
                " WHERE id = ?",
                (
                    row["name"] if change.name is None else change.name,
                    row["metadata"] if change.metadata is None else _json(change.metadata),
                    days,
                    now,
                    store_id,
                ),
            )
            return _get(connection, tenant, store_id)

    def touch(self, tenant: str, store_id: str) -> None:
        """Notes that the store was used, which moves its expiry; writes at most once a minute per store."""
        now = int(self._clock())
        with self._connections.read() as connection:
            row = require_store(connection, tenant, store_id)
        if now - row["last_active_at"] >= TOUCH_S:
            with self._connections.write() as connection:
                connection.execute("UPDATE vector_stores SET last_active_at = ? WHERE id = ?", (now, store_id))

    def delete(self, tenant: str, store_id: str) -> None:
        """Deletes the store with its chunks; the files stay."""
        with self._connections.write() as connection:
            require_store(connection, tenant, store_id)
            connection.execute("DELETE FROM vector_stores WHERE id = ?", (store_id,))


def require_store(connection: sqlite3.Connection, tenant: str, store_id: str) -> sqlite3.Row:
    """The store's own row. Raises NotFound when the tenant has no such store."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM vector_stores WHERE tenant = ? AND id = ?", (tenant, store_id)
    ).fetchone()
    if row is None:
        raise NotFound("vector store", store_id)
    return row


def bump_generation(connection: sqlite3.Connection, store_id: str, now: int) -> None:
    """Marks derived indexes of the store as old, in the transaction that changes its chunks."""
    connection.execute(
        "UPDATE vector_stores SET generation = generation + 1, last_active_at = ? WHERE id = ?", (now, store_id)
    )


def _get(connection: sqlite3.Connection, tenant: str, store_id: str) -> VectorStore:
    row = connection.execute(f"{_SELECT} WHERE s.tenant = ? AND s.id = ?", (tenant, store_id)).fetchone()
    if row is None:
        raise NotFound("vector store", store_id)
    return _store(row)


def _store(row: sqlite3.Row) -> VectorStore:
    return VectorStore(
        id=row["id"],
        tenant=row["tenant"],
        name=row["name"],
        metadata=orjson.loads(row["metadata"]),
        created_at=row["created_at"],
        last_active_at=row["last_active_at"],
        expires_after_days=row["expires_after_days"],
        generation=row["generation"],
        file_counts=FileCounts(**{status.value: row[f"{status}_files"] for status in FileStatus}),
        usage_bytes=row["usage_bytes"],
    )


def _json(value: Mapping[str, str]) -> str:
    return orjson.dumps(dict(value)).decode()
