"""The engine call and its event stream; the only place that knows aiohttp's errors."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import orjson

from gateway.backends.sse import DONE, EventSplitter, EventTooLarge, event_data
from gateway.errors import ApiError, ErrorKind

log = logging.getLogger("headstart.engine")

_PASSED_ON = {400, 404, 413, 422}
_BUSY = {429, 503}
_READ_BYTES = 2**16
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
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10, keepalive_timeout=30),
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

    async def batches(self) -> AsyncIterator[list[bytes]]:
        """Lists of events as the network brought them; the last list ends with the `[DONE]` event."""
        splitter = EventSplitter()
        loop = asyncio.get_running_loop()
        finished = False
        data = self._first
        try:
            async with asyncio.timeout(None) as limit:
                while data:
                    if events := splitter.feed(data):
                        if b"[DONE]" in events[-1] and event_data(events[-1]) == b"[DONE]":
                            events[-1] = DONE
                            yield events
                            return
                        finished = finished or any(b'"finish_reason":"' in event for event in events)
                        yield events
                    limit.reschedule(loop.time() + self._limits.between_tokens_s)
                    data = await self._response.content.read(_READ_BYTES)
                    limit.reschedule(None)
        except TimeoutError:
            raise ApiError(
                ErrorKind.ENGINE_TIMEOUT,
                f"The engine sent nothing for {self._limits.between_tokens_s:g} s in the middle of the answer.",
                code="engine_stalled",
            ) from None
        except EventTooLarge:
            raise ApiError(ErrorKind.BAD_ENGINE, "The engine sent an event that is too large.") from None
        except (aiohttp.ClientError, OSError):
            raise cut_off() from None
        if not finished or splitter.rest.strip():
            raise cut_off()
        # Some engines end without [DONE]; the answer itself is whole.
        yield [DONE]

    def close(self) -> None:
        """Drops the connection, which aborts the request in the engine unless it has ended."""
        self._response.close()

    def release(self) -> None:
        """Gives the connection back after the last event."""
        self._response.release()


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
        response = await self._post(payload, self._limits.first_token_s)
        try:
            async with asyncio.timeout(self._limits.first_token_s):
                first = await response.content.read(_READ_BYTES)
        except TimeoutError:
            response.close()
            raise too_slow(self._limits.first_token_s) from None
        except (aiohttp.ClientError, OSError):
            response.close()
            raise cut_off() from None
        except BaseException:
            response.close()
            raise
        if not first:
            response.close()
            raise cut_off()
        return EngineStream(response, first, self._limits)

    async def complete(self, payload: bytes) -> bytes:
        """A whole answer as the engine's JSON bytes. Raises ApiError."""
        response = await self._post(payload, self._limits.answer_s)
        try:
            async with asyncio.timeout(self._limits.answer_s):
                body = await response.read()
        except TimeoutError:
            response.close()
            raise too_slow(self._limits.answer_s) from None
        except (aiohttp.ClientError, OSError):
            response.close()
            raise cut_off() from None
        except BaseException:
            response.close()
            raise
        return body

    async def _post(self, payload: bytes, limit_s: float) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(limit_s):
                response = await self._session.post(
                    self._chat_url, data=payload, headers=self._headers, allow_redirects=False
                )
        except aiohttp.ConnectionTimeoutError:
            raise unreachable() from None
        except TimeoutError:
            raise too_slow(limit_s) from None
        except (aiohttp.ClientConnectorError, socket.gaierror, ConnectionRefusedError):
            raise unreachable() from None
        except (aiohttp.ClientError, OSError):
            raise cut_off() from None
        if response.status == 200:
            return response
        try:
            raise await _refusal(response)
        finally:
            response.close()


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
