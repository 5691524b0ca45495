"""The numbers of an engine's event batches: what is next, what is missing, and when the engine began anew."""

from typing import Literal

Arrival = Literal["next", "known", "gap", "restart"]


class EventSequence:
    """`expected` is the number of the next batch to apply, `seen` the last one that came live.

    A publisher counts up from 0 for its life, and a subscriber hears it in order; what a replay has brought comes a
    second time when it was on its way meanwhile.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.seen = -1

    def arrived(self, number: int) -> Arrival:
        """What a batch that came live is; `gap`: batches from `expected` up to it are missing."""
        if number <= self.seen:
            return "restart"
        self.seen = number
        if number < self.expected:
            return "known"
        return "next" if number == self.expected else "gap"

    def applied(self, number: int) -> None:
        self.expected = number + 1

    def begin(self) -> None:
        """Another publisher: it counts from 0."""
        self.expected, self.seen = 0, -1
