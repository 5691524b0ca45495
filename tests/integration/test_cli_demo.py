"""`headstart demo` from beginning to end against the engine simulator, and what is left of it afterwards."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class World:
    """An engine simulator with the packaged model's tokenizer, and a cache folder of the test's own."""

    environment: dict[str, str]
    folder: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "gateway.cli.main", "demo", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("demo")
    port = unused_port()
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    environment = {
        **base,
        "PYTHONPATH": str(ROOT),
        "HEADSTART_ENGINE_URL": f"http://127.0.0.1:{port}",
        "HEADSTART_TOKENIZER": str(model_dir),
        "HEADSTART_CACHE_DIR": str(folder / "cache"),
    }
    simulator = subprocess.Popen(
        [sys.executable, "-m", "bench.engine_sim", "--port", str(port), "--model-dir", str(model_dir)],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert simulator.stdout is not None
    assert simulator.stdout.readline()
    yield World(environment, folder)
    simulator.kill()
    simulator.communicate()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    assert process.stderr is not None
    raise AssertionError(f"ended without '{words}':\n{seen}\n{process.stderr.read()}")


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 30
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() < deadline, f"left behind: {processes}"
        time.sleep(0.1)


def test_demo_once_answers_three_questions_and_the_second_run_skips_what_is_done(world: World) -> None:
    first = world.start("--once", "--port", str(unused_port()))
    output, errors = first.communicate(timeout=240)
    assert first.returncode == 0, output + errors
    assert output.count("Question ") == 3
    assert output.count("TTFT ") == 3
    assert output.count("answer tokens at") == 3
    assert "emergency-drills.md" in output
    assert errors == ""
    second = world.start("--once", "--port", str(unused_port()))
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 0, output + errors
    assert "added" not in output
    assert "unchanged." in output


def test_demo_stays_up_until_ctrl_c_and_leaves_nothing_running(world: World) -> None:
    port = unused_port()
    demo = world.start("--port", str(port))
    read_until(demo, f"Headstart is up on http://127.0.0.1:{port}")
    children = psutil.Process(demo.pid).children(recursive=True)
    assert children
    demo.send_signal(signal.SIGINT)
    output, errors = demo.communicate(timeout=60)
    assert demo.returncode == 0, output + errors
    assert not any(child.is_running() for child in children)


def test_demo_killed_without_mercy_leaves_nothing_running(world: World) -> None:
    demo = world.start("--port", str(unused_port()))
    read_until(demo, "Headstart is up on")
    children = psutil.Process(demo.pid).children(recursive=True)
    assert children
    demo.kill()
    demo.communicate(timeout=10)
    wait_until_gone(children)


def test_a_port_that_is_taken_is_told_before_anything_is_started(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = world.start("--once", "--port", str(port))
        output, errors = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert output == ""
    assert errors.startswith(f"headstart: Cannot listen on 127.0.0.1:{port}: Address already in use.")
