"""When what happened to a request: parts, tokens and rates, beside what had been predicted."""

from dataclasses import dataclass, field

from latency.speed import Forecast


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What the engine reported. None is unknown, never 0. `finish_reason` is that of the only answer."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Predicted:
    """What was foretold when the request was planned, and when it was sent. None is unknown.

    `cached_tokens` is that of the moment of sending, and where the request had to wait in the engine that of the
    moment in which it is known to have begun to run there; never made from the engine's report. Milliseconds
    from the request's arrival.
    """

    ttft_ms: float | None = None
    safe_ttft_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    cached_tokens: int | None = None
    budget_ms: float | None = None

    def within_budget(self, ttft_ms: float | None) -> bool | None:
        return None if self.budget_ms is None or ttft_ms is None else ttft_ms <= self.budget_ms

    def wire(self, ttft_ms: float | None) -> dict[str, float | int | None]:
        figures = {
            "predicted_ttft_ms": self.ttft_ms,
            "predicted_safe_ttft_ms": self.safe_ttft_ms,
            "predicted_queue_ms": self.queue_ms,
            "predicted_prefill_ms": self.prefill_ms,
            "ttft_budget_ms": self.budget_ms,
        }
        rounded: dict[str, float | int | None] = {
            name: None if value is None else round(value, 3) for name, value in figures.items()
        }
        return {
            **rounded,
            "predicted_cached_tokens": self.cached_tokens,
            "within_budget": self.within_budget(ttft_ms),
        }


UNPREDICTED = Predicted()


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from the request's arrival; rates in tokens per second. None is unknown.

    `ttft_ms` = gateway time + `queue_ms` + `prefill_ms`; `retrieve_ms` and `plan_ms` are parts of the gateway time.
    `queue_ms` is the wait for the request's turn in the gateway and, where the engine reports it, its own queue's;
    without the engine's request metrics that is part of `prefill_ms`. What was predicted stands beside what happened.
    """

    retrieve_ms: float
    plan_ms: float
    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    total_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    uncached_tokens: int | None
    output_tokens: int | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    predicted: Predicted = field(default_factory=lambda: UNPREDICTED)

    def wire(self) -> dict[str, float | int | None]:
        measured = {
            name: round(value, 3) if isinstance(value, float) else value
            for name in self.__slots__
            if name != "predicted"
            for value in (getattr(self, name),)
        }
        return {**measured, **self.predicted.wire(self.ttft_ms)}


def make_timings(
    usage: EngineUsage,
    *,
    retrieve_ms: float,
    plan_ms: float,
    sent_ms: float,
    first_ms: float | None,
    total_ms: float,
    choices: int = 1,
    waited_ms: float = 0.0,
    predicted: Predicted = UNPREDICTED,
) -> Timings:
    """`sent_ms`, `first_ms` and `total_ms`: when the engine was called, its first token came, the answer ended.

    `waited_ms` of the time before `sent_ms` was the wait for the request's turn.

    An answer that was not streamed has no `first_ms`; the engine's own figure stands in where it reports one.
    """
    engine_ms = None if first_ms is None else first_ms - sent_ms
    if engine_ms is None and usage.ttft_ms is not None:
        engine_ms = usage.ttft_ms + (usage.queue_ms or 0.0)
    uncached = None
    if usage.prompt_tokens is not None and usage.cached_tokens is not None:
        uncached = usage.prompt_tokens - usage.cached_tokens
    prefill_ms = None if engine_ms is None else max(0.0, engine_ms - (usage.queue_ms or 0.0))
    ttft_ms = None if engine_ms is None else sent_ms + engine_ms
    decode_ms = None if ttft_ms is None else total_ms - ttft_ms
    decoded = None if usage.output_tokens is None else usage.output_tokens - choices
    return Timings(
        retrieve_ms=retrieve_ms,
        plan_ms=plan_ms,
        queue_ms=usage.queue_ms if usage.queue_ms is None and not waited_ms else waited_ms + (usage.queue_ms or 0.0),
        prefill_ms=prefill_ms,
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        uncached_tokens=uncached,
        output_tokens=usage.output_tokens,
        prefill_tokens_per_s=_rate(uncached, prefill_ms),
        decode_tokens_per_s=_rate(decoded, decode_ms),
        predicted=predicted,
    )


def predicted(forecast: Forecast | None, budget_s: float | None, cached_tokens: int | None) -> Predicted:
    """`cached_tokens` as they were predicted last, None where the prompt's ids are not known."""
    if forecast is None:
        return Predicted(cached_tokens=cached_tokens, budget_ms=None if budget_s is None else budget_s * 1000)
    return Predicted(
        ttft_ms=forecast.ttft_s * 1000,
        safe_ttft_ms=forecast.safe_ttft_s * 1000,
        queue_ms=forecast.queue_s * 1000,
        prefill_ms=forecast.prefill_s * 1000,
        cached_tokens=cached_tokens,
        budget_ms=None if budget_s is None else budget_s * 1000,
    )


def server_timing(**parts_ms: float | None) -> bytes:
    """A `Server-Timing` value; parts that are unknown are left out."""
    return ", ".join([f"{name};dur={ms:.1f}" for name, ms in parts_ms.items() if ms is not None]).encode()


def _rate(tokens: int | None, ms: float | None) -> float | None:
    if tokens is None or ms is None or tokens <= 0 or ms <= 0:
        return None
    return tokens / ms * 1000
