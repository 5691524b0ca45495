"""One engine: what is known of it, what it holds, how fast and how busy it is, and whether it is well."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol

import aiohttp

from cache.prompt_tree import PromptTree
from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.backends.vllm import EngineLimits, VllmBackend
from gateway.endpoints import Endpoint
from gateway.health import Health
from gateway.inquiry import Inquiry
from gateway.kv_events import KvEvents
from gateway.pacing import Pacer, Prefill
from gateway.runs import Onlooker, Run, Work
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from latency.speed import SpeedEstimate
from prompt_builder.outlook import NothingHeld, Outlook

log = logging.getLogger("headstart.replicas")

_STARTS_REMEMBERED = 4

STALE_S = 0.005
"""A prompt that has waited for so long may find more in the engine's cache than when it was planned."""

SEVERAL_ENGINES = (
    "several engines answer at this address in turn, so that what one holds is of no use at the next: "
    "list each engine's own address in engine_url"
)


class Waiting(Protocol):
    """A request that may find more on a replica than when it was planned."""

    def cached_tokens(self, replica: "Replica") -> int | None:
        """What it would find there now; None where that cannot be told. Quick, and must not raise."""

    def shared_tokens(self) -> int:
        """Tokens that it has in common with others that wait, once for each of them. As quick."""

    async def latest(self, replica: "Replica") -> Work:
        """What it asks of this replica now, the same in another form."""


