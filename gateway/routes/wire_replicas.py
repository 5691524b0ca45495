"""What operators read of each replica: names, never addresses."""

from typing import Literal, Protocol

from pydantic import BaseModel

from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.health import Health
from gateway.kv_events import KvEvents
from gateway.pacing import Pacer
from gateway.routes.wire_operations import (
    EventsState,
    LearnedSpeed,
    ReplicaBrief,
    ReplicaStatus,
    SpeedState,
    events_state,
    speed_state,
)


class Watched(Protocol):
    """A replica as it is shown."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def health(self) -> Health: ...

    @property
    def pacer(self) -> Pacer: ...

    @property
    def residency(self) -> Residency | None: ...

    @property
    def speed(self) -> LearnedSpeed: ...

    @property
    def events(self) -> KvEvents: ...

    @property
    def usable(self) -> bool: ...

    @property
    def refused(self) -> str | None: ...

    @property
    def draining(self) -> bool: ...

    @property
    def several_engines(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...


class QueueState(BaseModel):
    """`predicted_wait_ms` is that of a short prompt that would come now."""

    waiting: int
    in_flight: int
    decoding: int
    prefill_tokens: int
    prefill_limit_tokens: int
    predicted_wait_ms: float


class CacheState(BaseModel):
    """What the replica is believed to hold, in blocks."""

    block_size: int
    capacity_blocks: int
    resident_blocks: int
    evictions: int
    clears: int


class HitState(BaseModel):
    """Cached tokens, predicted against reported; `over`: the engine held less than predicted, `under`: more."""

    predicted_tokens: int
    reported_tokens: int
    exact: int
    over: int
    under: int


class ReplicaState(BaseModel):
    """`error` says why requests do not go there, `since_s` how long its health has been what it is.

    `cache` and `hits` are null while nothing is known of the engine's blocks; `speed` is null until enough requests
    or a calibration have told it.
    """

    name: str
    state: ReplicaStatus
    error: str | None
    since_s: float
    model: str | None
    version: str | None
    max_model_len: int | None
    several_engines: bool
    queue: QueueState
    cache: CacheState | None
    hits: HitState | None
    kv_events: EventsState
    speed: SpeedState | None


class ReplicaList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ReplicaState]


def replica_status(replica: Watched) -> tuple[ReplicaStatus, str | None]:
    """The state that decides, and why it is not `ok`."""
    if replica.draining:
        return "draining", None
    if replica.refused is not None:
        return "refused", replica.refused
    return replica.health.state, None if replica.health.state == "ok" else replica.health.error


def replica_brief(replica: Watched) -> ReplicaBrief:
    state, error = replica_status(replica)
    return ReplicaBrief(name=replica.name, state=state, error=error)


def replica_state(replica: Watched) -> ReplicaState:
    state, error = replica_status(replica)
    facts, pacer, residency, estimate = replica.facts, replica.pacer, replica.residency, replica.speed.estimate
    return ReplicaState(
        name=replica.name,
        state=state,
        error=error,
        since_s=round(replica.health.since_s, 3),
        model=facts.model,
        version=facts.version,
        max_model_len=facts.max_model_len,
        several_engines=replica.several_engines,
        queue=QueueState(
            waiting=pacer.queued,
            in_flight=replica.in_flight,
            decoding=pacer.decoding,
            prefill_tokens=pacer.in_flight_tokens,
            prefill_limit_tokens=pacer.limit_tokens,
            predicted_wait_ms=round(pacer.wait_s(0.0) * 1000, 3),
        ),
        cache=None if residency is None else _cache(residency),
        hits=None if residency is None else _hits(residency),
        kv_events=events_state(replica.events),
        speed=None if estimate is None else speed_state(estimate),
    )


def _cache(residency: Residency) -> CacheState:
    counts = residency.counts()
    return CacheState(
        block_size=residency.block_size,
        capacity_blocks=residency.capacity_blocks,
        resident_blocks=counts.resident_blocks,
        evictions=counts.evictions,
        clears=counts.clears,
    )


def _hits(residency: Residency) -> HitState:
    counts = residency.counts()
    return HitState(
        predicted_tokens=counts.predicted_tokens,
        reported_tokens=counts.reported_tokens,
        exact=counts.exact,
        over=counts.over,
        under=counts.under,
    )
