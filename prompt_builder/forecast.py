"""What one prompt is predicted to take on one replica, and what room a budget leaves on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from latency.model import UNBOUNDED_TOKENS
from latency.speed import Forecast, SpeedEstimate
from prompt_builder.material import Front, Ids, Material
from prompt_builder.outlook import Clock, Outlook, Prefix


@dataclass(slots=True)
class Means:
    """One replica under one clock, for one plan. It follows each front of the material through its blocks once."""

    outlook: Outlook
    speed: SpeedEstimate
    clock: Clock
    material: Material
    _fronts: dict[int, tuple[Front, Prefix]] = field(default_factory=dict)

    def prefix(self, front: Front) -> Prefix:
        """`front` must have ids."""
        kept = self._fronts.get(id(front))
        if kept is None:
            prefix = self.outlook.prefix.extended(self.material.joined(front))
            kept = self._fronts[id(front)] = (front, prefix)
        return kept[1]

    def foresee(self, front: Front, tail: Ids) -> Forecast:
        """Exact in its tokens: those that the builder will send."""
        prompt = self.prefix(front).extended(tail).extended(front.closing or ())
        cached = prompt.cached_tokens()
        return self.forecast(prompt.tokens - cached, cached)

    def forecast(self, uncached: int, cached: int) -> Forecast:
        prefill_s = self.speed.predict_s(uncached, cached, decoding=self.outlook.decoding)
        return Forecast(
            replica=self.outlook.name,
            cached_tokens=cached,
            uncached_tokens=uncached,
            gateway_s=self.clock.spent_s,
            queue_s=self.outlook.queue_s(prefill_s),
            prefill_s=prefill_s,
            safe_prefill_s=self.speed.safe_s(uncached, cached, decoding=self.outlook.decoding),
            quantile=self.speed.quantile,
            budget_s=self.clock.budget_s,
        )

    def most_uncached(self, cached: int) -> int:
        """The most uncached tokens behind `cached` ones that keep the budget; -1 when not even none do.

        The wait depends on the prefill's own length where short ones go first; it is taken to grow with it.
        """
        if self.clock.budget_s is None:
            return UNBOUNDED_TOKENS
        left_s = self.clock.budget_s - self.clock.spent_s
        most = self.speed.most_uncached(left_s, cached, decoding=self.outlook.decoding)
        if most < 0 or self._keeps(most, cached):
            return most
        low, high = -1, most
        while high - low > 1:
            middle = (low + high) // 2
            if self._keeps(middle, cached):
                low = middle
            else:
                high = middle
        return low

    def _keeps(self, uncached: int, cached: int) -> bool:
        return self.forecast(uncached, cached).fits


def means_of(outlooks: Sequence[Outlook], clock: Clock, material: Material) -> list[Means]:
    """The replicas whose speed is known."""
    return [Means(outlook, outlook.speed, clock, material) for outlook in outlooks if outlook.speed is not None]
