"""How the arms of `bench.routing` choose a replica: what routers in use do, and ours."""

import asyncio
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

from bench.routed_places import Place, tree_of
from bench.routed_prompts import Retrieved, Writing
from bench.routed_traffic import Asked
from cache.prompt_tree import PromptTree
from gateway.replicas import STALE_SHARE
from gateway.routing import forecast_of, foreseen, least_ttft
from gateway.runs import Work
from prompt_builder.shortlist import MOST_MEANS

# What the gateway needs from the plan to the release, in which others may take the place.
PLANNING_S = 0.003

_RING_POINTS = 100


class Rule(Protocol):
    """Chooses among the replicas that are well, never none; the work comes back with what is foreseen of it.

    `sent` is the work of a request that has failed elsewhere, to be done as it is.
    """

    async def choose(self, asked: Asked, places: Sequence[Place], sent: Work | None) -> tuple[Place, Work]: ...


class Router:
    """What a rule is that looks at each replica once and writes the prompt for the one it takes."""

    def __init__(self, writing: Writing | None = None) -> None:
        self.writing = Retrieved() if writing is None else writing
        self._count = 0

    async def choose(self, asked: Asked, places: Sequence[Place], sent: Work | None) -> tuple[Place, Work]:
        tree = self.writing.tree(asked)
        place = self.place(asked, places, tree)
        if sent is not None:
            return place, replace(sent, forecast=None)
        work = self.writing.written(asked, place, tree)
        self.writing.sent(asked)
        return place, work

    def place(self, asked: Asked, places: Sequence[Place], tree: PromptTree) -> Place:
        """Round robin."""
        self._count += 1
        return places[self._count % len(places)]

    def least_outstanding(self, places: Sequence[Place]) -> Place:
        """Ties in turn."""
        self._count += 1
        first = self._count % len(places)
        return min([*places[first:], *places[:first]], key=lambda place: place.outstanding)


class RoundRobin(Router): ...


class LeastOutstanding(Router):
    def place(self, asked: Asked, places: Sequence[Place], tree: PromptTree) -> Place:
        return self.least_outstanding(places)


class ConsistentHash(Router):
    """Of the session, on a ring. `bound`: a replica takes at most so many times the mean of outstanding requests."""

    def __init__(self, bound: float | None = None) -> None:
        super().__init__()
        self._bound = bound
        self._rings: dict[tuple[int, ...], list[tuple[bytes, Place]]] = {}

    def place(self, asked: Asked, places: Sequence[Place], tree: PromptTree) -> Place:
        ring = self._ring(places)
        start = bisect(ring, _digest(asked.session), key=lambda point: point[0])
        if self._bound is None:
            return ring[start % len(ring)][1]
        most = self._bound * (sum(place.outstanding for place in places) + 1) / len(places)
        following = (ring[(start + step) % len(ring)][1] for step in range(len(ring)))
        return next(place for place in following if place.outstanding < most)

    def _ring(self, places: Sequence[Place]) -> list[tuple[bytes, Place]]:
        key = tuple(place.number for place in places)
        ring = self._rings.get(key)
        if ring is None:
            points = [(_digest(f"{place.name}/{n}"), place) for place in places for n in range(_RING_POINTS)]
            ring = self._rings[key] = sorted(points, key=lambda point: point[0])
        return ring


class LongestPrefix(Router):
    """The replica that holds the most of the prompt, however busy; ties to the least outstanding."""

    def place(self, asked: Asked, places: Sequence[Place], tree: PromptTree) -> Place:
        held = [self.writing.held(asked, place, tree) for place in places]
        most = max(held)
        return self.least_outstanding([p for p, tokens in zip(places, held, strict=True) if tokens == most])


class Score(Router):
    """Share of the prompt that is held, counted twice, and how short the queue is among the replicas' queues."""

    def place(self, asked: Asked, places: Sequence[Place], tree: PromptTree) -> Place:
        queues = [place.waiting for place in places]
        shortest, longest = min(queues), max(queues)
        scores = []
        for place, queue in zip(places, queues, strict=True):
            held = self.writing.held(asked, place, tree) / len(asked.ids)
            free = 1.0 if longest == shortest else (longest - queue) / (longest - shortest)
            scores.append(2.0 * held + free)
        best = max(scores)
        return self.least_outstanding([p for p, score in zip(places, scores, strict=True) if score == best])


class FewestUncached(Router):
    """The fewest uncached tokens before its first token: those in flight there and its own."""

    def place(self, asked: Asked, places: Sequence[Place], tree: PromptTree) -> Place:
        tokens = [place.pacer.in_flight_tokens - self.writing.held(asked, place, tree) for place in places]
        fewest = min(tokens)
        return self.least_outstanding([p for p, own in zip(places, tokens, strict=True) if own == fewest])


@dataclass(slots=True)
class Ours:
    """The gateway's: the least predicted TTFT when the prompt is planned, looked at again when it is sent.

    As the planner does it, a few replicas are planned for exactly: those with the least prediction at first sight.
    """

    writing: Writing = field(default_factory=Retrieved)
    _last_used: str = ""

    async def choose(self, asked: Asked, places: Sequence[Place], sent: Work | None) -> tuple[Place, Work]:
        if sent is not None:
            place, work = self._placed(sent, places)
        else:
            place, work = self._planned(asked, places)
            self.writing.sent(asked)
            await asyncio.sleep(PLANNING_S)
            assert work.forecast is not None
            later_s = place.pacer.wait_s(work.forecast.prefill_s) - work.forecast.queue_s
            if not place.health.takes_requests or later_s > STALE_SHARE * work.forecast.ttft_s:
                place, work = self._placed(work, [p for p in places if p.health.takes_requests] or places)
        self._last_used = place.name
        return place, work

    def _planned(self, asked: Asked, places: Sequence[Place]) -> tuple[Place, Work]:
        tree, count = self.writing.tree(asked), len(asked.ids)
        seen = []
        for place in self._ordered(places):
            held = self.writing.held(asked, place, tree)
            forecast = forecast_of(place.outlook(tree), count - held, held, gateway_s=0.0, budget_s=None)
            assert forecast is not None
            seen.append((forecast.ttft_s, place))
        ranked = sorted(range(len(seen)), key=lambda at: seen[at][0])
        choices = []
        for at in sorted(ranked[:MOST_MEANS]):
            place = seen[at][1]
            work = self.writing.written(asked, place, tree)
            choices.append((place, replace(work, forecast=foreseen(work, place.outlook(tree_of(work))))))
        best = least_ttft([work.forecast for _, work in choices])
        return next(choice for choice in choices if choice[1].forecast is best)

    def _placed(self, work: Work, places: Sequence[Place]) -> tuple[Place, Work]:
        """A prompt that is written already."""
        ordered, tree = self._ordered(places), tree_of(work)
        best = least_ttft([foreseen(work, place.outlook(tree)) for place in ordered])
        assert best is not None
        return next(place for place in ordered if place.name == best.replica), replace(work, forecast=best)

    def _ordered(self, places: Sequence[Place]) -> list[Place]:
        return sorted(places, key=lambda place: place.name != self._last_used)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
