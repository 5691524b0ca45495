"""Where a request runs: the engine, what is known of it, and whether it is well."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import aiohttp

from cache.residency import Residency
from gateway.backends.facts import EngineFacts, probe_engine
from gateway.backends.vllm import EngineLimits, VllmBackend
from gateway.budgets import QUEUE_FULL
from gateway.errors import ApiError, ErrorKind
from gateway.pacing import Pacer, Prefill, QueueFull
from gateway.runs import Run, Work
from gateway.serving import Serving, make_serving, unknown_serving
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from latency.speed import Forecast
from prompt_builder.outlook import NothingHeld, Outlook

log = logging.getLogger("headstart.replicas")

_INCONCLUSIVE_PROBES = 5
_ASK_AGAIN_PROBES = 12
"""An engine that answered no probe request so far is asked again at every so many probes."""

NAME = "engine"
UNKNOWN_WAIT_S = 1.0
"""Told to come again after, while nothing is known of the engine's speed: 0 would be an invitation."""


class Replica:
    """One engine. A background probe notices that it came, went, or serves another model.

    A failed probe never stops a request: each one tries the engine itself. Entering waits at most `first_probe_s`
    seconds for the first probe, so that an engine which is silent does not keep documents and search from starting.
    """

    def __init__(
        self, settings: Settings, session: aiohttp.ClientSession, limits: EngineLimits, first_probe_s: float = 15.0
    ) -> None:
        self._settings = settings
        self._session = session
        self.backend = VllmBackend(session, settings.engine_url, settings.engine_api_key, limits)
        self.serving = unknown_serving(settings)
        self.pacer = Pacer(enabled=settings.pacing, max_queued=settings.max_queued)
        self.residency: Residency | None = None
        self.speed = ReplicaSpeed(settings)
        self.speed.on_change(self.pacer.learned)
        self._followers: list[Callable[[Serving], None]] = []
        self._inconclusive = 0
        self._probes = 0
        self._said = False
        self._first_probe_s = first_probe_s
        self._probed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def on_change(self, follow: Callable[[Serving], None]) -> None:
        """`follow` is called with every new Serving, on the event loop."""
        self._followers.append(follow)

    def outlook(self, salt: str) -> Outlook:
        """The replica as it is now, for planning: how fast, how busy, and what it holds under the tenant's salt."""
        prefix = NothingHeld() if self.residency is None else self.residency.prefix(salt)
        return Outlook(NAME, self.speed.estimate, self.pacer.wait_s, prefix, self.pacer.decoding)

    def hurried(self, forecast: Forecast | None, deadline_s: float | None) -> Forecast | None:
        """The forecast with the wait that its deadline leaves it: a request that is pressed passes others.

        Plans reckon with the whole queue, so that prompts become smaller under load; only a refusal must be sure that
        nothing helps.
        """
        if forecast is None or deadline_s is None:
            return forecast
        wait_s = self.pacer.wait_s(forecast.prefill_s, deadline_s)
        return replace(forecast, queue_s=min(forecast.queue_s, wait_s))

    async def enter(self, work: Work, salt: str) -> Run:
        """Waits for the request's turn to prefill. Raises ApiError (503) when too many wait already.

        Whoever got a run closes it, whatever happens.
        """
        job = self._job(work)
        try:
            ticket = await self.pacer.enter(job)
        except QueueFull as full:
            raise ApiError(
                ErrorKind.UNAVAILABLE,
                f"{self._settings.max_queued} requests wait for the engine, the most that may. Try again later.",
                code=QUEUE_FULL,
                retry_after_s=full.wait_s or UNKNOWN_WAIT_S,
            ) from None
        return Run(work, ticket, self.residency, self.speed, salt=salt, decoding=self.pacer.decoding)

    def _job(self, work: Work) -> Prefill:
        """A prompt whose ids are not known is taken to be computed whole."""
        forecast, speed = work.forecast, self.speed.estimate
        if forecast is not None:
            return Prefill(forecast.uncached_tokens, forecast.cached_tokens, forecast.prefill_s, work.deadline_s)
        return Prefill(work.tokens, 0, 0.0 if speed is None else speed.predict_s(work.tokens), work.deadline_s)

    @property
    def model(self) -> str | None:
        """The served model's name, None until the engine has told it."""
        return self.serving.facts.model or self._settings.model or None

    async def __aenter__(self) -> "Replica":
        await self.speed.__aenter__()
        self._task = asyncio.create_task(self._watch(), name="engine-probe")
        try:
            async with asyncio.timeout(self._first_probe_s):
                await self._probed.wait()
        except TimeoutError:
            log.warning("the engine is silent; starting without what it would tell")
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
        await self.speed.__aexit__(kind, error, trace)

    async def _watch(self) -> None:
        while True:
            try:
                await self.probe()
            except Exception:
                # Whatever it is, the next probe may go well, and requests try the engine themselves.
                log.exception("a probe of the engine failed")
            self._probed.set()
            await asyncio.sleep(self._settings.probe_interval_s)

    async def probe(self) -> None:
        """Asks the engine; the full questions only until they are answered or it changed."""
        known = self.serving.facts
        self._probes += 1
        given_up = self._inconclusive >= _INCONCLUSIVE_PROBES and self._probes % _ASK_AGAIN_PROBES != 0
        settled = known.reachable and (known.conclusive or given_up)
        facts = await probe_engine(
            self._session,
            self._settings.engine_url,
            self._settings.engine_api_key,
            model=self._settings.model,
            chat=not settled,
        )
        if settled and facts.same_engine(known):
            return
        if settled and facts.reachable:
            facts = await probe_engine(
                self._session,
                self._settings.engine_url,
                self._settings.engine_api_key,
                model=self._settings.model,
            )
        self._inconclusive = self._inconclusive + 1 if facts.reachable and not facts.conclusive else 0
        if not facts.reachable:
            # What was known of the model still shapes prompts and chunks until the engine comes back.
            facts = known.gone(facts.error)
        if facts.reachable != known.reachable or not self._said:
            log.info("engine %s", f"reachable, serving {facts.model}" if facts.reachable else "not reachable")
        self._said = True
        if facts == known:
            return
        if not known.reachable or not facts.same_engine(known):
            # It came, or came back: whatever it held before is gone.
            self.residency = _residency_of(facts)
        self.speed.facts_changed(facts)
        self.serving = await asyncio.to_thread(make_serving, self._settings, facts)
        for follow in self._followers:
            follow(self.serving)


def _residency_of(facts: EngineFacts) -> Residency | None:
    """The engine never uses its first block. Of an engine that does not tell its blocks nothing is believed."""
    if facts.block_size is None or facts.num_blocks is None or facts.num_blocks < 2:
        return None
    return Residency(facts.block_size, facts.num_blocks - 1)
