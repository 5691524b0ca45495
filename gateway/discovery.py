"""Which engines there are now: names followed to their addresses, and the setting re-read while the gateway runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from gateway.addresses import TrackedName, can_be_tracked, distinct, look_up
from gateway.endpoints import Endpoint, parse_endpoints
from gateway.reload import Hangup, Reread, SettingsFile
from gateway.settings import Settings

log = logging.getLogger("headstart.discovery")

LOOK_UP_LIMIT_S = 5.0
FILE_POLL_S = 2.0

Follower = Callable[[tuple[Endpoint, ...]], Awaitable[None]]
LookUp = Callable[[str, int], Awaitable[tuple[str, ...]]]


class Discovery:
    """The engines of `engine_url`, each of a name's addresses for itself; `endpoints` is known once entered.

    With `reread`, which reads the settings anew, SIGHUP and a change of `settings_file` add and remove engines. No
    other setting changes at run time: those that would are named in the log. What cannot be read or looked up
    changes nothing. SIGHUP is taken over in the main thread only.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        reread: Reread | None = None,
        settings_file: Path | None = None,
        file_poll_s: float = FILE_POLL_S,
        look_up: LookUp = look_up,
    ) -> None:
        self._refresh_s = settings.dns_refresh_s
        self._file_poll_s = file_poll_s
        self._look_up = look_up
        self._file = None if reread is None else SettingsFile(settings, reread, settings_file)
        self._hangup = Hangup()
        self._configured = parse_endpoints(settings.engine_url)
        self._tracked: dict[Endpoint, TrackedName] = {}
        self._failing: set[Endpoint] = set()
        self._followers: list[Follower] = []
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.endpoints = self._configured

    def on_change(self, follow: Follower) -> None:
        """`follow` is awaited with all endpoints whenever they are others than before, one change after the other."""
        self._followers.append(follow)

    async def __aenter__(self) -> "Discovery":
        await self.refresh()
        self._tell()
        if self._file is not None:
            await self._file.changed()
            self._hangup.install()
        self._task = asyncio.create_task(self._watch(), name="discovery")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hangup.remove()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def refresh(self) -> None:
        """Looks all names up, and tells the followers when the endpoints are others now."""
        async with self._one_at_a_time:
            await self._refresh()

    async def reload(self) -> None:
        """Reads the settings anew and takes its engines; the reason is logged when they cannot be read."""
        if self._file is None:
            return
        async with self._one_at_a_time:
            engine_url = await self._file.read_engines()
            if engine_url is None:
                return
            self._configured = parse_endpoints(engine_url)
            await self._refresh()

    async def _refresh(self) -> None:
        names = [endpoint for endpoint in self._configured if can_be_tracked(endpoint)]
        self._tracked = {name: self._tracked.get(name) or TrackedName(name) for name in names}
        self._failing &= set(names)
        await asyncio.gather(*(self._follow(name) for name in names))
        endpoints = distinct(
            each
            for endpoint in self._configured
            for each in (self._tracked[endpoint].endpoints() if endpoint in self._tracked else (endpoint,))
        )
        if endpoints == self.endpoints:
            return
        for follow in self._followers:
            await follow(endpoints)
        # Not before: what a follower could not take is told again with the next look-up.
        self.endpoints = endpoints
        if self._task is not None:
            self._tell()

    async def _follow(self, name: Endpoint) -> None:
        parts = urlsplit(name.url)
        try:
            async with asyncio.timeout(LOOK_UP_LIMIT_S):
                addresses = await self._look_up(parts.hostname or "", parts.port or 80)
        except (OSError, UnicodeError):
            # Also what the limit raises. The engines that were there are asked on: their own probes judge them.
            if name not in self._failing:
                log.warning("the name of %s cannot be resolved; its last addresses stay", name.name)
            self._failing.add(name)
            return
        self._failing.discard(name)
        self._tracked[name].seen(addresses)

    def _tell(self) -> None:
        """Which is which, for the operator: names alone stand in answers and metrics. One engine needs no telling."""
        if len(self.endpoints) > 1:
            places = [urlsplit(each.url) for each in self.endpoints]
            hosts = [place.hostname for place in places]
            # Engines on one host differ in the port.
            told = [place.netloc if hosts.count(place.hostname) > 1 else place.hostname for place in places]
            shown = ", ".join(f"{each.name} at {place}" for each, place in zip(self.endpoints, told, strict=True))
            log.info("%d engines: %s", len(self.endpoints), shown)

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forever(self.refresh, self._refresh_s))
            if self._file is not None:
                group.create_task(self._forever(self._reload_if_changed, self._file_poll_s))
                group.create_task(self._reload_at_hangup())

    async def _reload_if_changed(self) -> None:
        if self._file is not None and await self._file.changed():
            await self.reload()

    async def _reload_at_hangup(self) -> None:
        while True:
            await self._hangup.wait()
            await self._go_on(self.reload)

    async def _forever(self, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self._go_on(step)

    async def _go_on(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except Exception:
            # The engines that are known serve on, and the next step may go well.
            log.exception("looking for the engines failed")
