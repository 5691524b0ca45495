"""What a client hears when the engine refuses, breaks off or stays silent."""

import asyncio
import contextlib
import logging
from email.utils import parsedate_to_datetime
from time import time

import aiohttp
import orjson

from gateway.backends.posting import Answer
from gateway.errors import ApiError, ErrorKind

log = logging.getLogger("headstart.engine")

_PASSED_ON = {400, 404, 413, 422}
_BUSY = {429, 503}
_ERROR_BODY_BYTES = 2**16
_ERROR_BODY_S = 5.0
_LONGEST_WAIT_S = 86_400.0


async def refusal(response: Answer) -> ApiError:
    """From an answer that is not 200: the engine's words for the client's own mistakes, ours otherwise."""
    detail = _error_of(await _body(response))
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


async def _body(response: Answer) -> bytes:
    """What comes of it within bounds; the status alone says enough when it does not."""
    body = bytearray()
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_ERROR_BODY_S):
            while len(body) < _ERROR_BODY_BYTES and (part := await response.content.readany()):
                body += part
    return bytes(body)


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


def _retry_after(response: Answer) -> float:
    """Seconds; 1 where the engine does not say."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError):
            value = float(response.headers.get(name, "")) * scale
            if 0 <= value <= _LONGEST_WAIT_S:
                return value
    with contextlib.suppress(ValueError):
        value = parsedate_to_datetime(response.headers.get("retry-after", "")).timestamp() - time()
        return min(max(0.0, value), _LONGEST_WAIT_S)
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


def event_too_large() -> ApiError:
    return ApiError(ErrorKind.BAD_ENGINE, "The engine sent an event that is too large.", code="engine_failed")


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
