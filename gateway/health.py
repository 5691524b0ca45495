"""Whether a replica is given requests: by how its requests end, and by probes."""

import time
from collections.abc import Callable
from typing import Literal

HealthState = Literal["ok", "down", "half_open"]

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
MOST_FAULTS = 3
"""So many answers with a server error one after the other, and the engine is taken to be broken: one that fails at
once has the shortest queue of all."""


class Health:
    """Closed while requests succeed; the first failure opens it.

    A probe that is answered after the pause lets one request try (`half_open`); its success closes the circuit, its
    failure opens it again for twice as long. An engine that has never failed a request is well as soon as it is met.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trial = self._trials = 0
        self._failed_request = False
        self._faults = 0
        self._pause_s = FIRST_PAUSE_S
        self._since_s = clock()
        self.state: HealthState = "down"
        self.error: str | None = "not asked yet"

    @property
    def takes_requests(self) -> bool:
        return self.state == "ok" or (self.state == "half_open" and not self._trial)

    @property
    def since_s(self) -> float:
        """Seconds in the present state."""
        return self._clock() - self._since_s

    @property
    def pause_s(self) -> float:
        """Until the next probe of a replica that is down."""
        return self._pause_s

    def began(self) -> int:
        """A request leaves for it, or waits for that. The number of the trial that it is, 0 for none."""
        if self.state != "half_open" or self._trial:
            return 0
        self._trials += 1
        self._trial = self._trials
        return self._trial

    def left(self, trial: int) -> None:
        """The request with this number ended, perhaps without telling anything: its client left."""
        if trial == self._trial:
            self._trial = 0

    def succeeded(self) -> None:
        """A request got its first byte."""
        self._trial, self._failed_request = 0, False
        self._faults = 0
        self._pause_s = FIRST_PAUSE_S
        self._become("ok", None)

    def failed(self, error: str) -> None:
        """A request found no engine, or the engine broke off."""
        if self._failed_request and self.state != "down":
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._trial, self._failed_request = 0, True
        self._become("down", error)

    def faulted(self, error: str) -> None:
        """The engine answered a request with a server error."""
        self._faults += 1
        if self._faults >= MOST_FAULTS or self.state == "half_open":
            self.failed(error)

    def probed(self, error: str | None) -> None:
        """The engine answered a probe (None), or did not."""
        if error is not None:
            self._become("down", error)
        elif self.state == "down":
            if not self._failed_request:
                self._become("ok", None)
            elif self.since_s >= self._pause_s:
                self._become("half_open", self.error)

    def _become(self, state: HealthState, error: str | None) -> None:
        if state != self.state:
            self._since_s = self._clock()
        self.state, self.error = state, error
