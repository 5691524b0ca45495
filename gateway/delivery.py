"""From a planned turn to its answer: sent to a replica, passed on, completed, recorded, learned from."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from cache.prompt_tree import PromptTree
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
from gateway.folding import Folder
from gateway.metrics import Metrics
from gateway.payload import turn_payload
from gateway.planning import reordered
from gateway.prefix import FoundBreak, PrefixBreaks, told_of
from gateway.relay import relay_completed
from gateway.replica import Replica
from gateway.replicas import Replicas
from gateway.runs import Run, Work
from gateway.sending import Answer, begin, send
from gateway.streamed_text import PassingTokens
from gateway.timings import EngineUsage, Timings, server_timing
from gateway.turns import StreamedAnswer, Turn, WholeAnswer, elapsed_ms, nothing, turn_timings
from prompt_builder.citations import named_labels
from prompt_builder.companions import Companions
from prompt_builder.transcripts import Transcripts
from prompt_builder.types import Message


class _Leaving:
    """A turn until it leaves: one that waits long takes the order of chunks that the replica serves best by then."""

    def __init__(self, turn: Turn, body: dict[str, Any], companions: Companions) -> None:
        self.turn = turn
        self.payload = turn_payload(turn, body)
        self._body = body
        self._companions = companions
        self._tree: PromptTree | None = None
        self._whole = turn.whole_chunks
        self._key = turn.context.cache_salt.encode()
        self.waits_no_longer = companions.awaited(self._key, [label for label, _ in self._whole])

    def cached_tokens(self, replica: Replica) -> int | None:
        residency, turn = replica.residency, self.turn
        if residency is None:
            return None
        prefix = residency.prefix(turn.context.cache_salt, self._tree)
        self._tree = prefix.tree
        return turn.serving.planner.cached_tokens(turn.plan, turn.prompt, turn.limits, prefix)

    def shared_tokens(self) -> int:
        return self._companions.tokens_awaited_twice(self._key, self._whole)

    async def latest(self, replica: Replica) -> Work:
        self.waits_no_longer()
        turn, salt = self.turn, self.turn.context.cache_salt
        if len(turn.plan.chunks) > 1:
            past = self._companions.of(salt.encode())
            self.turn = await asyncio.to_thread(reordered, turn, replica.outlook(salt), past)
            if self.turn is not turn:
                self.payload = turn_payload(self.turn, self._body)
        return self.turn.work


class Delivery:
    """Sends turns and finishes their answers. Raises ApiError."""

    def __init__(
        self,
        replicas: Replicas,
        *,
        transcripts: Transcripts,
        metrics: Metrics,
        folder: Folder,
        breaks: PrefixBreaks,
        companions: Companions,
    ) -> None:
        self._replicas = replicas
        self._transcripts = transcripts
        self._metrics = metrics
        self._folder = folder
        self._breaks = breaks
        self._companions = companions

    async def stream(self, planned: Turn, body: dict[str, Any]) -> StreamedAnswer:
        leaving = _Leaving(planned, body, self._companions)
        sent, since = 0.0, 0

        async def stream_from(replica: Replica, run: Run) -> EngineStream:
            nonlocal sent, since
            leaving.waits_no_longer()
            sent, since = elapsed_ms(planned.context), self._breaks.now()
            return await begin(replica, leaving.payload)

        replica, run, stream = await self._send(leaving, stream_from)
        turn = leaving.turn
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
            return await self._finish(turn, replica, texts, usage, answer.timings, found())

        answer.events = relay_completed(
            stream, turn.request.wants_usage, finish, lambda data: run.streamed(passing.add(data))
        )
        return answer

    async def whole(self, planned: Turn, body: dict[str, Any]) -> WholeAnswer:
        leaving = _Leaving(planned, body, self._companions)
        sent, since = 0.0, 0

        async def complete(replica: Replica, run: Run) -> bytes:
            nonlocal sent, since
            leaving.waits_no_longer()
            sent, since = elapsed_ms(planned.context), self._breaks.now()
            run.first_token_expected()
            return await replica.backend.complete(leaving.payload.to(replica.facts))

        replica, run, raw = await self._send(leaving, complete)
        turn = leaving.turn
        try:
            answer = whole_answer(raw)
            usage = read_usage(answer)
            run.answered(usage, named_answer(turn.serving.tokenizer, lambda: only_text(answer)))
            timings = turn_timings(turn, run, usage, sent, None)
        finally:
            run.close()
        found = self._breaks.answered(replica, told_of(turn), usage.cached_tokens, run.cached_tokens, since)
        choices = read_choices(answer)
        texts = {choice.get("index", 0): choice["message"].get("content") or "" for choice in choices}
        extension, annotations = await self._finish(turn, replica, texts, usage, timings, found())
        for choice in choices:
            choice["message"]["annotations"] = annotations.get(choice.get("index", 0), [])
        answer["headstart"] = extension
        return WholeAnswer(turn.stores, orjson.dumps(answer), timings)

    async def _send(
        self, leaving: _Leaving, call: Callable[[Replica, Run], Awaitable[Answer]]
    ) -> tuple[Replica, Run, Answer]:
        turn = leaving.turn
        try:
            return await send(self._replicas, turn.work, turn.context.cache_salt, call, leaving)
        finally:
            leaving.waits_no_longer()

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
