"""When a prefill starts: the queue before one replica, its slots, and the time that is left for background work."""

import asyncio
import time
from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.arrivals import Arrivals
from gateway.elsewhere import Elsewhere, Turns
from gateway.in_flight import InFlight
from gateway.queueing import PATIENCE, Prefill, Queued, gathering_s, limit_tokens, released, turn_order, wait_s
from gateway.tickets import Ticket
from latency.speed import SpeedEstimate

__all__ = ["Background", "Elsewhere", "Pacer", "Prefill", "QueueFull", "Ticket"]

LOOKED_AT_AGAIN = 8
"""So many of those that wait are asked, before each release, what they would compute by now."""
_LOOK_STEP_S = 0.005


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
    `arrivals`: requests that may be on their way to this queue; None where they may as well go elsewhere.
    """

    def __init__(
        self, *, enabled: bool = True, max_queued: int = 512, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience = PATIENCE
        self.arrivals: Arrivals | None = None
        self._enabled = enabled
        self._max_queued = max_queued
        self._clock = clock
        self._queue: list[Queued] = []
        self._waiters: dict[int, _Waiter] = {}
        self._in_flight = InFlight(paced=enabled, clock=clock, freed=self._release_soon)
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
        return self._in_flight.tokens

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
        return limit_tokens(self._in_flight.speed, queued_tokens, self.decoding, len(self._queue))

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and no prefill is in flight."""
        return not self._queue and not self._in_flight

    @property
    def decoding(self) -> int:
        """Requests whose first token has come and which are not done."""
        return self._in_flight.decoding

    def learned(self, speed: SpeedEstimate | None) -> None:
        """What is known of the replica's speed from now on; None: nothing."""
        self._in_flight.speed = speed
        self._release_soon()

    def wait_s(self, prefill_s: float, deadline_s: float | None = None) -> float:
        """The predicted wait of a prefill of so many seconds that would enter now. Read-only; any thread may call."""
        # Values that the event loop may replace meanwhile are read once.
        speed, queue, now_s = self._in_flight.speed, list(self._queue), self._clock()
        rest_s = self._in_flight.rest_s(now_s)
        if not self._enabled:
            return rest_s
        # Gateways take turns by who waits longest, and this one would be the latest.
        rest_s += self._turns.elsewhere.seconds
        if not queue and not rest_s:
            return rest_s
        tokens, fixed_s = 0, 0.0
        if speed is not None:
            tokens, fixed_s = max(0, speed.prefill.most_uncached(prefill_s)), self._in_flight.fixed_s
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
        ticket = Ticket(self._in_flight.prefilled, job, 0.0, began_s)
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
            ticket = Ticket(self._in_flight.prefilled, job, 0.0, now_s)
            self._launch([ticket], now_s)
            return ticket
        if len(self._queue) >= self._max_queued:
            raise QueueFull(self.wait_s(job.seconds, job.deadline_s))
        self._numbers += 1
        queued = _queued(job, now_s, self._numbers, self._in_flight.speed, self.patience)
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
        engine = self._in_flight
        engine.give_up_late(now_s)
        if not self._queue:
            return
        order = self._next(now_s)
        if not order:
            self._release_at(engine.recheck_s(now_s))
            return
        if self._gathers() and (rest_s := gathering_s(self._queue, now_s)) > 0:
            # Who was on the way may not come after all.
            self._release_at(min(rest_s, _LOOK_STEP_S))
            return
        if self._turns.yields(min(queued.entered_s for queued in self._queue), now_s):
            self._release_at(_LOOK_STEP_S)
            return
        if len(order) < len(self._queue) and self._looked_again():
            order = self._next(now_s)
            if not order:
                self._release_at(engine.recheck_s(now_s))
                return
        tickets = []
        for queued in order:
            in_turn = queued is self._queue[0]
            self._passed_s = 0.0 if in_turn else self._passed_s + queued.job.seconds
            self._queue.remove(queued)
            turn = self._waiters.pop(queued.number).turn
            if not turn.done():
                ticket = Ticket(self._in_flight.prefilled, queued.job, now_s - queued.entered_s, now_s)
                tickets.append(ticket)
                turn.set_result(ticket)
        if tickets:
            self._launch(tickets, now_s)
        self._queue_changed()
        self._release_soon()

    def _gathers(self) -> bool:
        """Whether an idle engine may wait for requests that are on their way; not for the sake of a fixed prompt."""
        return bool(self.arrivals) and not self._in_flight and all(waiter.again for waiter in self._waiters.values())

    def _launch(self, tickets: list[Ticket], now_s: float) -> None:
        self._in_flight.launch(tickets, now_s)
        self._idle.clear()

    def _next(self, now_s: float) -> list[Queued]:
        """Those that leave now, in order; none before the engine is about to be free."""
        engine = self._in_flight
        if len(self._queue) == 1 and not engine:
            # Whatever it holds: an engine never idles.
            return list(self._queue)
        order = turn_order(self._queue, now_s + engine.rest_s(now_s), self._passed_s)
        count = released(order, engine.tokens, self.limit_tokens, is_due=engine.is_due(now_s))
        return order[:count]

    def _looked_again(self) -> bool:
        """Whether those whose turn is next are shorter or longer by now than they were when they came."""
        changed = False
        for queued in self._queue[:LOOKED_AT_AGAIN]:
            again = self._waiters[queued.number].again
            job = queued.job if again is None else again()
            if job != queued.job:
                self._queue.remove(queued)
                speed = self._in_flight.speed
                newer = _queued(job, queued.entered_s, queued.number, speed, self.patience)
                insort(self._queue, newer, key=_turn)
                changed = True
        return changed


def _turn(queued: Queued) -> tuple[float, int]:
    return queued.turn


def _queued(job: Prefill, now_s: float, number: int, speed: SpeedEstimate | None, patience: float) -> Queued:
    """A job with the margin that its own prediction needs before its deadline."""
    margin_s = 0.0
    if speed is not None and job.deadline_s is not None:
        tokens = job.uncached_tokens, job.cached_tokens
        margin_s = max(0.0, speed.safe_s(*tokens) - speed.predict_s(*tokens))
    return Queued(job, now_s, number, margin_s=margin_s, patience=patience)
