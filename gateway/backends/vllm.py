"""The engine call and its event stream: what goes wrong on the way becomes an ApiError here."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

import aiohttp

from gateway.backends.posting import Answer, CannotConnect, Disconnected, Posting
from gateway.backends.refusal import cut_off, event_too_large, refusal, stalled, too_slow, unreachable
from gateway.backends.sse import DONE, EventSplitter, EventTooLarge, event_data, split_events
from gateway.backends.watchdog import Watchdog

IDLE_CONNECTION_S = 2.0
"""Well below the engine's own limit: a busy machine runs the two timers late and apart."""

_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_LAST_BYTES_S = 0.5
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
    """Owns the connections to the engines: no pool limit (admission is the gateway's), no cookies, no decoding."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            # vLLM closes idle connections after 5 s: one that it closes as a request leaves would fail that request.
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

    def __init__(self, response: Answer, first: bytes, limits: EngineLimits, broke_off: Callable[[], None]) -> None:
        self._response = response
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
        with Watchdog(self._limits.between_tokens_s) as watchdog:
            while data:
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
                        data = await self._response.content.readany()
                except TimeoutError:
                    self._broke_off()
                    raise stalled(self._limits.between_tokens_s) from None
                except (aiohttp.ClientError, OSError):
                    self._broke_off()
                    raise cut_off() from None
        if not finished or splitter.rest.strip():
            self._broke_off()
            raise cut_off()
        # Some engines end without [DONE]; the answer itself is whole.
        yield DONE

    def close(self) -> None:
        """Drops the connection, which aborts the request in the engine.

        After the last event it is kept instead: the end of the body is about to come and gives it back to the pool.
        Nothing waits for that, because the client's answer is over and its connection may close.
        """
        if not self._ended:
            self._response.close()
        elif not self._response.closed:
            overdue = asyncio.get_running_loop().call_later(_LAST_BYTES_S, self._response.close)
            self._response.content.on_eof(overdue.cancel)


class VllmBackend:
    """One engine. `url` never reaches a client or a metric; `path` is what requests are posted to.

    `host` is the Host header where the URL holds an address instead of a name. `broke_off` hears of answers that end
    in the middle.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        api_key: str,
        limits: EngineLimits,
        path: str = "/v1/chat/completions",
        host: str = "",
        broke_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._broke_off = broke_off
        self._limits = limits
        self._posting = Posting(
            session, url.rstrip("/") + path, api_key=api_key, host=host, connect_s=limits.connect_s
        )

    async def stream(self, payload: bytes) -> EngineStream:
        """Sends the request and waits for the first bytes of its answer. Raises ApiError."""
        limit_s = self._limits.first_token_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._post(payload)
                try:
                    first = await response.content.readany()
                except BaseException:
                    # Dropping the connection is what aborts the request in the engine.
                    response.close()
                    raise
        except TimeoutError:
            raise too_slow(limit_s) from None
        except (aiohttp.ClientError, OSError, Disconnected):
            raise cut_off() from None
        if not first:
            response.close()
            raise cut_off()
        return EngineStream(response, first, self._limits, self._broke_off)

    async def complete(self, payload: bytes) -> bytes:
        """A whole answer as the engine's JSON bytes. Raises ApiError."""
        limit_s = self._limits.answer_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._post(payload)
                try:
                    return await response.content.read()
                except BaseException:
                    response.close()
                    raise
        except TimeoutError:
            raise too_slow(limit_s) from None
        except (aiohttp.ClientError, OSError, Disconnected):
            raise cut_off() from None

    async def _post(self, payload: bytes) -> Answer:
        """Raises ApiError when the engine cannot be reached or refuses, aiohttp's errors when it breaks off."""
        response = await self._send(payload)
        if response.status == 200:
            return response
        try:
            raise await refusal(response)
        finally:
            response.close()

    async def _send(self, payload: bytes) -> Answer:
        """Up to the head of the answer.

        A connection of the pool that the engine has just closed breaks at once, before any answer: then the request
        goes out again. Nothing is repeated when an answer has begun or the engine had it for longer than that.
        """
        attempt = 1
        while True:
            sent_s = time.monotonic()
            try:
                return await self._posting.post(payload)
            except CannotConnect:
                raise unreachable() from None
            except Disconnected:
                if attempt == _ATTEMPTS or time.monotonic() - sent_s > _STALE_S:
                    raise
            attempt += 1
            # The pool drops what was closed with it, once the loop has heard of that.
            await asyncio.sleep(0)


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
