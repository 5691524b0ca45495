"""A short calibration of an engine: sending its requests, and what they teach."""

import asyncio
import math
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import aiohttp
import orjson

from gateway.answers import read_usage
from gateway.backends.facts import EngineFacts
from gateway.backends.sse import event_data, split_events
from gateway.backends.vllm import EngineLimits, EngineStream, VllmBackend
from gateway.calibration_steps import Bounds, Sample, Step, next_step
from gateway.errors import ApiError
from gateway.timings import EngineUsage
from latency.learner import SpeedLearner
from latency.model import PrefillModel

# Ordinary tokens of every vocabulary that is served: above control tokens and bytes, below the smallest size.
_IDS = (1_000, 30_000)


class CannotCalibrate(Exception):
    """The engine takes no prompt of token ids, so no prompt's length can be chosen exactly."""


LEAST_S = 1e-6
NOISY = 0.2
"""A calibration half of whose samples are off by more than this share was not alone on the engine."""


def teach(learner: SpeedLearner, samples: Sequence[Sample]) -> None:
    """The samples as a learner takes them; the first request of all, which warms the engine up, teaches nothing.

    A noisy calibration counts as so many requests, and later fits are not held to it.
    """
    for sample in samples:
        if sample.step.kind == "warm":
            continue
        learner.observe_prefill(sample.uncached_tokens, sample.cached_tokens, sample.ttft_s, decoding=sample.decoding)
        if sample.step.kind == "decode" and sample.output_tokens > 1:
            learner.observe_decode(sample.output_tokens - 1, sample.decode_s)
    estimate = learner.estimate
    if estimate is not None and not is_noisy(estimate.prefill, samples):
        learner.calibrated()


def fit_errors(model: PrefillModel, samples: Iterable[Sample]) -> list[float]:
    """|predicted / measured - 1| of each sample that teaches."""
    return [
        abs(model.predict_s(sample.uncached_tokens, sample.cached_tokens) / sample.ttft_s - 1)
        for sample in samples
        if sample.step.kind != "warm"
    ]


def is_noisy(model: PrefillModel, samples: Iterable[Sample]) -> bool:
    """Whether the fit does not describe the samples: single slow ones do not count."""
    errors = fit_errors(model, samples)
    return not errors or statistics.median(errors) > NOISY


def mean_error(model: PrefillModel, samples: Iterable[Sample]) -> float:
    """Mean of `fit_errors`, as a share; infinite for no samples."""
    errors = fit_errors(model, samples)
    return sum(errors) / len(errors) if errors else math.inf


class Calibration:
    """One calibration. It can be cancelled at any time and goes on where it stopped; its samples are its own.

    `told` hears of every sample.
    """

    def __init__(
        self,
        send: Callable[[Step], Awaitable[Sample]],
        bounds: Bounds,
        quantile: float,
        told: Callable[[Sample], None] | None = None,
    ) -> None:
        self._send = send
        self._bounds = bounds
        self._quantile = quantile
        self._told = told
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Measures until enough is known. Raises what `send` raises."""
        error: float | None = None
        while (step := next_step(self.samples, self._bounds, error)) is not None:
            sample = await self._send(step)
            self.samples.append(sample)
            if self._told is not None:
                self._told(sample)
            if step.kind == "probe":
                error = await asyncio.to_thread(self._error)

    def learned(self) -> SpeedLearner:
        """A learner that knows the samples and nothing else. Takes milliseconds."""
        learner = SpeedLearner(self._quantile)
        teach(learner, self.samples)
        return learner

    def _error(self) -> float | None:
        estimate = self.learned().estimate
        return None if estimate is None else mean_error(estimate.prefill, self.samples)


class Probe:
    """Sends steps: prompts of random ids under a salt of its own, so that they hit nothing but each other.

    Raises what the engine client raises; CannotCalibrate when the engine takes no ids.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        api_key: str,
        limits: EngineLimits,
        facts: EngineFacts,
        *,
        decoding: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._in_chat = facts.token_ids_accepted is True
        path = "/v1/chat/completions" if self._in_chat else "/v1/completions"
        self._backend = VllmBackend(session, url, api_key, limits, path)
        self._facts = facts
        self._bounds = Bounds.of(facts)
        self._decoding = decoding
        self._clock = clock
        self._rng = random.Random(secrets.randbits(64))
        self._salt = secrets.token_hex(16)
        self._chain: list[int] = []

    async def __call__(self, step: Step) -> Sample:
        ids = [*self._chain[: step.shared_tokens], *self._ids(step.new_tokens)]
        decoding = self._decoding()
        ttft_s, decode_s, usage = await self._timed(self._payload(ids, step))
        if step.kind == "chain":
            self._chain = ids
        prompt = usage.prompt_tokens or len(ids)
        cached = usage.cached_tokens
        if cached is None:
            # Whole blocks are reused, and the last prompt token is always computed.
            block = self._bounds.block_tokens
            cached = min(step.shared_tokens, len(ids) - 1) // block * block
        # The wait in the engine's own queue is not prefill.
        ttft_s = max(ttft_s - (usage.queue_ms or 0.0) / 1000, LEAST_S)
        return Sample(step, prompt - cached, cached, ttft_s, usage.output_tokens or 1, decode_s, decoding)

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(*_IDS) for _ in range(count)]

    def _payload(self, ids: list[int], step: Step) -> bytes:
        body: dict[str, Any] = {
            "model": self._facts.model,
            "max_tokens": step.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._facts.cache_salt is not False:
            body["cache_salt"] = self._salt
        if step.max_tokens > 1:
            body["ignore_eos"] = True
        if self._in_chat:
            body["messages"] = [{"role": "user", "content": "-"}]
            body["kv_transfer_params"] = {"prompt_token_ids": ids}
        else:
            body["prompt"] = ids
        return orjson.dumps(body)

    async def _timed(self, payload: bytes) -> tuple[float, float, EngineUsage]:
        began_s = self._clock()
        try:
            stream = await self._backend.stream(payload)
        except ApiError as error:
            if not self._in_chat and error.code in ("engine_refused", "engine_failed"):
                raise CannotCalibrate("it takes no prompt of token ids") from error
            raise
        first_s = self._clock()
        usage = await usage_at_end(stream)
        return first_s - began_s, self._clock() - first_s, usage


async def usage_at_end(stream: EngineStream) -> EngineUsage:
    """Reads the answer to its end, whatever it says. Raises what the engine client raises."""
    usage = EngineUsage()
    try:
        async for events in stream.reads():
            usage = usage_in(events) or usage
    finally:
        stream.close()
    return usage


def usage_in(events: bytes) -> EngineUsage | None:
    """The usage that events of a stream tell, None where none does."""
    for event in split_events(events):
        data = event_data(event)
        if b'"usage"' in data and (body := orjson.loads(data)).get("usage"):
            return read_usage(body)
    return None
