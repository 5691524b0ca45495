"""One publisher of KV events: its batches in order, each once, what was missed fetched again."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from cache.event_blocks import EventBlocks
from cache.event_sequence import EventSequence
from cache.kv_events import EventBatch, MalformedEvents, read_batch
from cache.residency import Residency
from gateway.event_sources import EventSource

MOST_FRAME_BYTES = 4 * 2**20
"""A step's batch is a few bytes for each token that it computed; a longer frame ends the connection."""
MOST_WAITING = 1_000
"""Batches that wait to be read; beyond it the publisher drops, which shows as a gap."""
MOST_REPLAYED = 20_000
"""Batches of a replay that wait to be read; vLLM keeps 10,000 unless it is told otherwise."""
REPLAY_LIMIT_S = 2.0
TICK_S = 0.5
_RECONNECT_TICKS = 6
_SEQUENCE_BYTES = 8
_LIMITS_MS = {"heartbeat_ivl": 5_000, "heartbeat_timeout": 15_000, "reconnect_ivl": 100, "reconnect_ivl_max": 2_000}


@dataclass(slots=True)
class FeedCounts:
    """Since the start. `malformed` are batches and single events that could not be read, `lost_batches` those that
    no replay brought back.
    """

    batches: int = 0
    malformed: int = 0
    gaps: int = 0
    lost_batches: int = 0
    restarts: int = 0


class ReplayFailed(Exception):
    """The engine did not answer a request for past batches."""


class Listener(Protocol):
    """Who is told whether the events make the picture whole."""

    counts: FeedCounts

    def degrade(self, residency: Residency, reason: str) -> None: ...

    def consistent(self, residency: Residency) -> None: ...

    def judge(self, residency: Residency) -> None: ...


