"""`python -m bench.budget`: what a TTFT budget buys, by fixed policies and by the planner.

XQuAD English and Vietnamese: the product's retriever and prompts, budgets that allow so many uncached tokens (all of
the prompt but the system front, which the engine holds), and the share of prompts whose chunks hold the answer's
words; some of the prompts are sent to the engine. MTRAG: whole conversations on the engine under budgets of seconds,
beside fixed numbers of chunks: who keeps the budget, and who shows the reference passages.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.budget_arms import Arms, Material, arms
from bench.budget_mtrag import measure_mtrag
from bench.budget_xquad import confirm, materials, measure, print_fit
from bench.datasets import xquad
from bench.real_engine import LIMITS, EngineUnusable, RealEngine, bench_main, real_engine
from bench.report import Options, Report
from gateway.backends.facts import EngineFacts
from gateway.backends.vllm import EngineSession
from gateway.calibration import Calibration, Probe
from gateway.calibration_steps import Bounds
from gateway.serving import Serving, make_serving
from gateway.settings import Settings
from latency.learner import SpeedLearner

QUICK_QUESTIONS = 60
CONFIRMED = 100
QUICK_CONFIRMED = 4
QUICK_TURNS = 2
# Ninety-nine of a hundred are to be in time: the default of 0.95 promises less.
SAFETY_QUANTILE = 0.995


async def run(options: Options) -> int:
    report = Report("budget")
    if options.extra.tokenizer:
        await _xquad(report, arms(await _serving(options.extra.tokenizer)), options)
        report.note("MTRAG was left out: it needs an engine.")
        return report.finish(options)
    async with real_engine(options.extra.engine_url) as engine:
        serving = await engine.serving(rendering="auto")
        learner = await _calibrated(engine)
        if options.extra.only != "mtrag":
            chosen = arms(serving)
            asked = await _xquad(report, chosen, options)
            if learner.estimate is None:
                raise EngineUnusable("Its speed could not be measured.")
            count = QUICK_CONFIRMED if options.quick else CONFIRMED
            await confirm(report, engine, chosen, asked, learner.estimate, count)
        if options.extra.only != "xquad":
            conversations, turns = (1, QUICK_TURNS) if options.quick else (options.extra.conversations, 0)
            await measure_mtrag(report, engine, serving, learner, conversations, turns)
    return report.finish(options)


async def _xquad(report: Report, chosen: Arms, options: Options) -> Sequence[Material]:
    sets = []
    for language in ("en", "vi"):
        data = xquad(language)
        if options.quick:
            step = len(data.questions) // QUICK_QUESTIONS | 1
            data = replace(data, questions=data.questions[::step][:QUICK_QUESTIONS])
        sets.append((data, await materials(data, chosen.ours.serving)))
        measure(report, *sets[-1], chosen, strictly=not options.quick)
    print_fit(report, sets, options.extra.fit)
    return [material for _, asked in sets for material in asked]


async def _serving(tokenizer: str) -> Serving:
    serving = await asyncio.to_thread(make_serving, Settings(tokenizer=tokenizer), EngineFacts(reachable=False))
    if not serving.tokenizer.exact or serving.template is None:
        raise EngineUnusable(f"no tokenizer and chat template in {tokenizer}")
    return serving


async def _calibrated(engine: RealEngine) -> SpeedLearner:
    settings = Settings()
    async with EngineSession(LIMITS) as session:
        probe = Probe(session, engine.url, settings.engine_api_key, LIMITS, engine.facts)
        calibration = Calibration(probe, Bounds.of(engine.facts), SAFETY_QUANTILE)
        await calibration.run()
    return calibration.learned()


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("xquad", "mtrag"), default="", help="one of the two halves")
    parser.add_argument("--conversations", type=int, default=0, metavar="N", help="the first N of MTRAG's 20")
    parser.add_argument("--fit", action="store_true", help="fit anew where answers stand in a chunk")
    parser.add_argument("--tokenizer", default="", metavar="FOLDER", help="XQuAD alone, without an engine")


if __name__ == "__main__":
    sys.exit(bench_main("budget", __doc__, run, _extend))
