"""How fast one replica is, as far as its requests have told: learned beside the requests, kept across restarts."""

import asyncio
import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from gateway.backends.facts import EngineFacts
from gateway.calibration_steps import Sample
from gateway.endpoints import ONLY_NAME
from gateway.lessons import Calibrated, Decoded, Prefilled, taught
from gateway.serving import Missing
from gateway.settings import Settings
from gateway.speed_file import SpeedFiles, SpeedKey, UnusableSpeed, key_of
from latency.learner import CorruptSpeed, SpeedLearner
from latency.speed import SpeedEstimate

log = logging.getLogger("headstart.speed")

FOLDER = "latency"
SAVE_EVERY_S = 60.0
LEARN_AFTER_S = 1.0
"""So long lessons gather: a fit for each would take the CPU from the next request."""
AT_ONCE = 64
"""So many are learned as they come while nothing is known: they may be what makes an engine known."""
MOST_WAITING = 1000
"""Lessons that wait for the learner; of more the oldest are dropped. A fit takes them all at once."""

Follower = Callable[[SpeedEstimate | None], None]


class ReplicaSpeed:
    """What one replica's requests teach. Everything is called on the event loop and returns at once.

    Learning takes milliseconds and runs on a thread, one step at a time: `estimate` follows a moment later, and after
    the first lessons `learn_after_s` later, with all that was said meanwhile. What is known is written below
    `data_dir/latency` at most every `save_every_s` seconds and in the end, under what it belongs to: engine, version,
    model, block size, and this machine.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str = ONLY_NAME,
        engine_url: str | None = None,
        machine: str | None = None,
        save_every_s: float = SAVE_EVERY_S,
        learn_after_s: float = LEARN_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._files = SpeedFiles(settings.data_dir / FOLDER)
        self._engine_url = (settings.engine_url if engine_url is None else engine_url).rstrip("/")
        self._quantile = settings.safety_quantile
        self._machine = platform.node() if machine is None else machine
        self._save_every_s = save_every_s
        self._learn_after_s = learn_after_s
        self._clock = clock
        self._learner = SpeedLearner(self._quantile)
        self._estimate: SpeedEstimate | None = None
        self._followers: list[Follower] = []
        self._missing: tuple[Missing, ...] = ()
        self._facts: EngineFacts | None = None
        self._key: SpeedKey | None = None  # whose state the learner holds
        self._next: SpeedKey | None = None  # whose state is to be taken up
        self._lessons: deque[Prefilled | Decoded] = deque(maxlen=MOST_WAITING)
        self._calibrated: Calibrated | None = None
        self._known = False
        self._unsaved = False
        self._saved_s = clock()
        self._closing = False
        self._wake = asyncio.Event()
        self._learning_due: asyncio.TimerHandle | None = None
        self._taken = 0
        self._settled = asyncio.Event()
        self._uncalibrated = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def estimate(self) -> SpeedEstimate | None:
        """None until enough is known to predict anything."""
        return self._estimate

    @property
    def missing(self) -> tuple[Missing, ...]:
        """That the engine cannot be calibrated, where it cannot."""
        return self._missing

    def on_change(self, follow: Follower) -> None:
        """`follow` is called with every new estimate, on the event loop; None when the engine is another one."""
        self._followers.append(follow)

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float, decoding: int = 0) -> None:
        """A prefill of a user's request, `decoding` others being decoded beside it."""
        self._learn_soon(Prefilled(uncached_tokens, cached_tokens, seconds, decoding))

    def observe_decode(self, output_tokens: int, seconds: float) -> None:
        """So many tokens after the first took so long."""
        self._learn_soon(Decoded(output_tokens, seconds))

    def facts_changed(self, facts: EngineFacts) -> None:
        """What the engine is now. Another engine has another state: the kept one, or an empty one."""
        self._facts = facts
        key = key_of(facts, self._engine_url, self._machine)
        current = self._next or self._key
        if key is not None and current is not None:
            filled = key.filled_from(current)
            if filled.difference(current.filled_from(key)) is None:
                key = filled
            else:
                self._lessons.clear()
        if key is not None and key != current:
            self._next = key
            self._turn_to_work()
        self._ask_for_calibration()

    async def uncalibrated(self) -> tuple[SpeedKey, EngineFacts]:
        """Waits for an engine that answers and of which nothing is kept."""
        while True:
            await self._uncalibrated.wait()
            if self._key is not None and self._facts is not None:
                return self._key, self._facts

    def calibrated(self, key: SpeedKey, samples: Sequence[Sample]) -> None:
        """A whole calibration of the engine under `key`; of no use when the engine is another one by now."""
        if key != self._key or self._next is not None:
            return
        self._known = True
        self._calibrated = Calibrated(tuple(samples))
        self._ask_for_calibration()
        self._turn_to_work()

    def cannot_calibrate(self, key: SpeedKey, reason: str) -> None:
        """The engine refuses what a calibration sends: its speed is learned from requests alone."""
        if key != self._key:
            return
        self._known = True
        self._ask_for_calibration()
        log.warning("%s cannot be calibrated: %s", self.name, reason)
        self._missing = (
            Missing(
                "calibration",
                "the first requests have no predicted TTFT; speed is learned from requests alone",
                "use an engine that takes token ids at /v1/completions",
            ),
        )

    def look_again(self) -> None:
        """Takes up what another process on this data folder has learned meanwhile, where nothing was known."""
        if self._key is not None and self._next is None and not self._known:
            self._next = self._key
            self._turn_to_work()

    async def settled(self) -> None:
        """Waits until all that was said so far has been learned, which is done at once."""
        if self._lessons:
            self._turn_to_work()
        await self._settled.wait()

    async def __aenter__(self) -> "ReplicaSpeed":
        self._task = asyncio.create_task(self._work(), name="speed")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._turn_to_work()
        if self._task is not None:
            # Who waits here may be cancelled, and another wait after that: what is known is saved all the same.
            await asyncio.shield(self._task)

    def _learn_soon(self, lesson: Prefilled | Decoded) -> None:
        self._lessons.append(lesson)
        self._taken += 1
        if self._estimate is None and self._taken <= AT_ONCE:
            self._turn_to_work()
        elif self._learning_due is None:
            self._learning_due = asyncio.get_running_loop().call_later(self._learn_after_s, self._turn_to_work)

    def _turn_to_work(self) -> None:
        if self._learning_due is not None:
            self._learning_due.cancel()
            self._learning_due = None
        self._settled.clear()
        self._wake.set()

    def _ask_for_calibration(self) -> None:
        facts = self._facts
        wanted = (
            facts is not None
            and facts.conclusive
            and facts.error is None
            and self._key is not None
            and self._next is None
            and not self._known
        )
        if wanted:
            self._uncalibrated.set()
        else:
            self._uncalibrated.clear()

    async def _work(self) -> None:
        """The only one that touches the learner."""
        while not self._closing:
            try:
                async with asyncio.timeout(self._until_save_s()):
                    await self._wake.wait()
            except TimeoutError:
                await self._save()
                continue
            self._wake.clear()
            try:
                if self._next is not None:
                    await self._take_up(self._next)
                await self._learn()
            except Exception:
                # Without a fit requests are answered all the same; the next lesson may be a better one.
                log.exception("learning the speed of %s failed", self.name)
            if not self._wake.is_set():
                self._settled.set()
        await self._save()

    def _until_save_s(self) -> float | None:
        return max(0.0, self._saved_s + self._save_every_s - self._clock()) if self._unsaved else None

    async def _take_up(self, key: SpeedKey) -> None:
        """The kept state of the engine under `key`. Without one, another engine begins with nothing."""
        before = self._key
        if before is not None:
            await self._save()
        learner: SpeedLearner | None = None
        try:
            raw = await asyncio.to_thread(self._files.read, key)
            learner = await asyncio.to_thread(SpeedLearner.load, raw, self._quantile) if raw is not None else None
        except (UnusableSpeed, CorruptSpeed) as error:
            log.warning("the kept speed of %s is not used, it is measured anew: %s", self.name, error)
        same = before is None or before.filled_from(key).difference(key.filled_from(before)) is None
        if learner is not None:
            self._learner, self._known, self._unsaved = learner, True, False
            log.info("the speed of %s is known from an earlier run", self.name)
        elif not same:
            self._learner, self._known, self._unsaved = SpeedLearner(self._quantile), False, False
        if not same:
            self._missing = ()
            self._taken = 0
        self._key = key
        if self._next == key:
            self._next = None
        else:
            self._wake.set()
        self._publish(await asyncio.to_thread(_estimate_of, self._learner))
        self._ask_for_calibration()

    async def _learn(self) -> None:
        calibrated, self._calibrated = self._calibrated, None
        lessons = tuple(self._lessons)
        self._lessons.clear()
        if not lessons and calibrated is None:
            return
        learner = self._learner
        estimate = await asyncio.to_thread(taught, learner, lessons, calibrated)
        self._unsaved = True
        self._publish(estimate)
        if calibrated is not None:
            await self._save()

    def _publish(self, estimate: SpeedEstimate | None) -> None:
        before, self._estimate = self._estimate, estimate
        if estimate == before:
            return
        was_drifting = before is not None and before.drifting
        if estimate is not None and estimate.drifting != was_drifting:
            if estimate.drifting:
                log.warning("the speed of %s drifts: recent prefills disagree with what was learned", self.name)
            else:
                log.info("the speed of %s is learned again", self.name)
        for follow in self._followers:
            follow(estimate)

    async def _save(self) -> None:
        if not self._unsaved or self._key is None:
            self._unsaved = False
            return
        self._saved_s = self._clock()
        try:
            raw = await asyncio.to_thread(self._learner.dump)
            await asyncio.to_thread(self._files.write, self._key, raw)
        except OSError as error:
            log.warning("the speed of %s cannot be kept: %s", self.name, error.strerror)
            return
        self._unsaved = False


def _estimate_of(learner: SpeedLearner) -> SpeedEstimate | None:
    return learner.estimate
