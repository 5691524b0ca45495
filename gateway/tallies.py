"""Counters and histograms for the path of every request: plain numbers, made into Prometheus metrics when scraped.

Prometheus' own take a lock and check their labels at each of the ten observations that a request makes.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Tally:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Tallies(Collector):
    """A counter for each combination of label values. Belongs to the event loop; may be scraped from any thread."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def of(self, *values: str) -> Tally:
        """Bounded by the values that the caller's labels can take."""
        found = self._tallies.get(values)
        if found is None:
            found = self._tallies[values] = Tally()
        return found

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, tally in tuple(self._tallies.items()):
            family.add_metric(values, tally.value)
        yield family


class Spread:
    """How often a quantity was at most each bound and above the one before; the last count is above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Spreads(Collector):
    """A histogram for each combination of label values, with threads as in `Tallies`."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._spreads: dict[tuple[str, ...], Spread] = {}
        registry.register(self)

    def of(self, *values: str) -> Spread:
        """Bounded by the values that the caller's labels can take."""
        found = self._spreads.get(values)
        if found is None:
            found = self._spreads[values] = Spread(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, spread in tuple(self._spreads.items()):
            counts = accumulate(tuple(spread.counts))
            family.add_metric(values, list(zip(bounds, counts, strict=True)), spread.total)
        yield family
