"""Builds and joins all parts; nothing is global, two apps in one process do not meet."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.memory import MemoryStore
from cache.redis_store import RedisStore
from cache.store import ByteStore
from gateway.admission import Admission
from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.budgets import Budgets
from gateway.calibrators import Calibrators
from gateway.calls import Calls
from gateway.context import RequestContext
from gateway.delivery import Delivery
from gateway.discovery import Discovery
from gateway.door import Door
from gateway.errors import ApiError, ErrorKind, translate
from gateway.folding import Folder, FoldSettings, fold_metrics
from gateway.http import AsgiApp, Receive, Scope, Send
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.peers import Worker
from gateway.pipeline import Pipeline
from gateway.prefix import PrefixBreaks
from gateway.reload import Reread
from gateway.replica_metrics import replica_gauges
from gateway.replicas import Replicas
from gateway.resuming import Resumer
from gateway.routes.chat import ChatEndpoint
from gateway.routes.console import console_router
from gateway.routes.dependencies import BodyLimits
from gateway.routes.files import files_router
from gateway.routes.models import models_router
from gateway.routes.operations import operations_peers, operations_router
from gateway.routes.plan import plan_router
from gateway.routes.replicas import replicas_router
from gateway.routes.vector_stores import vector_stores_router
from gateway.serving import LiveRenderer
from gateway.settings import Settings
from gateway.shared_chunks import SharedCompanions
from gateway.sharing import Sharing
from gateway.sharing_metrics import sharing_metrics
from gateway.tenants import load_salt_secret, load_tenants
from gateway.turns import ChatDefaults
from gateway.volatile import SystemTexts, volatile_metrics
from gateway.wire import from_errors
from prompt_builder.transcripts import Transcripts
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder
from retrieval.folder import usable_folder
from retrieval.index import Indexes
from retrieval.ingestion import Ingestor
from retrieval.records import ChunkingStrategy
from retrieval.retriever import Retriever
from retrieval.types import RetrievalError

log = logging.getLogger("headstart")

_ROUTE_ERRORS = {404: ErrorKind.NOT_FOUND, 405: ErrorKind.METHOD}


def create_app(settings: Settings, reread: Reread | None = None, worker: Worker | None = None) -> AsgiApp:
    """The gateway as an ASGI app; its parts live from the lifespan's start to its end.

    `reread` reads the settings anew, for a process that follows changes of its engines. `worker` is given to one of
    several processes behind one port, which share the data folder.

    Raises KeyFileError for unusable keys; the lifespan raises EmbeddingModelChanged (see `retrieval.database`).
    """
    secret = load_salt_secret(settings.data_dir, settings.salt_secret)
    tenants = load_tenants(settings.api_keys, settings.api_keys_file, secret, one_salt=settings.share_prefix_cache)
    chat = _LateChat()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            chat.endpoint = await _build(app, settings, reread, worker, stack)
            yield

    app = FastAPI(title="Headstart", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    # A redirect would send the client where its own Host header says.
    app.router.redirect_slashes = False
    translate_errors(app)
    return Door(app, chat, tenants, open_door=settings.no_auth)


async def _build(
    app: FastAPI, settings: Settings, reread: Reread | None, worker: Worker | None, stack: AsyncExitStack
) -> ChatEndpoint:
    """Parts in the order in which they lean on each other; the stack takes them down in reverse."""
    owner = stack.enter_context(usable_folder(settings.data_dir, shared=worker is not None))
    metrics = Metrics()
    store = _byte_store(settings)
    stack.push_async_callback(store.aclose)

    limits = EngineLimits(
        settings.connect_timeout_s,
        settings.first_token_timeout_s,
        settings.between_tokens_timeout_s,
        settings.answer_timeout_s,
    )
    session = await stack.enter_async_context(EngineSession(limits))
    discovery = await stack.enter_async_context(Discovery(settings, reread=reread))
    replicas = await stack.enter_async_context(Replicas(settings, session, limits, endpoints=discovery.endpoints))
    discovery.on_change(replicas.apply)
    # What changed while the first probes were waited for was told to nobody.
    await replicas.apply(discovery.endpoints)
    renderer = LiveRenderer(replicas.serving)
    replicas.on_change(renderer.follow)

    database = await asyncio.to_thread(Database, settings.data_dir)
    stack.push_async_callback(asyncio.to_thread, database.close)
    embedder = SentenceEmbedder(settings.embedding_model, store, settings.embedding_ttl_s)
    stack.push_async_callback(embedder.aclose)
    await embedder.start()
    await asyncio.to_thread(database.bind_embedding_model, embedder.model_id, embedder.dimension)
    indexes = await stack.enter_async_context(Indexes(database, settings.data_dir, settings.index, ownership=owner))
    retriever = Retriever(database, embedder, indexes, settings.previous_turn_weight)
    stack.push_async_callback(retriever.aclose)
    ingestor = await stack.enter_async_context(
        Ingestor(database, embedder, renderer, indexes.refresh_soon, ownership=owner)
    )
    replicas.on_change(lambda serving: ingestor.renderer_changed())

    calls = Calls(settings.calls_kept, metrics)
    admission = Admission(settings.max_in_flight)
    metrics.gauge("headstart_chat_in_flight", "Chat requests in progress", lambda: admission.in_flight)
    metrics.gauge("headstart_engine_reachable", "1 when the engine answers", lambda: replicas.serving.facts.reachable)
    metrics.gauge("headstart_store_degraded", "1 while Redis is lost", lambda: store.health().degraded)
    metrics.gauge("headstart_store_degraded_seconds", "Time spent without it", lambda: store.health().degraded_s)
    metrics.gauge("headstart_store_failures", "Operations answered without it", lambda: store.health().failures)
    replica_gauges(metrics, replicas)
    bodies = BodyLimits(settings.max_body_bytes, settings.max_upload_bytes, settings.body_timeout_s)
    chunking = ChunkingStrategy(settings.chunk_tokens, settings.chunk_overlap_tokens)
    app.include_router(files_router(database, bodies))
    app.include_router(vector_stores_router(database, ingestor, retriever, bodies, chunking))
    app.include_router(models_router(replicas, database))
    peers = None
    if worker is not None:
        peers = await stack.enter_async_context(operations_peers(worker, metrics, calls))
    app.include_router(operations_router(replicas, metrics, calls, store.health, indexes.counters, peers))
    app.include_router(replicas_router(replicas))
    app.include_router(console_router())

    transcripts = Transcripts(store, settings.transcript_ttl_s)
    turns = transcripts.counts
    metrics.gauge("headstart_turns_looked_up", "Past turns that clients resent", lambda: turns.looked_up)
    metrics.gauge("headstart_turns_recognised", "Of these, turns that were found again", lambda: turns.recognised)
    metrics.gauge("headstart_transcripts_corrupt", "Stored values that could not be read", lambda: turns.corrupt)
    folds = FoldSettings(
        settings.summary, settings.fold_high_tokens, settings.fold_low_tokens, prewarm=settings.prewarm
    )
    breaks = PrefixBreaks(metrics)
    replicas.on_arrival(lambda replica: None, breaks.forget)
    folder = await stack.enter_async_context(Folder(transcripts, breaks, folds))
    fold_metrics(metrics, folder)
    system_texts = SystemTexts(settings.volatile)
    volatile_metrics(metrics, system_texts)
    companions = SharedCompanions()
    if settings.redis_url:
        sharing = await stack.enter_async_context(
            Sharing(settings.redis_url, lambda: replicas.all, companions, computed=breaks.foreign)
        )
        companions.tell = sharing.chosen
        sharing_metrics(metrics, sharing)
    pipeline = Pipeline(
        replicas=replicas,
        models=Models(replicas, database.stores),
        resumer=Resumer(replicas, transcripts, database.store_files),
        retriever=retriever,
        companions=companions,
        budgets=Budgets(database.stores, settings.ttft_budget_ms, settings.budget_policy == "strict"),
        system_texts=system_texts,
        breaks=breaks,
        delivery=Delivery(
            replicas,
            transcripts=transcripts,
            metrics=metrics,
            folder=folder,
            breaks=breaks,
            companions=companions,
        ),
        defaults=ChatDefaults(settings.top_k, settings.min_answer_tokens),
    )
    app.include_router(plan_router(pipeline, replicas, breaks, admission, bodies))
    # Last of all: the work of starting would be in its measurements.
    await stack.enter_async_context(Calibrators(replicas, session, settings, limits, ingestor, lambda: owner.owned))
    return ChatEndpoint(
        pipeline,
        admission,
        calls,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
    )


class _LateChat:
    """The chat endpoint is made by the lifespan; no request comes before."""

    endpoint: ChatEndpoint

    def __call__(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> Awaitable[None]:
        return self.endpoint(scope, receive, send, context)


def _byte_store(settings: Settings) -> ByteStore:
    memory = MemoryStore(settings.memory_store_bytes)
    return RedisStore(settings.redis_url, fallback=memory) if settings.redis_url else memory


def translate_errors(app: FastAPI) -> None:
    """Whatever a route raises leaves in OpenAI's shape."""

    def respond(error: ApiError) -> Response:
        return Response(
            error.body_bytes(), status_code=error.http_status, headers=error.headers(), media_type="application/json"
        )

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(RetrievalError)
    async def retrieval_error(request: Request, error: RetrievalError) -> Response:
        return respond(translate(error))

    @app.exception_handler(Exception)
    async def unforeseen_error(request: Request, error: Exception) -> Response:
        return respond(ApiError(ErrorKind.INTERNAL, "The gateway failed. See its log."))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return respond(from_errors(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        kind = _ROUTE_ERRORS.get(error.status_code, ErrorKind.INVALID)
        message = (
            f"No such route: {request.method} {request.url.path[:200]}."
            if error.status_code in (404, 405)
            else str(error.detail)
        )
        return respond(ApiError(kind, message, code="route", status=error.status_code))
