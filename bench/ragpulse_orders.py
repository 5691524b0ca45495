"""The orders of a prompt's passages that `bench.ragpulse` compares: five that others use, and ours."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.ragpulse_trace import Logged, Trace
from cache.resident_prefix import ResidentPrefix, resident_path
from prompt_builder.companions import Companions
from prompt_builder.order import Piece, reuse_order

KEY = b"one tenant"


class Order(Protocol):
    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        """The request's distinct passages in the order in which they are to stand behind the front."""


class Retrieved:
    """Most relevant first, as the service sent them."""

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        return request.distinct


class Sorted:
    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        return sorted(request.distinct)


class Frequency:
    """The most requested so far first."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        ordered = sorted(request.distinct, key=lambda part: (-self._counts[part], part))
        self._counts.update(request.distinct)
        return ordered


@dataclass(frozen=True, slots=True)
class Greedy:
    """At each step of the tree the passage with the most resident tokens; the rest as retrieved."""

    trace: Trace

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        ordered: list[int] = []
        left = list(request.distinct)
        while left and not front.broken:
            steps = [front.extended(self.trace.ids(part)) for part in left]
            best = max(range(len(left)), key=lambda place: steps[place].resident_tokens)
            if steps[best].resident_tokens == front.resident_tokens:
                break
            front = steps[best]
            ordered.append(left.pop(best))
        return [*ordered, *left]


@dataclass(frozen=True, slots=True)
class Deepest:
    """The path with the most resident tokens; the rest as retrieved."""

    trace: Trace

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        parts = request.distinct
        path = resident_path(front, [self.trace.ids(part) for part in parts])
        return [*(parts[at] for at in path), *(part for at, part in enumerate(parts) if at not in path)]


@dataclass(slots=True)
class Ours:
    """The gateway's own order, with what it cost: seconds of each request that had passages."""

    trace: Trace
    pin_last: int = 0
    companions: Companions = field(default_factory=Companions)
    took_s: list[float] = field(default_factory=list)
    _pieces: dict[int, Piece] = field(default_factory=dict)

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        parts = request.distinct
        if not parts:
            return parts
        pieces = [self._piece(part) for part in parts]
        began = time.perf_counter()
        places = reuse_order(pieces, front, self.companions.of(KEY), self.pin_last)
        self.companions.observe(KEY, [(piece.label, piece.tokens) for piece in pieces])
        self.took_s.append(time.perf_counter() - began)
        return [parts[place] for place in places]

    def _piece(self, part: int) -> Piece:
        """As stored at ingestion: label and ids are at hand."""
        piece = self._pieces.get(part)
        if piece is None:
            ids = self.trace.ids(part)
            piece = self._pieces[part] = Piece(f"k{part}", ids, len(ids))
        return piece


def baselines(trace: Trace) -> Mapping[str, Order]:
    return {
        "layout: the volatile part behind the passages, as retrieved": Retrieved(),
        "+ sorted by id": Sorted(),
        "+ by frequency so far": Frequency(),
        "+ greedy tree walk": Greedy(trace),
        "+ deepest path, rest as retrieved": Deepest(trace),
    }
