"""Servers of a bench as child processes, stopped by pid when the block ends."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import psutil

_URL = re.compile(r"http://[0-9.]+:\d+")
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def rss_mib(self) -> float:
        return float(psutil.Process(self.pid).memory_info().rss) / 2**20

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def python_server(
    arguments: Sequence[str], settings: Mapping[str, str] | None = None, start_s: float = 120.0
) -> AsyncIterator[Server]:
    """Starts `python ARGUMENTS`, which says its URL on the first line that holds one.

    Raises RuntimeError with its last lines when it ends instead, TimeoutError when it says none in time.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(settings or {})},
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(start_s):
            while True:
                line = (await process.stdout.readline()).decode("utf-8", "replace")
                if not line:
                    raise RuntimeError(f"{arguments} ended at its start: {''.join(said[-20:])}")
                said.append(line)
                if found := _URL.search(line):
                    break
        drain = asyncio.create_task(_drain(process.stdout))
        yield Server(found.group(), process.pid)
        drain.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


def headstart_server(settings: Mapping[str, str]) -> AbstractAsyncContextManager[Server]:
    """`headstart serve` on a free port; `settings` are HEADSTART_* variables."""
    quiet = {"HEADSTART_LOG_LEVEL": "warning", "HEADSTART_PORT": "0", **settings}
    return python_server(["-m", "gateway.cli.main", "serve"], quiet)


def simulator(*arguments: str) -> AbstractAsyncContextManager[Server]:
    """The engine simulator on a free port."""
    return python_server(["-m", "bench.engine_sim", "--port", "0", *arguments])
