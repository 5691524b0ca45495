from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gateway.backends.facts import EngineFacts
from gateway.routes.models import models_router
from gateway.serving import Serving, make_serving
from gateway.settings import Settings
from retrieval.database import Database
from tests.unit.routes.conftest import AsClients


@dataclass
class Engine:
    """An engine that serves `facts`."""

    facts: EngineFacts
    tmp_path: Path

    @property
    def model(self) -> str | None:
        return self.facts.model

    @property
    def serving(self) -> Serving:
        return make_serving(Settings(data_dir=self.tmp_path, cache_dir=self.tmp_path), self.facts)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(EngineFacts(True, model="org/small", models=("org/small", "org/small-lora")), tmp_path)


@pytest.fixture
def model_clients(engine: Engine, database: Database, as_clients: AsClients) -> tuple[TestClient, TestClient]:
    return as_clients(models_router(engine, database))


def ids(client: TestClient) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_every_store_is_offered_as_a_model(model_clients: tuple[TestClient, TestClient], database: Database) -> None:
    client, _ = model_clients
    database.stores.create("a", "handbook")
    assert ids(client) == ["org/small", "org/small-lora", "org/small@handbook"]
    model = client.get("/v1/models/org/small@handbook").json()
    assert (model["id"], model["object"]) == ("org/small@handbook", "model")
    assert model["created"] > 0


@pytest.mark.parametrize("name", ["", "two words", "a@b", "a/b", "x" * 65, "vs_0123", "tab\there"])
def test_a_store_whose_name_cannot_stand_for_it_goes_by_its_id(
    model_clients: tuple[TestClient, TestClient], database: Database, name: str
) -> None:
    store = database.stores.create("a", name)
    assert ids(model_clients[0])[2:] == [f"org/small@{store.id}"]


def test_namesakes_go_by_their_ids(model_clients: tuple[TestClient, TestClient], database: Database) -> None:
    stores = [database.stores.create("a", "twin") for _ in range(2)]
    assert ids(model_clients[0])[2:] == [f"org/small@{store.id}" for store in stores]


def test_names_in_any_script_stand_for_their_store(
    model_clients: tuple[TestClient, TestClient], database: Database
) -> None:
    database.stores.create("a", "안내서")
    assert ids(model_clients[0])[2:] == ["org/small@안내서"]


def test_a_store_answers_to_its_id_too(model_clients: tuple[TestClient, TestClient], database: Database) -> None:
    store = database.stores.create("a", "handbook")
    assert model_clients[0].get(f"/v1/models/org/small@{store.id}").status_code == 200


def test_all_of_many_stores_are_listed(model_clients: tuple[TestClient, TestClient], database: Database) -> None:
    for number in range(30):
        database.stores.create("a", f"s{number}")
    assert len(ids(model_clients[0])) == 32


@pytest.mark.parametrize("name", ["nothing", "org/small@nothing", "nothing@handbook", "org/small@"])
def test_an_unknown_model_is_a_404_that_names_it(
    model_clients: tuple[TestClient, TestClient], database: Database, name: str
) -> None:
    database.stores.create("a", "handbook")
    response = model_clients[0].get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert name in response.json()["error"]["message"]


def test_f3_another_tenants_stores_are_no_models(
    model_clients: tuple[TestClient, TestClient], database: Database
) -> None:
    store = database.stores.create("a", "handbook")
    other = model_clients[1]
    assert ids(other) == ["org/small", "org/small-lora"]
    assert other.get("/v1/models/org/small@handbook").status_code == 404
    assert other.get(f"/v1/models/org/small@{store.id}").status_code == 404


def test_without_an_engine_the_list_is_empty(
    engine: Engine, model_clients: tuple[TestClient, TestClient], database: Database
) -> None:
    database.stores.create("a", "handbook")
    engine.facts = EngineFacts(False, error="connection refused")
    assert ids(model_clients[0]) == []
