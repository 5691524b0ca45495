"""Requests that are on their way to a queue: they have come, and are being searched for and planned."""

from collections.abc import Iterator
from contextlib import contextmanager


class Arrivals:
    """How many requests of this process are being prepared. Belongs to one event loop."""

    def __init__(self) -> None:
        self._count = 0

    def __bool__(self) -> bool:
        """Whether any is on its way."""
        return self._count > 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around all that a request goes through before it enters a queue."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
