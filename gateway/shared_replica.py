"""One engine that several gateways send to: what this one tells of it, and what it hears from the others."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache.journal_entries import (
    MOST_EVENTS,
    MOST_SECONDS,
    Batch,
    Begun,
    Ended,
    Event,
    FirstToken,
    join_hashes,
    split_hashes,
)
from cache.residency import Lease, Residency
from gateway.backends.facts import EngineFacts
from gateway.endpoints import Endpoint
from gateway.pacing import Elsewhere, Pacer, Prefill
from gateway.runs import Onlooker, Run
from gateway.tickets import LATE_FACTOR, LATE_S, Ticket
from gateway.timings import EngineUsage

ALIVE_S = 1.0
"""A gateway that has requests on the way tells so at least as often."""
GONE_S = 3.5
"""A gateway that was not heard of for so long is gone, and its requests with it."""
LONGEST_S = 3_600.0
"""A request of another gateway that lasts longer is taken to be over: its end was not heard."""
MOST_FOREIGN = 16_384
MOST_GATEWAYS = 256
_MOST_UNTOLD = 16_384
_HEARING_S = 1.0


class Followed(Protocol):
    """A replica as sharing sees it. `onlooker` is told of its runs."""

    onlooker: Onlooker | None

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def residency(self) -> Residency | None: ...

    @property
    def pacer(self) -> Pacer: ...


@dataclass(slots=True)
class SharingCounts:
    """Events of other gateways: those that counted, those of another run of the engine, and what made no sense."""

    applied: int = 0
    other_epoch: int = 0
    malformed: int = 0
    left_out: int = 0


@dataclass(slots=True, eq=False)
class _Foreign:
    """A request of another gateway. `ticket` and `lease` are None where it does not count in the queue, or blocks."""

    began_s: float
    late_s: float
    tokens: int
    ticket: Ticket | None
    lease: Lease | None
    prefilled: bool = False


@dataclass(slots=True, eq=False)
class _Gateway:
    heard_s: float
    waiting: Elsewhere = field(default_factory=Elsewhere)
    runs: dict[int, _Foreign] = field(default_factory=dict)


class SharedReplica:
    """Bounded: `MOST_FOREIGN` requests of others and `MOST_GATEWAYS` gateways; more is left out and counted."""

    def __init__(
        self,
        replica: Followed,
        counts: SharingCounts,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[Followed, Sequence[bytes]], None] = lambda replica, blocks: None,
    ) -> None:
        """`computed` is told the blocks of other gateways' prompts once the replica has computed them."""
        self._replica = replica
        self._computed = computed
        self._counts = counts
        self._changed = changed
        self._clock = clock
        self.stream: str | None = None
        self._epoch: float | None = None
        self._residency: Residency | None = None
        self._since_s = math.inf
        self._newest_s = self._newest_heard_s = -math.inf
        self._gateways: dict[bytes, _Gateway] = {}
        self._foreign = 0
        self._own: dict[Run, int] = {}
        self._numbers = 0
        self._untold: list[Event] = []
        self._told_s = -math.inf
        self._told_waiting = False
        self._queue_changed = False
        replica.pacer.on_queue(self._queue_has_changed)

    # its own requests, as their runs tell

    def began(self, run: Run) -> None:
        if self.stream is None or self.is_outdated():
            return
        self._numbers += 1
        self._own[run] = self._numbers
        job, hashes = run.prefill, join_hashes(run.hashes)
        seconds = min(job.seconds, MOST_SECONDS)
        self._tell(Begun(self._numbers, run.work.tokens, hashes, job.uncached_tokens, job.cached_tokens, seconds))

    def first_token(self, run: Run) -> None:
        number = self._own.get(run)
        if number is not None:
            self._tell(FirstToken(number))

    def ended(self, run: Run, usage: EngineUsage | None) -> None:
        number = self._own.pop(run, None)
        if number is not None:
            cached, output = (None, None) if usage is None else (usage.cached_tokens, usage.output_tokens)
            self._tell(Ended(number, cached, output))

    def _tell(self, event: Event) -> None:
        if len(self._untold) < _MOST_UNTOLD:
            self._untold.append(event)
        else:
            self._counts.left_out += 1
        self._changed()

    def _queue_has_changed(self) -> None:
        if self.stream is not None:
            self._queue_changed = True
            self._changed()

    def is_due(self, now_s: float) -> bool:
        """Whether others should hear that this gateway is still there."""
        return now_s - self._told_s >= ALIVE_S and (bool(self._own) or self._told_waiting)

    def to_tell(self, gateway: bytes, now_s: float) -> list[Batch]:
        """What has not been told yet, which is then taken to be told."""
        waiting = self._replica.pacer.waiting
        if not (self._untold or self._queue_changed or self.is_due(now_s)):
            return []
        events, self._untold = self._untold, []
        self._queue_changed = False
        self._told_s, self._told_waiting = now_s, waiting.oldest_s is not None
        oldest_s = None if waiting.oldest_s is None else min(MOST_SECONDS, max(0.0, now_s - waiting.oldest_s))
        queued_s = min(MOST_SECONDS, waiting.seconds)
        return [
            Batch(gateway, self._epoch, queued_s, oldest_s, events[start : start + MOST_EVENTS])
            for start in range(0, max(1, len(events)), MOST_EVENTS)
        ]

    # the engine's life

    def begin(self, stream: str) -> None:
        """It is followed there from now on. Of an engine that does not tell its age, only what is told afterwards."""
        self.stream = stream
        self._epoch, self._residency = self._replica.facts.started_s, self._replica.residency
        self._since_s = -math.inf if self._epoch is not None else self._clock()
        self._newest_s = self._newest_heard_s = -math.inf

    def is_outdated(self) -> bool:
        """Whether the engine is another process, or its picture another one, than when it was begun with."""
        return self._epoch != self._replica.facts.started_s or self._residency is not self._replica.residency

    def close(self) -> None:
        """Nothing of the others counts any more, and nothing more is told."""
        for gateway in list(self._gateways.values()):
            self._forget_all(gateway)
        self._gateways.clear()
        self._own.clear()
        self._untold.clear()
        self._say_elsewhere()
        self.stream = None

    # what others tell

    @property
    def foreign_runs(self) -> int:
        return self._foreign

    def gateways(self) -> set[bytes]:
        return set(self._gateways)

    def heard(self, batch: Batch, at_s: float) -> None:
        """Raises Malformed; what came before the event that makes no sense has counted."""
        self._newest_s, self._newest_heard_s = at_s, self._clock()
        if batch.epoch != self._epoch or at_s < self._since_s:
            self._counts.other_epoch += len(batch.events)
            return
        gateway = self._gateways.get(batch.gateway)
        if gateway is None:
            if len(self._gateways) >= MOST_GATEWAYS:
                self._counts.left_out += len(batch.events)
                return
            gateway = self._gateways[batch.gateway] = _Gateway(at_s)
        gateway.heard_s = max(gateway.heard_s, at_s)
        gateway.waiting = Elsewhere() if batch.oldest_s is None else Elsewhere(batch.queued_s, at_s - batch.oldest_s)
        self._say_elsewhere()
        for event in batch.events:
            match event:
                case Begun():
                    self._begun(gateway, event, at_s)
                case FirstToken():
                    self._prefilled(gateway.runs.get(event.run))
                case Ended():
                    self._ended(gateway, event)
            self._counts.applied += 1

    def tend(self, now_s: float) -> None:
        """Gateways that fell silent are gone; prefills and requests that never end are given up."""
        # While the past is heard, it is the present.
        present_s = min(now_s, self._newest_s) if now_s - self._newest_heard_s < _HEARING_S else now_s
        for name, gateway in list(self._gateways.items()):
            if present_s - gateway.heard_s > GONE_S:
                self._forget_all(gateway)
                del self._gateways[name]
                continue
            for number, foreign in list(gateway.runs.items()):
                if present_s - foreign.began_s > LONGEST_S:
                    del gateway.runs[number]
                    self._forget(foreign)
                elif not foreign.prefilled and now_s > foreign.late_s and foreign.ticket is not None:
                    foreign.ticket.first_token()
        self._say_elsewhere()

    def _begun(self, gateway: _Gateway, event: Begun, at_s: float) -> None:
        residency, replica, now_s = self._residency, self._replica, self._clock()
        if event.run in gateway.runs or self._foreign >= MOST_FOREIGN:
            self._counts.left_out += 1
            return
        lease = None
        if residency is not None:
            hashes = split_hashes(event.hashes, event.tokens, residency.block_size)
            if hashes is not None:
                lease = residency.begin_hashed(event.tokens, hashes)
        late_s = at_s + max(LATE_S, LATE_FACTOR * event.seconds)
        ticket = None
        if now_s < late_s:
            job = Prefill(event.uncached_tokens, event.cached_tokens, event.seconds, None)
            ticket = replica.pacer.foreign(job, min(at_s, now_s))
        gateway.runs[event.run] = _Foreign(at_s, late_s, event.tokens, ticket, lease)
        self._foreign += 1

    def _prefilled(self, foreign: _Foreign | None) -> None:
        if foreign is None or foreign.prefilled:
            return
        foreign.prefilled = True
        if foreign.ticket is not None:
            foreign.ticket.first_token()
        if foreign.lease is not None and self._residency is not None:
            self._residency.generated(foreign.lease, ())
            self._say_computed(foreign.lease)

    def _ended(self, gateway: _Gateway, event: Ended) -> None:
        foreign = gateway.runs.pop(event.run, None)
        if foreign is None:
            return
        residency = self._residency
        if residency is not None:
            if foreign.lease is not None:
                if not foreign.prefilled and event.output_tokens:
                    self._say_computed(foreign.lease)
                if event.cached_tokens is not None or event.output_tokens is not None:
                    residency.reconcile(foreign.lease, event.cached_tokens)
                if event.output_tokens:
                    residency.generated_unknown(foreign.lease, event.output_tokens)
            elif event.output_tokens is not None:
                residency.ran_unknown(foreign.tokens - (event.cached_tokens or 0) + event.output_tokens)
        self._forget(foreign)

    def _say_computed(self, lease: Lease) -> None:
        self._computed(self._replica, tuple(lease.hashes[: lease.prompt_tokens // lease.block_size]))

    def _forget(self, foreign: _Foreign) -> None:
        self._foreign -= 1
        if foreign.ticket is not None:
            foreign.ticket.done()
        if foreign.lease is not None and self._residency is not None:
            self._residency.end(foreign.lease)

    def _forget_all(self, gateway: _Gateway) -> None:
        for foreign in gateway.runs.values():
            self._forget(foreign)
        gateway.runs.clear()

    def _say_elsewhere(self) -> None:
        waiting = [gateway.waiting for gateway in self._gateways.values() if gateway.waiting.oldest_s is not None]
        oldest_s = min((entry.oldest_s for entry in waiting if entry.oldest_s is not None), default=None)
        self._replica.pacer.elsewhere(Elsewhere(sum(entry.seconds for entry in waiting), oldest_s))
