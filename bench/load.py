"""A light HTTP load: raw sockets and one protocol object a connection, so that the client is not what is measured."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from bench.processes import Server

_DONE = b"[DONE]"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds from sending to the first event and to the end."""

    first_s: float
    total_s: float


class _Stream(asyncio.Protocol):
    """One connection, one streamed request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[StreamTimes] | None = None
        self.began_s = 0.0
        self.first_s = 0.0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> "asyncio.Future[StreamTimes]":
        assert self.transport is not None
        self.ended = asyncio.get_running_loop().create_future()
        self.first_s, self.tail = 0.0, b""
        self.began_s = time.perf_counter()
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        if self.ended is None or self.ended.done():
            return
        if not self.first_s:
            if b"data:" in data:
                self.first_s = time.perf_counter()
            elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                self.ended.set_exception(RuntimeError(data[:300].decode("latin-1")))
                return
        self.tail = (self.tail + data)[-64:]
        if self.tail.endswith(_LAST_CHUNK) and _DONE in self.tail:
            now = time.perf_counter()
            self.ended.set_result(StreamTimes(self.first_s - self.began_s, now - self.began_s))

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(ConnectionError("the server closed the connection"))


def post(server: Server, body: bytes, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a POST of JSON."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def run_streams(server: Server, bodies: Iterator[bytes], count: int, concurrency: int) -> list[StreamTimes]:
    """`count` streamed requests over `concurrency` kept connections, each taking the next body when it is free."""
    loop = asyncio.get_running_loop()
    times: list[StreamTimes] = []
    left = count

    async def worker() -> None:
        nonlocal left
        transport, stream = await loop.create_connection(_Stream, "127.0.0.1", server.port)
        try:
            while left > 0:
                left -= 1
                times.append(await asyncio.wait_for(stream.send(post(server, next(bodies))), 60))
        finally:
            transport.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return times


def percentile_ms(values_s: list[float], share: float) -> float:
    return float(np.percentile(np.array(values_s) * 1000, share * 100))
