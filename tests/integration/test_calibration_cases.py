"""A whole gateway meets an engine: it measures it, keeps what it found, and lets users go first."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from latency.model import CPU_135M

ENGINE = SimConfig(time_scale=0.1, max_model_len=1024, decode_tokens_per_s=None)


async def speed_of(gateway: RunningGateway) -> dict[str, Any] | None:
    async with gateway.session() as session, session.get("/readyz") as response:
        speed: dict[str, Any] | None = (await response.json())["engine"]["speed"]
        return speed


async def until_known(gateway: RunningGateway, timeout_s: float = 20.0) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    while (speed := await speed_of(gateway)) is None:
        assert time.monotonic() < deadline_s, "the engine was not calibrated"
        await asyncio.sleep(0.1)
    return speed


async def test_a_new_engine_is_measured_once_and_known_after_a_restart(tmp_path: Path) -> None:
    async with EngineSim(ENGINE) as sim:
        settings = settings_for(tmp_path, sim.url, calibrate=True)
        async with run_gateway(settings) as gateway:
            first = await until_known(gateway)
        measured = len(sim.generations)
        assert first["source"] == "calibrated"
        assert 0.6 < first["token_ms"] / (100 * CPU_135M.per_token_s) < 1.7
        async with run_gateway(settings) as gateway:
            again = await until_known(gateway)
            reply = await gateway.ask("sim-model", "What time is it?", max_tokens=4)
            assert reply.status == 200
        assert again["source"] == "kept"
        assert {name: again[name] for name in ("fixed_ms", "token_ms", "pair_us")} == {
            name: first[name] for name in ("fixed_ms", "token_ms", "pair_us")
        }
        # Only the probes of the second start and the question came.
        assert len(sim.generations) - measured <= 3


async def test_a_file_that_was_cut_off_is_measured_anew(tmp_path: Path) -> None:
    async with EngineSim(ENGINE) as sim:
        settings = settings_for(tmp_path, sim.url, calibrate=True)
        async with run_gateway(settings) as gateway:
            await until_known(gateway)
        (kept,) = (settings.data_dir / "latency").iterdir()
        whole = kept.read_bytes()
        kept.write_bytes(whole[: len(whole) // 2])
        async with run_gateway(settings) as gateway:
            assert (await until_known(gateway))["source"] == "calibrated"
        assert len(kept.read_bytes()) > len(whole) // 2


async def test_a_question_that_comes_during_a_calibration_does_not_wait_for_its_rest(tmp_path: Path) -> None:
    scale = 0.5
    config = SimConfig(time_scale=scale, max_model_len=4096, decode_tokens_per_s=None)
    question = {"role": "user", "content": "Hi"}
    async with (
        EngineSim(config) as sim,
        run_gateway(settings_for(tmp_path, sim.url, calibrate=True)) as gateway,
        gateway.session() as session,
    ):
        await _measuring(sim)
        began_s = time.monotonic()
        body = {"model": "sim-model", "messages": [question], "stream": True, "max_tokens": 1}
        async with session.post("/v1/chat/completions", json=body) as response:
            await response.content.readany()
        waited_s = time.monotonic() - began_s
        assert await speed_of(gateway) is None, "the calibration was over before the question came"
        # At most the step that the engine had begun, which takes no more than 2 seconds.
        assert waited_s < 2.0 * scale + CPU_135M.predict_s(64) * scale + 0.5
        assert (await until_known(gateway))["source"] == "calibrated"


async def _measuring(sim: EngineSim) -> None:
    """Until the calibration is in the middle of its longer prompts."""
    deadline_s = time.monotonic() + 20
    while max((len(request.prompt_token_ids) for request in sim.generations), default=0) < 800:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def test_without_calibration_requests_teach_the_speed(tmp_path: Path) -> None:
    async with EngineSim(ENGINE) as sim, run_gateway(settings_for(tmp_path, sim.url)) as gateway:
        assert await speed_of(gateway) is None
        async with gateway.session() as session:
            for words in (1, 5, 20, 40, 80, 100, 120, 150):
                await _streamed(session, "word " * words)
        speed = await until_known(gateway)
        assert speed["source"] == "learned"


async def _streamed(session: aiohttp.ClientSession, question: str) -> None:
    body = {"model": "sim-model", "messages": [{"role": "user", "content": question}], "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        await response.read()
