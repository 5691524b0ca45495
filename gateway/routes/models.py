"""`/v1/models`: what the engine serves, and each of the tenant's stores as `MODEL@STORE`."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from gateway.context import RequestContext
from gateway.models import unknown_model
from gateway.routes.dependencies import Context
from gateway.routes.wire_models import ModelList, ModelObject
from gateway.serving import Serving
from retrieval.database import Database
from retrieval.records import PageRequest, VectorStore

_PAGE = 1000
_PLAIN_NAME = re.compile(r"[\w.\-]{1,64}")


class Served(Protocol):
    """`model` is the served model's name, None until the engine has told it."""

    @property
    def model(self) -> str | None: ...

    @property
    def serving(self) -> Serving: ...


def models_router(replica: Served, database: Database) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    def stores_of(tenant: str) -> list[ModelObject]:
        model = replica.model
        if model is None:
            return []
        stores = list(_all_stores(database, tenant))
        namesakes = Counter(store.name for store in stores)
        return [
            ModelObject(id=f"{model}@{_short_name(store, namesakes)}", created=store.created_at) for store in stores
        ]

    def served() -> list[ModelObject]:
        names = [replica.model] if replica.model else []
        names += [name for name in replica.serving.facts.models if name != replica.model]
        return [ModelObject(id=name) for name in names]

    @router.get("")
    async def list_models(context: Context) -> ModelList:
        return ModelList(data=served() + await run_in_threadpool(stores_of, context.tenant))

    @router.get("/{name:path}")
    async def retrieve(name: str, context: Context) -> ModelObject:
        for model in served():
            if model.id == name:
                return model
        return await run_in_threadpool(with_store, name, context)

    def with_store(name: str, context: RequestContext) -> ModelObject:
        """A store goes by its listed name and always by its id."""
        for model in served():
            store_name = name.removeprefix(f"{model.id}@")
            if store_name == name:
                continue
            for store in _all_stores(database, context.tenant):
                if store_name in (store.id, store.name):
                    return ModelObject(id=name, created=store.created_at)
        raise unknown_model(name)

    return router


def _all_stores(database: Database, tenant: str) -> Iterator[VectorStore]:
    after: str | None = None
    while True:
        page = database.stores.list(tenant, PageRequest(_PAGE, descending=False, after=after))
        yield from page.items
        if not page.has_more:
            return
        after = page.items[-1].id


def _short_name(store: VectorStore, namesakes: Counter[str]) -> str:
    """The store's name where it can stand for the store alone, else its id."""
    plain = _PLAIN_NAME.fullmatch(store.name) and not store.name.startswith("vs_")
    return store.name if plain and namesakes[store.name] == 1 else store.id
