"""One calibrator for each replica, for as long as it is there."""

import asyncio
from collections.abc import Callable
from types import TracebackType

import aiohttp

from gateway.backends.vllm import EngineLimits
from gateway.calibrator import Calibrator, Neighbour
from gateway.replica import Replica
from gateway.replicas import Replicas
from gateway.settings import Settings


class Calibrators:
    """Measures every replica that is met for the first time; `neighbour` and `measures` as of `Calibrator`."""

    def __init__(
        self,
        replicas: Replicas,
        session: aiohttp.ClientSession,
        settings: Settings,
        limits: EngineLimits,
        neighbour: Neighbour | None = None,
        measures: Callable[[], bool] = lambda: True,
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._settings = settings
        self._limits = limits
        self._neighbour = neighbour
        self._measures = measures
        self._running: dict[Replica, Calibrator] = {}

    async def __aenter__(self) -> "Calibrators":
        self._replicas.on_arrival(self._greet, self._part)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(calibrator.stop() for calibrator in self._running.values()))

    def _greet(self, replica: Replica) -> None:
        calibrator = Calibrator(
            replica.speed,
            replica.pacer,
            self._session,
            self._settings,
            self._limits,
            lambda: replica.residency,
            self._neighbour,
            engine_url=replica.endpoint.url,
            measures=self._measures,
        )
        self._running[replica] = calibrator
        calibrator.start()

    def _part(self, replica: Replica) -> None:
        if (calibrator := self._running.pop(replica, None)) is not None:
            calibrator.cancel()
