"""The order of chunks against all the orders that there are."""

from collections.abc import Sequence
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.residency import Residency
from prompt_builder.companions import Companions
from prompt_builder.order import PRIOR_FIRST, PRIOR_REQUESTS, PRIOR_STEP, Piece, likely_order, reuse_order

KEY = b"tenant"
BLOCK = 4
LABELS = "abcdefgh"
RELAXED = settings(deadline=None)

# Lengths about a block's: chunks then begin in the block in which the one before ends.
PIECES = st.lists(st.integers(0, 9), min_size=0, max_size=8).map(
    lambda sizes: [
        Piece(LABELS[place], tuple(100 * place + at for at in range(size)), size) for place, size in enumerate(sizes)
    ]
)
REQUESTS = st.lists(st.lists(st.sampled_from(LABELS), min_size=1, max_size=8, unique=True), max_size=12)
FRONTS = st.integers(0, 9).map(lambda size: tuple(range(5000, 5000 + size)))


def companions(requests: Sequence[Sequence[str]]) -> Companions:
    made = Companions()
    for request in requests:
        made.observe(KEY, [(label, 1) for label in request])
    return made


def holding(pieces: Sequence[Piece], front: tuple[int, ...], sent: Sequence[Sequence[int]]) -> Residency:
    """A replica that has computed prompts of these places behind the front."""
    residency = Residency(BLOCK, 1000)
    for places in sent:
        ids = [*front, *(token for place in places for token in pieces[place].token_ids), 9999]
        lease = residency.begin(ids)
        residency.generated(lease, [1])
        residency.end(lease)
    return residency


def hit(residency: Residency, pieces: Sequence[Piece], front: tuple[int, ...], order: Sequence[int]) -> int:
    prefix = residency.prefix().extended(front)
    for place in order:
        prefix = prefix.extended(pieces[place].token_ids)
    return prefix.resident_tokens


@RELAXED
@given(PIECES, FRONTS, REQUESTS, st.integers(0, 3), st.data())
def test_every_piece_stands_once_and_the_pinned_stand_last(
    pieces: list[Piece], front: tuple[int, ...], requests: list[list[str]], pin_last: int, data: st.DataObject
) -> None:
    orders = st.permutations(range(len(pieces)))
    residency = holding(pieces, front, data.draw(st.lists(orders, max_size=3)))
    prefix = residency.prefix().extended(front)
    past = companions(requests).of(KEY)
    order = reuse_order(pieces, prefix, past, pin_last)
    assert sorted(order) == list(range(len(pieces)))
    pinned = min(pin_last, len(pieces))
    assert order[len(pieces) - pinned :] == tuple(reversed(range(pinned)))
    assert order == reuse_order(pieces, residency.prefix().extended(front), past, pin_last)


@RELAXED
@given(PIECES.filter(lambda pieces: len(pieces) <= 5), FRONTS, REQUESTS, st.data())
def test_no_other_order_hits_more_tokens(
    pieces: list[Piece], front: tuple[int, ...], requests: list[list[str]], data: st.DataObject
) -> None:
    orders = st.permutations(range(len(pieces)))
    residency = holding(pieces, front, data.draw(st.lists(orders, max_size=3)))
    order = reuse_order(pieces, residency.prefix().extended(front), companions(requests).of(KEY))
    best = max(hit(residency, pieces, front, other) for other in permutations(range(len(pieces))))
    assert hit(residency, pieces, front, order) == best


def expected_tokens(pieces: Sequence[Piece], order: Sequence[int], requests: Sequence[Sequence[str]]) -> float:
    """What `likely_order` says that it maximises, counted request by request."""
    total = 0.0
    labels = {piece.label for piece in pieces}
    for count in range(1, len(order) + 1):
        before = {pieces[place].label for place in order[:count]}
        expected = PRIOR_REQUESTS
        for place in order[:count]:
            expected *= PRIOR_FIRST * PRIOR_STEP**place
        expected += sum(len(labels & set(request)) for request in requests if before <= set(request))
        total += expected * pieces[order[count - 1]].tokens
    return total


@RELAXED
@given(PIECES.filter(lambda pieces: 1 < len(pieces) <= 6), REQUESTS, st.data())
def test_no_other_order_is_expected_to_share_more_tokens(
    pieces: list[Piece], requests: list[list[str]], data: st.DataObject
) -> None:
    labels = {piece.label for piece in pieces}
    if not any(labels & set(request) for request in requests):
        return
    path = tuple(data.draw(st.permutations(range(len(pieces))))[: data.draw(st.integers(0, len(pieces)))])
    order = (*path, *likely_order(pieces, path, companions(requests).of(KEY)))
    rest = [place for place in range(len(pieces)) if place not in path]
    best = max(expected_tokens(pieces, (*path, *others), requests) for others in permutations(rest))
    assert expected_tokens(pieces, order, requests) >= best * (1 - 1e-9)
