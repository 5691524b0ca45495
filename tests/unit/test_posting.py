"""Requests to an engine over its kept connections, and what counts as no answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from gateway.backends.posting import Answer, CannotConnect, Disconnected, Posting
from gateway.backends.vllm import EngineLimits, EngineSession

LIMITS = EngineLimits(connect_s=1.0, first_token_s=2.0, between_tokens_s=1.0, answer_s=2.0)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Engine:
    """`requests` are the heads that came, by connection."""

    posting: Posting
    requests: list[list[bytes]] = field(default_factory=list)

    async def ask(self) -> tuple[Answer, bytes]:
        answer = await self.posting.post(b"{}")
        return answer, await answer.content.read()


@asynccontextmanager
async def posting_to(handler: Handler) -> AsyncIterator[Posting]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0, limit=2**12)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with EngineSession(LIMITS) as session:
        yield Posting(session, url, api_key="secret", host="engines:8000", connect_s=1.0)
    server.close()
    # The handlers see the connections end.
    await asyncio.sleep(0.02)


@asynccontextmanager
async def engine(*answers: bytes, ends: bool = False) -> AsyncIterator[Engine]:
    """An answer for each request of a connection, the last one for all that follow; `ends`: one a connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads: list[bytes] = []
        served.requests.append(heads)
        try:
            while not (ends and heads):
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                assert await reader.readexactly(2) == b"{}"
                writer.write(answers[min(len(heads), len(answers)) - 1])
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with posting_to(serve) as posting:
        served = Engine(posting)
        yield served


async def test_a_request_is_a_post_of_json_with_the_key_and_the_name_of_the_host() -> None:
    async with engine(OK) as served:
        answer, body = await served.ask()
    assert (answer.status, answer.headers["Content-Length"], body) == (200, "2", b"ok")
    assert served.requests == [
        [
            b"POST /v1 HTTP/1.1\r\nHost: engines:8000\r\nAuthorization: Bearer secret\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n"
        ]
    ]


async def test_a_connection_serves_again_after_an_answer_was_read_and_not_while_it_is() -> None:
    async with engine(OK) as served:
        for _ in range(3):
            answer, _ = await served.ask()
            assert answer.closed
        assert [len(heads) for heads in served.requests] == [3]
        await asyncio.gather(served.ask(), served.ask())
        assert [len(heads) for heads in served.requests] == [4, 1]


async def test_closing_an_answer_that_has_ended_leaves_the_connection_to_whoever_has_it_now() -> None:
    async with engine(OK, b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nok") as served:
        first, _ = await served.ask()
        second = await served.posting.post(b"{}")
        first.close()
        assert await second.content.readany() == b"ok"
        assert not second.closed
        second.close()
        assert second.closed


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
    ids=["close", "http-1-0"],
)
async def test_a_connection_that_cannot_serve_again_is_not_kept(answer: bytes) -> None:
    async with engine(answer) as served:
        for _ in range(2):
            assert (await served.ask())[1] == b"ok"
        assert [len(heads) for heads in served.requests] == [1, 1]


@pytest.mark.parametrize("apart_s", [0.0, 0.05], ids=["with-the-answer", "later"])
async def test_bytes_behind_an_answer_are_never_the_answer_to_another_request(apart_s: float) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(OK)
        await asyncio.sleep(apart_s)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nSTALE")
        await reader.read()
        writer.close()

    async with posting_to(serve) as posting:
        assert await (await posting.post(b"{}")).content.read() == b"ok"
        await asyncio.sleep(2 * apart_s + 0.01)
        try:
            answer = await posting.post(b"{}")
        except Disconnected:
            answer = await posting.post(b"{}")
        assert await answer.content.read() == b"ok"
    assert connections == 2


async def test_a_connection_whose_request_has_not_all_left_when_its_answer_ends_is_not_kept() -> None:
    connections, reading = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno" if connections == 1 else OK)
        if connections == 1:
            await reading.wait()
        await reader.read()
        writer.close()

    async with posting_to(serve) as posting:
        refused = await posting.post(b" " * 2**26)
        assert (refused.status, await refused.content.read()) == (413, b"no")
        async with asyncio.timeout(1.0):
            assert await (await posting.post(b"{}")).content.read() == b"ok"
        reading.set()
    assert connections == 2


async def test_another_protocol_is_no_answer() -> None:
    async with engine(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n") as served:
        with pytest.raises(aiohttp.ClientError, match="another protocol"):
            await served.ask()


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    async with engine(b"HTTP/1.1 103 Early Hints\r\nx-a: b\r\n\r\n" + OK) as served:
        answer, body = await served.ask()
    assert (answer.status, body) == (200, b"ok")


async def test_a_body_may_end_with_its_connection() -> None:
    async with engine(b"HTTP/1.1 200 OK\r\n\r\nall of it", ends=True) as served:
        assert (await served.ask())[1] == b"all of it"


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200"], ids=["nothing", "half-a-head"])
async def test_d7b_a_connection_that_ends_before_the_head_of_an_answer_is_told_apart(sent: bytes) -> None:
    async with engine(sent, ends=True) as served:
        with pytest.raises(Disconnected):
            await served.ask()


@pytest.mark.parametrize(
    "sent",
    [
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 2**15,
        b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["another-protocol", "a-long-head", "half-a-body", "no-last-chunk", "no-chunk"],
)
async def test_d5_an_answer_that_is_none_or_not_whole_is_an_error(sent: bytes) -> None:
    async with engine(sent, ends=True) as served:
        with pytest.raises(aiohttp.ClientError):
            await served.ask()


async def test_nobody_listening_and_a_name_that_does_not_exist_are_the_same() -> None:
    async with engine(OK) as served:
        pass
    async with EngineSession(LIMITS) as session:
        with pytest.raises(CannotConnect):
            await served.ask()
        with pytest.raises(CannotConnect):
            await Posting(session, "http://nowhere.invalid", api_key="", host="", connect_s=1.0).post(b"{}")


async def test_a_key_that_no_header_can_hold_is_refused_before_anything_is_sent() -> None:
    async with EngineSession(LIMITS) as session:
        with pytest.raises(ValueError, match="line break"):
            Posting(session, "http://127.0.0.1:1", api_key="a\r\nb", host="", connect_s=1.0)
