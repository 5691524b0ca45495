"""What `/metrics` shows of a replica: its queue, its cache, and what is known of its speed."""

import math
from collections.abc import Callable

from gateway.metrics import Metrics
from gateway.replicas import Replica
from latency.speed import SpeedEstimate


def replica_gauges(metrics: Metrics, replica: Replica) -> None:
    """Gauges that are read when they are scraped; NaN where the speed is not known."""
    pacer = replica.pacer
    metrics.gauge("headstart_queued_requests", "Requests that wait for their turn to prefill", lambda: pacer.queued)
    metrics.gauge(
        "headstart_prefill_in_flight_tokens",
        "Uncached tokens released to the engine whose first token has not come",
        lambda: pacer.in_flight_tokens,
    )
    metrics.gauge(
        "headstart_prefill_limit_tokens", "Uncached tokens that are released together", lambda: pacer.limit_tokens
    )
    metrics.gauge("headstart_decoding_requests", "Answers that are being decoded", lambda: pacer.decoding)
    metrics.gauge(
        "headstart_resident_blocks",
        "Blocks that the engine's prefix cache is believed to hold",
        _count(replica, "resident_blocks"),
    )
    for name, text, count in (
        ("headstart_cached_predictions_exact", "Prompts whose cached tokens were predicted exactly", "exact"),
        ("headstart_cached_predictions_over", "Prompts of which the engine held less than predicted", "over"),
        ("headstart_cached_predictions_under", "Prompts of which the engine held more than predicted", "under"),
    ):
        metrics.gauge(name, text, _count(replica, count))
    for name, text, read in (
        ("headstart_prefill_fixed_seconds", "Fitted fixed cost of a prefill", lambda speed: speed.prefill.fixed_s),
        (
            "headstart_prefill_token_seconds",
            "Fitted cost of an uncached token",
            lambda speed: speed.prefill.per_token_s,
        ),
        (
            "headstart_prefill_pair_seconds",
            "Fitted cost of attention, per pair of tokens",
            lambda speed: speed.prefill.per_pair_s,
        ),
        (
            "headstart_speed_quantile_factor",
            "Actual over predicted prefill at the safety quantile",
            lambda speed: speed.factor,
        ),
        (
            "headstart_speed_drifting",
            "1 while recent prefills disagree with the fit",
            lambda speed: float(speed.drifting),
        ),
        ("headstart_decode_token_seconds", "Learned time per output token", lambda speed: speed.token_s or math.nan),
    ):
        metrics.gauge(name, text, _of_speed(replica, read))


def _count(replica: Replica, name: str) -> Callable[[], float]:
    def figure() -> float:
        residency = replica.residency
        return 0.0 if residency is None else float(getattr(residency.counts(), name))

    return figure


def _of_speed(replica: Replica, read: Callable[[SpeedEstimate], float]) -> Callable[[], float]:
    def figure() -> float:
        speed = replica.speed.estimate
        return math.nan if speed is None else read(speed)

    return figure
