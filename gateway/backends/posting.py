"""One kind of request to one engine, over aiohttp's connections and parser alone.

A session's own `post` builds each request anew, of general headers, cookies and redirects, and starts a task to write
its body. Here requests are alike but for their body, and leave in one piece.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus

import aiohttp
from aiohttp.http import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from yarl import URL

_READ_BYTES = 2**16
"""So much of an answer is held that nobody has read; the engine waits before more."""


class CannotConnect(Exception):
    """No connection to the engine came about in time."""


class Disconnected(Exception):
    """The engine closed the connection before the head of its answer."""


class Answer:
    """An answer whose head has come. At the end of `content` its connection is free for another request.

    An answer that ends before all of its request has left (a refusal, say) ends the connection too.
    """

    __slots__ = ("_connection", "content", "headers", "status")

    def __init__(
        self, connection: aiohttp.connector.Connection, message: RawResponseMessage, content: aiohttp.StreamReader
    ) -> None:
        self._connection = connection
        self.status: int = message.code
        self.headers: Mapping[str, str] = message.headers
        self.content = content
        content.on_eof(self._ended)

    @property
    def closed(self) -> bool:
        """Whether its connection has been given back or closed."""
        return self._connection.closed

    def close(self) -> None:
        """Drops the connection where the answer has not ended."""
        _drop(self._connection)

    def _ended(self) -> None:
        transport = self._connection.transport
        if transport is not None and transport.get_write_buffer_size():
            _drop(self._connection)
        else:
            self._connection.release()


class Posting:
    """Posts JSON to `url`; `host` is the Host header where the URL holds an address instead of a name."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str, host: str, connect_s: float
    ) -> None:
        self._session = session
        target = URL(url)
        # Tells the pool where to connect to, and is never sent.
        self._target = aiohttp.ClientRequest("POST", target, loop=asyncio.get_running_loop())
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_s)
        self._head = _head(target, api_key, host)

    async def post(self, body: bytes) -> Answer:
        """Sends a request and waits for the head of its answer.

        Raises CannotConnect; Disconnected; aiohttp.ClientError for what is no answer.
        """
        connector = self._session.connector
        if connector is None:
            raise CannotConnect
        try:
            connection = await connector.connect(self._target, traces=[], timeout=self._timeout)
        except (aiohttp.ClientConnectorError, TimeoutError):
            raise CannotConnect from None
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None or protocol.should_close:
                # Closed meanwhile; or it holds bytes that belong to no request of ours.
                raise Disconnected
            protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=_READ_BYTES)
            transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            message, content = await protocol.read()
            while message.code < 200:
                if message.code == HTTPStatus.SWITCHING_PROTOCOLS:
                    raise aiohttp.ClientError("It answers in another protocol.")
                # Something before the answer.
                message, content = await protocol.read()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            _drop(connection)
            raise Disconnected from None
        except HttpProcessingError as error:
            _drop(connection)
            raise aiohttp.ClientError(error.message) from None
        except BaseException:
            _drop(connection)
            raise
        return Answer(connection, message, content)


def _drop(connection: aiohttp.connector.Connection) -> None:
    """Does not wait until an engine that reads nothing has taken what is still to be sent."""
    if connection.transport is not None:
        connection.transport.abort()
    connection.close()


def _head(target: URL, api_key: str, host: str) -> bytes:
    """Of a request, up to the number of its bytes. Raises ValueError for a key that no header can hold."""
    if not api_key.isprintable():
        raise ValueError("The engine's API key holds a line break or another control character.")
    lines = [f"POST {target.raw_path_qs} HTTP/1.1", f"Host: {host or target.host_port_subcomponent}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "Content-Type: application/json", "Content-Length: "]).encode()
