"""Errors that a client sees: a small enum of kinds, and the only place that knows their HTTP statuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import orjson

from retrieval.types import NotFound, RetrievalError, StorageFailed, StoreExpired, UnusableFile

_MESSAGE_CHARS = 500


class ErrorKind(Enum):
    """(HTTP status, OpenAI `type`)."""

    INVALID = (400, "invalid_request_error")
    UNAUTHENTICATED = (401, "authentication_error")
    FORBIDDEN = (403, "permission_error")
    NOT_FOUND = (404, "not_found_error")
    METHOD = (405, "invalid_request_error")
    TIMEOUT = (408, "invalid_request_error")
    CONFLICT = (409, "invalid_request_error")
    TOO_LARGE = (413, "invalid_request_error")
    RATE_LIMITED = (429, "rate_limit_error")
    INTERNAL = (500, "server_error")
    BAD_ENGINE = (502, "engine_error")
    UNAVAILABLE = (503, "engine_unavailable")
    ENGINE_TIMEOUT = (504, "engine_timeout")
    STORAGE = (507, "server_error")


@dataclass(slots=True)
class ApiError(Exception):
    """`message` says what is wrong and how to cure it; `param` names the field; `retry_after_s` in seconds.

    `status` overrides the kind's own where the engine's answer is passed on. `forecast` is what was predicted of a
    request that is refused for it.
    """

    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    status: int | None = None
    forecast: Mapping[str, object] | None = None

    @property
    def http_status(self) -> int:
        return self.status or self.kind.value[0]

    def body(self) -> dict[str, object]:
        error: dict[str, object] = {
            "message": self.message,
            "type": self.kind.value[1],
            "param": self.param,
            "code": self.code,
        }
        if self.forecast is not None:
            error["forecast"] = self.forecast
        return {"error": error}

    def body_bytes(self) -> bytes:
        return orjson.dumps(self.body())

    def headers(self) -> dict[str, str]:
        """How to sign in; Retry-After in whole seconds, never less than the wait, and exactly in milliseconds."""
        if self.kind is ErrorKind.UNAUTHENTICATED:
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        whole_s = -(-int(self.retry_after_s * 1000) // 1000)
        return {"retry-after": str(whole_s), "retry-after-ms": str(int(self.retry_after_s * 1000))}

    def event_bytes(self) -> bytes:
        """The error as the last event of a stream that has begun."""
        return b"data: " + self.body_bytes() + b"\n\n"


def translate(error: RetrievalError) -> ApiError:
    """What a client sees of an error of retrieval."""
    if isinstance(error, NotFound):
        # The name came from the client, at any length.
        return ApiError(
            ErrorKind.NOT_FOUND, str(error)[:_MESSAGE_CHARS], code=f"{error.kind.replace(' ', '_')}_not_found"
        )
    if isinstance(error, UnusableFile):
        return ApiError(ErrorKind.INVALID, str(error), param="file", code=error.code)
    if isinstance(error, StoreExpired):
        return ApiError(ErrorKind.INVALID, str(error), param="vector_store_id", code="vector_store_expired")
    if isinstance(error, StorageFailed):
        return ApiError(ErrorKind.STORAGE, str(error), code="storage_failed")
    return ApiError(ErrorKind.INVALID, str(error))
