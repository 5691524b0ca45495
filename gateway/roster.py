"""Which replicas there are: they come, they drain, and they go."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from gateway.endpoints import Endpoint
from gateway.replica import Replica

log = logging.getLogger("headstart.replicas")

ARRIVAL_LIMIT_S = 10.0
"""Where no engine stays, the old ones serve at most so long until a new one can."""


class Roster:
    """Owns the replicas, which `make` makes. Everything belongs to one event loop; `all` may be read from any thread.

    What is taken off takes nothing new, finishes what it has, and is closed then.
    """

    def __init__(self, endpoints: Sequence[Endpoint], make: Callable[[Endpoint], Replica]) -> None:
        self._make = make
        self._replicas: dict[str, Replica] = {endpoint.name: make(endpoint) for endpoint in endpoints}
        self._arrivals: list[Callable[[Replica], None]] = []
        self._departures: list[Callable[[Replica], None]] = []
        self._applying = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._drained = 0
        self._closed = False
        self._news = asyncio.Event()

    @property
    def all(self) -> tuple[Replica, ...]:
        """In the order in which they came; those that drain last."""
        return tuple(self._replicas.values())

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def on_arrival(self, greet: Callable[[Replica], None], part: Callable[[Replica], None] | None = None) -> None:
        """`greet` is called with every replica, those at hand and those to come; `part` when one is given up."""
        self._arrivals.append(greet)
        if part is not None:
            self._departures.append(part)
        for replica in self.all:
            greet(replica)

    def news(self) -> None:
        """A replica has changed."""
        self._news.set()

    async def __aenter__(self) -> "Roster":
        try:
            # All at once: several silent ones hold up the start no longer than one.
            await asyncio.gather(*(replica.__aenter__() for replica in self.all))
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for task in self._leaving:
            task.cancel()
        if self._leaving:
            await asyncio.wait(self._leaving)
        for replica in self.all:
            await replica.__aexit__(kind, error, trace)

    async def apply(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the engines from now on. What is not among them takes nothing new and goes when it is idle.

        Where none stays, the old ones serve until a new one can, for ARRIVAL_LIMIT_S at most. An empty list changes
        nothing: a gateway without engines serves nobody.
        """
        if not endpoints:
            log.warning("no engine is left in the new list; the old ones stay")
            return
        async with self._applying:
            wanted = {endpoint.name: endpoint for endpoint in endpoints}
            present = [replica for replica in self.all if not replica.draining]
            staying = {each.name: each for each in present if wanted.get(each.name) == each.endpoint}
            new = [self._make(endpoint) for name, endpoint in wanted.items() if name not in staying]
            try:
                for replica in new:
                    log.info("%s is new", replica.name)
                    await replica.start()
                if not any(replica.usable for replica in staying.values()):
                    await self._one_usable(new)
            finally:
                for replica in present:
                    if replica.name not in staying:
                        self._drain(replica)
                for replica in new:
                    self._replicas[replica.name] = replica
                    for greet in self._arrivals:
                        greet(replica)
                if self._closed:
                    await asyncio.gather(*(replica.__aexit__(None, None, None) for replica in new))

    async def _one_usable(self, new: Sequence[Replica]) -> None:
        if not new or not any(replica.usable for replica in self.all):
            return
        try:
            async with asyncio.timeout(ARRIVAL_LIMIT_S):
                while not any(replica.usable for replica in new):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            log.warning("no new engine has answered within %g s; the old ones leave all the same", ARRIVAL_LIMIT_S)

    def _drain(self, replica: Replica) -> None:
        log.info("%s is drained: %d requests in flight", replica.name, replica.in_flight)
        replica.draining = True
        # Its name is free at once: an engine of the same name at another address is another replica.
        del self._replicas[replica.name]
        self._drained += 1
        leaving_name = f"{replica.name} (draining {self._drained})"
        self._replicas[leaving_name] = replica
        task = asyncio.create_task(self._leave(leaving_name, replica), name=f"drain {replica.name}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, name: str, replica: Replica) -> None:
        await replica.drained()
        await replica.__aexit__(None, None, None)
        del self._replicas[name]
        for part in self._departures:
            part(replica)
        log.info("%s is gone", replica.name)
