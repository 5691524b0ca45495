"""Bytes in Redis, shared by gateways. Losing Redis costs hits, never a request."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from cache.breaker import Breaker
from cache.memory import MemoryStore
from cache.store import StoreHealth

log = logging.getLogger("headstart.store")

Answer = TypeVar("Answer")

# Redis serves one command at a time: more connections only make a cold burst pay for more handshakes.
CONNECTIONS = 16


class RedisStore:
    """A ByteStore behind a circuit breaker.

    A call waits at most `timeout_s` for one of the connections, then at most as long for Redis; only the second is
    held against Redis. After a failure, calls are answered at once without Redis (from `fallback`
    where there is one, else as a miss) for a pause that doubles up to ten seconds; then one call tries again.
    Keys written or deleted meanwhile are deleted in Redis before it is believed again, so that an old value
    does not come back; of these the latest `max_stale_keys` are remembered.

    Bounds: every value has a time to live, values over `max_value_bytes` are dropped and counted, and Redis's own
    `maxmemory` with an eviction policy is the operator's. It connects when first used.
    Raises ValueError for a URL that is not of Redis.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "headstart:",
        timeout_s: float = 0.2,
        max_value_bytes: int = 8 * 2**20,
        fallback: MemoryStore | None = None,
        breaker: Breaker | None = None,
        now: Callable[[], float] = time.monotonic,
        max_stale_keys: int = 10_000,
    ) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._client = Redis.from_pool(pool)
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._max_value_bytes = max_value_bytes
        self._fallback = fallback
        self._breaker = breaker or Breaker()
        self._now = now
        self._max_stale_keys = max_stale_keys
        self._stale: OrderedDict[str, None] = OrderedDict()
        self._failures = 0
        self._refusing = False

    async def get(self, key: str) -> bytes | None:
        value, answered = await self._call(lambda: self._client.get(self._prefix + key))
        if answered:
            return _bytes(value)
        return await self._fallback.get(key) if self._fallback is not None else None

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        values, answered = await self._call(lambda: self._client.mget([self._prefix + key for key in keys]))
        if answered and values is not None:
            return [_bytes(value) for value in values]
        return await self._fallback.get_many(keys) if self._fallback is not None else [None] * len(keys)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        if len(value) > self._max_value_bytes:
            self._failures += 1
            await self._delete(key)
            return
        ttl_ms = int(ttl_s * 1000)
        if ttl_ms < 1:
            await self._delete(key)
            return
        _, answered = await self._call(lambda: self._client.set(self._prefix + key, value, px=ttl_ms), written=key)
        if not answered and self._fallback is not None:
            await self._fallback.put(key, value, ttl_s)

    async def delete(self, key: str) -> None:
        await self._delete(key)

    def health(self) -> StoreHealth:
        breaker = self._breaker
        return StoreHealth("redis", breaker.degraded, breaker.degraded_s(self._now()), self._failures, entries=None)

    async def aclose(self) -> None:
        await self._client.aclose()
        if self._fallback is not None:
            await self._fallback.aclose()

    async def _delete(self, key: str) -> None:
        await self._call(lambda: self._client.delete(self._prefix + key), written=key)
        if self._fallback is not None:
            await self._fallback.delete(key)

    async def _call(
        self, operation: Callable[[], Awaitable[Answer]], written: str | None = None
    ) -> tuple[Answer | None, bool]:
        """The operation's answer and True, or None and False when it was not or not surely done."""
        try:
            its_turn = await self._took_turn()
        except asyncio.CancelledError:
            if written is not None:
                self._mark_stale([written])
            raise
        if not its_turn:
            self._failed(written)
            return None, False
        try:
            return await self._ask(operation, written)
        finally:
            self._turns.release()

    async def _took_turn(self) -> bool:
        if not self._turns.locked():
            return await self._turns.acquire()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._turns.acquire()
        except TimeoutError:
            return False

    async def _ask(
        self, operation: Callable[[], Awaitable[Answer]], written: str | None
    ) -> tuple[Answer | None, bool]:
        call = self._breaker.enter(self._now())
        if call is None:
            self._failed(written)
            return None, False
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._breaker.degraded or self._stale:
                    await self._forget_stale()
                answer = await operation()
        except ResponseError as error:
            # Redis is there and refuses: no memory left for writes, or a read-only replica.
            self._breaker.succeeded(call, self._now())
            self._failed(written)
            if not self._refusing:
                self._refusing = True
                log.warning("Redis refuses operations, going on without it: %s", type(error).__name__)
            return None, False
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(written)
            if self._breaker.failed(call, self._now()):
                log.warning("Redis is lost, going on without it: %s", type(error).__name__)
            return None, False
        except BaseException:
            self._breaker.gave_up(call)
            if written is not None:
                self._mark_stale([written])
            raise
        if self._refusing and written is not None:
            self._refusing = False
            log.warning("Redis accepts operations again")
        if self._breaker.succeeded(call, self._now()):
            log.warning("Redis is back")
            if self._fallback is not None:
                self._fallback.clear()
        return answer, True

    def _failed(self, written: str | None) -> None:
        self._failures += 1
        if written is not None:
            self._mark_stale([written])

    def _mark_stale(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._stale[key] = None
            self._stale.move_to_end(key)
        while len(self._stale) > self._max_stale_keys:
            self._stale.popitem(last=False)

    async def _forget_stale(self) -> None:
        """Delete what changed while Redis was away. Raises what the client raises; then the keys stay remembered."""
        keys = list(self._stale)
        if not keys:
            return
        self._stale.clear()
        try:
            await self._client.delete(*(self._prefix + key for key in keys))
        except BaseException:
            self._mark_stale(keys)
            raise


def _bytes(value: bytes | str | None) -> bytes | None:
    """The client types its answers for both of its modes; this one never decodes."""
    return value.encode() if isinstance(value, str) else value
