"""When to leave a broken service alone, and when to try it again."""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Closed while calls succeed. A failure opens it for a pause that doubles from failure to failure.

    When the pause is over one call at a time may try; the rest stay away until it has succeeded. All times are
    seconds on one forward clock, given by the caller.
    """

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    _degraded_since_s: float | None = None
    _past_degraded_s: float = 0.0
    _pause_s: float = 0.0
    _retry_at_s: float = 0.0
    _trying: bool = False
    _period: int = 0

    @property
    def degraded(self) -> bool:
        return self._degraded_since_s is not None

    def degraded_s(self, now_s: float) -> float:
        """Seconds spent degraded so far, the present spell included."""
        present_s = 0.0 if self._degraded_since_s is None else now_s - self._degraded_since_s
        return self._past_degraded_s + present_s

    def enter(self, now_s: float) -> int | None:
        """A pass for one call, or None: stay away. The pass goes back with `succeeded`, `failed` or `gave_up`."""
        if self.degraded:
            if self._trying or now_s < self._retry_at_s:
                return None
            self._trying = True
        return self._period

    def succeeded(self, call: int, now_s: float) -> bool:
        """A call went well; True when this ends a degraded spell."""
        if call != self._period or self._degraded_since_s is None:
            return False
        self._past_degraded_s += now_s - self._degraded_since_s
        self._degraded_since_s, self._trying, self._pause_s = None, False, 0.0
        return True

    def failed(self, call: int, now_s: float) -> bool:
        """A call failed; True when this begins a degraded spell."""
        if call != self._period:
            # It was under way when another call failed: no news.
            return False
        began = not self.degraded
        if began:
            self._degraded_since_s = now_s
        self._pause_s = min(self.longest_pause_s, self._pause_s * 2 or self.first_pause_s)
        self._retry_at_s = now_s + self._pause_s
        self._trying = False
        self._period += 1
        return began

    def gave_up(self, call: int) -> None:
        """The caller was cancelled before the call said anything; another may try."""
        if call == self._period:
            self._trying = False
