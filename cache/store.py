"""Bytes with a time to live, in memory or in Redis: transcripts and query embeddings live here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """`degraded_s` is the time spent degraded so far; `failures` counts operations answered without it."""

    kind: str
    degraded: bool
    degraded_s: float
    failures: int
    entries: int | None


class ByteStore(Protocol):
    """Keys are ASCII. Values are bytes. `put` replaces and restarts the time to live.

    Implementations are bounded (least recently used leaves first) and never raise for an outage: a read
    is a miss, a write is dropped and counted, and `health` says so.
    """

    async def get(self, key: str) -> bytes | None: ...

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def delete(self, key: str) -> None: ...

    def health(self) -> StoreHealth: ...

    async def aclose(self) -> None: ...
