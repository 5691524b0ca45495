"""A replica of `bench.routing` dies in the middle and comes back empty: the TTFT around it."""

from collections.abc import Sequence

import numpy as np

from bench.report import Cell, Report
from bench.routed_traffic import Asked
from bench.routed_world import Arm, Death, Outcome, serve

DIES_AT, BACK_AT = 0.5, 0.6
"""Shares of the whole run."""
WINDOWS = 20
NORMAL = 1.2


def recovery(report: Report, other: Arm, ours: Arm, asked: Sequence[Asked], replicas: int) -> None:
    """Ours must be back sooner than the other."""
    length_s = asked[-1].at_s
    death = Death(DIES_AT * length_s, BACK_AT * length_s)
    window_s = length_s / WINDOWS
    first = int(DIES_AT * WINDOWS)
    rows: list[tuple[Cell, ...]] = []
    recovered_s: dict[str, float] = {}
    for arm in (other, ours):
        with_death = serve(arm, asked, replicas, death).outcomes
        undisturbed = serve(arm, asked, replicas).outcomes
        p90 = [_p90_ms(with_death, n * window_s, window_s) for n in range(WINDOWS)]
        usual = [_p90_ms(undisturbed, n * window_s, window_s) for n in range(WINDOWS)]
        # The traffic has bursts of its own: what a window is compared with is the same window without the death.
        bad = [n for n in range(first, WINDOWS) if p90[n] > NORMAL * usual[n]]
        recovered_s[arm.name] = 0.0 if not bad else (bad[-1] + 1) * window_s - death.at_s
        failed = sum(one.ttft_s is None for one in with_death)
        counts = sum(one.retries > 0 for one in with_death), sum(one.lost for one in with_death), failed
        rows.append((arm.name, *p90[first - 1 : first + 6], recovered_s[arm.name], *counts))
        report.require(f"{arm.name}: every request that had no first byte was answered elsewhere", failed == 0)
    columns = ("p90 ms, windows from one before the death", *("-1", "0", "1", "2", "3", "4", "5"))
    report.table(
        f"One of {replicas} replicas dead from {death.at_s:.1f} to {death.back_s:.1f} s of {length_s:.1f}, "
        f"windows of {window_s:.1f} s",
        (*columns, f"s until within {NORMAL:g}x", "retried", "broken off", "failed"),
        rows,
    )
    sooner = f"s until within {NORMAL:g}x, ours against {recovered_s[other.name]:.1f} of {other.name}"
    report.at_most(sooner, recovered_s[ours.name], recovered_s[other.name])


def _p90_ms(outcomes: Sequence[Outcome], from_s: float, length_s: float) -> float:
    ttfts = [o.ttft_s for o in outcomes if o.ttft_s is not None and from_s <= o.at_s < from_s + length_s]
    return float(np.percentile(ttfts, 90)) * 1000 if ttfts else float("nan")
