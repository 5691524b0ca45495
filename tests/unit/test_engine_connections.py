"""Connections to an engine: kept, given back, aborted, and read no faster than their answers are taken."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.backends.connections import IDLE_CONNECTION_S, Broken, CannotConnect, Connection, Connections

REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[Connections]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1.0)
    try:
        yield connections
    finally:
        connections.close()
        server.close()


def answering(*answers: bytes) -> Handler:
    """One answer for each request of a connection, the last one for all that follow."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(1000):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers[min(number, len(answers) - 1)])
            await writer.drain()

    return handler


async def asked(connections: Connections) -> tuple[Connection, bytes]:
    connection = await connections.take()
    connection.send(REQUEST)
    await connection.head()
    body = b""
    while part := await connection.read():
        body += part
    return connection, body


async def test_a_connection_that_was_given_back_is_taken_again() -> None:
    async with engine(answering(OK)) as connections:
        first, body = await asked(connections)
        assert (first.status, body) == (200, b"ok")
        first.release()
        second, _ = await asked(connections)
        assert second is first


async def test_a_connection_in_use_is_nobody_elses() -> None:
    async with engine(answering(OK)) as connections:
        first, _ = await asked(connections)
        second, _ = await asked(connections)
        assert second is not first


async def test_a_connection_that_was_idle_for_too_long_is_closed() -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(OK)(reader, writer)

    async def watched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            closed.set()

    async with engine(watched) as connections:
        connection, _ = await asked(connections)
        connection.release()
        async with asyncio.timeout(IDLE_CONNECTION_S + 1):
            await closed.wait()
        second, _ = await asked(connections)
        assert second is not connection


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
    ids=["close", "http-1-0", "an-answer-too-many"],
)
async def test_a_connection_that_cannot_serve_again_is_not_kept(answer: bytes) -> None:
    async with engine(answering(answer)) as connections:
        first, body = await asked(connections)
        assert body == b"ok"
        first.release()
        second, _ = await asked(connections)
        assert second is not first


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    async with engine(answering(b"HTTP/1.1 103 Early Hints\r\nx-a: b\r\n\r\n" + OK)) as connections:
        connection, body = await asked(connections)
        assert (connection.status, connection.headers, body) == (200, {"content-length": "2"}, b"ok")


async def test_a_body_may_end_with_its_connection() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async with engine(handler) as connections:
        assert (await asked(connections))[1] == b"all of it"


@pytest.mark.parametrize(
    ("answer", "unanswered"),
    [
        (b"", True),
        (b"HTTP/1.1 200", True),
        (b"SMTP ready\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", False),
        (b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 2**15, False),
    ],
    ids=["nothing", "half-a-head", "another-protocol", "half-a-body", "no-last-chunk", "no-chunk", "a-long-head"],
)
async def test_d5_an_answer_that_is_not_whole_is_a_break(answer: bytes, unanswered: bool) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    async with engine(handler) as connections:
        with pytest.raises(Broken) as broken:
            await asked(connections)
        assert broken.value.unanswered is unanswered


async def test_what_came_before_a_break_is_read_first() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok")

    async with engine(handler) as connections:
        connection = await connections.take()
        connection.send(REQUEST)
        await connection.head()
        await asyncio.sleep(0.05)
        assert await connection.read() == b"ok"
        with pytest.raises(Broken):
            await connection.read()


async def test_an_engine_is_read_no_faster_than_its_answer_is_taken() -> None:
    written = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 2**26)
        for _ in range(2**10):
            writer.write(bytes(2**16))
            await writer.drain()
            written += 2**16

    async with engine(handler) as connections:
        connection = await connections.take()
        connection.send(REQUEST)
        await connection.head()
        await asyncio.sleep(0.3)
        held = written
        # What the kernel takes on both sides, and what one read brings.
        assert held < 2**24
        await asyncio.sleep(0.1)
        assert written == held
        size = 0
        while part := await connection.read():
            size += len(part)
        assert size == 2**26


async def test_nobody_listening_is_told_at_once() -> None:
    async with engine(answering(OK)) as connections:
        pass
    with pytest.raises(CannotConnect):
        await connections.take()


async def test_a_name_that_does_not_exist_cannot_be_connected_to() -> None:
    with pytest.raises(CannotConnect):
        await Connections("http://nowhere.invalid", 1.0).take()
