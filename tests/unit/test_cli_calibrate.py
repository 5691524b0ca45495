"""`headstart calibrate` against the simulated engine."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.engine_sim import EngineSim, SimConfig
from gateway.backends.facts import EngineFacts
from gateway.cli.calibrate import told_time
from gateway.cli.main import app
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from latency.model import CPU_135M
from retrieval.folder import owned_folder

SCALE = 0.2


class ThreadedSim:
    """The simulator on a loop of its own, as another process would be."""

    def __init__(self, config: SimConfig) -> None:
        self.sim = EngineSim(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> EngineSim:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.sim.start(), self._loop).result(10)
        return self.sim

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.sim.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def engine() -> Iterator[EngineSim]:
    with ThreadedSim(SimConfig(time_scale=SCALE, max_model_len=1024)) as sim:
        yield sim


async def kept_source(folder: Path, sim: EngineSim) -> str | None:
    """Where a gateway that starts on the folder finds its speed."""
    facts = EngineFacts(
        reachable=True,
        model="sim-model",
        models=("sim-model",),
        root="sim-model",
        version="0.32.0",
        block_size=sim.config.block_size,
        num_blocks=sim.config.num_gpu_blocks,
        token_ids_accepted=True,
    )
    async with ReplicaSpeed(Settings(data_dir=folder, engine_url=sim.url)) as speed:
        speed.facts_changed(facts)
        await speed.settled()
        return None if speed.estimate is None else speed.estimate.source


def test_it_shows_the_fit_and_keeps_it_for_the_next_gateway(engine: EngineSim, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--url", engine.url, "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for words in (
        "uncached",
        "fitted",
        "TTFT =",
        "in the mean",
        "0.95",
        "tokens/s",
        "for the next 'headstart serve'",
    ):
        assert words in result.output
    assert asyncio.run(kept_source(tmp_path, engine)) == "kept"


def test_json_holds_the_model_and_every_sample(engine: EngineSim, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--url", engine.url, "--data-dir", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["per_token_s"] == pytest.approx(SCALE * CPU_135M.per_token_s, rel=0.4)
    assert document["token_s"] == pytest.approx(SCALE / 30, rel=0.5)
    assert document["kept"] is True
    assert len(document["samples"]) >= 8


def test_an_engine_that_is_not_there_is_said_with_the_cure(tmp_path: Path, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    result = CliRunner().invoke(app, ["calibrate", "--url", url, "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "not reachable" in result.output
    assert "headstart engine" in result.output


def test_a_folder_that_a_gateway_holds_is_refused_before_anything_is_sent(engine: EngineSim, tmp_path: Path) -> None:
    with owned_folder(tmp_path):
        result = CliRunner().invoke(app, ["calibrate", "--url", engine.url, "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "A gateway runs" in result.output
    assert not engine.generations


def test_an_engine_that_takes_no_ids_is_refused_with_what_happens_instead(tmp_path: Path) -> None:
    with ThreadedSim(SimConfig(surface="minimal")) as sim:
        result = CliRunner().invoke(app, ["calibrate", "--url", sim.url, "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "takes no prompt of token ids" in result.output
    assert not (tmp_path / "latency").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.352, "1.35 s"),
        (0.064, "64.0 ms"),
        (0.00113, "1.13 ms"),
        (0.93e-6, "930 ns"),
        (31e-6, "31.0 µs"),
        (0, "0.00 ns"),
    ],
)
def test_times_are_told_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert told_time(seconds) == text


def test_several_engines_are_measured_one_after_the_other_and_kept_each_for_itself(
    engine: EngineSim, tmp_path: Path
) -> None:
    with ThreadedSim(SimConfig(time_scale=SCALE, max_model_len=1024)) as second:
        urls = f"near={engine.url},far={second.url}"
        result = CliRunner().invoke(app, ["calibrate", "--url", urls, "--data-dir", str(tmp_path), "--json"])
        assert result.exit_code == 0, result.output
        assert [document["replica"] for document in json.loads(result.stdout)] == ["near", "far"]
        assert asyncio.run(kept_source(tmp_path, engine)) == "kept"
        assert asyncio.run(kept_source(tmp_path, second)) == "kept"
