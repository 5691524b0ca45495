"""HTTP/1.1 connections to one engine: kept for the next request, one request at a time on each, bodies as they come.

An engine sends each token as a chunk of its own. What a general client does for every chunk, and to build every
request, took more of a stream's time than all else that the gateway does for it.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from enum import Enum
from typing import cast

import httptools
from aiohappyeyeballs import start_connection
from yarl import URL

IDLE_CONNECTION_S = 2.0
"""Well below the engine's own limit: vLLM closes after 5 s, and a busy machine runs the two timers late and apart."""

LAST_BYTES_S = 0.5
"""So long an answer that is over may take to end its body, for its connection to serve again."""

_MOST_UNREAD_BYTES = 2**16
_MOST_HEAD_BYTES = 2**17
_NEXT_ADDRESS_S = 0.25


class CannotConnect(Exception):
    """No connection came about in time."""


class Broken(Exception):
    """The connection ended before the answer. `unanswered`: it was closed before the head of an answer had come."""

    def __init__(self, *, unanswered: bool) -> None:
        super().__init__("the connection broke off")
        self.unanswered = unanswered


class _Stage(Enum):
    ASKED = 0
    ANSWERING = 1
    OVER = 2
    BROKEN = 3


class Connection(asyncio.Protocol):
    """One connection. Whoever has it sends a request, reads the answer, and calls `release`, or `close` to abort it.

    `status` and `headers` (names in lower case) are the answer's once `head` has returned.
    """

    def __init__(self, freed: Callable[["Connection"], None], lost: Callable[["Connection"], None]) -> None:
        self._freed = freed
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._overdue: asyncio.TimerHandle | None = None
        self._stage = _Stage.OVER
        self._wanted = self._paused = self._unanswered = self._until_closed = self._kept = False
        self._parts: list[bytes] = []
        self._unread_bytes = self._head_bytes = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.free_since_s = 0.0

    # whoever has the connection

    def send(self, request: bytes) -> None:
        """A whole request: head and body."""
        self.headers = {}
        self._head_bytes = 0
        self._wanted = True
        if self._transport is None:
            self._stage, self._unanswered = _Stage.BROKEN, True
            return
        self._stage = _Stage.ASKED
        self._transport.write(request)

    async def head(self) -> None:
        """Waits for the head of the answer. Raises Broken."""
        while self._stage is _Stage.ASKED:
            await self._news()
        if self._stage is _Stage.BROKEN and not self._parts:
            raise Broken(unanswered=self._unanswered)

    async def read(self) -> bytes:
        """What has come of the body since the last time; empty at its end. Raises Broken."""
        while not self._parts:
            if self._stage is _Stage.OVER:
                return b""
            if self._stage is _Stage.BROKEN:
                raise Broken(unanswered=False)
            await self._news()
        parts, self._parts = self._parts, []
        self._unread_bytes = 0
        if self._paused:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Nothing more of the answer is wanted; the end of its body may still come for LAST_BYTES_S."""
        self._wanted = False
        self._parts.clear()
        if self._stage is _Stage.OVER:
            self._free()
        elif self._stage is _Stage.ANSWERING:
            self._overdue = self._loop.call_later(LAST_BYTES_S, self.close)

    def close(self) -> None:
        """Aborts the request in the engine."""
        self._stage = _Stage.BROKEN
        self._leave()
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._stage is _Stage.ASKED:
            self._head_bytes += len(data)
        elif self._stage is _Stage.OVER:
            # Nothing was asked for; the answer at hand is whole all the same.
            self._kept = False
            if not self._wanted:
                self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._stage = _Stage.BROKEN
        if self._stage is _Stage.BROKEN or (self._stage is _Stage.ASKED and self._head_bytes > _MOST_HEAD_BYTES):
            self.close()
        elif self._unread_bytes > _MOST_UNREAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._stage is _Stage.ANSWERING and self._until_closed and error is None:
            self._stage = _Stage.OVER
        elif self._stage is not _Stage.OVER:
            self._unanswered = self._stage is _Stage.ASKED
            self._stage = _Stage.BROKEN
        self._leave()
        self._tell()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._stage is not _Stage.ASKED:
            # An answer that nobody asked for.
            self._kept = False
            if not self._wanted:
                self.close()
            self._wanted = False
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            # Something before the answer.
            self.headers = {}
            return
        self._stage = _Stage.ANSWERING
        self._until_closed = "content-length" not in self.headers and "transfer-encoding" not in self.headers

    def on_body(self, body: bytes) -> None:
        if self._wanted:
            self._parts.append(body)
            self._unread_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._stage is _Stage.ANSWERING:
            self._stage = _Stage.OVER
            # The parser tells it of the answer at hand alone.
            self._kept = self._parser.should_keep_alive()
            if not self._wanted:
                self._free()

    # inside

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _free(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        if self._transport is None or self._paused or not self._kept:
            self.close()
            return
        self.free_since_s = self._loop.time()
        self._freed(self)

    def _leave(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        self._lost(self)


class Connections:
    """Those to the engine at `url`. As many as are asked for: admission is the gateway's.

    Free ones close themselves after IDLE_CONNECTION_S, or at `close`.
    """

    def __init__(self, url: str, connect_s: float) -> None:
        parsed = URL(url)
        self._host, self._port = parsed.raw_host or "", parsed.port or 80
        # Reads the machine's certificates: once, not at the first request.
        self._tls = ssl.create_default_context() if parsed.scheme == "https" else None
        self._connect_s = connect_s
        self._free: list[Connection] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def take(self) -> Connection:
        """A free connection, or a new one. Raises CannotConnect."""
        while self._free:
            connection = self._free.pop()
            if asyncio.get_running_loop().time() - connection.free_since_s <= IDLE_CONNECTION_S:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._connected()
        except (OSError, ssl.CertificateError):
            # A time-out is an OSError.
            raise CannotConnect from None

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        connected = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S, loop=loop)
        _, connection = await loop.create_connection(
            lambda: Connection(self._freed, self._lost),
            sock=connected,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        return connection

    def close(self) -> None:
        """Free connections close now, those in use when they are released."""
        self._closed = True
        for connection in tuple(self._free):
            connection.close()
        if self._sweep is not None:
            self._sweep.cancel()

    def _freed(self, connection: Connection) -> None:
        if self._closed:
            connection.close()
            return
        self._free.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_CONNECTION_S, self._close_idle)

    def _lost(self, connection: Connection) -> None:
        if connection in self._free:
            self._free.remove(connection)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in tuple(self._free):
            if loop.time() - connection.free_since_s >= IDLE_CONNECTION_S:
                connection.close()
        oldest = self._free[0].free_since_s if self._free else None
        self._sweep = None if oldest is None else loop.call_at(oldest + IDLE_CONNECTION_S, self._close_idle)
