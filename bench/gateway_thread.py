"""The whole gateway in this process, on a thread and a uvloop loop of its own, as `headstart serve` runs it."""

import asyncio
import atexit
import gc
import math
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from openai import AsyncOpenAI

from bench.reply import Reply, read_reply
from gateway.app import create_app
from gateway.cli.serve import StartupErrors, bind, server_config, settle_memory, url_of
from gateway.settings import Settings

_START_S = 120.0
_STOP_S = 30.0
_MANY_OBJECTS = 200_000


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """`url` is without `/v1`."""

    url: str

    def client(self, key: str = "none") -> AsyncOpenAI:
        """The official client; it retries nothing, so that a test sees every failure."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def session(self, key: str | None = None) -> aiohttp.ClientSession:
        """A plain HTTP client with this gateway as its base."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return aiohttp.ClientSession(
            self.url, headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60)
        )

    async def ask(self, model: str, question: str, *, key: str | None = None, **fields: Any) -> Reply:
        """The answer to one user message; `fields` go into the request as they are."""
        body = {"model": model, "messages": [{"role": "user", "content": question}], **fields}
        async with self.session(key) as session:
            return await read_reply(session, body)

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples, over all its labels."""
        async with self.session() as session, session.get("/metrics") as response:
            text = await response.text()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise KeyError(name)
        return sum(map(float, found))

    async def until_metric(self, name: str, value: float, timeout_s: float = 2.0) -> None:
        """Waits until the metric has the value. Raises TimeoutError that says what it was instead."""
        deadline = time.monotonic() + timeout_s
        while (seen := await self.metric(name)) != value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is {seen:g} after {timeout_s:g} s, not {value:g}")
            await asyncio.sleep(0.01)

    async def until_calibrated(self, timeout_s: float = 180.0) -> None:
        """Waits until the engine's prefill and decode speed are known. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while math.isnan(await self.metric("headstart_decode_token_seconds")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine is not calibrated after {timeout_s:g} s")
            await asyncio.sleep(0.05)

    async def make_store(self, name: str, files: Mapping[str, str | bytes], key: str = "none") -> str:
        """Id of a new vector store that holds the files, ingested. Raises RuntimeError when one cannot be."""
        async with self.client(key) as client:
            store = await client.vector_stores.create(name=name)
            for filename, text in files.items():
                content = text.encode() if isinstance(text, str) else text
                done = await client.vector_stores.files.upload_and_poll(
                    vector_store_id=store.id, file=(filename, content), poll_interval_ms=20
                )
                if done.status != "completed":
                    raise RuntimeError(f"{filename}: {done.status}, {done.last_error}")
        return store.id


def settings_for(folder: Path, engine_url: str, **changes: Any) -> Settings:
    """Data below `folder`, no cache of models, no background work: the engine sees only what is sent here."""
    given: dict[str, Any] = {
        "data_dir": folder / "data",
        "cache_dir": folder / "cache",
        "engine_url": engine_url,
        "calibrate": False,
        "summary": "off",
        "prewarm": False,
    }
    return Settings(**{**given, **changes})


@asynccontextmanager
async def run_gateway(settings: Settings) -> AsyncIterator[RunningGateway]:
    """Serves on a free port until the block ends. Raises what the gateway's start raises."""
    startup = StartupErrors(create_app(settings))
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(server_config(startup))
    thread = threading.Thread(target=_serve, args=(server, listener), name="gateway")
    thread.start()
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                if startup.error is not None:
                    raise startup.error
                await asyncio.sleep(0.01)
        _settle()
        yield RunningGateway(url_of(listener))
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, _STOP_S)
        listener.close()


def _settle() -> None:
    """As `headstart serve` does it, but only where much was loaded since: a test run has hundreds of gateways."""
    if len(gc.get_objects()) > _MANY_OBJECTS:
        gc.unfreeze()
        settle_memory()
        # Some libraries complain at the interpreter's end of objects that were never looked through.
        atexit.register(gc.unfreeze)


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        server.run(sockets=[listener])
    except SystemExit:
        # A failed start; `run_gateway` raises its cause.
        return
