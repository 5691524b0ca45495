"""`python -m bench.reuse`: what the order of chunks saves when questions come in bursts by topic, on a real engine.

The handbook of `examples/` and the passages of MTRAG are two stores of a gateway; each arm asks the same questions in
the same order, one at a time, with five chunks each and no budget, of a gateway and an engine that hold nothing yet.
Times are a client's, from sending to the first token: retrieval, ordering and planning are in them.

The greedy arm (a walk down the tree of resident prompts, taking the child with the most resident tokens at each step,
the rest most relevant first) orders the passages of a dry run and sends them as messages: it pays one more exchange
with the gateway, which is told.
"""

import argparse
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from rich.console import Console

from bench.datasets import mtrag
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.prefix_smoke import EXAMPLES, STORE, handbook_questions
from bench.real_engine import EngineUnusable, RealEngine, bench_main, real_engine
from bench.reply import CHAT_PATH, Reply
from bench.report import Options, Report
from cache.residency import Residency
from gateway.cli.client import GatewayClient
from gateway.cli.files import find_documents
from gateway.cli.ingest import ingest_documents
from gateway.settings import Settings
from prompt_builder.outlook import Prefix

QUESTIONS, QUICK_QUESTIONS = 300, 30
BURST = 5
TOP_K = 5
SEED = 33
PASSAGES_STORE = "mtrag"
PROGRESS_S = 30.0
RETRIEVAL_ORDER, SORTED, GREEDY, OURS = "retrieval order", "sorted by label", "greedy", "ours"
ORDERS = {RETRIEVAL_ORDER: "relevance_first", SORTED: "label", GREEDY: "relevance_first", OURS: "reuse"}
MOST_OF_RETRIEVAL_ORDER = 0.75

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """`topic` is the document that answers, or the conversation that it is from; `relevant` are MTRAG's passages."""

    store: str
    topic: str
    text: str
    relevant: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    ttft_s: float
    prompt_tokens: int
    uncached_tokens: int
    labels: frozenset[str]


@dataclass(slots=True)
class GreedyWalk:
    """Which chunks an engine holds behind which, by labels and tokens, as much as it has room for."""

    residency: Residency
    _lengths: dict[str, int] = field(default_factory=dict)

    def order(self, front: int, chunks: Sequence[tuple[str, int]]) -> list[str]:
        """`chunks` with their tokens, most relevant first; `front` tokens come before them in every prompt."""
        self._lengths |= dict(chunks)
        prefix: Prefix = self.residency.prefix().extended(_ids("front", front))
        left, ordered = [label for label, _ in chunks], list[str]()
        while left:
            steps = [prefix.extended(_ids(label, self._lengths[label])) for label in left]
            best = max(range(len(left)), key=lambda place: (steps[place].resident_tokens, -place))
            if steps[best].resident_tokens == prefix.resident_tokens:
                break
            prefix = steps[best]
            ordered.append(left.pop(best))
        ordered += left
        prompt = [i for label in ordered for i in _ids(label, self._lengths[label])]
        lease = self.residency.begin([*_ids("front", front), *prompt])
        self.residency.generated(lease, ())
        self.residency.end(lease)
        return ordered


def _ids(name: str, tokens: int) -> tuple[int, ...]:
    first = zlib.crc32(name.encode()) >> 12
    return tuple(first * 2048 + place for place in range(tokens))


async def run(options: Options) -> int:
    report = Report("reuse")
    count = options.extra.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(real_engine(options.extra.engine_url))
        questions = in_bursts(_questions(count), BURST, SEED)
        await _ingest(report, engine, folder, questions if options.quick else None)
        sent: dict[str, list[Sent]] = {}
        for arm in ORDERS:
            await _forget(engine)
            async with run_gateway(_settings(folder, engine)) as gateway:
                sent[arm] = await _ask_all(gateway, engine, arm, questions)
    _print(report, sent)
    return report.finish(options)


def in_bursts(questions: Sequence[Question], burst: int, seed: int) -> list[Question]:
    """All questions: those of a topic in groups of at most `burst`, the groups of all topics shuffled."""
    topics: dict[str, list[Question]] = {}
    for question in questions:
        topics.setdefault(question.topic, []).append(question)
    groups = [
        of_topic[start : start + burst] for of_topic in topics.values() for start in range(0, len(of_topic), burst)
    ]
    random.Random(seed).shuffle(groups)
    return [question for group in groups for question in group]


def _questions(count: int) -> list[Question]:
    """Half of each store, as far as they go, whole topics first."""
    handbook = [Question(STORE, question.document, question.text) for question in handbook_questions()]
    conversations: list[Question] = []
    topic = 0
    for asked in mtrag().questions:
        topic += asked.previous is None
        conversations.append(Question(PASSAGES_STORE, f"conversation {topic}", asked.text, asked.relevant))
    handbook.sort(key=lambda question: question.topic)
    half = min(count // 2, len(conversations))
    return [*conversations[:half], *handbook[: count - half]]


def _settings(folder: Path, engine: RealEngine) -> Settings:
    return settings_for(folder, engine.url, cache_dir=Settings().cache_dir)


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


async def _ask_all(
    gateway: RunningGateway, engine: RealEngine, arm: str, questions: Sequence[Question]
) -> list[Sent]:
    facts = engine.facts
    if facts.block_size is None or facts.num_blocks is None:
        raise EngineUnusable("It does not tell its KV blocks at /metrics.")
    walk = GreedyWalk(Residency(facts.block_size, facts.num_blocks - 1))
    sent: list[Sent] = []
    began_s = said_s = time.monotonic()
    async with gateway.session() as session:
        # Connections, threads and the embedding model are warm when the first question comes.
        await _asked(session, _body(f"{facts.model}@{STORE}", "Is it warm?", ORDERS[arm]))
        for question in questions:
            body = _body(f"{facts.model}@{question.store}", question.text, ORDERS[arm])
            if arm == GREEDY:
                sent.append(await _asked_greedily(session, body, facts.model or "", walk))
            else:
                sent.append(await _asked(session, body))
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(f"  {arm}: {len(sent)} of {len(questions)}, {said_s - began_s:.0f} s", flush=True)
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


async def _asked_greedily(session: aiohttp.ClientSession, body: Body, model: str, walk: GreedyWalk) -> Sent:
    began_s = time.perf_counter()
    async with session.post("/v1/plan", json=body) as response:
        segments = orjson.loads(await response.read())["segments"]
    chunks = {segment["label"]: segment for segment in segments if segment["kind"] == "chunk"}
    first = next(place for place, segment in enumerate(segments) if segment["kind"] == "chunk")
    front = sum(segment["tokens"] or 0 for segment in segments[:first])
    order = walk.order(front, [(label, chunk["tokens"]) for label, chunk in chunks.items()])
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


def _print(report: Report, sent: dict[str, list[Sent]]) -> None:
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
    report.table(f"{len(base)} questions in bursts by topic, {TOP_K} chunks each", columns, rows)
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
