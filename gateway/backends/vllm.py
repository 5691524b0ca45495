"""The engine call and its event stream."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

import aiohttp
from yarl import URL

from gateway.backends.connections import IDLE_CONNECTION_S, Broken, CannotConnect, Connection, Connections
from gateway.backends.refusal import cut_off, event_too_large, refusal, stalled, too_slow, unreachable
from gateway.backends.sse import DONE, EventSplitter, EventTooLarge, event_data, split_events
from gateway.backends.watchdog import Watchdog

_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_ATTEMPTS = 3
_STALE_S = 1.0
"""A request on a connection that the engine had closed fails within a round trip, not after this long."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Seconds. `answer_s` bounds a whole answer that is not streamed."""

    connect_s: float
    first_token_s: float
    between_tokens_s: float
    answer_s: float


class EngineSession:
    """Owns the connections for questions to the engines: no pool limit, no cookies, no decoding."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10, keepalive_timeout=IDLE_CONNECTION_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._limits.connect_s),
            read_bufsize=2**16,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()


class EngineStream:
    """A running answer: whole events as bytes. Ends after `[DONE]`; raises ApiError when it ends before.

    Nothing is retried once this exists.
    """

    def __init__(
        self, connection: Connection, first: bytes, limits: EngineLimits, broke_off: Callable[[], None]
    ) -> None:
        self._connection: Connection | None = connection
        self._broke_off = broke_off
        self._first = first
        self._limits = limits
        self._ended = False

    @property
    def first(self) -> bytes:
        """What the network brought first."""
        return self._first

    async def reads(self) -> AsyncGenerator[bytes]:
        """Whole events, as many as the network brought at a time; the last item ends with `[DONE]`."""
        splitter = EventSplitter()
        data = self._first
        finished = False
        connection = self._connection
        with Watchdog(self._limits.between_tokens_s) as watchdog:
            while data and connection is not None:
                if splitter.empty and data.endswith(b"\n\n") and b"\r" not in data:
                    events = data
                else:
                    try:
                        events = b"".join(splitter.feed(data))
                    except EventTooLarge:
                        raise event_too_large() from None
                if events:
                    # Searched from the end: that is where it stands, and `rfind` passes JSON many times faster.
                    if events.rfind(b"[DONE]") >= 0 and (end := _end_of(events)) is not None:
                        self._ended = True
                        yield events[:end] + DONE
                        return
                    finished = finished or _FINISH.search(events) is not None
                    yield events
                try:
                    with watchdog:
                        data = await connection.read()
                except TimeoutError:
                    self._broke_off()
                    raise stalled(self._limits.between_tokens_s) from None
                except Broken:
                    self._broke_off()
                    raise cut_off() from None
        if not finished or splitter.rest.strip():
            self._broke_off()
            raise cut_off()
        # Some engines end without [DONE]; the answer itself is whole.
        self._ended = True
        yield DONE

    def close(self) -> None:
        """Drops the connection, which aborts the request in the engine.

        After the last event it is kept instead: the end of the body is about to come and makes it free again.
        Nothing waits for that, because the client's answer is over and its connection may close.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._ended:
            connection.release()
        else:
            connection.close()


class VllmBackend:
    """One engine. `url` never reaches a client or a metric; `path` is what requests are posted to.

    `host` is the Host header where the URL holds an address instead of a name. `broke_off` hears of answers that end
    in the middle. Its connections close when they have been idle for a moment, or at `close`.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        limits: EngineLimits,
        path: str = "/v1/chat/completions",
        host: str = "",
        broke_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._broke_off = broke_off
        self._limits = limits
        self._connections = Connections(url, limits.connect_s)
        self._head = request_head(url.rstrip("/") + path, api_key, host)

    def close(self) -> None:
        self._connections.close()

    async def stream(self, payload: bytes) -> EngineStream:
        """Sends the request and waits for the first bytes of its answer. Raises ApiError."""
        limit_s = self._limits.first_token_s
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._post(payload)
                try:
                    first = await connection.read()
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError:
            raise too_slow(limit_s) from None
        except Broken:
            raise cut_off() from None
        if not first:
            connection.close()
            raise cut_off()
        return EngineStream(connection, first, self._limits, self._broke_off)

    async def complete(self, payload: bytes) -> bytes:
        """A whole answer as the engine's JSON bytes. Raises ApiError."""
        limit_s = self._limits.answer_s
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._post(payload)
                try:
                    while part := await connection.read():
                        parts.append(part)
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError:
            raise too_slow(limit_s) from None
        except Broken:
            raise cut_off() from None
        connection.release()
        return b"".join(parts)

    async def _post(self, payload: bytes) -> Connection:
        """Raises ApiError when the engine cannot be reached or refuses, Broken when it breaks off."""
        connection = await self._send(b"%b%d\r\n\r\n%b" % (self._head, len(payload), payload))
        if connection.status == 200:
            return connection
        try:
            raise await refusal(connection)
        finally:
            connection.close()

    async def _send(self, request: bytes) -> Connection:
        """Up to the head of the answer.

        A connection that the engine has just closed breaks at once, before any answer: then the request goes out
        again. Nothing is repeated when an answer has begun or the engine had it for longer than that.
        """
        attempt = 1
        while True:
            try:
                connection = await self._connections.take()
            except CannotConnect:
                raise unreachable() from None
            sent_s = time.monotonic()
            try:
                connection.send(request)
                await connection.head()
                return connection
            except Broken as broken:
                if not broken.unanswered or attempt == _ATTEMPTS or time.monotonic() - sent_s > _STALE_S:
                    raise
            except BaseException:
                connection.close()
                raise
            attempt += 1


def request_head(url: str, api_key: str, host: str) -> bytes:
    """A POST of JSON up to the number of its bytes. Raises ValueError for a key that no header can hold."""
    if not api_key.isprintable():
        raise ValueError("The engine's API key holds a line break or another control character.")
    parsed = URL(url)
    lines = [f"POST {parsed.raw_path_qs} HTTP/1.1", f"Host: {host or parsed.host_port_subcomponent}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    lines += ["Content-Type: application/json", "Content-Length: "]
    return "\r\n".join(lines).encode()


def _end_of(events: bytes) -> int | None:
    """Where the `[DONE]` event begins, None when there is none: the words may also stand in a text."""
    if events.endswith(DONE):
        return len(events) - len(DONE)
    start = 0
    for event in split_events(events):
        if event_data(event) == b"[DONE]":
            return start
        start += len(event)
    return None
