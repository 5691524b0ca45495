"""The real engine of a bench: the one that `--engine-url` or HEADSTART_ENGINE_URL names, else the embedded one."""

import argparse
import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from rich.console import Console

from bench.answer import Answer, AnswerReader
from bench.report import CannotRun, Options, bench_command
from gateway.backends.facts import EngineFacts, probe_engine
from gateway.backends.vllm import EngineLimits, EngineSession, VllmBackend
from gateway.engine.command import EngineOptions
from gateway.engine.errors import EngineError
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.serving import Serving, make_serving
from gateway.settings import Settings, process_environment
from prompt_builder.types import Prompt

START_LIMIT_S = 600.0
PROBES = 10
# A bench measures slow answers, it does not refuse them.
LIMITS = EngineLimits(connect_s=10.0, first_token_s=600.0, between_tokens_s=300.0, answer_s=900.0)


class EngineUnusable(CannotRun):
    """The engine lacks what the bench measures; the message says what."""


def bench_main(
    name: str,
    description: str | None,
    run: Callable[[Options], Coroutine[Any, Any, int]],
    extend: Callable[[argparse.ArgumentParser], None],
) -> int:
    """`bench_command` for a bench of a real engine, which `--engine-url` may name."""

    def extended(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--engine-url",
            default="",
            metavar="URL",
            help="a running engine, without /v1 (default: HEADSTART_ENGINE_URL, else the embedded engine is started)",
        )
        extend(parser)

    def measured(options: Options) -> int:
        try:
            return asyncio.run(run(options))
        except EngineError as error:
            raise EngineUnusable(str(error)) from error

    return bench_command(name, description, measured, extended)


class RealEngine:
    """An engine and what is known of it; asks it as the gateway does, without the gateway's HTTP between."""

    def __init__(self, url: str, facts: EngineFacts, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.facts = facts
        self._backend = VllmBackend(session, url, Settings().engine_api_key, LIMITS)

    @property
    def window_tokens(self) -> int:
        return self.facts.max_model_len or 8192

    @property
    def block_tokens(self) -> int:
        return self.facts.block_size or 16

    async def serving(self, **changed: Any) -> Serving:
        """Tokenizer, planner and builder for this engine, under the settings of this machine, some of them changed.

        Raises EngineUnusable where prompts cannot be sent as token ids: no count could be exact then.
        """
        settings = Settings(engine_url=self.url, **changed)
        serving = await asyncio.to_thread(make_serving, settings, self.facts)
        if not serving.token_exact:
            raise EngineUnusable("; ".join(f"{missing.feature}: {missing.cost}" for missing in serving.missing))
        return serving

    async def ask(self, prompt: Prompt, *, max_tokens: int, salt: str, as_messages: bool = False) -> Answer:
        """A greedy, streamed answer. `as_messages`: the engine applies its template, as for any other client."""
        payload: dict[str, Any] = {
            "model": self.facts.model,
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        if not as_messages:
            payload["kv_transfer_params"] = {"prompt_token_ids": prompt.token_ids}
        began = time.perf_counter()
        stream = await self._backend.stream(orjson.dumps(payload))
        ttft_s = time.perf_counter() - began
        reader = AnswerReader()
        try:
            async for events in stream.reads():
                reader.feed(events)
        finally:
            stream.close()
        return reader.answer(ttft_s)


@asynccontextmanager
async def real_engine(url: str) -> AsyncIterator[RealEngine]:
    """`url` empty: HEADSTART_ENGINE_URL, else the embedded engine, stopped at the end. Raises EngineUnusable."""
    settings = Settings()
    if not url and "engine_url" in settings.model_fields_set:
        url = settings.engine_url
    if url:
        async with _connected(url.rstrip("/")) as engine:
            yield engine
        return
    # Benches that compare arms empty its cache between them.
    options = EngineOptions(port=free_port(), dev_mode=True)
    steps = Steps(Console())
    async with (
        EmbeddedEngine(
            settings.cache_dir, options, process_environment(), steps, start_timeout_s=START_LIMIT_S
        ) as embedded,
        _connected(embedded.url) as engine,
    ):
        yield engine


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[RealEngine]:
    async with EngineSession(LIMITS) as session:
        facts = await _facts(session, url)
        if facts.prompt_tokens_details is not True:
            raise EngineUnusable("It does not tell cached tokens: start it with --enable-prompt-tokens-details.")
        yield RealEngine(url, facts, session)


async def _facts(session: aiohttp.ClientSession, url: str) -> EngineFacts:
    """A busy engine answers late: it is asked again until it has told all."""
    facts = EngineFacts(reachable=False)
    for _ in range(PROBES):
        facts = await probe_engine(session, url, Settings().engine_api_key, timeout_s=20.0, chat_timeout_s=120.0)
        if facts.conclusive:
            return facts
        await asyncio.sleep(1.0)
    raise EngineUnusable(facts.error or "It does not answer the questions about what it offers.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
