"""What prompts of 100,000 tokens cost the gateway: `python -m bench.long_prompts`.

The same requests straight to the simulated engine and through the gateway, in turn: a long system text that is new,
one that is sent again with a history that grows, a history of many messages that grows, and retrieval behind one
that keeps the passages of its turns. Meanwhile small requests ask how soon the gateway's event loop answers.
"""

import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import orjson
import uvloop

from bench.corpus import synthetic
from bench.datasets import mtrag
from bench.load import percentile_ms, run_streams
from bench.processes import Server, headstart_server, simulator
from bench.report import Cell, Options, Report, bench_command
from gateway.backends.facts import EngineFacts
from gateway.engine.prepare import MODEL_NAME
from gateway.serving import Serving, make_serving
from gateway.settings import Settings
from gateway.tenants import SINGLE_TENANT
from retrieval.chunk_rows import text_sha256
from retrieval.database import Database
from retrieval.embedding import SentenceEmbedder
from retrieval.records import NewChunk

PROMPT_TOKENS = 100_000
WINDOW_TOKENS = 1_000_000
ENGINE_TTFT_MS = 20
ROUNDS, QUICK_ROUNDS = 25, 6
PASSAGES = 2_000
MOST_PASSAGES, FEW_PASSAGES = 50, 5
MESSAGES = 400
MOST_ADDED_MS = 30.0
MOST_LAG_MS = 10.0
PROBE_S = 0.004
SEED = 41

ANSWER = "Aye."

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pair:
    """One request, for the gateway and, with as much to read, for the engine itself."""

    ours: bytes
    direct: bytes


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    pairs: Sequence[Pair]


