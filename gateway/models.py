"""Model names: `MODEL` as the engine serves it, and `MODEL@STORE` for a model with a vector store."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import ApiError, ErrorKind
from gateway.replicas import Replicas
from retrieval.records import VectorStore
from retrieval.types import NotFound


class StoreLookup(Protocol):
    """Stores by name or id, of one tenant; raises NotFound."""

    def find_by_name(self, tenant: str, name: str) -> VectorStore | None: ...

    def get(self, tenant: str, store_id: str) -> VectorStore: ...


@dataclass(frozen=True, slots=True)
class ModelName:
    """`served` is the name that the engine knows."""

    served: str
    store_ids: tuple[str, ...]


class Models:
    def __init__(self, replicas: Replicas, stores: StoreLookup) -> None:
        self._replicas = replicas
        self._stores = stores

    async def resolve(self, requested: str, tenant: str) -> ModelName:
        """Raises ApiError (404) naming the model or the store that does not exist.

        Before the engine has been reached its models are unknown, and any name is taken.
        """
        served = self._replicas.serving.facts.models
        if requested in served:
            return ModelName(requested, ())
        model, at, store = requested.rpartition("@")
        if not at or not model:
            if served:
                raise unknown_model(requested)
            return ModelName(requested, ())
        if served and model not in served:
            raise unknown_model(model)
        return ModelName(model, (await asyncio.to_thread(self._store_id, tenant, store),))

    def _store_id(self, tenant: str, store: str) -> str:
        found = self._stores.find_by_name(tenant, store)
        if found is None:
            try:
                found = self._stores.get(tenant, store)
            except NotFound:
                raise ApiError(
                    ErrorKind.NOT_FOUND,
                    f"No vector store '{store}'. See /v1/vector_stores for those that exist.",
                    param="model",
                    code="vector_store_not_found",
                ) from None
        return found.id


def unknown_model(name: str) -> ApiError:
    return ApiError(
        ErrorKind.NOT_FOUND,
        f"No model '{name}'. See /v1/models for those that are served.",
        param="model",
        code="model_not_found",
    )
