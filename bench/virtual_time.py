"""An event loop whose clock jumps to the next timer: minutes of queues and simulated engines in a second.

with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
    runner.run(main())
"""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class Deadlock(Exception):
    """Every task waits, and no timer is set."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Nothing that takes real time may run on it: no network, no threads. Time begins at 0 s."""

    def __init__(self) -> None:
        self._selector_of_time = _Skipping()
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        return self._selector_of_time.now_s


class _Skipping(selectors.BaseSelector):
    """Waiting costs no time: the clock is set on instead."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock
        self.now_s += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()
