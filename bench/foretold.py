"""The gateway's parts that foretell a TTFT, joined as the gateway joins them, with prompts of known cached length."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson

from bench.real_engine import LIMITS, EngineUnusable, RealEngine
from cache.residency import Residency
from gateway.backends.vllm import VllmBackend
from gateway.calibration import usage_at_end
from gateway.pacing import Pacer, Prefill
from gateway.runs import Run, Work
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from gateway.timings import EngineUsage
from latency.speed import Forecast, SpeedEstimate

SEED = 31
BASES = 2
IDS = (1_000, 30_000)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of `cached` tokens of a base and `new` tokens that nothing holds."""

    base: int
    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predictions beside what happened, seconds; tokens as predicted and as the engine said.

    `on_arrival_s` is the whole TTFT with the wait in the queue, `on_release_s` the engine's part, foretold when it
    was sent, beside `engine_s`. `frozen_s` and `rate_s` are the baselines' whole. `alone`: no other prefill was in
    its steps.
    """

    uncached_tokens: int
    cached_tokens: int
    reported_cached_tokens: int | None
    on_arrival_s: float
    on_release_s: float
    frozen_s: float
    rate_s: float
    ttft_s: float
    engine_s: float
    alone: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """`first_s` on the monotonic clock; `engine_s` from when the engine came to the prefill to its first token.

    `cached_tokens` and `foreseen_s` are predictions of the moment of sending.
    """

    cached_tokens: int
    foreseen_s: float
    usage: EngineUsage
    first_s: float
    engine_s: float
    alone: bool


class Rig:
    """The gateway's parts that foretell, joined as the gateway joins them, and the engine."""

    def __init__(
        self, engine: RealEngine, session: aiohttp.ClientSession, speed: ReplicaSpeed, base_tokens: int
    ) -> None:
        facts = engine.facts
        if facts.block_size is None or facts.num_blocks is None:
            raise EngineUnusable("It does not tell its KV blocks at /metrics.")
        self._model = facts.model
        self._backend = VllmBackend(session, engine.url, Settings().engine_api_key, LIMITS)
        self.residency = Residency(facts.block_size, facts.num_blocks - 1)
        self.pacer = Pacer()
        self.speed = speed
        self.speed.on_change(self.pacer.learned)
        self.rng = random.Random(SEED)
        self.salt = f"{time.time_ns():x}"
        self.bases = [self._ids(base_tokens) for _ in range(BASES)]
        self.frozen: SpeedEstimate | None = None
        self.rate_s = 0.0

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(*IDS) for _ in range(count))

    def prompt(self, ask: Ask) -> tuple[int, ...]:
        return self.bases[ask.base][: ask.cached_tokens] + self._ids(ask.new_tokens)

    def cached_now(self, ids: tuple[int, ...]) -> int:
        return self.residency.prefix(self.salt).extended(ids).cached_tokens()

    async def warm(self, ask: Ask) -> None:
        """Brings the base back where other prompts have evicted its end; not measured."""
        base = self.bases[ask.base][: ask.cached_tokens]
        if len(base) - self.cached_now(base) > 2 * self.residency.block_size:
            await self.send(base, forecast=None)

    async def send(self, ids: tuple[int, ...], forecast: Forecast | None) -> Answered:
        """Through pacer and run as in the gateway."""
        job = Prefill(
            uncached_tokens=forecast.uncached_tokens if forecast else len(ids),
            cached_tokens=forecast.cached_tokens if forecast else 0,
            seconds=forecast.prefill_s if forecast else 0.0,
            deadline_s=None,
        )
        ticket = await self.pacer.enter(job)
        work = Work(len(ids), ids, (), forecast, None)
        run = Run(work, ticket, self.residency, self.speed, salt=self.salt, decoding=self.pacer.decoding)
        cached = run.cached_tokens or 0
        estimate = self.speed.estimate
        foreseen_s = math.nan if estimate is None else estimate.predict_s(len(ids) - cached, cached)
        try:
            stream = await self._backend.stream(self._payload(ids))
            run.first_token()
            first_s = time.monotonic()
            usage = await usage_at_end(stream)
            run.answered(usage)
        finally:
            run.close()
        return Answered(cached, foreseen_s, usage, first_s, first_s - ticket.began_s, ticket.alone)

    async def ask(self, ask: Ask) -> Outcome:
        ids = self.prompt(ask)
        arrived_s = time.monotonic()
        forecast = self._forecast(ids)
        answered = await self.send(ids, forecast)
        frozen = self.frozen
        assert frozen is not None
        uncached = len(ids) - answered.cached_tokens
        return Outcome(
            uncached_tokens=uncached,
            cached_tokens=answered.cached_tokens,
            reported_cached_tokens=answered.usage.cached_tokens,
            on_arrival_s=forecast.queue_s + forecast.prefill_s,
            on_release_s=answered.foreseen_s,
            frozen_s=forecast.queue_s + frozen.predict_s(forecast.uncached_tokens, forecast.cached_tokens),
            rate_s=forecast.queue_s + self.rate_s * forecast.uncached_tokens,
            ttft_s=answered.first_s - arrived_s,
            engine_s=answered.engine_s,
            alone=answered.alone,
        )

    def _forecast(self, ids: tuple[int, ...]) -> Forecast:
        estimate = self.speed.estimate
        assert estimate is not None
        cached = self.cached_now(ids)
        prefill_s = estimate.predict_s(len(ids) - cached, cached)
        return Forecast(
            replica="engine",
            cached_tokens=cached,
            uncached_tokens=len(ids) - cached,
            gateway_s=0.0,
            queue_s=self.pacer.wait_s(prefill_s),
            prefill_s=prefill_s,
            safe_prefill_s=estimate.safe_s(len(ids) - cached, cached),
            quantile=estimate.quantile,
        )

    def _payload(self, ids: Sequence[int]) -> bytes:
        return orjson.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": "-"}],
                "kv_transfer_params": {"prompt_token_ids": ids},
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": self.salt,
            }
        )
