"""The journal on a real server that speaks Redis's protocol."""

import asyncio
import secrets
import time
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from cache.breaker import Breaker
from cache.journal import Heard, Journal
from tests.conftest import RedisServer


class Ear:
    def __init__(self) -> None:
        self.entries: list[Heard] = []

    def heard(self, entry: Heard) -> None:
        self.entries.append(entry)

    @property
    def data(self) -> list[bytes]:
        return [entry.data for entry in self.entries]

    def has(self, entries: int) -> Callable[[], bool]:
        return lambda: len(self.entries) == entries


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def has_written(journal: Journal, entries: int) -> Callable[[], bool]:
    return lambda: journal.counts.written == entries


@pytest.fixture
def prefix() -> str:
    return f"test-{secrets.token_hex(4)}:"


async def test_every_follower_hears_every_entry_in_order_the_writer_too(redis_url: str, prefix: str) -> None:
    ears = Ear(), Ear()
    async with Journal(redis_url, ears[0], prefix=prefix) as one, Journal(redis_url, ears[1], prefix=prefix) as two:
        one.follow("a")
        two.follow("a")
        written = [str(number).encode() for number in range(200)]
        for data in written:
            one.append("a", data)
        await until(lambda: all(len(ear.data) == 200 for ear in ears))
    assert ears[0].data == ears[1].data == written
    assert abs(ears[1].entries[-1].at_s - time.monotonic()) < 1.0, "its time is on the hearer's clock"


async def test_who_follows_later_hears_what_is_kept(redis_url: str, prefix: str) -> None:
    ear = Ear()
    async with Journal(redis_url, Ear(), prefix=prefix) as one:
        for number in range(150):
            one.append("a", str(number).encode())
        await until(lambda: one.counts.written == 150)
    async with Journal(redis_url, ear, prefix=prefix) as two:
        two.follow("a")
        await until(lambda: len(ear.data) == 150)
        two.follow("a")
        await until(lambda: len(ear.data) == 300)
        two.unfollow("a")
    assert ear.data[:150] == ear.data[150:]


async def test_an_entry_is_heard_within_milliseconds(redis_url: str, prefix: str) -> None:
    ear = Ear()
    async with Journal(redis_url, Ear(), prefix=prefix) as one, Journal(redis_url, ear, prefix=prefix) as two:
        two.follow("a")
        one.append("a", b"warm")
        await until(lambda: bool(ear.data))
        delays_s = []
        for number in range(20):
            began_s = time.monotonic()
            one.append("a", str(number).encode())
            await until(ear.has(number + 2))
            delays_s.append(time.monotonic() - began_s)
    assert sorted(delays_s)[10] < 0.1


async def test_a_stream_is_bounded_in_bytes_and_has_a_time_to_live(redis_url: str, prefix: str) -> None:
    now_s = [0.0]
    journal = Journal(redis_url, Ear(), prefix=prefix, max_bytes=100_000, ttl_s=60, now=lambda: now_s[0])
    async with journal, Redis.from_url(redis_url) as client:
        for round_ in range(20):
            now_s[0] += 6.0
            for _ in range(10):
                journal.append("a", bytes(5_000))
            await until(has_written(journal, 10 * (round_ + 1)))
        await until(lambda: not journal._waiting)
        held = await client.memory_usage(f"{prefix}a")
        assert held is not None
        assert held < 170_000, "the bound, and what came since it was checked"
        assert 10 <= await client.xlen(f"{prefix}a") < 30
        assert 0 < await client.pttl(f"{prefix}a") <= 60_000


async def test_what_waits_is_bounded_and_the_oldest_is_dropped_and_counted(redis_url: str, prefix: str) -> None:
    ear = Ear()
    async with Journal(redis_url, ear, prefix=prefix, max_waiting=10) as journal:
        journal.follow("a")
        for number in range(15):
            journal.append("a", str(number).encode())
        await until(lambda: len(ear.data) == 10)
    assert journal.counts.dropped == 5
    assert ear.data == [str(number).encode() for number in range(5, 15)]


async def test_g2_a_lost_redis_is_counted_said_once_and_forgotten_when_it_returns(
    redis_server: RedisServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()
    journal = Journal(redis_server.url, ear, prefix=prefix, breaker=Breaker(first_pause_s=0.5, longest_pause_s=0.5))
    async with journal:
        journal.follow("a")
        journal.append("a", b"before")
        await until(lambda: ear.data == [b"before"])
        await asyncio.to_thread(redis_server.stop)
        await until(lambda: journal.degraded)
        began_s = time.perf_counter()
        for _ in range(1000):
            journal.append("a", b"meanwhile")
        assert time.perf_counter() - began_s < 0.1
        assert journal.counts.dropped == 1000
        assert journal.health().degraded_s > 0
        await asyncio.to_thread(redis_server.start)
        await until(lambda: not journal.degraded)
        journal.append("a", b"after")
        await until(lambda: ear.data == [b"before", b"after"])
    said = [record.message for record in caplog.records if record.name == "headstart.journal"]
    assert [message.split(",")[0] for message in said] == ["Redis is lost", "Redis is back"]


async def test_a_journal_without_a_server_starts_and_ends(free_port: int) -> None:
    async with Journal(f"redis://127.0.0.1:{free_port}/0", Ear()) as journal:
        journal.follow("a")
        journal.append("a", b"x")
        await until(lambda: journal.degraded)


def test_a_url_that_is_not_of_redis_is_refused() -> None:
    with pytest.raises(ValueError, match="URL"):
        Journal("http://127.0.0.1", Ear())
