"""The story of one chat request, top to bottom."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import orjson

from gateway.answer_ids import named_answer
from gateway.answers import (
    annotations_wire,
    citations_wire,
    only_text,
    plan_wire,
    read_choices,
    read_usage,
    whole_answer,
)
from gateway.backends.vllm import EngineStream
from gateway.budgets import Budget, Budgets
from gateway.context import RequestContext
from gateway.folding import Folder
from gateway.messages import Conversation, plain_transcript, read_conversation
from gateway.metrics import Metrics
from gateway.models import ModelName, Models
from gateway.passthrough import Plain, pass_through
from gateway.payload import turn_payload
from gateway.planning import plan_prompt, refuse_if_late, speed_on, within_total
from gateway.prefix import FoundBreak, PrefixBreaks, told_of
from gateway.relay import relay_completed
from gateway.replica import Replica
from gateway.replicas import Replicas
from gateway.runs import Run
from gateway.sending import send
from gateway.streamed_text import PassingTokens
from gateway.timings import EngineUsage, Timings, server_timing
from gateway.turns import ChatDefaults, StreamedAnswer, Turn, WholeAnswer, elapsed_ms, nothing, turn_timings
from gateway.volatile import Observed, SystemTexts, leading_system
from gateway.wire import ChatRequest, invalid
from prompt_builder.citations import named_labels
from prompt_builder.companions import Companions
from prompt_builder.outlook import Clock
from prompt_builder.transcripts import Transcripts, without_files
from prompt_builder.types import Limits, Message, PastMessage, Transcript
from retrieval.retriever import Retriever
from retrieval.types import Candidates, Query

BUDGET_CANDIDATES = 10
OWN_TIME_S = 0.003
OWN_TIME_SHARE = 0.1


class FileLookup(Protocol):
    def answers(self, tenant: str, file_id: str) -> bool:
        """Whether the file still stands in a store of the tenant."""


class Pipeline:
    """Resume, retrieve, plan, render, wait for a turn, send; then report, record and learn."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        models: Models,
        retriever: Retriever,
        transcripts: Transcripts,
        files: FileLookup,
        companions: Companions,
        metrics: Metrics,
        budgets: Budgets,
        folder: Folder,
        system_texts: SystemTexts,
        breaks: PrefixBreaks,
        defaults: ChatDefaults,
    ) -> None:
        self._replicas = replicas
        self._models = models
        self._retriever = retriever
        self._transcripts = transcripts
        self._files = files
        self._companions = companions
        self._metrics = metrics
        self._budgets = budgets
        self._folder = folder
        self._system_texts = system_texts
        self._breaks = breaks
        self._own_s = OWN_TIME_S
        self._defaults = defaults

    async def answer(
        self, request: ChatRequest, body: dict[str, Any], context: RequestContext
    ) -> StreamedAnswer | WholeAnswer:
        """Raises ApiError; RetrievalError for stores and filters that cannot be searched."""
        prepared = await self.prepare(request, context)
        if isinstance(prepared, Plain):
            return await pass_through(self._replicas, self._breaks, request, body, context, prepared)
        refuse_if_late(self._replicas.hurried(prepared.plan.forecast, prepared.work.deadline_s), prepared.budget)
        self._observe(prepared)
        payload = turn_payload(prepared, body)
        if request.stream:
            return await self._stream(prepared, payload)
        return await self._complete(prepared, payload)

    async def prepare(self, request: ChatRequest, context: RequestContext) -> Turn | Plain:
        """Everything that is decided before the engine is called. Raises like `answer`."""
        name = await self._models.resolve(request.model, context.tenant)
        extension = request.headstart
        stores = tuple(dict.fromkeys([*name.store_ids, *(extension.vector_store_ids if extension else ())]))
        budget = await self._budgets.of(request, context, stores)
        serving = self._replicas.serving
        system = leading_system(request)
        observed = self._system_texts.observe(context.tenant, name.served, system, serving.tokenizer.count)
        conversation = await self._resume(
            request, context, name, bool(stores), budget, moves=observed.split is not None
        )
        if conversation is None:
            observed = observed.not_moved("The request passes through: its messages are not plain text.")
            report = self._system_texts.answered(context.tenant, name.served, observed)
            return Plain(name.served, serving, budget, report)
        conversation, observed = _moved(conversation, observed)
        report = self._system_texts.answered(context.tenant, name.served, observed)
        turn = await self._plan(request, context, name.served, stores, conversation, budget)
        return replace(turn, volatile=report)

    async def _resume(
        self,
        request: ChatRequest,
        context: RequestContext,
        name: ModelName,
        has_stores: bool,
        budget: Budget,
        *,
        moves: bool,
    ) -> Conversation | None:
        """The conversation with what is known of it; None for a request to pass through.

        A request that states a budget hands its history to the planner, and so does one whose system text `moves`.
        """
        extension = request.headstart
        kept = extension.conversation if extension else None
        planned = has_stores or kept is not None or (extension is not None and extension.budgeted)
        if not planned and not moves and len(request.messages) < 3:
            return None
        template = self._replicas.serving.template
        conversation = read_conversation(request, template_reads_names=template is not None and template.reads_names)
        if conversation is None:
            if has_stores or kept is not None:
                raise invalid("messages: retrieval needs a user message with text to search for.", "messages")
            return None
        if not conversation.plain:
            if kept is not None:
                raise invalid("headstart.conversation takes messages of plain text only.", "headstart.conversation")
            return conversation.with_transcript(plain_transcript(conversation)) if planned else None
        if kept is not None:
            earlier = await self._transcripts.load(context.tenant, request.user, kept)
            conversation = conversation.continuing(tuple(earlier))
        resumed = await self._transcripts.resume(context.tenant, request.user, name.served, conversation.messages)
        if not planned and not moves and not resumed.known:
            return None
        return conversation.with_transcript(await asyncio.to_thread(self._without_deleted, resumed, context.tenant))

    def _without_deleted(self, transcript: Transcript, tenant: str) -> Transcript:
        """Deleted text answers nothing, not from an earlier turn either."""
        if not transcript.summary_files and not any(message.context for message in transcript.past):
            return transcript
        return without_files(transcript, partial(self._files.answers, tenant))

    async def _plan(
        self,
        request: ChatRequest,
        context: RequestContext,
        served_model: str,
        stores: tuple[str, ...],
        conversation: Conversation,
        budget: Budget,
    ) -> Turn:
        serving = self._replicas.serving
        extension = request.headstart
        top_k = (extension.top_k if extension else None) or self._defaults.top_k
        began = time.monotonic()
        candidates = await self._search(request, context, stores, conversation.transcript, top_k, budget)
        retrieved = time.monotonic()
        limits = Limits(
            window_tokens=serving.facts.max_model_len,
            max_tokens=request.answer_limit,
            min_answer_tokens=self._defaults.min_answer_tokens,
            top_k=top_k,
            chunk_order=extension.chunk_order if extension else None,
            pin_last=extension.pin_last if extension else None,
            evidence_lines=extension.evidence_lines if extension else None,
            instructed=bool(stores) or any(map(_has_passages, conversation.transcript.past)),
        )
        outlooks = self._replicas.outlooks(context.cache_salt)
        clock = Clock(budget.ttft_s, retrieved - context.started_s + self._own_s)
        salt = context.cache_salt
        past = self._companions.of(salt.encode())
        plan, prompt = await asyncio.to_thread(
            plan_prompt, serving, conversation, candidates, limits, salt, outlooks, clock, past
        )
        planned = time.monotonic()
        self._own_s += OWN_TIME_SHARE * (planned - retrieved - self._own_s)
        return Turn(
            request=request,
            context=context,
            serving=serving,
            served_model=served_model,
            stores=stores,
            conversation=conversation,
            candidates=candidates,
            limits=limits,
            clock=clock,
            plan=within_total(plan, budget, speed_on(outlooks, plan.forecast), limits.window_tokens),
            prompt=prompt,
            budget=budget,
            retrieve_ms=(retrieved - began) * 1000,
            plan_ms=(planned - retrieved) * 1000,
        )

    async def _search(
        self,
        request: ChatRequest,
        context: RequestContext,
        stores: tuple[str, ...],
        transcript: Transcript,
        top_k: int,
        budget: Budget,
    ) -> Candidates:
        if not stores:
            return Candidates(())
        extension = request.headstart
        return await self._retriever.search(
            Query(
                tenant=context.tenant,
                store_ids=stores,
                text=transcript.question,
                previous_text=_previous_question(transcript),
                # Under a budget a small chunk of a lower rank may fit where a large one does not.
                top_k=top_k if budget.ttft_s is None else max(top_k, BUDGET_CANDIDATES),
                filters=extension.filters.to_filter() if extension and extension.filters else None,
            )
        )

    def _observe(self, turn: Turn) -> None:
        """Chunks that are sent together are expected together again. Extracts are of this question alone."""
        sent = [(chunk.label, len(chunk.rendered.token_ids)) for chunk in turn.plan.chunks if chunk.form == "whole"]
        self._companions.observe(turn.context.cache_salt.encode(), sent)

    async def _stream(self, turn: Turn, payload: bytes) -> StreamedAnswer:
        sent, since = 0.0, 0

        async def stream_from(replica: Replica, run: Run) -> EngineStream:
            nonlocal sent, since
            sent, since = elapsed_ms(turn.context), self._breaks.now()
            return await replica.backend.stream(payload)

        replica, run, stream = await send(self._replicas, turn.work, turn.context.cache_salt, stream_from)
        run.first_token()
        first = elapsed_ms(turn.context)
        timing = server_timing(
            retrieve=turn.retrieve_ms,
            plan=turn.plan_ms,
            queue=run.waited_s * 1000,
            prefill=first - sent,
            ttft=first,
        )
        answer = StreamedAnswer(turn.stores, timing, nothing(), stream, run)
        passing = PassingTokens()

        async def finish(
            texts: Mapping[int, str], usage: EngineUsage
        ) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
            run.answered(usage, named_answer(turn.serving.tokenizer, lambda: texts.get(0)))
            answer.timings = turn_timings(turn, run, usage, sent, first)
            found = self._breaks.answered(replica, told_of(turn), usage.cached_tokens, run.cached_tokens, since)
            return await self._finish(turn, replica, texts, usage, answer.timings, found)

        answer.events = relay_completed(
            stream, turn.request.wants_usage, finish, lambda data: run.streamed(passing.add(data))
        )
        return answer

    async def _complete(self, turn: Turn, payload: bytes) -> WholeAnswer:
        sent, since = 0.0, 0

        async def complete(replica: Replica, run: Run) -> bytes:
            nonlocal sent, since
            sent, since = elapsed_ms(turn.context), self._breaks.now()
            run.first_token_expected()
            return await replica.backend.complete(payload)

        replica, run, raw = await send(self._replicas, turn.work, turn.context.cache_salt, complete)
        try:
            body = whole_answer(raw)
            usage = read_usage(body)
            run.answered(usage, named_answer(turn.serving.tokenizer, lambda: only_text(body)))
            timings = turn_timings(turn, run, usage, sent, None)
        finally:
            run.close()
        found = self._breaks.answered(replica, told_of(turn), usage.cached_tokens, run.cached_tokens, since)
        choices = read_choices(body)
        texts = {choice.get("index", 0): choice["message"].get("content") or "" for choice in choices}
        extension, annotations = await self._finish(turn, replica, texts, usage, timings, found)
        for choice in choices:
            choice["message"]["annotations"] = annotations.get(choice.get("index", 0), [])
        body["headstart"] = extension
        return WholeAnswer(turn.stores, orjson.dumps(body), timings)

    async def _finish(
        self,
        turn: Turn,
        replica: Replica,
        texts: Mapping[int, str],
        usage: EngineUsage,
        timings: Timings,
        prefix: FoundBreak | None,
    ) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
        """Citations from what the answers name; the turn goes into the transcripts."""
        chunks = (*turn.plan.references, *turn.plan.chunks)
        labels = [chunk.label for chunk in chunks]
        named = {index: named_labels(text, labels) for index, text in texts.items()}
        all_named = frozenset(label.label for found in named.values() for label in found)
        if turn.conversation.plain:
            self._metrics.observe_count(turn.prompt.tokens, usage.prompt_tokens)
        await self._record(turn, replica, texts)
        extension = {
            "citations": citations_wire(chunks, all_named),
            "plan": plan_wire(turn.plan, turn.prompt),
            "replica": replica.name,
            "timings": timings.wire(),
            "prefix": prefix.wire() if prefix else None,
            "volatile": turn.volatile.wire() if turn.volatile else None,
        }
        return extension, {index: annotations_wire(found, chunks) for index, found in named.items()}

    async def _record(self, turn: Turn, replica: Replica, texts: Mapping[int, str]) -> None:
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
        self._folder.after(turn, replica, texts)


def _moved(conversation: Conversation, observed: Observed) -> tuple[Conversation, Observed]:
    """The conversation with the changing lines of its system text before the question, where they can be moved."""
    if observed.split is None:
        return conversation, observed
    transcript = observed.moved_in(conversation.transcript)
    if transcript is None:
        return conversation, observed.not_moved("System messages stand behind the first other message.")
    return conversation.with_transcript(transcript), observed


def _has_passages(message: PastMessage) -> bool:
    """Whether chunks stand in the message or are referred to; facts alone need no instructions."""
    context = message.context
    return context is not None and bool(context.chunks or context.references)


def _previous_question(transcript: Transcript) -> str | None:
    for message in reversed(transcript.past):
        if message.role == "user":
            return message.content
    return None
