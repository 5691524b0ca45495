"""Requests with no store and no known conversation: their messages and the engine's answer stay as they came.

Only an answer that is not streamed is told that its system text is volatile, where it is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gateway.answer_ids import named_answer
from gateway.answers import only_text, read_usage, whole_answer
from gateway.backends.vllm import EngineStream
from gateway.budgets import Budget
from gateway.context import RequestContext
from gateway.payload import EngineRequest, engine_body
from gateway.planning import forecast_plain, refuse_if_late
from gateway.prefix import PrefixBreaks, plain_told
from gateway.relay import relay_unchanged
from gateway.replica import Replica
from gateway.replicas import Replicas
from gateway.routing import forecast_of, least_ttft
from gateway.runs import Run, Work
from gateway.sending import begin, send
from gateway.serving import Serving
from gateway.streamed_text import StreamedText
from gateway.timings import EngineUsage, server_timing
from gateway.turns import StreamedAnswer, WholeAnswer, elapsed_ms, plain_timings
from gateway.volatile import VolatileText
from gateway.wire import TEMPLATE_FIELDS, ChatRequest, to_json
from latency.speed import Forecast
from prompt_builder.layout import scaffold_tokens
from prompt_builder.outlook import Clock
from prompt_builder.types import Message, Prompt

SMALL_BYTES = 16 * 1024
"""Up to this much text is tokenized in passing; a thread's hand-over costs more."""

BYTES_PER_TOKEN = 8
_BYTES_PER_MESSAGE = 64
"""More than a template's scaffolding around one message has tokens."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A request with nothing to plan."""

    served_model: str
    serving: Serving
    budget: Budget
    volatile: VolatileText | None = None


async def pass_through(
    replicas: Replicas,
    breaks: PrefixBreaks,
    request: ChatRequest,
    body: dict[str, Any],
    context: RequestContext,
    plain: Plain,
) -> StreamedAnswer | WholeAnswer:
    """Only an answer that the model's window has no room for is cut to fit. Raises ApiError."""
    budget = plain.budget
    fields = engine_body(body, plain.served_model, stream=bool(request.stream))
    if _size_bytes(request) > SMALL_BYTES:
        work, room, prompt = await asyncio.to_thread(measure, replicas, request, context, plain)
    else:
        work, room, prompt = measure(replicas, request, context, plain)
    forecasts = replicas.hurried(replicas.forecasts(work, context.cache_salt), work.deadline_s)
    in_time = refuse_if_late(forecasts, budget)
    if in_time is not None and budget.strict:
        work = replace(work, forecast=in_time)
    if room is not None:
        fields.pop("max_completion_tokens", None)
        fields["max_tokens"] = room
    payload = EngineRequest(fields, context.cache_salt)
    sent, since = 0.0, 0

    def observe(replica: Replica, run: Run, usage: EngineUsage, said: Callable[[], str | None]) -> None:
        run.answered(usage, named_answer(plain.serving.tokenizer, said))
        if prompt is not None and prompt.token_ids is not None:
            told = plain_told(prompt, context.cache_salt, plain.volatile)
            breaks.answered(replica, told, usage.cached_tokens, run.cached_tokens, since)

    if not request.stream:

        async def complete(replica: Replica, run: Run) -> bytes:
            nonlocal sent, since
            sent, since = elapsed_ms(context), breaks.now()
            run.first_token_expected()
            return await replica.backend.complete(payload.to(replica.facts))

        replica, run, raw = await send(replicas, work, context.cache_salt, complete)
        try:
            answered = whole_answer(raw)
            usage = read_usage(answered)
            observe(replica, run, usage, lambda: only_text(answered))
            if plain.volatile is not None:
                raw = to_json({**answered, "headstart": {"volatile": plain.volatile.wire()}})
            return WholeAnswer((), raw, plain_timings(context, budget, run, usage, sent, None))
        finally:
            run.close()

    async def stream_from(replica: Replica, run: Run) -> EngineStream:
        nonlocal sent, since
        sent, since = elapsed_ms(context), breaks.now()
        return await begin(replica, payload)

    replica, run, stream = await send(replicas, work, context.cache_salt, stream_from)
    run.first_token()
    first = elapsed_ms(context)

    # Where it is not known what stands in the prompt's blocks, neither is it of the answer's.
    said = None if work.token_ids is None else StreamedText()

    def ended(usage: EngineUsage) -> None:
        if said is None:
            observe(replica, run, usage, lambda: None)
        else:
            observe(replica, run, replace(usage, finish_reason=said.finish_reason()), said.text)
        answer.timings = plain_timings(context, budget, run, usage, sent, first)

    on_read = len if said is None else lambda data: run.streamed(said.add(data))
    events = relay_unchanged(stream, request.wants_usage, ended, on_read)
    answer = StreamedAnswer((), server_timing(queue=run.waited_s * 1000, ttft=first), events, stream, run)
    return answer


