"""A small HTTP/1.1 server on asyncio protocols: every byte and every disconnect is in the caller's hand."""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

import httptools


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """`headers` has lower-case names; a repeated header keeps its last value."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One client connection. Requests on it are served one after another; a lost one cancels its handler."""

    def __init__(
        self, handler: Callable[[HttpRequest, "Connection"], Awaitable[None]], connections: set["Connection"]
    ) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[tuple[HttpRequest, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._url, self._body = b"", []  # type: bytes, list[bytes]
        self._headers: dict[str, str] = {}
        self._closed = asyncio.Event()
        self.lost = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def eof_received(self) -> bool:
        # A client that closed is gone, whatever is still waiting to be sent to it.
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._connections.discard(self)
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()
        self._closed.set()

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.split(b"?", 1)[0].decode("latin-1")
        method = self._parser.get_method().decode("ascii")
        request = HttpRequest(method, path, self._headers, b"".join(self._body))
        self._pending.append((request, self._parser.should_keep_alive()))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            while self._pending and not self.lost:
                request, keep_alive = self._pending.popleft()
                await self._handler(request, self)
                if not keep_alive:
                    self.close()
        finally:
            self._task = None

    # writing

    @property
    def congested(self) -> bool:
        """True while the client reads more slowly than we write."""
        return self._drained is not None

    @property
    def buffered_bytes(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        if self._drained is not None:
            await self._drained

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket as they are."""
        if self._transport is not None and not self.lost:
            self._transport.write(data)

    def start_stream(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Write the head of a chunked 200 response."""
        self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
            % content_type.encode()
        )

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        extra: tuple[tuple[str, str], ...] = (),
        send_bytes: int | None = None,
    ) -> None:
        """Write a whole response; `send_bytes` stops short in its body, as a dying server does."""
        reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Error"
        head = [f"HTTP/1.1 {status} {reason}", f"content-type: {content_type}", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in extra]
        self.write("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body[:send_bytes])

    def close(self) -> None:
        """Close after what was written has left."""
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        """Wait until the connection is lost and its handler has ended."""
        await self._closed.wait()
        if self._task is not None:
            await asyncio.wait([self._task])

    def abort(self, reset: bool = False) -> None:
        """Close at once; `reset` sends RST."""
        if self._transport is None:
            return
        if reset:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def chunked(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
