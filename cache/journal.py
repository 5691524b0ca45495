"""Streams in Redis that gateways append to and follow. Losing Redis leaves each gateway alone; no request fails."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache.breaker import Breaker
from cache.store import StoreHealth

log = logging.getLogger("headstart.journal")

FIELD = b"e"
START = b"0"
_READ_AT_ONCE = 64
_BLOCK_S = 0.25
_TRIM_S = 5.0
_TRIMMED_TO = 0.75
_MOST_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class Heard:
    """One entry. `at_s` is when Redis took it, on this process's monotonic clock."""

    stream: str
    at_s: float
    data: bytes


class Listener(Protocol):
    """Who hears the entries of the streams that are followed, in their order, on the event loop."""

    def heard(self, entry: Heard) -> None: ...


@dataclass(slots=True)
class JournalCounts:
    """Entries and bytes since the start. `dropped`: written to a full queue, or while Redis was away."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: int = 0


class Journal:
    """Appends off the critical path and reads in the background; use it with `async with`, in one event loop.

    A stream is bounded by `max_bytes` and `max_entries` (its oldest entries leave; checked every five seconds, so
    that it may be larger for as long) and lives `ttl_s` after its last entry. What waits to be written is bounded by
    `max_waiting` entries, oldest dropped. No request waits for any of it, so that `timeout_s` is a generous one: a
    process that was busy for a second has not lost Redis. After a failure Redis is left alone for a pause that
    doubles up to ten seconds; entries of that time are dropped: what they told is over by then.
    Raises ValueError for a URL that is not of Redis.
    """

    def __init__(
        self,
        url: str,
        listener: Listener,
        *,
        prefix: str = "headstart:",
        timeout_s: float = 5.0,
        max_bytes: int = 16 * 2**20,
        max_entries: int = 65_536,
        ttl_s: float = 900.0,
        max_waiting: int = 4_096,
        breaker: Breaker | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = ConnectionPool.from_url(
            url,
            socket_timeout=timeout_s + _BLOCK_S,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._client = Redis.from_pool(pool)
        self._listener = listener
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._max_waiting = max_waiting
        self._breaker = breaker or Breaker()
        self._now = now
        self._failures = 0
        self.counts = JournalCounts()
        self._wake = asyncio.Event()
        self._followed: dict[str, bytes] = {}
        self._following = asyncio.Event()
        self._trimmed_s: dict[str, float] = {}
        self._redis_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def __aenter__(self) -> "Journal":
        self._tasks = [
            asyncio.create_task(self._write(), name="journal-write"),
            asyncio.create_task(self._read(), name="journal-read"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is waiting is written if Redis takes it at once."""
        # A cancellation that meets the end of an answer may be lost in the client; the flag is not.
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._waiting and not self._breaker.degraded:
            await self._attempt(self._flush)
        await self._client.aclose()

    @property
    def degraded(self) -> bool:
        return self._breaker.degraded

    def health(self) -> StoreHealth:
        breaker = self._breaker
        return StoreHealth("journal", breaker.degraded, breaker.degraded_s(self._now()), self._failures, None)

    def append(self, stream: str, data: bytes) -> None:
        """Never waits. The entry is written within milliseconds where Redis answers, else dropped and counted."""
        if self._breaker.degraded or len(self._waiting) >= self._max_waiting:
            self.counts.dropped += 1
            if self._breaker.degraded:
                return
            self._waiting.popleft()
        self._waiting.append((stream, data))
        self._wake.set()

    def follow(self, stream: str) -> None:
        """Hear the stream from the beginning of what is kept; again from there when it is followed already."""
        self._followed[stream] = START
        self._following.set()

    def unfollow(self, stream: str) -> None:
        self._followed.pop(stream, None)
        if not self._followed:
            self._following.clear()

    async def _write(self) -> None:
        while not self._closing:
            await self._wake.wait()
            self._wake.clear()
            if self._waiting and not await self._attempt(self._flush):
                self.counts.dropped += len(self._waiting)
                self._waiting.clear()

    async def _flush(self) -> None:
        """Raises what the client raises; then the entries are gone, for they may have been written."""
        entries = list(self._waiting)
        self._waiting.clear()
        now_s, due = self._now(), []
        async with self._client.pipeline(transaction=False) as pipe:
            for stream, data in entries:
                pipe.xadd(self._prefix + stream, {FIELD: data}, maxlen=self._max_entries, approximate=True)
            for stream in dict.fromkeys(stream for stream, _ in entries):
                pipe.pexpire(self._prefix + stream, int(self._ttl_s * 1000))
                if now_s - self._trimmed_s.get(stream, -_TRIM_S) >= _TRIM_S:
                    due.append(stream)
            await pipe.execute()
        self.counts.written += len(entries)
        self.counts.written_bytes += sum(len(data) for _, data in entries)
        for stream in due:
            self._trimmed_s[stream] = now_s
            await self._trim(self._prefix + stream)
        while len(self._trimmed_s) > 1024:
            del self._trimmed_s[next(iter(self._trimmed_s))]

    async def _trim(self, key: str) -> None:
        size_bytes = await self._client.memory_usage(key)
        if size_bytes is not None and size_bytes > self._max_bytes:
            kept = int(await self._client.xlen(key) * self._max_bytes / size_bytes * _TRIMMED_TO)
            await self._client.xtrim(key, maxlen=kept, approximate=False)

    async def _read(self) -> None:
        while not self._closing:
            await self._following.wait()
            if not await self._attempt(self._listen):
                # What is told while nobody listens is heard afterwards, as far as it is kept.
                self._redis_s = None
                await asyncio.sleep(_MOST_PAUSE_S)

    async def _listen(self) -> None:
        if self._redis_s is None:
            seconds, micros = await self._client.time()
            self._redis_s = seconds + micros / 1e6 - self._now()
        asked = dict(self._followed)
        if not asked:
            return
        answer = await self._client.xread(
            {self._prefix + stream: after for stream, after in asked.items()},
            count=_READ_AT_ONCE,
            block=int(_BLOCK_S * 1000),
        )
        for name, entries in _streams(answer):
            stream = name.decode().removeprefix(self._prefix)
            for number, fields in entries:
                # Followed again, or no longer, while this answer was on its way.
                if self._followed.get(stream) != asked[stream]:
                    break
                asked[stream] = self._followed[stream] = number
                data = fields.get(FIELD, b"")
                self.counts.read += 1
                self.counts.read_bytes += len(data)
                at_s = int(number.split(b"-")[0]) / 1000 - self._redis_s
                self._listener.heard(Heard(stream, at_s, data))
            # A long window is heard in many pieces; requests go on between them.
            await asyncio.sleep(0)

    async def _attempt(self, operation: Callable[[], Awaitable[None]]) -> bool:
        """Whether Redis was asked and did it."""
        call = self._breaker.enter(self._now())
        if call is None:
            return False
        try:
            async with asyncio.timeout(self._timeout_s + _BLOCK_S):
                await operation()
        except (RedisError, OSError, TimeoutError) as error:
            self._failures += 1
            # Connections of before are broken too; the next attempt would be held against a Redis that is back.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            if self._breaker.failed(call, self._now()):
                log.warning("Redis is lost, this gateway goes on alone: %s", type(error).__name__)
            return False
        except BaseException:
            self._breaker.gave_up(call)
            raise
        if self._breaker.succeeded(call, self._now()):
            log.warning("Redis is back, gateways hear of each other again")
        return True


def _streams(answer: Any) -> list[tuple[bytes, list[tuple[bytes, Mapping[bytes, bytes]]]]]:
    """The client's answer in one form: pairs in the older protocol, a mapping with one list more in the newer."""
    if not answer:
        return []
    if isinstance(answer, Mapping):
        return [(name, [entry for entries in lists for entry in entries]) for name, lists in answer.items()]
    return [(name, list(entries)) for name, entries in answer]
