"""Fusion trusts a half by how it stands out; calibration keeps order; repeats are dropped."""

import numpy as np
import pytest

from retrieval.calibration import FITTED, duplicates, features
from retrieval.filters import matches
from retrieval.fusion import DEFAULT_FUSION, Crowd, crowd
from retrieval.types import Filter


def test_a_chunk_far_out_of_the_crowd_is_believed() -> None:
    of = Crowd(mean=0.03, deviation=0.1, rows=240)
    scores = DEFAULT_FUSION.scores(np.array([0.1, 0.0]), np.array([0.1, 0.7]), of)
    assert scores.argmax() == 1


def test_a_lost_dense_half_does_not_overrule_the_words() -> None:
    """An embedder that does not know the language: all cosines alike, the best no higher than chance puts it."""
    of = Crowd(mean=0.52, deviation=0.056, rows=240)
    scores = DEFAULT_FUSION.scores(np.array([0.35, 0.1]), np.array([0.5, 0.65]), of)
    assert scores.argmax() == 0


def test_where_no_word_matches_a_doubtful_order_remains() -> None:
    scores = DEFAULT_FUSION.scores(np.zeros(3), np.array([0.5, 0.52, 0.51]), Crowd(0.5, 0.05, 1_000))
    assert scores.argsort().tolist() == [0, 2, 1]


def test_trust_grows_with_standing_and_is_bounded() -> None:
    trusted = [DEFAULT_FUSION.trust(standing) for standing in (-1, 0.5, 0.8, 1.0, 1.2, 9)]
    assert trusted == sorted(trusted)
    assert (trusted[0], trusted[-1]) == (DEFAULT_FUSION.least_trust, 1.0)


def test_a_store_of_one_chunk_or_of_equal_chunks_has_no_crowd() -> None:
    for cosines in (np.array([0.4], dtype=np.float32), np.full(9, 0.3, dtype=np.float32)):
        of = crowd(cosines, len(cosines))
        assert DEFAULT_FUSION.scores(np.array([0.2]), np.array([0.4]), of) == pytest.approx([0.2])


def test_relevance_is_a_probability_that_falls_with_rank() -> None:
    relevances = FITTED.relevances([1.4, 0.9, 0.9, 0.2, -0.1])
    assert relevances == sorted(relevances, reverse=True)
    assert all(0 <= relevance <= 1 for relevance in relevances)
    assert relevances[0] > 0.9 > 0.1 > relevances[-1]


def test_a_clear_winner_is_surer_than_one_among_equals() -> None:
    assert FITTED.relevances([0.9, 0.2])[0] > FITTED.relevances([0.9, 0.88])[0]


def test_no_candidate_has_no_relevance_and_no_features() -> None:
    assert FITTED.relevances([]) == []
    assert features([]) == []


LONG = "The ferry to the northern islands leaves the harbour at nine in the morning from the east quay every day."


MANY_WORDS = " ".join(f"word{number}" for number in range(200))


@pytest.mark.parametrize(
    "repeat",
    [
        LONG,
        LONG.upper(),
        LONG.replace(" ", "  \n"),
        "leaves the harbour at nine in the morning",
        f"{MANY_WORDS} {LONG}".replace("word7 ", "word 7 ") + " also on Sundays",
    ],
    ids=["equal", "case", "spacing", "contained", "nearly equal"],
)
def test_what_repeats_a_better_candidate_is_dropped(repeat: str) -> None:
    assert duplicates([f"{MANY_WORDS} {LONG}", MANY_WORDS, "Something else entirely.", repeat]) == {1, 3}


def test_neighbours_that_overlap_and_texts_that_differ_in_a_fact_stay() -> None:
    words = [f"word{number}" for number in range(200)]
    neighbours = [" ".join(words[:120]), " ".join(words[100:])]
    assert duplicates(neighbours) == set()
    assert duplicates(["The fee is ten euros.", "The fee is two euros."]) == set()


def test_repeats_are_seen_in_scripts_without_spaces() -> None:
    text = (
        "员工每年有二十天的带薪年假，须提前两周向部门主管书面申请；病假不计入其中，未用完的天数可以顺延到次年三月底。"
    )
    assert duplicates([text, text + "附注", "完全不同的内容在这里写着。"]) == {1}


def test_texts_without_words_are_no_reason_to_fail() -> None:
    assert duplicates(["!", "?", ""]) == {2}


ATTRIBUTES: dict[str, str | int | float | bool] = {"year": 2024, "lang": "vi", "draft": False, "score": 0.5}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (Filter("eq", "lang", "vi"), True),
        (Filter("eq", "year", "2024"), False),
        (Filter("eq", "draft", False), True),
        (Filter("eq", "draft", 0), False),
        (Filter("ne", "lang", "vi"), False),
        (Filter("ne", "absent", "x"), True),
        (Filter("eq", "absent", "x"), False),
        (Filter("gt", "year", 2023), True),
        (Filter("gte", "year", 2024), True),
        (Filter("lt", "year", 2024), False),
        (Filter("lte", "score", 0.5), True),
        (Filter("gt", "lang", "en"), True),
        (Filter("gt", "lang", 1), False),
        (Filter("lt", "absent", 1), False),
        (Filter("in", "lang", ("en", "vi")), True),
        (Filter("nin", "lang", ("en", "vi")), False),
        (Filter("nin", "absent", ("en",)), True),
        (Filter("and", filters=(Filter("eq", "lang", "vi"), Filter("gt", "year", 2024))), False),
        (Filter("or", filters=(Filter("eq", "lang", "en"), Filter("eq", "year", 2024))), True),
        (Filter("and"), True),
        (Filter("or"), False),
    ],
)
def test_filters_follow_their_meaning(condition: Filter, holds: bool) -> None:
    assert matches(condition, ATTRIBUTES) is holds


def test_an_unknown_filter_is_an_error_and_not_a_pass() -> None:
    with pytest.raises(ValueError, match="like"):
        matches(Filter("like", "lang", "v"), ATTRIBUTES)
