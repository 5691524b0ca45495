"""A server as a child process under the guard: nothing of it outlives its owner, however the owner ends."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import aiohttp

PROBE_INTERVAL_S = 0.2
PROBE_TIMEOUT_S = 2.0
GUARD_MARGIN_S = 10.0
"""The guard kills what does not end in time, so it needs no deadline but that of its own death."""
LOG_LINES_SHOWN = 20


class GuardedServer:
    """A running command, its output in a file. Its owner calls `stop`; the guard does where the owner cannot."""

    def __init__(self, guard: asyncio.subprocess.Process, grace_s: float) -> None:
        self._guard = guard
        self._grace_s = grace_s

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log_path: Path, grace_s: float
    ) -> Self:
        """`grace_s` is what the command gets to end by itself after SIGTERM, in seconds."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.engine.guard", str(grace_s)),
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the owner alone, which stops its children in order
            )
        return cls(guard, grace_s)

    @property
    def pid(self) -> int:
        """Process id of the guard, which is the parent of all of the command's processes."""
        return self._guard.pid

    async def wait(self) -> int:
        """Returns the exit status when the command ends by itself."""
        return await self._guard.wait()

    async def until_answering(self, url: str, limit_s: float) -> int | None:
        """None once `url` answers 200, the exit status when the command ended instead. Raises TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with asyncio.timeout(limit_s), aiohttp.ClientSession(timeout=timeout) as session:
            while not await _answers(session, url):
                if self._guard.returncode is not None:
                    return self._guard.returncode
                await asyncio.sleep(PROBE_INTERVAL_S)
        return None

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self._guard.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s + GUARD_MARGIN_S):
                await self._guard.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._guard.kill()
            await self._guard.wait()


def log_tail(path: Path, lines: int = LOG_LINES_SHOWN) -> str:
    """The last lines that a server wrote."""
    return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
