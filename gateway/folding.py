"""After an answer, while the replica is idle: old turns are folded, and the next prompt's front is computed."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, TypeVar

from gateway.errors import ApiError
from gateway.fold_requests import finished, front_to_compute, messages_to_fold, summary_prompt
from gateway.idle import Abandoned, ask_idle
from gateway.idle_jobs import IdleJobs, Job
from gateway.metrics import Metrics
from gateway.pacing import Background
from gateway.planning import plan_prompt
from gateway.prefix import PrefixBreaks
from gateway.replica import Replica
from gateway.turns import Turn
from prompt_builder.chain import link_of
from prompt_builder.history import Marks, is_usable, marks, summary_of
from prompt_builder.transcripts import Transcripts, continued, files_in
from prompt_builder.types import PastMessage, Prompt, Transcript
from retrieval.types import Candidates

log = logging.getLogger("headstart.folding")

MOST_REMEMBERED = 1024
ENGINE_FAILURES = 2
"""So many failed summaries of a conversation, and its sentences are extracted instead."""

LEAST_PREWARM_TOKENS = 32
PLACEHOLDER = "."
"""The question of a prompt that is sent for its front alone: some engines refuse an empty one."""

SummaryMode = Literal["engine", "extract", "off"]


@dataclass(slots=True)
class FoldCounts:
    """Since the start. `failed` counts summaries and prewarms that the engine refused or that were no use."""

    folded: int = 0
    failed: int = 0
    abandoned: int = 0
    prewarmed: int = 0


@dataclass(frozen=True, slots=True)
class FoldSettings:
    """Marks of 0 are derived from budget, window and speed. `prewarm` is of fronts that no fold changes."""

    mode: SummaryMode
    high_tokens: int = 0
    low_tokens: int = 0
    prewarm: bool = True


@dataclass(frozen=True, slots=True)
class Draft:
    """A summary of the first `messages` of a conversation, whose chain has this link, that is not in use yet.

    `file_ids` are the files whose text it may hold: those of the moment when it was made.
    """

    link: str
    messages: int
    summary: str
    file_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Answered:
    """A turn, the replica that answered it, and what it said."""

    turn: Turn
    replica: Replica
    answer: str


Remembered = TypeVar("Remembered")


class Folder:
    """Folds and prewarms in the background, as `IdleJobs` bounds them.

    A fold is written when its summary is made and the new front is in the engine's cache; until then, and when
    anything fails, the conversation goes on as it was. Work that a user's request interrupts is taken up after a
    later answer; a finished summary is not asked for again.
    """

    def __init__(self, transcripts: Transcripts, breaks: PrefixBreaks, settings: FoldSettings) -> None:
        self._transcripts = transcripts
        self._breaks = breaks
        self._settings = settings
        self.jobs = IdleJobs()
        self._drafts: OrderedDict[str, Draft] = OrderedDict()
        self._failures: OrderedDict[str, int] = OrderedDict()
        self.counts = FoldCounts()

    async def __aenter__(self) -> "Folder":
        await self.jobs.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.jobs.__aexit__(kind, error, trace)

    @property
    def waiting(self) -> int:
        """Conversations that wait for an idle moment, or use one."""
        return len(self.jobs)

    def after(self, turn: Turn, replica: Replica, texts: Mapping[int, str]) -> None:
        """A turn has been answered by this replica and recorded; returns at once. `texts` are the answers by choice.

        Which of several answers a client goes on with is not known: then nothing is done.
        """
        if (
            not turn.conversation.plain
            or len(texts) != 1
            or not (self._may_fold(turn, replica) or self._may_prewarm(turn))
        ):
            return
        key = _key_of(turn)
        answered = _Answered(turn, replica, next(iter(texts.values())))
        self.jobs.add(key, lambda job: self._work(key, answered, job))

    def marks_of(self, turn: Turn, replica: Replica) -> Marks:
        return marks(
            turn.serving.facts.max_model_len,
            turn.clock.budget_s,
            replica.speed.estimate,
            self._settings.high_tokens,
            self._settings.low_tokens,
        )

    def _may_fold(self, turn: Turn, replica: Replica) -> bool:
        """Cheap, and true too often: the prompt holds the history and more. Turns that were cut are in no prompt."""
        if self._settings.mode == "off":
            return False
        cut = len(turn.transcript.past) - turn.plan.folded > len(turn.plan.past)
        return cut or turn.prompt.tokens > self.marks_of(turn, replica).high_tokens

    def _may_prewarm(self, turn: Turn) -> bool:
        return self._settings.prewarm and _may_break(turn)

    async def _work(self, key: str, answered: _Answered, job: Job) -> None:
        try:
            async with answered.replica.pacer.background() as idle:
                job.running = True
                if not await self._fold(key, answered, idle):
                    await self._prewarm_stripped(answered, idle)
        except Abandoned:
            self.counts.abandoned += 1
        except ApiError as error:
            self.counts.failed += 1
            log.info("a fold or prewarm failed: %s", error.code)
        except Exception:
            # A conversation that cannot be folded goes on as it is.
            self.counts.failed += 1
            log.exception("a fold or prewarm failed")

    async def _fold(self, key: str, answered: _Answered, idle: Background) -> bool:
        """Whether there was something to fold."""
        turn, replica = answered.turn, answered.replica
        transcript = turn.transcript
        at = self.marks_of(turn, replica)
        messages = await asyncio.to_thread(messages_to_fold, turn, at) if self._settings.mode != "off" else 0
        if not messages:
            return False
        draft = self._drafts.get(key)
        if draft is None or not self._still_good(draft, turn):
            draft = await self._draft(key, answered, messages, at, idle)
            if draft is None:
                self.counts.failed += 1
                return True
            _remember(self._drafts, key, draft)
        folded = transcript.past[: draft.messages]
        after = continued(transcript, turn.plan, answered.answer, PLACEHOLDER)
        prompt = await self._next_prompt(answered, replace(after, summary=draft.summary, folded=draft.messages))
        await ask_idle(replica, self._breaks, idle, turn, prompt, max_tokens=1)
        self.counts.prewarmed += 1
        await self._transcripts.keep_fold(
            turn.context.tenant,
            turn.request.user,
            turn.served_model,
            folded,
            draft.summary,
            draft.file_ids,
        )
        self.counts.folded += 1
        self._drafts.pop(key, None)
        self._failures.pop(key, None)
        return True

    def _still_good(self, draft: Draft, turn: Turn) -> bool:
        """An interrupted fold's summary serves if this is still the conversation that it was made of."""
        transcript = turn.transcript
        return transcript.folded < draft.messages < len(transcript.past) and draft.link == _link(turn, draft.messages)

    async def _draft(self, key: str, answered: _Answered, messages: int, at: Marks, idle: Background) -> Draft | None:
        """None when the engine's words are no summary; raises ApiError when it has none."""
        turn = answered.turn
        prose = ""
        if self._settings.mode == "engine" and self._failures.get(key, 0) < ENGINE_FAILURES:
            prompt = await asyncio.to_thread(summary_prompt, turn, messages, at)
            if prompt is not None:
                try:
                    told = await ask_idle(
                        answered.replica, self._breaks, idle, turn, prompt, max_tokens=at.prose_tokens
                    )
                except ApiError:
                    self._failed(key)
                    raise
                prose = finished(told.text, told.whole)
                if not is_usable(prose):
                    self._failed(key)
                    return None
        transcript = turn.transcript
        summary = await asyncio.to_thread(
            summary_of,
            transcript.past[transcript.folded : messages],
            transcript.summary,
            most_tokens=at.summary_tokens,
            count=turn.serving.tokenizer.count,
            prose=prose,
        )
        file_ids = (*transcript.summary_files, *files_in(transcript.past[:messages]))
        return Draft(_link(turn, messages), messages, summary, file_ids) if summary else None

    async def _next_prompt(self, answered: _Answered, transcript: Transcript) -> Prompt:
        """What the planner would make of this transcript now, without chunks."""
        turn = answered.turn
        salt = turn.context.cache_salt
        _, prompt = await asyncio.to_thread(
            plan_prompt,
            turn.serving,
            turn.conversation.with_transcript(transcript),
            Candidates(()),
            turn.limits,
            salt,
            (answered.replica.outlook(salt),),
            replace(turn.clock, spent_s=0.0),
        )
        return prompt

    def _failed(self, key: str) -> None:
        _remember(self._failures, key, self._failures.get(key, 0) + 1)

    async def _prewarm_stripped(self, answered: _Answered, idle: Background) -> None:
        """Where the next prompt renders the last turn otherwise than it was sent, that front is computed now."""
        turn, answer = answered.turn, answered.answer
        if not self._may_prewarm(turn):
            return
        after = continued(turn.transcript, turn.plan, answer, PLACEHOLDER)
        prompt = await self._next_prompt(answered, after)
        if await asyncio.to_thread(front_to_compute, turn, answer, prompt) >= LEAST_PREWARM_TOKENS:
            await ask_idle(answered.replica, self._breaks, idle, turn, prompt, max_tokens=1)
            self.counts.prewarmed += 1


