"""What the gateway adds to the engine's time: `python -m bench.overhead`.

Pass-through requests against a bare FastAPI + aiohttp pass-through (`bench.bare_proxy`) before the same simulated
engine, arms in turn; then requests with retrieval over a store of 10,000 chunks, new questions and repeated ones.
"""

import asyncio
import itertools
import sys
import tempfile
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop

from bench.corpus import fill_store, synthetic, synthetic_queries
from bench.load import StreamTimes, percentile_ms, run_streams
from bench.processes import Server, headstart_server, python_server, simulator
from bench.report import Options, Report, bench_command
from gateway.tenants import SINGLE_TENANT
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder

ENGINE_TTFT_MS = 20
CHUNKS = 10_000
ANSWER_WORDS = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    rounds: int
    serial: int
    streams: int
    questions: int
    chunks: int


FULL = Sizes(rounds=8, serial=60, streams=1500, questions=150, chunks=CHUNKS)
QUICK = Sizes(rounds=2, serial=15, streams=200, questions=20, chunks=500)


@dataclass(frozen=True, slots=True)
class Arms:
    """The engine itself, the bare pass-through and ours, in front of one simulator each speed."""

    engine: Server
    bare: Server
    ours: Server


async def measure(options: Options) -> int:
    sizes = QUICK if options.quick else FULL
    report = Report("overhead")
    with tempfile.TemporaryDirectory() as folder:
        store_id, questions = await asyncio.to_thread(_filled_store, Path(folder), sizes)
        async with AsyncExitStack() as stack:
            slow = await stack.enter_async_context(_engine(ENGINE_TTFT_MS))
            behind_slow = await _arms(stack, slow, Path(folder))
            await _first_token(report, behind_slow, sizes)
            await _with_retrieval(report, behind_slow, store_id, questions)
        async with AsyncExitStack() as stack:
            fast = await stack.enter_async_context(_engine(0))
            await _throughput(report, await _arms(stack, fast, Path(folder)), sizes)
    return report.finish(options)


def _engine(ttft_ms: float) -> AbstractAsyncContextManager[Server]:
    words = ("--answer", "words", "--answer-words", str(ANSWER_WORDS), "--decode-tokens-per-s", "0")
    return simulator("--fixed-ttft-ms", str(ttft_ms), *words)


async def _arms(stack: AsyncExitStack, engine: Server, data_dir: Path) -> Arms:
    bare = await stack.enter_async_context(python_server(["-m", "bench.bare_proxy", engine.url]))
    ours = await stack.enter_async_context(
        headstart_server({"HEADSTART_ENGINE_URL": engine.url, "HEADSTART_DATA_DIR": str(data_dir)})
    )
    return Arms(engine, bare, ours)


async def _first_token(report: Report, arms: Arms, sizes: Sizes) -> None:
    times: dict[str, list[float]] = {"engine": [], "bare": [], "ours": []}
    for server in (arms.bare, arms.ours):
        await run_streams(server, itertools.repeat(_plain()), 20, 1)
    for _ in range(sizes.rounds):
        for name, server in (("engine", arms.engine), ("bare", arms.bare), ("ours", arms.ours)):
            done = await run_streams(server, itertools.repeat(_plain()), sizes.serial, 1)
            times[name] += [one.first_s for one in done]
    base = percentile_ms(times["engine"], 0.5)
    rows = [
        (name, percentile_ms(values, 0.5), percentile_ms(values, 0.95), percentile_ms(values, 0.5) - base)
        for name, values in times.items()
    ]
    report.table("Pass-through, one at a time, engine TTFT 20 ms", ("arm", "p50 ms", "p95 ms", "added p50 ms"), rows)
    report.at_most("added TTFT, ours to bare", rows[2][3] / rows[1][3], 1.3)


async def _throughput(report: Report, arms: Arms, sizes: Sizes) -> None:
    rates: dict[str, list[float]] = {"bare": [], "ours": []}
    cpu_ms: dict[str, float] = {"bare": 0.0, "ours": 0.0}
    for server in (arms.bare, arms.ours):
        await run_streams(server, itertools.repeat(_plain()), 200, 16)
    for _ in range(sizes.rounds):
        for name, server in (("bare", arms.bare), ("ours", arms.ours)):
            loop = asyncio.get_running_loop()
            cpu_s, began = server.cpu_s(), loop.time()
            await run_streams(server, itertools.repeat(_plain()), sizes.streams, 16)
            rates[name].append(sizes.streams / (loop.time() - began))
            cpu_ms[name] += (server.cpu_s() - cpu_s) * 1000
    done = sizes.rounds * sizes.streams
    rows = [
        (name, sorted(values)[len(values) // 2], cpu_ms[name] / done, server.rss_mib())
        for (name, values), server in zip(rates.items(), (arms.bare, arms.ours), strict=True)
    ]
    report.table(
        "Pass-through, 16 at a time, engine TTFT 0 ms", ("arm", "streams/s", "CPU ms/stream", "RSS MiB"), rows
    )
    report.at_least("streams/s, ours to bare", rows[1][1] / rows[0][1], 0.9)


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
    return store_id, list(synthetic_queries(passages, vectors, sizes.questions))


async def _with_retrieval(report: Report, arms: Arms, store_id: str, questions: list[str]) -> None:
    bodies = [_asking(store_id, question) for question in questions]
    engine = await run_streams(arms.engine, itertools.repeat(_plain()), len(questions), 1)
    await run_streams(arms.ours, iter([_asking(store_id, "Is it warm?")] * 5), 5, 1)
    new = await run_streams(arms.ours, iter(bodies), len(questions), 1)
    again = await run_streams(arms.ours, iter(bodies), len(questions), 1)
    base = _median_ms(engine)
    rows = [
        ("new questions", _median_ms(new), _median_ms(new) - base),
        ("the same again, embedding cached", _median_ms(again), _median_ms(again) - base),
    ]
    report.table("With retrieval, one at a time, engine TTFT 20 ms", ("arm", "TTFT p50 ms", "added p50 ms"), rows)
    report.at_most("added with retrieval, ms", rows[0][2], 25.0)
    report.at_most("added, embedding cached, ms", rows[1][2], 8.0)


def _median_ms(times: list[StreamTimes]) -> float:
    return percentile_ms([one.first_s for one in times], 0.5)


def _plain() -> bytes:
    messages = [{"role": "user", "content": "Say something of about thirty words, please."}]
    return orjson.dumps({"model": "sim-model", "stream": True, "messages": messages})


def _asking(store_id: str, question: str) -> bytes:
    return orjson.dumps(
        {
            "model": "sim-model",
            "stream": True,
            "messages": [{"role": "user", "content": question}],
            "headstart": {"vector_store_ids": [store_id]},
        }
    )


if __name__ == "__main__":
    sys.exit(bench_command("overhead", __doc__, lambda options: uvloop.run(measure(options))))
