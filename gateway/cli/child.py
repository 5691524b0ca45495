"""A gateway as a child process of a command."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.cli.terminal import CliError
from gateway.engine.guarded import GuardedServer, log_tail

START_LIMIT_S = 300.0
STOP_LIMIT_S = 20.0


class GatewayProcess:
    """`headstart serve` on loopback, its output in `log_path`; entered when `/healthz` answers."""

    def __init__(self, port: int, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._command = [
            *(sys.executable, "-m", "gateway.cli.main", "serve", "--host", "127.0.0.1", "--port", str(port)),
            *arguments,
        ]
        self._environment = environment

    async def __aenter__(self) -> Self:
        self._server = await GuardedServer.start(self._command, self._environment, self.log_path, STOP_LIMIT_S)
        try:
            await self._until_healthy()
        except BaseException:  # Ctrl-C while it starts must not leave it running
            await self._server.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop()

    async def wait(self) -> int:
        """Returns the exit status when the gateway ends by itself."""
        return await self._server.wait()

    def log_tail(self) -> str:
        return log_tail(self.log_path)

    async def _until_healthy(self) -> None:
        try:
            status = await self._server.until_answering(f"{self.url}/healthz", START_LIMIT_S)
        except TimeoutError:
            raise CliError(
                f"The gateway was not ready within {START_LIMIT_S:g} s. Its last lines:\n{self.log_tail()}"
            ) from None
        if status is not None:
            raise CliError(f"The gateway ended while it started. Its last lines:\n{self.log_tail()}")
