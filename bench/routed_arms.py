"""How the arms of `bench.routing` choose a replica: what routers in use do, and ours."""

import asyncio
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

from bench.routed_places import Place, work_of
from bench.routed_traffic import Asked
from gateway.replicas import STALE_SHARE
from gateway.routing import foreseen, least_ttft
from gateway.runs import Work

# What the gateway needs from the plan to the release, in which others may take the place.
PLANNING_S = 0.003

_RING_POINTS = 100


class Rule(Protocol):
    """Chooses among the replicas that are well, never none; the work comes back with what is foreseen of it."""

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]: ...


class RoundRobin:
    def __init__(self) -> None:
        self._count = 0

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        self._count += 1
        return places[self._count % len(places)], work_of(asked)


class LeastOutstanding:
    """Ties in turn."""

    def __init__(self) -> None:
        self._count = 0

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        return self.least(places), work_of(asked)

    def least(self, places: Sequence[Place]) -> Place:
        self._count += 1
        first = self._count % len(places)
        return min([*places[first:], *places[:first]], key=lambda place: place.outstanding)


@dataclass(slots=True)
class ConsistentHash:
    """Of the session, on a ring. `bound`: a replica takes at most so many times the mean of outstanding requests."""

    bound: float | None = None
    _rings: dict[tuple[int, ...], list[tuple[bytes, Place]]] = field(default_factory=dict)

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        ring = self._ring(places)
        start = bisect(ring, _digest(asked.session), key=lambda point: point[0])
        most = None if self.bound is None else self.bound * (sum(p.outstanding for p in places) + 1) / len(places)
        for step in range(len(ring)):
            place = ring[(start + step) % len(ring)][1]
            if most is None or place.outstanding < most:
                break
        return place, work_of(asked)

    def _ring(self, places: Sequence[Place]) -> list[tuple[bytes, Place]]:
        key = tuple(place.number for place in places)
        ring = self._rings.get(key)
        if ring is None:
            points = [(_digest(f"{place.name}/{n}"), place) for place in places for n in range(_RING_POINTS)]
            ring = self._rings[key] = sorted(points, key=lambda point: point[0])
        return ring


@dataclass(slots=True)
class LongestPrefix:
    """The replica that holds the most of the prompt, however busy; ties to the least outstanding."""

    _least: LeastOutstanding = field(default_factory=LeastOutstanding)

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        tree = asked.tree()
        held = [place.outlook(tree).prefix.extended(asked.ids).cached_tokens() for place in places]
        most = max(held)
        return self._least.least([p for p, tokens in zip(places, held, strict=True) if tokens == most]), work_of(
            asked
        )


@dataclass(slots=True)
class Score:
    """Share of the prompt that is held, weighted, and how short the queue is among the replicas' queues."""

    prefix_weight: float = 2.0
    queue_weight: float = 1.0
    _least: LeastOutstanding = field(default_factory=LeastOutstanding)

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        tree = asked.tree()
        queues = [place.waiting for place in places]
        shortest, longest = min(queues), max(queues)
        scores = []
        for place, queue in zip(places, queues, strict=True):
            held = place.outlook(tree).prefix.extended(asked.ids).cached_tokens() / len(asked.ids)
            free = 1.0 if longest == shortest else (longest - queue) / (longest - shortest)
            scores.append(self.prefix_weight * held + self.queue_weight * free)
        best = max(scores)
        return self._least.least([p for p, score in zip(places, scores, strict=True) if score == best]), work_of(
            asked
        )


@dataclass(slots=True)
class FewestUncached:
    """The fewest uncached tokens before its first token: those in flight there and its own."""

    _least: LeastOutstanding = field(default_factory=LeastOutstanding)

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        tree, count = asked.tree(), len(asked.ids)
        tokens = [
            place.pacer.in_flight_tokens + count - place.outlook(tree).prefix.extended(asked.ids).cached_tokens()
            for place in places
        ]
        fewest = min(tokens)
        return self._least.least([p for p, own in zip(places, tokens, strict=True) if own == fewest]), work_of(asked)


@dataclass(slots=True)
class Ours:
    """The gateway's: the least predicted TTFT when the prompt is planned, looked at again when it is sent."""

    _last_used: str = ""

    async def choose(self, asked: Asked, places: Sequence[Place], *, again: bool) -> tuple[Place, Work]:
        place, work = self._best(asked, places)
        if not again:
            await asyncio.sleep(PLANNING_S)
            assert work.forecast is not None
            later_s = place.pacer.wait_s(work.forecast.prefill_s) - work.forecast.queue_s
            if not place.health.takes_requests or later_s > STALE_SHARE * work.forecast.ttft_s:
                place, work = self._best(asked, [p for p in places if p.health.takes_requests] or places)
        self._last_used = place.name
        return place, work

    def _best(self, asked: Asked, places: Sequence[Place]) -> tuple[Place, Work]:
        work, tree = work_of(asked), asked.tree()
        ordered = sorted(places, key=lambda place: place.name != self._last_used)
        best = least_ttft([foreseen(work, place.outlook(tree)) for place in ordered])
        assert best is not None
        return next(place for place in ordered if place.name == best.replica), replace(work, forecast=best)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
