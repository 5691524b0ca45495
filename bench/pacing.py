"""`python -m bench.pacing`: TTFT under bursts and under a steady load, on the real engine.

Bursts of five prompts of 100 to 800 tokens in three arms, in an order drawn anew for every burst: the default engine,
all at once; an engine with its best `--max-num-batched-tokens`, all at once; ours, the product's pacer before the
default engine with the speed that a calibration found. Then arrivals at 0.7 of what the engine can do, first straight
to it and then through the pacer. Prompts are random token ids: nothing is ever cached.

With `--engine-url` the default engine is the one given, and without `--tuned-url` there is no tuned arm.
"""

import argparse
import asyncio
import random
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np

from bench.calibrated import embedded_engine, measured_speed
from bench.real_engine import EngineUnusable, RealEngine, bench_main, real_engine
from bench.report import Options, Report
from gateway.pacing import Pacer, Prefill
from latency.speed import SpeedEstimate
from prompt_builder.types import Message, Prompt

SEED = 23
SIZES = (100, 800)
IDS = (1_000, 30_000)
LOAD = 0.7
REST_S = 0.3
STEP_TOKENS = (128, 256, 512)


@dataclass(frozen=True, slots=True)
class Sizes:
    bursts: int
    burst: int
    trials: int
    steady_s: float


FULL = Sizes(bursts=30, burst=5, trials=4, steady_s=180.0)
QUICK = Sizes(bursts=3, burst=5, trials=0, steady_s=10.0)


@dataclass(frozen=True, slots=True)
class Arm:
    """`pacer` None: every prompt goes to the engine as it comes."""

    name: str
    engine: RealEngine
    speed: SpeedEstimate
    pacer: Pacer | None = None

    async def ttft_s(self, tokens: int, rng: random.Random) -> float:
        """Of a new prompt of so many tokens, the wait for its turn included."""
        ids = tuple(rng.randrange(*IDS) for _ in range(tokens))
        prompt = Prompt((), (Message("user", "-"),), ids, tokens, ())
        if self.pacer is None:
            return await self._ask(prompt)
        began_s = time.perf_counter()
        ticket = await self.pacer.enter(Prefill(tokens, 0, self.speed.predict_s(tokens), None))
        try:
            waited_s = time.perf_counter() - began_s
            return waited_s + await self._ask(prompt)
        finally:
            ticket.done()

    async def _ask(self, prompt: Prompt) -> float:
        # Arms and runs draw the same ids: a salt of its own keeps each prompt from what another left in the cache.
        answer = await self.engine.ask(prompt, max_tokens=1, salt=secrets.token_hex(16))
        if answer.cached_tokens:
            raise EngineUnusable("It reuses blocks across cache salts, so that nothing can be compared.")
        return answer.ttft_s


async def run(options: Options) -> int:
    sizes = QUICK if options.quick else FULL
    report = Report("pacing")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(real_engine(options.extra.engine_url))
        speed = await measured_speed(engine)
        model = speed.prefill
        report.note(
            f"engine: {model.fixed_s * 1000:.1f} ms + {model.per_token_s * 1000:.3f} ms a token + "
            f"{model.per_pair_s * 1e6:.2f} µs a pair of tokens"
        )
        pacer = Pacer()
        pacer.learned(speed)
        default = Arm("default engine, all at once", engine, speed)
        ours = Arm("ours, default engine", engine, speed, pacer)
        tuned = await _tuned(stack, options, sizes, report, speed)
        await _bursts(report, sizes, default, tuned, ours)
        await _steady(report, sizes, default, ours)
    return report.finish(options)


async def _tuned(
    stack: AsyncExitStack, options: Options, sizes: Sizes, report: Report, speed: SpeedEstimate
) -> Arm | None:
    """The engine with the step size that serves bursts best of those tried; None where none may be started."""
    name = "tuned engine, all at once"
    if options.extra.tuned_url:
        return Arm(name, await stack.enter_async_context(real_engine(options.extra.tuned_url)), speed)
    if options.extra.engine_url:
        report.note("no tuned arm: --engine-url without --tuned-url")
        return None
    best_tokens = options.extra.step_tokens
    if not best_tokens and sizes.trials:
        rows: list[tuple[int, float]] = []
        for step_tokens in STEP_TOKENS:
            async with embedded_engine(*_flag(step_tokens)) as engine:
                rng = random.Random(SEED)
                tried = [await _burst(Arm(name, engine, speed), _drawn(rng, sizes), rng) for _ in range(sizes.trials)]
            rows.append((step_tokens, float(np.mean(tried))))
        report.table(f"{sizes.trials} bursts each", ("--max-num-batched-tokens", "TTFT mean s"), rows)
        best_tokens = min(rows, key=lambda row: row[1])[0]
    engine = await stack.enter_async_context(embedded_engine(*_flag(best_tokens or STEP_TOKENS[1])))
    return Arm(f"{name} ({best_tokens or STEP_TOKENS[1]})", engine, speed)


