"""In which order chunks stand, so that this prompt reuses the most, and prompts to come reuse the most of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cache.resident_prefix import ResidentPrefix, resident_path
from prompt_builder.companions import Together
from prompt_builder.outlook import Prefix

POOL = 6
"""So many chunks are ordered exactly, over all their subsets; of more, so many at a time."""

# What is expected of chunks that no request has had yet: as if so many requests had come, each with the chunk of rank
# i in SURVIVAL[0] * STEP**i of them, one chunk independently of another. Chunks of a high rank are about what people
# ask; those of a low rank are by chance in the list. The figures are tried in ADR 19; between 10 and 100 requests and
# 0.4 and 0.8 they hardly matter.
PRIOR_REQUESTS = 30.0
PRIOR_FIRST = 0.6
PRIOR_STEP = 0.87


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk as it is rendered. One that is not `reusable` (an extract) is not expected in another prompt."""

    label: str
    token_ids: tuple[int, ...]
    tokens: int
    reusable: bool = True


def reuse_order(pieces: Sequence[Piece], prefix: Prefix | None, past: Together, pin_last: int = 0) -> tuple[int, ...]:
    """The places of all pieces, which are given most relevant first, in the order in which they are to stand.

    First those that continue the prefix with the most resident tokens, then the others as `likely_order` says; the
    `pin_last` most relevant come last whatever is resident, the best at the very end.
    """
    path = resident_places(pieces, prefix, pin_last)
    return (*path, *likely_order(pieces, path, past, pin_last))


def resident_places(pieces: Sequence[Piece], prefix: Prefix | None, pin_last: int = 0) -> tuple[int, ...]:
    """The places of the pieces that continue the prefix with the most resident tokens, in their order.

    All chunks begin with the same few tokens. Where no more than these of the last one are held, any other would
    reuse as much in its place, and it is left out.
    """
    if not isinstance(prefix, ResidentPrefix) or prefix.broken:
        return ()
    ids = [piece.token_ids for piece in pieces[pin_last:]]
    path = resident_path(prefix, ids)
    if path and len(path) < len(ids):
        for place in path[:-1]:
            prefix = prefix.extended(ids[place])
        last = ids[path[-1]]
        held = last[: max(0, prefix.extended(last).resident_tokens - prefix.tokens)]
        rest = (other for place, other in enumerate(ids) if place not in path)
        if len(held) < prefix.block_size and all(other[: len(held)] == held for other in rest):
            path = path[:-1]
    return tuple(place + pin_last for place in path)


def likely_order(pieces: Sequence[Piece], path: Sequence[int], past: Together, pin_last: int = 0) -> tuple[int, ...]:
    """The places of the pieces that are not in `path`, in the order in which they are to follow it.

    The order with the most tokens that requests to come are expected to share: a chunk's tokens count once for each
    past request that had it and all that stands before it, a request the more, the more of these chunks it had. Where
    no past request had any of them, the most relevant stand last, as for pieces that are not reusable. Equal sums go
    to the order that begins with the more relevant.
    """
    pinned = tuple(range(min(pin_last, len(pieces))))
    free = [place for place in range(len(pinned), len(pieces)) if place not in path]
    reusable = [place for place in free if pieces[place].reusable]
    single = [place for place in free if not pieces[place].reusable]
    if len(reusable) > 1:
        shared = past.together([piece.label for piece in pieces])
        reusable = _most_shared(pieces, path, reusable, shared) if shared else reusable[::-1]
    return (*reusable, *single[::-1], *pinned[::-1])


def by_relevance(count: int, path: Sequence[int], pin_last: int = 0) -> tuple[int, ...]:
    """What `likely_order` says where no other request can share what stands before the chunks: most relevant last."""
    pinned = range(min(pin_last, count))
    free = [place for place in range(len(pinned), count) if place not in path]
    return (*reversed(free), *reversed(pinned))


def _most_shared(
    pieces: Sequence[Piece], path: Sequence[int], places: Sequence[int], shared: Mapping[int, int]
) -> list[int]:
    before = _mask(path)
    prior = PRIOR_REQUESTS
    for place in path:
        prior *= _recurs(place)
    requests = [(mask, float(count * mask.bit_count())) for mask, count in shared.items()]
    ordered: list[int] = []
    left = list(places)
    while left:
        requests = [(mask, weight) for mask, weight in requests if mask & before == before]
        pool = left if len(left) <= POOL else _most_wanted(pieces, left, requests, prior)
        ordered += _ordered_pool(pieces, pool, requests, prior)
        left = [place for place in left if place not in pool]
        for place in pool:
            prior *= _recurs(place)
        before |= _mask(pool)
    return ordered


def _most_wanted(
    pieces: Sequence[Piece], places: Sequence[int], requests: Sequence[tuple[int, float]], prior: float
) -> list[int]:
    """The POOL places of which the most tokens are expected, in order of relevance."""

    def tokens(place: int) -> float:
        bit = 1 << place
        expected = prior * _recurs(place) + sum(weight for mask, weight in requests if mask & bit)
        return expected * pieces[place].tokens

    return sorted(sorted(places, key=lambda place: -tokens(place))[:POOL])


def _ordered_pool(
    pieces: Sequence[Piece], pool: Sequence[int], requests: Iterable[tuple[int, float]], prior: float
) -> list[int]:
    """By dynamic programming over the subsets of the pool: which stand first, and the best order behind them."""
    count = len(pool)
    full = (1 << count) - 1
    bits = [1 << place for place in pool]
    steps = range(count)
    expected = [0.0] * (full + 1)
    for mask, weight in requests:
        subset = 0
        for step in steps:
            if mask & bits[step]:
                subset |= 1 << step
        expected[subset] += weight
    for step in steps:
        # A request that had more than a subset had the subset.
        bit = 1 << step
        for subset in range(full + 1):
            if not subset & bit:
                expected[subset] += expected[subset | bit]
    by_chance = [prior] * (full + 1)
    for subset in range(1, full + 1):
        last = subset.bit_length() - 1
        by_chance[subset] = by_chance[subset ^ 1 << last] * _recurs(pool[last])
        expected[subset] += by_chance[subset]
    tokens = [pieces[place].tokens for place in pool]
    best, choice = [0.0] * (full + 1), [0] * (full + 1)
    for subset in range(full - 1, -1, -1):
        most = -1.0
        for step in steps:
            longer = subset | 1 << step
            if longer != subset:
                value = expected[longer] * tokens[step] + best[longer]
                if value > most:
                    most, choice[subset] = value, step
        best[subset] = most
    ordered, subset = [], 0
    while subset != full:
        ordered.append(pool[choice[subset]])
        subset |= 1 << choice[subset]
    return ordered


def _mask(places: Iterable[int]) -> int:
    return sum(1 << place for place in places)


def _recurs(rank: int) -> float:
    """How likely a request that is about the same has the chunk of this rank too, when nothing else is known."""
    return PRIOR_FIRST * float(PRIOR_STEP**rank)
