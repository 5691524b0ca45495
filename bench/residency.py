"""`python -m bench.residency`: cached tokens as the gateway predicts them against the real engine's reports.

A small cache (64 blocks of 32 tokens) before chats of two tenants: shared passages in any order, conversations
that go on from their answers, and branches. Four arms: one client, without events and with them; four clients,
without and with. Then the engine is killed under four clients, and started again on its port. Every request goes
through the whole gateway; what is compared is what it foretold, `predicted_cached_tokens` of the answer, and what the
engine reported of it.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console

from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.real_engine import EngineUnusable, bench_main, free_port
from bench.report import Options, Report
from bench.residency_traffic import TENANTS, Prediction, Sessions, Traffic, keys, predictions, run_clients
from gateway.engine.command import EngineOptions
from gateway.engine.prepare import MODEL_NAME, prepare_model
from gateway.engine.progress import Steps
from gateway.engine.run import EmbeddedEngine
from gateway.settings import Settings, process_environment

BLOCKS, BLOCK_TOKENS = 64, 32
WINDOW_TOKENS = 1536
REQUESTS, QUICK_REQUESTS = 300, 24
CLIENTS = 4
LEAST_EVICTIONS = 1000
SEED = 5
PROBE_S = 1.0
BACK_LIMIT_S = 300.0
START_LIMIT_S = 600.0
KILL_LIMIT_S = 20.0
WRONG_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    clients: int
    events: bool


ARMS = (
    Arm("one client, events off", 1, False),
    Arm("one client, events on", 1, True),
    Arm("four clients, events off", CLIENTS, False),
    Arm("four clients, events on", CLIENTS, True),
)
KILLED = "four clients, events on, engine killed and started again"


@dataclass(frozen=True, slots=True)
class Outcome:
    predictions: list[Prediction]
    evictions: float
    unanswered: int

    @property
    def exact(self) -> float:
        return sum(one.exact for one in self.predictions) / max(1, len(self.predictions))

    @property
    def wrong(self) -> list[Prediction]:
        return [one for one in self.predictions if not one.exact]


async def run(options: Options) -> int:
    report = Report("residency")
    requests = QUICK_REQUESTS if options.quick else options.extra.requests
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes: list[tuple[Arm, Outcome]] = []
        async with AsyncExitStack() as stack:
            engine = None if options.extra.engine_url else await stack.enter_async_context(small_engine())
            url = options.extra.engine_url or (engine.url if engine else "")
            chosen = await _possible(report, url, [arm for arm in ARMS if options.extra.arm in arm.name])
            for arm in chosen:
                await reset(url)
                outcomes.append((arm, await hold(arm, url, folder, requests)))
                print(f"  {arm.name}: {outcomes[-1][1].exact:.4f}", flush=True)
            restarted = None
            if engine is not None and options.extra.arm in KILLED:
                await reset(url)
                restarted = await restart_arm(stack, engine, folder, requests)
    _print(report, outcomes, restarted, options.quick, requests)
    return report.finish(options)


async def _possible(report: Report, url: str, arms: list[Arm]) -> list[Arm]:
    """Without those with events where the engine publishes none."""
    async with aiohttp.ClientSession(url) as session, session.get("/kv_event_sources") as response:
        if response.status == 200 and await response.json():
            return arms
    report.note("skipped: the arms with events, for this engine publishes none (--kv-events-config)")
    return [arm for arm in arms if not arm.events]


def engine_options(port: int, events_port: int, replay_port: int) -> EngineOptions:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": "kv",
    }
    small = ("--num-gpu-blocks-override", str(BLOCKS), "--kv-events-config", json.dumps(events))
    return EngineOptions(
        port=port, max_model_len=WINDOW_TOKENS, block_size=BLOCK_TOKENS, dev_mode=True, extra_arguments=small
    )


@asynccontextmanager
async def small_engine(options: EngineOptions | None = None) -> AsyncIterator[EmbeddedEngine]:
    """On free ports, or where an earlier one was."""
    options = options or engine_options(free_port(), free_port(), free_port())
    steps = Steps(Console())
    async with EmbeddedEngine(
        Settings().cache_dir, options, process_environment(), steps, start_timeout_s=START_LIMIT_S
    ) as engine:
        yield engine


async def reset(url: str) -> None:
    """Empties the engine's cache; it refuses while a request holds blocks. Raises EngineUnusable."""
    deadline = time.monotonic() + 20
    async with aiohttp.ClientSession(url) as session:
        while time.monotonic() < deadline:
            async with session.post("/reset_prefix_cache") as response:
                if response.status == 200 and (await response.json()).get("success"):
                    return
                if response.status == 404:
                    break
            await asyncio.sleep(0.1)
    raise EngineUnusable("Its cache cannot be reset: start it with VLLM_SERVER_DEV_MODE=1.")


@asynccontextmanager
async def gateway_before(url: str, folder: Path, *, events: bool) -> AsyncIterator[tuple[RunningGateway, Sessions]]:
    model = await asyncio.to_thread(prepare_model, Settings().cache_dir, process_environment(), Steps(Console()))
    settings = settings_for(
        Path(tempfile.mkdtemp(dir=folder)),
        url,
        tokenizer=str(model),
        api_keys=keys(),
        kv_events="auto" if events else "off",
        probe_interval_s=PROBE_S,
        log_level="warning",
    )
    async with run_gateway(settings) as gateway, AsyncExitStack() as stack:
        sessions = {tenant: await stack.enter_async_context(gateway.session(tenant)) for tenant in TENANTS}
        if events:
            await until_told(gateway)
        yield gateway, sessions


