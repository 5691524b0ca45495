"""`python -m bench.routing`: which replica answers first, by the rules of routers in use and by ours.

RAGPulse's requests in virtual time on 8 and 32 simulated engines like a model of 8 billion parameters on a card of
the data centre, with real step batching and block pools; the same prompts at the same moments in every arm. Capacity
is the rate at which the fleet gives first tokens under our routing when it is offered more than it can bear.
Round robin's is printed beside it. Other routers send at once; ours lets prefills wait for their turn, and is also
shown without. The last row is a bound that no router can pass: every request alone on an engine that holds whatever
any engine has computed. Then one of 8 replicas dies at 0.85 of capacity and comes back empty.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.datasets import DataMissing
from bench.report import Options, Report, parse_options
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
OVERLOAD = 1.3
UNLIMITED_BLOCKS = 10**7

ROUND_ROBIN = Arm("round robin", RoundRobin)
LEAST_OUTSTANDING = Arm("least outstanding", LeastOutstanding)
SENT_AT_ONCE = Arm("ours, sent at once", Ours, pictured=True)
OURS = Arm("ours", Ours, pictured=True, paced=True)
ARMS = (
    ROUND_ROBIN,
    LEAST_OUTSTANDING,
    Arm("consistent hash on session", ConsistentHash),
    Arm("the same, loads bounded at 1.25", lambda: ConsistentHash(1.25)),
    Arm("prefix tree without load", LongestPrefix, pictured=True),
    Arm("prefix and queue scored 2 to 1", Score, pictured=True),
    Arm("fewest uncached tokens in flight", FewestUncached, pictured=True),
    SENT_AT_ONCE,
    OURS,
)
BOUND = Arm("bound: alone, all caches in one", RoundRobin)
COLUMNS = ("arm", "TTFT p50 ms", "p90", "p99", "mean", "hit %", "p90 / round robin's", "cached foreseen %")


def run(options: Options) -> int:
    report = Report("routing")
    traffic = logged_traffic(QUICK_REQUESTS if options.quick else None)
    report.note(
        f"{len(traffic.asked):,} requests; an engine: {CARD.fixed_s * 1e3:g} ms + {CARD.per_token_s * 1e6:g} us a "
        f"token + {CARD.per_pair_s * 1e9:g} ns a pair, {DECODE_STEP_S * 1e3:g} ms a decode step, "
        f"{KV_TOKENS:,} tokens of cache"
    )
    for replicas in QUICK_FLEETS if options.quick else FLEETS:
        robin_per_s = sustained_per_s(ROUND_ROBIN, traffic.at_once(), replicas)
        per_s = sustained_per_s(SENT_AT_ONCE, traffic.at_rate(OVERLOAD * robin_per_s), replicas)
        report.note(f"{replicas} replicas: capacity {per_s:.1f} requests/s; round robin sustains {robin_per_s:.1f}")
        for load in LOADS:
            _compare(report, traffic, replicas, load, load * per_s)
        if replicas == FLEETS[0]:
            recovery(report, (LEAST_OUTSTANDING, OURS), traffic.at_rate(HIGH * per_s), replicas)
    return report.finish(options)


def sustained_per_s(arm: Arm, asked: Sequence[Asked], replicas: int) -> float:
    """First tokens a second between the first fifth of them and the last; the arrivals are more than can be borne."""
    first_s = np.sort([one.at_s + (one.ttft_s or 0.0) for one in serve(arm, asked, replicas).outcomes])
    begin, end = len(first_s) // 5, len(first_s) * 4 // 5
    return float((end - begin) / (first_s[end] - first_s[begin]))


def alone(asked: Sequence[Asked]) -> Served:
    """Each request on an idle engine that holds all that was ever computed: no router does better."""
    residency = Residency(BLOCK_TOKENS, UNLIMITED_BLOCKS)
    outcomes = []
    for one in asked:
        lease = residency.begin(one.ids, hashes=one.hashes)
        residency.reconcile(lease, lease.cached_tokens)
        residency.end(lease)
        count, cached = len(one.ids), lease.cached_tokens
        outcomes.append(Outcome(one.at_s, count, CARD.predict_s(count - cached, cached), cached))
    return Served(tuple(outcomes))


def _compare(report: Report, traffic: Traffic, replicas: int, load: float, per_s: float) -> None:
    asked = traffic.at_rate(per_s)
    served = {arm.name: serve(arm, asked, replicas).behind(WARM_UP_SHARE) for arm in ARMS}
    base = served[ROUND_ROBIN.name].ttft_ms(90)
    rows = [_row(arm, served[arm.name], base) for arm in ARMS]
    rows.append(_row(BOUND, alone(asked).behind(WARM_UP_SHARE), base))
    report.table(f"{replicas} replicas at {load:g} of capacity, {per_s:.1f} requests/s", COLUMNS, rows)
    ours = served[OURS.name].ttft_ms(90)
    others = min(one.ttft_ms(90) for name, one in served.items() if not name.startswith(OURS.name))
    report.at_most(f"p90 of ours / best other, {replicas} at {load:g}", ours / others, 1.0)
    if load == HIGH:
        report.at_most(f"p90 of ours / round robin, {replicas} at {load:g}", ours / base, MOST_OF_ROUND_ROBIN)


def _row(arm: Arm, served: Served, base_ms: float) -> tuple[str | float | None, ...]:
    p50, p90, p99 = (served.ttft_ms(percent) for percent in (50, 90, 99))
    mean = float(served.ttfts_s.mean()) * 1000
    return arm.name, p50, p90, p99, mean, served.hit, p90 / base_ms, served.exact if arm.pictured else None


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    try:
        status = run(parse_options(__doc__ or "", arguments))
    except DataMissing as missing:
        print(f"MISSED routing: {missing}")
        return 1
    print(f"{time.monotonic() - began:.0f} s, {time.process_time():.0f} s of a processor", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
