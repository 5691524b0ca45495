"""The truth in SQLite: tenants, paging, deletion, generations and what survives."""

import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrieval.chunk_rows import text_sha256
from retrieval.database import Database
from retrieval.files import clean_filename
from retrieval.records import (
    ChunkingStrategy,
    EmbeddingModelChanged,
    FileError,
    FileStatus,
    NewChunk,
    PageRequest,
    StoreFile,
)
from retrieval.stores import StoreUpdate
from retrieval.types import NotFound, RenderedChunk

DIMENSION = 4


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path)
    database.bind_embedding_model("model-a", DIMENSION)
    yield database
    database.close()


def chunk(ordinal: int, text: str, title: str = "T", value: float = 1.0) -> NewChunk:
    embedding = np.full(DIMENSION, value, dtype=np.float32)
    token_ids = np.array([1, 2, 70_000], dtype=np.int32)
    rendered = f"[k{ordinal}] {title}\n{text}"
    return NewChunk(
        ordinal, title, text, f"k{ordinal}", rendered, token_ids, "fp", text_sha256(title, text), embedding
    )


def ingested(database: Database, tenant: str, store_id: str, name: str, *texts: str) -> StoreFile:
    file = database.files.create(tenant, name, " ".join(texts).encode())
    claimed = database.store_files.attach(tenant, store_id, file.id)
    database.chunks.replace(claimed, [chunk(i, text, value=i) for i, text in enumerate(texts)])
    return database.store_files.get(tenant, store_id, file.id)


def test_a_file_keeps_its_bytes_and_what_is_known_of_it(database: Database) -> None:
    file = database.files.create("t", "handbook.pdf", io.BytesIO(b"x" * 3_000_000))
    assert (file.size_bytes, file.media_type) == (3_000_000, "application/pdf")
    assert database.files.get("t", file.id) == file
    assert database.files.read("t", file.id) == b"x" * 3_000_000


def test_lists_page_forwards_and_backwards_without_gaps(database: Database) -> None:
    ids = [database.files.create("t", f"{n}.txt", b"x").id for n in range(7)]
    database.files.create("other", "foreign.txt", b"x")
    seen: list[str] = []
    after, more = None, True
    while more:
        page = database.files.list("t", PageRequest(limit=3, after=after))
        seen += [file.id for file in page.items]
        after, more = seen[-1], page.has_more
    assert seen == ids[::-1]
    ascending = database.files.list("t", PageRequest(limit=2, descending=False, after=ids[2]))
    assert [file.id for file in ascending.items] == ids[3:5]
    before = database.files.list("t", PageRequest(limit=2, descending=False, before=ids[4]))
    assert [file.id for file in before.items] == ids[2:4]
    assert before.has_more


def test_a_cursor_that_is_not_in_the_list_is_named(database: Database) -> None:
    foreign = database.files.create("other", "x.txt", b"x")
    with pytest.raises(NotFound, match=foreign.id):
        database.files.list("t", PageRequest(after=foreign.id))


def test_f3_every_operation_on_a_foreign_id_is_not_found(database: Database) -> None:
    store = database.stores.create("a", "mine")
    file = ingested(database, "a", store.id, "x.txt", "text")
    other_store = database.stores.create("b", "theirs")
    own_file = database.files.create("b", "y.txt", b"y")
    operations: list[Callable[[], object]] = [
        lambda: database.files.get("b", file.file_id),
        lambda: database.files.open("b", file.file_id),
        lambda: database.files.read("b", file.file_id),
        lambda: database.files.delete("b", file.file_id),
        lambda: database.stores.get("b", store.id),
        lambda: database.stores.generation("b", store.id),
        lambda: database.stores.touch("b", store.id),
        lambda: database.stores.update("b", store.id, StoreUpdate(name="stolen")),
        lambda: database.stores.delete("b", store.id),
        lambda: database.store_files.attach("b", store.id, own_file.id),
        lambda: database.store_files.attach("b", other_store.id, file.file_id),
        lambda: database.store_files.get("b", store.id, file.file_id),
        lambda: database.store_files.list("b", store.id),
        lambda: database.store_files.update_attributes("b", store.id, file.file_id, {"a": 1}),
        lambda: database.store_files.detach("b", store.id, file.file_id),
        lambda: database.store_files.cancel("b", store.id, file.file_id),
    ]
    for operation in operations:
        with pytest.raises(NotFound):
            operation()
    assert database.stores.find_by_name("b", "mine") is None
    assert database.chunks.embeddings_for("b", [text_sha256("T", "text")]) == {}
    assert database.store_files.get("a", store.id, file.file_id) == file
    assert [s.id for s in database.stores.list("b").items] == [other_store.id]


