"""Runs the embedded engine: one `async with` owns it, and nothing of it is left when that ends."""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.engine.command import EngineOptions, engine_command, engine_environment
from gateway.engine.errors import EngineError
from gateway.engine.guarded import GuardedServer, log_tail
from gateway.engine.prepare import MODEL_NAME, prepare_model
from gateway.engine.progress import Steps


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
        self._server: GuardedServer | None = None

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return self.options.url

    @property
    def pid(self) -> int:
        """Process id of the guard, which is the parent of all of the engine's processes."""
        return self._running().pid

    async def __aenter__(self) -> Self:
        _require_free_port(self.options.host, self.options.port)
        model_dir = await asyncio.to_thread(prepare_model, self._cache_dir, self._environment, self._steps)
        try:
            with self._steps.step("starting the embedded engine", limit_s=self._start_timeout_s):
                self._server = await self._start(model_dir)
                await self._until_ready(self._server)
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
        return await self._running().wait()

    def log_tail(self) -> str:
        """The last lines that the engine wrote."""
        return log_tail(self.log_path)

    def _running(self) -> GuardedServer:
        if self._server is None:
            raise EngineError("The embedded engine is not running.")
        return self._server

    async def _start(self, model_dir: Path) -> GuardedServer:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        environment = engine_environment(self._environment, self.options, cores, Path(sys.prefix))
        command = engine_command(model_dir, self.options)
        return await GuardedServer.start(command, environment, self.log_path, self._stop_timeout_s)

    async def _until_ready(self, server: GuardedServer) -> None:
        try:
            status = await server.until_answering(f"{self.url}/health", self._start_timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"The embedded engine was not ready within {self._start_timeout_s:.0f} s. "
                f"Last lines of {self.log_path}:\n{self.log_tail()}"
            ) from error
        if status is not None:
            raise EngineError(
                f"The embedded engine ended with status {status} before it was ready. "
                f"Last lines of {self.log_path}:\n{self.log_tail()}"
            )

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()


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
