"""`python -m bench.predict`: how well the TTFT of requests is foretold on the real engine.

A calibration as the gateway does it, then mixed requests on the idle engine (64 to 1,500 uncached tokens behind 0 to
3,000 cached ones), each foretold before it is sent: uncached and cached tokens from the gateway's picture of what the
engine holds, time from its model, which learns from every answer. In the same run, on the same requests: the model as
the calibration left it, and the plain rate of seconds per token. Then four clients at once, through the gateway's
pacer, foretold when they arrive (with the wait in the queue) and again when they are released.
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from bench.foretold import BASES, Ask, Outcome, Rig
from bench.real_engine import LIMITS, EngineUnusable, RealEngine, bench_main, real_engine
from bench.report import Options, Report
from gateway.backends.vllm import EngineSession
from gateway.calibration import Calibration, Probe, fit_errors, is_noisy
from gateway.calibration_steps import Bounds
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed

IDLE = 200
QUICK_IDLE = 12
BURST = 100
QUICK_BURST = 12
CLIENTS = 4
BASE_TOKENS = 3000
QUICK_BASE_TOKENS = 512
UNCACHED = (64, 1500)
QUICK_UNCACHED = (32, 256)
UNCACHED_ONLY = 0.25
PROGRESS_S = 20.0


async def run(options: Options) -> int:
    report = Report("predict")
    base_tokens = QUICK_BASE_TOKENS if options.quick else BASE_TOKENS
    async with real_engine(options.extra.engine_url) as engine, EngineSession(LIMITS) as session:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(engine_url=engine.url, data_dir=Path(folder))
            async with ReplicaSpeed(settings) as speed:
                rig = Rig(engine, session, speed, base_tokens)
                speed.facts_changed(engine.facts)
                await speed.settled()
                await _calibrate(report, rig, engine, session, settings)
                asks = _mix(rig.rng, options, (options.extra.requests or IDLE), QUICK_IDLE)
                for base in range(BASES):
                    await rig.warm(Ask(base, base_tokens, 0))
                idle = await _one_by_one(rig, asks)
                burst = _mix(rig.rng, options, BURST, QUICK_BURST)
                at_once = await _clients(rig, burst)
    _judge(report, idle, at_once)
    return report.finish(options)


async def _calibrate(
    report: Report, rig: Rig, engine: RealEngine, session: aiohttp.ClientSession, settings: Settings
) -> None:
    """As the gateway does it on first contact. The baselines know these samples and nothing else."""
    probe = Probe(session, engine.url, settings.engine_api_key, LIMITS, engine.facts)
    calibration = Calibration(probe, Bounds.of(engine.facts), settings.safety_quantile)
    began_s = time.monotonic()
    await calibration.run()
    took_s = time.monotonic() - began_s
    key, _ = await rig.speed.uncalibrated()
    rig.speed.calibrated(key, calibration.samples)
    await rig.speed.settled()
    rig.frozen = calibration.learned().estimate
    if rig.frozen is None or rig.speed.estimate is None:
        raise EngineUnusable("The calibration gave no model.")
    cold = [sample for sample in calibration.samples if sample.step.kind != "warm"]
    rig.rate_s = sum(sample.ttft_s for sample in cold) / sum(sample.uncached_tokens for sample in cold)
    errors = np.array(fit_errors(rig.frozen.prefill, calibration.samples))
    model = rig.frozen.prefill
    if is_noisy(model, calibration.samples):
        report.note("The engine was not idle during the calibration: these are figures of a busy machine.")
    report.table(
        "Calibration",
        ("requests", "seconds", "a ms", "b ms", "g µs", "mean error %", "max error %", "plain rate ms/token"),
        [
            (
                len(calibration.samples),
                took_s,
                model.fixed_s * 1e3,
                model.per_token_s * 1e3,
                model.per_pair_s * 1e6,
                float(errors.mean() * 100),
                float(errors.max() * 100),
                rig.rate_s * 1e3,
            )
        ],
    )


def _mix(rng: random.Random, options: Options, count: int, quick_count: int) -> list[Ask]:
    """Sizes spread evenly in their logarithm; a quarter of the requests finds nothing cached."""
    low, high = QUICK_UNCACHED if options.quick else UNCACHED
    deepest = QUICK_BASE_TOKENS if options.quick else BASE_TOKENS
    asks = []
    for _ in range(quick_count if options.quick else count):
        new = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        cached = 0 if rng.random() < UNCACHED_ONLY else rng.randint(1, deepest)
        asks.append(Ask(rng.randrange(BASES), cached, new))
    return asks


async def _one_by_one(rig: Rig, asks: Sequence[Ask]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    began_s = said_s = time.monotonic()
    for ask in asks:
        await rig.warm(ask)
        outcomes.append(await rig.ask(ask))
        # The learner runs beside the requests; here the next one is foretold by all that came before.
        await rig.speed.settled()
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print(f"  {len(outcomes)} of {len(asks)} requests, {said_s - began_s:.0f} s", flush=True)
    return outcomes


async def _clients(rig: Rig, asks: Sequence[Ask]) -> list[Outcome]:
    """Each client sends its next request when it has its answer."""
    waiting = list(reversed(asks))
    outcomes: list[Outcome] = []

    async def client() -> None:
        while waiting:
            outcomes.append(await rig.ask(waiting.pop()))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return outcomes


COLUMNS = ("prediction", "requests", "mean error %", "p95 error %", "median ratio actual / predicted")


def _judge(report: Report, idle: Sequence[Outcome], at_once: Sequence[Outcome]) -> None:
    ours = _row("ours, learning", [(o.on_arrival_s, o.ttft_s) for o in idle])
    report.table(
        f"Idle engine, {len(idle)} mixed requests, foretold before each was sent",
        COLUMNS,
        [
            ours.cells,
            _row("as calibrated, not learning", [(o.frozen_s, o.ttft_s) for o in idle]).cells,
            _row("plain seconds per token", [(o.rate_s, o.ttft_s) for o in idle]).cells,
        ],
    )
    exact = sum(outcome.cached_tokens == outcome.reported_cached_tokens for outcome in (*idle, *at_once))
    report.note(f"cached tokens foretold exactly: {exact} of {len(idle) + len(at_once)}")
    total = _row("ours, whole TTFT on arrival", [(o.on_arrival_s, o.ttft_s) for o in at_once])
    alone = [outcome for outcome in at_once if outcome.alone]
    report.table(
        f"{CLIENTS} clients at once, paced, {len(at_once)} requests",
        COLUMNS,
        [
            total.cells,
            _row("ours, engine's part on release", [(o.on_release_s, o.engine_s) for o in alone]).cells,
            _row("as calibrated, whole TTFT on arrival", [(o.frozen_s, o.ttft_s) for o in at_once]).cells,
            _row("plain rate, whole TTFT on arrival", [(o.rate_s, o.ttft_s) for o in at_once]).cells,
        ],
    )
    report.note(f"{len(at_once) - len(alone)} requests were released beside others and share their steps")
    report.at_most("idle mean error %", ours.mean_percent, 4.0)
    report.at_most("idle p95 error %", ours.p95_percent, 10.0)
    report.at_most(f"{CLIENTS} clients, whole TTFT on arrival, mean error %", total.mean_percent, 10.0)


@dataclass(frozen=True, slots=True)
class Row:
    """Errors are |predicted / actual - 1|."""

    name: str
    requests: int
    mean_percent: float
    p95_percent: float
    ratio: float

    @property
    def cells(self) -> tuple[str | int | float | None, ...]:
        figures = (self.mean_percent, self.p95_percent, self.ratio)
        return self.name, self.requests, *(figures if self.requests else (None, None, None))


def _row(name: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """From (predicted, actual)."""
    if not pairs:
        return Row(name, 0, math.nan, math.nan, math.nan)
    predicted, actual = np.array(pairs).T
    percent = 100 * np.abs(predicted / actual - 1)
    ratio = float(np.median(actual / predicted))
    return Row(name, len(pairs), float(percent.mean()), float(np.quantile(percent, 0.95)), ratio)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=0, help=f"requests on the idle engine (default {IDLE})")


if __name__ == "__main__":
    sys.exit(bench_main("predict", __doc__, run, _extend))
