"""`python -m bench.overload`: twice the load that the engine can bear, for a minute, on the simulated engine.

The whole gateway in a process of its own, twice: with pacing off and the same five chunks for every question, first
come first served, as a gateway does that knows no time; and ours, every request with a TTFT budget, so that prompts
become smaller under load. Arrivals are those of the same seed. Goodput counts the answers whose first token comes
within the budget; a refusal is a miss.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import uvloop

from bench.corpus import fill_store, synthetic, synthetic_queries
from bench.processes import Server, headstart_server, simulator
from bench.report import Options, Report, parse_options
from gateway.tenants import SINGLE_TENANT
from latency.model import PrefillModel
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder

SEED = 29
CHUNKS = 5
# A middling card: five chunks of the store take about 0.4 s.
ENGINE = PrefillModel(fixed_s=0.010, per_token_s=0.00012, per_pair_s=2e-9)
WINDOW_TOKENS = 16_384
ANSWER_WORDS = 16
DECODE_TOKENS_PER_S = 200
OVERLOAD = 2.0
BUDGET_PREFILLS = 4.0
NORMAL = 1.5
WARM_UP = 24
PROBE_EVERY_S = 0.25
RECOVERY_LIMIT_S = 30.0
MEMORY_GROWTH_MIB = 64.0


@dataclass(frozen=True, slots=True)
class Sizes:
    load_s: float
    chunks: int


FULL = Sizes(load_s=60.0, chunks=4_000)
QUICK = Sizes(load_s=6.0, chunks=600)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ttft_s` runs from sending to the first event; None for a refusal, `retry_after_ms` then as stated."""

    status: int
    ttft_s: float | None
    refused_s: float = 0.0
    retry_after_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """One arm under the load. Memory in MiB, recovery in seconds from the last arrival."""

    outcomes: tuple[Outcome, ...]
    rss_before: float
    rss_peak: float
    rss_after: float
    recovery_s: float

    def within(self, budget_s: float) -> int:
        return sum(one.ttft_s is not None and one.ttft_s <= budget_s for one in self.outcomes)


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    settings: Mapping[str, str]
    budget_s: float | None


async def measure(options: Options) -> int:
    sizes = QUICK if options.quick else FULL
    report = Report("overload")
    with tempfile.TemporaryDirectory() as folder:
        store_id, questions = await asyncio.to_thread(_filled_store, Path(folder), sizes)
        prefill_s = await _prefill_s(Path(folder), store_id, questions)
        rate, budget_s = OVERLOAD / prefill_s, BUDGET_PREFILLS * prefill_s
        arrivals = _arrivals(rate, sizes.load_s)
        report.note(
            f"{CHUNKS} chunks take {prefill_s * 1000:.0f} ms on the idle engine: {rate:.1f} requests/s for "
            f"{sizes.load_s:.0f} s, budget {budget_s * 1000:.0f} ms"
        )
        arms = [
            Arm("first come first served, 5 chunks", {"HEADSTART_PACING": "false"}, None),
            Arm("ours, best effort", {}, budget_s),
        ]
        if not options.quick:
            arms.append(Arm("ours, strict", {"HEADSTART_BUDGET_POLICY": "strict"}, budget_s))
        held = [await _hold(arm, Path(folder), store_id, questions, arrivals, prefill_s) for arm in arms]
    _print(report, arms, held, budget_s, sizes.load_s)
    return report.finish(options)


def _engine() -> AbstractAsyncContextManager[Server]:
    model = ENGINE
    return simulator(
        *("--prefill", str(model.fixed_s), str(model.per_token_s), str(model.per_pair_s)),
        *("--max-model-len", str(WINDOW_TOKENS), "--decode-tokens-per-s", str(DECODE_TOKENS_PER_S)),
        *("--answer", "words", "--answer-words", str(ANSWER_WORDS)),
    )


