"""`GET /v1/replicas`: how each engine is, what it holds and how fast it is."""

from collections.abc import Sequence
from typing import Protocol

from fastapi import APIRouter

from gateway.routes.dependencies import Context
from gateway.routes.wire_replicas import ReplicaList, Watched, replica_state


class Fleet(Protocol):
    @property
    def all(self) -> Sequence[Watched]: ...


def replicas_router(fleet: Fleet) -> APIRouter:
    """Any tenant's key opens it: names and figures of engines, nothing of requests."""
    router = APIRouter(tags=["replicas"])

    @router.get("/v1/replicas")
    async def replicas(context: Context) -> ReplicaList:
        return ReplicaList(data=[replica_state(replica) for replica in fleet.all])

    return router
