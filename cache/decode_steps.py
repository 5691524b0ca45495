"""An engine's steps, counted in the streams that pass: an answer that comes whole grows with them, unseen."""

from collections.abc import Callable
from dataclasses import dataclass

from cache.lease import Lease


@dataclass(slots=True)
class _Unseen:
    """Steps: before its first, and the one in which it begins the next block."""

    began: int
    due: int


class DecodeSteps:
    """Each running request gets a token in each step, so the streams beside it tell how far an answer is.

    `grown` is told when an answer that comes whole begins a block: how many tokens it has, the one on its way
    included. An answer that has ended without this being known yet is believed to go on, for a step or two. Bounded
    by the requests in flight.
    """

    def __init__(self, grown: Callable[[Lease, int], None]) -> None:
        self.count = 0
        self._due = 0
        self._grown = grown
        self._whole: dict[Lease, _Unseen] = {}

    def reached(self, step: int) -> None:
        """A stream has come to this step; others may have told of it already."""
        if step > self.count:
            self.count = step
            if step >= self._due and self._whole:
                self._grow()

    def comes_whole(self, lease: Lease) -> None:
        """Nothing will be seen of this answer until it is over."""
        self._whole[lease] = _Unseen(self.count, self.count + 2)
        self._due = 0

    def begins(self, lease: Lease) -> None:
        """It has found room only now."""
        if lease in self._whole:
            self.comes_whole(lease)

    def over(self, lease: Lease) -> None:
        self._whole.pop(lease, None)

    def clear(self) -> None:
        self._whole.clear()

    def _grow(self) -> None:
        for lease, unseen in tuple(self._whole.items()):
            if self.count < unseen.due:
                continue
            # Its first step is the prefill, whose token is the first; another one is on its way.
            tokens = self.count - unseen.began + 1
            unseen.due = unseen.began - 1 + lease.next_block_tokens(tokens)
            self._grown(lease, tokens)
        self._due = min(unseen.due for unseen in self._whole.values())
