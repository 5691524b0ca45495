"""What a replica's requests teach, and what is kept of it from one run to the next."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.backends.facts import EngineFacts
from gateway.settings import Settings
from gateway.speed import AT_ONCE, ReplicaSpeed
from gateway.speed_file import SpeedFiles, key_of
from latency.model import CPU_135M, PrefillModel
from latency.speed import SpeedEstimate

FACTS = EngineFacts(
    reachable=True,
    model="m",
    models=("m",),
    root="/models/m",
    version="0.32.0",
    block_size=16,
    num_blocks=1000,
    token_ids_accepted=True,
)
SIZES = [(40, 0), (900, 0), (200, 512), (450, 0), (120, 2048), (700, 256), (64, 0), (1300, 128)]


def speed_in(folder: Path, machine: str = "desk", save_every_s: float = 3600.0) -> ReplicaSpeed:
    return ReplicaSpeed(Settings(data_dir=folder), machine=machine, save_every_s=save_every_s)


async def serve(speed: ReplicaSpeed, model: PrefillModel = CPU_135M, rounds: int = 3) -> None:
    """Requests that take what the model says, give or take 2 %."""
    for number in range(rounds):
        for uncached, cached in SIZES:
            speed.observe(uncached, cached, model.predict_s(uncached, cached) * (0.98, 1.0, 1.02)[number % 3])
            await speed.settled()


async def test_requests_alone_teach_the_speed_and_followers_hear_of_it(tmp_path: Path) -> None:
    heard: list[SpeedEstimate | None] = []
    async with speed_in(tmp_path) as speed:
        speed.on_change(heard.append)
        speed.facts_changed(FACTS)
        await serve(speed)
        speed.observe_decode(20, 0.6)
        await speed.settled()
        estimate = speed.estimate
    assert estimate is not None
    assert heard[-1] == estimate
    assert estimate.source == "learned"
    for uncached, cached in SIZES:
        assert estimate.predict_s(uncached, cached) == pytest.approx(CPU_135M.predict_s(uncached, cached), rel=0.05)


async def test_the_speed_is_kept_for_the_same_engine_and_machine(tmp_path: Path) -> None:
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
        learned = speed.estimate
    async with speed_in(tmp_path) as again:
        again.facts_changed(FACTS)
        await again.settled()
        kept = again.estimate
    assert learned is not None
    assert kept is not None
    assert kept.source == "kept"
    assert kept.prefill == learned.prefill


@pytest.mark.parametrize(
    ("machine", "facts", "reason"),
    [
        ("laptop", FACTS, "another machine"),
        ("desk", replace(FACTS, version="0.33.0"), "another version"),
        ("desk", replace(FACTS, model="n", models=("n",)), "another model"),
        ("desk", replace(FACTS, num_blocks=4000), "KV blocks"),
    ],
)
async def test_the_speed_of_something_else_is_not_used_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, machine: str, facts: EngineFacts, reason: str
) -> None:
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
    async with speed_in(tmp_path, machine) as other:
        other.facts_changed(facts)
        other.facts_changed(facts)
        await other.settled()
        assert other.estimate is None
        key, _ = await other.uncalibrated()
        assert key.machine == machine
    said = [record.getMessage() for record in caplog.records if "measured anew" in record.getMessage()]
    assert len(said) == 1
    assert reason in said[0]


async def test_a_truncated_file_is_said_and_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
    (path,) = (tmp_path / "latency").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    async with speed_in(tmp_path) as again:
        again.facts_changed(FACTS)
        await again.settled()
        assert again.estimate is None
        await serve(again)
    assert "truncated" in caplog.text
    async with speed_in(tmp_path) as third:
        third.facts_changed(FACTS)
        await third.settled()
        assert third.estimate is not None


async def test_a_whole_file_whose_state_is_not_the_learners_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path)
    key = key_of(FACTS, settings.engine_url, "desk")
    assert key is not None
    SpeedFiles(tmp_path / "latency").write(key, b"something else")
    async with speed_in(tmp_path) as again:
        again.facts_changed(FACTS)
        await again.settled()
        assert again.estimate is None
    assert "measured anew" in caplog.text


async def test_another_engine_at_the_address_begins_anew_and_the_first_is_found_again(tmp_path: Path) -> None:
    other = replace(FACTS, model="n", models=("n",), root="/models/n")
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
        first = speed.estimate
        speed.facts_changed(other)
        speed.observe(100, 0, 5.0)
        await speed.settled()
        assert speed.estimate is None
        speed.facts_changed(FACTS)
        await speed.settled()
        assert first is not None
        assert speed.estimate is not None
        assert speed.estimate.prefill == first.prefill


async def test_an_engine_that_goes_and_comes_back_is_the_same_engine(tmp_path: Path) -> None:
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
        before = speed.estimate
        speed.facts_changed(FACTS.gone("no answer"))
        speed.facts_changed(replace(FACTS, block_size=None, num_blocks=None, token_ids_accepted=None))
        speed.facts_changed(FACTS)
        await speed.settled()
        assert before is not None
        assert speed.estimate == before


async def test_facts_that_come_late_lead_to_what_was_kept(tmp_path: Path) -> None:
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
    async with speed_in(tmp_path) as again:
        again.facts_changed(replace(FACTS, block_size=None, num_blocks=None, version=None))
        await again.settled()
        again.facts_changed(FACTS)
        await again.settled()
        assert again.estimate is not None
        assert again.estimate.source == "kept"


async def test_a_slower_engine_is_noticed_within_30_requests_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slower = PrefillModel(2 * CPU_135M.fixed_s, 2 * CPU_135M.per_token_s, 2 * CPU_135M.per_pair_s)
    with caplog.at_level(logging.INFO):
        async with speed_in(tmp_path) as speed:
            speed.facts_changed(FACTS)
            await serve(speed, rounds=6)
            drifted = False
            for number in range(30):
                uncached, cached = SIZES[number % len(SIZES)]
                speed.observe(uncached, cached, slower.predict_s(uncached, cached))
                await speed.settled()
                drifted = drifted or (speed.estimate is not None and speed.estimate.drifting)
            assert drifted
            await serve(speed, slower, rounds=3)
            assert speed.estimate is not None
            assert speed.estimate.predict_s(900, 0) == pytest.approx(slower.predict_s(900, 0), rel=0.1)
    assert "drifts" in caplog.text


async def test_what_was_learned_is_written_while_the_gateway_runs(tmp_path: Path) -> None:
    async with speed_in(tmp_path, save_every_s=0.0) as speed:
        speed.facts_changed(FACTS)
        await serve(speed, rounds=1)
        for _ in range(3):
            await speed.settled()
            async with speed_in(tmp_path) as reader:
                reader.facts_changed(FACTS)
                await reader.settled()
                if reader.estimate is not None:
                    break
        assert reader.estimate is not None


async def test_an_end_that_is_cancelled_can_be_waited_for_again(tmp_path: Path) -> None:
    speed = speed_in(tmp_path)
    await speed.__aenter__()
    speed.facts_changed(FACTS)
    await serve(speed)
    ending = asyncio.create_task(speed.__aexit__(None, None, None))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    await speed.__aexit__(None, None, None)
    async with speed_in(tmp_path) as again:
        again.facts_changed(FACTS)
        await again.settled()
        assert again.estimate is not None


async def test_a_folder_that_cannot_be_written_is_said_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latency").write_text("a file where the folder should be")
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
        assert speed.estimate is not None
    assert "cannot be kept" in caplog.text


async def test_a_lesson_that_makes_no_sense_does_not_end_the_learning(tmp_path: Path) -> None:
    async with speed_in(tmp_path) as speed:
        speed.facts_changed(FACTS)
        speed.observe(100, 0, -1.0)
        await speed.settled()
        await serve(speed)
        assert speed.estimate is not None


async def test_once_something_is_known_lessons_gather_until_they_are_asked_for(tmp_path: Path) -> None:
    async with ReplicaSpeed(Settings(data_dir=tmp_path), machine="desk", learn_after_s=3600.0) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
        before = speed.estimate
        for uncached, cached in SIZES:
            speed.observe(uncached, cached, CPU_135M.predict_s(uncached, cached))
        await asyncio.sleep(0.05)
        assert speed.estimate is before
        await speed.settled()
        assert before is not None
        assert speed.estimate is not None
        assert speed.estimate.samples == before.samples + len(SIZES)


async def test_gathered_lessons_are_learned_without_being_asked_for(tmp_path: Path) -> None:
    heard = asyncio.Event()
    async with ReplicaSpeed(Settings(data_dir=tmp_path), machine="desk", learn_after_s=0.01) as speed:
        speed.facts_changed(FACTS)
        await serve(speed)
        speed.on_change(lambda estimate: heard.set())
        speed.observe(300, 0, CPU_135M.predict_s(300, 0))
        await asyncio.wait_for(heard.wait(), 10)


async def test_lessons_that_say_nothing_are_not_learned_one_by_one_for_ever(tmp_path: Path) -> None:
    async with ReplicaSpeed(Settings(data_dir=tmp_path), machine="desk", learn_after_s=3600.0) as speed:
        speed.facts_changed(FACTS)
        for _ in range(AT_ONCE):
            speed.observe(300, 0, CPU_135M.predict_s(300, 0))
        await speed.settled()
        for uncached, cached in SIZES:
            speed.observe(uncached, cached, CPU_135M.predict_s(uncached, cached))
        await asyncio.sleep(0.05)
        assert speed.estimate is None
        await speed.settled()
        assert speed.estimate is not None
