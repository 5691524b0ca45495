"""Which chunks are asked for together: the last requests of each tenant, counted by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

MOST_REQUESTS = 16_384
"""Requests that are remembered; with ten chunks each some 15 MB."""

MOST_LATEST = 256
"""Of one chunk only so many of the latest requests count: what a popular one costs stays bounded."""


@dataclass(slots=True)
class _Seen:
    """A chunk's requests, oldest first, as their numbers; the first `forgotten` of them no longer count."""

    requests: list[int] = field(default_factory=list)


class Companions:
    """Remembers which chunks each of the last `most_requests` requests had; the oldest leave.

    `key` keeps tenants apart: chunks under different keys are never counted together. Usable from any thread.
    """

    def __init__(self, most_requests: int = MOST_REQUESTS, most_latest: int = MOST_LATEST) -> None:
        if most_requests <= 0 or most_latest <= 0:
            raise ValueError(f"sizes must be positive, not {most_requests} and {most_latest}")
        self._most_latest = most_latest
        self._ring: list[tuple[bytes, tuple[str, ...]] | None] = [None] * most_requests
        self._seen: dict[tuple[bytes, str], _Seen] = {}
        self._next = 0
        self._lock = Lock()

    def observe(self, key: bytes, chunks: Sequence[tuple[str, int]]) -> None:
        """A request was sent with these chunks, each a label and its tokens, in any order. Microseconds."""
        labels = tuple(dict.fromkeys(label for label, _ in chunks))
        if not labels:
            return
        with self._lock:
            slot = self._next % len(self._ring)
            leaving = self._ring[slot]
            if leaving is not None:
                self._forget(self._next - len(self._ring), *leaving)
            self._ring[slot] = (key, labels)
            for label in labels:
                requests = self._seen.setdefault((key, label), _Seen()).requests
                requests.append(self._next)
                if len(requests) > 2 * self._most_latest:
                    del requests[: -self._most_latest]
            self._next += 1

    def together(self, key: bytes, labels: Sequence[str]) -> list[int]:
        """For each request that had some of the labels, which: bit i stands for `labels[i]`."""
        masks: dict[int, int] = {}
        for place, label in enumerate(labels):
            seen = self._seen.get((key, label))
            if seen is not None:
                for request in seen.requests[-self._most_latest :]:
                    masks[request] = masks.get(request, 0) | 1 << place
        return list(masks.values())

    def _forget(self, request: int, key: bytes, labels: tuple[str, ...]) -> None:
        for label in labels:
            seen = self._seen.get((key, label))
            if seen is not None and seen.requests and seen.requests[0] == request:
                del seen.requests[0]
                if not seen.requests:
                    del self._seen[key, label]
