"""What clients see when the engine refuses, breaks off, stays silent or dies, and what is given back then."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply
from tests.support.sdk import asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat"
IN_FLIGHT = "headstart_chat_in_flight"
CONNECT_S, FIRST_TOKEN_S, BETWEEN_S, ANSWER_S = 0.5, 2.0, 1.0, 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sim() -> AsyncIterator[EngineSim]:
    answer = "text:one two three four five six seven eight"
    async with EngineSim(SimConfig(time_scale=0.01, decode_tokens_per_s=None, answer=answer)) as sim:
        yield sim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(sim: EngineSim, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """Three limits that can be told apart, and room for one request at a time."""
    settings = settings_for(
        tmp_path_factory.mktemp("gateway"),
        sim.url,
        model="sim-model",
        connect_timeout_s=CONNECT_S,
        first_token_timeout_s=FIRST_TOKEN_S,
        between_tokens_timeout_s=BETWEEN_S,
        answer_timeout_s=ANSWER_S,
        max_in_flight=1,
    )
    async with run_gateway(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def the_slot_comes_back(gateway: RunningGateway, sim: EngineSim) -> AsyncIterator[None]:
    """D7b, after every test here: no slot, no engine request and no fault is left over."""
    yield
    sim.clear_faults()
    await gateway.until_metric(IN_FLIGHT, 0)
    # A replica that failed is probed: the next test's fault must not strike the probe.
    await gateway.until_metric("headstart_replica_usable", 1, timeout_s=20)
    await sim.wait_until_idle()
    assert (await gateway.ask("sim-model", "Still there?")).status == 200


def assert_error_shape(error: object) -> None:
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)


def assert_ends_with_error(reply: Reply, code: str) -> None:
    """An error event in OpenAI's shape, then the end: nothing in it looks like a good end."""
    assert reply.status == 200
    assert reply.complete, "the body must end in order, so that the client reads the error"
    assert_error_shape(reply.error)
    assert reply.error_code == code
    assert not reply.done
    assert reply.finish_reasons == []


# D5


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_d5_an_engine_that_dies_mid_stream_ends_in_an_error_event_and_is_not_asked_again(
    gateway: RunningGateway, sim: EngineSim, model: str, reset: bool
) -> None:
    before = len(sim.generations)
    sim.set_fault(Fault("cut", path=CHAT, after_chunks=4, reset=reset))
    reply = await gateway.ask(model, "Count.", stream=True)
    assert_ends_with_error(reply, "engine_cut_off")
    assert reply.text.split() == ["one", "two", "three"]
    assert len(sim.generations) == before + 1


async def test_d5_an_engine_that_dies_after_its_last_word_gives_no_false_stop(
    gateway: RunningGateway, sim: EngineSim, store: str
) -> None:
    # The role event and eight words; the ninth word's event would carry the finish reason.
    sim.set_fault(Fault("cut", path=CHAT, after_chunks=9))
    reply = await gateway.ask(f"sim-model@{store}", "Count.", stream=True)
    assert_ends_with_error(reply, "engine_cut_off")
    assert reply.extension is None


async def test_d5_the_official_client_hears_of_the_break(gateway: RunningGateway, sim: EngineSim, model: str) -> None:
    sim.set_fault(Fault("cut", path=CHAT, after_chunks=4))
    text = ""
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model=model, messages=asking("Count."), stream=True)
        with pytest.raises(openai.APIError, match="broke off"):  # noqa: PT012 - what came before the error counts too
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text.split() == ["one", "two", "three"]


@pytest.mark.parametrize("after_chunks", [0, None], ids=["in-the-body", "before-the-head"])
async def test_d5_a_whole_answer_that_breaks_off_is_a_502(
    gateway: RunningGateway, sim: EngineSim, model: str, after_chunks: int | None
) -> None:
    sim.set_fault(Fault("cut", path=CHAT, after_chunks=after_chunks, count=3))
    reply = await gateway.ask(model, "Count.")
    assert reply.status == 502
    assert_error_shape(reply.error)
    assert reply.error_code == "engine_cut_off"


async def test_d5_a_stream_that_breaks_before_its_first_event_is_a_502_and_not_a_stream(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("cut", path=CHAT, after_chunks=0))
    reply = await gateway.ask(model, "Count.", stream=True)
    assert reply.status == 502
    assert reply.error_code == "engine_cut_off"


async def test_d5_a_dead_engine_is_a_503_with_retry_after_and_serves_again_once_it_is_back(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool
) -> None:
    await sim.stop()
    try:
        reply = await gateway.ask(model, "Count.", stream=stream)
    finally:
        await sim.start()
    assert reply.status == 503
    assert_error_shape(reply.error)
    assert int(reply.headers["retry-after"]) >= 1
    assert sim.url.removeprefix("http://") not in reply.raw.decode()
    assert (await gateway.ask(model, "Count.", stream=stream)).status == 200


