"""The calibration that a gateway does by itself, on the simulated engine and the real pacer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from bench.engine_sim import EngineSim, Fault, SimConfig
from cache.residency import Residency
from gateway.backends.facts import EngineFacts, probe_engine
from gateway.backends.vllm import EngineLimits, EngineSession
from gateway.calibrator import Calibrator
from gateway.pacing import Pacer, Prefill
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from latency.model import CPU_135M
from latency.speed import SpeedEstimate

LIMITS = EngineLimits(connect_s=2.0, first_token_s=10.0, between_tokens_s=5.0, answer_s=10.0)
SCALE = 0.1
ENGINE = SimConfig(time_scale=SCALE, max_model_len=1024)
"""A small window keeps a calibration under a second."""


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


async def known(speed: ReplicaSpeed) -> SpeedEstimate:
    await until(lambda: speed.estimate is not None)
    await speed.settled()
    assert speed.estimate is not None
    return speed.estimate


@dataclass
class Rig:
    speed: ReplicaSpeed
    pacer: Pacer
    sim: EngineSim
    session: aiohttp.ClientSession
    facts: EngineFacts

    async def calibrated(self) -> SpeedEstimate:
        return await known(self.speed)

    async def generations(self, count: int) -> None:
        await until(lambda: len(self.sim.generations) >= count)


@asynccontextmanager
async def rig(folder: Path, config: SimConfig | None = None, **settings: object) -> AsyncIterator[Rig]:
    """A gateway's speed, pacer and calibrator in front of a simulated engine, as the gateway joins them."""
    async with EngineSim(config or ENGINE) as sim, EngineSession(LIMITS) as session:
        facts = await probe_engine(session, sim.url)
        sim.requests.clear()
        made = Settings(engine_url=sim.url, data_dir=folder, probe_interval_s=0.05, **settings)  # type: ignore[arg-type]
        pacer = Pacer()
        async with ReplicaSpeed(made) as speed, Calibrator(speed, pacer, session, made, LIMITS):
            speed.on_change(pacer.learned)
            speed.facts_changed(facts)
            yield Rig(speed, pacer, sim, session, facts)


