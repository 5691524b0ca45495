"""What operators read: readiness and recent calls."""

from typing import Any, Literal, Protocol

from pydantic import BaseModel

from cache.store import StoreHealth
from gateway.calls import Call
from gateway.kv_events import KvEvents
from gateway.serving import Missing, Serving
from latency.speed import SpeedEstimate, SpeedSource

ReplicaStatus = Literal["ok", "down", "half_open", "refused", "draining"]


class LearnedSpeed(Protocol):
    @property
    def estimate(self) -> SpeedEstimate | None: ...

    @property
    def missing(self) -> tuple[Missing, ...]: ...


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class TokenizerState(BaseModel):
    name: str
    exact: bool


class MissingFeature(BaseModel):
    feature: str
    cost: str
    cure: str


class SpeedState(BaseModel):
    """What is known of the engine's speed. A prefill of u uncached and c cached tokens is predicted to take

    fixed_ms + token_ms·u + pair_us/1000·u·(c + u/2), and at most `factor` times that with probability `quantile`.
    """

    source: SpeedSource
    samples: int
    drifting: bool
    fixed_ms: float
    token_ms: float
    pair_us: float
    factor: float
    quantile: float
    output_token_ms: float | None


class EngineState(BaseModel):
    """Never the engine's address. `speed` is null until enough requests or a calibration have told it."""

    reachable: bool
    error: str | None
    version: str | None
    model: str | None
    max_model_len: int | None
    block_size: int | None
    tokenizer: TokenizerState
    token_exact: bool
    speed: SpeedState | None
    missing: list[MissingFeature]


class ReplicaBrief(BaseModel):
    """A replica in `/readyz`; `error` says why it is not `ok`."""

    name: str
    state: ReplicaStatus
    error: str | None


class EventsState(BaseModel):
    """Of one replica's KV events: `off`, `degraded` for `degraded_s` seconds and why, or `consistent`."""

    state: Literal["off", "degraded", "consistent"]
    reason: str | None
    degraded_s: float


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
    kv_events: dict[str, EventsState]
    replicas: list[ReplicaBrief]


class CallList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


def engine_state(serving: Serving, model: str | None, speed: LearnedSpeed) -> EngineState:
    facts = serving.facts
    missing = (*serving.missing, *(speed.missing if facts.reachable else ()))
    return EngineState(
        reachable=facts.reachable,
        error=facts.error,
        version=facts.version,
        model=model,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        tokenizer=TokenizerState(name=serving.tokenizer.name, exact=serving.tokenizer.exact),
        token_exact=serving.token_exact,
        speed=None if speed.estimate is None else speed_state(speed.estimate),
        missing=[MissingFeature(feature=m.feature, cost=m.cost, cure=m.cure) for m in missing],
    )


def events_state(events: KvEvents) -> EventsState:
    return EventsState(
        state=events.state.name, reason=events.state.reason, degraded_s=_significant(events.degraded_s)
    )


def speed_state(estimate: SpeedEstimate) -> SpeedState:
    model = estimate.prefill
    return SpeedState(
        source=estimate.source,
        samples=estimate.samples,
        drifting=estimate.drifting,
        fixed_ms=_significant(model.fixed_s * 1e3),
        token_ms=_significant(model.per_token_s * 1e3),
        pair_us=_significant(model.per_pair_s * 1e6),
        factor=_significant(estimate.factor),
        quantile=estimate.quantile,
        output_token_ms=None if estimate.token_s is None else _significant(estimate.token_s * 1e3),
    )


def _significant(value: float) -> float:
    """Four significant digits: the fit knows no more."""
    return float(f"{value:.4g}")


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
