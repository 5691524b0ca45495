import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cache.store import StoreHealth
from gateway.backends.facts import EngineFacts
from gateway.calls import Call, Calls
from gateway.metrics import Metrics
from gateway.routes.console import console_router
from gateway.routes.operations import operations_router
from gateway.serving import Missing, Serving, make_serving
from gateway.settings import Settings
from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from tests.support.replicas import ShownReplica
from tests.unit.routes.conftest import AsClients

FACTS = EngineFacts(
    True,
    model="small",
    models=("small",),
    root="/srv/models/small",
    max_model_len=8192,
    block_size=32,
    token_ids_accepted=True,
    prompt_tokens_details=False,
    error=None,
)


SPEED = SpeedEstimate(PrefillModel(0.02661234, 0.00113, 0.93e-6), 1.0812345, 0.95, 14, "kept", token_s=0.0331)


@dataclass
class Speed:
    estimate: SpeedEstimate | None = None
    missing: tuple[Missing, ...] = ()


def well(name: str) -> ShownReplica:
    replica = ShownReplica(name)
    replica.health.probed(None)
    return replica


@dataclass
class Engine:
    settings: Settings
    facts: EngineFacts = FACTS
    speed: Speed = field(default_factory=Speed)
    all: list[ShownReplica] = field(default_factory=lambda: [well("engine")])

    @property
    def model(self) -> str | None:
        return self.facts.model

    @property
    def serving(self) -> Serving:
        return make_serving(self.settings, self.facts)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(Settings(data_dir=tmp_path, cache_dir=tmp_path, engine_url="http://engine.internal:8000"))


@pytest.fixture
def calls() -> Calls:
    return Calls(100, Metrics())


@pytest.fixture
def operators(engine: Engine, calls: Calls, as_clients: AsClients) -> tuple[TestClient, TestClient]:
    def health() -> StoreHealth:
        return StoreHealth("redis", True, 1.23456, 7, None)

    router = operations_router(engine, Metrics(), calls, health, lambda: {"rebuilt": 2})
    return as_clients(router, console_router())


def test_gauges_are_read_on_the_event_loop_whose_state_they_show(
    engine: Engine, calls: Calls, as_clients: AsClients
) -> None:
    def on_the_loop() -> float:
        return float(asyncio.get_running_loop().is_running())

    metrics = Metrics()
    metrics.gauge("headstart_test_gauge", "Read in a thread it would raise", on_the_loop)
    health = StoreHealth("memory", False, 0.0, 0, 0)
    router = operations_router(engine, metrics, calls, lambda: health, dict)
    assert "headstart_test_gauge 1.0" in as_clients(router, console_router())[0].get("/metrics").text


def call(tenant: str, number: int) -> Call:
    return Call(f"req-{number}", 1.0 * number, tenant, "small", True, 200, ("vs_1",), None)


def test_health_needs_no_key(operators: tuple[TestClient, TestClient]) -> None:
    response = operators[0].get("/healthz", headers={"authorization": ""})
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_readiness_tells_what_is_served_and_what_is_missing(operators: tuple[TestClient, TestClient]) -> None:
    response = operators[0].get("/readyz", headers={"authorization": ""})
    body = response.json()
    assert (response.status_code, body["ready"]) == (200, True)
    engine = body["engine"]
    assert (engine["model"], engine["max_model_len"], engine["block_size"]) == ("small", 8192, 32)
    assert (engine["tokenizer"]["exact"], engine["token_exact"]) == (False, False)
    assert {miss["feature"] for miss in engine["missing"]} >= {"tokenizer", "cached tokens"}
    assert all(miss["cost"] and miss["cure"] for miss in engine["missing"])
    assert body["store"] == {
        "kind": "redis",
        "degraded": True,
        "degraded_s": 1.235,
        "failures": 7,
        "entries": None,
    }
    assert body["indexes"] == {"rebuilt": 2}
    assert body["replicas"] == [{"name": "engine", "state": "ok", "error": None}]
    assert body["kv_events"] == {"engine": {"state": "off", "reason": None, "degraded_s": 0.0}}