async def test_an_engine_that_is_met_for_the_first_time_is_measured(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        estimate = await r.calibrated()
        assert estimate.source == "calibrated"
        for uncached, cached in ((100, 0), (500, 0), (200, 700)):
            actual_s = SCALE * CPU_135M.predict_s(uncached, cached)
            assert estimate.predict_s(uncached, cached) == pytest.approx(actual_s, rel=0.4)
        assert estimate.token_s == pytest.approx(SCALE / 30, rel=0.5)
        assert list((tmp_path / "latency").iterdir())


async def test_its_prompts_hit_nothing_but_their_own_chain(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.calibrated()
        salts = {request.body["cache_salt"] for request in r.sim.generations}
        assert len(salts) == 1
        assert len(salts.pop()) >= 32
        assert max(request.cached_tokens or 0 for request in r.sim.generations) > 500


async def test_an_engine_that_is_known_is_not_measured_again(tmp_path: Path) -> None:
    port = 0
    for _ in range(2):
        async with EngineSim(ENGINE, port=port) as sim, EngineSession(LIMITS) as session:
            port = sim.port
            facts = await probe_engine(session, sim.url)
            sim.requests.clear()
            settings = Settings(engine_url=sim.url, data_dir=tmp_path)
            async with ReplicaSpeed(settings) as speed, Calibrator(speed, Pacer(), session, settings, LIMITS):
                speed.facts_changed(facts)
                source = (await known(speed)).source
                sent = len(sim.generations)
    assert (sent, source) == (0, "kept")


async def test_a_request_that_comes_meanwhile_waits_for_one_step_at_most_and_the_rest_is_done_later(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, SimConfig(time_scale=0.3, max_model_len=2048)) as r:
        await r.generations(9)  # in the middle of the chain, whose requests are the longest
        sent = len(r.sim.generations)
        began = time.monotonic()
        ticket = await r.pacer.enter(Prefill(64, 0, 0.03, None))
        body = {"model": "sim-model", "prompt": [7] * 64, "max_tokens": 1}
        async with r.session.post(f"{r.sim.url}/v1/completions", json=body) as response:
            await response.read()
        waited_s = time.monotonic() - began
        # No request of the calibration begins while the user's is there.
        assert len(r.sim.generations) == sent + 1
        assert waited_s < 0.3 * (2.0 + CPU_135M.predict_s(64))
        assert r.speed.estimate is None
        ticket.done()
        estimate = await r.calibrated()
        assert estimate.source == "calibrated"
        # What was measured before is not measured again.
        assert len([request for request in r.sim.generations if request.finished]) < 22


async def test_a_calibration_that_is_cut_off_by_the_gateways_end_leaves_nothing_behind(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.generations(6)
    assert not (tmp_path / "latency").exists() or not list((tmp_path / "latency").iterdir())
    async with rig(tmp_path) as r:
        assert (await r.calibrated()).source == "calibrated"


async def test_an_engine_that_fails_in_the_middle_is_measured_when_it_is_well_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.generations(3)
        r.sim.set_fault(Fault("status", after_chunks=None, status=503, count=2, probes=True))
        assert (await r.calibrated()).source == "calibrated"


async def test_an_engine_that_takes_no_ids_is_learned_from_requests_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path, SimConfig(time_scale=SCALE, surface="minimal")) as r:
        await until(lambda: bool(r.speed.missing))
        (missing,) = r.speed.missing
        assert missing.feature == "calibration"
        await asyncio.sleep(0.3)
        assert len(r.sim.generations) == 1  # it was asked once, and is not asked again
        for uncached in (40, 80, 160, 320, 640, 900):
            r.speed.observe(uncached, 0, CPU_135M.predict_s(uncached))
        await r.speed.settled()
        assert r.speed.estimate is not None
    assert "cannot be calibrated" in caplog.text


async def test_the_picture_of_the_engines_blocks_hears_of_what_it_computed(tmp_path: Path) -> None:
    async with EngineSim(ENGINE) as sim, EngineSession(LIMITS) as session:
        facts = await probe_engine(session, sim.url)
        settings = Settings(engine_url=sim.url, data_dir=tmp_path)
        residency = Residency(ENGINE.block_size, 100)
        ids = tuple(range(1000, 1000 + 40 * ENGINE.block_size))
        lease = residency.begin(ids)
        residency.generated(lease, ())
        residency.end(lease)
        assert residency.prefix().extended(ids).resident_tokens == len(ids)
        async with (
            ReplicaSpeed(settings) as speed,
            Calibrator(speed, Pacer(), session, settings, LIMITS, lambda: residency),
        ):
            speed.facts_changed(facts)
            await known(speed)
        # Some 2,000 tokens were computed in an engine that holds 1,600.
        assert residency.prefix().extended(ids).resident_tokens < len(ids)


async def test_it_can_be_turned_off(tmp_path: Path) -> None:
    async with rig(tmp_path, calibrate=False) as r:
        await asyncio.sleep(0.3)
        assert not r.sim.generations


async def test_plain_completions_are_used_where_chat_takes_no_ids(tmp_path: Path) -> None:
    async with EngineSim(ENGINE) as sim, EngineSession(LIMITS) as session:
        facts = EngineFacts(
            reachable=True, model="sim-model", models=("sim-model",), max_model_len=1024, token_ids_accepted=False
        )
        settings = Settings(engine_url=sim.url, data_dir=tmp_path)
        async with ReplicaSpeed(settings) as speed, Calibrator(speed, Pacer(), session, settings, LIMITS):
            speed.facts_changed(facts)
            await known(speed)
        assert {request.path for request in sim.generations} == {"/v1/completions"}


class Ingesting:
    """Documents that are being embedded, until `done`."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    @property
    def busy(self) -> bool:
        return not self.over.is_set()

    async def wait_idle(self) -> None:
        await self.over.wait()


async def test_nothing_is_measured_while_documents_are_ingested(tmp_path: Path) -> None:
    async with EngineSim(ENGINE) as sim, EngineSession(LIMITS) as session:
        facts = EngineFacts(
            reachable=True, model="sim-model", models=("sim-model",), max_model_len=1024, token_ids_accepted=True
        )
        settings, ingesting = Settings(engine_url=sim.url, data_dir=tmp_path), Ingesting()
        async with (
            ReplicaSpeed(settings) as speed,
            Calibrator(speed, Pacer(), session, settings, LIMITS, neighbour=ingesting),
        ):
            speed.facts_changed(facts)
            await asyncio.sleep(0.3)
            assert not sim.generations
            ingesting.over.set()
            await known(speed)
