"""Several processes that accept on one port: started, watched, restarted, stopped together."""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from gateway.peers import Worker

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
GOOD_LIFE_S = 60.0
"""A worker that lived so long is started again after the shortest pause."""
START_LIMIT_S = 180.0


class Serve(Protocol):
    """What a worker does, in a process of its own; returns when it is told to stop. Picklable."""

    def __call__(self, worker: Worker, ready: Callable[[], None]) -> None: ...


class WorkerFailed(Exception):
    """A worker could not start; it has said why itself."""


@dataclass(slots=True)
class _Slot:
    worker: Worker
    process: SpawnProcess
    ready: Event
    started_s: float
    pause_s: float = FIRST_PAUSE_S
    due_s: float | None = None


class Supervisor:
    """Runs `count` workers until SIGINT or SIGTERM, which they are told as SIGTERM; SIGHUP is passed on.

    The first is started alone: it makes the database and owns the data folder. The others follow together. A worker
    that ends by itself is started again after a pause that doubles up to half a minute, which is said on stderr.
    Workers end when this process is gone, however it went. `all_ready` is called once, when all are there. Must run
    in the main thread.
    """

    def __init__(self, count: int, serve: Serve, all_ready: Callable[[], None], stop_limit_s: float) -> None:
        self._count = count
        self._serve = serve
        self._all_ready = all_ready
        self._stop_limit_s = stop_limit_s
        self._context = multiprocessing.get_context("spawn")
        self._slots: list[_Slot] = []
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Raises WorkerFailed when one of them ends before all have started."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number in before:
            signal.signal(number, self._hangup if number == signal.SIGHUP else self._stop)
        try:
            with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
                try:
                    self._start_all(Path(folder))
                    while not self._stopping:
                        self._watch()
                finally:
                    self._end_all()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _start_all(self, folder: Path) -> None:
        first, *others = (Worker(number, self._count, folder) for number in range(1, self._count + 1))
        for together in ([first], others):
            started = [self._started(worker) for worker in together]
            self._slots += started
            for slot in started:
                self._wait_ready(slot)
        if not self._stopping:
            self._all_ready()

    def _wait_ready(self, slot: _Slot) -> None:
        deadline_s = slot.started_s + START_LIMIT_S
        while not slot.ready.wait(0.05) and not self._stopping:
            if not slot.process.is_alive() or time.monotonic() > deadline_s:
                raise WorkerFailed(f"worker {slot.worker.number} did not start")

    def _started(self, worker: Worker) -> _Slot:
        ready = self._context.Event()
        process = self._context.Process(
            target=_work, args=(self._serve, worker, ready), name=f"headstart-worker-{worker.number}"
        )
        process.start()
        return _Slot(worker, process, ready, time.monotonic())

    def _watch(self) -> None:
        """Until something happens: a worker ended, one is due to be started, or a signal came."""
        now_s = time.monotonic()
        for place, slot in enumerate(self._slots):
            if slot.due_s is not None and now_s >= slot.due_s:
                self._slots[place] = again = self._started(slot.worker)
                again.pause_s = slot.pause_s
            elif slot.due_s is None and not slot.process.is_alive():
                self._ended(slot, now_s)
        due_s = [slot.due_s for slot in self._slots if slot.due_s is not None]
        running: list[Any] = [slot.process.sentinel for slot in self._slots if slot.due_s is None]
        timeout_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        if self._wake_read in wait([*running, self._wake_read], timeout_s):
            os.read(self._wake_read, 64)

    def _ended(self, slot: _Slot, now_s: float) -> None:
        slot.process.join()
        lived_s = now_s - slot.started_s
        slot.pause_s = FIRST_PAUSE_S if lived_s >= GOOD_LIFE_S else slot.pause_s
        slot.due_s = now_s + slot.pause_s
        say(f"Worker {slot.worker.number} {_how(slot.process.exitcode)}; it is started again in {slot.pause_s:g} s.")
        slot.pause_s = min(LONGEST_PAUSE_S, 2 * slot.pause_s)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            say("Headstart stops; a second Ctrl-C does not wait for requests.")
        elif number == signal.SIGINT:
            for slot in self._slots:
                self._send(slot, signal.SIGINT)
        self._stopping = True
        os.write(self._wake_write, b"s")

    def _hangup(self, number: int, frame: FrameType | None) -> None:
        for slot in self._slots:
            # One that is still starting reads the settings as they are now.
            if slot.ready.is_set():
                self._send(slot, signal.SIGHUP)

    def _end_all(self) -> None:
        self._stopping = True
        for slot in self._slots:
            self._send(slot, signal.SIGTERM)
        deadline_s = time.monotonic() + self._stop_limit_s
        for slot in self._slots:
            slot.process.join(max(0.0, deadline_s - time.monotonic()))
            if slot.process.is_alive():
                slot.process.kill()
                slot.process.join()

    def _send(self, slot: _Slot, number: int) -> None:
        if slot.process.is_alive() and slot.process.pid is not None:
            try:
                os.kill(slot.process.pid, number)
            except ProcessLookupError:
                return


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with status {exitcode}"


def _work(serve: Serve, worker: Worker, ready: Event) -> None:
    """The worker's process. Without its supervisor nobody would stop it: it goes as if told to."""
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=leave_with_parent, name="supervisor-watch", daemon=True).start()
    # What a terminal sends reaches every process; until the server takes the signals over, it is the supervisor's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    serve(worker, ready.set)
    # All is closed. To take a million objects apart one by one would take the interpreter seconds; but libraries give
    # back now what outlives the process, such as semaphores, which would be told as leaked.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
