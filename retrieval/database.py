"""The truth: documents, chunks, embeddings and token ids in one SQLite database, files' bytes beside it."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from retrieval.blobs import Blobs
from retrieval.chunk_rows import Chunks
from retrieval.connections import Connections
from retrieval.files import Files
from retrieval.folder import set_up_alone
from retrieval.records import StoreFile
from retrieval.schema import bind_embedding_model, create_tables, write_meta
from retrieval.store_files import StoreFiles
from retrieval.stores import VectorStores

log = logging.getLogger("headstart.database")


class Database:
    """Owner of `data_dir/headstart.db` (WAL) and `data_dir/files/`. Blocking; usable from any thread.

    Call it off the event loop. Every operation is one transaction. Raises UnknownSchema for a database of a
    newer version.
    """

    def __init__(self, data_dir: Path, clock: Callable[[], float] = time.time) -> None:
        with set_up_alone(data_dir):
            self._connections = Connections(data_dir / "headstart.db")
            self._blobs = Blobs(data_dir / "files")
            try:
                with self._connections.write() as connection:
                    create_tables(connection)
            except BaseException:
                self._connections.close()
                raise
        self.files = Files(self._connections, self._blobs, clock)
        self.stores = VectorStores(self._connections, clock)
        self.store_files = StoreFiles(self._connections, clock)
        self.chunks = Chunks(self._connections, clock)

    def bind_embedding_model(self, model_id: str, dimension: int) -> None:
        """Call once at start, before anything is ingested or searched. Raises EmbeddingModelChanged."""
        with self._connections.write() as connection:
            bind_embedding_model(connection, model_id, dimension)

    def forget_embeddings(self, model_id: str, dimension: int) -> int:
        """Drops all chunks and takes a new embedding model; completed files become in_progress.

        Returns how many files are to be ingested again; `recover` lists them.
        """
        with self._connections.write() as connection:
            connection.execute("DELETE FROM chunks")
            connection.execute("UPDATE vector_stores SET generation = generation + 1")
            files = connection.execute(
                "UPDATE store_files SET status = 'in_progress', usage_bytes = 0 WHERE status = 'completed'"
            ).rowcount
            write_meta(connection, "embedding_model", model_id)
            write_meta(connection, "embedding_dimension", str(dimension))
        return files

    def recover(self) -> tuple[StoreFile, ...]:
        """After a start: sweeps bytes that a crash left without a row, returns the files still to be ingested.

        A database without any file beside uploads that are there was lost or replaced: nothing is swept then.
        """
        with self._connections.read() as connection:
            known = {row["id"] for row in connection.execute("SELECT id FROM files")}
        if known:
            self._blobs.sweep(known)
        elif held := self._blobs.count():
            log.warning(
                "the database knows no file, but %d uploads lie beside it: it was lost or replaced, they are kept",
                held,
            )
        return self.store_files.unfinished()

    def version(self) -> int:
        """Another number after any change, by whichever process. Microseconds."""
        return self._connections.version()

    def close(self) -> None:
        self._connections.close()
