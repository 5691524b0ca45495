"""Health, readiness, metrics and recent calls."""

from collections.abc import Callable, Mapping
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cache.store import StoreHealth
from gateway.calls import Calls
from gateway.errors import ErrorKind
from gateway.metrics import Metrics
from gateway.routes.dependencies import Context
from gateway.routes.models import Served
from gateway.routes.wire_lists import CallsQuery
from gateway.routes.wire_operations import (
    CallList,
    Health,
    LearnedSpeed,
    Readiness,
    call_list,
    engine_state,
    store_state,
)


class Watched(Served, Protocol):
    """A replica whose speed is learned."""

    @property
    def speed(self) -> LearnedSpeed: ...


def operations_router(
    replica: Watched,
    metrics: Metrics,
    calls: Calls,
    store_health: Callable[[], StoreHealth],
    index_counters: Callable[[], Mapping[str, int]],
) -> APIRouter:
    """`index_counters` tells by name how often an index was loaded, rebuilt, or found unusable."""
    router = APIRouter(tags=["operations"])

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether the process answers at all; asks nothing of anybody."""
        return Health()

    @router.get("/readyz")
    async def readyz(response: Response) -> Readiness:
        """503 while no chat can be answered; documents and search work all the same."""
        serving = replica.serving
        ready = serving.facts.reachable and serving.facts.model is not None
        if not ready:
            response.status_code, _ = ErrorKind.UNAVAILABLE.value
        return Readiness(
            ready=ready,
            engine=engine_state(serving, replica.model, replica.speed),
            store=store_state(store_health()),
            indexes=dict(index_counters()),
        )

    @router.get("/metrics")
    async def prometheus() -> Response:
        # On the event loop, a millisecond or two: gauges read what belongs to it and changes there.
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/calls")
    async def recent_calls(context: Context, query: Annotated[CallsQuery, Query()]) -> CallList:
        return call_list(calls.recent(context.tenant, query.limit))

    return router
