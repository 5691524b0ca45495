"""What operators read: readiness and recent calls."""

from typing import Any, Literal

from pydantic import BaseModel

from cache.store import StoreHealth
from gateway.calls import Call
from gateway.serving import Serving


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class TokenizerState(BaseModel):
    name: str
    exact: bool


class MissingFeature(BaseModel):
    feature: str
    cost: str
    cure: str


class EngineState(BaseModel):
    """Never the engine's address."""

    reachable: bool
    error: str | None
    version: str | None
    model: str | None
    max_model_len: int | None
    block_size: int | None
    tokenizer: TokenizerState
    token_exact: bool
    missing: list[MissingFeature]


class StoreState(BaseModel):
    kind: str
    degraded: bool
    degraded_s: float
    failures: int
    entries: int | None


class Readiness(BaseModel):
    ready: bool
    engine: EngineState
    store: StoreState
    indexes: dict[str, int]


class CallList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


def engine_state(serving: Serving, model: str | None) -> EngineState:
    facts = serving.facts
    return EngineState(
        reachable=facts.reachable,
        error=facts.error,
        version=facts.version,
        model=model,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        tokenizer=TokenizerState(name=serving.tokenizer.name, exact=serving.tokenizer.exact),
        token_exact=serving.token_exact,
        missing=[MissingFeature(feature=m.feature, cost=m.cost, cure=m.cure) for m in serving.missing],
    )


def store_state(health: StoreHealth) -> StoreState:
    return StoreState(
        kind=health.kind,
        degraded=health.degraded,
        degraded_s=round(health.degraded_s, 3),
        failures=health.failures,
        entries=health.entries,
    )


def call_list(calls: list[Call]) -> CallList:
    return CallList(data=[call.wire() for call in calls])
