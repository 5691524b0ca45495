"""Engines that change, fall silent and go while requests run: no request is lost and nothing is left in flight."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply

SIM = SimConfig(time_scale=0.01, decode_tokens_per_s=None)
SLOW = replace(SIM, decode_tokens_per_s=400.0, answer="words")


@asynccontextmanager
async def fleet(
    folder: Path, config: SimConfig, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, EngineSim, EngineSim]]:
    async with EngineSim(config) as one, EngineSim(config) as two:
        given = settings_for(folder, f"one={one.url},two={two.url}", **settings)
        async with run_gateway(given) as gateway:
            yield gateway, one, two


async def states(gateway: RunningGateway) -> dict[str, str]:
    async with gateway.session() as session, session.get("/v1/replicas") as response:
        return {replica["name"]: replica["state"] for replica in (await response.json())["data"]}


async def until_states(gateway: RunningGateway, **wanted: str) -> None:
    """Raises AssertionError that says what they were instead."""
    deadline = time.monotonic() + 10.0
    while not wanted.items() <= (seen := await states(gateway)).items():
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.05)


async def nothing_in_flight(gateway: RunningGateway) -> None:
    for metric in ("chat_in_flight", "queued_requests", "decoding_requests", "prefill_in_flight_tokens"):
        await gateway.until_metric(f"headstart_{metric}", 0, timeout_s=10.0)


@asynccontextmanager
async def load(gateway: RunningGateway, clients: int) -> AsyncIterator[list[Reply]]:
    """So many clients that ask one question after the other, every third without streaming; their replies."""
    replies: list[Reply] = []
    over = asyncio.Event()

    async def client(number: int) -> None:
        while not over.is_set():
            question = f"{number} {len(replies)} What of the tide?"
            replies.append(await gateway.ask("sim-model", question, stream=number % 3 > 0, max_tokens=8))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        yield replies
        over.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_serves_another_model_since_the_last_probe_costs_no_request(
    tmp_path: Path, stream: bool
) -> None:
    async with fleet(tmp_path, SIM, probe_interval_s=60.0) as (gateway, one, _):
        one.config = replace(one.config, model="other-model")
        await one.restart()
        replies = [await gateway.ask("sim-model", f"{i} What of the tide?", stream=stream) for i in range(6)]
        assert [(reply.status, reply.error) for reply in replies] == [(200, None)] * 6
        await until_states(gateway, one="refused")


async def test_a_model_that_no_engine_has_any_more_is_refused_with_the_engines_word(tmp_path: Path) -> None:
    async with fleet(tmp_path, SIM, probe_interval_s=60.0) as (gateway, one, two):
        for sim in (one, two):
            sim.config = replace(sim.config, model="other-model")
            await sim.restart()
        reply = await gateway.ask("sim-model", "What of the tide?")
        assert (reply.status, reply.error_code) == (404, "engine_refused")


async def test_probes_that_hang_hold_no_request_up_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with fleet(tmp_path, SIM, probe_interval_s=0.05) as (gateway, one, two):
        for sim in (one, two):
            for path in ("/health", "/metrics", "/version", "/v1/models", "/kv_event_sources"):
                sim.set_fault(Fault("hang", after_chunks=None, path=path, count=None, probes=True))
        await asyncio.sleep(0.3)
        async with asyncio.timeout(5):
            replies = await asyncio.gather(*(gateway.ask("sim-model", f"{i} Tide?", stream=True) for i in range(20)))
        assert {reply.status for reply in replies} == {200}
        await nothing_in_flight(gateway)


async def test_an_engine_that_comes_back_as_another_under_load_leaves_nothing_in_flight(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(SLOW, model_dir=model_dir)
    async with fleet(tmp_path, config, probe_interval_s=0.1, tokenizer=str(model_dir)) as (gateway, one, two):
        async with load(gateway, 6) as replies:
            for change in ({"block_size": 64}, {"model": "other-model"}, {"model": "sim-model"}, {"block_size": 16}):
                one.config = replace(one.config, **change)
                await one.restart()
                await asyncio.sleep(0.8)
        # An answer that had begun when its engine was killed is over; nothing else is lost.
        assert len(replies) > 40
        lost = [reply for reply in replies if reply.status != 200 or reply.error_code not in (None, "engine_cut_off")]
        assert not lost
        await nothing_in_flight(gateway)
        assert (one.open_streams, two.open_streams) == (0, 0)
        await until_states(gateway, one="ok", two="ok")
        assert not [record for record in caplog.records if record.exc_info]
