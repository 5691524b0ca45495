"""A gateway as a child process: nothing of it outlives its owner, however the owner ends."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from gateway.cli.terminal import CliError

START_LIMIT_S = 300.0
STOP_LIMIT_S = 20.0
PROBE_INTERVAL_S = 0.2
LOG_LINES_SHOWN = 15


class GatewayProcess:
    """`headstart serve` on loopback, its output in `log_path`; entered when `/healthz` answers.

    It runs under the same guard as the embedded engine: the guard stops it when this process is gone.
    """

    def __init__(self, port: int, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._command = ["serve", "--host", "127.0.0.1", "--port", str(port), *arguments]
        self._environment = environment

    async def __aenter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.engine.guard", str(STOP_LIMIT_S)),
                *(sys.executable, "-m", "gateway.cli.main", *self._command),
                env=dict(self._environment),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the owner alone, which stops its children in order
            )
        try:
            await self._until_healthy()
        except BaseException:  # Ctrl-C while it starts must not leave it running
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait(self) -> int:
        """Returns the exit status when the gateway ends by itself."""
        return await self._process.wait()

    def log_tail(self) -> str:
        return "\n".join(self.log_path.read_text("utf-8", "replace").splitlines()[-LOG_LINES_SHOWN:])

    async def _until_healthy(self) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        try:
            async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession(timeout=timeout) as session:
                while not await _answers(session, f"{self.url}/healthz"):
                    if self._process.returncode is not None:
                        raise CliError(f"The gateway ended while it started. Its last lines:\n{self.log_tail()}")
                    await asyncio.sleep(PROBE_INTERVAL_S)
        except TimeoutError:
            raise CliError(
                f"The gateway was not ready within {START_LIMIT_S:g} s. Its last lines:\n{self.log_tail()}"
            ) from None

    async def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_LIMIT_S + 10.0):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
