"""Clients that leave: the engine's request ends with them, before and after the first token."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import orjson
import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import CHAT_PATH
from tests.support.sdk import asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat"
IN_FLIGHT = "headstart_chat_in_flight"
ABORT_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim() -> AsyncIterator[EngineSim]:
    answer = "text:one two three four five six seven eight"
    async with EngineSim(SimConfig(time_scale=0.01, decode_tokens_per_s=None, answer=answer)) as sim:
        yield sim


class RawClient:
    """One connection whose closing is in the test's hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, body: dict[str, object], *, version: str = "1.1", extra: str = "") -> None:
        data = orjson.dumps(body)
        head = (
            f"POST {CHAT_PATH} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n{extra}\r\n"
        )
        self.writer.write(head.encode() + data)

    async def read_until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readuntil(mark)

    async def read_all(self) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.read()

    def leave(self, how: str) -> None:
        if how == "rst":
            self.writer.transport.abort()
        elif how == "half":
            self.writer.write_eof()
        else:
            self.writer.close()


async def connect(gateway: RunningGateway) -> RawClient:
    port = int(gateway.url.rpartition(":")[2])
    return RawClient(*await asyncio.open_connection("127.0.0.1", port))


def request(model: str, stream: bool, question: str = "Count.") -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": question}], "stream": stream}


async def until(what: str, seen: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)


async def assert_aborted(gateway: RunningGateway, sim: EngineSim, aborts_before: int) -> None:
    await until("the engine's request is aborted", lambda: len(sim.aborted) > aborts_before, ABORT_S)
    await gateway.until_metric(IN_FLIGHT, 0, timeout_s=1.0)
    async with gateway.session() as session, session.get("/v1/calls") as response:
        assert (await response.json())["data"][0]["status"] == 499


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize(
    ("stream", "after_chunks"),
    [(True, None), (True, 0), (False, 0)],
    ids=["streamed", "streamed-after-the-head", "whole"],
)
async def test_d4_a_client_that_leaves_before_the_first_token_aborts_the_engine(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool, after_chunks: int | None, how: str
) -> None:
    aborts = len(sim.aborted)
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=after_chunks))
    client = await connect(gateway)
    client.send(request(model, stream))
    await until("the engine has the request", lambda: sim.open_streams == 1, 5.0)
    client.leave(how)
    await assert_aborted(gateway, sim, aborts)
    client.leave("rst")


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
async def test_d4_a_client_that_leaves_after_the_first_token_aborts_the_engine(
    gateway: RunningGateway, sim: EngineSim, model: str, how: str
) -> None:
    aborts = len(sim.aborted)
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=3))
    client = await connect(gateway)
    client.send(request(model, True))
    await client.read_until(b"two")
    client.leave(how)
    await assert_aborted(gateway, sim, aborts)
    client.leave("rst")


async def test_d4_a_client_that_leaves_while_tokens_flow_aborts_the_engine(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    aborts = len(sim.aborted)
    sim.set_fault(Fault("drip", path=CHAT, delay_s=0.2))
    client = await connect(gateway)
    client.send(request(model, True))
    await client.read_until(b"one")
    client.leave("rst")
    await assert_aborted(gateway, sim, aborts)


async def test_d4_the_official_client_closing_its_stream_aborts_the_engine(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    aborts = len(sim.aborted)
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=3))
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model=model, messages=asking("Count."), stream=True)
        async for chunk in stream:
            if "two" in (chunk.choices[0].delta.content or ""):
                break
        await stream.close()
        await assert_aborted(gateway, sim, aborts)


