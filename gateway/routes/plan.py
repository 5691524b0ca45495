"""`POST /v1/plan`: what would be done with a chat request, and what it would take, without doing it."""

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi import APIRouter, Request, Response

from gateway.answers import forecast_wire, plan_wire
from gateway.budgets import Budget
from gateway.context import RequestContext
from gateway.errors import ApiError
from gateway.http import read_body
from gateway.passthrough import Plain, plain_prompt
from gateway.planning import forecast_plain, refuse_if_late
from gateway.prefix import PrefixBreaks, Told, plain_told, told_of
from gateway.replica import Replica
from gateway.routes.dependencies import BodyLimits, Context
from gateway.turns import Turn, elapsed_ms, rendered_by
from gateway.wire import ChatRequest, parse_chat
from latency.speed import Forecast
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.types import Alternative, Segment


class Planning(Protocol):
    """The part of the pipeline that decides."""

    async def prepare(self, request: ChatRequest, context: RequestContext) -> Turn | Plain: ...


class Replicas(Protocol):
    def get(self, name: str) -> Replica | None: ...

    def outlooks(self, salt: str) -> tuple[Outlook, ...]: ...

    def hurried(self, forecasts: Iterable[Forecast], deadline_s: float | None) -> Iterable[Forecast]: ...


def plan_router(
    planning: Planning,
    replicas: Replicas,
    breaks: PrefixBreaks,
    slots: AbstractContextManager[None],
    limits: BodyLimits,
) -> APIRouter:
    """`slots` admits a request; planning takes the same threads as chat does."""
    router = APIRouter(tags=["plan"])

    @router.post("/v1/plan")
    async def plan(request: Request, context: Context) -> Response:
        """Takes the body of a chat request. Refuses what chat would refuse, but a strict budget: it says so."""
        with slots:
            raw = await read_body(request.scope, request.receive, limits.max_body_bytes, limits.timeout_s)
            chat, _ = parse_chat(raw)
            prepared = await planning.prepare(chat, context)
            outlooks = replicas.outlooks(context.cache_salt)
            if isinstance(prepared, Plain):
                found = await asyncio.to_thread(_plain, chat, prepared, context, outlooks)
            else:
                found = await asyncio.to_thread(_planned, prepared, outlooks)
        hurried = replicas.hurried(found.replicas, prepared.budget.deadline_s(context))
        answer = {
            "object": "headstart.plan",
            "model": chat.model,
            **found.told,
            "prefix": _prefix(breaks, replicas, found),
            "volatile": prepared.volatile.wire() if prepared.volatile else None,
            "replicas": [forecast_wire(forecast) for forecast in found.replicas],
            "refusal": _refusal(hurried, prepared.budget),
        }
        return Response(orjson.dumps(answer), media_type="application/json")

    return router


@dataclass(frozen=True, slots=True)
class _Found:
    """`told` in wire form. `replicas` are the forecasts of this prompt on all of them, the least TTFT first."""

    told: dict[str, Any]
    forecast: Forecast | None
    replicas: tuple[Forecast, ...]
    prompt: Told | None


def _planned(turn: Turn, outlooks: tuple[Outlook, ...]) -> _Found:
    candidates = rendered_by(turn.serving.renderer, turn.candidates)
    alternatives = turn.serving.planner.alternatives(turn.transcript, candidates, turn.limits, outlooks, turn.clock)
    told = {
        "retrieval": bool(turn.stores),
        "plan": plan_wire(turn.plan, turn.prompt),
        "segments": [_segment(segment) for segment in turn.prompt.segments],
        "alternatives": [_alternative(alternative) for alternative in alternatives],
    }
    planned = turn.plan.forecast
    elsewhere = [
        forecast
        for forecast in forecast_plain(turn.prompt, outlooks, turn.clock)
        if planned is None or forecast.replica != planned.replica
    ]
    return _Found(told, planned, (*([planned] if planned else []), *elsewhere), told_of(turn))


def _plain(chat: ChatRequest, plain: Plain, context: RequestContext, outlooks: tuple[Outlook, ...]) -> _Found:
    """A request that passes through: its messages as the engine's template renders them, where that is known."""
    prompt = plain_prompt(chat, plain.serving, context.cache_salt)
    clock = Clock(plain.budget.ttft_s, elapsed_ms(context) / 1000)
    told = {
        "retrieval": False,
        "plan": None,
        "segments": [_segment(segment) for segment in prompt.segments] if prompt else [],
        "alternatives": [],
    }
    forecasts = forecast_plain(prompt, outlooks, clock) if prompt else ()
    prompted = plain_told(prompt, context.cache_salt, plain.volatile) if prompt else None
    return _Found(told, next(iter(forecasts), None), forecasts, prompted)


def _prefix(breaks: PrefixBreaks, replicas: Replicas, found: _Found) -> dict[str, Any] | None:
    """Where the prompt would leave what the replica of its plan holds; null where that cannot be foretold."""
    if found.forecast is None or found.prompt is None:
        return None
    replica = replicas.get(found.forecast.replica)
    foretold = None if replica is None else breaks.foretold(replica, found.prompt, found.forecast.cached_tokens)
    return None if foretold is None else foretold.wire()


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "label": segment.label,
        "tokens": len(segment.token_ids) or None,
        "text": segment.text,
    }


def _alternative(alternative: Alternative) -> dict[str, Any]:
    return {
        "ttft_budget_ms": round(alternative.budget_s * 1000, 3),
        "chunks": alternative.chunks,
        "extracts": alternative.extracts,
        "prompt_tokens": alternative.prompt_tokens,
        "uncached_tokens": alternative.uncached_tokens,
        "relevance_kept": round(alternative.relevance_kept, 4),
    }


def _refusal(forecasts: Iterable[Forecast], budget: Budget) -> dict[str, object] | None:
    """The error that chat would answer with under this budget's policy; null when it would answer."""
    try:
        refuse_if_late(forecasts, budget)
    except ApiError as error:
        return error.body()
    return None
