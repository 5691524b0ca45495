"""`python -m bench.budget`: what a TTFT budget buys, by fixed policies and by the planner.

XQuAD English and Vietnamese: the product's retriever and prompts, budgets that allow so many uncached tokens (all of
the prompt but the system front, which the engine holds), and the share of prompts whose chunks hold the answer's
words.
"""

import argparse
import asyncio
import sys
from dataclasses import replace

from bench.budget_arms import arms
from bench.budget_xquad import materials, measure, print_fit
from bench.datasets import xquad
from bench.real_engine import EngineUnusable, bench_main, real_engine
from bench.report import Options, Report
from gateway.backends.facts import EngineFacts
from gateway.serving import Serving, make_serving
from gateway.settings import Settings

QUICK_QUESTIONS = 60


async def run(options: Options) -> int:
    report = Report("budget")
    if options.extra.tokenizer:
        await measure_xquad(report, await _serving(options.extra.tokenizer), options)
        report.note("MTRAG was left out: it needs an engine.")
        return report.finish(options)
    async with real_engine(options.extra.engine_url) as engine:
        await measure_xquad(report, await engine.serving(), options)
    return report.finish(options)


async def measure_xquad(report: Report, serving: Serving, options: Options) -> None:
    chosen = arms(serving)
    asked = []
    for language in ("en", "vi"):
        data = xquad(language)
        if options.quick:
            step = len(data.questions) // QUICK_QUESTIONS | 1
            data = replace(data, questions=data.questions[::step][:QUICK_QUESTIONS])
        asked.append((data, await materials(data, serving)))
        measure(report, *asked[-1], chosen)
    print_fit(report, asked, options.extra.fit)


async def _serving(tokenizer: str) -> Serving:
    serving = await asyncio.to_thread(make_serving, Settings(tokenizer=tokenizer), EngineFacts(reachable=False))
    if not serving.tokenizer.exact or serving.template is None:
        raise EngineUnusable(f"no tokenizer and chat template in {tokenizer}")
    return serving


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fit", action="store_true", help="fit anew where answers stand in a chunk")
    parser.add_argument("--tokenizer", default="", metavar="FOLDER", help="XQuAD alone, without an engine")


if __name__ == "__main__":
    sys.exit(bench_main("budget", __doc__, run, _extend))
