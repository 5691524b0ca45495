"""The tables, and what the database remembers about itself."""

import sqlite3

from retrieval.records import EmbeddingModelChanged
from retrieval.types import RetrievalError

SCHEMA_VERSION = 1

TABLES = """
CREATE TABLE IF NOT EXISTS meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS files (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    tenant     TEXT NOT NULL,
    filename   TEXT NOT NULL,
    purpose    TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    sha256     TEXT NOT NULL,
    media_type TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant, seq);

CREATE TABLE IF NOT EXISTS vector_stores (
    seq                INTEGER PRIMARY KEY AUTOINCREMENT,
    id                 TEXT NOT NULL UNIQUE,
    tenant             TEXT NOT NULL,
    name               TEXT NOT NULL,
    metadata           TEXT NOT NULL,
    created_at         INTEGER NOT NULL,
    last_active_at     INTEGER NOT NULL,
    expires_after_days INTEGER,
    generation         INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS vector_stores_by_tenant ON vector_stores (tenant, seq);
CREATE INDEX IF NOT EXISTS vector_stores_by_name ON vector_stores (tenant, name, seq);

CREATE TABLE IF NOT EXISTS store_files (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    store_id       TEXT NOT NULL REFERENCES vector_stores (id) ON DELETE CASCADE,
    file_id        TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    status         TEXT NOT NULL,
    error_code     TEXT,
    error_message  TEXT,
    attributes     TEXT NOT NULL,
    created_at     INTEGER NOT NULL,
    usage_bytes    INTEGER NOT NULL DEFAULT 0,
    max_tokens     INTEGER NOT NULL,
    overlap_tokens INTEGER NOT NULL,
    revision       INTEGER NOT NULL,
    UNIQUE (store_id, file_id)
);
CREATE INDEX IF NOT EXISTS store_files_by_file ON store_files (file_id);
CREATE INDEX IF NOT EXISTS store_files_by_status ON store_files (store_id, status, usage_bytes);

CREATE TABLE IF NOT EXISTS chunks (
    row_id      INTEGER PRIMARY KEY AUTOINCREMENT,
    store_id    TEXT NOT NULL,
    file_id     TEXT NOT NULL,
    ordinal     INTEGER NOT NULL,
    title       TEXT NOT NULL,
    label       TEXT NOT NULL,
    text        TEXT NOT NULL,
    rendered    TEXT NOT NULL,
    token_ids   BLOB NOT NULL,
    fingerprint TEXT NOT NULL,
    text_sha256 BLOB NOT NULL,
    embedding   BLOB NOT NULL,
    FOREIGN KEY (store_id, file_id) REFERENCES store_files (store_id, file_id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS chunks_by_file ON chunks (store_id, file_id, row_id);
CREATE INDEX IF NOT EXISTS chunks_by_store ON chunks (store_id, row_id);
CREATE INDEX IF NOT EXISTS chunks_by_content ON chunks (text_sha256);
"""


class UnknownSchema(RetrievalError):
    """The database was written by a newer version of this program."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"The database has schema version {found}; this program knows version {SCHEMA_VERSION}. "
            f"Update headstart, or choose another HEADSTART_DATA_DIR."
        )


def create_tables(connection: sqlite3.Connection) -> None:
    """Creates what is missing, inside the caller's transaction. Raises UnknownSchema."""
    # executescript would commit the caller's transaction, so the statements are run one by one.
    for statement in TABLES.split(";"):
        if statement.strip():
            connection.execute(statement)
    version = read_meta(connection, "schema_version")
    if version is None:
        write_meta(connection, "schema_version", str(SCHEMA_VERSION))
    elif version != str(SCHEMA_VERSION):
        raise UnknownSchema(version)


def read_meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row["value"])


def write_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )


def bind_embedding_model(connection: sqlite3.Connection, model_id: str, dimension: int) -> None:
    """Remembers the model of the embeddings; raises EmbeddingModelChanged if stored chunks have another's."""
    stored = read_meta(connection, "embedding_model")
    stored_dimension = int(read_meta(connection, "embedding_dimension") or 0)
    if stored is not None and (stored, stored_dimension) != (model_id, dimension):
        has_chunks = connection.execute("SELECT EXISTS (SELECT 1 FROM chunks)").fetchone()[0]
        if has_chunks:
            raise EmbeddingModelChanged(stored, stored_dimension, model_id, dimension)
    write_meta(connection, "embedding_model", model_id)
    write_meta(connection, "embedding_dimension", str(dimension))
