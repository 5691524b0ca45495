"""Runs the embedded engine: one `async with` owns it, and nothing of it is left when that ends."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from gateway.engine.command import EngineOptions, engine_command, engine_environment
from gateway.engine.errors import EngineError
from gateway.engine.prepare import MODEL_NAME, prepare_model
from gateway.engine.progress import Steps

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 2.0
LOG_LINES_SHOWN = 20


class EmbeddedEngine:
    """A vLLM server on this machine's CPU with the packaged model.

        async with EmbeddedEngine(cache_dir, options, process_environment(), Steps(console)) as engine:
            ... engine.url, engine.model_name ...

    Entering prepares the model if need be, starts the server and waits until it answers; leaving stops it with all of
    its processes. It also ends when the process that owns it ends without leaving, by SIGKILL too. Raises
    `EngineError` (or its `MissingPackages`) when it cannot start, with the last lines of its log.
    """

    def __init__(
        self,
        cache_dir: Path,
        options: EngineOptions,
        environment: Mapping[str, str],
        steps: Steps,
        *,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 15.0,
    ) -> None:
        self.options = options
        self.model_name = MODEL_NAME
        self.log_path = cache_dir / "logs" / f"engine-{options.port}.log"
        self._cache_dir = cache_dir
        self._environment = environment
        self._steps = steps
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return self.options.url

    @property
    def pid(self) -> int:
        """Process id of the guard, which is the parent of all of the engine's processes."""
        return self._running_guard().pid

    async def __aenter__(self) -> Self:
        _require_free_port(self.options.host, self.options.port)
        model_dir = await asyncio.to_thread(prepare_model, self._cache_dir, self._environment, self._steps)
        try:
            with self._steps.step("starting the embedded engine", limit_s=self._start_timeout_s):
                self._guard = await self._start(model_dir)
                await self._until_ready(self._guard)
        except BaseException:  # Ctrl-C while it starts must not leave it running
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait(self) -> int:
        """Returns the exit status when the engine ends by itself."""
        return await self._running_guard().wait()

    def log_tail(self, lines: int = LOG_LINES_SHOWN) -> str:
        """The last lines that the engine wrote."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _running_guard(self) -> asyncio.subprocess.Process:
        if self._guard is None:
            raise EngineError("The embedded engine is not running.")
        return self._guard

    async def _start(self, model_dir: Path) -> asyncio.subprocess.Process:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        environment = engine_environment(self._environment, self.options, cores, Path(sys.prefix))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.engine.guard", str(self._stop_timeout_s)),
                *engine_command(model_dir, self.options),
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the owner alone, which then stops the engine in order
            )

    async def _until_ready(self, guard: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s), aiohttp.ClientSession() as session:
                while not await _is_healthy(session, self.url):
                    if guard.returncode is not None:
                        raise EngineError(
                            f"The embedded engine ended with status {guard.returncode} before it was ready. "
                            f"Last lines of {self.log_path}:\n{self.log_tail()}"
                        )
                    await asyncio.sleep(PROBE_INTERVAL_S)
        except TimeoutError as error:
            raise EngineError(
                f"The embedded engine was not ready within {self._start_timeout_s:.0f} s. "
                f"Last lines of {self.log_path}:\n{self.log_tail()}"
            ) from error

    async def _stop(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            guard.send_signal(signal.SIGTERM)
        # The guard kills what does not end in time, so it needs no deadline but that of its own death.
        try:
            async with asyncio.timeout(self._stop_timeout_s + 10.0):
                await guard.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _require_free_port(host: str, port: int) -> None:
    """vLLM finds out that its port is taken only after it has loaded the model."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"The embedded engine cannot listen on {host}:{port} ({error.strerror}). "
                "Stop what uses the port, or choose another."
            ) from error
