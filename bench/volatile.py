"""`python -m bench.volatile`: what a clock in a system text costs, and what moving its line behind it wins.

Questions under a system text of many lines whose second line tells the time, a minute later in each request: each
question alone, and all of them in one conversation. The gateway sends the text as it is (`report`), or moves the line
that changes in front of the question (`move`). The first requests are the same in both arms: from them the gateway
learns which line changes; they are left out.
"""

import datetime
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from bench.gateway_thread import run_gateway, settings_for
from bench.real_engine import EngineUnusable, RealEngine, bench_main, real_engine
from bench.reply import CHAT_PATH
from bench.report import Options, Report

REQUESTS, QUICK_REQUESTS = 12, 6
LEARNED_FROM = 4
LINES = 33
ANSWER_TOKENS = 8
BEGAN = datetime.datetime(2026, 3, 14, 8, 0)
MODES = ("report", "move")
LEAST_CACHED_SHARE = 0.9

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answered:
    text: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int


async def run(options: Options) -> int:
    report = Report("volatile")
    count = QUICK_REQUESTS if options.quick else REQUESTS
    async with real_engine(options.extra.engine_url) as engine:
        answered = {
            (kind, mode): await _arm(engine, kind, mode, count)
            for kind in ("alone", "conversation")
            for mode in MODES
        }
    _print(report, answered, count)
    return report.finish(options)


async def _arm(engine: RealEngine, kind: str, mode: str, count: int) -> list[Answered]:
    """A gateway of its own, whose salt is new: the engine holds nothing of it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_for(Path(folder), engine.url, volatile=mode)
        past: list[Message] = []
        answered = []
        async with run_gateway(settings) as gateway, gateway.session() as session:
            for number in range(count):
                question = {"role": "user", "content": f"Question {number}: when does boat {number * 7} leave?"}
                system = {"role": "system", "content": _system_text(number)}
                answer = await _ask(session, engine.facts.model or "", [system, *past, question])
                answered.append(answer)
                if kind == "conversation":
                    past += [question, {"role": "assistant", "content": answer.text}]
    return answered


def _system_text(minute: int) -> str:
    lines = [
        f"Rule {number}: boats of berth {number * 3} wait for the pilot of pier {number}." for number in range(LINES)
    ]
    lines[1] = f"It is {BEGAN + datetime.timedelta(minutes=minute):%Y-%m-%d %H:%M}."
    return "\n".join(lines)


async def _ask(session: aiohttp.ClientSession, model: str, messages: list[Message]) -> Answered:
    """Raises EngineUnusable for an answer that does not tell its usage."""
    body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    began_s = time.perf_counter()
    async with session.post(CHAT_PATH, json=body) as response:
        raw = await response.read()
    seconds = time.perf_counter() - began_s
    if response.status != 200:
        raise EngineUnusable(f"The gateway answered {response.status}: {raw[:300].decode('utf-8', 'replace')}")
    answer: dict[str, Any] = orjson.loads(raw)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        raise EngineUnusable("Its answers do not tell how many tokens were cached.")
    return Answered(answer["choices"][0]["message"]["content"], seconds, usage["prompt_tokens"], cached)


def _print(report: Report, answered: dict[tuple[str, str], list[Answered]], count: int) -> None:
    rows, shares, medians = [], {}, {}
    for (kind, mode), answers in answered.items():
        counted = answers[LEARNED_FROM:]
        prompt, cached = (
            np.array([[one.prompt_tokens, one.cached_tokens] for one in counted]).sum(axis=0).astype(float).tolist()
        )
        ms = medians[kind, mode] = float(np.median([one.seconds for one in counted])) * 1000
        shares[kind, mode] = cached / prompt
        uncached = [one.prompt_tokens - one.cached_tokens for one in counted]
        rows.append((kind, mode, prompt / len(counted), float(np.median(uncached)), cached / prompt, ms))
    columns = (
        "questions",
        "arm",
        "prompt tokens, mean",
        "uncached p50",
        "cached share",
        f"answer of {ANSWER_TOKENS} tokens, p50 ms",
    )
    report.table(f"{count} requests, a minute apart by their texts; the first {LEARNED_FROM} left out", columns, rows)
    for kind in ("alone", "conversation"):
        report.at_least(f"{kind}: cached share, moved", shares[kind, "move"], LEAST_CACHED_SHARE)
        ratio = medians[kind, "move"] / medians[kind, "report"]
        report.at_most(f"{kind}: time to the answer, moved / as sent", ratio, 1.0)


if __name__ == "__main__":
    sys.exit(bench_main("volatile", __doc__, run, lambda parser: None))
