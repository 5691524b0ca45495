"""`python -m bench.reuse`: what the order of chunks saves when questions come in bursts by topic, on a real engine.

The handbook of `examples/` and the passages of MTRAG are two stores of a gateway. Each arm gets the same questions,
each once, in bursts of five of a topic that come at the same moment, with five chunks each and no budget; gateway and
engine hold nothing yet when it begins. Times are a client's, from sending to the first token: retrieval, ordering,
planning and the wait for others of the burst are in them.

The arms with an order of another system send a burst's prompts at once, as those systems do; ours releases them in
turn. Two more arms part the effects: ours sent at once, and retrieval order released in turn. The greedy arm orders
the passages of a dry run and sends them as messages: it pays one more exchange with the gateway, some 10 ms.

Beside the arms stands what no order can pass: the uncached tokens of an order chosen with all questions known
beforehand, and those if chunks could be reused at any position.
"""

import argparse
import sys
import tempfile
import time
from asyncio import gather
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from rich.console import Console

from bench.datasets import mtrag
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.prefix_smoke import EXAMPLES, STORE
from bench.real_engine import EngineUnusable, RealEngine, bench_main, real_engine
from bench.reply import CHAT_PATH, Reply
from bench.report import Options, Report
from bench.reuse_questions import PASSAGES_STORE, Question, in_bursts, questions_of
from bench.reuse_walk import GreedyWalk, Wanted, uncached_at_any_position, uncached_if_all_were_known
from cache.residency import Residency
from gateway.cli.client import GatewayClient
from gateway.cli.files import find_documents
from gateway.cli.ingest import ingest_documents
from gateway.settings import Settings

QUESTIONS, QUICK_QUESTIONS = 300, 30
BURST = 5
TOP_K = 5
SEED = 33
PROGRESS_S = 30.0
RETRIEVAL_ORDER, SORTED, GREEDY, OURS = "retrieval order", "sorted by label", "greedy", "ours"
AT_ONCE, IN_TURN = "ours, sent at once", "retrieval order, in turn"
ORDERS = {
    RETRIEVAL_ORDER: "relevance_first",
    SORTED: "label",
    GREEDY: "relevance_first",
    OURS: "reuse",
    AT_ONCE: "reuse",
    IN_TURN: "relevance_first",
}
PACED = (OURS, IN_TURN)
MOST_OF_RETRIEVAL_ORDER = 0.75

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sent:
    ttft_s: float
    prompt_tokens: int
    uncached_tokens: int
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Mean uncached tokens: of an order chosen with all known beforehand, and with reuse at any position."""

    all_known: float
    any_position: float


async def run(options: Options) -> int:
    report = Report("reuse")
    count = options.extra.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(real_engine(options.extra.engine_url))
        bursts = in_bursts(questions_of(count), BURST, SEED)
        asked = [question for burst in bursts for question in burst]
        await _ingest(report, engine, folder, asked if options.quick else None)
        async with run_gateway(_settings(folder, engine, calibrate=True)) as gateway:
            # Kept for the arms: they begin with a speed that is known.
            await gateway.until_calibrated(300)
            bounds = await _bounds(gateway, engine, asked)
        sent: dict[str, list[Sent]] = {}
        for arm in ORDERS:
            await _forget(engine)
            async with run_gateway(_settings(folder, engine, pacing=arm in PACED)) as gateway:
                sent[arm] = await _ask_all(gateway, engine, arm, bursts)
    _print(report, sent, bounds)
    return report.finish(options)


def _settings(folder: Path, engine: RealEngine, **changes: Any) -> Settings:
    return settings_for(folder, engine.url, cache_dir=Settings().cache_dir, **changes)


async def _ingest(report: Report, engine: RealEngine, folder: Path, asked: Sequence[Question] | None) -> None:
    """The two stores of a gateway whose data stay in the folder; where `asked` is given, only what answers that."""
    passages = folder / "passages"
    passages.mkdir()
    wanted = None if asked is None else {place for question in asked for place in question.relevant}
    for number, passage in enumerate(mtrag().passages):
        if wanted is None or number in wanted:
            (passages / f"{number:03}.txt").write_text(passage.text, encoding="utf-8")
    handbook = find_documents([EXAMPLES / STORE])
    if asked is not None:
        topics = {question.topic for question in asked}
        handbook = [document for document in handbook if document.path.name in topics]
    documents = {STORE: handbook, PASSAGES_STORE: find_documents([passages])}
    began_s = time.monotonic()
    async with run_gateway(_settings(folder, engine)) as gateway, GatewayClient(gateway.url) as client:
        for name, some in documents.items():
            outcomes = await ingest_documents(client, name, some, Console(quiet=True))
            failed = [outcome.document.name for outcome in outcomes if outcome.result == "failed"]
            if failed:
                raise EngineUnusable(f"{', '.join(failed)} could not be ingested")
    total = sum(map(len, documents.values()))
    report.note(f"{total} documents ingested in {time.monotonic() - began_s:.0f} s")


async def _forget(engine: RealEngine) -> None:
    """The engine's prefix cache is emptied; the gateway of the arm is new. Raises EngineUnusable."""
    async with aiohttp.ClientSession(engine.url) as session, session.post("/reset_prefix_cache") as response:
        if response.status != 200:
            raise EngineUnusable("It cannot forget its prefix cache: start it with VLLM_SERVER_DEV_MODE=1.")


