"""Prometheus metrics; no label holds a client's text, a key or an address."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gateway.tallies import Spreads, Tallies
from gateway.timings import Timings

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 60.0)
_GATEWAY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
_RATE_BUCKETS = (5, 10, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 5_120, 10_240, 20_480, 40_960)


class Metrics:
    """One registry per app: two apps in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "headstart_chat_requests_total", "Chat requests by outcome", "status", "retrieval"
        )
        self._ttft = self._histogram("headstart_ttft_seconds", "Arrival to first token", _TTFT_BUCKETS_S).of()
        parts = self._histogram(
            "headstart_ttft_part_seconds",
            "Parts of the time to first token",
            (*_GATEWAY_BUCKETS_S, 2.5, 5.0, 10.0, 30.0),
            "part",
        )
        # Labels are looked up once: these are on the path of every request.
        self._retrieve, self._plan = parts.of("retrieve"), parts.of("plan")
        self._queue, self._prefill = parts.of("queue"), parts.of("prefill")
        tokens = self._counter("headstart_tokens_total", "Tokens by kind: prompt, cached, output", "kind")
        self._prompt, self._cached, self._output = tokens.of("prompt"), tokens.of("cached"), tokens.of("output")
        self._unknown_cached = self._counter(
            "headstart_cached_tokens_unknown_total", "Answers whose engine reported no cached tokens"
        ).of()
        self._count_drift = self._counter(
            "headstart_prompt_count_drift_tokens_total",
            "Absolute difference between our prompt token count and the engine's",
        ).of()
        self._count_exact = self._counter(
            "headstart_prompt_counts_total", "Prompt token counts by agreement", "agree"
        )
        self._predicted = self._histogram(
            "headstart_ttft_actual_to_predicted_ratio", "Time to first token over its prediction", _RATIO_BUCKETS
        ).of()
        self._budgets = self._counter(
            "headstart_budgeted_requests_total",
            "Requests with a TTFT budget: met, missed, refused; the rate of met is the goodput",
            "outcome",
        )
        speeds = self._histogram(
            "headstart_tokens_per_second",
            "Rate of a request's phase: prefill counts uncached tokens, decode output tokens",
            _RATE_BUCKETS,
            "phase",
        )
        self._prefill_rate, self._decode_rate = speeds.of("prefill"), speeds.of("decode")

    def _counter(self, name: str, text: str, *labels: str) -> Tallies:
        return Tallies(name, text, labels, self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Spreads:
        return Spreads(name, text, labels, buckets, self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def replica_gauge(self, name: str, text: str) -> Gauge:
        """A gauge with a value for each replica."""
        return Gauge(name, text, ["replica"], registry=self.registry)

    def observe_call(self, status: int, retrieval: bool, timings: Timings | None, *, refused: bool = False) -> None:
        """`refused`: the request's budget was predicted to be missed, or its wait was too long."""
        self._requests.of(str(status), "yes" if retrieval else "no").inc()
        if refused:
            self._budgets.of("refused").inc()
        if timings is None:
            return
        self._observe_prediction(timings)
        if timings.ttft_ms is not None:
            self._ttft.observe(timings.ttft_ms / 1000)
        if retrieval:
            self._retrieve.observe(timings.retrieve_ms / 1000)
            self._plan.observe(timings.plan_ms / 1000)
        for part, ms in ((self._queue, timings.queue_ms), (self._prefill, timings.prefill_ms)):
            if ms is not None:
                part.observe(ms / 1000)
        if timings.cached_tokens is None:
            self._unknown_cached.inc()
        for kind, count in (
            (self._prompt, timings.prompt_tokens),
            (self._cached, timings.cached_tokens),
            (self._output, timings.output_tokens),
        ):
            if count is not None:
                kind.inc(count)

    def _observe_prediction(self, timings: Timings) -> None:
        predicted = timings.predicted
        if timings.ttft_ms is not None and predicted.ttft_ms:
            self._predicted.observe(timings.ttft_ms / predicted.ttft_ms)
        within = predicted.within_budget(timings.ttft_ms)
        if within is not None:
            self._budgets.of("met" if within else "missed").inc()
        for histogram, rate in (
            (self._prefill_rate, timings.prefill_tokens_per_s),
            (self._decode_rate, timings.decode_tokens_per_s),
        ):
            if rate is not None:
                histogram.observe(rate)

    def observe_count(self, ours: int, engines: int | None) -> None:
        """Whether our count of a prompt was the engine's."""
        if engines is None:
            return
        self._count_exact.of("yes" if ours == engines else "no").inc()
        self._count_drift.inc(abs(ours - engines))

    def render(self) -> bytes:
        return generate_latest(self.registry)
