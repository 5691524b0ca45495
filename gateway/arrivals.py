"""Requests that are on their way to a queue: they have come, and are being searched for and planned."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG_S = 0.25
"""Who has been prepared for longer than that is not waited for: something holds it up."""


class Arrivals:
    """The requests of this process that are being prepared. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._began_s: dict[int, float] = {}

    def __bool__(self) -> bool:
        """Whether any is on its way, and should be there soon."""
        latest_s = next(reversed(self._began_s.values()), None)
        return latest_s is not None and self._clock() - latest_s < YOUNG_S

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around all that a request goes through before it enters a queue."""
        number = next(self._numbers)
        self._began_s[number] = self._clock()
        try:
            yield
        finally:
            del self._began_s[number]