async def _bounds(gateway: RunningGateway, engine: RealEngine, questions: Sequence[Question]) -> Bounds:
    prompts = []
    async with gateway.session() as session:
        for question in questions:
            body = _body(f"{engine.facts.model}@{question.store}", question.text, ORDERS[RETRIEVAL_ORDER])
            prompts.append(_wanted(await _planned(session, body)))
    return Bounds(
        uncached_if_all_were_known(prompts, engine.facts.block_size or 1), uncached_at_any_position(prompts)
    )


async def _ask_all(
    gateway: RunningGateway, engine: RealEngine, arm: str, bursts: Sequence[Sequence[Question]]
) -> list[Sent]:
    facts = engine.facts
    if facts.block_size is None or facts.num_blocks is None:
        raise EngineUnusable("It does not tell its KV blocks at /metrics.")
    walk = GreedyWalk(Residency(facts.block_size, facts.num_blocks - 1))
    total = sum(map(len, bursts))
    sent: list[Sent] = []
    began_s = said_s = time.monotonic()
    async with gateway.session() as session:

        async def ask(question: Question) -> Sent:
            body = _body(f"{facts.model}@{question.store}", question.text, ORDERS[arm])
            if arm == GREEDY:
                return await _asked_greedily(session, body, facts.model or "", walk)
            return await _asked(session, body)

        # Connections, threads and the embedding model are warm when the first question comes.
        await _asked(session, _body(f"{facts.model}@{STORE}", "Is it warm?", ORDERS[arm]))
        for burst in bursts:
            sent += await gather(*map(ask, burst))
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(f"  {arm}: {len(sent)} of {total}, {said_s - began_s:.0f} s", flush=True)
    return sent


def _body(model: str, question: str, order: str) -> Body:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "headstart": {"top_k": TOP_K, "chunk_order": order, "pin_last": 0},
    }


async def _asked(session: aiohttp.ClientSession, body: Body, began_s: float | None = None) -> Sent:
    """`began_s` where a dry run came before. Raises EngineUnusable for an answer that does not tell its usage."""
    began_s = time.perf_counter() if began_s is None else began_s
    first_s, raw = 0.0, b""
    async with session.post(CHAT_PATH, json=body) as response:
        async for part in response.content.iter_any():
            raw += part
            if not first_s and b"data:" in raw:
                first_s = time.perf_counter() - began_s
        reply = Reply(response.status, {"content-type": response.headers.get("content-type", "")}, raw)
    if reply.status != 200:
        raise EngineUnusable(f"The gateway answered {reply.status}: {raw[:300].decode('utf-8', 'replace')}")
    usage = next((chunk["usage"] for chunk in reply.chunks if chunk.get("usage")), None)
    cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    if usage is None or cached is None:
        raise EngineUnusable("Its answers do not tell how many tokens were cached.")
    citations = (reply.extension or {}).get("citations", ())
    labels = frozenset(citation["label"] for citation in citations)
    return Sent(first_s, usage["prompt_tokens"], usage["prompt_tokens"] - cached, labels)


