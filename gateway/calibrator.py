"""The calibration that a gateway does by itself: on first contact with an engine, while no user waits."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol

import aiohttp

from cache.residency import Residency
from gateway.backends.facts import EngineFacts
from gateway.backends.vllm import EngineLimits
from gateway.calibration import Calibration, CannotCalibrate, Probe, is_noisy, mean_error
from gateway.calibration_steps import Bounds, Sample
from gateway.errors import ApiError
from gateway.settings import Settings
from gateway.speed import ReplicaSpeed
from gateway.speed_file import SpeedKey
from latency.model import PrefillModel

log = logging.getLogger("headstart.calibration")

LONGEST_PAUSE_S = 60.0
LOOK_AGAIN_S = 1.0
ATTEMPTS = 3


class Interruptible(Protocol):
    """A turn to work while the replica is idle."""

    @property
    def abandoned(self) -> asyncio.Event:
        """Set as soon as a user's request comes."""


class Idleness(Protocol):
    """Who knows when a replica has nothing to do."""

    @property
    def decoding(self) -> int:
        """Answers that are being decoded."""

    def background(self) -> AbstractAsyncContextManager[Interruptible]:
        """Waits until the replica is idle."""


class Neighbour(Protocol):
    """Who else takes the machine's cores, on which a CPU engine may run too."""

    @property
    def busy(self) -> bool: ...

    async def wait_idle(self) -> None: ...


class Calibrator:
    """Measures every engine of which `speed` knows nothing, for a few seconds, one request at a time.

    A user's request ends the measurement that is going on (its connection closes, the engine drops it at its next
    step) and waits for nothing else; the calibration goes on where it stopped when the replica is idle again. Only a
    whole calibration is learned. One that was not alone on the engine is repeated, `ATTEMPTS` times in all.
    `residency` gives the picture of the engine's blocks, which hears of what the calibration computed. While
    `neighbour` (ingestion) is busy nothing is measured: beside it a CPU engine looks several times too slow.
    Of several workers one `measures`; the others take up what it has learned.
    """

    def __init__(
        self,
        speed: ReplicaSpeed,
        idleness: Idleness,
        session: aiohttp.ClientSession,
        settings: Settings,
        limits: EngineLimits,
        residency: Callable[[], Residency | None] = lambda: None,
        neighbour: Neighbour | None = None,
        engine_url: str | None = None,
        measures: Callable[[], bool] = lambda: True,
    ) -> None:
        self._speed = speed
        self._idleness = idleness
        self._session = session
        self._settings = settings
        self._limits = limits
        self._residency = residency
        self._neighbour = neighbour
        self._engine_url = settings.engine_url if engine_url is None else engine_url
        self._measures = measures
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._settings.calibrate:
            self._task = asyncio.create_task(self._watch(), name="calibrator")

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def __aenter__(self) -> "Calibrator":
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _watch(self) -> None:
        pause_s = self._settings.probe_interval_s
        while True:
            key, facts = await self._speed.uncalibrated()
            if not self._measures():
                await asyncio.sleep(LOOK_AGAIN_S)
                self._speed.look_again()
                await self._speed.settled()
                continue
            try:
                await self._calibrate(key, facts)
                pause_s = self._settings.probe_interval_s
                continue
            except CannotCalibrate as reason:
                self._speed.cannot_calibrate(key, str(reason))
                continue
            except ApiError as error:
                log.info("the calibration of %s waits: %s", self._speed.name, error.message)
            except Exception:
                log.exception("the calibration of %s failed", self._speed.name)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _calibrate(self, key: SpeedKey, facts: EngineFacts) -> None:
        """Raises ApiError and CannotCalibrate."""
        for attempt in range(ATTEMPTS):
            calibration = await self._measured(facts)
            estimate = (await asyncio.to_thread(calibration.learned)).estimate
            if estimate is None or not is_noisy(estimate.prefill, calibration.samples):
                break
            if attempt + 1 < ATTEMPTS:
                log.info("%s was not idle while it was calibrated; it is measured again", self._speed.name)
                await asyncio.sleep(self._settings.probe_interval_s)
        else:
            log.warning(
                "%s is never idle: what was measured counts as so many requests, and later ones correct it",
                self._speed.name,
            )
        self._speed.calibrated(key, calibration.samples)
        if estimate is not None:
            _tell(self._speed.name, estimate.prefill, calibration.samples)

    async def _measured(self, facts: EngineFacts) -> Calibration:
        settings = self._settings
        probe = Probe(
            self._session,
            self._engine_url,
            settings.engine_api_key,
            self._limits,
            facts,
            decoding=lambda: self._idleness.decoding,
        )
        while True:
            if self._neighbour is not None:
                await self._neighbour.wait_idle()
            calibration = Calibration(probe, Bounds.of(facts), settings.safety_quantile, told=self._evicted_by)
            while not await self._while_idle(calibration):
                log.debug("a request came; the calibration goes on later")
            if self._neighbour is None or not self._neighbour.busy:
                return calibration
            log.info("documents came while %s was calibrated; it is measured again after them", self._speed.name)

    def _evicted_by(self, sample: Sample) -> None:
        """What a measurement computed has taken blocks from what users' prompts left in the engine."""
        residency = self._residency()
        if residency is not None:
            residency.ran_unknown(sample.uncached_tokens + sample.output_tokens)

    async def _while_idle(self, calibration: Calibration) -> bool:
        """Whether it came to its end before a user's request did."""
        async with self._idleness.background() as turn:
            measuring = asyncio.create_task(calibration.run())
            called = asyncio.create_task(turn.abandoned.wait())
            try:
                await asyncio.wait((measuring, called), return_when=asyncio.FIRST_COMPLETED)
                if measuring.done():
                    # Raises what ended it.
                    measuring.result()
                    return True
                return False
            finally:
                measuring.cancel()
                called.cancel()
                await asyncio.wait((measuring, called))


def _tell(name: str, model: PrefillModel, samples: Sequence[Sample]) -> None:
    log.info(
        "%s calibrated with %d requests in %.1f s: %.1f ms + %.3f ms a token + %.3f µs a pair of tokens, "
        "mean error %.1f %%",
        name,
        len(samples),
        sum(sample.total_s for sample in samples),
        model.fixed_s * 1e3,
        model.per_token_s * 1e3,
        model.per_pair_s * 1e6,
        100 * mean_error(model, samples),
    )
