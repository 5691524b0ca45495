"""A time limit on each of many waits, for the price of a timestamp a wait."""

import asyncio
from types import TracebackType


class Watchdog:
    """The outer block lives as long as the stream, the inner one around each wait; an overdue wait is a TimeoutError.

    All waits are those of the task that entered the outer block.

    with Watchdog(30.0) as watchdog:
        while ...:
            with watchdog:
                data = await read()

    `asyncio.timeout` arms and disarms a timer for every wait; here one timer looks now and then whether the wait that
    is going on has lasted too long, and else sets itself to the moment when that will be so.
    """

    __slots__ = ("_depth", "_expired", "_handle", "_limit_s", "_loop", "_since_s", "_task")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._depth = 0
        self._since_s: float | None = None
        self._expired = False
        self._handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> "Watchdog":
        if self._depth == 0:
            self._task = asyncio.current_task()
            self._handle = self._loop.call_later(self._limit_s, self._look)
        else:
            self._since_s = self._loop.time()
        self._depth += 1
        return self

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since_s is None else self._since_s
        if self._task is not None and self._since_s is not None and now - since >= self._limit_s:
            self._expired = True
            self._task.cancel()
            return
        self._handle = self._loop.call_at(since + self._limit_s, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        self._since_s = None
        if self._depth == 0:
            self._task = None
            if self._handle is not None:
                self._handle.cancel()
            return
        if not self._expired or self._task is None:
            return
        self._expired = False
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error
