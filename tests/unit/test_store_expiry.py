"""A store that was not used in time stops answering until it is updated."""

from pathlib import Path

import pytest

from retrieval.database import Database
from retrieval.stores import StoreUpdate
from retrieval.types import StoreExpired

DAY_S = 86_400


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_store_past_its_expiry_is_refused_until_it_is_updated(tmp_path: Path) -> None:
    clock = Clock()
    database = Database(tmp_path, clock)
    try:
        store = database.stores.create("t", "notes", expires_after_days=2)
        clock.now += 2 * DAY_S - 1
        assert database.stores.generation("t", store.id) == 0
        clock.now += 1
        with pytest.raises(StoreExpired, match=store.id):
            database.stores.generation("t", store.id)
        database.stores.update("t", store.id, StoreUpdate(expires_after_days=7))
        assert database.stores.generation("t", store.id) == 0
    finally:
        database.close()


def test_forgetting_embeddings_queues_every_completed_file_again(tmp_path: Path) -> None:
    database = Database(tmp_path)
    try:
        database.bind_embedding_model("small", 384)
        assert database.forget_embeddings("large", 768) == 0
        database.bind_embedding_model("large", 768)
    finally:
        database.close()
