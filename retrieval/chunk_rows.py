"""Chunks: written as a whole with their file's status, read by row id for search."""

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from retrieval.connections import Connections
from retrieval.records import ChunkText, FileRows, NewChunk, StoreChanges, StoreFile
from retrieval.schema import read_meta
from retrieval.stores import bump_generation
from retrieval.types import Chunk, NotFound, RenderedChunk

T = TypeVar("T")

# SQLite's default bound on `?` in one statement is far above this.
BATCH = 500
_COMPLETED = " JOIN store_files sf ON sf.store_id = c.store_id AND sf.file_id = c.file_id AND sf.status = 'completed'"


class Chunks:
    """Blocking; usable from any thread. Rows exist of completed files only: they come and go with the status.

    Reads take a store's id alone: whoever calls them has shown, by `VectorStores.generation` or `get`, that the
    tenant owns it.
    """

    def __init__(self, connections: Connections, clock: Callable[[], float] = time.time) -> None:
        self._connections = connections
        self._clock = clock

    def replace(self, claimed: StoreFile, rows: Sequence[NewChunk]) -> None:
        """Stores the chunks of a file and completes it, in one transaction.

        `claimed` is the record that the work began with. Raises NotFound if the file was deleted, cancelled or
        started anew meanwhile, ValueError for an embedding of another dimension than the database's.
        """
        now = int(self._clock())
        with self._connections.write() as connection:
            dimension = _dimension(connection)
            done = connection.execute(
                "UPDATE store_files SET status = 'completed', error_code = NULL, error_message = NULL,"
                " usage_bytes = ? WHERE store_id = ? AND file_id = ? AND revision = ?"
                " AND status = 'in_progress'",
                (_usage_bytes(rows), claimed.store_id, claimed.file_id, claimed.revision),
            ).rowcount
            if done != 1:
                raise NotFound("vector store file", claimed.file_id)
            connection.execute(
                "DELETE FROM chunks WHERE store_id = ? AND file_id = ?", (claimed.store_id, claimed.file_id)
            )
            connection.executemany(
                "INSERT INTO chunks (store_id, file_id, ordinal, title, label, text, rendered, token_ids,"
                " fingerprint, text_sha256, embedding) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [_values(claimed, row, dimension) for row in rows],
            )
            bump_generation(connection, claimed.store_id, now)

    def by_row_ids(self, store_id: str, row_ids: Sequence[int]) -> list[Chunk]:
        """The chunks in the order of `row_ids`; deleted ones are left out."""
        found: dict[int, Chunk] = {}
        with self._connections.read() as connection:
            for batch in _batches(row_ids):
                rows = connection.execute(
                    "SELECT c.row_id, c.store_id, c.file_id, c.ordinal, c.title, c.label, c.text, c.rendered,"
                    " c.token_ids, c.fingerprint, sf.attributes, f.filename FROM chunks c"
                    f"{_COMPLETED} JOIN files f ON f.id = c.file_id"
                    f" WHERE c.row_id IN ({_marks(batch)}) AND c.store_id = ?",
                    (*batch, store_id),
                )
                found.update((row["row_id"], _chunk(row)) for row in rows)
        return [found[row_id] for row_id in row_ids if row_id in found]

    def changes(self, store_id: str, after_row_id: int = 0) -> StoreChanges:
        """What an index that holds rows up to `after_row_id` must add and forget; one consistent view.

        Row ids only grow, so new rows are always above the highest known one. `after_row_id` 0 reads all.
        """
        with self._connections.read() as connection:
            store = connection.execute("SELECT generation FROM vector_stores WHERE id = ?", (store_id,)).fetchone()
            if store is None:
                raise NotFound("vector store", store_id)
            row_ids, embeddings = _embeddings(connection, store_id, after_row_id)
            return StoreChanges(
                generation=store["generation"],
                live_row_ids=_row_ids(connection, store_id, 0),
                row_ids=row_ids,
                embeddings=embeddings,
                texts=tuple(_texts(connection, store_id, after_row_id)),
            )

    def live_row_ids(self, store_id: str) -> NDArray[np.int64]:
        """int64, ascending; empty for an unknown store."""
        with self._connections.read() as connection:
            return _row_ids(connection, store_id, 0)

    def files(self, store_id: str) -> tuple[FileRows, ...]:
        """Each completed file with its attributes and live rows, for filters."""
        with self._connections.read() as connection:
            grouped: dict[str, list[int]] = {}
            for row in connection.execute(
                "SELECT file_id, row_id FROM chunks WHERE store_id = ? ORDER BY file_id, row_id", (store_id,)
            ):
                grouped.setdefault(row["file_id"], []).append(row["row_id"])
            rows = connection.execute(
                "SELECT sf.file_id, sf.attributes, f.filename FROM store_files sf JOIN files f ON f.id = sf.file_id"
                " WHERE sf.store_id = ? AND sf.status = 'completed' ORDER BY sf.seq",
                (store_id,),
            ).fetchall()
        return tuple(
            FileRows(
                row["file_id"],
                row["filename"],
                orjson.loads(row["attributes"]),
                np.asarray(grouped.get(row["file_id"], []), dtype=np.int64),
            )
            for row in rows
        )

    def embeddings_for(self, tenant: str, text_sha256s: Sequence[bytes]) -> Mapping[bytes, NDArray[np.float32]]:
        """Embeddings that the tenant already has of these contents, so that the same text is embedded once."""
        found: dict[bytes, NDArray[np.float32]] = {}
        with self._connections.read() as connection:
            for batch in _batches(list(dict.fromkeys(text_sha256s))):
                rows = connection.execute(
                    "SELECT c.text_sha256, c.embedding FROM chunks c JOIN vector_stores s ON s.id = c.store_id"
                    f" WHERE c.text_sha256 IN ({_marks(batch)}) AND s.tenant = ?",
                    (*batch, tenant),
                )
                for row in rows:
                    found[row["text_sha256"]] = np.frombuffer(row["embedding"], dtype="<f4").astype(np.float32)
        return found

    def of_other_renderer(self, fingerprint: str, after_row_id: int, limit: int) -> list[ChunkText]:
        """Chunks whose label and token ids were made by another renderer, by ascending row id."""
        with self._connections.read() as connection:
            rows = connection.execute(
                "SELECT row_id, title, text FROM chunks WHERE row_id > ? AND fingerprint <> ?"
                " ORDER BY row_id LIMIT ?",
                (after_row_id, fingerprint, limit),
            ).fetchall()
        return [ChunkText(row["row_id"], row["title"], row["text"]) for row in rows]

    def store_renderings(self, fingerprint: str, renderings: Mapping[int, RenderedChunk]) -> None:
        """Replaces label, prompt text and token ids by row id; rows deleted meanwhile are skipped."""
        with self._connections.write() as connection:
            connection.executemany(
                "UPDATE chunks SET label = ?, rendered = ?, token_ids = ?, fingerprint = ? WHERE row_id = ?",
                [(r.label, r.text, _pack(r.token_ids), fingerprint, row_id) for row_id, r in renderings.items()],
            )


