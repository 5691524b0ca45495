"""Several engines behind one gateway: where requests go, and what happens when one dies, returns or is another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.engine_sim import EngineSim, Fault, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for

CHAT = "/v1/chat"
LONG = "The tide comes in and goes out again as it has always done. " * 40


def sim_config(**changes: Any) -> SimConfig:
    given: dict[str, Any] = {"time_scale": 0.01, "decode_tokens_per_s": None, "recorded_requests": 1000}
    return SimConfig(**{**given, **changes})


@asynccontextmanager
async def fleet(
    folder: Path, first: SimConfig | None = None, second: SimConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, EngineSim, EngineSim]]:
    async with EngineSim(first or sim_config()) as one, EngineSim(second or sim_config()) as two:
        given = settings_for(
            folder, f"one={one.url},two={two.url}", **{"probe_interval_s": 0.1, "connect_timeout_s": 1.0, **settings}
        )
        async with run_gateway(given) as gateway:
            yield gateway, one, two


def asked(sim: EngineSim, question: str) -> int:
    """Chat requests with this question, the gateway's probes left out."""
    return sum(question in str(request.body) for request in sim.generations)


class DeadEngine:
    """What is left of an engine whose process was killed: connections open and end without an answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.chats: list[bytes] = []

    async def __aenter__(self) -> "DeadEngine":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=2**22)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST /v1/chat"):
            self.chats.append(head)
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_g3_no_request_goes_to_a_dead_replica_after_the_first_failure_and_the_new_one_starts_empty(
    tmp_path: Path, model_dir: Path, stream: bool
) -> None:
    exact = sim_config(model_dir=model_dir)
    async with fleet(tmp_path, exact, exact, tokenizer=str(model_dir)) as (gateway, one, two):
        warm = [await gateway.ask("sim-model", f"{LONG}{i}", stream=stream) for i in range(4)]
        assert [reply.status for reply in warm] == [200] * 4
        dead, alive = (one, two) if asked(one, "tide") else (two, one)
        served_before = asked(alive, "tide")
        await dead.stop()
        async with DeadEngine(dead.port) as remains:
            first = await gateway.ask("sim-model", f"{LONG}4", stream=stream)
            assert first.status == 200, "what had not begun is answered by the other replica"
            failed_attempts = len(remains.chats)
            assert failed_attempts > 0
            rest = await asyncio.gather(
                *(gateway.ask("sim-model", f"{LONG}{i}", stream=stream) for i in range(5, 15))
            )
            assert [reply.status for reply in rest] == [200] * 10
            assert len(remains.chats) == failed_attempts
            assert asked(alive, "tide") == served_before + 11
        # Its replacement at the same address has an empty cache: nothing is predicted to be there.
        await dead.start()
        await alive.stop()
        async with gateway.session() as session:
            for _ in range(100):
                reply = await gateway.ask("sim-model", f"{LONG}0", stream=stream)
                if reply.status == 200:
                    break
                await asyncio.sleep(0.05)
            assert reply.status == 200
            async with session.get("/v1/calls?limit=1") as response:
                call = (await response.json())["data"][0]
        assert call["timings"]["cached_tokens"] == 0
        assert call["timings"]["predicted_cached_tokens"] == 0


async def test_an_answer_that_has_begun_is_not_asked_again_elsewhere(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, one, two):
        for sim in (one, two):
            sim.set_fault(Fault("cut", after_chunks=2, path=CHAT))
        reply = await gateway.ask("sim-model", "What of the tide?", stream=True)
        assert reply.error is not None
        assert reply.error["code"] == "engine_cut_off"
        assert asked(one, "tide") + asked(two, "tide") == 1


async def test_an_engine_that_answers_with_an_error_event_at_once_is_left_for_the_other(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, one, two):
        one.set_fault(Fault("error_event", after_chunks=0, path=CHAT, count=None))
        replies = [await gateway.ask("sim-model", f"What of the tide {i}?", stream=True) for i in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        assert [reply.error for reply in replies] == [None] * 6
        assert asked(one, "tide") <= 3, "an engine that fails at once has the shortest queue of all"
        assert asked(two, "tide") == 6


async def test_f5_an_engine_that_takes_salts_gets_them_also_beside_one_that_refuses_them(
    tmp_path: Path, model_dir: Path
) -> None:
    takes = sim_config(model_dir=model_dir)
    refuses = sim_config(model_dir=model_dir, surface="minimal", reject_unknown_fields=True)
    async with fleet(tmp_path, takes, refuses, tokenizer=str(model_dir), no_auth=True) as (gateway, one, two):
        for i in range(8):
            assert (await gateway.ask("sim-model", f"{i} {LONG}", stream=i % 2 == 0)).status == 200
        assert asked(one, "tide")
        assert all("cache_salt" in request.body for request in one.generations if "tide" in str(request.body))
        assert all("cache_salt" not in request.body for request in two.generations if "tide" in str(request.body))


async def test_a_request_that_breaks_the_engines_it_meets_meets_two_at_most(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, one, two):
        for sim in (one, two):
            sim.set_fault(Fault("status", after_chunks=None, path=CHAT, status=500, count=None))
        reply = await gateway.ask("sim-model", "What of the tide?", stream=True)
        assert reply.status == 502
        assert asked(one, "tide") + asked(two, "tide") <= 2


async def test_an_engine_at_its_limit_sends_the_request_to_the_other(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, one, two):
        for sim in (one, two):
            sim.set_fault(Fault("status", after_chunks=None, path=CHAT, status=503))
        reply = await gateway.ask("sim-model", "What of the tide?", stream=True)
        assert reply.status == 503
        again = await gateway.ask("sim-model", "What of the tide now?", stream=True)
        assert again.status == 200, "an engine at its limit is not taken to be broken"


async def test_a_replica_that_serves_another_model_is_refused_and_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path, second=sim_config(model="other-model")) as (gateway, one, two):
        replies = await asyncio.gather(*(gateway.ask("sim-model", f"tide {i}", stream=True) for i in range(20)))
        assert {reply.status for reply in replies} == {200}
        assert asked(one, "tide") == 20
        assert asked(two, "tide") == 0
    assert "two is refused: it serves other-model, not sim-model" in caplog.text


async def test_a_replica_with_another_tokenizer_is_refused(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path, second=sim_config(model_dir=model_dir)) as (gateway, _, two):
        replies = await asyncio.gather(*(gateway.ask("sim-model", f"tide {i}", stream=True) for i in range(10)))
        assert {reply.status for reply in replies} == {200}
        assert asked(two, "tide") == 0
    assert "two is refused: its tokenizer is another one" in caplog.text


async def test_a_burst_is_spread_over_idle_replicas_and_the_same_prompt_returns_to_where_it_is_held(
    tmp_path: Path, model_dir: Path
) -> None:
    slow = sim_config(model_dir=model_dir, time_scale=1.0)
    async with fleet(tmp_path, first=slow, second=slow, calibrate=True, tokenizer=str(model_dir)) as (
        gateway,
        one,
        two,
    ):
        await gateway.until_calibrated()
        await asyncio.gather(*(gateway.ask("sim-model", f"{i} {LONG}", max_tokens=1) for i in range(6)))
        first, second = asked(one, "tide"), asked(two, "tide")
        assert first >= 2
        assert second >= 2
        repeated = [await gateway.ask("sim-model", f"{i} {LONG}", max_tokens=1) for i in range(6)]
        async with gateway.session() as session, session.get("/v1/calls?limit=6") as response:
            calls = [call["timings"] for call in (await response.json())["data"]]
        assert {reply.status for reply in repeated} == {200}
        for timings in calls:
            assert timings["uncached_tokens"] <= 32
            assert timings["predicted_cached_tokens"] == timings["cached_tokens"]


async def test_two_processes_behind_one_address_are_noticed_and_nothing_is_believed_of_their_caches(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with EngineSim(sim_config(model_dir=model_dir)) as sim:
        settings = settings_for(tmp_path, sim.url, probe_interval_s=0.05, tokenizer=str(model_dir))
        async with run_gateway(settings) as gateway:
            async with asyncio.timeout(60):
                while "several engines answer at this address" not in caplog.text:
                    for started_s in (1e9, 2e9):
                        sim.api.metrics.started.set(started_s)
                        await asyncio.sleep(0.4)
            for _ in range(2):
                reply = await gateway.ask("sim-model", LONG)
                assert reply.status == 200
            async with gateway.session() as session, session.get("/v1/calls?limit=1") as response:
                call = (await response.json())["data"][0]
            assert call["timings"]["cached_tokens"] > 0
            assert not call["timings"]["predicted_cached_tokens"]


async def test_an_engine_that_was_restarted_between_two_probes_is_believed_to_be_empty(
    tmp_path: Path, model_dir: Path
) -> None:
    async with EngineSim(sim_config(model_dir=model_dir)) as sim:
        settings = settings_for(tmp_path, sim.url, probe_interval_s=0.1, tokenizer=str(model_dir))
        async with run_gateway(settings) as gateway:
            for _ in range(2):
                assert (await gateway.ask("sim-model", LONG)).status == 200
            await gateway.until_metric("headstart_cached_predictions_exact", 2)
            assert await gateway.metric("headstart_resident_blocks") > 0
            await sim.restart()
            await gateway.until_metric("headstart_resident_blocks", 0, timeout_s=10.0)
            assert (await gateway.ask("sim-model", LONG)).status == 200
            assert await gateway.metric("headstart_cached_predictions_over") == 0


async def test_an_engine_that_returns_with_another_block_size_is_followed_in_its_new_blocks(
    tmp_path: Path, model_dir: Path
) -> None:
    async with EngineSim(sim_config(model_dir=model_dir, block_size=16)) as sim:
        settings = settings_for(tmp_path, sim.url, probe_interval_s=0.1, tokenizer=str(model_dir))
        async with run_gateway(settings) as gateway, gateway.session() as session:
            assert (await gateway.ask("sim-model", LONG)).status == 200
            await gateway.until_metric("headstart_cached_predictions_exact", 1)
            sim.config = replace(sim.config, block_size=64)
            await sim.restart()
            await gateway.until_metric("headstart_resident_blocks", 0, timeout_s=10.0)
            for _ in range(2):
                assert (await gateway.ask("sim-model", LONG)).status == 200
            async with session.get("/v1/replicas") as response:
                cache = (await response.json())["data"][0]["cache"]
            async with session.get("/v1/calls?limit=1") as response:
                timings = (await response.json())["data"][0]["timings"]
        assert cache["block_size"] == 64
        assert timings["cached_tokens"] == timings["predicted_cached_tokens"] > 0
        assert timings["cached_tokens"] % 64 == 0


async def test_a_gateway_whose_replicas_are_all_gone_answers_503_and_recovers(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, one, two):
        await one.stop()
        await two.stop()
        reply = await gateway.ask("sim-model", "What of the tide?")
        assert reply.status == 503
        assert reply.error is not None
        assert reply.error["code"] == "engine_unreachable"
        await one.start()
        for _ in range(100):
            if (await gateway.ask("sim-model", "And now?")).status == 200:
                return
            await asyncio.sleep(0.1)
        pytest.fail("no request is answered after an engine has come back")


async def test_metrics_tell_the_replicas_apart(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (gateway, _, two):
        await two.stop()
        async with gateway.session() as session:
            async with asyncio.timeout(10):
                while True:
                    async with session.get("/metrics") as response:
                        text = await response.text()
                    if 'headstart_replica_usable{replica="two"} 0.0' in text:
                        break
                    await asyncio.sleep(0.05)
        assert 'headstart_replica_usable{replica="one"} 1.0' in text


async def test_a_gateway_stops_in_time_with_a_replica_that_hangs_in_a_probe(tmp_path: Path) -> None:
    async with EngineSim(sim_config()) as one, EngineSim(sim_config()) as two:
        two.set_fault(Fault("hang", after_chunks=None, path="/v1/", count=None, probes=True))
        settings = settings_for(tmp_path, f"{one.url},{two.url}", probe_interval_s=0.1)
        async with (
            run_gateway(settings) as gateway,
            aiohttp.ClientSession(gateway.url) as session,
            session.get("/healthz") as response,
        ):
            assert response.status == 200
