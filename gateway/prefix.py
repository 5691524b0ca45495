"""Of each answer: where its prompt left what the replica held, and why; counted, and told to whom it concerns."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, get_args

from prometheus_client import Counter

from cache.blocks import are_block_hashes
from cache.sent import Sent, SentView
from gateway.metrics import Metrics
from gateway.replica import Replica
from gateway.shared_replica import Followed
from gateway.turns import Turn
from gateway.volatile import VolatileText
from prompt_builder.breaks import (
    BreakReason,
    PrefixBreak,
    Story,
    find_break,
    places_to_record,
    plain_story,
    plan_story,
)
from prompt_builder.types import Prompt

log = logging.getLogger("headstart.prefix")

TELL_EVERY_S = 300.0
_TAG_BYTES = 8


@dataclass(frozen=True, slots=True)
class Told:
    """A prompt with what is known of it, under its tenant's salt."""

    prompt: Prompt
    story: Story
    salt: str


def told_of(turn: Turn) -> Told:
    """A planned prompt."""
    changes = turn.volatile is not None and not turn.volatile.moved
    story = plan_story(turn.plan, turn.transcript, turn.prompt, volatile_system=changes)
    return Told(turn.prompt, story, turn.context.cache_salt)


def plain_told(prompt: Prompt, salt: str, volatile: VolatileText | None = None) -> Told:
    """Messages as they stand."""
    return Told(prompt, plain_story(prompt, volatile_system=volatile is not None), salt)


@dataclass(frozen=True, slots=True)
class FoundBreak:
    """`reported`: the engine told its cached tokens; otherwise they are the predicted ones."""

    found: PrefixBreak
    reported: bool

    def wire(self) -> dict[str, Any]:
        """Nothing of other tenants."""
        found = self.found
        return {
            "cached_tokens": found.cached_tokens,
            "reported": self.reported,
            "segment": found.segment,
            "kind": found.kind,
            "label": found.label,
            "token_offset": found.token_offset,
            "reason": found.reason,
        }


class PrefixBreaks:
    """Remembers what was sent to each replica. Everything belongs to the event loop and returns at once.

    That another tenant sent the same text is written to the log alone, in sums: whoever may read the metrics could
    find out by trying what others ask about.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._sent = Sent()
        self._clock = clock
        self._apart = self._apart_tokens = 0
        self._told_s = clock()
        breaks = Counter(
            "headstart_prefix_breaks_total",
            "Prompts by why the reuse of their prefix ended",
            ["reason"],
            registry=metrics.registry,
        )
        self._counters = {reason: breaks.labels(reason) for reason in get_args(BreakReason)}
        metrics.gauge(
            "headstart_sent_blocks_remembered", "Blocks of sent prompts remembered", lambda: len(self._sent)
        )

    def now(self) -> int:
        """To be kept from before a prompt is sent until it is answered."""
        return self._sent.now()

    def answered(
        self, replica: Replica, told: Told, reported_tokens: int | None, predicted_tokens: int | None, since: int
    ) -> Callable[[], FoundBreak | None]:
        """The replica has computed the prompt. What is given tells its break, for whom the answer has to wait.

        None where the prompt's ids, or what was cached of it, are not known. It is found and recorded in any case, in
        a moment: with a long prompt that takes milliseconds.
        """
        cached_tokens = predicted_tokens if reported_tokens is None else reported_tokens
        block_size = _block_size(replica)
        if cached_tokens is None or not block_size:
            return lambda: None
        view = self._view(replica, told, since)

        @cache
        def found_break() -> FoundBreak | None:
            found = _find(replica, told, cached_tokens, block_size, view)
            if found is None:
                return None
            self._counters[found.reason].inc()
            if found.other_tenant:
                self._count_apart(found, told.prompt)
            return FoundBreak(found, reported_tokens is not None)

        def record() -> None:
            found_break()
            self._record(replica, told, cached_tokens, block_size, view)

        asyncio.get_running_loop().call_soon(record)
        return found_break

    def computed(
        self, replica: Replica, told: Told, reported_tokens: int | None, predicted_tokens: int | None
    ) -> None:
        """A prompt of the gateway's own was computed: it counts as sent, and nobody is told of its break."""
        cached_tokens = (predicted_tokens or 0) if reported_tokens is None else reported_tokens
        if block_size := _block_size(replica):
            self._record(replica, told, cached_tokens, block_size, self._view(replica, told, self._sent.now()))

    def foreign(self, replica: Followed, blocks: Sequence[bytes]) -> None:
        """Another gateway's prompt was computed, of which only the blocks are known."""
        self._sent.record_foreign(_key(replica), _epoch(replica), blocks)

    def foretold(self, replica: Replica, told: Told, cached_tokens: int) -> FoundBreak | None:
        """Where a prompt would break if it were sent now."""
        if not (block_size := _block_size(replica)):
            return None
        found = _find(replica, told, cached_tokens, block_size, self._view(replica, told, self._sent.now()))
        return None if found is None else FoundBreak(found, reported=False)

    def forget(self, replica: Replica) -> None:
        """The replica is gone."""
        self._sent.forget(_key(replica))

    def _view(self, replica: Replica, told: Told, since: int) -> SentView:
        return self._sent.view(_key(replica), _epoch(replica), since, _tag(told.salt))

    def _record(self, replica: Replica, told: Told, cached_tokens: int, block_size: int, view: SentView) -> None:
        prompt = told.prompt
        if prompt.token_ids is None or not are_block_hashes(
            prompt.block_hashes, prompt.token_ids, block_size, told.salt
        ):
            return
        places = places_to_record(prompt, told.story, cached_tokens, block_size, told.salt, view)
        self._sent.record(_key(replica), _epoch(replica), prompt.block_hashes, places, _tag(told.salt))

    def _count_apart(self, found: PrefixBreak, prompt: Prompt) -> None:
        self._apart += 1
        self._apart_tokens += prompt.tokens - found.cached_tokens
        now_s = self._clock()
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        log.info(
            "tenants' salts keep equal prompts apart: %d prompts so far, up to %d tokens computed again",
            self._apart,
            self._apart_tokens,
        )


def _find(replica: Replica, told: Told, cached_tokens: int, block_size: int, view: SentView) -> PrefixBreak | None:
    # Of several engines behind one address none is known to be the one that was sent a prompt.
    memory = None if replica.several_engines else view
    return find_break(told.prompt, told.story, cached_tokens, block_size, told.salt, memory)


def _block_size(replica: Replica) -> int:
    """0 where nothing can be reused, or is known to be."""
    return 0 if replica.facts.prefix_caching is False else replica.facts.block_size or 0


def _key(replica: Followed) -> str:
    """An engine of the same name at another address is another one, also while the first is drained."""
    endpoint = replica.endpoint
    return f"{endpoint.name} {endpoint.url} {endpoint.host}"


def _epoch(replica: Followed) -> Hashable:
    """Another one whenever what the replica held is gone."""
    residency = replica.residency
    return replica.facts.started_s, residency, None if residency is None else residency.clears


def _tag(salt: str) -> bytes:
    """Tells tenants apart in the memory of contents; salts themselves are secrets."""
    return blake2b(salt.encode(), digest_size=_TAG_BYTES).digest()