# D6


@pytest.mark.parametrize("status", [429, 503])
async def test_d6_a_busy_engines_status_and_retry_after_are_passed_on(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool, status: int
) -> None:
    sim.set_fault(Fault("status", path=CHAT, status=status, retry_after="7"))
    reply = await gateway.ask(model, "Count.", stream=stream)
    assert reply.status == status
    assert reply.headers["retry-after"] == "7"
    assert_error_shape(reply.error)


async def test_d6_a_retry_after_that_is_a_date_is_passed_on_in_seconds(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("status", path=CHAT, status=503, retry_after=formatdate(time.time() + 30, usegmt=True)))
    reply = await gateway.ask(model, "Count.")
    assert 25 <= int(reply.headers["retry-after"]) <= 30


async def test_d6_the_official_client_sees_the_rate_limit(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("status", path=CHAT, status=429, retry_after="7"))
    async with gateway.client() as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Count."}])
    assert caught.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("<html><h1>Internal Server Error at 10.0.0.7</h1></html>", "text/html"),
        ("", "text/plain"),
        ('{"detail": "Traceback of 10.0.0.7"}', "application/json"),
        ("{broken", "application/json"),
    ],
)
async def test_d6_a_500_of_any_form_is_a_clean_502(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool, body: str, content_type: str
) -> None:
    sim.set_fault(Fault("status", path=CHAT, status=500, body=body, content_type=content_type))
    reply = await gateway.ask(model, "Count.", stream=stream)
    assert reply.status == 502
    assert reply.headers["content-type"] == "application/json"
    assert_error_shape(reply.error)
    assert b"10.0.0.7" not in reply.raw


async def test_d6_a_200_that_is_no_answer_is_a_clean_error(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool
) -> None:
    sim.set_fault(Fault("status", path=CHAT, status=200, body="<html>proxy</html>", content_type="text/html"))
    reply = await gateway.ask(model, "Count.", stream=stream)
    if stream:
        assert_ends_with_error(reply, "engine_cut_off")
    else:
        assert reply.status == 502
    assert b"proxy" not in reply.raw


async def test_d6_an_error_for_the_clients_own_mistake_keeps_the_engines_words(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool
) -> None:
    error = {"message": "temperature must be at most 2.", "type": "BadRequestError", "param": "temperature"}
    body = orjson.dumps({"error": error}).decode()
    sim.set_fault(Fault("status", path=CHAT, status=400, body=body))
    reply = await gateway.ask(model, "Count.", stream=stream)
    assert reply.status == 400
    assert reply.error is not None
    assert reply.error["message"] == error["message"]
    assert reply.error["param"] == "temperature"


# D7b


async def test_d7b_a_second_request_is_refused_while_one_runs_and_the_refusal_costs_no_slot(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=1))
    running = asyncio.create_task(gateway.ask("sim-model", "Count.", stream=True))
    await gateway.until_metric(IN_FLIGHT, 1)
    for _ in range(3):
        refused = await gateway.ask(model, "Count.")
        assert refused.status == 503
        assert refused.error_code == "gateway_busy"
        assert int(refused.headers["retry-after"]) >= 1
    assert await gateway.metric(IN_FLIGHT) == 1
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await gateway.until_metric(IN_FLIGHT, 0)
    assert (await gateway.ask(model, "Count.")).status == 200


@pytest.mark.parametrize(
    "fields",
    [{"messages": []}, {"max_tokens": 0}, {"cache_salt": "mine"}, {"headstart": {"vector_store_ids": ["vs-no"]}}],
)
async def test_d7b_a_request_that_is_refused_returns_its_slot(
    gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    reply = await gateway.ask("sim-model", "Count.", **fields)
    assert reply.status in (400, 404)
    assert await gateway.metric(IN_FLIGHT) == 0


# D10


async def test_d10_an_engine_that_does_not_accept_is_given_up_after_the_limit_for_connecting(
    gateway: RunningGateway, sim: EngineSim, model: str, stream: bool
) -> None:
    await sim.stop_accepting()
    try:
        began = time.monotonic()
        reply = await gateway.ask(model, "Count.", stream=stream)
        took_s = time.monotonic() - began
    finally:
        await sim.restart()
    assert reply.status == 503
    assert reply.error_code == "engine_unreachable"
    assert CONNECT_S * 0.9 <= took_s < FIRST_TOKEN_S


@pytest.mark.parametrize("after_chunks", [None, 0], ids=["before-the-head", "after-the-head"])
async def test_d10_an_engine_without_a_first_token_is_given_up_after_the_limit_for_it(
    gateway: RunningGateway, sim: EngineSim, model: str, after_chunks: int | None
) -> None:
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=after_chunks))
    began = time.monotonic()
    reply = await gateway.ask(model, "Count.", stream=True)
    took_s = time.monotonic() - began
    assert reply.status == 504
    assert reply.error_code == "engine_silent"
    assert FIRST_TOKEN_S * 0.9 <= took_s < FIRST_TOKEN_S + 1.5
    await sim.wait_until_idle(1.0)


