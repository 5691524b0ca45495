"""Redis stops and returns while the gateway serves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply
from tests.conftest import RedisServer

DEGRADED, DEGRADED_S = "headstart_store_degraded", "headstart_store_degraded_seconds"


@pytest.fixture
async def sim() -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(time_scale=0.01, decode_tokens_per_s=None)) as sim:
        yield sim


async def ask_all(gateway: RunningGateway, store: str, turn: int) -> list[Reply]:
    """Pass-through and retrieval, streamed and whole, and one more turn of a kept conversation."""
    question = f"When does ferry number {turn} leave?"
    kept: dict[str, Any] = {"headstart": {"conversation": "talk", "vector_store_ids": [store]}}
    return [
        await gateway.ask("sim-model", question),
        await gateway.ask("sim-model", question, stream=True),
        await gateway.ask(f"sim-model@{store}", question),
        await gateway.ask(f"sim-model@{store}", question, stream=True),
        await gateway.ask("sim-model", question, **kept),
        await gateway.ask("sim-model", question, stream=True, **kept),
    ]


def assert_all_answered(replies: list[Reply]) -> None:
    for reply in replies:
        assert reply.status == 200
        assert reply.error is None
        assert "leave?" in reply.text
        assert reply.done or not reply.streamed


async def test_g2_every_request_is_answered_while_redis_stops_and_returns(
    sim: EngineSim, redis_server: RedisServer, tmp_path: Path
) -> None:
    async with run_gateway(settings_for(tmp_path, sim.url, redis_url=redis_server.url)) as gateway:
        store = await gateway.make_store("harbour", {"ferry.txt": "The ferry to Pellen leaves at seven."})
        assert_all_answered(await ask_all(gateway, store, 1))
        assert await gateway.metric(DEGRADED) == 0
        assert await gateway.metric(DEGRADED_S) == 0

        await asyncio.to_thread(redis_server.stop)
        for turn in (2, 3):
            assert_all_answered(await ask_all(gateway, store, turn))
        assert await gateway.metric(DEGRADED) == 1
        lost_s = await gateway.metric(DEGRADED_S)
        assert lost_s > 0
        await asyncio.sleep(0.2)
        assert await gateway.metric(DEGRADED_S) >= lost_s + 0.1

        await asyncio.to_thread(redis_server.start)
        async with asyncio.timeout(15):
            while await gateway.metric(DEGRADED):
                assert_all_answered(await ask_all(gateway, store, 4))
                await asyncio.sleep(0.1)
        whole_s = await gateway.metric(DEGRADED_S)
        await asyncio.sleep(0.2)
        assert await gateway.metric(DEGRADED_S) == whole_s, "time without Redis no longer counts once it is back"
        assert_all_answered(await ask_all(gateway, store, 5))


async def test_g2_a_gateway_starts_and_answers_without_its_redis(
    sim: EngineSim, free_port: int, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, sim.url, redis_url=f"redis://127.0.0.1:{free_port}/0")
    async with run_gateway(settings) as gateway:
        store = await gateway.make_store("harbour", {"ferry.txt": "The ferry to Pellen leaves at seven."})
        assert_all_answered(await ask_all(gateway, store, 1))
        assert await gateway.metric(DEGRADED) == 1


async def test_g2_conversations_of_the_time_without_redis_go_on_in_memory(
    sim: EngineSim, redis_server: RedisServer, tmp_path: Path
) -> None:
    async with run_gateway(settings_for(tmp_path, sim.url, redis_url=redis_server.url)) as gateway:
        await asyncio.to_thread(redis_server.stop)
        kept: dict[str, Any] = {"headstart": {"conversation": "talk"}}
        await gateway.ask("sim-model", "My boat is called Wren.", **kept)
        await gateway.ask("sim-model", "What is it called?", **kept)
    sent = sim.generations[-1].body["messages"]
    assert any("Wren" in message["content"] for message in sent if message["role"] == "user")
