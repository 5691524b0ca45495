"""The right to a prefill, and the prefills that were released together."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.queueing import Prefill

Prefilled = Callable[["Ticket", bool], None]
"""Hears that a ticket's prefill is over; True: its decode goes on."""

# A batch that takes so many times its prediction, and so long, is no longer waited for: others may do better.
LATE_FACTOR = 4.0
LATE_S = 5.0


@dataclass(slots=True, eq=False)
class Batch:
    """Prefills released together. `began_s`: when the engine came to them; their release while others are before.

    `shared`: several prefills are believed to be in one step.
    """

    seconds: float
    began_s: float
    tickets: "set[Ticket]"
    shared: bool

    @property
    def end_s(self) -> float:
        return self.began_s + self.seconds

    @property
    def late_s(self) -> float:
        return self.began_s + max(LATE_S, LATE_FACTOR * self.seconds)


class Ticket:
    """The right to a prefill. Its owner calls `done` in the end, whatever happened; all calls are idempotent.

    Once the first token has come, `began_s` is when the engine is believed to have come to the prefill, on the
    pacer's clock, and `alone` whether no other prefill was in its steps: only then is its time that of its tokens.
    `batch` belongs to the pacer.
    """

    __slots__ = ("_prefilled", "_timer", "alone", "batch", "began_s", "job", "waited_s")

    def __init__(self, prefilled: "Prefilled", job: Prefill, waited_s: float, released_s: float) -> None:
        self._prefilled = prefilled
        self.batch: Batch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.job = job
        self.waited_s = waited_s
        self.began_s = released_s
        self.alone = True

    def first_token(self) -> None:
        """The prefill is over; the decode goes on beside the next one."""
        self._end(still_decoding=True)

    def first_token_expected(self, seconds: float) -> None:
        """For an answer that is not streamed: it counts as prefilled after so long, unless `done` comes before."""
        if self._timer is None and self.batch is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self.first_token)

    def done(self) -> None:
        """The request is over: answered, failed or abandoned."""
        self._end(still_decoding=False)

    def _end(self, *, still_decoding: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._prefilled(self, still_decoding)