async def test_d4_a_client_that_leaves_in_the_middle_of_its_own_request_costs_no_slot(
    gateway: RunningGateway, sim: EngineSim
) -> None:
    generations = len(sim.generations)
    client = await connect(gateway)
    client.writer.write(f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
    await gateway.until_metric(IN_FLIGHT, 1)
    client.leave("rst")
    await gateway.until_metric(IN_FLIGHT, 0, timeout_s=1.0)
    assert len(sim.generations) == generations


async def test_d4_a_client_that_leaves_while_another_stays_aborts_only_its_own(
    gateway: RunningGateway, sim: EngineSim
) -> None:
    sim.set_fault(Fault("drip", path=CHAT, delay_s=0.1, count=2))
    aborts = len(sim.aborted)
    stays = asyncio.create_task(gateway.ask("sim-model", "Count.", stream=True))
    leaves = await connect(gateway)
    leaves.send(request("sim-model", True))
    await leaves.read_until(b"one")
    leaves.leave("rst")
    reply = await stays
    assert reply.done
    assert reply.text.split()[-1] == "eight"
    assert len(sim.aborted) == aborts + 1


# What a connection is good for after an answer


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_clients_connection_serves_one_answer_after_the_other(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool
) -> None:
    aborts = len(sim.aborted)
    gone = await status_count(gateway, "499")
    opened = 0

    async def count(*_: object) -> None:
        nonlocal opened
        opened += 1

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    async with aiohttp.ClientSession(gateway.url, trace_configs=[trace]) as session:
        for _ in range(20):
            async with session.post(CHAT_PATH, json=request(model, stream)) as response:
                assert b"eight" in await response.read()
    assert opened == 1
    assert len(sim.aborted) == aborts
    assert await status_count(gateway, "499") == gone


async def test_the_engines_connections_serve_one_answer_after_the_other(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    for stream in (True, False):
        for _ in range(20):
            assert (await gateway.ask(model, "Count.", stream=stream)).status == 200
    # A probe of the engine may hold some beside the one that all answers shared.
    assert sim.open_connections <= 8


async def status_count(gateway: RunningGateway, status: str) -> float:
    async with gateway.session() as session, session.get("/metrics") as response:
        text = await response.text()
    found = re.findall(rf'^headstart_chat_requests_total{{[^}}]*status="{status}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


async def test_pipelined_requests_are_answered_in_order(gateway: RunningGateway) -> None:
    client = await connect(gateway)
    client.send(request("sim-model", True))
    client.send(request("sim-model", False))
    client.send(request("no-such-model", False), extra="connection: close\r\n")
    answers = await client.read_all()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"200", b"404"]
    assert answers.index(b"[DONE]") < answers.index(b'chat.completion"') < answers.index(b"no-such-model")


async def test_an_http_1_0_client_gets_the_whole_answer_and_its_connection_closed(gateway: RunningGateway) -> None:
    client = await connect(gateway)
    client.send(request("sim-model", False), version="1.0")
    head, body = (await client.read_all()).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head.lower()
    assert orjson.loads(body)["choices"][0]["message"]["content"].endswith("eight")


# The real engine


async def running_requests(engine_url: str, model: str) -> float:
    """How many requests the engine works on, by its own count, which it refreshes only when it computes something."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    async with aiohttp.ClientSession(engine_url) as session:
        async with session.post(CHAT_PATH, json=body) as response:
            assert response.status == 200
            await response.read()
        async with session.get("/metrics") as response:
            found = re.search(r"^vllm:num_requests_running{.*} (\S+)$", await response.text(), re.MULTILINE)
    assert found is not None
    return float(found.group(1))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_d4_the_real_engine_aborts_when_the_client_leaves(
    engine_url: str, tmp_path: Path, stream: bool
) -> None:
    async with run_gateway(settings_for(tmp_path, engine_url)) as gateway:
        async with gateway.session() as session, session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        client = await connect(gateway)
        client.send({**request(model, stream, "Write a long story."), "max_tokens": 4000, "temperature": 0})
        await (client.read_until(b"data: ") if stream else asyncio.sleep(1.0))
        with_ours = await running_requests(engine_url, model)
        assert with_ours >= 1
        client.leave("fin")
        await gateway.until_metric(IN_FLIGHT, 0, timeout_s=1.0)
        deadline = time.monotonic() + ABORT_S
        while await running_requests(engine_url, model) >= with_ours:
            assert time.monotonic() < deadline, "the engine goes on"
