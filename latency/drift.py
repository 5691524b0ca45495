"""A sequential test for an engine that has become slower or faster."""

from dataclasses import dataclass

ALLOWANCE = 0.5
ALARM = 6.0
SCALE_SPREADS = 2.0
LEAST_SCALE = 0.12


@dataclass(slots=True)
class DriftTest:
    """Two-sided CUSUM (Page 1954) of log(actual / predicted), each error clipped to ±1 scale of two spreads.

    A single stall counts as any large error does, so 12 such errors in a row are the least that raise the alarm;
    errors within half a scale (6 % at a spread of 5 %) never add up. `onset` is the number of the first request of
    the run that raised it.
    """

    slower: float = 0.0
    faster: float = 0.0
    slower_since: int = 0
    faster_since: int = 0

    def add(self, log_ratio: float, spread: float, number: int) -> int | None:
        """Takes in one error; the onset when it raises the alarm, else None."""
        score = max(-1.0, min(1.0, log_ratio / max(SCALE_SPREADS * spread, LEAST_SCALE)))
        if self.slower == 0.0:
            self.slower_since = number
        if self.faster == 0.0:
            self.faster_since = number
        self.slower = max(0.0, self.slower + score - ALLOWANCE)
        self.faster = max(0.0, self.faster - score - ALLOWANCE)
        if self.slower >= ALARM:
            return self.slower_since
        if self.faster >= ALARM:
            return self.faster_since
        return None
