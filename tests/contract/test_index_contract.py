"""What every vector index promises, run on brute force, FAISS flat and FAISS HNSW."""

import threading

import numpy as np
import pytest

from retrieval.dense import BruteForce, FlatIndex, HnswIndex

KINDS = [BruteForce, FlatIndex, HnswIndex]
Kind = type[BruteForce] | type[FlatIndex] | type[HnswIndex]
NONE = np.zeros(0, dtype=np.int64)


def unit(rows: int, seed: int, dimension: int = 16) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    scaled: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def ids(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int64)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_index_finds_nothing(kind: Kind) -> None:
    index = kind.empty(16)
    assert len(index) == 0
    assert len(index.search(unit(1, 1)[0], 5).row_ids) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_row_comes_first_and_scores_are_inner_products(kind: Kind) -> None:
    vectors = unit(300, 2)
    index = kind.empty(16).changed(ids(10, 300), vectors, NONE)
    found = index.search(vectors[42], 5)
    assert found.row_ids[0] == 52
    assert found.scores[0] == pytest.approx(1.0, abs=1e-5)
    assert list(found.scores) == sorted(found.scores, reverse=True)
    assert found.scores == pytest.approx(vectors[found.row_ids - 10] @ vectors[42], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_brute_force_after_additions_removals_and_merges(kind: Kind) -> None:
    vectors = unit(2_400, 3)
    index, yardstick = kind.empty(16), BruteForce.empty(16)
    for start, removed in ((0, NONE), (800, ids(100, 50)), (1_600, ids(900, 300)), (2_000, NONE)):
        end = {0: 800, 800: 1_600, 1_600: 2_000, 2_000: 2_400}[start]
        index = index.changed(ids(start + 1, end - start), vectors[start:end], removed)
        yardstick = yardstick.changed(ids(start + 1, end - start), vectors[start:end], removed)
    assert len(index) == len(yardstick) == 2_400 - 350
    agreed = []
    for query in unit(40, 4):
        found, wanted = index.search(query, 10), yardstick.search(query, 10)
        agreed.append(len(set(found.row_ids.tolist()) & set(wanted.row_ids.tolist())) / 10)
        assert not set(found.row_ids.tolist()) & {*range(100, 150), *range(900, 1_200)}
    assert np.mean(agreed) >= (0.95 if kind is HnswIndex else 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1, 3, 50])
def test_a_filter_gives_only_allowed_rows_and_as_many_as_there_are(kind: Kind, share: int) -> None:
    index = kind.empty(16).changed(ids(1, 1_000), unit(1_000, 5), NONE)
    allowed = ids(1, 1_000)[::share]
    found = index.search(unit(1, 6)[0], 30, allowed)
    assert set(found.row_ids.tolist()) <= set(allowed.tolist())
    assert len(found.row_ids) == min(30, len(allowed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_that_allows_nothing_finds_nothing(kind: Kind) -> None:
    index = kind.empty(16).changed(ids(1, 100), unit(100, 5), NONE)
    assert len(index.search(unit(1, 6)[0], 5, NONE).row_ids) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_come_in_order_of_their_row_id(kind: Kind) -> None:
    vectors = np.repeat(unit(1, 7), 6, axis=0)
    index = kind.empty(16).changed(ids(5, 6), vectors, NONE)
    assert index.search(vectors[0], 6).row_ids.tolist() == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_come_back_by_row_and_unknown_rows_are_said(kind: Kind) -> None:
    vectors = unit(1_200, 8)
    index = kind.empty(16).changed(ids(1, 1_200), vectors, NONE).changed(NONE, vectors[:0], ids(7, 1))
    held, found = index.vectors_of(np.array([3, 7, 1_200, 9_999]))
    assert held.tolist() == [True, False, True, False]
    assert found[0] == pytest.approx(vectors[2])
    assert found[2] == pytest.approx(vectors[1_199])


@pytest.mark.parametrize("kind", KINDS)
def test_state_restores_the_same_answers(kind: Kind) -> None:
    vectors = unit(1_300, 9)
    index = kind.empty(16).changed(ids(1, 1_000), vectors[:1_000], NONE)
    index = index.changed(ids(1_001, 300), vectors[1_000:], ids(4, 2))
    again = kind.from_state(index.state())
    for query in unit(10, 10):
        assert again.search(query, 10).row_ids.tolist() == index.search(query, 10).row_ids.tolist()
    assert len(again) == len(index) == 1_298


@pytest.mark.parametrize("kind", KINDS)
def test_f2_an_older_index_answers_as_before_while_newer_ones_are_made(kind: Kind) -> None:
    vectors = unit(3_000, 11)
    first = kind.empty(16).changed(ids(1, 1_500), vectors[:1_500], NONE)
    queries = unit(20, 12)
    before = [first.search(query, 5).row_ids.tolist() for query in queries]
    problems: list[str] = []
    stop = threading.Event()

    def search() -> None:
        while not stop.is_set():
            for query, wanted in zip(queries, before, strict=True):
                if first.search(query, 5).row_ids.tolist() != wanted:
                    problems.append("an old view changed")

    searcher = threading.Thread(target=search)
    searcher.start()
    index = first
    for start in range(1_500, 3_000, 250):
        index = index.changed(ids(start + 1, 250), vectors[start : start + 250], ids(start - 1_499, 100))
    stop.set()
    searcher.join()
    assert not problems
    assert len(index) == 3_000 - 6 * 100
