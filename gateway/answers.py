"""What an answer tells beside its text: usage in, citations, annotations and the plan out, in wire form."""

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.errors import ApiError, ErrorKind
from gateway.timings import EngineUsage
from latency.speed import Forecast
from prompt_builder.citations import NamedLabel
from prompt_builder.types import Plan, Prompt, PromptChunk

MOST_TOKENS = 100_000_000
MOST_MILLISECONDS = 1e9


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
    """From a usage event or a whole answer; whatever is missing, null or impossible stays unknown."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    prompt = _tokens(usage.get("prompt_tokens"))
    cached = _tokens(details.get("cached_tokens")) if isinstance(details, dict) else None
    metrics = body.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    return EngineUsage(
        prompt_tokens=prompt,
        cached_tokens=None if cached is None or (prompt is not None and cached > prompt) else cached,
        output_tokens=_tokens(usage.get("completion_tokens")),
        queue_ms=_milliseconds(metrics.get("queue_time_ms")),
        ttft_ms=_milliseconds(metrics.get("time_to_first_token_ms")),
        finish_reason=_finish_reason(body.get("choices")),
    )


def read_choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a whole answer that hold a message. Raises ApiError (502) where one is no choice at all."""
    choices = body.get("choices") or []
    if not isinstance(choices, list) or not all(map(_is_choice, choices)):
        raise ApiError(ErrorKind.BAD_ENGINE, "The engine's answer is not a chat completion.", code="engine_failed")
    return [choice for choice in choices if choice.get("message") is not None]


def only_text(body: dict[str, Any]) -> str | None:
    """The answer of a body with one choice that is text alone."""
    choices = read_choices(body)
    message = choices[0]["message"] if len(choices) == 1 else {}
    return None if message.get("tool_calls") else message.get("content")


def _is_choice(choice: object) -> bool:
    if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
        return False
    message = choice.get("message") or {}
    return isinstance(message, dict) and isinstance(message.get("content") or "", str)


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
        "chunks": [
            {"label": chunk.label, "form": chunk.form, "tokens": chunk_tokens.get(chunk.label) or None}
            for chunk in plan.chunks
        ],
        "references": [chunk.label for chunk in plan.references],
        "tokens": tokens if any(tokens.values()) else None,
        "prompt_tokens": prompt.tokens,
        "max_tokens": plan.max_tokens,
        "rendering": plan.rendering,
        "past_messages": len(plan.past),
        "folded_messages": plan.folded,
        "stripped_messages": plan.stripped,
        "exact": prompt.token_ids is not None,
        "inexact_reason": prompt.inexact_reason,
        "dropped": [{"what": item.what, "name": item.name, "reason": item.reason} for item in plan.dropped],
        "forecast": forecast_wire(plan.forecast),
    }


def forecast_wire(forecast: Forecast | None) -> dict[str, Any] | None:
    """Milliseconds from the request's arrival, and tokens; null where nothing was predicted."""
    if forecast is None:
        return None
    return {
        "replica": forecast.replica,
        "cached_tokens": forecast.cached_tokens,
        "uncached_tokens": forecast.uncached_tokens,
        "gateway_ms": _ms(forecast.gateway_s),
        "queue_ms": _ms(forecast.queue_s),
        "prefill_ms": _ms(forecast.prefill_s),
        "ttft_ms": _ms(forecast.ttft_s),
        "safe_ttft_ms": _ms(forecast.safe_ttft_s),
        "quantile": forecast.quantile,
        "budget_ms": _ms(forecast.budget_s),
        "fits": forecast.fits,
        "next_chunk_ms": _ms(forecast.next_chunk_s),
    }


def _finish_reason(choices: object) -> str | None:
    """That of the only answer."""
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    reason = choices[0].get("finish_reason")
    return reason if isinstance(reason, str) else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _tokens(value: object) -> int | None:
    """What no engine can have counted is unknown: counters, and lists of blocks, grow by it."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _milliseconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= MOST_MILLISECONDS else None
