"""What an engine was given and has not answered yet: prefills in the order of their steps, and running answers."""

from collections.abc import Callable, Sequence

from gateway.queueing import batch_s, beside_s, lead_s
from gateway.tickets import Batch, Ticket
from latency.speed import SpeedEstimate

LEAST_DELAY_S = 0.0005


class InFlight:
    """The batches of one replica as they are believed to run. `freed` is called whenever a prefill is over.

    `paced`: batches are released one behind the other, so that only those that wait in the engine share steps.
    Changes belong to one event loop; what is read may be read from any thread.
    """

    def __init__(self, *, paced: bool, clock: Callable[[], float], freed: Callable[[], None]) -> None:
        self.speed: SpeedEstimate | None = None
        self._paced = paced
        self._clock = clock
        self._freed = freed
        self._batches: list[Batch] = []
        self._decoding: set[Ticket] = set()

    def __len__(self) -> int:
        """Batches whose first tokens have not all come."""
        return len(self._batches)

    @property
    def tokens(self) -> int:
        """Uncached tokens of the prefills that have not given their first token."""
        return sum(ticket.job.uncached_tokens for batch in self._batches for ticket in batch.tickets)

    @property
    def decoding(self) -> int:
        """Requests whose first token has come and which are not done."""
        return len(self._decoding)

    @property
    def fixed_s(self) -> float:
        """What a step costs whatever is prefilled in it."""
        return 0.0 if self.speed is None else self.speed.predict_s(0, decoding=len(self._decoding))

    def rest_s(self, now_s: float) -> float:
        """What the engine still has to do of what it was given, as predicted."""
        batches = tuple(self._batches)
        if not batches:
            return 0.0
        return max(0.0, batches[0].end_s - now_s) + sum(batch.seconds for batch in batches[1:])

    def is_due(self, now_s: float) -> bool:
        """Whether the engine is through with what it was given, or so nearly that the next batch should leave."""
        return not self._batches or (len(self._batches) == 1 and self.rest_s(now_s) <= self._lead_s())

    def recheck_s(self, now_s: float) -> float:
        """Seconds until the next batch is due, if no first token comes before. There must be one in flight."""
        head = self._batches[0]
        if self.speed is not None and len(self._batches) == 1:
            return max(LEAST_DELAY_S, head.end_s - self._lead_s() - now_s)
        return max(LEAST_DELAY_S, head.late_s - now_s)

    def give_up_late(self, now_s: float) -> None:
        """Prefills that take far longer than predicted are no longer waited for."""
        while self._batches and now_s >= self._batches[0].late_s:
            for ticket in tuple(self._batches[0].tickets):
                ticket.first_token()

    def launch(self, tickets: Sequence[Ticket], now_s: float) -> None:
        """These leave together. `prefilled` must be what the tickets tell."""
        jobs, decoding = [ticket.job for ticket in tickets], len(self._decoding)
        seconds = batch_s(jobs, self.fixed_s)
        if self._paced:
            tokens = sum(job.uncached_tokens for job in jobs)
            seconds += beside_s(self.speed, tokens, decoding, follows=bool(self._batches))
        # What waits in the engine together is computed together, and so is what comes before the first step began.
        beside = self._batches[1:] if self._paced else list(self._batches)
        if self._batches and now_s - self._batches[0].began_s < self.fixed_s:
            beside = list(self._batches)
        for other in beside:
            other.shared = True
        batch = Batch(seconds, now_s, set(tickets), shared=len(tickets) > 1 or bool(beside))
        for ticket in tickets:
            ticket.batch = batch
        self._batches.append(batch)

    def prefilled(self, ticket: Ticket, still_decoding: bool) -> None:
        """A ticket's prefill is over; True: its decode goes on."""
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
            batch.seconds -= max(0.0, ticket.job.seconds - self.fixed_s)
        self._freed()

    def _lead_s(self) -> float:
        return lead_s(self.speed, self.tokens, len(self._decoding))
