"""A server under the guard: waited for, ended with its owner's word, and told apart from one that failed."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from gateway.engine.guarded import GuardedServer, log_tail

ENVIRONMENT = dict(os.environ)


def http_server(port: int) -> list[str]:
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]


async def test_a_server_is_answering_when_waited_for_and_gone_when_stopped(tmp_path: Path, free_port: int) -> None:
    server = await GuardedServer.start(http_server(free_port), ENVIRONMENT, tmp_path / "logs" / "server.log", 5.0)
    try:
        assert await server.until_answering(f"http://127.0.0.1:{free_port}/", 60.0) is None
        processes = psutil.Process(server.pid).children(recursive=True)
    finally:
        await server.stop()
    assert processes
    assert not any(process.is_running() for process in processes)
    assert "GET / " in log_tail(tmp_path / "logs" / "server.log")


async def test_a_command_that_ends_instead_is_told_with_its_status(tmp_path: Path, free_port: int) -> None:
    command = [sys.executable, "-c", "print('no room'); raise SystemExit(3)"]
    server = await GuardedServer.start(command, ENVIRONMENT, tmp_path / "server.log", 5.0)
    assert await server.until_answering(f"http://127.0.0.1:{free_port}/", 60.0) == 3
    assert log_tail(tmp_path / "server.log") == "no room"
    await server.stop()


async def test_a_server_that_never_answers_runs_out_of_time_and_is_stopped(tmp_path: Path, free_port: int) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = await GuardedServer.start(command, ENVIRONMENT, tmp_path / "server.log", 5.0)
    with pytest.raises(TimeoutError):
        await server.until_answering(f"http://127.0.0.1:{free_port}/", 0.3)
    await server.stop()
    async with asyncio.timeout(5):
        assert await server.wait() != 0