async def until_told(gateway: RunningGateway, limit_s: float = 60.0) -> None:
    """Waits until the engine's events tell all that it holds. Raises EngineUnusable."""
    deadline = time.monotonic() + limit_s
    async with gateway.session() as session:
        while time.monotonic() < deadline:
            async with session.get("/readyz") as response:
                states = [state["state"] for state in (await response.json())["kv_events"].values()]
            if states and set(states) == {"consistent"}:
                return
            await asyncio.sleep(0.1)
    raise EngineUnusable(f"Its KV events are {' and '.join(states) or 'not followed'}.")


async def hold(arm: Arm, url: str, folder: Path, requests: int) -> Outcome:
    async with gateway_before(url, folder, events=arm.events) as (_, sessions):
        traffics = [Traffic(MODEL_NAME, SEED + number) for number in range(arm.clients)]
        unanswered = await run_clients(sessions, traffics, requests)
        return Outcome(await predictions(sessions), await _evictions(sessions), unanswered)


async def restart_arm(stack: AsyncExitStack, engine: EmbeddedEngine, folder: Path, requests: int) -> Outcome:
    """Four clients; the engine's processes are killed when half of the requests are done."""
    async with gateway_before(engine.url, folder, events=True) as (gateway, sessions):
        traffics = [Traffic(MODEL_NAME, SEED + 50 + number) for number in range(CLIENTS)]
        first = asyncio.create_task(run_clients(sessions, traffics, requests // 2))
        await _until_answers(sessions, requests // 3)
        await asyncio.to_thread(_kill, engine.pid)
        unanswered = await first
        await stack.enter_async_context(small_engine(engine.options))
        await _until_answering(gateway)
        unanswered += await run_clients(sessions, traffics, requests - requests // 2)
        return Outcome(await predictions(sessions), await _evictions(sessions), unanswered)


def _kill(pid: int) -> None:
    """With all its children, and waits until their ports are free."""
    guard = psutil.Process(pid)
    processes = [*guard.children(recursive=True), guard]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_LIMIT_S)


async def _evictions(sessions: Sessions) -> float:
    """Blocks that left the picture because others needed them."""
    async with sessions[TENANTS[0]].get("/metrics") as response:
        return float(re.findall(r"^headstart_evicted_blocks\{[^}]*\} (\S+)$", await response.text(), re.MULTILINE)[0])


async def _until_answers(sessions: Sessions, answers: int) -> None:
    """The engine is killed under its clients' hands, not between two requests."""
    deadline = time.monotonic() + BACK_LIMIT_S
    while time.monotonic() < deadline:
        if len(await predictions(sessions)) >= answers:
            return
        await asyncio.sleep(0.1)
    raise EngineUnusable("It does not answer in time.")


async def _until_answering(gateway: RunningGateway) -> None:
    deadline = time.monotonic() + BACK_LIMIT_S
    async with gateway.session() as session:
        while time.monotonic() < deadline:
            async with session.get("/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.2)
    raise EngineUnusable("The gateway does not find the engine that was started again.")


def _print(
    report: Report,
    outcomes: Sequence[tuple[Arm, Outcome]],
    restarted: Outcome | None,
    quick: bool,
    requests: int,
) -> None:
    rows = [_row(arm.name, outcome) for arm, outcome in outcomes]
    if restarted is not None:
        rows.append(_row(KILLED, restarted))
    report.table(
        f"{requests} requests an arm, {BLOCKS} blocks of {BLOCK_TOKENS} tokens",
        ("arm", "answers", "exact", "share", "over", "under", "predicted tokens", "reported tokens", "evictions"),
        rows,
    )
    for arm, outcome in outcomes:
        for one in outcome.wrong[:WRONG_SHOWN]:
            report.note(f"{arm.name}: predicted {one.predicted}, reported {one.reported}")
    limits = {("one", False): 1.0, ("one", True): 1.0, ("four", False): 0.97, ("four", True): 0.995}
    for arm, outcome in outcomes:
        report.at_least(f"exact, {arm.name}", outcome.exact, limits[arm.name.split()[0], arm.events])
        if not quick:
            report.at_least(f"evictions, {arm.name}", outcome.evictions, LEAST_EVICTIONS)
    if restarted is not None:
        report.note(f"not answered while the engine was away: {restarted.unanswered}")
        report.at_most("wrong with a restart in the middle", len(restarted.wrong), CLIENTS)


def _row(name: str, outcome: Outcome) -> tuple[str, int, int, float, int, int, int, int, int]:
    found = outcome.predictions
    return (
        name,
        len(found),
        sum(one.exact for one in found),
        outcome.exact,
        sum(one.predicted > one.reported for one in found),
        sum(one.predicted < one.reported for one in found),
        sum(one.predicted for one in found),
        sum(one.reported for one in found),
        int(outcome.evictions),
    )


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", default="", metavar="WORDS", help="only the arms whose name holds these words")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="requests of each arm")


if __name__ == "__main__":
    sys.exit(bench_main("residency", __doc__, run, _extend))