def plain_prompt(request: ChatRequest, serving: Serving, salt: str) -> Prompt | None:
    """The prompt that the engine will make of these messages; None where only the engine can tell."""
    return _rendered(request, serving, salt) if _is_plain(request) else None


def _rendered(request: ChatRequest, serving: Serving, salt: str) -> Prompt:
    messages = [Message(message.role, message.text) for message in request.messages if message.role != "function"]
    return serving.builder.passthrough(messages, salt)


def _is_plain(request: ChatRequest) -> bool:
    """Whether the messages' roles and texts are all that the engine makes its prompt of."""
    extra = request.model_extra
    if request.tools or (extra and any(extra.get(name) is not None for name in TEMPLATE_FIELDS)):
        return False
    return all(message.plain for message in request.messages)


def measure(
    replicas: Replicas, request: ChatRequest, context: RequestContext, plain: Plain
) -> tuple[Work, int | None, Prompt | None]:
    """What the request asks of the engine, the largest `max_tokens` that fits where less was asked for, the prompt.

    The prompt is None where its ids are not known. Takes time with the length of the messages.
    """
    serving, budget = plain.serving, plain.budget
    prompt: Prompt | None = None
    is_plain = _is_plain(request)
    if not is_plain:
        tokens = _size_bytes(request) // BYTES_PER_TOKEN + 1
    elif serving.template is None or not serving.tokenizer.exact:
        # Rendering would tell no more than this sum.
        tokens = _counted_tokens(request, serving)
    else:
        prompt = _rendered(request, serving, context.cache_salt)
        tokens = prompt.tokens
    spent_s = elapsed_ms(context) / 1000
    outlooks = replicas.outlooks(context.cache_salt, prompt, followed=prompt is not None)
    forecast: Forecast | None
    if prompt is None:
        forecast = least_ttft(
            [forecast_of(each, tokens, 0, gateway_s=spent_s, budget_s=budget.ttft_s) for each in outlooks]
        )
    else:
        forecast = next(iter(forecast_plain(prompt, outlooks, Clock(budget.ttft_s, spent_s))), None)
    work = Work(
        tokens=tokens,
        token_ids=None if prompt is None else prompt.token_ids,
        hashes=() if prompt is None else prompt.block_hashes,
        forecast=forecast,
        deadline_s=budget.deadline_s(context),
        choices=request.n or 1,
    )
    window, asked = serving.facts.max_model_len, request.answer_limit
    if not is_plain or window is None or asked is None:
        return work, None, prompt
    left = window - tokens
    return work, left if 1 <= left < asked else None, prompt


def _counted_tokens(request: ChatRequest, serving: Serving) -> int:
    """As many as the prompt of plain messages has where its scaffolding is not known."""
    roles = [message.role for message in request.messages if message.role != "function"]
    counted = sum([serving.tokenizer.count(message.text) for message in request.messages])
    return counted + scaffold_tokens(roles, serving.tokenizer, serving.template)


def _size_bytes(request: ChatRequest) -> int:
    """More than the prompt has tokens: no tokenizer makes more tokens of a text than it has bytes."""
    return sum(4 * len(message.text) + _BYTES_PER_MESSAGE for message in request.messages)
