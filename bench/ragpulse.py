"""`python -m bench.ragpulse`: how much of a real RAG service's prompts each order of passages lets an engine reuse.

RAGPulse's requests one after the other on one replica with blocks of 16 tokens, the same passages in every arm; its
cache is the gateway's own picture of an engine's (`cache.residency`), unlimited or of 1,000,000 or 200,000 tokens.
Each arm begins with nothing cached and nothing counted, and sees each request once: nothing is known of the future.
Both halves of the trace are printed apart, so that what was tuned on one shows in the other.
A second table says what our order costs, a third how the memory of its counts grows under 1,000,000 requests whose
chunks are drawn by Zipf's law.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.ragpulse_memory import memory_curve
from bench.ragpulse_orders import Deepest, Order, Ours, SentTree, baselines
from bench.ragpulse_trace import Logged, Trace, ragpulse
from bench.report import Options, Report, bench_command
from cache.residency import Residency

BLOCK_TOKENS = 16
QUICK_REQUESTS = 1_500
UNLIMITED = 100_000_000
CACHES = {"unlimited": UNLIMITED, "1,000,000 tokens": 1_000_000, "200,000 tokens": 200_000}
LEAST_HIT = {"unlimited": 44.6, "1,000,000 tokens": 44.2, "200,000 tokens": 41.2}
MOST_P50_MS, MOST_P99_MS = 0.3, 1.0
PINS = (1, 2, 3)
MEMORY_REQUESTS, QUICK_MEMORY_REQUESTS = 1_000_000, 50_000


@dataclass(frozen=True, slots=True)
class Reused:
    """Tokens of each request."""

    prompt: np.ndarray
    cached: np.ndarray

    @property
    def hit(self) -> float:
        """Percent of all prompt tokens."""
        return _percent(self.cached, self.prompt)

    def row(self) -> tuple[float, float, float, float, float]:
        half = len(self.prompt) // 2
        uncached = self.prompt - self.cached
        return (
            self.hit,
            _percent(self.cached[:half], self.prompt[:half]),
            _percent(self.cached[half:], self.prompt[half:]),
            float(np.median(uncached)),
            float(np.mean(uncached)),
        )


def run(options: Options) -> int:
    report = Report("ragpulse")
    trace = ragpulse()
    requests = trace.requests[:QUICK_REQUESTS] if options.quick else trace.requests
    columns = ("layout and order", "hit %", "first half", "second half", "uncached p50", "uncached mean")
    took_s: dict[str, list[float]] = {}
    for name, tokens in CACHES.items():
        arms: dict[str, Order | None] = {"as logged": None, **baselines(trace)}
        reused = {arm: replay(trace, requests, order, tokens) for arm, order in arms.items()}
        ours = Ours(trace)
        reused["ours"] = replay(trace, requests, ours, tokens)
        for arm, order in (*arms.items(), ("ours, counting included", ours)):
            if isinstance(order, SentTree | Deepest | Ours):
                took_s.setdefault(arm, []).extend(order.took_s)
            if isinstance(order, SentTree):
                report.note(f"cache {name}: the tree of what was sent holds {order.nodes:,} nodes at the end")
        if tokens == UNLIMITED:
            for pin in PINS:
                reused[f"ours, pin_last {pin}"] = replay(trace, requests, Ours(trace, pin), tokens)
        rows = [(arm, *one.row()) for arm, one in reused.items()]
        report.table(f"{len(requests):,} requests, cache {name}", columns, rows)
        _check(report, options, name, reused)
    _cost(report, took_s)
    memory_curve(report, QUICK_MEMORY_REQUESTS if options.quick else MEMORY_REQUESTS)
    return report.finish(options)


def replay(trace: Trace, requests: Sequence[Logged], order: Order | None, cache_tokens: int) -> Reused:
    """All requests, each computed before the next comes; `order` None: prompts as they were logged."""
    residency = Residency(BLOCK_TOKENS, cache_tokens // BLOCK_TOKENS)
    prompt, cached = [], []
    for request in requests:
        if order is None:
            ids = trace.concatenated((*request.system, *request.passages, *request.rest))
        else:
            front = residency.prefix().extended(trace.joined(request.front))
            passages = (*order.order(request, front), *request.repeated)
            ids = trace.concatenated((*request.front, *passages, *request.volatile, *request.rest))
        lease = residency.begin(ids)
        residency.reconcile(lease, lease.cached_tokens)
        residency.end(lease)
        prompt.append(len(ids))
        cached.append(lease.cached_tokens)
    return Reused(np.array(prompt), np.array(cached))


def _check(report: Report, options: Options, cache: str, reused: dict[str, Reused]) -> None:
    ours = reused["ours"].hit
    if not options.quick:
        report.at_least(f"hit %, {cache}", ours, LEAST_HIT[cache])
    best = max(one.hit for arm, one in reused.items() if not arm.startswith("ours"))
    report.at_least(f"ours / best other, {cache}", ours / best, 1.0)


def _cost(report: Report, took_s: Mapping[str, Sequence[float]]) -> None:
    rows = []
    for arm, seconds in took_s.items():
        took_ms = np.array(seconds) * 1000
        p50, p90, p99 = (float(np.percentile(took_ms, share)) for share in (50, 90, 99))
        rows.append((arm, p50, p90, p99, float(np.mean(took_ms))))
    report.table("What orders cost a request, ms of processor time", ("order", "p50", "p90", "p99", "mean"), rows)
    report.at_most("order ms p50", p50, MOST_P50_MS)
    report.at_most("order ms p99", p99, MOST_P99_MS)


def _percent(part: np.ndarray, whole: np.ndarray) -> float:
    return float(100 * part.sum() / whole.sum())


if __name__ == "__main__":
    sys.exit(bench_command("ragpulse", __doc__, run))
