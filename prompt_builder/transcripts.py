"""Conversations found again by what they say, so that past turns keep the chunks they were sent with."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cache.store import ByteStore
from prompt_builder.chain import chain, conversation_key, link_of
from prompt_builder.stored import (
    CorruptValue,
    DecodedTurns,
    StoredFold,
    StoredTurn,
    decode_fold,
    decode_messages,
    encode_fold,
    encode_messages,
    encode_turn,
)
from prompt_builder.types import Message, PastMessage, Plan, Role, Transcript, TurnContext

MAX_CONVERSATION_MESSAGES = 1000
MAX_CONVERSATION_BYTES = 2**20
# A conversation beyond its bounds is cut to this share of them: a cut moves the front of its prompts, so it is rare.
CUT_SHARE = 0.75

Stored = TypeVar("Stored", StoredTurn, StoredFold)


class StatedMessage(Protocol):
    """A message as a client states it."""

    @property
    def role(self) -> Role: ...

    @property
    def content(self) -> str: ...


class NoQuestion(Exception):
    """The messages do not end with a user's: there is nothing to retrieve for."""


@dataclass(slots=True)
class TranscriptCounts:
    """Since the start: turns looked up, turns recognised, stored values that could not be read (misses)."""

    looked_up: int = 0
    recognised: int = 0
    corrupt: int = 0


