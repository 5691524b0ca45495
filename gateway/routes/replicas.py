"""`GET /v1/replicas`: how each engine is, what it holds and how fast it is."""

from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import APIRouter

from gateway.routes.dependencies import Context
from gateway.routes.wire_replicas import Events, ReplicaList, Watched, replica_state


class Fleet(Protocol):
    @property
    def all(self) -> Sequence[Watched]: ...


def replicas_router(fleet: Fleet, events: Callable[[str], Events | None]) -> APIRouter:
    """Any tenant's key opens it: names and figures of engines, nothing of requests.

    `events` tells of a replica's name whether its KV events are followed.
    """
    router = APIRouter(tags=["replicas"])

    @router.get("/v1/replicas")
    async def replicas(context: Context) -> ReplicaList:
        return ReplicaList(data=[replica_state(replica, events(replica.name)) for replica in fleet.all])

    return router
