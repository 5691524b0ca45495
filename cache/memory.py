"""Bytes in this process: bounded by size, least recently used leaves first, with a time to live."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cache.store import StoreHealth

_ENTRY_OVERHEAD_BYTES = 200
"""What Python keeps beside the characters of a key and the bytes of a value, about."""


class MemoryStore:
    """A ByteStore of at most `max_bytes`, keys and overhead included.

    `now` gives seconds on any clock that only goes forward. Expired entries leave when they are asked for, or
    as the least recently used. A value that alone exceeds the bound is not kept, and counts as a failure.
    """

    def __init__(self, max_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._now = now
        self._entries: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._held_bytes = 0
        self._dropped = 0

    @property
    def held_bytes(self) -> int:
        """Bytes counted against the bound."""
        return self._held_bytes

    async def get(self, key: str) -> bytes | None:
        return self._read(key)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._read(key) for key in keys]

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self._remove(key)
        cost = _cost_bytes(key, value)
        if cost > self._max_bytes:
            self._dropped += 1
            return
        if ttl_s <= 0:
            return
        while self._held_bytes + cost > self._max_bytes:
            self._remove(next(iter(self._entries)))
        self._entries[key] = (value, self._now() + ttl_s)
        self._held_bytes += cost

    async def delete(self, key: str) -> None:
        self._remove(key)

    def health(self) -> StoreHealth:
        return StoreHealth(
            "memory", degraded=False, degraded_s=0.0, failures=self._dropped, entries=len(self._entries)
        )

    async def aclose(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()
        self._held_bytes = 0

    def _read(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        value, expires_s = entry
        if self._now() >= expires_s:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return value

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._held_bytes -= _cost_bytes(key, entry[0])


def _cost_bytes(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_OVERHEAD_BYTES
