"""`headstart serve --workers 2` as processes of its own, in front of a simulated engine, with a real Redis."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from bench.engine_sim import EngineSim, SimConfig
from bench.reply import Reply, read_reply

HEADSTART = (sys.executable, "-m", "gateway.cli.main")
ROOT = Path(__file__).parents[2]

# Processes load their models one after the other; on a busy machine that takes a while.
pytestmark = pytest.mark.timeout(300)


class Served:
    """A running `serve`. Every request opens a connection of its own, so that any worker may take it."""

    def __init__(self, process: subprocess.Popen[str], url: str, err: Path) -> None:
        self.process, self.url, self._err = process, url, err

    @property
    def said(self) -> str:
        return self._err.read_text()

    @property
    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    async def json(self, method: str, path: str, **fields: Any) -> Any:
        async with self._session() as session, session.request(method, path, **fields) as response:
            response.raise_for_status()
            return await response.json()

    async def text(self, path: str) -> str:
        async with self._session() as session, session.get(path) as response:
            return await response.text()

    async def ask(self, model: str, question: str, **fields: Any) -> Reply:
        async with self._session() as session:
            body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 8, **fields}
            return await read_reply(session, body)

    async def upload(self, text: str) -> str:
        form = aiohttp.FormData({"purpose": "assistants"})
        form.add_field("file", text.encode(), filename="a.txt")
        return str((await self.json("POST", "/v1/files", data=form))["id"])

    async def found(self, store: str, question: str) -> list[str]:
        page = await self.json("POST", f"/v1/vector_stores/{store}/search", json={"query": question})
        return [part["text"] for hit in page["data"] for part in hit["content"]]

    async def samples(self, metric: str) -> dict[str, float]:
        """Values by worker, over all other labels."""
        sums: dict[str, float] = {}
        for labels, value in re.findall(
            rf"^{metric}\{{([^}}]*)\}} (\S+)$", await self.text("/metrics"), re.MULTILINE
        ):
            number = re.search(r'worker="(\d+)"', labels)
            assert number is not None
            sums[number[1]] = sums.get(number[1], 0.0) + float(value)
        return sums

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(30))


def environment(folder: Path, **settings: str) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    return {
        **base,
        "PYTHONPATH": str(ROOT),
        "HEADSTART_DATA_DIR": str(folder / "data"),
        "HEADSTART_CACHE_DIR": str(folder / "cache"),
        "HEADSTART_CALIBRATE": "false",
        "HEADSTART_SUMMARY": "off",
        **settings,
    }


@asynccontextmanager
async def serving(folder: Path, engine_url: str, redis_url: str) -> AsyncIterator[Served]:
    err = folder / "stderr"
    with err.open("w") as errors:
        process = subprocess.Popen(  # noqa: ASYNC220
            [*HEADSTART, "serve", "--port", "0", "--workers", "2"],
            env=environment(folder, HEADSTART_ENGINE_URL=engine_url, HEADSTART_REDIS_URL=redis_url),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    workers: list[psutil.Process] = []
    try:
        line = await asyncio.to_thread(process.stdout.readline)
        assert line.startswith("Headstart listens on http://127.0.0.1:"), err.read_text()
        served = Served(process, line.split()[-1], err)
        workers = served.workers
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 30)
        finally:
            process.kill()
            process.stdout.close()
            _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 20)
            for worker in alive:
                worker.kill()
            assert not alive, "a worker outlived its supervisor"


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
async def sim() -> AsyncIterator[EngineSim]:
    async with EngineSim(SimConfig(time_scale=0.01)) as sim:
        yield sim


async def test_two_workers_serve_one_port_and_one_data_folder(sim: EngineSim, redis_url: str, tmp_path: Path) -> None:
    async with serving(tmp_path, sim.url, redis_url) as served:
        assert len(served.workers) == 2
        store = (await served.json("POST", "/v1/vector_stores", json={"name": "harbour"}))["id"]
        for number in range(6):
            file = await served.upload(f"Ferry number {number} to Pellen leaves at {number + 5} in the morning.")
            began_s = time.monotonic()
            await served.json("POST", f"/v1/vector_stores/{store}/files", json={"file_id": file})

            async def is_found(number: int = number) -> bool:
                return any(f"number {number}" in text for text in await served.found(store, f"ferry {number}"))

            await until(is_found)
            assert time.monotonic() - began_s < 2.0
            assert all([await is_found() for _ in range(8)]), "whichever worker is asked"
            if number % 2:
                await served.json("DELETE", f"/v1/files/{file}")
                assert not any([await is_found() for _ in range(8)]), "deleted for every worker, at once"

        replies = [await served.ask(f"sim-model@{store}", f"When does ferry {n} leave?") for n in range(16)]
        assert [reply.status for reply in replies] == [200] * 16
        for n in range(4):
            kept = {"headstart": {"conversation": "talk"}}
            assert (await served.ask("sim-model", f"My boat number {n} is called Wren.", **kept)).status == 200
        sent = sim.generations[-1].body["messages"]
        assert sum("Wren" in message["content"] for message in sent if message["role"] == "user") == 4, (
            "a conversation goes on at whichever worker"
        )

        async def is_shared() -> bool:
            await served.ask("sim-model", "hello")
            applied = await served.samples("headstart_sharing_events_applied")
            return len(applied) == 2 and all(applied.values())

        await until(is_shared)
        requests = await served.samples("headstart_chat_requests_total")
        assert sum(requests.values()) > 20
        assert set(requests) == {"1", "2"}, "both took some"
        calls = await served.json("GET", "/v1/calls")
        assert len(calls["data"]) == sum(requests.values())
        assert [call["created"] for call in calls["data"]] == sorted(
            (call["created"] for call in calls["data"]), reverse=True
        )


async def test_a_killed_worker_is_started_again_and_its_work_taken_over(
    sim: EngineSim, redis_url: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, sim.url, redis_url) as served:
        store = (await served.json("POST", "/v1/vector_stores", json={"name": "harbour"}))["id"]
        first = served.workers[0]
        first.kill()
        file = await served.upload("The ferry to Pellen leaves at seven.")
        await served.json("POST", f"/v1/vector_stores/{store}/files", json={"file_id": file})

        async def is_found() -> bool:
            return bool(await served.found(store, "ferry"))

        await until(is_found)
        assert "Worker 1 was ended by SIGKILL; it is started again in 1 s." in served.said

        async def are_two() -> bool:
            return len(await served.samples("headstart_chat_in_flight")) == 2

        await until(are_two, 120.0)
        assert [(await served.ask("sim-model", "hello")).status for _ in range(8)] == [200] * 8
        for worker in served.workers:
            assert worker.pid != first.pid
        served.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(0.5)
        assert (await served.ask("sim-model", "hello")).status == 200
        served.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(served.process.wait, 30) == 0


async def test_workers_end_with_a_supervisor_that_was_killed(sim: EngineSim, redis_url: str, tmp_path: Path) -> None:
    async with serving(tmp_path, sim.url, redis_url) as served:
        workers = served.workers
        served.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 15)
        assert not alive


def test_workers_without_redis_are_refused_with_the_cure(tmp_path: Path) -> None:
    result = subprocess.run(
        [*HEADSTART, "serve", "--port", "0", "--workers", "2"],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "set HEADSTART_REDIS_URL" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_worker_that_cannot_start_ends_all_and_says_why_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "headstart.db").mkdir()
    result = subprocess.run(
        [*HEADSTART, "serve", "--port", "0", "--workers", "2"],
        env=environment(
            tmp_path, HEADSTART_REDIS_URL="redis://127.0.0.1:9/0", HEADSTART_ENGINE_URL="http://127.0.0.1:9"
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.count("The gateway cannot start") == 1
    assert "Headstart listens" not in result.stdout
