"""`python -m bench.routing`: which system answers first: routers in use, with the prompts they get, and ours.

RAGPulse's requests in virtual time on 8 and 32 simulated engines like a model of 8 billion parameters on a card of
the data centre, with real step batching and block pools. Each arm is a whole system. A router gets the prompt that
the application built, passages as they were retrieved, and sends it at once (the volatile part of the system text
stands behind the passages already, which is more than it would find). Ours builds the prompt for the replica: its
order of the passages, its choice of the replica, its pacing, all three as the gateway does it. Below them parts of
ours alone, and other rules given our order, so that one sees what each is worth.

Capacity is the rate at which round robin gives first tokens when all requests are offered at once, between the first
and the last fifth of them. The order and the distances of the arrivals are the log's, except that every 20 requests,
about an hour of the log, take the same time: without that the service would be idle at night and overloaded at
noon. Two more tables say what another evening does. The last row is a bound for prompts in our order: every
request alone on an engine that decodes nothing and holds whatever any engine has computed. Then one of 8 replicas
dies at 0.85 of capacity and comes back empty.

A run takes one week of the log (`--week`); the first tenth of its requests, which meet empty caches, is left out.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from bench.report import Options, Report, bench_command
from bench.routed_arms import (
    ConsistentHash,
    FewestUncached,
    LeastOutstanding,
    LongestPrefix,
    Ours,
    RoundRobin,
    Score,
)
from bench.routed_engine import CARD, DECODE_STEP_S, KV_TOKENS
from bench.routed_prompts import Ordered
from bench.routed_recovery import recovery
from bench.routed_traffic import BLOCK_TOKENS, Asked, Traffic, logged_traffic
from bench.routed_world import Arm, Outcome, Served, serve
from cache.residency import Residency

FLEETS, QUICK_FLEETS = (8, 32), (8,)
LOADS = (0.6, 0.85)
HIGH = 0.85
QUICK_REQUESTS = 1_200
WARM_UP_SHARE = 0.1
MOST_OF_ROUND_ROBIN = 0.6
OTHER_EVENINGS = (1, 200)
UNLIMITED_BLOCKS = 10**7

ROUND_ROBIN = Arm("round robin", RoundRobin)
LEAST_OUTSTANDING = Arm("least outstanding", LeastOutstanding)
ROUTERS: tuple[Arm, ...] = (
    ROUND_ROBIN,
    LEAST_OUTSTANDING,
    Arm("consistent hash on session", ConsistentHash),
    Arm("the same, loads bounded at 1.25", lambda: ConsistentHash(1.25)),
    Arm("prefix tree without load", LongestPrefix, pictured=True),
    Arm("prefix and queue scored 2 to 1", Score, pictured=True),
    Arm("fewest uncached tokens in flight", FewestUncached, pictured=True),
)
OURS = Arm("ours: order, routing, pacing", lambda: Ours(Ordered()), pictured=True, paced=True)
AT_ONCE = Arm("ours without pacing", lambda: Ours(Ordered()), pictured=True)
PARTS: tuple[Arm, ...] = (
    AT_ONCE,
    Arm("our routing alone", Ours, pictured=True),
    Arm("round robin, our order", lambda: RoundRobin(Ordered()), pictured=True),
    Arm("scored 2 to 1, our order", lambda: Score(Ordered()), pictured=True),
    Arm("fewest uncached, our order", lambda: FewestUncached(Ordered()), pictured=True),
)
BOUND = "bound: alone, all caches in one"
COLUMNS = ("arm", "TTFT p50 ms", "p90", "p99", "mean", "hit %", "p90 / round robin's", "cached foreseen %")


def run(options: Options) -> int:
    report = Report("routing")
    traffic = logged_traffic(options.extra.week, QUICK_REQUESTS if options.quick else None)
    report.note(
        f"week {options.extra.week} of the log, {len(traffic.asked):,} requests; an engine: "
        f"{CARD.fixed_s * 1e3:g} ms + {CARD.per_token_s * 1e6:g} us a token + {CARD.per_pair_s * 1e9:g} ns a pair, "
        f"{DECODE_STEP_S * 1e3:g} ms a decode step, {KV_TOKENS:,} tokens of cache"
    )
    for replicas in options.extra.fleet or (QUICK_FLEETS if options.quick else FLEETS):
        per_s = sustained_per_s(ROUND_ROBIN, traffic.at_once(), replicas)
        report.note(f"{replicas} replicas: capacity {per_s:.1f} requests/s, what round robin sustains")
        best = ROUND_ROBIN
        for load in options.extra.load or LOADS:
            best = _compare(report, traffic, replicas, load, load * per_s)
        if replicas == FLEETS[0]:
            for every in OTHER_EVENINGS:
                _evening(report, traffic.at_rate(HIGH * per_s, every), replicas, every, best)
            recovery(report, LEAST_OUTSTANDING, OURS, traffic.at_rate(HIGH * per_s), replicas)
    return report.finish(options)


def sustained_per_s(arm: Arm, asked: Sequence[Asked], replicas: int) -> float:
    """First tokens a second between the first fifth of them and the last; the arrivals are more than can be borne."""
    first_s = np.sort([one.at_s + (one.ttft_s or 0.0) for one in serve(arm, asked, replicas).outcomes])
    begin, end = len(first_s) // 5, len(first_s) * 4 // 5
    return float((end - begin) / (first_s[end] - first_s[begin]))


def alone(asked: Sequence[Asked]) -> Served:
    """Each request on an idle engine that holds all that was ever computed: with our order no router does better."""
    residency, writing = Residency(BLOCK_TOKENS, UNLIMITED_BLOCKS), Ordered()
    outcomes = []
    for one in asked:
        ids = writing.ordered(one, residency.prefix(tree=writing.tree(one)))
        writing.sent(one)
        lease = residency.begin(ids)
        residency.reconcile(lease, lease.cached_tokens)
        residency.end(lease)
        count, cached = len(ids), lease.cached_tokens
        outcomes.append(Outcome(one.at_s, count, CARD.predict_s(count - cached, cached), cached))
    return Served(tuple(outcomes))


def _compare(report: Report, traffic: Traffic, replicas: int, load: float, per_s: float) -> Arm:
    """The router with the least p90 comes back."""
    asked = traffic.at_rate(per_s)
    arms: tuple[Arm, ...] = (*ROUTERS, OURS, *(PARTS if load == HIGH else PARTS[:1]))
    served = {arm: serve(arm, asked, replicas).behind(WARM_UP_SHARE) for arm in arms}
    base = served[ROUND_ROBIN].ttft_ms(90)
    rows = [_row(arm.name, one, base, told=arm.pictured) for arm, one in served.items()]
    rows.append(_row(BOUND, alone(asked).behind(WARM_UP_SHARE), base))
    report.table(f"{replicas} replicas at {load:g} of capacity, {per_s:.1f} requests/s", COLUMNS, rows)
    ours = served[OURS].ttft_ms(90)
    best = min(ROUTERS, key=lambda arm: served[arm].ttft_ms(90))
    report.at_most(f"p90 of ours / best other, {replicas} at {load:g}", ours / served[best].ttft_ms(90), 1.0)
    if load == HIGH:
        report.at_most(f"p90 of ours / round robin, {replicas} at {load:g}", ours / base, MOST_OF_ROUND_ROBIN)
    return best


def _evening(report: Report, asked: Sequence[Asked], replicas: int, every: int, best: Arm) -> None:
    arms = dict.fromkeys((ROUND_ROBIN, best, OURS, AT_ONCE))
    served = {arm: serve(arm, asked, replicas).behind(WARM_UP_SHARE) for arm in arms}
    base = served[ROUND_ROBIN].ttft_ms(90)
    rows = [_row(arm.name, one, base, told=arm.pictured) for arm, one in served.items()]
    report.table(f"{replicas} replicas at {HIGH:g}, arrivals evened every {every} requests", COLUMNS, rows)


def _row(name: str, served: Served, base_ms: float, *, told: bool = False) -> tuple[str | float | None, ...]:
    p50, p90, p99 = (served.ttft_ms(percent) for percent in (50, 90, 99))
    mean = float(served.ttfts_s.mean()) * 1000
    return name, p50, p90, p99, mean, served.hit, p90 / base_ms, served.exact if told else None


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--week", type=int, choices=(1, 2), default=1, help="of the log (default: 1)")
    parser.add_argument("--fleet", type=int, action="append", metavar="N", help="replicas (default: 8, and 32)")
    loads = " and ".join(f"{load:g}" for load in LOADS)
    parser.add_argument("--load", type=float, action="append", metavar="X", help=f"of capacity (default: {loads})")


if __name__ == "__main__":
    sys.exit(bench_command("routing", __doc__, run, _extend))
