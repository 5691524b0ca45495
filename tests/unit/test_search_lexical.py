"""BM25: equal to the library's own index, incremental, and unharmed by deletions."""

import bm25s
import numpy as np
import pytest

from retrieval import lexical, postings
from retrieval.lexical import LexicalIndex
from retrieval.words import words

NONE = np.zeros(0, dtype=np.int64)
TEXTS = [
    "the ferry leaves the harbour at nine",
    "the harbour master opens the gate",
    "a captain and a ferry and a second ferry",
    "annual leave is twenty days",
    "leave the keys at the gate",
]


def indexed(texts: list[str], first: int = 1) -> LexicalIndex:
    return LexicalIndex.empty().changed(enumerate(texts, start=first), NONE)


def zipf_texts(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in np.minimum(random.zipf(1.3, 30), 3_000)) for _ in range(count)]


def test_the_chunk_with_the_words_comes_first_and_strangers_are_absent() -> None:
    match = indexed(TEXTS).match({"ferry captain": 1.0})
    assert match.top(5).tolist() == [3, 1]


def test_scores_are_those_of_the_library() -> None:
    vocabulary: dict[str, int] = {}
    documents = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in TEXTS]
    reference = bm25s.BM25(k1=postings.K1, b=postings.B, method="lucene")
    reference.scores = reference.build_index_from_ids(list(vocabulary.values()), documents, show_progress=False)
    reference.nonoccurrence_array = None
    wanted = reference.get_scores_from_ids([vocabulary[word] for word in ("ferry", "gate", "leave")])
    found = indexed(TEXTS).match({"ferry gate leave": 1.0}).shares
    assert found / found.max() == pytest.approx(wanted / wanted.max(), rel=1e-5)


def test_a_share_is_between_nothing_and_everything() -> None:
    shares = indexed(TEXTS).match({"annual leave is twenty days": 1.0}).shares
    assert shares.argmax() == 3
    assert 0 <= shares.min() <= shares.max() <= 1


def test_a_word_that_no_chunk_holds_lowers_every_share() -> None:
    index = indexed(TEXTS)
    assert index.match({"ferry xylophone": 1.0}).shares.max() < index.match({"ferry": 1.0}).shares.max()


def test_the_previous_turn_counts_by_its_weight() -> None:
    index = indexed(TEXTS)
    assert index.match({"gate": 1.0, "ferry": 0.3}).top(2).tolist()[0] in (2, 5)
    assert 3 in index.match({"gate": 1.0, "ferry": 0.3}).top(5).tolist()


def test_rows_added_one_by_one_score_as_rows_added_at_once() -> None:
    step = LexicalIndex.empty()
    for row_id, text in enumerate(TEXTS, start=1):
        step = step.changed([(row_id, text)], NONE)
    for question in ("ferry harbour", "leave", "the gate"):
        assert step.match({question: 1.0}).shares == pytest.approx(indexed(TEXTS).match({question: 1.0}).shares)


def test_e6_a_deleted_row_never_answers_again() -> None:
    index = indexed(TEXTS).changed([], np.array([3]))
    assert 3 not in index.match({"captain ferry": 1.0}).top(5).tolist()
    assert len(index) == 4


def test_newer_rows_wait_beside_a_large_main_part_and_are_merged_when_they_are_many() -> None:
    texts = zipf_texts(lexical.SMALL_ROWS + 100, 1)
    index = indexed(texts).changed([], np.array([5, 6, 7]))
    newer = index.changed([(10_001, "an utterly unusual aardvark")], np.array([8]))
    assert newer.match({"aardvark": 1.0}).top(3).tolist() == [10_001]
    assert not set(newer.match({texts[5]: 1.0}).top(50).tolist()) & {5, 6, 7, 8}
    merged = newer.changed(enumerate(zipf_texts(lexical.MAX_NEWER_ROWS + 10, 2), start=20_000), NONE)
    assert merged.match({"aardvark": 1.0}).top(3).tolist() == [10_001]
    assert len(merged) == len(texts) - 4 + 1 + lexical.MAX_NEWER_ROWS + 10


def test_a_row_can_be_deleted_from_the_newer_part() -> None:
    index = indexed(zipf_texts(lexical.SMALL_ROWS + 10, 3))
    newer = index.changed([(10_001, "aardvark one"), (10_002, "aardvark two")], NONE)
    assert newer.changed([], np.array([10_001])).match({"aardvark": 1.0}).top(3).tolist() == [10_002]


def test_words_of_deleted_rows_leave_the_vocabulary() -> None:
    index = indexed([f"unique{number} shared" for number in range(200)])
    assert len(index.vocabulary) == 201
    emptied = index.changed([], np.arange(1, 196, dtype=np.int64))
    assert len(emptied.vocabulary) == 6
    assert emptied.match({"unique199": 1.0}).top(3).tolist() == [200]


def test_restored_postings_give_the_same_answers() -> None:
    index = indexed(TEXTS).changed([(9, "a ferry at the gate")], np.array([2]))
    again = LexicalIndex.restored(index.vocabulary, index.compacted())
    for question in ("ferry gate", "leave", "harbour"):
        assert again.match({question: 1.0}).top(5).tolist() == index.match({question: 1.0}).top(5).tolist()


def test_a_filter_limits_the_rows() -> None:
    match = indexed(TEXTS).match({"ferry": 1.0})
    assert match.top(5, np.array([1, 2])).tolist() == [1]
    assert match.top(5, NONE).tolist() == []


def test_a4_equal_scores_come_in_order_of_the_row_id_even_at_the_cut() -> None:
    match = indexed(["same words here"] * 40).match({"same words": 1.0})
    assert match.top(5).tolist() == [1, 2, 3, 4, 5]


def test_shares_of_unknown_rows_are_zero() -> None:
    match = indexed(TEXTS).match({"ferry": 1.0})
    assert match.of(np.array([3, 77])).tolist() == [match.shares[2], 0.0]


@pytest.mark.parametrize("question", ["", "   ", "?!", "unknownword"])
def test_a_question_without_known_words_finds_nothing(question: str) -> None:
    assert indexed(TEXTS).match({question: 1.0}).top(5).tolist() == []
