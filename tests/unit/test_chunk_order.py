"""Where chunks stand: what is resident first, then what others are likely to ask for, then what nobody shares."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cache.residency import Residency
from prompt_builder.companions import NOTHING_KNOWN, Companions
from prompt_builder.order import Piece, likely_order, reuse_order
from prompt_builder.outlook import NothingHeld

KEY = b"tenant"
FRONT = tuple(range(9000, 9032))


def piece(label: str, tokens: int) -> Piece:
    return Piece(label, tuple(ord(label) * 1000 + at for at in range(tokens)), tokens)


def pieces(labels: str, tokens: int = 20) -> list[Piece]:
    return [piece(label, tokens) for label in labels]


def labels(of: Sequence[Piece], order: Sequence[int]) -> str:
    return "".join(of[place].label for place in order)


def past(*requests: str) -> Companions:
    companions = Companions()
    for request in requests:
        companions.observe(KEY, [(label, 20) for label in request])
    return companions


def held(*sent: Sequence[Piece], block: int = 16) -> Residency:
    residency = Residency(block, 1000)
    for chunks in sent:
        lease = residency.begin([*FRONT, *(token for chunk in chunks for token in chunk.token_ids), 1])
        residency.generated(lease, [0])
        residency.end(lease)
    return residency


def test_where_nothing_is_known_the_most_relevant_stand_last() -> None:
    asked = pieces("abc")
    assert labels(asked, reuse_order(asked, None, NOTHING_KNOWN)) == "cba"
    assert labels(asked, reuse_order(asked, NothingHeld(), past("xyz").of(KEY))) == "cba"
    assert reuse_order([], None, NOTHING_KNOWN) == ()


def test_what_is_resident_comes_first_in_the_order_in_which_it_is_resident() -> None:
    asked = pieces("abcd")
    residency = held(pieces("cax"))
    order = reuse_order(asked, residency.prefix().extended(FRONT), NOTHING_KNOWN)
    assert labels(asked, order) == "cadb"


def test_tokens_decide_and_not_the_number_of_chunks() -> None:
    small, large = pieces("ab", 16), [piece("c", 80)]
    asked = [*small, *large]
    residency = held([*small, piece("x", 16)], [*large, piece("y", 16)])
    order = reuse_order(asked, residency.prefix().extended(FRONT), NOTHING_KNOWN)
    assert labels(asked, order)[0] == "c"


def test_a_chunk_is_followed_although_its_first_block_begins_in_the_chunk_before() -> None:
    asked = pieces("abc", 21)
    residency = held(pieces("bac", 21))
    order = reuse_order(asked, residency.prefix().extended(FRONT), NOTHING_KNOWN)
    assert labels(asked, order) == "bac"


def test_a_chunk_of_which_only_the_beginning_is_held_still_comes_behind_the_path() -> None:
    asked = pieces("abc", 40)
    half = replace(piece("b", 40), token_ids=piece("b", 40).token_ids[:32])
    residency = held([*pieces("a", 40), half])
    order = reuse_order(asked, residency.prefix().extended(FRONT), NOTHING_KNOWN)
    assert labels(asked, order) == "abc"


def test_a_beginning_that_all_chunks_share_does_not_decide_which_comes_next() -> None:
    asked = [Piece(label, (7, 7, *piece(label, 20).token_ids), 22) for label in "abcd"]
    # The first chunk ends two tokens before the end of a block.
    first = Piece("f", piece("f", 30).token_ids, 30)
    residency = held([first, asked[0]])
    ids = [*FRONT, *first.token_ids, *asked[3].token_ids]
    assert residency.prefix().extended(ids).resident_tokens == len(FRONT) + 32
    order = reuse_order([*asked[1:], first], residency.prefix().extended(FRONT), past("fd", "fd", "fd").of(KEY))
    assert labels([*asked[1:], first], order) == "fdbc"


def test_behind_the_path_come_chunks_that_others_asked_for_with_it() -> None:
    asked = pieces("abcd")
    residency = held(pieces("dx"))
    order = reuse_order(asked, residency.prefix().extended(FRONT), past("db", "db", "ac", "db").of(KEY))
    assert labels(asked, order)[:2] == "db"


def test_a_long_chunk_is_worth_more_places_than_a_short_one_that_is_as_popular() -> None:
    asked = [piece("a", 10), piece("b", 300)]
    assert labels(asked, likely_order(asked, (), past("a", "b").of(KEY))) == "ba"


def test_the_pinned_stand_last_although_they_are_resident() -> None:
    asked = pieces("abcd")
    residency = held(pieces("acdx"))
    prefix = residency.prefix().extended(FRONT)
    assert labels(asked, reuse_order(asked, prefix, NOTHING_KNOWN)) == "acdb"
    assert labels(asked, reuse_order(asked, prefix, NOTHING_KNOWN, 1))[-1] == "a"
    assert labels(asked, reuse_order(asked, prefix, NOTHING_KNOWN, 2))[-2:] == "ba"


def test_extracts_stand_behind_what_others_can_reuse() -> None:
    asked = [replace(piece("a", 20), reusable=False), *pieces("bc"), replace(piece("d", 5), reusable=False)]
    order = labels(asked, likely_order(asked, (), past("abcd", "bc").of(KEY)))
    assert order[2:] == "da"
    assert set(order[:2]) == {"b", "c"}


@pytest.mark.parametrize("count", [7, 20, 50])
def test_many_chunks_are_ordered_too_the_popular_first(count: int) -> None:
    asked = [Piece(f"k{place}", (), 50) for place in range(count)]
    popular = [asked[place] for place in (count - 1, count - 3)]
    companions = Companions()
    for _ in range(40):
        companions.observe(KEY, [(chunk.label, chunk.tokens) for chunk in popular])
    order = likely_order(asked, (), companions.of(KEY))
    assert sorted(order) == list(range(count))
    assert set(order[:2]) == {count - 1, count - 3}