async def test_d10_an_engine_that_stops_between_tokens_is_given_up_after_the_limit_between_tokens(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("hang", path=CHAT, after_chunks=4))
    began = time.monotonic()
    reply = await gateway.ask(model, "Count.", stream=True)
    took_s = time.monotonic() - began
    assert_ends_with_error(reply, "engine_stalled")
    assert reply.text.split() == ["one", "two", "three"]
    assert BETWEEN_S * 0.9 <= took_s < BETWEEN_S + 1.5
    await sim.wait_until_idle(1.0)


async def test_d10_a_slow_stream_is_not_given_up_however_long_it_takes_in_all(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("drip", path=CHAT, delay_s=BETWEEN_S * 0.5))
    began = time.monotonic()
    reply = await gateway.ask(model, "Count.", stream=True)
    assert reply.done
    assert reply.text.split()[-1] == "eight"
    assert time.monotonic() - began > max(FIRST_TOKEN_S, ANSWER_S)


async def test_d10_a_whole_answer_is_given_up_after_its_own_limit(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("hang", path=CHAT))
    began = time.monotonic()
    reply = await gateway.ask(model, "Count.")
    assert reply.status == 504
    assert ANSWER_S * 0.9 <= time.monotonic() - began < ANSWER_S + 1.5
    await sim.wait_until_idle(1.0)


# D13


@pytest.mark.parametrize("done", [True, False], ids=["then-done", "then-nothing"])
@pytest.mark.parametrize("after_chunks", [1, 4])
async def test_d13_an_error_inside_the_stream_is_forwarded_and_nothing_follows_it(
    gateway: RunningGateway, sim: EngineSim, model: str, after_chunks: int, done: bool
) -> None:
    message = "EngineCore encountered an issue."
    sim.set_fault(Fault("error_event", path=CHAT, after_chunks=after_chunks, done=done, message=message))
    reply = await gateway.ask(model, "Count.", stream=True)
    assert_ends_with_error(reply, "engine_error")
    assert message in (reply.error or {})["message"]
    assert reply.text.split() == ["one", "two", "three"][: max(0, after_chunks - 1)]


async def test_d13_an_error_that_comes_instead_of_an_answer_is_one(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("error_event", path=CHAT, after_chunks=0, message="EngineCore encountered an issue."))
    reply = await gateway.ask(model, "Count.", stream=True)
    assert reply.status == 502
    assert_error_shape(reply.error)
    assert reply.error_code == "engine_error"
    assert "EngineCore encountered an issue." in (reply.error or {})["message"]


async def test_d13_the_official_client_raises_the_error(gateway: RunningGateway, sim: EngineSim, model: str) -> None:
    sim.set_fault(Fault("error_event", path=CHAT, after_chunks=4, message="EngineCore encountered an issue."))
    async with gateway.client() as client:
        messages = asking("Count.")
        with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
            async for _ in await client.chat.completions.create(model=model, messages=messages, stream=True):
                pass


async def test_d13_a_stream_that_ends_without_finish_reason_and_done_is_an_error(
    gateway: RunningGateway, sim: EngineSim, model: str
) -> None:
    sim.set_fault(Fault("no_finish", path=CHAT, done=False))
    reply = await gateway.ask(model, "Count.", stream=True)
    assert_ends_with_error(reply, "engine_cut_off")


@pytest.mark.parametrize("nonsense", ['{"choices":[1]}', '{"choices":[{"delta":"text"}]}'])
async def test_d13_events_that_make_no_sense_end_a_retrieval_stream_in_an_error(
    gateway: RunningGateway, sim: EngineSim, store: str, nonsense: str
) -> None:
    body = f"data: {nonsense}\n\ndata: [DONE]\n\n"
    sim.set_fault(Fault("status", path=CHAT, status=200, body=body, content_type="text/event-stream"))
    reply = await gateway.ask(f"sim-model@{store}", "Count.", stream=True)
    assert_ends_with_error(reply, "internal")
