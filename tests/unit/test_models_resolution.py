from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.backends.facts import EngineFacts
from gateway.errors import ApiError
from gateway.models import ModelName, Models
from gateway.serving import Serving, make_serving
from gateway.settings import Settings
from retrieval.database import Database
from retrieval.records import VectorStore


@dataclass
class Engine:
    """What `Models` reads of a replica."""

    serving: Serving


@dataclass
class Shelf:
    models: Callable[..., Models]
    database: Database
    stores: dict[str, VectorStore] = field(default_factory=dict)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    database = Database(tmp_path)
    settings = Settings(data_dir=tmp_path, cache_dir=tmp_path)

    def models(*served: str) -> Models:
        facts = EngineFacts(bool(served), model=served[0] if served else None, models=served)
        return Models(Engine(make_serving(settings, facts)), database.stores)  # type: ignore[arg-type]

    return Shelf(models, database)


async def test_a_served_name_is_itself_even_with_an_at_sign(shelf: Shelf) -> None:
    shelf.database.stores.create("t", "b")
    models = shelf.models("a@b", "org/small")
    assert await models.resolve("a@b", "t") == ModelName("a@b", ())
    assert await models.resolve("org/small", "t") == ModelName("org/small", ())


async def test_a_store_goes_by_its_name_and_by_its_id(shelf: Shelf) -> None:
    store = shelf.database.stores.create("t", "handbook")
    models = shelf.models("org/small", "a@b")
    for name in ("handbook", store.id):
        assert await models.resolve(f"org/small@{name}", "t") == ModelName("org/small", (store.id,))
    assert await models.resolve("a@b@handbook", "t") == ModelName("a@b", (store.id,))


async def test_of_two_stores_of_one_name_the_older_is_meant(shelf: Shelf) -> None:
    first = shelf.database.stores.create("t", "twin")
    second = shelf.database.stores.create("t", "twin")
    models = shelf.models("m")
    assert (await models.resolve("m@twin", "t")).store_ids == (first.id,)
    assert (await models.resolve(f"m@{second.id}", "t")).store_ids == (second.id,)


@pytest.mark.parametrize("name", ["other", "other@handbook", "@handbook", "m@", "m@nothing", "m@vs_0000", "M", "m "])
async def test_an_unknown_model_or_store_is_a_404_that_names_it(shelf: Shelf, name: str) -> None:
    shelf.database.stores.create("t", "handbook")
    with pytest.raises(ApiError) as caught:
        await shelf.models("m").resolve(name, "t")
    assert caught.value.http_status == 404
    assert caught.value.param == "model"
    named = name.rpartition("@")[2] if name.startswith("m@") else name.removesuffix("@handbook")
    assert f"'{named}'" in caught.value.message or f"'{name}'" in caught.value.message


async def test_f3_another_tenants_store_is_as_unknown_as_none(shelf: Shelf) -> None:
    store = shelf.database.stores.create("t", "handbook")
    for name in ("handbook", store.id):
        with pytest.raises(ApiError) as caught:
            await shelf.models("m").resolve(f"m@{name}", "u")
        assert caught.value.code == "vector_store_not_found"


async def test_before_the_engine_was_reached_any_model_is_taken_but_no_unknown_store(shelf: Shelf) -> None:
    store = shelf.database.stores.create("t", "handbook")
    models = shelf.models()
    assert await models.resolve("whatever", "t") == ModelName("whatever", ())
    assert await models.resolve("whatever@handbook", "t") == ModelName("whatever", (store.id,))
    with pytest.raises(ApiError):
        await models.resolve("whatever@nothing", "t")
