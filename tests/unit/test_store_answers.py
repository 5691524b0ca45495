"""Which files may still answer."""

import os
import time
from pathlib import Path

import pytest

from retrieval.database import Database


def test_e6_a_file_that_left_its_last_store_answers_no_more(tmp_path: Path) -> None:
    database = Database(tmp_path)
    try:
        first, second = database.stores.create("t", "first"), database.stores.create("t", "second")
        file = database.files.create("t", "a.txt", b"text")
        assert not database.store_files.answers("t", file.id)
        database.store_files.attach("t", first.id, file.id)
        database.store_files.attach("t", second.id, file.id)
        database.store_files.detach("t", first.id, file.id)
        assert database.store_files.answers("t", file.id)
        assert not database.store_files.answers("other", file.id)
        database.stores.delete("t", second.id)
        assert not database.store_files.answers("t", file.id)
        assert database.files.get("t", file.id)
    finally:
        database.close()


def test_e7_uploads_outlive_a_database_that_was_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = Database(tmp_path)
    file = database.files.create("t", "a.txt", b"text")
    database.close()
    for path in tmp_path.glob("headstart.db*"):
        path.unlink()
    old_s = time.time() - 86_400
    os.utime(tmp_path / "files" / file.id, (old_s, old_s))
    database = Database(tmp_path)
    try:
        database.recover()
        assert (tmp_path / "files" / file.id).read_bytes() == b"text"
        assert "1 uploads" in caplog.text
    finally:
        database.close()