def text_sha256(title: str, text: str) -> bytes:
    """Identifies what is embedded and rendered of a chunk: heading path and body."""
    return hashlib.sha256(f"{title}\0{text}".encode()).digest()


def _dimension(connection: sqlite3.Connection) -> int:
    return int(read_meta(connection, "embedding_dimension") or 0)


def _usage_bytes(rows: Sequence[NewChunk]) -> int:
    return sum(
        len(row.text.encode()) + len(row.prompt_text.encode()) + row.token_ids.nbytes + row.embedding.nbytes
        for row in rows
    )


def _values(claimed: StoreFile, row: NewChunk, dimension: int) -> tuple[object, ...]:
    if row.embedding.shape != (dimension,):
        raise ValueError(f"an embedding has shape {row.embedding.shape}; the database holds dimension {dimension}")
    return (
        claimed.store_id,
        claimed.file_id,
        row.ordinal,
        row.title,
        row.label,
        row.text,
        row.prompt_text,
        row.token_ids.astype("<i4").tobytes(),
        row.renderer_fingerprint,
        row.text_sha256,
        row.embedding.astype("<f4").tobytes(),
    )


def _pack(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def _chunk(row: sqlite3.Row) -> Chunk:
    token_ids = tuple(np.frombuffer(row["token_ids"], dtype="<i4").tolist())
    return Chunk(
        row_id=row["row_id"],
        store_id=row["store_id"],
        file_id=row["file_id"],
        filename=row["filename"],
        ordinal=row["ordinal"],
        title=row["title"],
        text=row["text"],
        label=row["label"],
        rendered=RenderedChunk(row["label"], row["rendered"], token_ids),
        attributes=orjson.loads(row["attributes"]),
        renderer_fingerprint=row["fingerprint"],
    )


def _row_ids(connection: sqlite3.Connection, store_id: str, after_row_id: int) -> NDArray[np.int64]:
    rows = connection.execute(
        "SELECT c.row_id FROM chunks c WHERE c.store_id = ? AND c.row_id > ? ORDER BY c.row_id",
        (store_id, after_row_id),
    )
    return np.fromiter((row[0] for row in rows), dtype=np.int64)


def _embeddings(
    connection: sqlite3.Connection, store_id: str, after_row_id: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    row_ids = _row_ids(connection, store_id, after_row_id)
    matrix = np.empty((len(row_ids), _dimension(connection)), dtype=np.float32)
    rows = connection.execute(
        "SELECT c.embedding FROM chunks c WHERE c.store_id = ? AND c.row_id > ? ORDER BY c.row_id",
        (store_id, after_row_id),
    )
    for position, row in enumerate(rows):
        matrix[position] = np.frombuffer(row[0], dtype="<f4")
    return row_ids, matrix


def _texts(connection: sqlite3.Connection, store_id: str, after_row_id: int) -> Iterator[ChunkText]:
    rows = connection.execute(
        "SELECT c.row_id, c.title, c.text FROM chunks c WHERE c.store_id = ? AND c.row_id > ? ORDER BY c.row_id",
        (store_id, after_row_id),
    )
    for row in rows:
        yield ChunkText(row["row_id"], row["title"], row["text"])


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


def _marks(batch: Sequence[object]) -> str:
    return ",".join("?" * len(batch))
