"""The engine's Prometheus metrics, under the names that current engines export."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bench.sim.config import SimConfig
from bench.sim.engine import Engine, Sequence

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class EngineMetrics:
    """One registry an engine; gauges are read from the engine when scraped."""

    def __init__(self, config: SimConfig, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": config.model, "engine": "0"}
        names = tuple(labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, names, registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, registry=self.registry, buckets=buckets).labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, names, registry=self.registry).labels(**labels)

        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens.")
        self._generation = counter("generation_tokens", "Generated tokens.")
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time in the waiting queue.", _SECONDS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "Prompt tokens not cached.", _TOKENS)
        gauge("num_requests_running", "Requests in the batch.").set_function(lambda: len(engine.running))
        gauge("num_requests_waiting", "Requests in the queue.").set_function(lambda: len(engine.waiting))
        gauge("kv_cache_usage_perc", "Share of blocks in use.").set_function(
            lambda: engine.pool.used_blocks / max(1, engine.pool.num_blocks - 1)
        )
        information = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            "num_gpu_blocks": str(config.num_gpu_blocks),
        }
        cache = Gauge("vllm:cache_config_info", "Cache configuration.", tuple(information), registry=self.registry)
        cache.labels(**information).set(1)
        self.started = Gauge(
            "process_start_time_seconds", "Start time of the process since unix epoch.", registry=self.registry
        )
        self.started.set(time.time())
        self._finished = Counter(
            "vllm:request_success", "Finished requests.", (*names, "finished_reason"), registry=self.registry
        )
        self._labels = labels
        self._by_reason: dict[str, Counter] = {}

    def first_token(self, sequence: Sequence, now_s: float) -> None:
        """A prompt was computed."""
        self._queries.inc(len(sequence.prompt))
        self._hits.inc(sequence.cached_tokens)
        self._prompt.inc(len(sequence.prompt))
        self._ttft.observe(now_s - sequence.arrived_s)
        self._queue.observe(max(0.0, sequence.scheduled_s - sequence.arrived_s))
        self._computed.observe(sequence.uncached_tokens)

    def finished(self, tokens: int, reason: str) -> None:
        """An answer ended; `reason` is stop, length or abort."""
        self._generation.inc(tokens)
        child = self._by_reason.get(reason)
        if child is None:
            child = self._by_reason[reason] = self._finished.labels(**self._labels, finished_reason=reason)
        child.inc()

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)