class Replica:
    """One engine. A background probe notices that it came, went, was restarted, or serves another model.

    `changed` is awaited with every change of its facts. Entering waits at most `first_probe_s` seconds for the first
    probe, so that an engine which is silent does not keep documents and search from starting. `refused` says why an
    engine that answers is not used (another model, another tokenizer); `draining`: it takes nothing new;
    `several_engines`: different processes answer at its address in turn, so that nothing is believed of its cache.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: Settings,
        session: aiohttp.ClientSession,
        limits: EngineLimits,
        changed: Callable[["Replica"], Awaitable[None]],
        first_probe_s: float = 15.0,
    ) -> None:
        self.endpoint = endpoint
        self._settings = settings
        self._changed = changed
        self._first_probe_s = first_probe_s
        self.health = Health()
        self.backend = VllmBackend(
            session, endpoint.url, settings.engine_api_key, limits, host=endpoint.host, broke_off=self._broke_off
        )
        self.facts = EngineFacts(reachable=False)
        self._inquiry = Inquiry(session, endpoint, settings, self._corrected)
        self.pacer = Pacer(enabled=settings.pacing, max_queued=settings.max_queued)
        self.residency: Residency | None = None
        self.events = KvEvents(
            settings.kv_events, endpoint.url, self._inquiry.event_sources, lambda: self.residency, name=endpoint.name
        )
        # The addresses behind one name are taken to be equally fast: a new one begins with what is known.
        self.speed = ReplicaSpeed(
            settings, name=endpoint.name, engine_url=f"http://{endpoint.host}" if endpoint.host else endpoint.url
        )
        self.speed.on_change(self.pacer.learned)
        self.refused: str | None = None
        self.draining = False
        self.onlooker: Onlooker | None = None
        self.several_engines = False
        self._runs: set[Run] = set()
        self._entered = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._said: str | None = None
        self._starts: list[float] = []
        self._probed = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def usable(self) -> bool:
        """Whether a new request may go there."""
        return self.known and not self.draining and self.refused is None and self.health.takes_requests

    @property
    def given_up(self) -> bool:
        """Whether a request that has waited for its turn there is better off elsewhere."""
        return self.draining or self.refused is not None or self.health.state == "down"

    @property
    def known(self) -> bool:
        """Whether the engine has told its model."""
        return self.facts.model is not None

    @property
    def in_flight(self) -> int:
        """Requests that were released to it and are not over."""
        return len(self._runs)

    def outlook(
        self, salt: str | None, speed: SpeedEstimate | None = None, tree: PromptTree | None = None
    ) -> Outlook:
        """The replica as it is now, for planning: how fast, how busy, and what it holds under the tenant's salt.

        `speed` stands in where its own is not known yet. In one `tree` a request is hashed once for all replicas. No
        salt: a prompt of which only the engine knows the ids.
        """
        prefix = NothingHeld() if self.residency is None or salt is None else self.residency.prefix(salt, tree)
        return Outlook(self.name, self.speed.estimate or speed, self.pacer.wait_s, prefix, self.pacer.decoding)

    async def enter(self, work: Work, salt: str, waiting: Waiting | None = None, *, moved: bool = False) -> Run:
        """Waits for the request's turn to prefill. Raises QueueFull. Whoever got a run closes it.

        A request that has waited, or has `moved` here from where it was planned, is asked for its latest form.
        """
        # From now on, not only once it is released: a trial has the replica for itself, and who waits is waited for.
        trial = self.health.began()
        self._entered += 1
        self._idle.clear()
        try:
            again = None if waiting is None else partial(self._job_now, work, waiting)
            ticket = await self.pacer.enter(self._job(work), again)
        except BaseException:
            self._gone(trial)
            raise
        if waiting is not None and (moved or ticket.waited_s >= STALE_S):
            try:
                work = replace(await waiting.latest(self), forecast=work.forecast)
            except BaseException:
                ticket.done()
                self._gone(trial)
                raise

        def left(run: Run) -> None:
            if run in self._runs:
                self._runs.discard(run)
                self._gone(trial)

        run = Run(
            work,
            ticket,
            self.residency,
            self.speed,
            salt=salt,
            decoding=self.pacer.decoding,
            closed=left,
            onlooker=self.onlooker,
            # Of unknown ids nothing is taken, and nobody is told.
            soon=None if work.token_ids is None and self.onlooker is None else _when_it_is_on_its_way,
        )
        self._runs.add(run)
        return run

    def _gone(self, trial: int) -> None:
        self.health.left(trial)
        self._entered -= 1
        if not self._entered:
            self._idle.set()

    def failed(self, error: str) -> None:
        """A request found the engine gone. The next probe is made soon."""
        self.health.failed(error)
        self._say()
        self.probe_soon()

    def probe_soon(self) -> None:
        """The engine may be another than it was."""
        self._probe_now.set()

    def _broke_off(self) -> None:
        self.failed("an answer broke off")

    async def drained(self) -> None:
        """Waits until no request is in flight or in the queue."""
        await self._idle.wait()

    def _job(self, work: Work) -> Prefill:
        """A prompt whose ids are not known is taken to be computed whole."""
        forecast, speed = work.forecast, self.speed.estimate
        if forecast is not None:
            return Prefill(forecast.uncached_tokens, forecast.cached_tokens, forecast.prefill_s, work.deadline_s)
        return Prefill(work.tokens, 0, 0.0 if speed is None else speed.predict_s(work.tokens), work.deadline_s)

    def _job_now(self, work: Work, waiting: Waiting) -> Prefill:
        cached, speed = waiting.cached_tokens(self), self.speed.estimate
        if cached is None or speed is None:
            return self._job(work)
        uncached = work.tokens - cached
        shared_s = waiting.shared_tokens() * speed.prefill.per_token_s
        return Prefill(uncached, cached, speed.predict_s(uncached, cached), work.deadline_s, shared_s)

    async def start(self) -> None:
        """Begins to probe, and waits for nothing."""
        await self.speed.__aenter__()
        await self.events.__aenter__()
        self._task = asyncio.create_task(self._watch(), name=f"probe of {self.name}")

    async def __aenter__(self) -> "Replica":
        await self.start()
        try:
            async with asyncio.timeout(self._first_probe_s):
                await self._probed.wait()
        except TimeoutError:
            log.warning("%s is silent; starting without what it would tell", self.name)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.events.__aexit__(kind, error, trace)
        await self.speed.__aexit__(kind, error, trace)

    async def _watch(self) -> None:
        while True:
            try:
                await self.probe()
            except Exception:
                # Whatever it is, the next probe may go well.
                log.exception("a probe of %s failed", self.name)
            self._probed.set()
            pause_s = self._settings.probe_interval_s
            if self.health.state == "down" and self.known:
                pause_s = min(pause_s, self.health.pause_s)
            self._probe_now.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._probe_now.wait()
                # A request failed just now: give the engine a moment before asking.
                await asyncio.sleep(min(pause_s, self.health.pause_s))
            except TimeoutError:
                continue

    async def probe(self) -> None:
        """Asks the engine what it is now, and takes it up."""
        known = self.facts
        facts = await self._inquiry.facts(known)
        self.health.probed(None if facts.reachable else facts.error or "not reachable")
        if facts == known:
            self._say()
            return
        if facts.reachable and (not known.reachable or not facts.same_engine(known)):
            self._came(facts, known)
        self.facts = facts
        self._say()
        self.speed.facts_changed(facts)
        await self._changed(self)

    def _corrected(self, facts: EngineFacts) -> EngineFacts:
        if facts.reachable and self.residency is not None and not self.residency.reuses:
            facts = replace(facts, prefix_caching=False)
        # Of several processes in turn each would look like a restart.
        return replace(facts, started_s=None) if self.several_engines else facts

    def _came(self, facts: EngineFacts, known: EngineFacts) -> None:
        """It came, came back, or is another process: whatever another process held is gone."""
        same_process = facts.started_s is not None and facts.started_s == known.started_s
        if not same_process or not replace(facts, reachable=True).same_engine(replace(known, reachable=True)):
            self.residency = None if self.several_engines else _residency_of(facts)
            self.events.renew()
        if facts.started_s is None or same_process:
            return
        if facts.started_s in self._starts:
            log.warning("%s: %s", self.name, SEVERAL_ENGINES)
            self.several_engines, self.residency = True, None
        self._starts = [*self._starts, facts.started_s][-_STARTS_REMEMBERED:]

    def _say(self) -> None:
        """Once for each change of state."""
        state = self.health.state
        if state == self._said:
            return
        self._said = state
        if state == "down":
            log.warning("%s is not used: %s", self.name, self.health.error)
        elif state == "ok":
            log.info("%s reachable, serving %s", self.name, self.facts.model)


def _when_it_is_on_its_way(call: Callable[[], None]) -> None:
    """In the turn of the loop after the next: a request that leaves now is written in the next."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, call)


def _residency_of(facts: EngineFacts) -> Residency | None:
    """The engine never uses its first block. Of an engine that does not tell its blocks nothing is believed."""
    if facts.block_size is None or facts.num_blocks is None or facts.num_blocks < 2:
        return None
    return Residency(facts.block_size, facts.num_blocks - 1, reuses=facts.prefix_caching is not False)