def _filled_store(data_dir: Path, sizes: Sizes) -> tuple[str, list[str]]:
    """A store of synthetic chunks with its database closed again, and questions about them."""
    passages, vectors = synthetic(sizes.chunks)
    embedder = SentenceEmbedder()
    database = Database(data_dir)
    try:
        database.bind_embedding_model(embedder.model_id, vectors.shape[1])
        store_id = fill_store(database, "bench", passages, vectors, SINGLE_TENANT)
    finally:
        database.close()
    return store_id, list(synthetic_queries(passages, vectors, sizes.chunks // 2))


def _arrivals(rate: float, load_s: float) -> list[float]:
    """Times of a Poisson process, seconds from its beginning."""
    rng = random.Random(SEED)
    times: list[float] = []
    at_s = rng.expovariate(rate)
    while at_s < load_s:
        times.append(at_s)
        at_s += rng.expovariate(rate)
    return times


@asynccontextmanager
async def _gateway(settings: Mapping[str, str], folder: Path) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """A fresh engine, a gateway before it, and a client."""
    async with _engine() as engine:
        given = {
            "HEADSTART_ENGINE_URL": engine.url,
            "HEADSTART_DATA_DIR": str(folder),
            "HEADSTART_CACHE_DIR": str(folder / "cache"),
            "HEADSTART_TOP_K": str(CHUNKS),
            **settings,
        }
        async with headstart_server(given) as server:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
                yield server, session


async def _prefill_s(folder: Path, store_id: str, questions: Sequence[str]) -> float:
    """The median TTFT of questions asked one at a time, every one with all its chunks."""
    async with _gateway({"HEADSTART_PACING": "false"}, folder) as (_, session):
        alone = [await _ask(session, store_id, question, None) for question in questions[:WARM_UP]]
    return float(np.median([one.ttft_s for one in alone if one.ttft_s is not None]))


async def _ask(session: aiohttp.ClientSession, store_id: str, question: str, budget_s: float | None) -> Outcome:
    extension: dict[str, object] = {"vector_store_ids": [store_id]}
    if budget_s is not None:
        extension["ttft_budget_ms"] = budget_s * 1000
    body = {
        "model": "sim-model",
        "stream": True,
        "max_tokens": ANSWER_WORDS,
        "messages": [{"role": "user", "content": question}],
        "headstart": extension,
    }
    began_s = time.perf_counter()
    async with session.post(
        "/v1/chat/completions", data=orjson.dumps(body), headers={"content-type": "application/json"}
    ) as response:
        if response.status != 200:
            await response.read()
            after_ms = response.headers.get("retry-after-ms")
            refused_s = time.perf_counter() - began_s
            return Outcome(response.status, None, refused_s, None if after_ms is None else float(after_ms))
        first_s = 0.0
        async for data in response.content.iter_any():
            if not first_s and b"data:" in data:
                first_s = time.perf_counter() - began_s
        return Outcome(200, first_s)


async def _hold(
    arm: Arm, folder: Path, store_id: str, questions: Sequence[str], arrivals: Sequence[float], alone_s: float
) -> Held:
    """The arm under the load, after questions one at a time from which it learns the engine's speed."""
    async with _gateway(arm.settings, folder) as (server, session):
        for question in questions[-WARM_UP:]:
            await _ask(session, store_id, question, arm.budget_s)
        before = peak = server.rss_mib()
        began_s = time.perf_counter()

        async def one(at_s: float, question: str) -> Outcome:
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            return await _ask(session, store_id, question, arm.budget_s)

        asked = [
            asyncio.create_task(one(at_s, questions[number % (len(questions) - WARM_UP)]))
            for number, at_s in enumerate(arrivals)
        ]
        load_s = arrivals[-1]
        while (left_s := began_s + load_s - time.perf_counter()) > 0:
            peak = max(peak, server.rss_mib())
            await asyncio.sleep(min(0.5, left_s))
        recovery_s = await _recovery_s(session, store_id, questions, arm.budget_s, alone_s)
        outcomes = await asyncio.gather(*asked)
        peak = max(peak, server.rss_mib())
        return Held(tuple(outcomes), before, peak, server.rss_mib(), recovery_s)


async def _recovery_s(
    session: aiohttp.ClientSession, store_id: str, questions: Sequence[str], budget_s: float | None, alone_s: float
) -> float:
    """Seconds until a new question is answered as fast as alone; the limit where that takes longer."""
    began_s = time.perf_counter()
    number = 0
    while (passed_s := time.perf_counter() - began_s) < RECOVERY_LIMIT_S:
        number += 1
        try:
            async with asyncio.timeout(RECOVERY_LIMIT_S - passed_s):
                found = await _ask(session, store_id, questions[-number], budget_s)
        except TimeoutError:
            break
        if found.ttft_s is not None and found.ttft_s <= NORMAL * alone_s:
            return passed_s
        await asyncio.sleep(PROBE_EVERY_S)
    return RECOVERY_LIMIT_S


def _print(report: Report, arms: Sequence[Arm], held: Sequence[Held], budget_s: float, load_s: float) -> None:
    rows = []
    for arm, one in zip(arms, held, strict=True):
        answered = np.array([outcome.ttft_s for outcome in one.outcomes if outcome.ttft_s is not None])
        refused = [outcome for outcome in one.outcomes if outcome.ttft_s is None]
        rows.append(
            (
                arm.name,
                one.within(budget_s) / load_s,
                len(one.outcomes),
                one.within(budget_s),
                len(refused),
                float(np.median(answered)) if len(answered) else None,
                float(np.percentile(answered, 95)) if len(answered) else None,
                float(answered.max()) if len(answered) else None,
                float(np.median([outcome.refused_s for outcome in refused])) * 1000 if refused else None,
                one.rss_before,
                one.rss_peak,
                one.rss_after,
                one.recovery_s,
            )
        )
    columns = (
        "arm",
        "goodput /s",
        "requests",
        "in budget",
        "refused",
        "TTFT p50 s",
        "p95 s",
        "longest s",
        "refused after ms",
        "RSS before MiB",
        "peak",
        "after",
        "recovery s",
    )
    report.table(f"Arrivals at {OVERLOAD:g} x capacity for {load_s:.0f} s, budget {budget_s:.2f} s", columns, rows)
    base, ours = held[0], held[1]
    report.at_least("goodput / baseline", ours.within(budget_s) / max(1, base.within(budget_s)), 1.3)
    report.at_most("memory growth of ours, MiB", ours.rss_peak - ours.rss_before, MEMORY_GROWTH_MIB)
    report.at_most("recovery of ours, s", ours.recovery_s, 5.0)
    stated = all(
        outcome.retry_after_ms is not None and outcome.status in (429, 503)
        for one in held[1:]
        for outcome in one.outcomes
        if outcome.ttft_s is None
    )
    report.require("every refusal of ours is 429 or 503 and says when to come again", stated)


def main(arguments: list[str] | None = None) -> int:
    return uvloop.run(measure(parse_options(__doc__ or "", arguments)))


if __name__ == "__main__":
    sys.exit(main())
