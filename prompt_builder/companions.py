"""Which chunks are asked for together: the last requests, kept by tenant and chunk."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Protocol

MOST_REQUESTS = 16_384
"""Requests that are remembered; with six chunks each at most some 25 MB."""

MOST_LATEST = 64
"""Of one chunk only so many of its latest requests count, so that a popular one costs no more than others."""

AWAITED_REQUESTS = 300
"""A request that waits for its turn is sure to come: it counts as so many that have come."""


class Together(Protocol):
    """What is known of one tenant's past requests. Reading changes nothing."""

    def together(self, labels: Sequence[str]) -> Mapping[int, int]:
        """Which of these chunks past requests had in common with them, and how many requests each such set.

        A set is a mask: bit i stands for `labels[i]`. Requests that had none of the chunks are not counted.
        """


class NothingKnown:
    """The past (a Together) of a tenant of whom nothing is known."""

    def together(self, labels: Sequence[str]) -> Mapping[int, int]:
        return {}


NOTHING_KNOWN = NothingKnown()


class Companions:
    """Remembers the chunks of the last `most_requests` requests; the oldest leave, and with them what they counted.

    `key` keeps tenants apart: chunks under different keys are never counted together. Of a chunk only the last
    `most_latest` requests are looked at, which is all the ageing that counts need. Usable from any thread. Raises
    ValueError for sizes that are not positive.
    """

    def __init__(self, most_requests: int = MOST_REQUESTS, most_latest: int = MOST_LATEST) -> None:
        if most_requests <= 0 or most_latest <= 0:
            raise ValueError(f"sizes must be positive, not {most_requests} and {most_latest}")
        self._most_requests = most_requests
        self._most_latest = most_latest
        self._ring: list[tuple[bytes, tuple[str, ...]]] = []
        self._latest: dict[tuple[bytes, str], list[int]] = {}
        self._next = 0
        self._awaited: dict[tuple[bytes, str], set[int]] = {}
        self._numbers = count()
        self._lock = Lock()

    def observe(self, key: bytes, chunks: Sequence[tuple[str, int]]) -> None:
        """A request was sent with these whole chunks, each a label and its tokens, in any order. Microseconds."""
        labels = tuple(dict.fromkeys(label for label, _ in chunks))
        if not labels:
            return
        with self._lock:
            if self._next < self._most_requests:
                self._ring.append((key, labels))
            else:
                slot = self._next % self._most_requests
                self._forget(self._next - self._most_requests, *self._ring[slot])
                self._ring[slot] = (key, labels)
            for label in labels:
                latest = self._latest.setdefault((key, label), [])
                latest.append(self._next)
                if len(latest) >= 2 * self._most_latest:
                    del latest[: -self._most_latest]
            self._next += 1

    def awaited(self, key: bytes, labels: Iterable[str]) -> Callable[[], None]:
        """A request with these chunks waits for its turn. Call what is returned once it waits no longer."""
        number = next(self._numbers)
        places = [(key, label) for label in labels]
        with self._lock:
            for place in places:
                self._awaited.setdefault(place, set()).add(number)

        def over() -> None:
            with self._lock:
                for place in places:
                    numbers = self._awaited.get(place, set())
                    numbers.discard(number)
                    if not numbers:
                        self._awaited.pop(place, None)

        return over

    def tokens_awaited_twice(self, key: bytes, chunks: Iterable[tuple[str, int]]) -> int:
        """Of a request that waits with these chunks: their tokens, as often as others wait with them too."""
        with self._lock:
            others = [(len(self._awaited.get((key, label), ())) - 1, tokens) for label, tokens in chunks]
        return sum(count * tokens for count, tokens in others if count > 0)

    def of(self, key: bytes) -> Together:
        """The past of one tenant, as it is whenever it is read."""
        return _Tenant(self, key)

    def together(self, key: bytes, labels: Sequence[str]) -> Mapping[int, int]:
        """See `Together`."""
        masks: dict[int, int] = {}
        awaited: dict[int, int] = {}
        with self._lock:
            for place, label in enumerate(labels):
                bit = 1 << place
                for request in self._latest.get((key, label), ())[-self._most_latest :]:
                    masks[request] = masks.get(request, 0) | bit
                for number in self._awaited.get((key, label), ()):
                    awaited[number] = awaited.get(number, 0) | bit
        counts = Counter(masks.values())
        for mask in awaited.values():
            counts[mask] += AWAITED_REQUESTS
        return counts

    @property
    def entries(self) -> int:
        """Numbers of requests that are held, over all chunks: what its memory grows with."""
        return sum(map(len, self._latest.values()))

    def _forget(self, request: int, key: bytes, labels: tuple[str, ...]) -> None:
        for label in labels:
            latest = self._latest.get((key, label))
            if latest is not None and latest[0] == request:
                del latest[0]
                if not latest:
                    del self._latest[key, label]


@dataclass(frozen=True, slots=True)
class _Tenant:
    companions: Companions
    key: bytes

    def together(self, labels: Sequence[str]) -> Mapping[int, int]:
        return self.companions.together(self.key, labels)
