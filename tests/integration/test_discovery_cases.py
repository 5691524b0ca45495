"""Engines that are added and removed while `headstart serve` runs."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for

ROOT = Path(__file__).parents[2]
FAST = SimConfig(fixed_ttft_s=0.0)


@asynccontextmanager
async def serving(folder: Path, **settings: str) -> AsyncIterator[tuple[RunningGateway, int]]:
    """`headstart serve` in a folder of its own, and its process id."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    own = {f"HEADSTART_{name.upper()}": value for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli.main", "serve", "--port", "0",
        env={**base, **own, "PYTHONPATH": str(ROOT)}, cwd=folder, stdout=PIPE, stderr=DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield RunningGateway(line.split()[-1]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            await process.wait()


async def replicas(gateway: RunningGateway) -> list[dict[str, Any]]:
    async with gateway.session() as session, session.get("/v1/replicas") as response:
        return list((await response.json())["data"])


async def until(gateway: RunningGateway, wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 15
    while not wanted(seen := await replicas(gateway)):
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.05)
    return seen


def names(seen: list[dict[str, Any]]) -> list[str]:
    return [replica["name"] for replica in seen]


def write(folder: Path, engine_url: str) -> None:
    (folder / "headstart.toml").write_text(
        f'engine_url = "{engine_url}"\ncalibrate = false\nsummary = "off"\nprewarm = false\n'
    )


async def test_engines_change_while_the_gateway_runs(tmp_path: Path) -> None:
    async with EngineSim(FAST) as first, EngineSim(FAST) as second:
        write(tmp_path, f"a={first.url}")
        async with serving(tmp_path) as (gateway, process):
            seen = await until(gateway, lambda seen: seen[0]["state"] == "ok")
            assert names(seen) == ["a"]
            assert seen[0]["model"] == "sim-model"
            write(tmp_path, f"a={first.url},b={second.url}")
            os.kill(process, signal.SIGHUP)
            seen = await until(gateway, lambda seen: len(seen) == 2 and seen[1]["state"] == "ok")
            assert names(seen) == ["a", "b"]
            # Without a signal the file itself is looked at.
            write(tmp_path, f"b={second.url}")
            assert names(await until(gateway, lambda seen: len(seen) == 1)) == ["b"]
            await first.stop()
            answer = await gateway.ask("sim-model", "Which engine answers?", max_tokens=2)
            assert answer.text
            write(tmp_path, "ftp://nobody")
            os.kill(process, signal.SIGHUP)
            await asyncio.sleep(0.5)
            assert names(await replicas(gateway)) == ["b"]


async def test_h4_no_answer_tells_an_engines_address(tmp_path: Path) -> None:
    async with EngineSim(FAST) as first, EngineSim(FAST) as second:
        await second.stop()
        async with run_gateway(settings_for(tmp_path, f"{first.url},{second.url}")) as gateway:
            await until(gateway, lambda seen: seen[0]["state"] == "ok")
            async with gateway.session() as session:
                for path in ("/v1/replicas", "/readyz", "/metrics", "/v1/models"):
                    async with session.get(path) as response:
                        text = await response.text()
                        for part in (f":{first.port}", f":{second.port}", "127.0.0.1"):
                            assert part not in text
