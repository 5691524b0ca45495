"""What the probe learns from engines of several kinds; each engine is a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from gateway.backends.facts import PROBE_IDS, EngineFacts, probe_engine

METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1456",note="a\\"b"} 1.0
"""

Chat = Callable[[dict[str, Any]], web.Response]


def refuse(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def answer(prompt_tokens: int, details: object, **more: object) -> web.Response:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "prompt_tokens_details": details}
    return web.json_response({"choices": [{"message": {"content": "a"}}], "usage": usage, **more})


def modern(body: dict[str, Any]) -> web.Response:
    if body.get("cache_salt") == "":
        return refuse("Parameter 'cache_salt' must be a non-empty string if provided.")
    ids = body.get("kv_transfer_params", {}).get("prompt_token_ids", [1, 2])
    return answer(len(ids), {"cached_tokens": 0}, prompt_token_ids=ids, metrics={"queue_time_ms": 0.1})


def bare(body: dict[str, Any]) -> web.Response:
    return answer(31, None)


def strict(body: dict[str, Any]) -> web.Response:
    unknown = set(body) - {"model", "messages", "max_tokens", "temperature"}
    return refuse(f"unknown fields: {sorted(unknown)}") if unknown else answer(31, None)


@dataclass
class Engine:
    chat: Chat = modern
    full_surface: bool = True
    key: str = ""
    delay_s: float = 0.0
    chats: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard])
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.completions)
        if self.full_surface:
            app.router.add_get("/version", self.version)
            app.router.add_get("/metrics", self.metrics)
            app.router.add_post("/tokenize", self.tokenize)
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return refuse("Unauthorized", 401)
        response: web.StreamResponse = await handler(request)
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small", "max_model_len": 8192}, {"id": "adapter"}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [5], "count": 1, "max_model_len": 8192})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.chats.append(body)
        await asyncio.sleep(self.delay_s)
        return self.chat(body)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    runner = web.AppRunner(engine.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    try:
        yield engine
    finally:
        await runner.cleanup()


async def probe(engine: Engine, **options: Any) -> EngineFacts:
    async with running(engine), aiohttp.ClientSession() as session:
        return await probe_engine(session, engine.url, **options)


async def test_a_current_engine_tells_everything_in_two_chats_of_one_token() -> None:
    engine = Engine()
    facts = await probe(engine)
    assert facts == EngineFacts(
        reachable=True,
        model="small",
        models=("small", "adapter"),
        max_model_len=8192,
        block_size=32,
        num_blocks=1456,
        version="0.32.0",
        prompt_tokens_details=True,
        token_ids_accepted=True,
        tokenize=True,
        probe_ids=(5,),
        cache_salt=True,
        per_request_metrics=True,
    )
    assert facts.conclusive
    assert len(engine.chats) == 2
    assert all(body["max_tokens"] == 1 for body in engine.chats)


async def test_an_engine_with_models_and_chat_alone_is_usable_and_its_gaps_are_known() -> None:
    facts = await probe(Engine(chat=bare, full_surface=False))
    assert facts.reachable
    assert facts.error is None
    assert (facts.version, facts.block_size, facts.tokenize) == (None, None, False)
    assert facts.token_ids_accepted is False
    assert facts.prompt_tokens_details is False
    assert facts.cache_salt is None


async def test_an_engine_that_refuses_unknown_fields_is_asked_again_without_them() -> None:
    engine = Engine(chat=strict)
    facts = await probe(engine)
    assert len(engine.chats) == 2
    assert (facts.token_ids_accepted, facts.cache_salt) == (False, False)
    assert facts.error is None


async def test_ids_are_recognised_by_their_number_where_the_engine_does_not_return_them() -> None:
    facts = await probe(Engine(chat=lambda body: answer(len(PROBE_IDS), None)))
    assert facts.token_ids_accepted is True


async def test_a_busy_engine_leaves_the_facts_open_instead_of_wrong() -> None:
    facts = await probe(Engine(chat=lambda body: refuse("queue is full", 503)))
    assert facts.reachable
    assert (facts.token_ids_accepted, facts.prompt_tokens_details) == (None, None)
    assert not facts.conclusive


async def test_d10_a_silent_engine_is_left_after_the_limit() -> None:
    async with asyncio.timeout(3):
        facts = await probe(Engine(delay_s=2.0), chat_timeout_s=0.2)
    assert facts.reachable
    assert facts.token_ids_accepted is None


async def test_nobody_listening_is_said_without_the_address() -> None:
    async with aiohttp.ClientSession() as session:
        facts = await probe_engine(session, "http://127.0.0.1:9")
    assert not facts.reachable
    assert facts.error is not None
    assert "127.0.0.1" not in facts.error


async def test_a_wrong_key_is_named_as_the_cause() -> None:
    facts = await probe(Engine(key="right"), api_key="wrong")
    assert not facts.reachable
    assert facts.error == "the engine asks for another API key"
    assert (await probe(Engine(key="right"), api_key="right")).conclusive


async def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    facts = await probe(Engine(), model="large")
    assert facts.model is None
    assert facts.error == "the engine does not serve 'large'; it serves small, adapter"