def test_a_store_counts_its_files_by_status(database: Database) -> None:
    store = database.stores.create("t", "s", {"team": "deck"}, expires_after_days=2)
    done = ingested(database, "t", store.id, "a.txt", "one", "two")
    failed = database.files.create("t", "b.txt", b"b")
    claimed = database.store_files.attach("t", store.id, failed.id)
    assert database.stores.get("t", store.id).status(0) == "in_progress"
    assert database.store_files.fail(claimed, FileError("invalid_file", "broken"))
    counted = database.stores.get("t", store.id)
    assert (counted.file_counts.completed, counted.file_counts.failed, counted.file_counts.total) == (1, 1, 2)
    assert counted.usage_bytes == done.usage_bytes > 0
    assert counted.metadata == {"team": "deck"}
    assert counted.expires_at == counted.last_active_at + 2 * 86_400
    assert (counted.status(0), counted.status(counted.last_active_at + 3 * 86_400)) == ("completed", "expired")
    only_failed = database.store_files.list("t", store.id, status=FileStatus.FAILED)
    assert [f.last_error for f in only_failed.items] == [FileError("invalid_file", "broken")]


def test_a_store_is_found_by_its_name_and_the_oldest_namesake_wins(database: Database) -> None:
    first = database.stores.create("t", "handbook")
    database.stores.create("t", "handbook")
    found = database.stores.find_by_name("t", "handbook")
    assert found is not None
    assert found.id == first.id
    renamed = database.stores.update("t", first.id, StoreUpdate(name="old", metadata={"k": "v"}))
    assert (renamed.name, renamed.metadata) == ("old", {"k": "v"})


def test_chunks_come_back_as_stored_in_the_order_asked_for(database: Database) -> None:
    store = database.stores.create("t", "s")
    file = ingested(database, "t", store.id, "a.txt", "zero", "one", "two")
    database.store_files.update_attributes("t", store.id, file.file_id, {"year": 2026, "draft": False})
    changes = database.chunks.changes(store.id)
    row_ids, embeddings = changes.row_ids, changes.embeddings
    assert embeddings.dtype == np.float32
    assert embeddings.tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    wanted = [int(row_ids[2]), 10_000, int(row_ids[0])]
    chunks = database.chunks.by_row_ids(store.id, wanted)
    assert [c.text for c in chunks] == ["two", "zero"]
    assert chunks[0].rendered == RenderedChunk("k2", "[k2] T\ntwo", (1, 2, 70_000))
    assert (chunks[0].filename, chunks[0].attributes) == ("a.txt", {"year": 2026, "draft": False})
    assert database.chunks.by_row_ids("vs_other", wanted) == []


def test_an_index_learns_additions_and_deletions_from_one_view(database: Database) -> None:
    store = database.stores.create("t", "s")
    first = ingested(database, "t", store.id, "a.txt", "one", "two")
    seen = database.chunks.changes(store.id)
    ingested(database, "t", store.id, "b.txt", "three")
    database.files.delete("t", first.file_id)
    change = database.chunks.changes(store.id, int(seen.row_ids[-1]))
    assert change.generation > seen.generation
    assert [t.text for t in change.texts] == ["three"]
    assert change.live_row_ids.tolist() == change.row_ids.tolist()
    assert not set(change.row_ids.tolist()) & set(seen.row_ids.tolist())