def _flag(step_tokens: int) -> tuple[str, str]:
    return "--max-num-batched-tokens", str(step_tokens)


def _drawn(rng: random.Random, sizes: Sizes) -> list[int]:
    return [rng.randint(*SIZES) for _ in range(sizes.burst)]


async def _burst(arm: Arm, lengths: Sequence[int], rng: random.Random) -> list[float]:
    """TTFT of each, all sent in the same moment."""
    ttft_s = await asyncio.gather(*(arm.ttft_s(tokens, random.Random(rng.getrandbits(64))) for tokens in lengths))
    await asyncio.sleep(REST_S)
    return list(ttft_s)


async def _bursts(report: Report, sizes: Sizes, default: Arm, tuned: Arm | None, ours: Arm) -> None:
    arms = [default, ours] if tuned is None else [default, tuned, ours]
    rng = random.Random(SEED + 1)
    for arm in arms:
        await _burst(arm, _drawn(rng, sizes), rng)
    found: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    for _ in range(sizes.bursts):
        lengths = _drawn(rng, sizes)
        for arm in rng.sample(arms, len(arms)):
            found[arm.name].append(await _burst(arm, lengths, rng))
    figures = {name: _figures(bursts) for name, bursts in found.items()}
    report.table(
        f"{sizes.bursts} bursts of {sizes.burst} prompts of {SIZES[0]} to {SIZES[1]} tokens",
        ("arm", "TTFT mean s", "median s", "p95 s", "longest s", "makespan s"),
        [(name, *row) for name, row in figures.items()],
    )
    mean, median, p95, _, makespan = np.array(figures[ours.name]) / np.array(figures[default.name])
    report.at_most("mean TTFT / default", float(mean), 0.70)
    report.at_most("median / default", float(median), 0.60)
    if tuned is not None:
        mean, median, p95, _, _ = np.array(figures[ours.name]) / np.array(figures[tuned.name])
        report.at_most("mean / tuned", float(mean), 0.85)
        report.at_most("median / tuned", float(median), 0.72)
        report.at_most("p95 / tuned", float(p95), 1.05)
    report.at_most("makespan / default", float(makespan), 1.08)


def _figures(bursts: Sequence[Sequence[float]]) -> tuple[float, float, float, float, float]:
    """Mean, median, p95, longest TTFT of all requests, and the mean time of a burst until all have begun."""
    ttft_s = np.array(bursts)
    return (
        float(ttft_s.mean()),
        float(np.median(ttft_s)),
        float(np.percentile(ttft_s, 95)),
        float(ttft_s.max()),
        float(ttft_s.max(axis=-1).mean()),
    )


async def _steady(report: Report, sizes: Sizes, default: Arm, ours: Arm) -> None:
    rng = random.Random(SEED + 2)
    mean_s = float(np.mean([default.speed.predict_s(tokens) for tokens in range(SIZES[0], SIZES[1] + 1)]))
    arrivals: list[tuple[float, int]] = []
    at_s = rng.expovariate(LOAD / mean_s)
    while at_s < sizes.steady_s:
        arrivals.append((at_s, rng.randint(*SIZES)))
        at_s += rng.expovariate(LOAD / mean_s)
    figures = {}
    for arm in (default, ours):
        figures[arm.name] = _figures([await _arrivals(arm, arrivals, random.Random(SEED + 3))])
    report.table(
        f"Steady load at {LOAD} of capacity, {len(arrivals)} requests in {sizes.steady_s:.0f} s",
        ("arm", "TTFT mean s", "median s", "p95 s", "longest s"),
        [(name, *row[:4]) for name, row in figures.items()],
    )
    _, _, p95, longest, _ = np.array(figures[ours.name]) / np.array(figures[default.name])
    report.at_most("steady p95 / default", float(p95), 0.9)
    report.at_most("steady longest / default", float(longest), 1.2)


async def _arrivals(arm: Arm, arrivals: Sequence[tuple[float, int]], rng: random.Random) -> list[float]:
    began_s = time.perf_counter()

    async def one(at_s: float, tokens: int, own: random.Random) -> float:
        await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
        return await arm.ttft_s(tokens, own)

    waiting = [one(at_s, tokens, random.Random(rng.getrandbits(64))) for at_s, tokens in arrivals]
    return list(await asyncio.gather(*waiting))


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tuned-url", default="", metavar="URL", help="a running engine with a smaller step")
    parser.add_argument(
        "--step-tokens", type=int, default=0, metavar="N", help="of the tuned engine (default: the best of some)"
    )


if __name__ == "__main__":
    sys.exit(bench_main("pacing", __doc__, run, _extend))
