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
TREE = "+ deepest path in a tree of what was sent, rest as retrieved"
DEEPEST = "+ deepest resident path, rest as retrieved"


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


@dataclass(slots=True)
class Deepest:
    """The path with the most resident tokens; the rest as retrieved."""

    trace: Trace
    took_s: list[float] = field(default_factory=list)

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        parts = request.distinct
        if not parts:
            return parts
        pieces = [self.trace.ids(part) for part in parts]
        began = time.thread_time()
        path = resident_path(front, pieces)
        self.took_s.append(time.thread_time() - began)
        return [*(parts[at] for at in path), *(part for at, part in enumerate(parts) if at not in path)]


Tree = dict[int, "Tree"]


@dataclass(slots=True)
class SentTree:
    """The same with a tree of what was sent, beside the picture of the cache: the path with the most tokens in it.

    Nothing leaves the tree. `nodes` counts what it holds.
    """

    trace: Trace
    took_s: list[float] = field(default_factory=list)
    nodes: int = 0
    _roots: dict[tuple[int, ...], Tree] = field(default_factory=dict)

    def order(self, request: Logged, front: ResidentPrefix) -> Sequence[int]:
        parts = request.distinct
        if not parts:
            return parts
        began = time.thread_time()
        root = self._roots.setdefault(request.front, {})
        path = self._deepest(root, parts)[1]
        ordered = [*path, *(part for part in parts if part not in path)]
        node = root
        for part in ordered:
            if part not in node:
                node[part] = {}
                self.nodes += 1
            node = node[part]
        self.took_s.append(time.thread_time() - began)
        return ordered

    def _deepest(self, node: Tree, parts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        best: tuple[int, tuple[int, ...]] = (0, ())
        for part in parts:
            if part in node:
                tokens, path = self._deepest(node[part], [other for other in parts if other != part])
                best = max(best, (tokens + len(self.trace.ids(part)), (part, *path)), key=lambda found: found[0])
        return best


@dataclass(slots=True)
class Ours:
    """The gateway's own order.

    `took_s`, as in the two before: seconds of the processor for each request that had passages. What others take of
    the same cores meanwhile does not count.
    """

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
        began = time.thread_time()
        places = reuse_order(pieces, front, self.companions.of(KEY), self.pin_last)
        self.companions.observe(KEY, [(piece.label, piece.tokens) for piece in pieces])
        self.took_s.append(time.thread_time() - began)
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
        TREE: SentTree(trace),
        DEEPEST: Deepest(trace),
    }
