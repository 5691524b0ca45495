"""What `/metrics` shows of each replica: its queue, its cache, its health, and what is known of its speed."""

import math
from collections.abc import Callable, Mapping

from gateway.metrics import Metrics
from gateway.replica import Replica
from gateway.replicas import Replicas
from latency.speed import SpeedEstimate

Read = Callable[[Replica], float]


def replica_gauges(metrics: Metrics, replicas: Replicas) -> None:
    """Gauges with the label `replica`, read when they are scraped; NaN where something is not known."""
    gauges = {metrics.replica_gauge(name, text): read for (name, text), read in _figures().items()}

    def greet(replica: Replica) -> None:
        for gauge, read in gauges.items():
            gauge.labels(replica.name).set_function(_of(replicas, replica.name, read))

    def part(replica: Replica) -> None:
        # Another replica may have its name by now.
        if replicas.get(replica.name) is None:
            for gauge in gauges:
                gauge.remove(replica.name)

    replicas.on_arrival(greet, part)


def _figures() -> Mapping[tuple[str, str], Read]:
    return {
        ("headstart_replica_usable", "1 while new requests may go to the replica"): lambda replica: replica.usable,
        ("headstart_queued_requests", "Requests that wait for their turn to prefill"): (
            lambda replica: replica.pacer.queued
        ),
        (
            "headstart_prefill_in_flight_tokens",
            "Uncached tokens released to the engine whose first token has not come",
        ): lambda replica: replica.pacer.in_flight_tokens,
        ("headstart_prefill_limit_tokens", "Uncached tokens that are released together"): (
            lambda replica: replica.pacer.limit_tokens
        ),
        ("headstart_decoding_requests", "Answers that are being decoded"): lambda replica: replica.pacer.decoding,
        ("headstart_resident_blocks", "Blocks that the engine's prefix cache is believed to hold"): (
            _count("resident_blocks")
        ),
        ("headstart_evicted_blocks", "Blocks that left that picture because others needed them"): _count("evictions"),
        ("headstart_cached_predictions_exact", "Prompts whose cached tokens were predicted exactly"): _count("exact"),
        ("headstart_cached_predictions_over", "Prompts of which the engine held less than predicted"): _count("over"),
        ("headstart_cached_predictions_under", "Prompts of which the engine held more than predicted"): (
            _count("under")
        ),
        ("headstart_predicted_cached_tokens", "Cached tokens as predicted, of prompts that were reported on"): (
            _count("predicted_tokens")
        ),
        ("headstart_reported_cached_tokens", "Cached tokens of these prompts as the engine reported"): (
            _count("reported_tokens")
        ),
        ("headstart_kv_events_consistent", "1 while KV events tell all that the engine holds, NaN without events"): (
            lambda replica: (
                math.nan if replica.events.state.name == "off" else float(replica.events.state.name == "consistent")
            )
        ),
        ("headstart_kv_events_degraded_seconds", "How long KV events have not told all that the engine holds"): (
            lambda replica: replica.events.degraded_s
        ),
        ("headstart_kv_event_batches", "Batches of KV events that were read"): _events("batches"),
        ("headstart_kv_events_malformed", "KV events that could not be read"): _events("malformed"),
        ("headstart_kv_event_gaps", "Times that batches of KV events were missing"): _events("gaps"),
        ("headstart_kv_event_batches_lost", "Batches of KV events that no replay brought back"): (
            _events("lost_batches")
        ),
        ("headstart_kv_event_restarts", "Restarts of the engine that its KV events showed"): _events("restarts"),
        ("headstart_kv_event_blocks_unknown", "Blocks of KV events whose parent or salt is not known"): (
            lambda replica: replica.events.mapped.unknown_blocks
        ),
        ("headstart_kv_event_collisions", "Block hashes of the engine that named two contents"): (
            lambda replica: replica.events.mapped.collisions
        ),
        ("headstart_prefill_fixed_seconds", "Fitted fixed cost of a prefill"): (
            _speed(lambda speed: speed.prefill.fixed_s)
        ),
        ("headstart_prefill_token_seconds", "Fitted cost of an uncached token"): (
            _speed(lambda speed: speed.prefill.per_token_s)
        ),
        ("headstart_prefill_pair_seconds", "Fitted cost of attention, per pair of tokens"): (
            _speed(lambda speed: speed.prefill.per_pair_s)
        ),
        ("headstart_speed_quantile_factor", "Actual over predicted prefill at the safety quantile"): (
            _speed(lambda speed: speed.factor)
        ),
        ("headstart_speed_drifting", "1 while recent prefills disagree with the fit"): (
            _speed(lambda speed: float(speed.drifting))
        ),
        ("headstart_decode_token_seconds", "Learned time per output token"): (
            _speed(lambda speed: speed.token_s or math.nan)
        ),
    }


def _of(replicas: Replicas, name: str, read: Read) -> Callable[[], float]:
    def figure() -> float:
        replica = replicas.get(name)
        return math.nan if replica is None else read(replica)

    return figure


def _count(name: str) -> Read:
    def figure(replica: Replica) -> float:
        residency = replica.residency
        return 0.0 if residency is None else float(getattr(residency.counts(), name))

    return figure


def _events(name: str) -> Read:
    return lambda replica: float(getattr(replica.events.counts, name))


def _speed(read: Callable[[SpeedEstimate], float]) -> Read:
    def figure(replica: Replica) -> float:
        speed = replica.speed.estimate
        return math.nan if speed is None else read(speed)

    return figure
