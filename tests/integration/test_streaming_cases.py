"""Streams through the whole gateway: nothing of the engine's answer is lost, changed or invented."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.engine_sim import Answer, AnswerContext, EngineSim, Fault, SimConfig, ToolCall
from bench.gateway_thread import RunningGateway
from bench.reply import Reply, read_reply
from tests.support.sdk import asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat"
LINES = "One\u2028two\u2029three\u0085four"
LETTERS = "Thuyền trưởng đã về 🚢🧭, 항구에 도착했다 👩‍👩‍👧."
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


@dataclass
class Speaker:
    """What the simulated model says next, whatever it is asked."""

    answer: str | Answer = "Hello there."

    def __call__(self, context: AnswerContext) -> str | Answer:
        return self.answer if isinstance(self.answer, Answer) else Answer(self.answer)


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim(speaker: Speaker) -> AsyncIterator[EngineSim]:
    config = SimConfig(time_scale=0.01, decode_tokens_per_s=None, answer=speaker, bytes_per_token=3)
    async with EngineSim(config) as sim:
        yield sim


def anonymous(events: bytes) -> bytes:
    """Without what differs from answer to answer: its id and its time."""
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb'"id":"chatcmpl-[^"]+"', b'"id":""', events))


async def test_d1_line_separators_of_unicode_arrive_whole(
    gateway: RunningGateway, speaker: Speaker, model: str, stream: bool
) -> None:
    speaker.answer = LINES
    assert (await gateway.ask(model, "Lines?", stream=stream)).text == LINES
    async with gateway.client() as client:
        messages = asking("Lines?")
        if stream:
            events = await client.chat.completions.create(model=model, messages=messages, stream=True)
            chunks = [chunk async for chunk in events]
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        else:
            answer = await client.chat.completions.create(model=model, messages=messages)
            text = answer.choices[0].message.content or ""
    assert text == LINES


@pytest.mark.parametrize("write_bytes", [1, 2, 3, 7])
async def test_d2_letters_split_across_network_reads_stay_whole(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker, model: str, write_bytes: int
) -> None:
    speaker.answer = LETTERS
    sim.set_fault(Fault("split", path=CHAT, write_bytes=write_bytes))
    reply = await gateway.ask(model, "Letters?", stream=True)
    assert reply.text == LETTERS
    assert "\ufffd" not in reply.raw.decode()
    assert reply.done


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
async def test_d3_a_usage_chunk_comes_only_where_the_client_asked(
    gateway: RunningGateway, sim: EngineSim, model: str, options: dict[str, Any], asked: bool
) -> None:
    reply = await gateway.ask(model, "Usage?", stream=True, **options)
    usages = [chunk for chunk in reply.chunks if chunk.get("usage") is not None]
    assert len(usages) == asked
    assert all(chunk["choices"] == [] for chunk in usages)
    assert reply.done
    assert reply.finish_reasons == ["stop"]
    sent = sim.generations[-1].body["stream_options"]
    assert sent["include_usage"] is True
    assert asked or not sent.get("continuous_usage_stats"), "every chunk would carry usage that nobody asked for"


async def test_d3_usage_comes_last_and_equals_the_engines(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    reply = await gateway.ask(model, "Usage?", stream=True, stream_options={"include_usage": True})
    usage = reply.chunks[-1]["usage"]
    assert usage["prompt_tokens"] == len(sim.generations[-1].prompt_token_ids)
    assert reply.payloads[-1] == b"[DONE]"


async def test_d7_events_of_a_request_that_passes_through_are_the_engines_bytes(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker
) -> None:
    speaker.answer = Answer("It is high.", "Let me look at the tide.", (ToolCall("tide", '{"at": "Pellen"}'),))
    body = {
        "model": "sim-model",
        "messages": [{"role": "user", "content": "Tide?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": TOOLS,
        "logprobs": True,
        "n": 2,
    }
    async with gateway.session() as through, aiohttp.ClientSession(sim.url) as straight:
        ours = await read_reply(through, body)
        sim.api.engine.pool.reset()
        engines = await read_reply(straight, body)
    # The cache salt is the gateway's, so what is cached may differ; nothing else may.
    cached = re.compile(rb'"cached_tokens":\d+,"created_cache_tokens":\d+')
    assert cached.sub(b"", anonymous(ours.raw)) == cached.sub(b"", anonymous(engines.raw))


async def test_d7_whole_answers_that_pass_through_are_the_engines_bytes(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker
) -> None:
    speaker.answer = Answer("It is high.", "Let me look.", (ToolCall("tide", '{"at": "Pellen"}'),))
    body = {"model": "sim-model", "messages": [{"role": "user", "content": "Tide?"}], "tools": TOOLS, "n": 2}
    async with gateway.session() as through, aiohttp.ClientSession(sim.url) as straight:
        ours = await read_reply(through, body)
        engines = await read_reply(straight, body)
    cached = re.compile(rb'"cached_tokens":\d+,"created_cache_tokens":\d+')
    assert cached.sub(b"", anonymous(ours.raw)) == cached.sub(b"", anonymous(engines.raw))


@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS}, {"tools": TOOLS, "n": 2}], ids=["reasoning", "tools", "two"]
)
async def test_d7_tool_calls_and_reasoning_keep_every_delta_in_a_retrieval_request(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker, store: str, fields: dict[str, Any]
) -> None:
    calls = (ToolCall("tide", '{"at": "Pellen"}'), ToolCall("wind", "{}")) if fields else ()
    speaker.answer = Answer("It is high.", "Let me look at the tide.", calls)
    ours = await gateway.ask(f"sim-model@{store}", "When is the tide?", stream=True, **fields)
    async with aiohttp.ClientSession(sim.url) as straight:
        body = {"model": "sim-model", "messages": [{"role": "user", "content": "Tide?"}], "stream": True, **fields}
        engines = await read_reply(straight, body)

    def deltas(reply: Reply, index: int) -> list[dict[str, object]]:
        choices = [choice for chunk in reply.chunks for choice in chunk["choices"] if choice["index"] == index]
        return [{name: v for name, v in choice["delta"].items() if name != "annotations"} for choice in choices]

    for index in range(int(fields.get("n", 1))):
        assert deltas(ours, index) == deltas(engines, index)
    assert ours.finish_reasons == engines.finish_reasons
    assert ours.done


async def test_d7_tool_calls_and_reasoning_are_unchanged_in_a_whole_retrieval_answer(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker, store: str
) -> None:
    speaker.answer = Answer("It is high.", "Let me look.", (ToolCall("tide", '{"at": "Pellen"}'),))
    ours = await gateway.ask(f"sim-model@{store}", "When is the tide?", tools=TOOLS)
    async with aiohttp.ClientSession(sim.url) as straight:
        body = {"model": "sim-model", "messages": [{"role": "user", "content": "Tide?"}], "tools": TOOLS}
        engines = await read_reply(straight, body)
    message = ours.body["choices"][0]["message"]
    assert message.pop("annotations") == []
    assert message == engines.body["choices"][0]["message"]
    assert ours.finish_reasons == ["tool_calls"]


async def test_d11_of_300_streams_at_once_none_waits_for_a_connection(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker
) -> None:
    speaker.answer = "Hello there."
    # Every stream stops after its first event and stays open: a pool of fewer connections would never give the rest.
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=1, count=300))
    body = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "stream": True}
    responses: list[aiohttp.ClientResponse] = []

    async def first_event(session: aiohttp.ClientSession) -> bytes:
        response = await session.post("/v1/chat/completions", json=body)
        responses.append(response)
        return await response.content.readuntil(b"\n\n")

    async with gateway.session() as session:
        async with asyncio.timeout(30):
            events = await asyncio.gather(*(first_event(session) for _ in range(300)))
        assert all(event.startswith(b"data: {") for event in events)
        assert sim.open_streams == 300
        assert await gateway.metric("headstart_chat_in_flight") == 300
        for response in responses:
            response.close()
    await sim.wait_until_idle()
    await gateway.until_metric("headstart_chat_in_flight", 0)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("split", path=CHAT, write_bytes=1),
        Fault("split", path=CHAT, write_bytes=5),
        Fault("split_usage", path=CHAT),
        Fault("crlf", path=CHAT),
        Fault("comments", path=CHAT),
    ],
    ids=["1-byte", "5-byte", "usage-in-two", "crlf", "comments"],
)
async def test_d12_events_split_anywhere_lose_nothing(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker, model: str, fault: Fault
) -> None:
    speaker.answer = LETTERS
    whole = await gateway.ask(model, "Split?", stream=True, stream_options={"include_usage": True})
    sim.set_fault(fault)
    split = await gateway.ask(model, "Split?", stream=True, stream_options={"include_usage": True})
    assert split.text == whole.text == LETTERS
    assert split.finish_reasons == whole.finish_reasons == ["stop"]
    assert split.chunks[-1]["usage"]["completion_tokens"] == whole.chunks[-1]["usage"]["completion_tokens"]
    assert len(split.chunks) == len(whole.chunks)
    assert split.done


async def test_d12_a_usage_event_split_in_two_is_still_kept_from_a_client_that_did_not_ask(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("split_usage", path=CHAT))
    reply = await gateway.ask(model, "Split?", stream=True)
    assert b'"usage"' not in reply.raw
    assert reply.done


@pytest.mark.parametrize("after_chunks", [0, 2])
async def test_d12_an_event_of_a_megabyte_arrives_whole(
    gateway: RunningGateway, sim: EngineSim, speaker: Speaker, model: str, after_chunks: int
) -> None:
    speaker.answer = "Hello there."
    sim.set_fault(Fault("big_event", path=CHAT, after_chunks=after_chunks))
    reply = await gateway.ask(model, "Big?", stream=True)
    assert reply.text.count("x") == 2**20
    assert reply.text.replace("x", "") == "Hello there."
    assert reply.done


async def test_a_stream_without_a_finish_reason_is_not_given_one(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("no_finish", path=CHAT))
    reply = await gateway.ask(model, "Hello?", stream=True)
    assert reply.finish_reasons == []
    assert (reply.extension is not None) == ("@" in model)
    assert b'"usage"' not in reply.raw
