"""What is remembered of the chunks that requests had together."""

import pytest

from gateway.shared_chunks import SharedCompanions
from prompt_builder.companions import AWAITED_REQUESTS, NOTHING_KNOWN, Companions
from prompt_builder.order import Piece, likely_order

KEY, OTHER = b"tenant", b"other"


def seen(companions: Companions, *requests: str, key: bytes = KEY) -> Companions:
    """One letter a chunk."""
    for request in requests:
        companions.observe(key, [(label, 100) for label in request])
    return companions


def test_requests_are_counted_by_what_they_had_in_common_with_the_one_that_asks() -> None:
    past = seen(Companions(), "abc", "ab", "bz", "xyz").of(KEY)
    assert past.together("abc") == {0b111: 1, 0b011: 1, 0b010: 1}
    assert past.together("q") == {}
    assert NOTHING_KNOWN.together("abc") == {}


def test_a_chunk_that_a_request_names_twice_counts_once_and_a_request_without_chunks_not_at_all() -> None:
    companions = seen(Companions(), "aa", "")
    assert companions.of(KEY).together("a") == {1: 1}
    assert companions.entries == 1


def test_f5_tenants_count_apart() -> None:
    companions = seen(seen(Companions(), "ab"), "ab", "ab", key=OTHER)
    assert companions.of(KEY).together("ab") == {0b11: 1}
    assert companions.of(OTHER).together("ab") == {0b11: 2}


def test_the_oldest_requests_leave() -> None:
    companions = seen(Companions(most_requests=3), "ab", "ab", "ac", "c", "c")
    assert companions.of(KEY).together("abc") == {0b101: 1, 0b100: 2}
    assert companions.entries == 4


def test_of_a_popular_chunk_the_latest_requests_count() -> None:
    companions = seen(Companions(most_latest=4), "ab", *["a"] * 20)
    assert companions.of(KEY).together("ab") == {0b01: 4, 0b10: 1}
    assert companions.entries < 10


def test_memory_stops_growing() -> None:
    companions = Companions(most_requests=50)
    entries = []
    for number in range(500):
        companions.observe(KEY, [(f"k{number}", 1), (f"k{number + 1}", 1), ("popular", 1)])
        entries.append(companions.entries)
    assert max(entries) <= 50 * 3
    assert max(entries[250:]) <= max(entries[:250])


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_sizes_must_be_positive(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Companions(*sizes)


def test_a_request_that_waits_counts_for_many_until_it_waits_no_longer() -> None:
    companions = seen(Companions(), "ab")
    over = companions.awaited(KEY, "bc")
    assert companions.of(KEY).together("abc") == {0b011: 1, 0b110: AWAITED_REQUESTS}
    assert companions.of(OTHER).together("abc") == {}
    over()
    over()
    assert companions.of(KEY).together("abc") == {0b011: 1}


def test_chunks_that_a_waiting_request_needs_too_stand_first() -> None:
    companions = seen(Companions(), *["ab"] * 40)
    pieces = [Piece(label, tuple(range(100)), 100) for label in "abcd"]
    assert set(likely_order(pieces, (), companions.of(KEY))[:2]) == {0, 1}
    companions.awaited(KEY, "cd")
    assert set(likely_order(pieces, (), companions.of(KEY))[:2]) == {2, 3}


@pytest.mark.parametrize("kind", [Companions, SharedCompanions])
def test_what_others_wait_for_too_counts_once_for_each_of_them_and_only_while_they_wait(
    kind: type[Companions],
) -> None:
    companions = kind()
    mine = [("a", 100), ("b", 50), ("c", 30)]
    companions.awaited(b"key", [label for label, _ in mine])
    first = companions.awaited(b"key", ["a", "b"])
    companions.awaited(b"key", ["a", "d"])
    companions.awaited(b"other", ["c"])
    assert companions.tokens_awaited_twice(b"key", mine) == 2 * 100 + 50
    first()
    assert companions.tokens_awaited_twice(b"key", mine) == 100
    assert companions.tokens_awaited_twice(b"unknown", mine) == 0