@pytest.mark.parametrize(("states", "ready"), [("ok down", True), ("down down", False), ("down ok", True)])
def test_the_gateway_is_ready_while_one_replica_is_usable(
    engine: Engine, calls: Calls, as_clients: AsClients, states: str, ready: bool
) -> None:
    replicas = [ShownReplica(f"engine-{number}") for number in (1, 2)]
    for replica, state in zip(replicas, states.split(), strict=True):
        replica.health.probed(None if state == "ok" else "cannot connect")
    health = StoreHealth("memory", False, 0.0, 0, 0)
    engine.all = replicas
    router = operations_router(engine, Metrics(), calls, lambda: health, dict)
    response = as_clients(router, console_router())[0].get("/readyz")
    assert (response.status_code, response.json()["ready"]) == (200 if ready else 503, ready)
    shown = [(replica["name"], replica["state"]) for replica in response.json()["replicas"]]
    assert shown == list(zip(("engine-1", "engine-2"), states.split(), strict=True))


def test_readiness_tells_what_is_known_of_the_speed(operators: tuple[TestClient, TestClient], engine: Engine) -> None:
    assert operators[0].get("/readyz").json()["engine"]["speed"] is None
    engine.speed = Speed(SPEED)
    assert operators[0].get("/readyz").json()["engine"]["speed"] == {
        "source": "kept",
        "samples": 14,
        "drifting": False,
        "fixed_ms": 26.61,
        "token_ms": 1.13,
        "pair_us": 0.93,
        "factor": 1.081,
        "quantile": 0.95,
        "output_token_ms": 33.1,
    }


def test_readiness_tells_that_an_engine_cannot_be_calibrated(
    operators: tuple[TestClient, TestClient], engine: Engine
) -> None:
    engine.speed = Speed(missing=(Missing("calibration", "no prediction at first", "another engine"),))
    missing = operators[0].get("/readyz").json()["engine"]["missing"]
    assert missing[-1]["feature"] == "calibration"


def test_without_an_engine_readiness_is_a_503_with_the_same_body(
    operators: tuple[TestClient, TestClient], engine: Engine
) -> None:
    engine.facts = EngineFacts(False, error="connection refused")
    response = operators[0].get("/readyz")
    assert (response.status_code, response.json()["ready"]) == (503, False)
    assert response.json()["engine"]["missing"][0]["feature"] == "engine"


def test_an_engine_that_serves_another_model_is_not_ready(
    operators: tuple[TestClient, TestClient], engine: Engine
) -> None:
    engine.facts = replace(FACTS, model=None, error="the engine does not serve 'big'; it serves small")
    response = operators[0].get("/readyz")
    assert response.status_code == 503
    assert "big" in response.json()["engine"]["error"]


def test_h4_readiness_never_tells_where_the_engine_is(
    operators: tuple[TestClient, TestClient], engine: Engine
) -> None:
    for facts in (FACTS, EngineFacts(False, error="connection refused")):
        engine.facts = facts
        text = json.dumps(operators[0].get("/readyz").json())
        assert "engine.internal" not in text
        assert "/srv/models" not in text


def test_metrics_are_prometheus_text(operators: tuple[TestClient, TestClient]) -> None:
    response = operators[0].get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "headstart_chat_requests_total" in response.text


def test_f6_calls_are_the_tenants_own_newest_first(operators: tuple[TestClient, TestClient], calls: Calls) -> None:
    for number in range(6):
        calls.add(call("ab"[number % 2], number))
    listed = operators[0].get("/v1/calls?limit=2").json()["data"]
    assert [entry["id"] for entry in listed] == ["req-4", "req-2"]
    assert {entry["tenant"] for entry in operators[1].get("/v1/calls").json()["data"]} == {"b"}
    assert operators[0].get("/v1/calls?limit=0").status_code == 400


def test_the_console_runs_nothing_but_its_own_files(operators: tuple[TestClient, TestClient]) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/console/console.js", "text/javascript"),
        ("/console/console.css", "text/css"),
        ("/favicon.ico", "image/svg+xml"),
    ):
        response = operators[0].get(path, headers={"authorization": ""})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    page = operators[0].get("/").text
    assert "://" not in page, "the page loads something from elsewhere"
    assert page.count("<script") == 1
    assert not re.search(r"<[^>]*\son\w+\s*=", page), "an inline handler"
    assert "innerHTML" not in operators[0].get("/console/console.js").text
