from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cache.residency import Residency
from gateway.routes.replicas import replicas_router
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from tests.support.replicas import ShownReplica, ShownReplicas

SPEED = SpeedEstimate(PrefillModel(0.02661234, 0.00113, 0.93e-6), 1.0812345, 0.95, 14, "kept", token_s=0.0331)


@pytest.fixture
def engine() -> ShownReplica:
    return ShownReplica()


@pytest.fixture
def asked(engine: ShownReplica, as_clients: Any) -> Callable[[], dict[str, Any]]:
    clients: tuple[TestClient, TestClient] = as_clients(replicas_router(ShownReplicas([engine, ShownReplica("two")])))

    def ask() -> dict[str, Any]:
        body = clients[0].get("/v1/replicas").json()
        assert (body["object"], [replica["name"] for replica in body["data"]]) == ("list", ["one", "two"])
        return dict(body["data"][0])

    return ask


def test_a_replica_that_is_well_says_so(engine: ShownReplica, asked: Callable[[], dict[str, Any]]) -> None:
    engine.health.probed(None)
    seen = asked()
    assert (seen["state"], seen["error"], seen["model"], seen["version"]) == ("ok", None, "small", "0.32.0")
    assert seen["queue"]["waiting"] == seen["queue"]["predicted_wait_ms"] == 0
    assert seen["cache"] is None
    assert seen["hits"] is None
    assert seen["speed"] is None
    assert seen["kv_events"] == {"state": "off", "reason": None, "degraded_s": 0.0}


def test_why_a_replica_gets_no_requests_is_told_with_its_state(
    engine: ShownReplica, asked: Callable[[], dict[str, Any]]
) -> None:
    engine.health.probed("cannot connect (Connection refused)")
    assert [asked()[key] for key in ("state", "error")] == ["down", "cannot connect (Connection refused)"]
    engine.refused = "its tokenizer is another one"
    assert [asked()[key] for key in ("state", "error")] == ["refused", "its tokenizer is another one"]
    engine.draining = True
    assert asked()["state"] == "draining"


def test_what_a_replica_holds_stands_beside_what_was_predicted_of_it(
    engine: ShownReplica, asked: Callable[[], dict[str, Any]]
) -> None:
    engine.residency = residency = Residency(4, 10)
    for cached in (0, 8, 4):
        lease = residency.begin(range(9))
        residency.reconcile(lease, cached)
        residency.generated(lease, ())
        residency.end(lease)
    seen = asked()
    assert seen["cache"] == {
        "block_size": 4,
        "capacity_blocks": 10,
        "resident_blocks": residency.counts().resident_blocks,
        "evictions": 0,
        "clears": 0,
    }
    assert seen["hits"] == {"predicted_tokens": 16, "reported_tokens": 12, "exact": 2, "over": 1, "under": 0}


def test_the_fitted_model_is_told(engine: ShownReplica, asked: Callable[[], dict[str, Any]]) -> None:
    engine.speed.estimate = SPEED
    speed = asked()["speed"]
    assert (speed["fixed_ms"], speed["token_ms"], speed["pair_us"], speed["factor"]) == (26.61, 1.13, 0.93, 1.081)
    assert (speed["source"], speed["samples"]) == ("kept", 14)


def test_it_needs_a_key_where_keys_are_asked_for(as_clients: Any) -> None:
    client = as_clients(replicas_router(ShownReplicas([])))[0]
    assert client.get("/v1/replicas").json() == {"object": "list", "data": []}
    assert client.get("/v1/replicas", headers={"authorization": ""}).status_code == 401
