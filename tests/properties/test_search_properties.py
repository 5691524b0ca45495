"""Properties of the search half: increments equal rebuilds, snapshots come back, relevance keeps order."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.calibration import FITTED
from retrieval.dense import BruteForce, FlatIndex
from retrieval.fusion import DEFAULT_FUSION, Crowd
from retrieval.lexical import LexicalIndex
from retrieval.snapshots import Snapshot, UnusableSnapshot, read_snapshot, write_snapshot
from retrieval.words import words

NONE = np.zeros(0, dtype=np.int64)
TEXT = st.lists(st.sampled_from(["ferry", "gate", "bệnh", "여객선", "東京都", "nine", "the"]), max_size=8).map(
    " ".join
)
STEPS = st.lists(st.tuples(st.lists(TEXT, max_size=4), st.sets(st.integers(1, 20), max_size=4)), max_size=6)


@given(steps=STEPS, question=TEXT)
@settings(max_examples=60, deadline=None)
def test_an_index_grown_in_steps_ranks_as_one_built_at_once(
    steps: list[tuple[list[str], set[int]]], question: str
) -> None:
    grown, live, next_row = LexicalIndex.empty(), dict[int, str](), 1
    for added, removed in steps:
        rows = list(enumerate(added, start=next_row))
        next_row += len(added)
        gone = np.array(sorted(row_id for row_id in removed if row_id in live), dtype=np.int64)
        live = {row_id: text for row_id, text in live.items() if row_id not in removed} | dict(rows)
        grown = grown.changed(rows, gone)
    built = LexicalIndex.empty().changed(sorted(live.items()), NONE)
    assert len(grown) == len(built) == len(live)
    found = grown.match({question: 1.0})
    # A deleted row may still count in the words' frequencies until the next merge; it never answers.
    assert set(found.top(50).tolist()) == set(built.match({question: 1.0}).top(50).tolist())
    assert not found.shares.size or 0 <= found.shares.min() <= found.shares.max() <= 1 + 1e-6


@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=1, max_size=30),
    query=st.lists(st.integers(-3, 3), min_size=3, max_size=3),
    k=st.integers(1, 10),
)
@settings(max_examples=60, deadline=None)
def test_flat_and_brute_force_give_equal_scores(rows: list[list[int]], query: list[int], k: int) -> None:
    vectors, vector = np.array(rows, dtype=np.float32), np.array(query, dtype=np.float32)
    row_ids = np.arange(1, len(rows) + 1, dtype=np.int64)
    flat = FlatIndex.empty(3).changed(row_ids, vectors, NONE).search(vector, k)
    brute = BruteForce.empty(3).changed(row_ids, vectors, NONE).search(vector, k)
    assert flat.scores == pytest.approx(brute.scores)


@given(text=st.text(max_size=200))
def test_words_of_any_text_are_not_empty_and_stable(text: str) -> None:
    found = words(text)
    assert all(found)
    assert words(text) == found


@given(scores=st.lists(st.floats(-2, 3), max_size=20).map(lambda found: sorted(found, reverse=True)))
def test_relevance_keeps_the_order_of_the_scores(scores: list[float]) -> None:
    relevances = FITTED.relevances(scores)
    assert all(first >= second for first, second in pairwise(relevances))
    assert all(0 <= relevance <= 1 for relevance in relevances)


@given(
    share=st.floats(0, 1),
    low=st.floats(-1, 1),
    rise=st.floats(0, 1),
    mean=st.floats(-0.2, 0.8),
    deviation=st.floats(0.01, 0.5),
    rows=st.integers(1, 1_000_000),
)
def test_a_higher_cosine_at_an_equal_share_never_scores_lower(
    share: float, low: float, rise: float, mean: float, deviation: float, rows: int
) -> None:
    shares, cosines = np.array([share, share]), np.array([low, min(1.0, low + rise)])
    first, second = DEFAULT_FUSION.scores(shares, cosines, Crowd(mean, deviation, rows))
    assert second >= first - 1e-12


@given(cut=st.integers(0, 400), flip=st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_e8_no_damaged_snapshot_is_taken_for_a_whole_one(cut: int, flip: int) -> None:
    arrays: dict[str, np.ndarray] = {
        "rows": np.arange(20, dtype=np.int64),
        "vectors": np.ones((4, 3), np.float32),
        "none": NONE,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.bin"
        write_snapshot(path, Snapshot("vs_1", "flat", 7, arrays))
        whole = read_snapshot(path, "vs_1", "flat")
        assert whole is not None
        assert all(np.array_equal(whole.arrays[name], array) for name, array in arrays.items())
        content = bytearray(path.read_bytes())
        if cut:
            content = content[: max(0, len(content) - cut)]
        else:
            content[flip % len(content)] ^= 0x10
        path.write_bytes(bytes(content))
        with pytest.raises(UnusableSnapshot):
            read_snapshot(path, "vs_1", "flat")
