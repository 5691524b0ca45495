"""Engines that are added and removed while `headstart serve` runs."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.reply import Reply

ROOT = Path(__file__).parents[2]
FAST = SimConfig(fixed_ttft_s=0.0)
SLOW = SimConfig(time_scale=0.05, decode_tokens_per_s=100.0, answer="words")


@asynccontextmanager
async def serving(folder: Path, **settings: str) -> AsyncIterator[tuple[RunningGateway, int]]:
    """`headstart serve` in a folder of its own, and its process id."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    own = {f"HEADSTART_{name.upper()}": value for name, value in settings.items()}
    with (folder / "stderr").open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.cli.main", "serve", "--port", "0",
            env={**base, **own, "PYTHONPATH": str(ROOT)}, cwd=folder, stdout=PIPE, stderr=errors,
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


def state(replica: dict[str, Any]) -> tuple[str, str]:
    return replica["name"], replica["state"]


async def slow_answer(gateway: RunningGateway) -> bytes:
    """A streamed answer as it came to a client that takes a few bytes at a time."""
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=256)
    body = b'{"model":"sim-model","stream":true,"max_tokens":120,"messages":[{"role":"user","content":"Slow?"}]}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
    answer = b""
    while part := await reader.read(256):
        answer += part
        await asyncio.sleep(0.02)
    writer.close()
    return answer


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


async def test_hangups_under_load_lose_no_request_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Engines come, go and change places; a client that reads slowly keeps the one that it has."""
    async with EngineSim(SLOW) as first, EngineSim(SLOW) as second:
        write(tmp_path, f"a={first.url}")
        # Removed while it is calibrated, too.
        async with serving(tmp_path, calibrate="true") as (gateway, process):
            await until(gateway, lambda seen: seen[0]["state"] == "ok")
            over = asyncio.Event()
            replies: list[Reply] = []

            async def client(number: int) -> None:
                while not over.is_set():
                    replies.append(await gateway.ask("sim-model", f"{number} Tide?", stream=True, max_tokens=4))

            lists = [f"a={first.url}", f"b={second.url}", f"b={first.url},a={second.url}", "ftp://nobody"]
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                slow = group.create_task(slow_answer(gateway))
                clients = [group.create_task(client(number)) for number in range(3)]
                for step in range(60):
                    write(tmp_path, lists[step % len(lists)])
                    os.kill(process, signal.SIGHUP)
                    await asyncio.sleep(0.02)
                assert all(not each.done() for each in clients)
                over.set()
            assert slow.result().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert [reply.error for reply in replies if reply.error or reply.status != 200] == []
            write(tmp_path, f"b={second.url},a={first.url}")
            os.kill(process, signal.SIGHUP)
            await until(gateway, lambda seen: sorted(map(state, seen)) == [("a", "ok"), ("b", "ok")])
            for metric in ("chat_in_flight", "queued_requests", "decoding_requests", "prefill_in_flight_tokens"):
                await gateway.until_metric(f"headstart_{metric}", 0, timeout_s=10.0)
    assert "Traceback" not in (tmp_path / "stderr").read_text()


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
