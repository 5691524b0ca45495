"""Every ByteStore, in memory and on a real server, keeps the same promises."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from cache.breaker import Breaker
from cache.memory import MemoryStore
from cache.redis_store import RedisStore
from cache.store import ByteStore

QUICK_S = 0.5


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ByteStore]:
    kept: ByteStore
    if request.param == "memory":
        kept = MemoryStore(10 * 2**20)
    else:
        # These promises are not about time: a machine that stalls for a moment must not look like a lost Redis.
        kept = RedisStore(request.getfixturevalue("redis_url"), prefix=f"{uuid.uuid4().hex}:", timeout_s=10)
    yield kept
    await kept.aclose()


async def test_what_was_put_is_read_back_as_the_same_bytes(store: ByteStore) -> None:
    value = bytes(range(256)) * 50
    await store.put("a", value, 60)
    assert await store.get("a") == value
    assert await store.get("b") is None


async def test_an_empty_value_is_not_a_miss(store: ByteStore) -> None:
    await store.put("empty", b"", 60)
    assert await store.get("empty") == b""


async def test_many_keys_are_answered_in_their_order_with_misses_between(store: ByteStore) -> None:
    await store.put("a", b"1", 60)
    await store.put("c", b"3", 60)
    assert await store.get_many(["c", "b", "a", "c"]) == [b"3", None, b"1", b"3"]
    assert await store.get_many([]) == []


async def test_put_replaces_and_restarts_the_time_to_live(store: ByteStore) -> None:
    await store.put("a", b"old", 0.15)
    await asyncio.sleep(0.08)
    await store.put("a", b"new", 0.3)
    await asyncio.sleep(0.12)
    assert await store.get("a") == b"new"
    await asyncio.sleep(0.25)
    assert await store.get("a") is None


async def test_deleted_is_gone_and_deleting_nothing_is_fine(store: ByteStore) -> None:
    await store.put("a", b"1", 60)
    await store.delete("a")
    await store.delete("a")
    assert await store.get("a") is None


async def test_a_time_to_live_of_nothing_leaves_nothing(store: ByteStore) -> None:
    await store.put("a", b"1", 60)
    await store.put("a", b"2", 0)
    assert await store.get("a") is None


async def test_a_value_over_the_bound_is_dropped_counted_and_leaves_no_older_one(store: ByteStore) -> None:
    await store.put("a", b"1", 60)
    await store.put("a", bytes(11 * 2**20), 60)
    assert await store.get("a") is None
    assert store.health().failures == 1
    assert not store.health().degraded


async def test_concurrent_clients_see_their_own_writes(store: ByteStore) -> None:
    async def write_and_read(index: int) -> bool:
        await store.put(f"k{index}", str(index).encode(), 60)
        return await store.get(f"k{index}") == str(index).encode()

    assert all(await asyncio.gather(*(write_and_read(i) for i in range(300))))
    assert store.health().failures == 0


async def test_memory_stays_under_its_bound_and_forgets_the_least_recently_used() -> None:
    store = MemoryStore(10_000)
    for index in range(1000):
        await store.put(f"k{index}", bytes(800), 60)
        await store.get("k0")
        assert store.held_bytes <= 10_000
    assert await store.get("k0") is not None
    assert await store.get("k1") is None
    assert await store.get("k999") is not None
    assert store.health().entries == 9 or store.health().entries == 10


async def test_memory_expires_by_the_clock_that_it_was_given() -> None:
    now_s = [100.0]
    store = MemoryStore(10_000, now=lambda: now_s[0])
    await store.put("a", b"1", 5)
    now_s[0] = 104.9
    assert await store.get("a") == b"1"
    now_s[0] = 105.0
    assert await store.get("a") is None
    assert store.held_bytes == 0


async def test_keys_in_redis_carry_the_prefix_and_always_a_time_to_live(redis_url: str) -> None:
    prefix = f"{uuid.uuid4().hex}:"
    store, client = RedisStore(redis_url, prefix=prefix), redis.asyncio.Redis.from_url(redis_url)
    await store.put("a", b"1", 60)
    assert 0 < await client.ttl(f"{prefix}a") <= 60
    await client.aclose()
    await store.aclose()


@pytest.mark.parametrize("with_fallback", [False, True])
async def test_g2_redis_stops_and_returns_and_every_call_is_answered(
    redis_server: Any, with_fallback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = MemoryStore(2**20) if with_fallback else None
    store = RedisStore(redis_server.url, fallback=fallback, breaker=Breaker(first_pause_s=0.1, longest_pause_s=0.4))
    caplog.set_level(logging.INFO)
    await store.put("before", b"1", 60)
    assert await store.get("before") == b"1"

    redis_server.stop()
    slowest_s = 0.0
    for index in range(200):
        started = time.perf_counter()
        await store.put(f"during{index}", b"2", 60)
        expected = b"2" if with_fallback else None
        assert await store.get(f"during{index}") == expected
        assert await store.get_many([f"during{index}", "before"]) == [expected, None]
        slowest_s = max(slowest_s, time.perf_counter() - started)
        await asyncio.sleep(0.002)
    health = store.health()
    assert slowest_s < QUICK_S
    assert health.degraded
    assert health.degraded_s > 0.3
    assert health.failures >= 600

    redis_server.start()
    async with asyncio.timeout(3):
        while store.health().degraded:
            await store.get("before")
            await asyncio.sleep(0.02)
    await store.put("after", b"3", 60)
    assert await store.get("after") == b"3"
    spell_s = store.health().degraded_s
    await asyncio.sleep(0.05)
    assert store.health().degraded_s == spell_s
    messages = [record.message for record in caplog.records if record.name == "headstart.store"]
    assert len(messages) == 2
    assert "lost" in messages[0]
    assert "back" in messages[1]
    await store.aclose()


async def test_g2_a_silent_redis_costs_one_timeout_and_then_nothing(redis_server: Any) -> None:
    store = RedisStore(redis_server.url, timeout_s=0.1)
    await store.put("a", b"1", 60)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    # DEBUG is closed by default; a paused server answers nobody, as one whose host hangs.
    await client.client_pause(700, all=True)
    started = time.perf_counter()
    assert await store.get("a") is None
    first_s = time.perf_counter() - started
    started = time.perf_counter()
    assert await asyncio.gather(*(store.get("a") for _ in range(100))) == [None] * 100
    rest_s = time.perf_counter() - started
    assert 0.09 < first_s < 0.3
    assert rest_s < 0.05
    await asyncio.sleep(1.0)
    assert await store.get("a") == b"1"
    await client.aclose()
    await store.aclose()


async def test_what_changed_while_redis_was_away_does_not_come_back_as_it_was(redis_server: Any) -> None:
    store = RedisStore(redis_server.url, timeout_s=0.1, breaker=Breaker(first_pause_s=0.05, longest_pause_s=0.1))
    for key in ("replaced", "deleted", "untouched"):
        await store.put(key, b"old", 60)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.client_pause(500, all=True)
    await store.put("replaced", b"new", 60)
    await store.delete("deleted")
    async with asyncio.timeout(3):
        while store.health().degraded:
            await store.get("untouched")
            await asyncio.sleep(0.02)
    assert await store.get_many(["replaced", "deleted", "untouched"]) in (
        [None, None, b"old"],
        [b"new", None, b"old"],
    )
    await client.aclose()
    await store.aclose()


async def test_a_redis_without_memory_left_still_reads_and_drops_writes(
    redis_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(redis_server.url)
    await store.put("kept", b"1", 60)
    await store.put("replaced", b"old", 60)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", "1")
    for _ in range(3):
        await store.put("replaced", bytes(1000), 60)
    assert await store.get("kept") == b"1"
    assert await store.get("replaced") is None
    assert store.health().failures == 3
    assert not store.health().degraded
    await client.config_set("maxmemory", "0")
    await store.put("replaced", b"new", 60)
    assert await store.get("replaced") == b"new"
    assert sum("refuses" in record.message for record in caplog.records) == 1
    await client.aclose()
    await store.aclose()


async def test_a_cancelled_call_leaves_the_store_usable_and_no_other_answer(redis_server: Any) -> None:
    store = RedisStore(redis_server.url, timeout_s=1.0)
    await store.put("a", b"1", 60)
    await store.put("b", b"2", 60)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.client_pause(200, all=True)
    task = asyncio.create_task(store.get("a"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [await store.get("b") for _ in range(3)] == [b"2"] * 3
    await client.aclose()
    await store.aclose()


def test_the_breaker_lets_one_call_try_and_doubles_its_pause() -> None:
    breaker = Breaker(first_pause_s=1, longest_pause_s=3)
    calls = [breaker.enter(0) for _ in range(2)]
    assert breaker.failed(calls[0] or 0, 10)
    assert not breaker.failed(calls[1] or 0, 10)
    assert breaker.enter(10.9) is None
    for at_s, next_s in ((11, 13), (13, 16), (16, 19)):
        trying = breaker.enter(at_s)
        assert trying is not None
        assert breaker.enter(at_s) is None
        assert not breaker.failed(trying, at_s)
        assert breaker.enter(next_s - 0.1) is None
    given_up = breaker.enter(19)
    assert given_up is not None
    breaker.gave_up(given_up)
    last = breaker.enter(19)
    assert last is not None
    assert breaker.succeeded(last, 20)
    assert not breaker.degraded
    assert breaker.degraded_s(100) == 10
