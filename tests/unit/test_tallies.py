"""Counters and histograms of our own, as Prometheus' own would show them."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gateway.tallies import Spreads, Tallies

BOUNDS = (0.5, 1.0, 2.5)


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("labels", [(), ("kind", "outcome")])
def test_a_page_of_them_is_that_of_prometheus_own(labels: tuple[str, ...]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = Tallies("requests_total", "How many", labels, ours)
    spreads = Spreads("seconds", "How long", labels, BOUNDS, ours)
    counter = Counter("requests_total", "How many", labels, registry=theirs)
    histogram = Histogram("seconds", "How long", labels, buckets=BOUNDS, registry=theirs)
    for values in [("a", "x"), ("b", "y"), ("a", "x")] if labels else [(), ()]:
        tallies.of(*values).inc()
        tallies.of(*values).inc(2.5)
        (counter.labels(*values) if values else counter).inc(3.5)
        for seconds in (0.0, 0.5, 0.500001, 1.0, 2.5, 2.6, 100.0):
            spreads.of(*values).observe(seconds)
            (histogram.labels(*values) if values else histogram).observe(seconds)
    assert page(ours) == page(theirs)
