"""`python -m bench.history`: a long chat without retrieval, a sliding window against folding.

The window arm sends its messages to the engine as any client does: the last turns whose tokens are within the high
mark, cut by a turn whenever they are not. Ours goes through the whole gateway over HTTP, with the same mark, as a
named conversation. Both hold the same script, turn by turn, on a simulated card and on the real engine; answers have
equal lengths. Between two turns the user thinks: until the gateway's background work is done, at most a quarter of a
minute.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console

from bench.answer import Answer
from bench.chat_script import FACTS, FILLER, Fact, chat_script, holds
from bench.engine_sim import AnswerContext, EngineSim, SimConfig
from bench.gateway_thread import RunningGateway, run_gateway, settings_for
from bench.history_arms import Held, Ours, Sizes, Window
from bench.real_engine import bench_main, real_engine
from bench.report import Options, Report
from gateway.engine.prepare import prepare_model
from gateway.engine.progress import Steps
from gateway.settings import Settings, process_environment
from latency.model import PrefillModel
from prompt_builder.history import mean_uncached_tokens
from prompt_builder.tokenizer import load_tokenizer
from prompt_builder.types import Tokenizer

SEED = 20
PROGRESS_S = 15.0
LEAST_SHARE_OF_WINDOW = 0.25
MOST_P95 = 1.5

# What the simulated card takes (8B on one large GPU), four times as slow: the times stand out from the noise here.
CARD = PrefillModel(fixed_s=0.008, per_token_s=31e-6, per_pair_s=1.3e-9)
CARD_SCALE = 4.0


SIMULATED = Sizes(turns=80, high_tokens=4096, answer_tokens=110)
REAL = Sizes(turns=80, high_tokens=1200, answer_tokens=48)
QUICK_SIMULATED = Sizes(turns=30, high_tokens=900, answer_tokens=60)
QUICK_REAL = Sizes(turns=20, high_tokens=400, answer_tokens=20)


async def run(options: Options) -> int:
    report = Report("history")
    folder = options.extra.model_dir or await asyncio.to_thread(
        prepare_model, Settings().cache_dir, process_environment(), Steps(Console())
    )
    tokenizer = await asyncio.to_thread(load_tokenizer, folder)
    if options.extra.only != "real":
        sizes = QUICK_SIMULATED if options.quick else SIMULATED
        config = SimConfig(
            model_dir=folder,
            prefill=CARD,
            time_scale=CARD_SCALE,
            decode_tokens_per_s=4000.0,
            answer=_simulated_answer,
        )
        async with EngineSim(config) as sim:
            arms = await _chat(sim.url, folder, tokenizer, sizes)
            _print(report, "simulated card", sizes, *arms, background=_background(sim))
    if options.extra.only != "simulator":
        sizes = QUICK_REAL if options.quick else REAL
        async with real_engine(options.extra.engine_url) as engine:
            arms = await _chat(engine.url, folder, tokenizer, sizes)
            _print(report, "real engine", sizes, *arms, background=None)
    return report.finish(options)


async def _chat(url: str, folder: Path, tokenizer: Tokenizer, sizes: Sizes) -> tuple[Held, Held]:
    """The script in both arms, turn by turn, in an order drawn anew."""
    rng = random.Random(SEED)
    script = chat_script(sizes.turns, SEED)
    answers: tuple[list[Answer], list[Answer]] = ([], [])
    async with contextlib.AsyncExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        changes = {"tokenizer": str(folder), "summary": "engine", "fold_high_tokens": sizes.high_tokens}
        gateway = await stack.enter_async_context(run_gateway(settings_for(data, url, **changes)))
        model = await _served_model(gateway)
        window_session = await stack.enter_async_context(_session(url))
        ours = Ours(gateway, await stack.enter_async_context(_session(gateway.url)), model, sizes)
        window = Window(window_session, model, tokenizer, sizes, f"{time.time_ns():x}")
        said_s = began = time.monotonic()
        for turn, text in enumerate(script):
            for arm in rng.sample((0, 1), 2):
                # The window arm has nothing to do in the background, but ours may not disturb it.
                answers[arm].append(await (window, ours)[arm].say(text))
                await ours.think()
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                print(f"  {turn + 1} of {len(script)} turns in 2 arms, {said_s - began:.0f} s", flush=True)
        return Held(tuple(answers[0])), await ours.held(answers[1])


def _simulated_answer(context: AnswerContext) -> str:
    """Words enough for any limit; asked for a summary, the engine of a simulation knows no facts."""
    return "They talked about boats and what a beginner should know of them. " if _summarises(context) else FILLER * 8


def _summarises(context: AnswerContext) -> bool:
    return "Summarise the conversation" in context.question()


def _background(sim: EngineSim) -> int:
    """Uncached tokens that the gateway computed in idle time."""
    own = [request for request in sim.generations if _is_background(request.body)]
    return sum(len(request.prompt_token_ids) - (request.cached_tokens or 0) for request in own)


def _is_background(body: Mapping[str, Any]) -> bool:
    asked = body["messages"][-1]["content"] if body.get("messages") else ""
    return asked == "." or asked.startswith("Summarise the conversation")


def _print(report: Report, engine: str, sizes: Sizes, window: Held, ours: Held, *, background: int | None) -> None:
    rows = []
    for name, held in (("sliding window", window), ("ours, folded", ours)):
        uncached = np.array([answer.uncached_tokens for answer in held.answers])
        ttft_ms = np.array([answer.ttft_s for answer in held.answers]) * 1000
        in_background = None if background is None or held is window else background / len(held.answers)
        rows.append(
            (
                name,
                float(np.mean([answer.prompt_tokens for answer in held.answers])),
                float(uncached.mean()),
                float(np.median(uncached)),
                int(uncached.max()),
                in_background,
                float(np.median(ttft_ms)),
                float(np.percentile(ttft_ms, 95)),
                float(np.percentile(ttft_ms, 95) / np.median(ttft_ms)),
                _share(held.answers),
            )
        )
    columns = (
        "arm",
        "prompt tokens mean",
        "uncached mean",
        "uncached p50",
        "uncached max",
        "in the background a turn",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "p95 / p50",
        "facts in the answers",
    )
    title = f"{engine}: {sizes.turns} turns, high mark {sizes.high_tokens}, low {sizes.marks.low_tokens} tokens"
    report.table(title, columns, rows)
    _note(report, sizes, window, ours)
    report.at_most(f"{engine}: mean uncached tokens, ours / window", rows[1][2] / rows[0][2], LEAST_SHARE_OF_WINDOW)
    report.at_most(f"{engine}: TTFT p95 / p50 of ours", rows[1][8], MOST_P95)
    report.require(f"{engine}: at least one fold", ours.folds > 0)


def _note(report: Report, sizes: Sizes, window: Held, ours: Held) -> None:
    planted = FACTS[: sizes.turns // 4]
    # The fact number n stands in turn 2n + 1, messages 4n + 2 and 4n + 3 of the past.
    folded = [fact for number, fact in enumerate(planted) if 4 * number + 3 < ours.folded]
    found = [fact for fact in folded if holds(ours.summary, fact)]
    growth = float(np.mean(np.diff([answer.prompt_tokens for answer in window.answers[:10]])))
    new = float(np.median([answer.uncached_tokens for answer in ours.answers]))
    expected = mean_uncached_tokens(new, growth, sizes.marks)
    report.note(
        f"{ours.folds} folds; {ours.folded} of {2 * sizes.turns} messages are in a summary of "
        f"{len(ours.summary.split())} words, which holds {len(found)} of the {len(folded)} facts that were told in "
        f"them. The arithmetic, growth {growth:.0f} tokens a turn: {expected:.0f} uncached tokens a turn, the "
        "background's included."
    )


def _share(answers: Sequence[Answer]) -> float:
    """Of the facts asked for at the end, the share whose words are in the answers."""
    asked: list[tuple[Answer, Fact]] = list(
        zip(reversed(answers), reversed(FACTS[: len(answers) // 4]), strict=False)
    )
    return sum(holds(answer.text, fact) for answer, fact in asked) / max(1, len(asked))


@contextlib.asynccontextmanager
async def _session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(300)) as session:
        yield session


async def _served_model(gateway: RunningGateway) -> str:
    async with gateway.client() as client:
        return (await client.models.list()).data[0].id


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("simulator", "real"), help="one of the two engines")
    parser.add_argument("--model-dir", type=Path, help="the served model's tokenizer (default: the packaged model)")


if __name__ == "__main__":
    sys.exit(bench_main("history", __doc__, run, _extend))
