"""When a prefill starts: the queue before one replica, its slots, and the time that is left for background work."""

import asyncio
import time
from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.elsewhere import Elsewhere, Turns
from gateway.queueing import (
    PATIENCE,
    Prefill,
    Queued,
    batch_s,
    beside_s,
    lead_s,
    limit_tokens,
    released,
    turn_order,
    wait_s,
)
from gateway.tickets import Batch, Ticket
from latency.speed import SpeedEstimate

__all__ = ["Background", "Elsewhere", "Pacer", "Prefill", "QueueFull", "Ticket"]

LOOKED_AT_AGAIN = 8
"""So many of those that wait are asked, before each release, what they would compute by now."""
_YIELD_STEP_S = 0.005
_LEAST_DELAY_S = 0.0005


Again = Callable[[], Prefill]
"""A job as it would be if it were released now. Quick, and must not raise."""


class QueueFull(Exception):
    """As many wait as may. `wait_s` is the predicted wait of this request, had it been let in."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"The queue is full; the predicted wait is {wait_s:.3f} s.")
        self.wait_s = wait_s


@dataclass(slots=True, eq=False)
class Background:
    """Work in a replica's idle time. `abandoned` is set as soon as a user's request comes: stop then."""

    abandoned: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _Waiter:
    turn: asyncio.Future[Ticket]
    again: Again | None


class Pacer:
    """Releases the prefills of one replica in turn. Everything but `wait_s` belongs to one event loop.

    `patience`: how long what enters from now on lets shorter prefills go first, as of `queueing.PATIENCE`.
    """

    def __init__(
        self, *, enabled: bool = True, max_queued: int = 512, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience = PATIENCE
        self._enabled = enabled
        self._max_queued = max_queued
        self._clock = clock
        self._speed: SpeedEstimate | None = None
        self._queue: list[Queued] = []
        self._waiters: dict[int, _Waiter] = {}
        self._batches: list[Batch] = []
        self._decoding: set[Ticket] = set()
        self._numbers = 0
        self._passed_s = 0.0
        self._turns = Turns()
        self._queue_changed: Callable[[], None] = lambda: None
        self._release_due: asyncio.Handle | None = None
        self._background: Background | None = None
        self._background_turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    # figures

    @property
    def queued(self) -> int:
        """Requests that wait for their prefill."""
        return len(self._queue)

    @property
    def in_flight_tokens(self) -> int:
        """Uncached tokens of the prefills that were released and have not given their first token."""
        return sum(ticket.job.uncached_tokens for batch in self._batches for ticket in batch.tickets)

    @property
    def waiting(self) -> Elsewhere:
        """What waits here, as other gateways should know it."""
        queue = self._queue
        if not queue:
            return Elsewhere()
        return Elsewhere(sum(queued.job.seconds for queued in queue), min(queued.entered_s for queued in queue))

    @property
    def limit_tokens(self) -> int:
        """The most uncached tokens that are released together now; a single larger prefill goes alone."""
        queued_tokens = sum(queued.job.uncached_tokens for queued in tuple(self._queue))
        return limit_tokens(self._speed, queued_tokens, self.decoding, len(self._queue))

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and no prefill is in flight."""
        return not self._queue and not self._batches

    @property
    def decoding(self) -> int:
        """Requests whose first token has come and which are not done."""
        return len(self._decoding)

    def learned(self, speed: SpeedEstimate | None) -> None:
        """What is known of the replica's speed from now on; None: nothing."""
        self._speed = speed
        self._release_soon()

    def wait_s(self, prefill_s: float, deadline_s: float | None = None) -> float:
        """The predicted wait of a prefill of so many seconds that would enter now. Read-only; any thread may call."""
        # Values that the event loop may replace meanwhile are read once.
        speed, queue, now_s = self._speed, list(self._queue), self._clock()
        rest_s = self._rest_s(now_s)
        if not self._enabled:
            return rest_s
        # Gateways take turns by who waits longest, and this one would be the latest.
        rest_s += self._turns.elsewhere.seconds
        if not queue and not rest_s:
            return rest_s
        tokens, fixed_s = 0, 0.0
        if speed is not None:
            tokens, fixed_s = max(0, speed.prefill.most_uncached(prefill_s)), self._fixed_s()
        new = _queued(Prefill(tokens, 0, prefill_s, deadline_s), now_s, self._numbers + 1, speed, self.patience)
        insort(queue, new, key=_turn)
        order = turn_order(queue, now_s + rest_s, self._passed_s)
        limit = limit_tokens(speed, sum(queued.job.uncached_tokens for queued in queue), self.decoding, len(queue))
        return wait_s(order, new, rest_s, limit, fixed_s)

    # other gateways in front of the same replica

    def on_queue(self, tell: Callable[[], None]) -> None:
        """`tell` is called whenever what waits here has changed."""
        self._queue_changed = tell

    def elsewhere(self, waiting: Elsewhere) -> None:
        """What waits at all other gateways from now on."""
        self._turns.elsewhere = waiting

    def foreign(self, job: Prefill, began_s: float) -> Ticket:
        """Another gateway released a prefill: it is before all that is released later, as if released here.

        The ticket ends as any other does, and is given up as late as any other.
        """
        if self._background is not None:
            self._background.abandoned.set()
        self._turns.other_went()
        ticket = Ticket(self._prefilled, job, 0.0, began_s)
        self._launch([ticket], began_s)
        return ticket

    # a request's way

    async def enter(self, job: Prefill, again: Again | None = None) -> Ticket:
        """Wait for the job's turn. Raises QueueFull at once; a cancelled waiter leaves no trace.

        While it waits, `again` is asked what the job has become: others leave blocks in the engine's cache.
        """
        if self._background is not None:
            self._background.abandoned.set()
        now_s = self._clock()
        if not self._enabled:
            ticket = Ticket(self._prefilled, job, 0.0, now_s)
            self._launch([ticket], now_s)
            return ticket
        if len(self._queue) >= self._max_queued:
            raise QueueFull(self.wait_s(job.seconds, job.deadline_s))
        self._numbers += 1
        queued = _queued(job, now_s, self._numbers, self._speed, self.patience)
        turn: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        insort(self._queue, queued, key=_turn)
        self._waiters[queued.number] = _Waiter(turn, again)
        self._idle.clear()
        self._queue_changed()
        # Requests that come in the same moment are all in the queue before the first of them is chosen.
        self._release_soon()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                turn.result().done()
            else:
                self._leave(queued.number)
            raise

    @asynccontextmanager
    async def background(self) -> AsyncIterator[Background]:
        """Waits until the replica is idle. Several take turns; a user's request waits for none of them."""
        async with self._background_turn:
            while not self.idle:
                await self._idle.wait()
            self._background = work = Background()
            try:
                yield work
            finally:
                self._background = None

    # inside

    def _fixed_s(self) -> float:
        """What a step costs whatever is prefilled in it."""
        return 0.0 if self._speed is None else self._speed.predict_s(0, decoding=len(self._decoding))

    def _lead_s(self) -> float:
        return lead_s(self._speed, self.in_flight_tokens, len(self._decoding))

    def _rest_s(self, now_s: float) -> float:
        """What the engine still has to do of what it was given, as predicted."""
        batches = tuple(self._batches)
        if not batches:
            return 0.0
        return max(0.0, batches[0].end_s - now_s) + sum(batch.seconds for batch in batches[1:])

    def _leave(self, number: int) -> None:
        if self._waiters.pop(number, None) is not None:
            self._queue = [queued for queued in self._queue if queued.number != number]
            self._queue_changed()
            self._release_soon()

    def _release_soon(self) -> None:
        self._release_at(0.0)

    def _release_at(self, delay_s: float) -> None:
        if self._release_due is not None:
            self._release_due.cancel()
            self._release_due = None
        if self._queue:
            loop = asyncio.get_running_loop()
            self._release_due = (
                loop.call_soon(self._release) if delay_s <= 0 else loop.call_later(delay_s, self._release)
            )
        elif self.idle:
            self._idle.set()

    def _release(self) -> None:
        """Release the next batch if the engine is about to be free; else come back when it is."""
        self._release_due = None
        now_s = self._clock()
        self._give_up_late(now_s)
        if not self._queue:
            return
        rest_s = self._rest_s(now_s)
        order = turn_order(self._queue, now_s + rest_s, self._passed_s)
        is_due = not self._batches or (len(self._batches) == 1 and rest_s <= self._lead_s())
        count = released(order, self.in_flight_tokens, self.limit_tokens, is_due=is_due)
        if not count:
            self._release_at(self._recheck_s(now_s))
            return
        if self._turns.yields(min(queued.entered_s for queued in self._queue), now_s):
            self._release_at(_YIELD_STEP_S)
            return
        if count < len(self._queue) and self._looked_again():
            order = turn_order(self._queue, now_s + rest_s, self._passed_s)
            count = released(order, self.in_flight_tokens, self.limit_tokens, is_due=is_due)
            if not count:
                self._release_at(self._recheck_s(now_s))
                return
        tickets = []
        for queued in order[:count]:
            in_turn = queued is self._queue[0]
            self._passed_s = 0.0 if in_turn else self._passed_s + queued.job.seconds
            self._queue.remove(queued)
            turn = self._waiters.pop(queued.number).turn
            if not turn.done():
                ticket = Ticket(self._prefilled, queued.job, now_s - queued.entered_s, now_s)
                tickets.append(ticket)
                turn.set_result(ticket)
        self._launch(tickets, now_s)
        self._queue_changed()
        self._release_soon()

    def _looked_again(self) -> bool:
        """Whether those whose turn is next are shorter or longer by now than they were when they came."""
        changed = False
        for queued in self._queue[:LOOKED_AT_AGAIN]:
            again = self._waiters[queued.number].again
            job = queued.job if again is None else again()
            if job != queued.job:
                self._queue.remove(queued)
                insort(
                    self._queue, _queued(job, queued.entered_s, queued.number, self._speed, self.patience), key=_turn
                )
                changed = True
        return changed

    def _recheck_s(self, now_s: float) -> float:
        """Seconds until the next batch is due, if no first token comes before."""
        head = self._batches[0]
        if self._speed is not None and len(self._batches) == 1:
            return max(_LEAST_DELAY_S, head.end_s - self._lead_s() - now_s)
        return max(_LEAST_DELAY_S, head.late_s - now_s)

    def _give_up_late(self, now_s: float) -> None:
        while self._batches and now_s >= self._batches[0].late_s:
            for ticket in tuple(self._batches[0].tickets):
                ticket.first_token()

    def _launch(self, tickets: list[Ticket], now_s: float) -> None:
        if not tickets:
            return
        jobs, decoding = [ticket.job for ticket in tickets], len(self._decoding)
        seconds = batch_s(jobs, self._fixed_s())
        if self._enabled:
            tokens = sum(job.uncached_tokens for job in jobs)
            seconds += beside_s(self._speed, tokens, decoding, follows=bool(self._batches))
        # What waits in the engine together is computed together, and so is what comes before the first step began.
        beside = self._batches[1:] if self._enabled else list(self._batches)
        if self._batches and now_s - self._batches[0].began_s < self._fixed_s():
            beside = list(self._batches)
        for other in beside:
            other.shared = True
        batch = Batch(seconds, now_s, set(tickets), shared=len(tickets) > 1 or bool(beside))
        for ticket in tickets:
            ticket.batch = batch
        self._batches.append(batch)
        self._idle.clear()

    def _prefilled(self, ticket: Ticket, still_decoding: bool) -> None:
        batch, ticket.batch = ticket.batch, None
        if not still_decoding:
            self._decoding.discard(ticket)
        if batch is None:
            return
        if still_decoding:
            self._decoding.add(ticket)
        ticket.began_s, ticket.alone = batch.began_s, not batch.shared
        batch.tickets.discard(ticket)
        if not batch.tickets:
            was_first = batch is self._batches[0]
            self._batches.remove(batch)
            if was_first and self._batches:
                self._batches[0].began_s = self._clock()
        elif not still_decoding:
            batch.seconds -= max(0.0, ticket.job.seconds - self._fixed_s())
        self._release_soon()


def _turn(queued: Queued) -> tuple[float, int]:
    return queued.turn


def _queued(job: Prefill, now_s: float, number: int, speed: SpeedEstimate | None, patience: float) -> Queued:
    """A job with the margin that its own prediction needs before its deadline."""
    margin_s = 0.0
    if speed is not None and job.deadline_s is not None:
        tokens = job.uncached_tokens, job.cached_tokens
        margin_s = max(0.0, speed.safe_s(*tokens) - speed.predict_s(*tokens))
    return Queued(job, now_s, number, margin_s=margin_s, patience=patience)