class Transcripts:
    """Remembers, for each answered question, what the gateway put before it, and the folds of conversations.

    A turn's key is a hash chain over the (role, content) of everything up to its answer, begun with tenant, user
    and model: a client that resends its history is recognised, an edited or regenerated turn branches, and
    two users share nothing. A fold hangs on the link of the last message that it folds, so it branches as well.
    System text is left out: one that holds a clock must not hide the rest. Entries live `ttl_s` seconds and are
    renewed, at half of that, when they are read. `now` gives seconds.
    """

    def __init__(self, store: ByteStore, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._now = now
        self._decoded_turns = DecodedTurns()
        self.counts = TranscriptCounts()

    async def resume(
        self, tenant: str, user: str | None, model: str, messages: Sequence[StatedMessage]
    ) -> Transcript:
        """The conversation with what is known of it; unknown history is accepted as it stands.

        Leading system and developer messages join as `system`, unchanged. Raises NoQuestion.
        """
        if not messages or messages[-1].role != "user":
            raise NoQuestion("The last message must be a user's.")
        leading = 0
        while messages[leading].role in ("system", "developer"):
            leading += 1
        system = "\n\n".join(message.content for message in messages[:leading])
        past = [PastMessage(message.role, message.content) for message in messages[leading:-1]]
        links = chain(tenant, user, model, past)
        answered, ends = _answered(past), _turn_ends(past)
        raw = await self._read([*(f"turn:{links[at]}" for at in answered), *(f"fold:{links[at]}" for at in ends)])
        known = stripped = 0
        for place, turn in zip(answered, await self._turns(raw[: len(answered)]), strict=True):
            if turn is not None:
                past[place - 1] = replace(past[place - 1], context=_or_none(turn.context))
                known, stripped = place + 1, min(turn.stripped, len(past))
        fold = await self._newest_fold(raw[len(answered) :], ends)
        return Transcript(
            system=system,
            past=tuple(past),
            question=messages[-1].content,
            known=known,
            summary=fold.summary if fold else "",
            folded=fold.folded if fold else 0,
            stripped=stripped,
            summary_files=fold.file_ids if fold else (),
        )

    async def record(
        self, tenant: str, user: str | None, model: str, transcript: Transcript, plan: Plan, answer: str
    ) -> None:
        """Remembers what `plan` put before the transcript's question, now that it has this answer."""
        turn = (PastMessage("user", transcript.question), PastMessage("assistant", answer))
        link = link_of(tenant, user, model, (*transcript.past, *turn))
        stored = StoredTurn(context_of(plan), _stripped(transcript, plan), self._now())
        await self._store.put(f"turn:{link}", encode_turn(stored), self._ttl_s)

    async def keep_fold(
        self,
        tenant: str,
        user: str | None,
        model: str,
        folded: Sequence[PastMessage],
        summary: str,
        earlier_files: Sequence[str] = (),
    ) -> None:
        """The conversation's first messages, `folded`, are this summary from now on.

        `earlier_files` are those of the fold that this one replaces; the files of the chunks in `folded` come from
        the messages. Raises ValueError for a fold of nothing or an empty summary.
        """
        if not folded or not summary:
            raise ValueError("a fold needs messages and a summary")
        link = link_of(tenant, user, model, folded)
        file_ids = tuple(dict.fromkeys([*earlier_files, *files_in(folded)]))
        stored = StoredFold(summary, len(folded), file_ids, self._now())
        await self._store.put(f"fold:{link}", encode_fold(stored), self._ttl_s)

    async def load(self, tenant: str, user: str | None, conversation: str) -> list[Message]:
        """The messages of a conversation that the client names; empty where this user has none such."""
        raw = await self._store.get(conversation_key(tenant, user, conversation))
        if raw is None:
            return []
        try:
            return decode_messages(raw)
        except CorruptValue:
            self.counts.corrupt += 1
            return []

    async def keep(self, tenant: str, user: str | None, conversation: str, messages: Sequence[Message]) -> None:
        """The conversation is these messages from now on.

        Beyond 1,000 messages or 1 MiB the oldest turns leave, in whole turns, a quarter at a time; leading system
        messages stay.
        """
        key = conversation_key(tenant, user, conversation)
        await self._store.put(key, encode_messages(_bounded(messages)), self._ttl_s)

    async def _read(self, keys: Sequence[str]) -> list[tuple[str, bytes | None]]:
        """All in one round trip."""
        return list(zip(keys, await self._store.get_many(keys), strict=True)) if keys else []

    async def _turns(self, read: Sequence[tuple[str, bytes | None]]) -> list[StoredTurn | None]:
        found: list[StoredTurn | None] = []
        for key, raw in read:
            turn = self._decoded(raw, self._decoded_turns.get)
            found.append(turn)
            if turn is not None and self._ages(turn.written_at_s):
                await self._store.put(key, encode_turn(turn.renewed(self._now())), self._ttl_s)
        self.counts.looked_up += len(found)
        self.counts.recognised += sum(turn is not None for turn in found)
        return found

    async def _newest_fold(self, read: Sequence[tuple[str, bytes | None]], ends: Sequence[int]) -> StoredFold | None:
        for (key, raw), end in zip(reversed(read), reversed(ends), strict=True):
            fold = self._decoded(raw, decode_fold)
            if fold is None or fold.folded != end + 1:
                continue
            if self._ages(fold.written_at_s):
                await self._store.put(key, encode_fold(fold.renewed(self._now())), self._ttl_s)
            return fold
        return None

    def _decoded(self, raw: bytes | None, decode: Callable[[bytes], Stored]) -> Stored | None:
        if raw is None:
            return None
        try:
            return decode(raw)
        except CorruptValue:
            self.counts.corrupt += 1
            return None

    def _ages(self, written_at_s: float) -> bool:
        return self._now() - written_at_s > self._ttl_s / 2


def context_of(plan: Plan) -> TurnContext:
    """What the plan puts before its question."""
    return TurnContext(plan.chunks, tuple(chunk.label for chunk in plan.references), plan.evidence, plan.facts)


def continued(transcript: Transcript, plan: Plan, answer: str, question: str) -> Transcript:
    """The transcript that `resume` gives when the client goes on after this answer."""
    asked = PastMessage("user", transcript.question, _or_none(context_of(plan)))
    past = (*transcript.past, asked, PastMessage("assistant", answer))
    stripped = _stripped(transcript, plan)
    return replace(transcript, past=past, question=question, facts="", known=len(past), stripped=stripped)


def files_in(past: Sequence[PastMessage]) -> list[str]:
    """Ids of the files whose chunks were sent with these messages."""
    return [chunk.file_id for message in past if message.context for chunk in message.context.chunks]


def without_files(transcript: Transcript, answers: Callable[[str], bool]) -> Transcript:
    """The transcript without what was taken from files that are gone: such turns stand as the client states them.

    `answers` says of a file id whether it still stands in a store. Deleted text must not answer again, so a turn also
    loses its context when it refers to a chunk that no earlier turn holds any more: its evidence may quote it. A
    summary that may hold such text is not used, and what it stood for is history again.
    """
    if not all(map(answers, transcript.summary_files)):
        transcript = replace(transcript, summary="", folded=0, summary_files=())
    past: list[PastMessage] = []
    standing: set[str] = set()
    for message in transcript.past:
        context = message.context
        if context is not None:
            alive = all(answers(chunk.file_id) for chunk in context.chunks) and standing.issuperset(
                context.references
            )
            if alive:
                standing.update(chunk.label for chunk in context.chunks)
            else:
                message = replace(message, context=None)
        past.append(message)
    return replace(transcript, past=tuple(past))


def _or_none(context: TurnContext) -> TurnContext | None:
    """None where nothing stood before the question: such a turn has one rendering."""
    holds = context.chunks or context.references or context.evidence or context.facts
    return context if holds else None


def _answered(past: Sequence[PastMessage]) -> list[int]:
    """Places of assistant messages that answer a user message directly."""
    return [
        place for place in range(1, len(past)) if past[place].role == "assistant" and past[place - 1].role == "user"
    ]


def _turn_ends(past: Sequence[PastMessage]) -> list[int]:
    """Places after which a user speaks: a fold ends at one of them, the last message included."""
    return [place for place in range(len(past)) if place + 1 == len(past) or past[place + 1].role == "user"]


def _stripped(transcript: Transcript, plan: Plan) -> int:
    """Messages without chunks in the plan's prompt, from the start of the past: folded, left out or stripped."""
    missing = len(transcript.past) - len(plan.past)
    return missing + (len(plan.past) if plan.rendering == "stripped" else plan.stripped)


def _bounded(history: Sequence[Message]) -> list[Message]:
    """All of it within both bounds, else the leading system messages and the newest others, from a user's on."""
    sizes = [len(message.content.encode("utf-8", "surrogatepass")) for message in history]
    if len(history) <= MAX_CONVERSATION_MESSAGES and sum(sizes) <= MAX_CONVERSATION_BYTES:
        return list(history)
    leading = 0
    while leading < len(history) and history[leading].role in ("system", "developer"):
        leading += 1
    left_bytes = int(MAX_CONVERSATION_BYTES * CUT_SHARE) - sum(sizes[:leading])
    first, most = len(history), int(MAX_CONVERSATION_MESSAGES * CUT_SHARE) - leading
    while first > leading and len(history) - first < most and sizes[first - 1] <= left_bytes:
        first -= 1
        left_bytes -= sizes[first]
    while first < len(history) and history[first].role != "user":
        first += 1
    return [*history[:leading], *history[first:]]