def test_e6_a_deleted_file_leaves_every_store_at_once_and_stays_gone_after_a_restart(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.bind_embedding_model("m", DIMENSION)
    stores = [database.stores.create("t", name) for name in ("one", "two")]
    file = database.files.create("t", "a.txt", b"secret")
    for store in stores:
        database.chunks.replace(database.store_files.attach("t", store.id, file.id), [chunk(0, "secret")])
    rows = {store.id: database.chunks.live_row_ids(store.id).tolist() for store in stores}
    generations = [database.stores.generation("t", store.id) for store in stores]
    assert set(database.files.delete("t", file.id)) == {store.id for store in stores}
    assert [database.stores.generation("t", s.id) for s in stores] == [g + 1 for g in generations]
    database.close()
    again = Database(tmp_path)
    for store in stores:
        assert again.chunks.by_row_ids(store.id, rows[store.id]) == []
        assert again.chunks.changes(store.id).texts == ()
    assert again.chunks.embeddings_for("t", [text_sha256("T", "secret")]) == {}
    assert not list((tmp_path / "files").iterdir())
    fresh = again.files.create("t", "b.txt", b"new")
    again.chunks.replace(again.store_files.attach("t", stores[0].id, fresh.id), [chunk(0, "new")])
    assert again.chunks.live_row_ids(stores[0].id).min() > max(max(r) for r in rows.values())
    again.close()


def test_e7_a_crash_before_the_commit_shows_no_half_of_a_file(database: Database, tmp_path: Path) -> None:
    store = database.stores.create("t", "s")
    file = database.files.create("t", "a.txt", b"x")
    claimed = database.store_files.attach("t", store.id, file.id)
    wrong = replace(chunk(1, "b"), embedding=np.zeros(DIMENSION + 1, np.float32))
    with pytest.raises(ValueError, match="dimension"):
        database.chunks.replace(claimed, [chunk(0, "a"), wrong])
    assert database.chunks.changes(store.id).texts == ()
    assert database.recover() == (claimed,)


def test_work_that_was_deleted_or_started_anew_meanwhile_stores_nothing(database: Database) -> None:
    store = database.stores.create("t", "s")
    file = database.files.create("t", "a.txt", b"x")
    stale = database.store_files.attach("t", store.id, file.id)
    database.store_files.detach("t", store.id, file.id)
    fresh = database.store_files.attach("t", store.id, file.id, strategy=ChunkingStrategy(64, 0))
    with pytest.raises(NotFound):
        database.chunks.replace(stale, [chunk(0, "a")])
    assert not database.store_files.fail(stale, FileError("server_error", "late"))
    database.chunks.replace(fresh, [chunk(0, "a")])
    database.store_files.cancel("t", store.id, file.id)
    assert database.store_files.get("t", store.id, file.id).status is FileStatus.COMPLETED


def test_e3_attaching_again_updates_metadata_and_keeps_the_chunks(database: Database) -> None:
    store = database.stores.create("t", "s")
    file = ingested(database, "t", store.id, "a.txt", "one")
    rows = database.chunks.live_row_ids(store.id).tolist()
    again = database.store_files.attach("t", store.id, file.file_id, {"year": 2027})
    assert (again.status, again.attributes) == (FileStatus.COMPLETED, {"year": 2027})
    assert database.chunks.live_row_ids(store.id).tolist() == rows
    anew = database.store_files.attach("t", store.id, file.file_id, strategy=ChunkingStrategy(64, 0))
    assert (anew.status, anew.attributes) == (FileStatus.IN_PROGRESS, {"year": 2027})
    assert database.chunks.changes(store.id).texts == ()


def test_filters_see_each_file_with_its_rows(database: Database) -> None:
    store = database.stores.create("t", "s")
    first = ingested(database, "t", store.id, "a.txt", "one", "two")
    second = ingested(database, "t", store.id, "b.txt", "three")
    files = {f.file_id: f for f in database.chunks.files(store.id)}
    assert [len(files[f.file_id].row_ids) for f in (first, second)] == [2, 1]
    assert files[first.file_id].row_ids.dtype == np.int64


def test_e9_another_embedding_model_is_a_named_error_that_says_what_to_do(database: Database, tmp_path: Path) -> None:
    database.bind_embedding_model("model-b", 8)
    database.bind_embedding_model("model-a", DIMENSION)
    store = database.stores.create("t", "s")
    ingested(database, "t", store.id, "a.txt", "one")
    with pytest.raises(EmbeddingModelChanged, match=r"HEADSTART_EMBEDDING_MODEL to 'model-a'.*reindex"):
        database.bind_embedding_model("model-b", 768)
    assert database.forget_embeddings("model-b", 8) == 1
    database.bind_embedding_model("model-b", 8)
    assert [f.filename for f in database.recover()] == ["a.txt"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("a\0b\nc.txt", "abc.txt"),
        ("..", "file"),
        ("", "file"),
        ("sổ tay 안내서.md", "sổ tay 안내서.md"),
        ("safe\u202etxt.exe", "safetxt.exe"),
        ("<script>.html", "<script>.html"),
    ],
)
def test_h9_hostile_names_are_kept_for_display_only(
    database: Database, tmp_path: Path, given: str, kept: str
) -> None:
    file = database.files.create("t", given, b"x")
    assert file.filename == kept
    assert [p.name for p in (tmp_path / "files").iterdir()] == [file.id]


def test_h9_a_name_of_5000_characters_is_cut_before_its_extension() -> None:
    name = clean_filename("ế" * 5000 + ".pdf")
    assert (len(name), name[-4:]) == (255, ".pdf")


def test_h9_a_forged_file_id_reaches_no_path(database: Database) -> None:
    for forged in ("../headstart.db", "file-..", "file-\0"):
        with pytest.raises(NotFound):
            database.files.open("t", forged)


def test_bytes_that_a_crash_left_without_a_row_are_swept_when_old(database: Database, tmp_path: Path) -> None:
    kept = database.files.create("t", "a.txt", b"x")
    abandoned, recent = tmp_path / "files" / "file-dead.partial", tmp_path / "files" / "file-young.partial"
    for path in (abandoned, recent):
        path.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    database.recover()
    assert {p.name for p in (tmp_path / "files").iterdir()} == {kept.id, recent.name}


def test_f2_adding_deleting_and_reading_from_eight_threads_gives_no_error_and_no_stale_chunk(
    database: Database,
) -> None:
    store = database.stores.create("t", "s")
    problems: list[object] = []
    deleted: set[str] = set()
    stop = threading.Event()

    def write(worker: int) -> None:
        try:
            for n in range(15):
                file = ingested(database, "t", store.id, f"{worker}-{n}.txt", "a", "b", "c")
                if n % 2:
                    database.files.delete("t", file.file_id)
                    deleted.add(file.file_id)
        except Exception as error:
            problems.append(error)

    def read() -> None:
        try:
            while not stop.is_set():
                gone = set(deleted)
                change = database.chunks.changes(store.id)
                if len(change.live_row_ids) != len(change.texts) or len(change.live_row_ids) % 3:
                    problems.append("a torn view")
                found = database.chunks.by_row_ids(store.id, change.live_row_ids.tolist())
                problems.extend(c for c in found if c.file_id in gone)
        except Exception as error:
            problems.append(error)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert len(database.chunks.live_row_ids(store.id)) == 4 * 8 * 3
