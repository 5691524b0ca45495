"""The engine call and its event stream; the only place that knows aiohttp's errors."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import orjson

from gateway.backends.sse import DONE, EventSplitter, EventTooLarge, event_data, split_events
from gateway.backends.watchdog import Watchdog
from gateway.errors import ApiError, ErrorKind

log = logging.getLogger("headstart.engine")

IDLE_CONNECTION_S = 2.0
"""Well below the engine's own limit: a busy machine runs the two timers late and apart."""

_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_PASSED_ON = {400, 404, 413, 422}
_BUSY = {429, 503}
_LAST_BYTES_S = 0.2
_ERROR_BODY_BYTES = 2**16


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
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s),
            read_bufsize=2**18,
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

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, limits: EngineLimits) -> None:
        self._response = response
        self._first = first
        self._limits = limits

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
                        raise ApiError(
                            ErrorKind.BAD_ENGINE, "The engine sent an event that is too large.", code="engine_failed"
                        ) from None
                if events:
                    if b"[DONE]" in events and (end := _end_of(events)) is not None:
                        yield events[:end] + DONE
                        await self._read_to_end()
                        return
                    finished = finished or _FINISH.search(events) is not None
                    yield events
                try:
                    with watchdog:
                        data = await self._response.content.readany()
                except TimeoutError:
                    raise stalled(self._limits.between_tokens_s) from None
                except (aiohttp.ClientError, OSError):
                    raise cut_off() from None
        if not finished or splitter.rest.strip():
            raise cut_off()
        # Some engines end without [DONE]; the answer itself is whole.
        yield DONE

    async def _read_to_end(self) -> None:
        """Takes the last bytes of the response, behind `[DONE]`, so that its connection can serve again."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_LAST_BYTES_S):
                while await self._response.content.readany():
                    pass

    def close(self) -> None:
        """Drops the connection, which aborts the engine's request; one that has ended gave it back already."""
        self._response.close()


class VllmBackend:
    """One engine. `url` never reaches a client, a log line or a metric."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str, limits: EngineLimits) -> None:
        self._session = session
        self._chat_url = f"{url.rstrip('/')}/v1/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._limits = limits

    async def stream(self, payload: bytes) -> EngineStream:
        """Sends the request and waits for the first bytes of its answer. Raises ApiError."""
        limit_s = self._limits.first_token_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._post(payload)
                with _closed_on_error(response):
                    first = await response.content.readany()
        except TimeoutError:
            raise too_slow(limit_s) from None
        except (aiohttp.ClientError, OSError):
            raise cut_off() from None
        if not first:
            response.close()
            raise cut_off()
        return EngineStream(response, first, self._limits)

    async def complete(self, payload: bytes) -> bytes:
        """A whole answer as the engine's JSON bytes. Raises ApiError."""
        limit_s = self._limits.answer_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._post(payload)
                with _closed_on_error(response):
                    return await response.read()
        except TimeoutError:
            raise too_slow(limit_s) from None
        except (aiohttp.ClientError, OSError):
            raise cut_off() from None

    async def _post(self, payload: bytes) -> aiohttp.ClientResponse:
        """Raises ApiError when the engine cannot be reached or refuses, aiohttp's errors when it breaks off."""
        try:
            response = await self._session.post(
                self._chat_url, data=payload, headers=self._headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise unreachable() from None
        if response.status == 200:
            return response
        try:
            raise await _refusal(response)
        finally:
            response.close()


@contextlib.contextmanager
def _closed_on_error(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Dropping the connection is what aborts the request in the engine."""
    try:
        yield
    except BaseException:
        response.close()
        raise


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


async def _refusal(response: aiohttp.ClientResponse) -> ApiError:
    """What the client hears of the engine's refusal: its words for the client's own mistakes, ours otherwise."""
    body = b""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(5):
            body = await response.content.read(_ERROR_BODY_BYTES)
    detail = _error_of(body)
    status = response.status
    if status in _BUSY:
        kind = ErrorKind.RATE_LIMITED if status == 429 else ErrorKind.UNAVAILABLE
        return ApiError(
            kind,
            "The engine is at its limit. Try again later.",
            code="engine_busy",
            retry_after_s=_retry_after(response),
        )
    if status in _PASSED_ON and detail is not None:
        message, param = detail
        kind = ErrorKind.NOT_FOUND if status == 404 else ErrorKind.INVALID
        return ApiError(kind, message, param=param, code="engine_refused", status=status)
    log.warning("the engine answered %d: %s", status, "its own error" if detail else "no JSON error")
    return ApiError(ErrorKind.BAD_ENGINE, f"The engine failed with status {status}.", code="engine_failed")


def _error_of(body: bytes) -> tuple[str, str | None] | None:
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    param = error.get("param")
    return error["message"], param if isinstance(param, str) else None


def _retry_after(response: aiohttp.ClientResponse) -> float:
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError):
            value = float(response.headers.get(name, "")) * scale
            if 0 <= value <= 86_400:
                return value
    return 1.0


def unreachable() -> ApiError:
    return ApiError(
        ErrorKind.UNAVAILABLE,
        "The engine cannot be reached. Try again later.",
        code="engine_unreachable",
        retry_after_s=2.0,
    )


def cut_off() -> ApiError:
    return ApiError(ErrorKind.BAD_ENGINE, "The engine's answer broke off.", code="engine_cut_off")


def too_slow(limit_s: float) -> ApiError:
    return ApiError(
        ErrorKind.ENGINE_TIMEOUT, f"The engine gave no answer within {limit_s:g} s.", code="engine_silent"
    )


def stalled(limit_s: float) -> ApiError:
    return ApiError(
        ErrorKind.ENGINE_TIMEOUT,
        f"The engine sent nothing for {limit_s:g} s in the middle of the answer.",
        code="engine_stalled",
    )
