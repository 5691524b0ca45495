"""Where a request runs: several engines of one model, and the one that is predicted to answer first."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

import aiohttp

from gateway.arrivals import Arrivals
from gateway.backends.facts import EngineFacts
from gateway.backends.vllm import EngineLimits
from gateway.budgets import QUEUE_FULL
from gateway.endpoints import Endpoint, parse_endpoints
from gateway.errors import ApiError, ErrorKind
from gateway.pacing import QueueFull
from gateway.queueing import PATIENCE, ROUTED_PATIENCE
from gateway.replica import Replica, Waiting
from gateway.replica_facts import in_common
from gateway.roster import Roster
from gateway.routing import foreseen, least_ttft
from gateway.runs import Run, Work
from gateway.serving import Serving, make_serving, unknown_serving
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from latency.speed import Forecast, SpeedEstimate
from prompt_builder.outlook import Outlook
from prompt_builder.types import Prompt

log = logging.getLogger("headstart.replicas")

UNKNOWN_WAIT_S = 1.0
"""Told to come again after, while nothing is known of the engine's speed: 0 would be an invitation."""

# Between plan and release others may have taken the place: beyond so much of its predicted TTFT all are asked again.
STALE_SHARE = 0.1


class Replicas:
    """Engines that serve one model. `serving` is what they have in common.

    A request goes to the replica of its plan, which is the one with the least predicted time to the first token; ties
    go to the one used last. One whose speed is not known yet is taken to be as fast as another. Replicas that fail
    are left alone until they have recovered; where none is well, a request tries one all the same.
    """

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        limits: EngineLimits,
        first_probe_s: float = 15.0,
        endpoints: Sequence[Endpoint] = (),
    ) -> None:
        """`endpoints` where they are known better than from `engine_url`."""
        self._settings = settings
        self._session = session
        self._limits = limits
        self._first_probe_s = first_probe_s
        self.serving = unknown_serving(settings)
        self.arrivals = Arrivals()
        self._roster = Roster(endpoints or parse_endpoints(settings.engine_url), self._made)
        self._followers: list[Callable[[Serving], None]] = []
        self._merging = asyncio.Lock()
        self._last_used = ""

    # what there is

    @property
    def all(self) -> tuple[Replica, ...]:
        """In the order in which they came; those that drain last."""
        return self._roster.all

    def get(self, name: str) -> Replica | None:
        return self._roster.get(name)

    @property
    def model(self) -> str | None:
        """The served model's name, None until an engine has told it."""
        return self.serving.facts.model or self._settings.model or None

    @property
    def speed(self) -> ReplicaSpeed:
        """Of the replica that would be tried first."""
        return self._candidates()[0].speed

    def on_change(self, follow: Callable[[Serving], None]) -> None:
        """`follow` is called with every new Serving, on the event loop."""
        self._followers.append(follow)

    def on_arrival(self, greet: Callable[[Replica], None], part: Callable[[Replica], None] | None = None) -> None:
        """`greet` is called with every replica, those at hand and those to come; `part` when one is given up."""
        self._roster.on_arrival(greet, part)

    # a request's way

    def outlooks(self, salt: str, prompt: Prompt | None = None, *, followed: bool = True) -> tuple[Outlook, ...]:
        """The replicas that a request may go to, as they are now; the one used last first.

        A `prompt` that is rendered already is not hashed again when its ids are followed. Those of a request whose
        ids nobody knows are not `followed`.
        """
        if not followed:
            candidates = self._candidates()
            speed = _any_speed(candidates)
            return tuple([replica.outlook(None, speed) for replica in candidates])
        hashed = (None, ()) if prompt is None else (prompt.token_ids, prompt.block_hashes)
        return self._outlooks(self._candidates(), salt, *hashed)

    def _outlooks(
        self,
        candidates: Sequence[Replica],
        salt: str,
        token_ids: tuple[int, ...] | None = None,
        hashes: Sequence[bytes] = (),
    ) -> tuple[Outlook, ...]:
        speed = _any_speed(candidates)
        tree = self.serving.builder.tree(salt, token_ids, hashes)
        return tuple(replica.outlook(salt, speed, tree) for replica in candidates)

    def forecasts(self, work: Work, salt: str) -> Iterator[Forecast]:
        """Where it was planned to run first; then the same prompt elsewhere, for whoever asks on."""
        planned = work.forecast
        if planned is None:
            return
        yield planned
        others = [replica for replica in self._candidates() if replica.name != planned.replica]
        for outlook in self._outlooks(others, salt, work.token_ids, work.hashes) if others else ():
            if (elsewhere := foreseen(work, outlook)) is not None:
                yield elsewhere

    def hurried(self, forecasts: Iterable[Forecast], deadline_s: float | None) -> Iterator[Forecast]:
        """The forecasts with the wait that the deadline leaves: a request that is pressed passes others.

        Plans reckon with the whole queue, so that prompts become smaller under load; only a refusal must be sure that
        nothing helps.
        """
        return (self._hurried(forecast, deadline_s) for forecast in forecasts)

    def _hurried(self, forecast: Forecast, deadline_s: float | None) -> Forecast:
        replica = None if deadline_s is None else self.get(forecast.replica)
        if replica is None:
            return forecast
        wait_s = replica.pacer.wait_s(forecast.prefill_s, deadline_s)
        return replace(forecast, queue_s=min(forecast.queue_s, wait_s))

    async def enter(
        self, work: Work, salt: str, tried: Collection[str] = (), waiting: Waiting | None = None
    ) -> tuple[Replica, Run]:
        """A replica that is not among `tried`, and the request's turn to prefill there.

        One that has been given up when the turn comes is left for another. Raises ApiError (503) when too many wait
        at each already, or where all have been tried. Whoever got a run closes it, whatever happens. `waiting` as of
        `Replica.enter`.
        """
        passed = set(tried)
        while True:
            replica, placed = self._placed(work, salt, passed)
            self._last_used = replica.name
            passed.add(replica.name)
            try:
                moved = work.forecast is not None and work.forecast.replica != replica.name
                run = await replica.enter(placed, salt, waiting, moved=moved)
            except QueueFull as full:
                if self.has_other(passed):
                    continue
                raise ApiError(
                    ErrorKind.UNAVAILABLE,
                    f"{self._settings.max_queued} requests wait for the engine, the most that may. Try again later.",
                    code=QUEUE_FULL,
                    retry_after_s=full.wait_s or UNKNOWN_WAIT_S,
                ) from None
            if not (replica.given_up and self.has_other(passed)):
                return replica, run
            run.close()

    def has_other(self, tried: Collection[str]) -> bool:
        """Whether a replica that is well is not among those tried."""
        return any(replica.usable and replica.name not in tried for replica in self.all)

    def _placed(self, work: Work, salt: str, tried: Collection[str]) -> tuple[Replica, Work]:
        """Where it was planned to run, unless that has become worse than another; with the forecast for there."""
        candidates = [replica for replica in self._candidates() if replica.name not in tried]
        if not candidates:
            raise ApiError(
                ErrorKind.UNAVAILABLE,
                "No engine can be reached. Try again later.",
                code="engine_unreachable",
                retry_after_s=UNKNOWN_WAIT_S,
            )
        forecast = work.forecast
        planned = None if forecast is None else self.get(forecast.replica)
        if len(candidates) == 1 and (forecast is None or planned is candidates[0]):
            # Nothing to choose between, and no forecast that is of another.
            return candidates[0], work
        if planned is not None and planned in candidates and forecast is not None:
            later_s = planned.pacer.wait_s(forecast.prefill_s, work.deadline_s) - forecast.queue_s
            if later_s <= STALE_SHARE * forecast.ttft_s:
                return planned, work
        outlooks = self._outlooks(candidates, salt, work.token_ids, work.hashes)
        known = [each for outlook in outlooks if (each := foreseen(work, outlook)) is not None]
        best = least_ttft([self._hurried(each, work.deadline_s) for each in known])
        if best is not None:
            chosen = next(replica for replica in candidates if replica.name == best.replica)
            return chosen, replace(work, forecast=best)
        return min(candidates, key=lambda replica: replica.in_flight + replica.pacer.queued), work

    def _candidates(self) -> list[Replica]:
        """Those that are well; where none is, all that are not refused: trying is better than refusing."""
        # Threads that plan ask too, while the event loop adds and removes.
        everyone = list(self.all)
        if len(everyone) == 1:
            return everyone
        everyone = [replica for replica in everyone if not replica.draining] or everyone
        found = (
            [replica for replica in everyone if replica.usable]
            or [replica for replica in everyone if replica.refused is None]
            or everyone
        )
        return sorted(found, key=lambda replica: replica.name != self._last_used)

    # coming and going

    async def __aenter__(self) -> "Replicas":
        await self._roster.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._roster.__aexit__(kind, error, trace)

    async def apply(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the engines from now on; see `Roster.apply`."""
        await self._roster.apply(endpoints)
        await self._merge()

    def _made(self, endpoint: Endpoint) -> Replica:
        return Replica(
            endpoint, self._settings, self._session, self._limits, self._changed, first_probe_s=self._first_probe_s
        )

    # what they have in common

    async def _changed(self, replica: Replica) -> None:
        self._roster.news()
        await self._merge()

    async def _merge(self) -> None:
        several = sum(not replica.draining for replica in self.all) > 1
        for replica in self.all:
            replica.pacer.patience = ROUTED_PATIENCE if several else PATIENCE
            replica.pacer.arrivals = None if several else self.arrivals
        async with self._merging:
            facts = self._common()
            if facts == self.serving.facts:
                return
            self.serving = await asyncio.to_thread(make_serving, self._settings, facts, self.serving)
        for follow in self._followers:
            follow(self.serving)

    def _common(self) -> EngineFacts:
        present = [replica for replica in self.all if not replica.draining]
        common = in_common([each.facts for each in present], [each.refused for each in present], self.serving.facts)
        for replica, refused in zip(present, common.refused, strict=True):
            if refused != replica.refused and refused is not None:
                log.warning("%s is refused: %s", replica.name, refused)
            replica.refused = refused
        return common.facts


def _any_speed(replicas: Sequence[Replica]) -> SpeedEstimate | None:
    return next((estimate for replica in replicas if (estimate := replica.speed.estimate) is not None), None)