async def _planned(session: aiohttp.ClientSession, body: Body) -> list[dict[str, Any]]:
    """The segments of a dry run."""
    async with session.post("/v1/plan", json=body) as response:
        segments: list[dict[str, Any]] = orjson.loads(await response.read())["segments"]
        return segments


def _wanted(segments: Sequence[dict[str, Any]]) -> Wanted:
    places = [place for place, segment in enumerate(segments) if segment["kind"] == "chunk"]
    sizes = [segment["tokens"] or 0 for segment in segments]
    chunks = frozenset((segments[place]["label"], sizes[place]) for place in places)
    return Wanted(sum(sizes[: places[0]]), chunks, sum(sizes[places[-1] + 1 :]))


async def _asked_greedily(session: aiohttp.ClientSession, body: Body, model: str, walk: GreedyWalk) -> Sent:
    began_s = time.perf_counter()
    segments = await _planned(session, body)
    chunks = {segment["label"]: segment for segment in segments if segment["kind"] == "chunk"}
    order = walk.order(_wanted(segments).front, [(label, chunk["tokens"]) for label, chunk in chunks.items()])
    moved = iter([chunks[label] for label in order])
    messages: list[dict[str, str]] = []
    texts: list[str] = []
    for segment in segments:
        if segment["kind"] == "scaffold":
            if texts:
                messages.append({"role": "user" if messages else "system", "content": "".join(texts)})
            texts = []
        else:
            texts.append(next(moved)["text"] if segment["kind"] == "chunk" else segment["text"])
    plain = {**{name: value for name, value in body.items() if name != "headstart"}, "model": model}
    sent = await _asked(session, {**plain, "messages": messages}, began_s)
    return Sent(sent.ttft_s, sent.prompt_tokens, sent.uncached_tokens, frozenset(chunks))


def _print(report: Report, sent: dict[str, list[Sent]], bounds: Bounds) -> None:
    ttft_s = {arm: np.array([one.ttft_s for one in requests]) for arm, requests in sent.items()}
    base = ttft_s[RETRIEVAL_ORDER]
    rows = []
    for arm, requests in sent.items():
        prompt = np.array([one.prompt_tokens for one in requests])
        uncached = np.array([one.uncached_tokens for one in requests])
        mean_s = float(ttft_s[arm].mean())
        rows.append(
            (
                arm,
                float(np.median(ttft_s[arm])) * 1000,
                mean_s * 1000,
                float(np.percentile(ttft_s[arm], 95)) * 1000,
                mean_s / float(base.mean()),
                float(np.median(ttft_s[arm]) / np.median(base)),
                float(np.median(prompt)),
                float(np.median(uncached)),
                float(np.mean(uncached)),
                float(1 - uncached.sum() / prompt.sum()),
            )
        )
    columns = (
        "arm",
        "TTFT p50 ms",
        "TTFT mean ms",
        "TTFT p95 ms",
        "mean / retrieval order",
        "p50 / retrieval order",
        "prompt tokens p50",
        "uncached p50",
        "uncached mean",
        "cached share",
    )
    report.table(f"{len(base)} questions in bursts of {BURST} by topic, {TOP_K} chunks each", columns, rows)
    report.note(
        f"uncached tokens, mean: {bounds.all_known:.0f} in an order chosen with all questions known beforehand, "
        f"{bounds.any_position:.0f} with reuse at any position"
    )
    means = {arm: float(times.mean()) for arm, times in ttft_s.items()}
    report.at_most("mean TTFT, ours / retrieval order", means[OURS] / means[RETRIEVAL_ORDER], MOST_OF_RETRIEVAL_ORDER)
    others = min(mean for arm, mean in means.items() if arm != OURS)
    report.at_most("mean TTFT, ours / best other arm", means[OURS] / others, 1.0)
    sets = zip(*([one.labels for one in requests] for requests in sent.values()), strict=True)
    report.require("every arm sent the same chunks", all(len(set(labels)) == 1 for labels in sets))


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=0, metavar="N", help=f"ask N (default {QUESTIONS})")


if __name__ == "__main__":
    sys.exit(bench_main("reuse", __doc__, run, _extend))
