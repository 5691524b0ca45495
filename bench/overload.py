"""`python -m bench.overload`: twice the load that the engine can bear, for a minute, on the simulated engine.

The whole gateway in a process of its own, in three arms: with pacing off and the same five chunks for every question,
first come first served, as a gateway does that knows no time; and ours, every request with a TTFT budget, so that
prompts become smaller under load, once answering as well as it can and once refusing what is predicted to be late.
Arrivals are those of the same seed. Goodput counts the answers whose first token comes within the budget; a refusal
is a miss.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from bench.overloaded import CHUNKS, Arm, Held, World, poisson
from bench.report import Options, Report, bench_command
from gateway.engine.prepare import prepare_model
from gateway.engine.progress import Steps
from gateway.settings import Settings, process_environment

SEED = 29
OVERLOAD = 2.0
BUDGET_PREFILLS = 4.0
# What the bounded memories of tokenized texts, sentences and calls may take until they are full.
MEMORY_GROWTH_MIB = 128.0
RECOVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Sizes:
    load_s: float
    chunks: int
    warm_up: int


FULL = Sizes(load_s=60.0, chunks=4_000, warm_up=30)
QUICK = Sizes(load_s=6.0, chunks=600, warm_up=10)


async def measure(options: Options) -> int:
    sizes = QUICK if options.quick else FULL
    report = Report("overload")
    model_dir = options.extra.model_dir or await asyncio.to_thread(
        prepare_model, Settings().cache_dir, process_environment(), Steps(Console())
    )
    with tempfile.TemporaryDirectory() as folder:
        world = await asyncio.to_thread(World, Path(folder), model_dir, sizes.chunks, sizes.warm_up)
        alone_s = await world.alone_s()
        rate, budget_s = OVERLOAD / alone_s, BUDGET_PREFILLS * alone_s
        arrivals = poisson(rate, sizes.load_s, SEED)
        report.note(
            f"{CHUNKS} chunks take {alone_s * 1000:.0f} ms on the idle engine: {rate:.1f} requests/s for "
            f"{sizes.load_s:.0f} s, budget {budget_s * 1000:.0f} ms"
        )
        arms = [
            Arm(f"first come first served, {CHUNKS} chunks", {"HEADSTART_PACING": "false"}, None),
            Arm("ours, best effort", {}, budget_s),
            Arm("ours, strict", {"HEADSTART_BUDGET_POLICY": "strict"}, budget_s),
        ]
        held = [await world.hold(arm, arrivals, alone_s) for arm in arms]
    _print(report, arms, held, budget_s, sizes.load_s)
    return report.finish(options)


def _print(report: Report, arms: Sequence[Arm], held: Sequence[Held], budget_s: float, load_s: float) -> None:
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
    rows = [_row(arm, one, budget_s, load_s) for arm, one in zip(arms, held, strict=True)]
    report.table(f"Arrivals at {OVERLOAD:g} x capacity for {load_s:.0f} s, budget {budget_s:.2f} s", columns, rows)
    base, best_effort, strict = held
    report.at_least("goodput / baseline", best_effort.within(budget_s) / max(1, base.within(budget_s)), 1.3)
    report.at_least("strict goodput / baseline", strict.within(budget_s) / max(1, base.within(budget_s)), 1.3)
    for name, one in (("best effort", best_effort), ("strict", strict)):
        report.at_most(f"memory growth, {name}, MiB", one.rss_peak - one.rss_before, MEMORY_GROWTH_MIB)
        report.at_most(f"recovery, {name}, s", one.recovery_s, RECOVERY_S)
    refusals = [outcome for one in held[1:] for outcome in one.outcomes if outcome.ttft_s is None]
    said = all(refusal.status in (429, 503) and refusal.retry_after_ms is not None for refusal in refusals)
    report.require("every refusal of ours is 429 or 503 and says when to come again", said)


def _row(arm: Arm, held: Held, budget_s: float, load_s: float) -> tuple[str | float | int | None, ...]:
    ttft_s = np.array([outcome.ttft_s for outcome in held.outcomes if outcome.ttft_s is not None])
    refused_ms = [outcome.refused_s * 1000 for outcome in held.outcomes if outcome.ttft_s is None]
    return (
        arm.name,
        held.within(budget_s) / load_s,
        len(held.outcomes),
        held.within(budget_s),
        len(refused_ms),
        float(np.median(ttft_s)) if len(ttft_s) else None,
        float(np.percentile(ttft_s, 95)) if len(ttft_s) else None,
        float(ttft_s.max()) if len(ttft_s) else None,
        float(np.median(refused_ms)) if refused_ms else None,
        held.rss_before,
        held.rss_peak,
        held.rss_after,
        held.recovery_s,
    )


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-dir", type=Path, default=None, metavar="FOLDER", help="of a tokenizer (default: the packaged model)"
    )


if __name__ == "__main__":
    sys.exit(bench_command("overload", __doc__, lambda options: uvloop.run(measure(options)), _extend))
