"""An engine's steps, counted in the streams that pass: an answer that comes whole grows with them, unseen."""

from collections.abc import Callable

from cache.lease import Lease


class DecodeSteps:
    """Each running request gets a token in each step, so the streams beside it tell how far an answer is.

    `grown` is told of answers that come whole: how many tokens they have by now, the one on its way included. An
    answer that has ended without this being known yet is believed to go on, for a step or two. Bounded by the
    requests in flight.
    """

    def __init__(self, grown: Callable[[Lease, int], None]) -> None:
        self.count = 0
        self._grown = grown
        self._whole: dict[Lease, int] = {}

    def reached(self, step: int) -> None:
        """A stream has come to this step; others may have told of it already."""
        if step <= self.count:
            return
        self.count = step
        for lease, began in tuple(self._whole.items()):
            # Its first step is the prefill, which may take more than one.
            if step - began > 1:
                self._grown(lease, step - began + 1)

    def comes_whole(self, lease: Lease) -> None:
        """Nothing will be seen of this answer until it is over."""
        self._whole[lease] = self.count

    def begins(self, lease: Lease) -> None:
        """It has found room only now."""
        if lease in self._whole:
            self._whole[lease] = self.count

    def over(self, lease: Lease) -> None:
        self._whole.pop(lease, None)

    def clear(self) -> None:
        self._whole.clear()
