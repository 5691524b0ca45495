"""Small ASGI pieces under the hot path: reading a bounded body, noticing a client that leaves, answering."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

from gateway.errors import ApiError, ErrorKind

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed its connection."""


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


SLOWEST_BYTES_PER_S = 4096


class BodyClock:
    """Bounds the time that a body takes: `timeout_s`, and more as more of it has come.

    A body that drips, a byte at a time, runs out of time; a large one over a slow line does not.
    """

    __slots__ = ("_began_s", "received_bytes", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.received_bytes = 0
        self._began_s = asyncio.get_running_loop().time()

    async def receive(self, receive: Receive) -> tuple[bytes, bool]:
        """The next piece and whether more follows. Raises TimeoutError; ClientGone."""
        ends_s = self._began_s + self.timeout_s
        if self.received_bytes:
            ends_s += self.received_bytes / SLOWEST_BYTES_PER_S
            ends_s = min(ends_s, asyncio.get_running_loop().time() + self.timeout_s)
        async with asyncio.timeout_at(ends_s):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = bytes(message.get("body", b""))
        self.received_bytes += len(piece)
        return piece, bool(message.get("more_body", False))


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError 413 over the limit, 408 when it does not come in time; ClientGone."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    clock = BodyClock(timeout_s)
    parts: list[bytes] = []
    more = True
    while more:
        try:
            part, more = await clock.receive(receive)
        except TimeoutError:
            raise ApiError(
                ErrorKind.TIMEOUT, f"The request body did not come within {timeout_s:g} s.", code="body_timeout"
            ) from None
        if clock.received_bytes > limit_bytes:
            raise too_large(limit_bytes)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        ErrorKind.TOO_LARGE,
        f"The request body is larger than the limit of {limit_bytes} bytes.",
        code="body_too_large",
    )


async def send_bytes(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]], content_type: bytes
) -> None:
    all_headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    extra = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await send_bytes(send, error.http_status, error.body_bytes(), [*headers, *extra], b"application/json")


class CancelOnDisconnect:
    """Cancels the current task when the client leaves; entered once the body has been read.

    The cancellation reaches whatever is being awaited, the engine's connection included, and leaves the block as
    ClientGone. Any other cancellation passes through untouched.
    """

    __slots__ = ("_gone", "_receive", "_task", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> "CancelOnDisconnect":
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("CancelOnDisconnect needs a running task.")
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from error
