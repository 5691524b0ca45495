"""What other gateways have waiting for a replica, and whose turn it is between them and this one."""

from dataclasses import dataclass

# A request that has waited longer at another gateway goes first, if it goes within so long.
YIELD_S = 0.03


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What waits for a replica at other gateways: predicted prefill seconds, and since when the oldest waits.

    `oldest_s` is a time of the pacer's clock, None while nothing waits.
    """

    seconds: float = 0.0
    oldest_s: float | None = None


@dataclass(slots=True)
class Turns:
    """Two gateways that release at the same moment release twice as much as the engine should have: one yields."""

    elsewhere: Elsewhere = Elsewhere()
    _yielding_s: float | None = None

    def yields(self, own_oldest_s: float, now_s: float) -> bool:
        """Whether another gateway's turn is before that of the oldest here; for YIELD_S at most."""
        oldest_s = self.elsewhere.oldest_s
        if oldest_s is None or oldest_s >= own_oldest_s:
            self._yielding_s = None
            return False
        if self._yielding_s is None:
            self._yielding_s = now_s
        if now_s - self._yielding_s < YIELD_S:
            return True
        self._yielding_s = None
        return False

    def other_went(self) -> None:
        """Another gateway took its turn."""
        self._yielding_s = None
