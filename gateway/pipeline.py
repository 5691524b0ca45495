"""The story of one chat request, top to bottom."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import orjson

from gateway.answers import (
    EngineUsage,
    Timings,
    annotations_wire,
    citations_wire,
    plan_wire,
    read_usage,
    server_timing,
    whole_answer,
)
from gateway.context import RequestContext
from gateway.errors import ApiError, ErrorKind
from gateway.messages import Conversation, plain_transcript, read_conversation
from gateway.metrics import Metrics
from gateway.models import ModelName, Models
from gateway.passthrough import pass_through
from gateway.payload import turn_payload
from gateway.relay import relay_completed
from gateway.replicas import Replica
from gateway.serving import Serving
from gateway.turns import (
    ChatDefaults,
    StreamedAnswer,
    Turn,
    WholeAnswer,
    elapsed_ms,
    nothing,
    rendered_by,
    turn_timings,
)
from gateway.wire import ChatRequest, invalid
from prompt_builder.citations import named_labels
from prompt_builder.transcripts import Transcripts, without_files
from prompt_builder.types import Limits, Message, Plan, Prompt, QuestionTooLong, Transcript
from retrieval.retriever import Retriever
from retrieval.types import Candidates, Query


class FileLookup(Protocol):
    def answers(self, tenant: str, file_id: str) -> bool:
        """Whether the file still stands in a store of the tenant."""


class Pipeline:
    """Resume, retrieve, plan, render, send; then report and record."""

    def __init__(
        self,
        *,
        replica: Replica,
        models: Models,
        retriever: Retriever,
        transcripts: Transcripts,
        files: FileLookup,
        metrics: Metrics,
        defaults: ChatDefaults,
    ) -> None:
        self._replica = replica
        self._models = models
        self._retriever = retriever
        self._transcripts = transcripts
        self._files = files
        self._metrics = metrics
        self._defaults = defaults

    async def answer(
        self, request: ChatRequest, body: dict[str, Any], context: RequestContext
    ) -> StreamedAnswer | WholeAnswer:
        """Raises ApiError; RetrievalError for stores and filters that cannot be searched."""
        name = await self._models.resolve(request.model, context.tenant)
        stores = tuple(
            dict.fromkeys([*name.store_ids, *(request.headstart.vector_store_ids if request.headstart else ())])
        )
        conversation = await self._resume(request, context, name, bool(stores))
        if conversation is None:
            return await pass_through(self._replica, request, body, context, name.served)
        turn = await self._prepare(request, context, name.served, stores, conversation)
        payload = turn_payload(turn, body)
        if request.stream:
            return await self._stream(turn, payload)
        return await self._complete(turn, payload)

    async def _resume(
        self, request: ChatRequest, context: RequestContext, name: ModelName, has_stores: bool
    ) -> Conversation | None:
        """The conversation with what is known of it; None for a request to pass through."""
        extension = request.headstart
        kept = extension.conversation if extension else None
        if not has_stores and kept is None and len(request.messages) < 3:
            return None
        template = self._replica.serving.template
        conversation = read_conversation(request, template_reads_names=template is not None and template.reads_names)
        if conversation is None:
            if has_stores or kept is not None:
                raise invalid("messages: retrieval needs a user message with text to search for.", "messages")
            return None
        if not conversation.plain:
            if kept is not None:
                raise invalid("headstart.conversation takes messages of plain text only.", "headstart.conversation")
            return conversation.with_transcript(plain_transcript(conversation)) if has_stores else None
        if kept is not None:
            earlier = await self._transcripts.load(context.tenant, request.user, kept)
            conversation = conversation.continuing(tuple(earlier))
        resumed = await self._transcripts.resume(context.tenant, request.user, name.served, conversation.messages)
        if not has_stores and kept is None and not resumed.known:
            return None
        return conversation.with_transcript(await asyncio.to_thread(self._without_deleted, resumed, context.tenant))

    def _without_deleted(self, transcript: Transcript, tenant: str) -> Transcript:
        """Deleted text answers nothing, not from an earlier turn either."""
        if not any(message.context for message in transcript.past):
            return transcript
        return without_files(transcript, partial(self._files.answers, tenant))

    async def _prepare(
        self,
        request: ChatRequest,
        context: RequestContext,
        served_model: str,
        stores: tuple[str, ...],
        conversation: Conversation,
    ) -> Turn:
        serving = self._replica.serving
        transcript = conversation.transcript
        extension = request.headstart
        top_k = (extension.top_k if extension else None) or self._defaults.top_k
        began = time.monotonic()
        candidates = Candidates(())
        if stores:
            candidates = await self._retriever.search(
                Query(
                    tenant=context.tenant,
                    store_ids=stores,
                    text=transcript.question,
                    previous_text=_previous_question(transcript),
                    top_k=top_k,
                    filters=extension.filters.to_filter() if extension and extension.filters else None,
                )
            )
        retrieved = time.monotonic()
        limits = Limits(
            window_tokens=serving.facts.max_model_len,
            max_tokens=request.answer_limit,
            min_answer_tokens=self._defaults.min_answer_tokens,
            top_k=top_k,
        )
        plan, prompt = await asyncio.to_thread(_plan, serving, conversation, candidates, limits, context)
        planned = time.monotonic()
        return Turn(
            request=request,
            context=context,
            serving=serving,
            served_model=served_model,
            stores=stores,
            conversation=conversation,
            transcript=transcript,
            plan=plan,
            prompt=prompt,
            retrieve_ms=(retrieved - began) * 1000,
            plan_ms=(planned - retrieved) * 1000,
        )

    async def _stream(self, turn: Turn, payload: bytes) -> StreamedAnswer:
        sent = elapsed_ms(turn.context)
        stream = await self._replica.backend.stream(payload)
        first = elapsed_ms(turn.context)
        timing = server_timing(retrieve=turn.retrieve_ms, plan=turn.plan_ms, prefill=first - sent, ttft=first)
        answer = StreamedAnswer(turn.stores, timing, nothing(), stream)

        async def finish(
            texts: Mapping[int, str], usage: EngineUsage
        ) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
            answer.timings = turn_timings(turn, usage, sent, first)
            return await self._finish(turn, texts, usage, answer.timings)

        answer.events = relay_completed(stream, turn.request.wants_usage, finish)
        return answer

    async def _complete(self, turn: Turn, payload: bytes) -> WholeAnswer:
        sent = elapsed_ms(turn.context)
        body = whole_answer(await self._replica.backend.complete(payload))
        usage = read_usage(body)
        timings = turn_timings(turn, usage, sent, None)
        choices = [choice for choice in body.get("choices") or [] if isinstance(choice.get("message"), dict)]
        texts = {choice.get("index", 0): choice["message"].get("content") or "" for choice in choices}
        extension, annotations = await self._finish(turn, texts, usage, timings)
        for choice in choices:
            choice["message"]["annotations"] = annotations.get(choice.get("index", 0), [])
        body["headstart"] = extension
        return WholeAnswer(turn.stores, orjson.dumps(body), timings)

    async def _finish(
        self, turn: Turn, texts: Mapping[int, str], usage: EngineUsage, timings: Timings
    ) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
        """Citations from what the answers name; the turn goes into the transcripts."""
        chunks = (*turn.plan.references, *turn.plan.chunks)
        labels = [chunk.label for chunk in chunks]
        named = {index: named_labels(text, labels) for index, text in texts.items()}
        all_named = frozenset(label.label for found in named.values() for label in found)
        if turn.conversation.plain:
            self._metrics.observe_count(turn.prompt.tokens, usage.prompt_tokens)
        await self._record(turn, texts)
        extension = {
            "citations": citations_wire(chunks, all_named),
            "plan": plan_wire(turn.plan, turn.prompt),
            "timings": timings.wire(),
        }
        return extension, {index: annotations_wire(found, chunks) for index, found in named.items()}

    async def _record(self, turn: Turn, texts: Mapping[int, str]) -> None:
        if not turn.conversation.plain:
            return
        request, context = turn.request, turn.context
        for text in dict.fromkeys(texts.values()):
            await self._transcripts.record(
                context.tenant, request.user, turn.served_model, turn.transcript, turn.plan, text
            )
        kept = request.headstart.conversation if request.headstart else None
        if kept is not None and texts:
            said = [*turn.conversation.messages, Message("assistant", texts[min(texts)])]
            await self._transcripts.keep(context.tenant, request.user, kept, said)


def _plan(
    serving: Serving, conversation: Conversation, candidates: Candidates, limits: Limits, context: RequestContext
) -> tuple[Plan, Prompt]:
    """Raises ApiError (400) for a question that the window cannot hold. Takes time with the length of the texts."""
    window = limits.window_tokens
    aside = 0 if window is None else conversation.extra_tokens(serving.tokenizer)
    if window is not None:
        limits = replace(limits, window_tokens=window - aside)
    try:
        plan = serving.planner.plan(conversation.transcript, rendered_by(serving.renderer, candidates), limits)
    except QuestionTooLong as error:
        message = str(error)
        if aside:
            message += f" ({aside} of {window} tokens are set aside for tools and messages that are not plain text.)"
        raise ApiError(ErrorKind.INVALID, message, param="messages", code="context_length_exceeded") from None
    reason = conversation.inexact_reason
    if reason is None and serving.facts.token_ids_accepted is not True:
        reason = "the engine does not take token ids in chat requests"
    prompt = serving.builder.render(plan, context.cache_salt, exact=reason is None, reason=reason)
    return plan, prompt


def _previous_question(transcript: Transcript) -> str | None:
    for message in reversed(transcript.past):
        if message.role == "user":
            return message.content
    return None
