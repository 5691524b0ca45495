"""An engine's events over real sockets: replay, gaps, restarts, ranks, and what is made of nonsense."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from cache.blocks import block_hashes
from cache.residency import Residency
from gateway.event_feed import MOST_FRAME_BYTES
from gateway.event_sources import EventSource, check_setting, stated_sources, told_sources
from gateway.kv_events import AGREEING, KvEvents
from tests.support.publisher import Publisher, cleared, removed, stored

BLOCK = 4
PROMPT = list(range(100, 117))
OTHER = list(range(500, 517))


async def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in another task, and tells nobody
            await asyncio.sleep(0.01)


def resident(residency: Residency, ids: list[int], salt: str = "s") -> int:
    return residency.prefix(salt).extended(ids).resident_tokens


@asynccontextmanager
async def following(residency: Residency, *publishers: Publisher) -> AsyncIterator[KvEvents]:
    async def ask() -> Any:
        return {str(publisher.rank): publisher.config for publisher in publishers}

    async with KvEvents("auto", "http://127.0.0.1:8000", ask, lambda: residency) as events:
        for publisher in publishers:
            await publisher.subscribed()
        await until(lambda: "heard" not in (events.state.reason or ""))
        yield events


@pytest.mark.parametrize("arrays", [False, True], ids=["maps", "arrays"])
@pytest.mark.parametrize("short_hashes", [True, False], ids=["short", "whole"])
async def test_blocks_of_other_clients_come_and_go_with_the_events(arrays: bool, short_hashes: bool) -> None:
    residency = Residency(BLOCK, 100)
    keys = block_hashes(PROMPT, BLOCK, "s")
    form = {"arrays": arrays, "short_hashes": short_hashes}
    async with Publisher() as publisher, following(residency, publisher) as events:
        assert events.state.name == "consistent"
        await publisher.publish(stored(PROMPT, BLOCK, salt="s", **form))
        await until(lambda: resident(residency, PROMPT) == 16)
        assert resident(residency, PROMPT, "t") == 0
        await publisher.publish(removed(keys[3], **form), removed(keys[2], **form))
        await until(lambda: resident(residency, PROMPT) == 8)
        await publisher.publish(cleared(arrays=arrays))
        await until(lambda: resident(residency, PROMPT) == 0)
        assert residency.free_blocks == 100


async def test_what_was_stored_before_the_gateway_came_is_replayed() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher:
        await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await publisher.publish(removed(block_hashes(PROMPT, BLOCK, "s")[3]))
        async with following(residency, publisher) as events:
            await until(lambda: events.state.name == "consistent")
            assert resident(residency, PROMPT) == 12
            assert events.degraded_s == 0


async def test_what_a_long_replay_dropped_in_its_middle_is_asked_for_again() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher:
        for first in range(4):
            await publisher.publish(stored(PROMPT[: (first + 1) * BLOCK], BLOCK, first=first, salt="s"))
        publisher.drops = {1, 2}
        async with following(residency, publisher) as events:
            await until(lambda: events.state.name == "consistent")
            assert resident(residency, PROMPT) == 16
            assert events.counts.batches == 4


async def test_a_gap_is_filled_from_the_replay() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher, following(residency, publisher) as events:
        await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await publisher.publish(stored(OTHER, BLOCK, salt="s"), lost=True)
        await publisher.publish(removed(block_hashes(PROMPT, BLOCK, "s")[3]))
        await until(lambda: resident(residency, PROMPT) == 12)
        assert resident(residency, OTHER) == 16
        assert (events.counts.gaps, events.counts.lost_batches) == (1, 0)
        assert events.state.name == "consistent"


async def test_a_gap_beyond_the_window_is_a_state_until_the_engines_reports_agree() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher(window=1) as publisher, following(residency, publisher) as events:
        await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await until(lambda: resident(residency, PROMPT) == 16)
        sent = residency.begin(list(range(40)), "mine")
        residency.generated(sent, ())
        residency.end(sent)
        for _ in range(3):
            await publisher.publish(stored(OTHER, BLOCK, salt="lost"), lost=True)
        await publisher.publish(stored(OTHER, BLOCK, salt="s"))
        await until(lambda: events.state.name == "degraded")
        await until(lambda: resident(residency, OTHER) == 16)
        assert events.degraded_s > 0
        assert events.counts.lost_batches == 3
        assert resident(residency, PROMPT) == 0
        assert resident(residency, list(range(40)), "mine") == 40
        assert not residency.told_all
        for _ in range(AGREEING):
            lease = residency.begin(list(range(40)), "mine")
            residency.reconcile(lease, lease.cached_tokens)
            residency.end(lease)
        await until(lambda: events.state.name == "consistent")


async def test_a_restarted_engine_holds_nothing_and_is_followed_again() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher, following(residency, publisher) as events:
        await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await publisher.publish(stored(PROMPT, BLOCK, salt="t"))
        await until(lambda: resident(residency, PROMPT, "t") == 16)
        await publisher.restart()
        await until(lambda: events.counts.restarts == 1)
        assert resident(residency, PROMPT) == 0
        # Lost to a subscriber that is just coming back, like what an engine publishes at its start.
        await publisher.publish(stored(OTHER, BLOCK, salt="s"))
        await until(lambda: resident(residency, OTHER) == 16)
        await until(lambda: events.state.name == "consistent")
        assert residency.counts().clears == 1


async def test_a_number_that_goes_backward_is_a_restart_without_a_lost_connection() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher, following(residency, publisher) as events:
        for salt in "abcs":
            await publisher.publish(stored(PROMPT, BLOCK, salt=salt))
        await until(lambda: resident(residency, PROMPT) == 16)
        publisher.number = 1
        publisher.kept.clear()
        await publisher.publish(stored(OTHER, BLOCK, salt="s"))
        await until(lambda: resident(residency, OTHER) == 16)
        assert resident(residency, PROMPT) == 0
        assert events.counts.restarts == 1


async def test_without_a_replay_endpoint_what_was_before_is_a_hole() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher(replays=False) as publisher:
        await publisher.publish(stored(OTHER, BLOCK, salt="s"))
        async with following(residency, publisher) as events:
            assert events.state.name == "degraded"
            assert "replay" in str(events.state.reason)
            await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
            await until(lambda: resident(residency, PROMPT) == 16)
            assert events.counts.gaps == 0


async def test_of_several_ranks_each_counts_for_itself_and_a_block_is_held_while_one_holds_it() -> None:
    residency = Residency(BLOCK, 100)
    last = block_hashes(PROMPT, BLOCK, "s")[3]
    async with Publisher() as zero, Publisher(rank=1) as one, following(residency, zero, one) as events:
        await until(lambda: events.state.name == "consistent")
        for publisher in (zero, one):
            await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await until(lambda: events.counts.batches == 2)
        await zero.publish(removed(last))
        await until(lambda: events.counts.batches == 3)
        assert resident(residency, PROMPT) == 16
        await one.publish(removed(last))
        await until(lambda: resident(residency, PROMPT) == 12)
        await one.publish(cleared())
        await until(lambda: events.counts.batches == 5)
        assert resident(residency, PROMPT) == 12


NONSENSE = [
    b"",
    b"\xc1",
    b"\x91" * 5000,
    msgspec.msgpack.encode({"ts": 1}),
    msgspec.msgpack.encode([1.0, "events"]),
    msgspec.msgpack.encode([1.0, [], -1]),
    msgspec.msgpack.encode([1.0, [7]]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": "secret"}]]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 4}]]),
    msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2, 3, -4], 4]]]),
    msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, ["a", "b", "c", "d"], 4]]]),
    msgspec.msgpack.encode([1.0, [["BlockStored", [1.5], None, [1, 2, 3, 4], 4]]]),
    msgspec.msgpack.encode([1.0, [["BlockStored", [1], [2], [1, 2, 3, 4], 4]]]),
]


async def test_nonsense_is_counted_passed_over_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher, following(residency, publisher) as events:
        for payload in NONSENSE:
            await publisher.publish_raw(payload)
        await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await until(lambda: resident(residency, PROMPT) == 16)
        assert events.counts.malformed == len(NONSENSE)
        assert (events.state.name, events.state.reason) == ("degraded", "malformed events")
    assert "secret" not in caplog.text


async def test_a_frame_over_the_bound_costs_its_batch_alone() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher(window=1) as publisher, following(residency, publisher) as events:
        await publisher.publish_raw(b"x" * (MOST_FRAME_BYTES + 1))
        await publisher.subscribed()
        await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
        await until(lambda: resident(residency, PROMPT) == 16)
        assert events.state.name == "degraded"


async def test_blocks_of_another_size_than_the_engine_told_are_a_state() -> None:
    residency = Residency(BLOCK, 100)
    async with Publisher() as publisher, following(residency, publisher) as events:
        await publisher.publish(stored(PROMPT, 8, salt="s"))
        await until(lambda: events.state.name == "degraded")
        assert "another size" in str(events.state.reason)
        assert resident(residency, PROMPT) == 0


async def test_another_picture_is_fed_from_the_beginning() -> None:
    pictures = [Residency(BLOCK, 100)]
    async with Publisher() as publisher:

        async def ask() -> Any:
            return {"0": publisher.config}

        async with KvEvents("auto", "http://127.0.0.1:8000", ask, lambda: pictures[-1]) as events:
            await publisher.subscribed()
            await publisher.publish(stored(PROMPT, BLOCK, salt="s"))
            await until(lambda: resident(pictures[0], PROMPT) == 16)
            pictures.append(Residency(BLOCK, 50))
            events.renew()
            await until(lambda: resident(pictures[1], PROMPT) == 16)
            assert resident(pictures[0], PROMPT) == 0


@pytest.mark.parametrize("answer", [None, {}, {"0": {"enable_kv_cache_events": False}}, [], {"0": None}])
async def test_an_engine_that_publishes_nothing_is_no_fault(answer: Any) -> None:
    async def ask() -> Any:
        return answer

    async with KvEvents("auto", "http://engine:8000", ask, lambda: Residency(BLOCK, 9)) as events:
        await until(lambda: events.state.reason is not None)
        assert events.state.name == "off"


def test_the_host_is_the_engines_whatever_it_tells_and_ranks_have_ports_of_their_own() -> None:
    told = {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{5557 + rank}",
            "replay_endpoint": f"tcp://*:{6557 + rank}",
            "topic": "kv",
        }
        for rank, host in enumerate(("*", "10.0.0.9"))
    }
    assert told_sources(told, "http://engine:8000") == (
        EventSource(0, "tcp://engine:5557", "tcp://engine:6557", "kv"),
        EventSource(1, "tcp://engine:5558", "tcp://engine:6558", "kv"),
    )


@pytest.mark.parametrize(
    ("setting", "source"),
    [
        ("tcp://*:5557", EventSource(0, "tcp://engine:5557", None)),
        ("tcp://10.0.0.9:5557,tcp://*:5558", EventSource(0, "tcp://10.0.0.9:5557", "tcp://engine:5558")),
    ],
)
def test_an_operator_names_the_addresses(setting: str, source: EventSource) -> None:
    assert stated_sources(check_setting(setting), "http://engine:8000") == (source,)


@pytest.mark.parametrize(
    "setting", ["on", "tcp://host", "ipc:///tmp/x", "tcp://h:0", "tcp://h:1,tcp://h:2,tcp://h:3"]
)
def test_other_settings_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        check_setting(setting)
