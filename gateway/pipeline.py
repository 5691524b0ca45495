"""The story of one chat request, top to bottom."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from gateway.budgets import Budget, Budgets
from gateway.context import RequestContext
from gateway.delivery import Delivery
from gateway.messages import Conversation
from gateway.models import Models
from gateway.passthrough import Plain, pass_through
from gateway.planning import Ahead, look_ahead, plan_prompt, refuse_if_late, speed_on, within_total
from gateway.prefix import PrefixBreaks
from gateway.replicas import Replicas
from gateway.resuming import Resumer, holds_files
from gateway.serving import Serving
from gateway.turns import ChatDefaults, StreamedAnswer, Turn, WholeAnswer
from gateway.volatile import Observed, SystemTexts, leading_system
from gateway.wire import ChatRequest
from prompt_builder.companions import Companions
from prompt_builder.outlook import Clock
from prompt_builder.types import Limits, PastMessage, Transcript
from retrieval.retriever import Retriever
from retrieval.types import Candidates, Query

BUDGET_CANDIDATES = 10
OWN_TIME_S = 0.003
OWN_TIME_SHARE = 0.1

LONG_CHARACTERS = 64 * 1024
"""A longer past is measured while the search runs; for less a thread's hand-over costs more than it saves."""


class Pipeline:
    """Resume, retrieve, plan, render, wait for a turn, send; then report, record and learn."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        models: Models,
        resumer: Resumer,
        retriever: Retriever,
        companions: Companions,
        budgets: Budgets,
        system_texts: SystemTexts,
        breaks: PrefixBreaks,
        delivery: Delivery,
        defaults: ChatDefaults,
    ) -> None:
        self._replicas = replicas
        self._models = models
        self._resumer = resumer
        self._retriever = retriever
        self._companions = companions
        self._budgets = budgets
        self._system_texts = system_texts
        self._breaks = breaks
        self._delivery = delivery
        self._own_s = OWN_TIME_S
        self._defaults = defaults

    async def answer(
        self, request: ChatRequest, body: dict[str, Any], context: RequestContext
    ) -> StreamedAnswer | WholeAnswer:
        """Raises ApiError; RetrievalError for stores and filters that cannot be searched."""
        with self._replicas.arrivals.one():
            prepared = await self.prepare(request, context)
        if isinstance(prepared, Plain):
            return await pass_through(self._replicas, self._breaks, request, body, context, prepared)
        work = prepared.work
        forecasts = self._replicas.forecasts(work, context.cache_salt)
        in_time = refuse_if_late(self._replicas.hurried(forecasts, work.deadline_s), prepared.budget)
        if in_time is not None and prepared.budget.strict:
            prepared = replace(prepared, plan=replace(prepared.plan, forecast=in_time))
        self._observe(prepared)
        if request.stream:
            return await self._delivery.stream(prepared, body)
        return await self._delivery.whole(prepared, body)

    async def prepare(self, request: ChatRequest, context: RequestContext) -> Turn | Plain:
        """Everything that is decided before the engine is called. Raises like `answer`."""
        name = await self._models.resolve(request.model, context.tenant)
        extension = request.headstart
        stores = tuple(dict.fromkeys([*name.store_ids, *(extension.vector_store_ids if extension else ())]))
        budget = await self._budgets.of(request, context, stores)
        serving = self._replicas.serving
        system = leading_system(request)
        observed = self._system_texts.observe(context.tenant, name.served, system, serving.tokenizer.count)
        conversation = await self._resumer.resume(
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
        limits = Limits(
            window_tokens=serving.facts.max_model_len,
            max_tokens=request.answer_limit,
            min_answer_tokens=self._defaults.min_answer_tokens,
            top_k=top_k,
            chunk_order=extension.chunk_order if extension else None,
            pin_last=extension.pin_last if extension else None,
            evidence_lines=extension.evidence_lines if extension else None,
            instructed=bool(stores),
        )
        began = time.monotonic()
        transcript = conversation.transcript
        searching = self._search(request, context, stores, transcript, top_k, budget)
        salt = context.cache_salt
        ahead: Ahead | None = None
        is_long = bool(stores) and _is_long(transcript)
        if is_long or holds_files(transcript):
            # The question's embedding takes as long as a look through all of the past.
            looking = asyncio.to_thread(self._look_back, serving if is_long else None, transcript, limits, context)
            candidates, (transcript, ahead) = await asyncio.gather(searching, looking)
            conversation = conversation.with_transcript(transcript)
        else:
            candidates = await searching
        if not stores:
            limits = replace(limits, instructed=any(map(_has_passages, transcript.past)))
        retrieved = time.monotonic()
        opening = None if ahead is None or ahead.opening is None else ahead.opening.prompt
        outlooks = self._replicas.outlooks(salt, opening)
        clock = Clock(budget.ttft_s, retrieved - context.started_s + self._own_s)
        past = self._companions.of(salt.encode())
        plan, prompt = await asyncio.to_thread(
            plan_prompt, serving, conversation, candidates, limits, salt, outlooks, clock, past, ahead
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

    def _look_back(
        self, serving: Serving | None, transcript: Transcript, limits: Limits, context: RequestContext
    ) -> tuple[Transcript, Ahead | None]:
        """The transcript without what was deleted since; with `serving` what a plan needs before the candidates."""
        transcript = self._resumer.without_deleted(transcript, context.tenant)
        ahead = None if serving is None else look_ahead(serving, transcript, limits, context.cache_salt)
        return transcript, ahead

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
        """Chunks that are sent together are expected together again."""
        self._companions.observe(turn.context.cache_salt.encode(), turn.whole_chunks)


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


def _is_long(transcript: Transcript) -> bool:
    """By the characters of the system text, of the past and of what stands before its questions."""
    characters = len(transcript.system)
    for message in transcript.past:
        characters += len(message.content)
        if message.context is not None:
            characters += sum(len(chunk.rendered.text) for chunk in message.context.chunks)
        if characters > LONG_CHARACTERS:
            return True
    return characters > LONG_CHARACTERS


def _previous_question(transcript: Transcript) -> str | None:
    for message in reversed(transcript.past):
        if message.role == "user":
            return message.content
    return None