class Prose:
    """Sentences of the MTRAG passages in an order of its own, cut by tokens."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self._random = random.Random(seed)
        self._sentences = [
            f"{sentence.strip()}. "
            for passage in mtrag().passages
            for sentence in passage.text.split(". ")
            if sentence.strip()
        ]
        self._tokens = [serving.tokenizer.count(sentence) for sentence in self._sentences]

    def text(self, tokens: int) -> str:
        """About so many tokens, different at each call."""
        parts, left = [f"({self._random.randrange(10**9)}) "], tokens
        while left > 0:
            place = self._random.randrange(len(self._sentences))
            parts.append(self._sentences[place])
            left -= self._tokens[place]
        return "".join(parts)

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(1000, 40_000) for _ in range(count)]


async def measure(options: Options) -> int:
    report = Report("long_prompts")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    serving = await asyncio.to_thread(make_serving, Settings(tokenizer=MODEL_NAME), EngineFacts(reachable=False))
    if not serving.tokenizer.exact:
        raise SystemExit("The packaged model is not prepared: run 'headstart engine' or 'make demo' once.")
    prose = Prose(serving, SEED)
    with tempfile.TemporaryDirectory() as folder:
        store_id = await asyncio.to_thread(_filled_store, Path(folder), serving)
        settings = {
            "HEADSTART_DATA_DIR": folder,
            "HEADSTART_TOKENIZER": MODEL_NAME,
            "HEADSTART_RENDERING": "kept",
            "HEADSTART_CALIBRATE": "false",
            "HEADSTART_SUMMARY": "off",
            "HEADSTART_PREWARM": "false",
        }
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(_engine())
            ours = await stack.enter_async_context(headstart_server({**settings, "HEADSTART_ENGINE_URL": engine.url}))
            cases = [
                _new_texts(prose, rounds),
                _growing(prose, rounds, "the same long system text, growing history", PROMPT_TOKENS, 0),
                _growing(prose, rounds, f"{MESSAGES} messages, growing history", 0, MESSAGES),
                await _retrieval(prose, ours, store_id, rounds),
            ]
            await _compare(report, engine, ours, cases)
    return report.finish(options)


def _engine() -> AbstractAsyncContextManager[Server]:
    sizes = ("--max-model-len", str(WINDOW_TOKENS), "--fixed-ttft-ms", str(ENGINE_TTFT_MS))
    return simulator(*sizes, "--answer", f"text:{ANSWER}", "--decode-tokens-per-s", "0")


def _filled_store(data_dir: Path, serving: Serving) -> str:
    """Rendered for the served model: the gateway has nothing to do over when it starts."""
    passages, vectors = synthetic(PASSAGES)
    database = Database(data_dir)
    try:
        database.bind_embedding_model(SentenceEmbedder().model_id, vectors.shape[1])
        store = database.stores.create(SINGLE_TENANT, "bench")
        file = database.files.create(SINGLE_TENANT, "bench.txt", b"bench")
        claimed = database.store_files.attach(SINGLE_TENANT, store.id, file.id)
        rows = []
        for ordinal, (passage, vector) in enumerate(zip(passages, vectors, strict=True)):
            rendered = serving.renderer.render(passage.title, passage.text)
            rows.append(
                NewChunk(
                    ordinal=ordinal,
                    title=passage.title,
                    text=passage.text,
                    label=rendered.label,
                    prompt_text=rendered.text,
                    token_ids=np.array(rendered.token_ids, dtype=np.int32),
                    renderer_fingerprint=serving.renderer.fingerprint,
                    text_sha256=text_sha256(passage.title, passage.text),
                    embedding=vector,
                )
            )
        database.chunks.replace(claimed, rows)
        return store.id
    finally:
        database.close()


def _new_texts(prose: Prose, rounds: int) -> Case:
    bodies = [
        _body([_message("system", prose.text(PROMPT_TOKENS)), _message("user", "What is said of the harbour?")])
        for _ in range(rounds + 1)
    ]
    return Case("a new long system text", [Pair(body, body) for body in bodies])


def _growing(prose: Prose, rounds: int, name: str, system_tokens: int, messages: int) -> Case:
    """The first request is as new as those of the case before; it is not measured."""
    sent = [_message("system", prose.text(system_tokens))] if system_tokens else []
    roles = itertools.islice(itertools.cycle(("user", "assistant")), messages)
    sent += [_message(role, prose.text(PROMPT_TOKENS // messages)) for role in roles]
    bodies = []
    for _ in range(rounds + 1):
        sent.append(_message("user", prose.text(30)))
        bodies.append(_body(sent))
        sent.append(_message("assistant", prose.text(200)))
    return Case(name, [Pair(body, body) for body in bodies])


async def _retrieval(prose: Prose, ours: Server, store_id: str, rounds: int) -> Case:
    """Turns of MOST_PASSAGES each until the prompt that keeps them is long enough, then turns of a few."""
    sent: list[dict[str, str]] = []
    extension = {"vector_store_ids": [store_id], "top_k": MOST_PASSAGES}
    tokens = 0
    async with aiohttp.ClientSession(ours.url) as session:
        while tokens < PROMPT_TOKENS:
            sent.append(_message("user", prose.text(20)))
            body = orjson.loads(_body(sent, headstart=extension, stream=False))
            async with session.post("/v1/chat/completions", json=body) as response:
                answer = await response.json()
            tokens = answer["headstart"]["timings"]["prompt_tokens"]
            sent.append(_message("assistant", ANSWER))
    extension["top_k"] = FEW_PASSAGES
    # The engine reads what the gateway sends it: texts of as many tokens, and their ids.
    told = {"prompt_token_ids": prose.ids(tokens)}
    direct = _body([_message("user", prose.text(tokens))], kv_transfer_params=told)
    pairs = []
    for _ in range(rounds + 1):
        sent.append(_message("user", prose.text(20)))
        pairs.append(Pair(_body(sent, headstart=extension), direct))
        sent.append(_message("assistant", ANSWER))
    return Case(f"retrieval behind a history with {tokens:,} tokens of passages", pairs)


async def _compare(report: Report, engine: Server, ours: Server, cases: Sequence[Case]) -> None:
    rows: list[list[Cell]] = []
    worst_ms = 0.0
    with_lag: list[float] = []
    idle = await _lags(ours, asyncio.sleep(1.0))
    for case in cases:
        direct_s, ours_s = [], []
        lags: list[float] = []
        cpu_s = 0.0
        for number, pair in enumerate(case.pairs):
            direct = await run_streams(engine, iter([pair.direct]), 1, 1)
            sent = run_streams(ours, iter([pair.ours]), 1, 1)
            # Every second one alone: whoever asks beside it takes time as well.
            before_s = ours.cpu_s()
            through, beside = (await sent, []) if number % 2 else await _beside(ours, sent)
            if not number:
                continue
            lags += beside
            direct_s.append(direct[0].first_s)
            if number % 2:
                ours_s.append(through[0].first_s)
                cpu_s += ours.cpu_s() - before_s
        added_ms = percentile_ms(ours_s, 0.5) - percentile_ms(direct_s, 0.5)
        worst_ms = max(worst_ms, added_ms)
        with_lag += lags
        figures = [percentile_ms(values, 0.5) for values in (direct_s, ours_s)]
        cpu_ms = cpu_s * 1000 / len(ours_s)
        rows.append([case.name, *figures, added_ms, cpu_ms, percentile_ms(lags, 0.5), percentile_ms(lags, 0.99)])
    columns = (
        "case",
        "direct TTFT p50 ms",
        "ours",
        "added p50 ms",
        "our CPU ms a request",
        "small request beside p50 ms",
        "p99 ms",
    )
    report.table(f"Prompts of {PROMPT_TOKENS:,} tokens, engine TTFT {ENGINE_TTFT_MS} ms", columns, rows)
    idle_ms = percentile_ms(idle, 0.5)
    report.note(f"A small request alone takes {idle_ms:.2f} ms (p99 {percentile_ms(idle, 0.99):.2f} ms).")
    report.at_most("most added TTFT p50 ms", worst_ms, MOST_ADDED_MS)
    report.at_most("a small request beside is late by, p99 ms", percentile_ms(with_lag, 0.99) - idle_ms, MOST_LAG_MS)


async def _lags(server: Server, meanwhile: Awaitable[Any]) -> list[float]:
    return (await _beside(server, meanwhile))[1]


async def _beside(server: Server, meanwhile: Awaitable[Result]) -> tuple[Result, list[float]]:
    """The result, and the seconds that small requests took until it was there: the event loop's lag, mostly."""
    taken: list[float] = []
    async with aiohttp.ClientSession(server.url) as session:

        async def probe() -> None:
            while True:
                began_s = time.perf_counter()
                async with session.get("/healthz") as response:
                    await response.read()
                taken.append(time.perf_counter() - began_s)
                await asyncio.sleep(PROBE_S)

        probing = asyncio.create_task(probe())
        await asyncio.sleep(2 * PROBE_S)
        # The first one connects.
        taken.clear()
        result = await meanwhile
        probing.cancel()
        await asyncio.wait([probing])
    return result, taken


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _body(messages: Sequence[dict[str, str]], *, stream: bool = True, **fields: Any) -> bytes:
    return orjson.dumps({"model": "sim-model", "stream": stream, "messages": list(messages), **fields})


if __name__ == "__main__":
    sys.exit(bench_command("long_prompts", __doc__, lambda options: uvloop.run(measure(options))))