class RankFeed:
    """One publisher: its batches in order, each once."""

    def __init__(
        self,
        listener: Listener,
        context: zmq.asyncio.Context,
        source: EventSource,
        residency: Residency,
        blocks: EventBlocks,
    ) -> None:
        self._listener = listener
        self._context = context
        self._source = source
        self._residency = residency
        self._blocks = blocks
        self._sequence = EventSequence()
        self._last = b""
        self._connected = False
        self._fresh = False
        self._alone_ticks = 0
        self._unreadable = False
        self.whole = False

    async def follow(self, over: Callable[[], bool], ranks: "Sequence[RankFeed]") -> None:
        """Until `over`. Raises zmq.ZMQError for an address that cannot be one."""
        with self._context.socket(zmq.SUB) as subscriber:
            _bound(subscriber)
            subscriber.setsockopt(zmq.RCVHWM, MOST_WAITING)
            subscriber.subscribe(self._source.topic.encode())
            monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            subscriber.connect(self._source.endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(subscriber, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            try:
                while not over():
                    ready = dict(await poller.poll(int(TICK_S * 1000)))
                    if not ready:
                        await self._quiet(subscriber)
                    # What an old connection brought comes before the news of the next one.
                    if subscriber in ready and (self._connected or monitor not in ready):
                        await self._heard(await subscriber.recv_multipart(), ranks)
                    elif monitor in ready:
                        message = parse_monitor_message(await monitor.recv_multipart())
                        await self._connection(message["event"] != zmq.EVENT_DISCONNECTED, ranks)
                    self._listener.judge(self._residency)
            finally:
                subscriber.disable_monitor()

    async def _quiet(self, subscriber: zmq.asyncio.Socket) -> None:
        """What was published before the subscription had arrived came over no socket; a dead one brings nothing."""
        if self._connected and self._fresh and self._source.replay is not None:
            self._fresh = False
            await self._fetch()
        elif not self._connected:
            self._alone_ticks += 1
            if self._alone_ticks % _RECONNECT_TICKS == 0:
                # A frame that was too long ended the connection for good.
                with suppress(zmq.ZMQError):
                    subscriber.disconnect(self._source.endpoint)
                subscriber.connect(self._source.endpoint)

    async def _connection(self, connected: bool, ranks: "Sequence[RankFeed]") -> None:
        if not connected:
            if self._connected:
                self._lose("the connection is lost")
            self._connected = False
            return
        self._connected = self._fresh = True
        self._alone_ticks = 0
        if self._sequence.expected and not await self._same_publisher():
            self._begin_anew()
        await self._catch_up(ranks)

    async def _heard(self, frames: list[bytes], ranks: "Sequence[RankFeed]") -> None:
        if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
            self._malformed(1)
            return
        number = int.from_bytes(frames[1], "big")
        arrival = self._sequence.arrived(number)
        if arrival == "known":
            return
        if arrival == "restart":
            self._begin_anew()
            await self._catch_up(ranks)
            if self._sequence.arrived(number) == "known":
                return
        if number == 0 and not self.whole:
            self._has_all(ranks)
        if self._source.replay is None and not self._sequence.expected:
            self._sequence.expected = number
        if self._sequence.expected < number:
            self._listener.counts.gaps += 1
            if not await self._filled(number, ranks):
                return
        if self._sequence.expected == number:
            self._apply(number, frames[2])

    async def _filled(self, number: int, ranks: "Sequence[RankFeed]") -> bool:
        """Fetches what is missing before `number`. False when everything was fetched anew instead."""
        if await self._fetch() and self._sequence.expected >= number:
            return True
        self._listener.counts.lost_batches += number - self._sequence.expected
        self._forget("batches were lost that the engine keeps no more")
        self._sequence.expected = number
        if self._source.replay is None:
            return True
        await self._catch_up(ranks)
        return self._sequence.expected == number

    async def _fetch(self) -> bool:
        """Applies what the publisher keeps from the next batch on. False where it does not answer."""
        try:
            async with aclosing(self._replay(self._sequence.expected)) as batches:
                async for number, payload in batches:
                    if number != self._sequence.expected:
                        break
                    self._apply(number, payload)
        except ReplayFailed:
            return False
        return True

    async def _catch_up(self, ranks: "Sequence[RankFeed]") -> None:
        """All that the publisher still keeps, from its first batch if it can be; then the picture follows."""
        if self._sequence.expected and self.whole:
            start = self._sequence.expected
        else:
            self._blocks.forget(self._source.rank)
            start = 0
        first = None
        self._unreadable = False
        try:
            async with aclosing(self._replay(start)) as batches:
                async for number, payload in batches:
                    if first is None or number != self._sequence.expected:
                        first = number
                    # Of all that happened only the sum counts; of a part each step does.
                    self._apply(number, payload, silent=first == start)
        except ReplayFailed as reason:
            self.whole = False
            self._listener.degrade(self._residency, str(reason))
            return
        if (first is None or first == start) and not self._unreadable:
            self._has_all(ranks)
        else:
            self.whole = False
            self._listener.degrade(self._residency, "what the engine stored before is not told")

    def _has_all(self, ranks: "Sequence[RankFeed]") -> None:
        """Every batch of this publisher has been read."""
        self.whole = True
        if all(rank.whole for rank in ranks):
            self._residency.told.start(self._blocks.held())
            self._listener.consistent(self._residency)

    async def _same_publisher(self) -> bool:
        """Whether the batch that was applied last is the one that it keeps under that number."""
        last = self._sequence.expected - 1
        try:
            async with aclosing(self._replay(last)) as batches:
                async for number, payload in batches:
                    return number == last and _digest(payload) == self._last
        except ReplayFailed:
            # Nobody tells: the next batch's number will.
            return True
        return False

    def _begin_anew(self) -> None:
        """The engine was restarted: it holds nothing of before."""
        self._listener.counts.restarts += 1
        self._forget("the engine was restarted")
        self._sequence.begin()
        self._residency.clear()

    def _lose(self, reason: str) -> None:
        self._listener.degrade(self._residency, reason)

    def _forget(self, reason: str) -> None:
        self.whole = False
        self._blocks.forget(self._source.rank)
        self._residency.told.stop()
        self._residency.told.start_unknown()
        self._listener.degrade(self._residency, reason)

    def _apply(self, number: int, payload: bytes, *, silent: bool = False) -> None:
        self._sequence.applied(number)
        self._last = _digest(payload)
        self._listener.counts.batches += 1
        try:
            batch = read_batch(payload)
        except MalformedEvents:
            batch = EventBatch((), self._source.rank, 1)
        if batch.malformed:
            self._malformed(batch.malformed)
        foreign = self._blocks.counts.foreign_sizes
        self._blocks.apply(self._source.rank, batch.events, silent=silent)
        if self._blocks.counts.foreign_sizes != foreign:
            self._lose("the engine's blocks are of another size than it told")

    def _malformed(self, count: int) -> None:
        self._listener.counts.malformed += count
        self._unreadable, self.whole = True, False
        self._lose("malformed events")

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Batches from `start` on, as far as the publisher keeps them. Raises ReplayFailed.

        A publisher drops of a long replay what is not read fast enough: from there it is asked again.
        """
        if self._source.replay is None:
            raise ReplayFailed("the engine has no replay endpoint: what it stored before is not told")
        whole = False
        while not whole:
            whole, read_any = True, False
            async with aclosing(self._asked(self._source.replay, start)) as batches:
                async for number, payload in batches:
                    if read_any and number != start:
                        whole = False
                        break
                    yield number, payload
                    start, read_any = number + 1, True

    async def _asked(self, replay: str, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        with self._context.socket(zmq.DEALER) as socket:
            _bound(socket)
            socket.setsockopt(zmq.RCVHWM, MOST_REPLAYED)
            socket.connect(replay)
            await socket.send_multipart([b"", start.to_bytes(_SEQUENCE_BYTES, "big")])
            while True:
                try:
                    async with asyncio.timeout(REPLAY_LIMIT_S):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    raise ReplayFailed("the engine does not answer at its replay endpoint") from None
                if len(frames) < 3 or len(frames[-2]) != _SEQUENCE_BYTES:
                    raise ReplayFailed("the engine's replay endpoint speaks another language")
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0:
                    return
                yield number, frames[-1]


def _bound(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    for name, milliseconds in _LIMITS_MS.items():
        socket.setsockopt(getattr(zmq, name.upper()), milliseconds)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
