"""Follows an engine's KV events, and says whether what they tell is all that it holds."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import zmq.asyncio

from cache.event_blocks import EventBlocks, EventCounts
from cache.residency import Residency
from gateway.endpoints import ONLY_NAME
from gateway.event_feed import TICK_S, FeedCounts, RankFeed
from gateway.event_sources import AUTO, OFF, EventSource, stated_sources, told_sources

log = logging.getLogger("headstart.kv_events")

AGREEING = 20
"""So many answers in a row, predicted exactly, and the picture is taken to be whole again."""
_ASK_AGAIN_S = 30.0

StateName = Literal["off", "degraded", "consistent"]


@dataclass(frozen=True, slots=True)
class EventState:
    """`off`: the engine publishes none, or they are not asked for. `degraded`: not all that it holds is told.

    `since_s` is on the monotonic clock.
    """

    name: StateName
    reason: str | None
    since_s: float


class KvEvents:
    """One engine's events, from entering to leaving; without any it does nothing, and nothing fails.

    `ask` gets the JSON of the engine's `/kv_event_sources`, None where it gives none. `residency` is the picture to
    feed: another one, as after a restart, is fed from the beginning. The socket is not authenticated: what comes over
    it is bounded, and never shown.
    """

    def __init__(
        self,
        setting: str,
        engine_url: str,
        ask: Callable[[], Awaitable[Any]],
        residency: Callable[[], Residency | None],
        *,
        name: str = ONLY_NAME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is the replica's, for the log."""
        self._name = name
        self._setting = setting
        self._engine_url = engine_url
        self._ask = ask
        self._residency = residency
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self.counts = FeedCounts()
        self.mapped = EventCounts()
        self.state = EventState("off", None, clock())
        self._renewed = asyncio.Event()
        self._agreed_from = 0
        self._disagreed = 0

    @property
    def degraded_s(self) -> float:
        """How long it has been degraded by now; 0 where it is not."""
        return self._clock() - self.state.since_s if self.state.name == "degraded" else 0.0

    async def __aenter__(self) -> "KvEvents":
        if self._setting != OFF:
            self._task = asyncio.create_task(self._run(), name="kv-events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self._renewed.clear()
            residency = self._residency()
            sources = () if residency is None else await self._sources()
            if residency is None or not sources:
                self._say("off", None if residency is None else "the engine publishes no KV events")
                await self._until_renewed()
                continue
            try:
                await self._follow(residency, sources)
            except Exception as error:
                # Requests are predicted from what was sent; the engine's word on each answer stays.
                log.warning("KV events of %s cannot be followed: %s", self._name, type(error).__name__)
                self.degrade(residency, "they cannot be followed")
                await asyncio.sleep(TICK_S)

    async def _sources(self) -> tuple[EventSource, ...]:
        if self._setting != AUTO:
            return stated_sources(self._setting, self._engine_url)
        return told_sources(await self._ask(), self._engine_url)

    def renew(self) -> None:
        """There is another picture to feed, or an engine again."""
        self._renewed.set()

    async def _until_renewed(self) -> None:
        """An engine does not begin to publish while it runs, but the question may have met it at a bad moment."""
        try:
            async with asyncio.timeout(_ASK_AGAIN_S):
                await self._renewed.wait()
        except TimeoutError:
            return

    async def _follow(self, residency: Residency, sources: Sequence[EventSource]) -> None:
        """Returns when another picture is to be fed."""
        blocks = EventBlocks(residency)
        self.mapped = blocks.counts
        residency.told.start_unknown()
        self.degrade(residency, "the engine has not been heard yet")
        # libzmq works in a thread of the context: one of its own leaves nothing behind.
        context = zmq.asyncio.Context()
        try:
            ranks = [RankFeed(self, context, source, residency, blocks) for source in sources]
            async with asyncio.TaskGroup() as group:
                for rank in ranks:
                    group.create_task(rank.follow(lambda: self._residency() is not residency, ranks))
        finally:
            context.destroy(linger=0)
            residency.told_all = False
            residency.told.stop()

    def degrade(self, residency: Residency, reason: str) -> None:
        """Not all that the engine holds is told."""
        residency.told_all = False
        counts = residency.counts()
        self._agreed_from, self._disagreed = counts.exact, counts.over + counts.under
        self._say("degraded", reason)

    def consistent(self, residency: Residency) -> None:
        """All that it holds is told."""
        residency.told_all = True
        self._say("consistent", None)

    def judge(self, residency: Residency) -> None:
        """The engine's reports decide whether a picture with holes has become whole."""
        if self.state.name != "degraded":
            return
        counts = residency.counts()
        if counts.over + counts.under != self._disagreed:
            self._agreed_from, self._disagreed = counts.exact, counts.over + counts.under
        elif counts.exact - self._agreed_from >= AGREEING:
            self.consistent(residency)

    def _say(self, name: StateName, reason: str | None) -> None:
        if (name, reason) == (self.state.name, self.state.reason):
            return
        since_s = self.state.since_s if name == self.state.name else self._clock()
        self.state = EventState(name, reason, since_s)
        log.log(
            logging.WARNING if name == "degraded" else logging.INFO,
            "KV events of %s: %s%s",
            self._name,
            name,
            f", {reason}" if reason else "",
        )
