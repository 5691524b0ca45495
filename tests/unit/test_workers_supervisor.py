"""The supervisor of workers, with workers that do nothing but live and die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
WORKERS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from gateway.workers import Supervisor, WorkerFailed

class Serve:
    def __init__(self, folder, how): self.folder, self.how = folder, how
    def __call__(self, worker, ready):
        told = []
        self.lock = multiprocessing.RLock()  # as a progress bar of a library makes one
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        signal.signal(signal.SIGHUP, lambda *_: (self.folder / f"hangup-{worker.number}").touch())
        if self.how == "fails":
            sys.exit(3)
        with (self.folder / f"started-{worker.number}").open("a") as log: log.write(f"{os.getpid()}\\n")
        ready()
        while not told: time.sleep(0.01)
        (self.folder / f"stopped-{worker.number}").touch()

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        Supervisor(3, Serve(folder, sys.argv[2]), lambda: print("ready", flush=True), 5.0).run()
    except WorkerFailed as failed:
        print(failed); sys.exit(1)
"""


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def supervised(folder: Path, how: str = "lives") -> Iterator[subprocess.Popen[str]]:
    program = folder / "program.py"
    program.write_text(WORKERS)
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children()
        process.kill()
        process.communicate(timeout=10)
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()


def pids(folder: Path, number: int) -> list[int]:
    log = folder / f"started-{number}"
    return [int(pid) for pid in log.read_text().split()] if log.exists() else []


def test_workers_are_started_restarted_hung_up_on_and_stopped_together(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(pids(tmp_path, 2)[0], signal.SIGKILL)
        until(lambda: len(pids(tmp_path, 2)) == 2)
        assert [len(pids(tmp_path, number)) for number in (1, 2, 3)] == [1, 2, 1]
        process.send_signal(signal.SIGHUP)
        until(lambda: len(list(tmp_path.glob("hangup-*"))) >= 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0
        assert sorted(path.name for path in tmp_path.glob("stopped-*")) == ["stopped-1", "stopped-2", "stopped-3"]
        assert err.splitlines()[0] == "Worker 2 was ended by SIGKILL; it is started again in 1 s."


def test_workers_that_stop_leave_nothing_that_the_interpreter_complains_of(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert err == "Headstart stops; a second Ctrl-C does not wait for requests.\n"


def test_workers_of_a_killed_supervisor_stop_by_themselves(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        until(lambda: len(list(tmp_path.glob("stopped-*"))) == 3)


def test_a_worker_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    with supervised(tmp_path, "fails") as process:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert out == "worker 1 did not start\n"
