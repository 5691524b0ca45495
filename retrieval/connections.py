"""SQLite connections for many threads: one writer at a time, readers that never wait for it."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrieval.types import StorageFailed

IDLE_READERS = 8
LOG_BYTES = 64 * 2**20
_STORAGE_ERRORS = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
}


class Connections:
    """Transactions on one database file in WAL mode. Blocking; usable from any thread.

    `write()` holds the process's writer lock and commits on success, rolls back on any exception; it raises
    StorageFailed where the disk is full, read-only or locked by another process.
    `read()` sees one consistent snapshot. At most eight idle read connections are kept. The writer lock is not
    re-entrant: a transaction never starts inside another.
    """

    def __init__(self, path: Path, busy_timeout_s: float = 30.0) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._write_lock = threading.Lock()
        self._idle_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._watch_lock = threading.Lock()
        self._watcher: sqlite3.Connection | None = None
        self._closed = False
        self._writer = self._connect()
        self._writer.execute("PRAGMA journal_mode = WAL")
        # The log of one large file must not stay on the disk for ever.
        self._writer.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        # FULL: a commit that was acknowledged survives a power cut, not only a killed process.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the database is closed")
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException as error:
                # A full disk fails in the commit too, and after some errors SQLite has rolled back by itself.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in _STORAGE_ERRORS:
                    raise StorageFailed(str(error)) from error
                raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        connection = self._borrow()
        try:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        finally:
            self._give_back(connection)

    def version(self) -> int:
        """Another number whenever any connection of any process has committed since. Reads no table."""
        with self._watch_lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the database is closed")
            if self._watcher is None:
                self._watcher = self._connect()
            return int(self._watcher.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        """Waits for the write in progress. Readers in progress finish and close their connection."""
        with self._write_lock, self._idle_lock, self._watch_lock:
            if self._closed:
                return
            self._closed = True
            if self._watcher is not None:
                self._watcher.close()
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            self._writer.close()

    def _borrow(self) -> sqlite3.Connection:
        with self._idle_lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the database is closed")
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._idle_lock:
            if not self._closed and len(self._idle) < IDLE_READERS:
                self._idle.append(connection)
                return
        connection.close()
