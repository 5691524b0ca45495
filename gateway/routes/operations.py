"""Health, readiness, metrics and recent calls."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cache.store import StoreHealth
from gateway.calls import Calls
from gateway.errors import ErrorKind
from gateway.metrics import Metrics
from gateway.peers import Peers, Worker, merged_metrics
from gateway.routes.dependencies import Context
from gateway.routes.models import Served
from gateway.routes.replicas import Fleet
from gateway.routes.wire_lists import CallsQuery
from gateway.routes.wire_operations import (
    CallList,
    Health,
    LearnedSpeed,
    Readiness,
    call_list,
    engine_state,
    events_state,
    store_state,
)
from gateway.routes.wire_replicas import replica_brief

METRICS, CALLS = "metrics", "calls"


class WatchedFleet(Served, Fleet, Protocol):
    """All replicas, and what they have in common; `speed` is that of the one that would be tried first."""

    @property
    def speed(self) -> LearnedSpeed: ...


def operations_router(
    fleet: WatchedFleet,
    metrics: Metrics,
    calls: Calls,
    store_health: Callable[[], StoreHealth],
    index_counters: Callable[[], Mapping[str, int]],
    peers: Peers | None = None,
) -> APIRouter:
    """`index_counters` tells by name how often an index was loaded, rebuilt, or found unusable.

    With `peers` metrics and calls are those of all workers.
    """
    router = APIRouter(tags=["operations"])

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether the process answers at all; asks nothing of anybody."""
        return Health()

    @router.get("/readyz")
    async def readyz(response: Response) -> Readiness:
        """503 while no chat can be answered; documents and search work all the same."""
        serving, replicas = fleet.serving, fleet.all
        known = serving.facts.reachable and serving.facts.model is not None
        ready = known and any(each.usable for each in replicas)
        if not ready:
            response.status_code, _ = ErrorKind.UNAVAILABLE.value
        return Readiness(
            ready=ready,
            engine=engine_state(serving, fleet.model, fleet.speed),
            store=store_state(store_health()),
            indexes=dict(index_counters()),
            kv_events={each.name: events_state(each.events) for each in replicas},
            replicas=[replica_brief(each) for each in replicas],
        )

    @router.get("/metrics")
    async def prometheus() -> Response:
        # On the event loop, a millisecond or two: gauges read what belongs to it and changes there.
        page = metrics.render() if peers is None else merged_metrics(await peers.ask_all(METRICS))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/calls")
    async def recent_calls(context: Context, query: Annotated[CallsQuery, Query()]) -> CallList:
        if peers is None:
            return call_list(calls.recent(context.tenant, query.limit))
        answers = await peers.ask_all(CALLS, tenant=context.tenant, limit=query.limit)
        found = [call for answer in answers.values() for call in CallList.model_validate_json(answer).data]
        newest_first = sorted(found, key=lambda call: -float(call["created"]))
        return CallList(data=newest_first[: query.limit])

    return router


def operations_peers(worker: Worker, metrics: Metrics, calls: Calls) -> Peers:
    """What a worker answers the others of its own metrics and calls."""

    def recent(asked: Mapping[str, Any]) -> bytes:
        return call_list(calls.recent(asked["tenant"], asked["limit"])).model_dump_json().encode()

    return Peers(worker, {METRICS: lambda asked: metrics.render(), CALLS: recent})
