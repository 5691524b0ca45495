"""Requests with no store and no known conversation: their messages and the engine's answer stay as they came."""

import asyncio
from typing import Any

from gateway.answers import EngineUsage, read_usage, server_timing, whole_answer
from gateway.context import RequestContext
from gateway.payload import engine_body
from gateway.relay import relay_unchanged
from gateway.replicas import Replica
from gateway.serving import Serving
from gateway.turns import StreamedAnswer, WholeAnswer, elapsed_ms, nothing, plain_timings
from gateway.wire import TEMPLATE_FIELDS, ChatRequest, to_json
from prompt_builder.types import Message

_BYTES_PER_MESSAGE = 64
"""More than a template's scaffolding around one message has tokens."""


async def pass_through(
    replica: Replica, request: ChatRequest, body: dict[str, Any], context: RequestContext, served_model: str
) -> StreamedAnswer | WholeAnswer:
    """Only an answer that the model's window has no room for is cut to fit. Raises ApiError."""
    serving = replica.serving
    fields = engine_body(body, context, served_model, serving, stream=bool(request.stream))
    room = await asyncio.to_thread(answer_room, request, serving) if may_overflow(request, serving) else None
    if room is not None:
        fields.pop("max_completion_tokens", None)
        fields["max_tokens"] = room
    payload = to_json(fields)
    sent = elapsed_ms(context)
    if not request.stream:
        raw = await replica.backend.complete(payload)
        usage = read_usage(whole_answer(raw))
        return WholeAnswer((), raw, plain_timings(usage, context, sent, None, choices=request.n or 1))
    stream = await replica.backend.stream(payload)
    first = elapsed_ms(context)
    answer = StreamedAnswer((), server_timing(ttft=first), nothing(), stream)

    def ended(usage: EngineUsage) -> None:
        answer.timings = plain_timings(usage, context, sent, first, choices=request.n or 1)

    answer.events = relay_unchanged(stream, request.wants_usage, ended)
    return answer


def may_overflow(request: ChatRequest, serving: Serving) -> bool:
    """Cheap, and true too often: no tokenizer makes more tokens of a text than it has bytes."""
    window, asked = serving.facts.max_model_len, request.answer_limit
    if window is None or asked is None:
        return False
    most = sum(
        len(message.text.encode("utf-8", "surrogatepass")) + _BYTES_PER_MESSAGE for message in request.messages
    )
    return most + asked > window


def answer_room(request: ChatRequest, serving: Serving) -> int | None:
    """The largest `max_tokens` beside these messages; None where what was asked for fits, or cannot be known.

    A prompt that leaves no room at all stays as it is: the engine's refusal says so with its own numbers. Takes time
    with the length of the messages: call it off the event loop.
    """
    window, asked = serving.facts.max_model_len, request.answer_limit
    extra = request.model_extra or {}
    shaped = request.tools or any(extra.get(name) is not None for name in TEMPLATE_FIELDS)
    if window is None or asked is None or shaped or not all(message.plain for message in request.messages):
        return None
    messages = [Message(message.role, message.text) for message in request.messages if message.role != "function"]
    left = window - serving.builder.passthrough_tokens(messages)
    return left if 1 <= left < asked else None