def fold_metrics(metrics: Metrics, folder: Folder) -> None:
    """What the folder did since the start, read when it is scraped."""
    counts = folder.counts
    metrics.gauge("headstart_folds", "Histories folded", lambda: counts.folded)
    metrics.gauge("headstart_folds_failed", "Folds and prewarms that failed", lambda: counts.failed)
    metrics.gauge("headstart_folds_abandoned", "Folds and prewarms left for a user", lambda: counts.abandoned)
    metrics.gauge("headstart_prewarms", "Prompt fronts computed in idle time", lambda: counts.prewarmed)
    metrics.gauge("headstart_folds_skipped", "Folds and prewarms that found no place", lambda: folder.jobs.skipped)
    metrics.gauge("headstart_folds_waiting", "Conversations with background work", lambda: folder.waiting)


def _may_break(turn: Turn) -> bool:
    """Whether the next prompt may not go on from this one: what stood before the question may leave."""
    plan = turn.plan
    return turn.prompt.token_ids is not None and bool(plan.chunks or plan.references or plan.evidence or plan.facts)


def _key_of(turn: Turn) -> str:
    """Conversations of one user that begin with the same turn share their place in the queue, nothing else.

    A digest: keys outlive their conversations, and a first message may be of any length.
    """
    past = turn.transcript.past
    first = past[:2] or (PastMessage("user", turn.transcript.question),)
    return link_of(turn.context.tenant, turn.request.user, turn.served_model, first)


def _link(turn: Turn, messages: int) -> str:
    return link_of(turn.context.tenant, turn.request.user, turn.served_model, turn.transcript.past[:messages])


def _remember(into: OrderedDict[str, Remembered], key: str, value: Remembered) -> None:
    into[key] = value
    into.move_to_end(key)
    while len(into) > MOST_REMEMBERED:
        into.popitem(last=False)
