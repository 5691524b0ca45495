"""What an answer tells beside its text: engine usage, timings, citations and the plan, in wire form."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import ApiError, ErrorKind
from prompt_builder.citations import NamedLabel
from prompt_builder.types import Plan, Prompt, PromptChunk


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What the engine reported. None is unknown, never 0."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from the request's arrival; rates in tokens per second. None is unknown.

    `ttft_ms` = gateway time + `queue_ms` + `prefill_ms`; `retrieve_ms` and `plan_ms` are parts of the gateway time.
    Without the engine's request metrics the engine's queue is part of `prefill_ms`.
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

    def wire(self) -> dict[str, float | int | None]:
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name in self.__slots__
            for value in (getattr(self, name),)
        }


def whole_answer(raw: bytes) -> dict[str, Any]:
    """The engine's JSON answer. Raises ApiError (502) when it is not one."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise ApiError(ErrorKind.BAD_ENGINE, "The engine's answer is not a JSON object.", code="engine_failed")
    return body


def read_usage(body: dict[str, Any]) -> EngineUsage:
    """From a usage event or a whole answer; whatever is missing or null stays unknown."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    metrics = body.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    return EngineUsage(
        prompt_tokens=_int(usage.get("prompt_tokens")),
        cached_tokens=_int(details.get("cached_tokens")) if isinstance(details, dict) else None,
        output_tokens=_int(usage.get("completion_tokens")),
        queue_ms=_float(metrics.get("queue_time_ms")),
        ttft_ms=_float(metrics.get("time_to_first_token_ms")),
    )


def make_timings(
    usage: EngineUsage,
    *,
    retrieve_ms: float,
    plan_ms: float,
    sent_ms: float,
    first_ms: float | None,
    total_ms: float,
    choices: int = 1,
) -> Timings:
    """`sent_ms`, `first_ms` and `total_ms`: when the engine was called, its first token came, the answer ended.

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
        queue_ms=usage.queue_ms,
        prefill_ms=prefill_ms,
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        uncached_tokens=uncached,
        output_tokens=usage.output_tokens,
        prefill_tokens_per_s=_rate(uncached, prefill_ms),
        decode_tokens_per_s=_rate(decoded, decode_ms),
    )


def citations_wire(chunks: Iterable[PromptChunk], named: frozenset[str]) -> list[dict[str, Any]]:
    """Every chunk in the prompt, in its order there, and whether the answer names it."""
    return [
        {
            "label": chunk.label,
            "file_id": chunk.file_id,
            "filename": chunk.filename,
            "title": chunk.title,
            "text": chunk.body,
            "score": round(chunk.relevance, 4),
            "named": chunk.label in named,
        }
        for chunk in chunks
    ]


def annotations_wire(named: Iterable[NamedLabel], chunks: Iterable[PromptChunk]) -> list[dict[str, Any]]:
    """OpenAI's `file_citation` annotations; `index` is the character where the label stands in the answer."""
    by_label = {chunk.label: chunk for chunk in chunks}
    return [
        {
            "type": "file_citation",
            "index": label.start,
            "file_id": by_label[label.label].file_id,
            "filename": by_label[label.label].filename,
            "label": label.label,
        }
        for label in named
    ]


def plan_wire(plan: Plan, prompt: Prompt) -> dict[str, Any]:
    """Tokens by segment are null where no tokenizer is known; `prompt_tokens` is then an estimate."""
    tokens: dict[str, int] = {}
    chunk_tokens: dict[str, int] = {}
    for segment in prompt.segments:
        tokens[segment.kind] = tokens.get(segment.kind, 0) + len(segment.token_ids)
        if segment.kind == "chunk" and segment.label is not None:
            chunk_tokens[segment.label] = len(segment.token_ids)
    return {
        "chunks": [{"label": chunk.label, "tokens": chunk_tokens.get(chunk.label) or None} for chunk in plan.chunks],
        "references": [chunk.label for chunk in plan.references],
        "tokens": tokens if any(tokens.values()) else None,
        "prompt_tokens": prompt.tokens,
        "max_tokens": plan.max_tokens,
        "rendering": plan.rendering,
        "past_messages": len(plan.past),
        "exact": prompt.token_ids is not None,
        "inexact_reason": prompt.inexact_reason,
        "dropped": [{"what": item.what, "name": item.name, "reason": item.reason} for item in plan.dropped],
    }


def server_timing(**parts_ms: float | None) -> bytes:
    """A `Server-Timing` value; parts that are unknown are left out."""
    return ", ".join(f"{name};dur={ms:.1f}" for name, ms in parts_ms.items() if ms is not None).encode()


def _rate(tokens: int | None, ms: float | None) -> float | None:
    if tokens is None or ms is None or tokens <= 0 or ms <= 0:
        return None
    return tokens / ms * 1000


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
