"""Conversations found again by what they say, so that past turns keep the chunks they were sent with."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

from cache.store import ByteStore
from prompt_builder.stored import CorruptValue, decode_context, decode_messages, encode_context, encode_messages
from prompt_builder.types import Message, PastMessage, Plan, Role, Transcript, TurnContext

MAX_CONVERSATION_MESSAGES = 400
MAX_CONVERSATION_BYTES = 2**20


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
    """Remembers, for each answered question, what the gateway put before it.

    A turn's key is a hash chain over the (role, content) of everything up to its answer, begun with tenant, user
    and model: a client that resends its history is recognised, an edited or regenerated turn branches, and
    two users share nothing. System text is left out: one that holds a clock must not hide the rest. Entries live
    `ttl_s` seconds and are renewed, at half of that, when they are read. `now` gives seconds.
    """

    def __init__(self, store: ByteStore, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._now = now
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
        answered = _answered(past)
        links = _chain(tenant, user, model, past)
        contexts = await self._contexts([links[place] for place in answered])
        known = 0
        for place, context in zip(answered, contexts, strict=True):
            if context is not None:
                past[place - 1] = replace(past[place - 1], context=context)
                known = place + 1
        return Transcript(system=system, past=tuple(past), question=messages[-1].content, known=known)

    async def record(
        self, tenant: str, user: str | None, model: str, transcript: Transcript, plan: Plan, answer: str
    ) -> None:
        """Remembers what `plan` put before the transcript's question, now that it has this answer."""
        turn = (PastMessage("user", transcript.question), PastMessage("assistant", answer))
        key = _chain(tenant, user, model, (*transcript.past, *turn))[-1]
        references = tuple(chunk.label for chunk in plan.references)
        context = TurnContext(plan.chunks, references, plan.evidence, plan.facts)
        await self._store.put(key, encode_context(context, self._now()), self._ttl_s)

    async def load(self, tenant: str, user: str | None, conversation: str) -> list[Message]:
        """The messages of a conversation that the client names; empty where this user has none such."""
        raw = await self._store.get(_conversation_key(tenant, user, conversation))
        if raw is None:
            return []
        try:
            return decode_messages(raw)
        except CorruptValue:
            self.counts.corrupt += 1
            return []

    async def keep(self, tenant: str, user: str | None, conversation: str, messages: Sequence[Message]) -> None:
        """The conversation is these messages from now on.

        Beyond 400 messages or 1 MiB the oldest turns leave, in whole turns; leading system messages stay.
        """
        key = _conversation_key(tenant, user, conversation)
        await self._store.put(key, encode_messages(_bounded(messages)), self._ttl_s)

    async def _contexts(self, keys: Sequence[str]) -> list[TurnContext | None]:
        if not keys:
            return []
        found: list[TurnContext | None] = []
        now = self._now()
        for key, raw in zip(keys, await self._store.get_many(keys), strict=True):
            found.append(None)
            if raw is None:
                continue
            try:
                context, written_at = decode_context(raw)
            except CorruptValue:
                self.counts.corrupt += 1
                continue
            found[-1] = context
            if now - written_at > self._ttl_s / 2:
                await self._store.put(key, encode_context(context, now), self._ttl_s)
        self.counts.looked_up += len(found)
        self.counts.recognised += sum(context is not None for context in found)
        return found


def without_files(transcript: Transcript, answers: Callable[[str], bool]) -> Transcript:
    """The transcript without what was taken from files that are gone: such turns stand as the client states them.

    `answers` says of a file id whether it still stands in a store. Deleted text must not answer again, so a turn also
    loses its context when it refers to a chunk that no earlier turn holds any more: its evidence may quote it.
    """
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


def _answered(past: Sequence[PastMessage]) -> list[int]:
    """Places of assistant messages that answer a user message directly."""
    return [
        place for place in range(1, len(past)) if past[place].role == "assistant" and past[place - 1].role == "user"
    ]


def _chain(tenant: str, user: str | None, model: str, past: Sequence[PastMessage]) -> list[str]:
    """One key for each message: of everything up to and including it."""
    link = _digest(b"", tenant, _user(user), model)
    keys = []
    for message in past:
        # Clients trim answers before they resend them.
        link = _digest(link, message.role, message.content.strip())
        keys.append(f"turn:{link.hex()}")
    return keys


def _digest(parent: bytes, *parts: str) -> bytes:
    """Lengths go in with the parts, so that no two lists of parts read the same."""
    digest = blake2b(parent, digest_size=20)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def _conversation_key(tenant: str, user: str | None, conversation: str) -> str:
    return f"conversation:{_digest(b'', tenant, _user(user), conversation).hex()}"


def _user(user: str | None) -> str:
    """No user and a user without a name are two."""
    return "" if user is None else f"={user}"


def _bounded(history: Sequence[Message]) -> list[Message]:
    """The leading system messages and the newest others within both bounds, from a user's on if any had to leave."""
    leading = 0
    while leading < len(history) and history[leading].role in ("system", "developer"):
        leading += 1
    system, history = history[:leading], history[leading:]
    size = sum(len(message.content.encode("utf-8", "surrogatepass")) for message in system)
    first = len(history)
    while first > 0 and len(history) - first < MAX_CONVERSATION_MESSAGES - leading:
        size += len(history[first - 1].content.encode("utf-8", "surrogatepass"))
        if size > MAX_CONVERSATION_BYTES:
            break
        first -= 1
    while 0 < first < len(history) and history[first].role != "user":
        first += 1
    return [*system, *history[first:]]
