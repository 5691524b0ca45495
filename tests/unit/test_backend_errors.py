"""The engine's client against a server that does byte by byte what the test says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from time import time

import pytest

from gateway.backends.vllm import EngineLimits, EngineSession, VllmBackend
from gateway.errors import ApiError, ErrorKind

LIMITS = EngineLimits(connect_s=1.0, first_token_s=2.0, between_tokens_s=1.0, answer_s=2.0)
DONE = b"data: [DONE]\n\n"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

Handler = Callable[["Connection"], Awaitable[None]]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers))
    return head.encode() + b"\r\n" + body


@dataclass
class Connection:
    """`number` counts the connections of the server from 1; `requests` those that came on this one."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: int = 0

    async def request(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.requests += 1
        return await self.reader.readexactly(length)

    async def write(self, *pieces: bytes) -> None:
        """Each piece arrives as a read of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.02)


@dataclass
class RawEngine:
    backend: VllmBackend
    connections: list[Connection] = field(default_factory=list)

    async def text(self) -> bytes:
        stream = await self.backend.stream(b"{}")
        try:
            return b"".join([data async for data in stream.reads()])
        finally:
            stream.close()


@asynccontextmanager
async def raw_engine(handler: Handler) -> AsyncIterator[RawEngine]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(len(engine.connections) + 1, reader, writer)
        engine.connections.append(connection)
        try:
            await handler(connection)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with EngineSession(LIMITS) as session:
        engine = RawEngine(VllmBackend(session, url, "", LIMITS))
        yield engine
    server.close()


async def stream_forever(connection: Connection) -> None:
    """One answer after the other; the end of the body comes a moment after `[DONE]`, as from vLLM."""
    while True:
        await connection.request()
        await connection.write(STREAM + chunked(WORD), chunked(LAST) + chunked(DONE), END)


async def test_a_connection_serves_again_after_a_stream_whose_end_came_late() -> None:
    async with raw_engine(stream_forever) as engine:
        for _ in range(5):
            assert await engine.text() == WORD + LAST + DONE
            # The end of the body comes 20 ms after the last event.
            await asyncio.sleep(0.1)
        assert [connection.requests for connection in engine.connections] == [5]


async def test_a_connection_whose_body_never_ends_is_dropped_soon() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(WORD + LAST + DONE))
        closed.set_result(await connection.reader.read())

    closed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with raw_engine(handler) as engine:
        assert await engine.text() == WORD + LAST + DONE
        async with asyncio.timeout(2):
            assert await closed == b""


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_d7b_a_request_on_a_connection_that_the_engine_closes_at_that_moment_goes_out_again(
    streamed: bool,
) -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(WORD + LAST + DONE) + END if streamed else whole("200 OK", b"{}"))
        # Idle for too long, says the engine, and closes just as the next request comes in.
        await connection.request()

    async with raw_engine(handler) as engine:
        for _ in range(3):
            if streamed:
                assert await engine.text() == WORD + LAST + DONE
            else:
                assert await engine.backend.complete(b"{}") == b"{}"
            await asyncio.sleep(0.05)
        assert [connection.requests for connection in engine.connections] == [2, 2, 1]


async def test_d7b_an_engine_that_takes_a_request_and_dies_over_it_later_is_not_asked_again() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await asyncio.sleep(1.2)

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError, match="broke off"):
            await engine.backend.stream(b"{}")
        assert len(engine.connections) == 1


async def test_d7b_an_engine_that_always_closes_is_asked_three_times_at_most() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError, match="broke off") as caught:
            await engine.backend.stream(b"{}")
        assert caught.value.kind is ErrorKind.BAD_ENGINE
        assert len(engine.connections) == 3


async def test_d7b_nothing_is_repeated_once_the_head_of_the_answer_has_come() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM)

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError, match="broke off"):
            await engine.backend.stream(b"{}")
        assert len(engine.connections) == 1


@pytest.mark.parametrize(
    "last",
    [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]\n\ndata: more\n\n"],
)
async def test_every_form_of_the_last_event_ends_the_stream_in_one_form(last: bytes) -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(WORD + LAST + last) + END)

    async with raw_engine(handler) as engine:
        assert await engine.text() == WORD + LAST + DONE


async def test_the_word_done_in_a_text_does_not_end_the_stream() -> None:
    says_done = WORD.replace(b'"a"', b'"[DONE]"')

    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(says_done), chunked(WORD + LAST + DONE) + END)

    async with raw_engine(handler) as engine:
        assert await engine.text() == says_done + WORD + LAST + DONE


async def test_an_answer_that_is_whole_may_end_without_done() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(WORD + LAST) + END)

    async with raw_engine(handler) as engine:
        assert await engine.text() == WORD + LAST + DONE


@pytest.mark.parametrize("rest", [b"", LAST[:40]], ids=["no-finish-reason", "half-an-event"])
async def test_d5_an_orderly_end_in_the_middle_of_an_answer_is_a_break(rest: bytes) -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(WORD + rest) + END)

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError, match="broke off"):
            await engine.text()


async def test_d12_an_event_without_end_is_given_up_before_it_fills_the_memory() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(STREAM + chunked(WORD))
        while True:
            connection.writer.write(chunked(b"x" * 2**16))
            await connection.writer.drain()

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError, match="too large"):
            await engine.text()


async def test_d6_an_error_body_that_comes_in_pieces_is_read_whole() -> None:
    body = b'{"error":{"message":"n must be at most 4.","param":"n"}}'
    answer = whole("400 Bad Request", body)

    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(answer[:-30], answer[-30:-10], answer[-10:])

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError, match="n must be at most 4") as caught:
            await engine.backend.complete(b"{}")
    assert (caught.value.http_status, caught.value.param) == (400, "n")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (["retry-after: 7"], 7),
        (["retry-after: 0"], 0),
        (["retry-after-ms: 250", "retry-after: 7"], 0.25),
        (["retry-after: -3"], 1),
        (["retry-after: nan"], 1),
        (["retry-after: soon"], 1),
        ([], 1),
        ([f"retry-after: {formatdate(0, usegmt=True)}"], 0),
    ],
)
async def test_d6_retry_after_is_read_in_every_form(headers: list[str], seconds: float) -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(whole("503 Service Unavailable", b"{}", *headers))

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError) as caught:
            await engine.backend.complete(b"{}")
    assert caught.value.retry_after_s == seconds


async def test_d6_a_retry_after_date_is_counted_from_now() -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(whole("429 Too Many", b"", f"retry-after: {formatdate(time() + 60, usegmt=True)}"))

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError) as caught:
            await engine.backend.complete(b"{}")
    assert caught.value.retry_after_s == pytest.approx(60, abs=5)
    assert caught.value.http_status == 429


@pytest.mark.parametrize("status", ["301 Moved", "307 Temporary Redirect", "401 Unauthorized", "500 Error"])
async def test_d6_whatever_else_the_engine_answers_is_a_502_and_no_redirect_is_followed(status: str) -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        await connection.write(whole(status, b'{"error":{"message":"secret"}}', "location: http://127.0.0.1:1/"))

    async with raw_engine(handler) as engine:
        with pytest.raises(ApiError) as caught:
            await engine.backend.complete(b"{}")
    assert caught.value.http_status == 502
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_d4_cancelling_a_call_closes_its_connection(streamed: bool) -> None:
    async def handler(connection: Connection) -> None:
        await connection.request()
        arrived.set()
        gone.set_result(await connection.reader.read())

    arrived = asyncio.Event()
    gone: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with raw_engine(handler) as engine:
        call = asyncio.create_task(engine.backend.stream(b"{}") if streamed else engine.backend.complete(b"{}"))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(1):
            assert await gone == b""
