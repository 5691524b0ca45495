"""A gateway under more load than its engine can bear: the world of `bench.overload`."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson

from bench.corpus import fill_store, synthetic, synthetic_queries
from bench.processes import Server, headstart_server, simulator
from gateway.tenants import SINGLE_TENANT
from latency.model import PrefillModel
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder

CHUNKS = 5
# A middling card: five chunks of the store take about 0.2 s.
ENGINE = PrefillModel(fixed_s=0.010, per_token_s=0.00012, per_pair_s=2e-9)
ANSWER_WORDS = 16
DECODE_TOKENS_PER_S = 200
NORMAL = 1.5
CROWDS = 3
PROBE_EVERY_S = 0.25
RECOVERY_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ttft_s` runs from sending to the first event; None for a refusal, which came after `refused_s`."""

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
    """`settings` are HEADSTART_* variables; `budget_s` goes with every request."""

    name: str
    settings: Mapping[str, str]
    budget_s: float | None


@dataclass(frozen=True, slots=True)
class Asker:
    """A gateway in a process of its own, and a client."""

    server: Server
    session: aiohttp.ClientSession
    store_id: str
    budget_s: float | None

    async def ask(self, question: str, top_k: int = CHUNKS) -> Outcome:
        """A streamed answer, read to its end."""
        extension: dict[str, object] = {"vector_store_ids": [self.store_id], "top_k": top_k}
        if self.budget_s is not None:
            extension["ttft_budget_ms"] = self.budget_s * 1000
        body = {
            "model": "sim-model",
            "stream": True,
            "max_tokens": ANSWER_WORDS,
            "messages": [{"role": "user", "content": question}],
            "headstart": extension,
        }
        headers = {"content-type": "application/json"}
        began_s = time.perf_counter()
        async with self.session.post("/v1/chat/completions", data=orjson.dumps(body), headers=headers) as response:
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


class World:
    """A store and its questions; every gateway gets a fresh engine. The last `warm_up` questions warm it up."""

    def __init__(self, folder: Path, model_dir: Path, chunks: int, warm_up: int) -> None:
        self._folder = folder
        self._model_dir = model_dir
        self._warm_up = warm_up
        passages, vectors = synthetic(chunks)
        embedder = SentenceEmbedder()
        database = Database(folder)
        try:
            database.bind_embedding_model(embedder.model_id, vectors.shape[1])
            self._store_id = fill_store(database, "bench", passages, vectors, SINGLE_TENANT)
        finally:
            database.close()
        self._questions = list(synthetic_queries(passages, vectors, chunks // 2))

    async def alone_s(self) -> float:
        """The median TTFT of questions asked one at a time, every one with all its chunks."""
        async with self._gateway(Arm("alone", {"HEADSTART_PACING": "false"}, None)) as asker:
            alone = [await asker.ask(question) for question in self._questions[: self._warm_up]]
        return float(np.median([one.ttft_s for one in alone if one.ttft_s is not None]))

    async def hold(self, arm: Arm, arrivals: Sequence[float], alone_s: float) -> Held:
        """The arm under the load, after questions one at a time from which it learns the engine's speed."""
        asked_alone, asked = self._questions[-self._warm_up :], self._questions[: -self._warm_up]
        async with self._gateway(arm) as asker:
            for number, question in enumerate(asked_alone):
                await asker.ask(question, top_k=1 + number % CHUNKS)
            # Threads and their memory come with the first crowd; what is measured is whether it grows from there.
            await asyncio.gather(*(asker.ask(f"{question} again") for question in asked_alone * CROWDS))
            before = peak = asker.server.rss_mib()
            began_s = time.perf_counter()

            async def one(at_s: float, question: str) -> Outcome:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                return await asker.ask(question)

            asking = [
                asyncio.create_task(one(at_s, asked[number % len(asked)])) for number, at_s in enumerate(arrivals)
            ]
            while (left_s := began_s + arrivals[-1] - time.perf_counter()) > 0:
                await asyncio.sleep(min(0.5, left_s))
                peak = max(peak, asker.server.rss_mib())
            recovery_s = await _recovery_s(asker, asked_alone, NORMAL * alone_s)
            outcomes = await asyncio.gather(*asking)
            after = asker.server.rss_mib()
            return Held(tuple(outcomes), before, max(peak, after), after, recovery_s)

    @asynccontextmanager
    async def _gateway(self, arm: Arm) -> AsyncIterator[Asker]:
        model = ENGINE
        engine = simulator(
            *("--prefill", str(model.fixed_s), str(model.per_token_s), str(model.per_pair_s)),
            *("--model-dir", str(self._model_dir), "--decode-tokens-per-s", str(DECODE_TOKENS_PER_S)),
            *("--answer", "words", "--answer-words", str(ANSWER_WORDS)),
        )
        async with engine as engine_server:
            given = {
                "HEADSTART_ENGINE_URL": engine_server.url,
                "HEADSTART_DATA_DIR": str(self._folder),
                "HEADSTART_CACHE_DIR": str(self._folder / "cache"),
                "HEADSTART_TOKENIZER": str(self._model_dir),
                "HEADSTART_CALIBRATE": "false",
                **arm.settings,
            }
            async with (
                headstart_server(given) as server,
                aiohttp.ClientSession(
                    server.url,
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as session,
            ):
                yield Asker(server, session, self._store_id, arm.budget_s)


def poisson(rate: float, load_s: float, seed: int) -> list[float]:
    """Times of arrival, seconds from the beginning."""
    rng = random.Random(seed)
    times: list[float] = []
    at_s = rng.expovariate(rate)
    while at_s < load_s:
        times.append(at_s)
        at_s += rng.expovariate(rate)
    return times


async def _recovery_s(asker: Asker, questions: Sequence[str], normal_s: float) -> float:
    """Seconds until a new question is answered as fast as alone; the limit where that takes longer."""
    began_s = time.perf_counter()
    number = 0
    while (passed_s := time.perf_counter() - began_s) < RECOVERY_LIMIT_S:
        try:
            async with asyncio.timeout(RECOVERY_LIMIT_S - passed_s):
                found = await asker.ask(questions[number % len(questions)] + f" {number}")
        except TimeoutError:
            break
        if found.ttft_s is not None and found.ttft_s <= normal_s:
            return passed_s
        number += 1
        await asyncio.sleep(PROBE_EVERY_S)
    return RECOVERY_LIMIT_S
