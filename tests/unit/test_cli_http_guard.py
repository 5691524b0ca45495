"""Half-sent and endless request heads against the server that `serve` runs, with a trivial application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import uvicorn

from gateway.cli.http_guard import BoundedHeadProtocol
from gateway.cli.serve import bind


class Impatient(BoundedHeadProtocol):
    head_timeout_s = 0.3


async def hello(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await asyncio.sleep(0.5 if scope["path"] == "/slow" else 0)
    said = b"%d" % len(body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(hello, http=Impatient, lifespan="off", ws="none", log_config=None, log_level="critical")
    running = uvicorn.Server(config)
    task = asyncio.create_task(running._serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        await task


async def exchange(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the parts, then reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_s)
    async with asyncio.timeout(3):
        answer = await reader.read()
    writer.close()
    return answer


async def test_h7_half_sent_headers_are_answered_with_408_and_closed() -> None:
    async with server() as port:
        answer = await exchange(port, b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-half: ")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error":{"message":"No complete request came within 0.3 s."' in answer


async def test_h7_headers_that_trickle_do_not_move_the_deadline() -> None:
    trickle = [b"GET / HTTP/1.1\r\n", *(b"x-%d: 1\r\n" % number for number in range(20))]
    async with server() as port:
        try:
            answer = await exchange(port, *trickle, pause_s=0.05)
        except ConnectionError:
            return  # closed while we were still sending
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_h7_a_connection_that_says_nothing_is_closed() -> None:
    async with server() as port:
        assert (await exchange(port)).startswith(b"HTTP/1.1 408 ")


async def test_h7_endless_headers_are_refused_at_the_limit() -> None:
    async with server() as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nx-long: " + b"a" * 65 * 1024)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_h7_what_is_not_http_is_refused_in_openais_shape() -> None:
    for request in (
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    ):
        async with server() as port:
            answer = await exchange(port, request)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_a_large_body_and_a_slow_answer_are_not_mistaken_for_a_slow_head() -> None:
    body = b"b" * 300_000
    request = b"POST /slow HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
    async with server() as port:
        answer = await exchange(port, request)
    assert answer.endswith(b"\r\n\r\n300000")


async def test_the_second_request_of_a_connection_has_a_deadline_of_its_own() -> None:
    request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    async with server() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(1) == b"0"
        await asyncio.sleep(0.5)  # idle longer than a head may take
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(1) == b"0"
        writer.write(b"GET / HTTP/1.1\r\nx-half")
        async with asyncio.timeout(3):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
