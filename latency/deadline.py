"""The moment until which a request's first word is wanted."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Monotonic = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Counted from the request's arrival on a monotonic clock, so that a step of the wall clock moves nothing.

    `budget_s` None: there is no deadline, only the time spent.
    """

    arrived_s: float
    budget_s: float | None
    clock: Monotonic = time.monotonic

    @classmethod
    def starting_now(cls, budget_s: float | None, clock: Monotonic = time.monotonic) -> "Deadline":
        """Raises ValueError for a budget that is not positive and finite."""
        if budget_s is not None and not 0 < budget_s < math.inf:
            raise ValueError(f"a budget must be positive and finite, not {budget_s} s")
        return cls(clock(), budget_s, clock)

    def spent_s(self) -> float:
        return self.clock() - self.arrived_s

    def left_s(self) -> float:
        """Seconds until the deadline, negative once it has passed; infinity where there is none."""
        return math.inf if self.budget_s is None else self.budget_s - self.spent_s()
