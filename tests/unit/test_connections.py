"""Transactions when the disk or the database says no."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import translate
from retrieval.blobs import Blobs, new_file_id
from retrieval.connections import Connections
from retrieval.types import StorageFailed


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Connections]:
    connections = Connections(tmp_path / "some.db", busy_timeout_s=0.05)
    with connections.write() as connection:
        connection.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE children (text TEXT, parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)"
        )
    yield connections
    connections.close()


def children(connections: Connections) -> int:
    with connections.read() as connection:
        return int(connection.execute("SELECT count(*) FROM children").fetchone()[0])


def test_a_commit_that_fails_is_rolled_back_and_the_next_write_works(connections: Connections) -> None:
    with pytest.raises(sqlite3.IntegrityError), connections.write() as connection:
        connection.execute("INSERT INTO children VALUES ('orphan', 7)")
    with connections.write() as connection:
        connection.execute("INSERT INTO children VALUES ('free', NULL)")
    assert children(connections) == 1


def test_a_full_disk_is_a_named_error_and_writes_work_again_when_there_is_room(connections: Connections) -> None:
    with connections.write() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFailed, match="full") as failed, connections.write() as connection:
        connection.execute("INSERT INTO children VALUES (?, NULL)", ("x" * 100_000,))
    assert translate(failed.value).http_status == 507
    assert children(connections) == 0
    with connections.write() as connection:
        connection.execute("PRAGMA max_page_count = 10000")
        connection.execute("INSERT INTO children VALUES (?, NULL)", ("x" * 100_000,))
    assert children(connections) == 1


def test_a_database_locked_by_another_process_is_a_named_error(connections: Connections, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "some.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageFailed, match="locked"), connections.write():
        pass
    other.execute("ROLLBACK")
    other.close()
    with connections.write() as connection:
        connection.execute("INSERT INTO children VALUES ('free', NULL)")


def test_a_file_that_the_disk_does_not_take_is_a_named_error(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "files")
    (tmp_path / "files").rmdir()
    with pytest.raises(StorageFailed):
        blobs.write(new_file_id(), b"text")
