"""uvicorn's HTTP protocol with bounds on the request head, which it does not set itself."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes a connection whose request head stays half sent or grows without end.

    A connection that sends nothing, or a head that is not complete, gets 408 after `head_timeout_s`; a head over
    `head_limit_bytes` gets 431. Bodies are bounded by the application; waiting between two requests of a connection
    is bounded by uvicorn's keep-alive timeout.
    """

    head_timeout_s = 10.0
    head_limit_bytes = 64 * 1024

    _head_bytes = 0
    _head_complete = False
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_complete:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.head_limit_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", "The request's headers are too large.")
        elif self._head_deadline is None:
            # Most heads come whole, and need no timer.
            self._wait_for_head()

    def on_message_begin(self) -> None:
        if self._head_complete:
            self._head_complete = False
            self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_ended()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is refused in the same shape as all else."""
        self._refuse(b"400 Bad Request", msg)

    def _wait_for_head(self) -> None:
        self._head_deadline = self.loop.call_later(self.head_timeout_s, self._head_overdue)

    def _head_ended(self) -> None:
        self._head_complete = True
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_overdue(self) -> None:
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"No complete request came within {self.head_timeout_s:g} s.")

    def _refuse(self, status: bytes, message: str) -> None:
        self._head_ended()
        body = (
            b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}' % message.encode()
        )
        head: list[Any] = [b"HTTP/1.1 " + status, b"content-type: application/json", b"connection: close"]
        head.append(b"content-length: %d" % len(body))
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()
