"""What measurements say of settings, and which of them is recommended and why."""

from collections.abc import Sequence

import pytest

from gateway.tuning.grid import Setting, grid, variants
from gateway.tuning.journal import Measurement
from gateway.tuning.recommend import Wishes, recommend, recommend_variant
from gateway.tuning.statistics import (
    Done,
    paired_difference,
    quantile,
    shared_questions,
    standard_error,
    summarise,
)

K1, K3, K8 = (Setting(k) for k in (1, 3, 8))


def measured(
    setting: Setting,
    ttfts_ms: Sequence[float],
    recalls: Sequence[float] | None = None,
    words: Sequence[float] | None = None,
) -> dict[tuple[str, int], Measurement]:
    return {
        (setting.name, place): Measurement(
            setting.name,
            place,
            total_ms=ttft_ms + 100,
            ttft_ms=ttft_ms,
            prompt_tokens=1000,
            cached_tokens=250,
            chunks=setting.top_k,
            recall=None if recalls is None else recalls[place],
            words=None if words is None else words[place],
        )
        for place, ttft_ms in enumerate(ttfts_ms)
    }


def failing(setting: Setting, place: int) -> dict[tuple[str, int], Measurement]:
    return {(setting.name, place): Measurement(setting.name, place, 900.0, recall=0.0, words=0.0, error="refused")}


def chosen(settings: list[Setting], done: Done, wishes: Wishes | None = None) -> Setting | None:
    recommendation = recommend(settings, done, wishes or Wishes())
    return recommendation.setting if recommendation else None


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile(values, 0.99)) == (50, 95, 99)
    assert quantile([7.0], 0.99) == 7
    assert quantile([], 0.5) is None


def test_the_standard_error_of_a_mean() -> None:
    assert standard_error([0.0, 1.0, 0.0, 1.0]) == pytest.approx((1 / 3 / 4) ** 0.5)
    assert standard_error([1.0]) is None


def test_a_summary_holds_recall_times_tokens_and_words() -> None:
    done = measured(K3, [100, 200, 300, 400], [1, 1, 0, 1], [1, 0, 0.5, 0.5])
    (summary,) = summarise([K3], done)
    assert (summary.questions, summary.failed, summary.recall, summary.words) == (4, 0, 0.75, 0.5)
    assert (summary.ttft_p50_ms, summary.ttft_p95_ms, summary.ttft_p99_ms) == (200, 400, 400)
    assert (summary.prompt_tokens, summary.cached_share, summary.chunks) == (1000, 0.25, 3)
    assert (summary.attainment, summary.goodput_per_s) == (None, None)


def test_a_budget_is_kept_by_the_answers_within_it_and_a_failure_is_a_miss() -> None:
    budgeted = Setting(3, budget_ms=250)
    done = {**measured(budgeted, [100, 200, 300], [1, 1, 1]), **failing(budgeted, 3)}
    (summary,) = summarise([budgeted], done)
    assert (summary.failed, summary.attainment, summary.recall) == (1, 0.5, 0.75)
    assert summary.goodput_per_s == pytest.approx(2 / (0.2 + 0.3 + 0.4 + 0.9))


def test_what_is_unknown_stays_unknown() -> None:
    done = {(K3.name, 0): Measurement(K3.name, 0, 10.0, ttft_ms=5.0)}
    (summary,) = summarise([K3], done)
    assert (summary.recall, summary.words, summary.cached_share, summary.prompt_tokens) == (None, None, None, None)


def test_settings_compare_over_the_questions_that_all_of_them_have() -> None:
    done = {**measured(K1, [10, 20, 30], [1, 1, 0]), **measured(K3, [10, 20], [1, 1])}
    assert shared_questions([K1, K3], done) == (0, 1)
    assert [summary.recall for summary in summarise([K1, K3], done)] == [1, 1]
    assert summarise([K1, K3, K8], done) == ()
    assert summarise([], done) == ()


def test_the_smallest_ttft_within_a_point_of_the_best_recall_is_recommended() -> None:
    done = {
        **measured(K1, [100] * 100, [1] * 90 + [0] * 10),
        **measured(K3, [200] * 100, [1] * 96 + [0] * 4),
        **measured(K8, [400] * 100, [1] * 97 + [0] * 3),
    }
    recommendation = recommend([K1, K3, K8], done, Wishes())
    assert recommendation is not None
    assert recommendation.setting == K3
    assert recommendation.reasons == (
        "Its recall of 96.0% is within 1 point of the best (97.0% with k=8), and its p95 TTFT of 200 ms is the "
        "smallest of the 2 settings of which that is true.",
    )
    assert chosen([K1, K3, K8], done, Wishes(within=0.0)) == K8
    assert chosen([K1, K3, K8], done, Wishes(within=0.1)) == K1


def test_a_budget_that_is_not_kept_is_out() -> None:
    kept, missed = Setting(3, budget_ms=250), Setting(8, budget_ms=150)
    done = {**measured(kept, [200] * 40, [1] * 40), **measured(missed, [140] * 36 + [160] * 4, [1] * 40)}
    recommendation = recommend([kept, missed], done, Wishes())
    assert recommendation is not None
    assert recommendation.setting == kept
    assert "1 setting with a budget is out: fewer than 95% of the answers" in recommendation.reasons[1]
    assert chosen([kept, missed], done, Wishes(attained=0.9)) == missed
    assert chosen([missed], done) is None


def test_recall_alone_does_not_recommend_answers_that_are_surely_worse() -> None:
    done = {
        **measured(K1, [100] * 40, [1] * 40, [0.2] * 20 + [0.4] * 20),
        **measured(K3, [200] * 40, [1] * 40, [0.8] * 20 + [0.9] * 20),
    }
    recommendation = recommend([K1, K3], done, Wishes())
    assert recommendation is not None
    assert recommendation.setting == K3
    assert "fewer of the known words" in recommendation.reasons[1]


def test_a_difference_in_words_that_may_be_chance_changes_nothing() -> None:
    done = {
        **measured(K1, [100] * 40, [1] * 40, [0, 1] * 20),
        **measured(K3, [200] * 40, [1] * 40, [1, 0] * 19 + [1, 1]),
    }
    assert chosen([K1, K3], done) == K1


def test_answers_are_judged_by_words_where_no_document_is_known() -> None:
    done = {**measured(K1, [100] * 40, None, [0.5] * 40), **measured(K3, [200] * 40, None, [0.9] * 40)}
    recommendation = recommend([K1, K3], done, Wishes())
    assert recommendation is not None
    assert recommendation.setting == K3
    assert recommendation.reasons[0] == (
        "Its share of answer words of 90.0% is the best, and no other is within 1 point of the best; its p95 TTFT is "
        "200 ms."
    )


def test_without_documents_and_answers_nothing_is_recommended() -> None:
    assert chosen([K1], measured(K1, [100] * 40)) is None
    assert chosen([K1], {}) is None


def test_few_questions_are_said_to_be_few() -> None:
    recommendation = recommend([K1], measured(K1, [100] * 5, [1] * 5), Wishes())
    assert recommendation is not None
    assert recommendation.reasons[-1] == "5 questions are few: take this as a hint."


def test_a_variant_is_recommended_only_when_it_is_better_by_more_than_chance() -> None:
    base, *variations = variants(K3, ["chunk_order"])
    same, luckier, better = tried = variations[:3]
    done = {
        **measured(base, [100] * 40, None, [0, 1] * 20),
        **measured(same, [100] * 40, None, [0, 1] * 20),
        **measured(luckier, [100] * 40, None, [0, 1] * 19 + [1, 1]),
        **measured(better, [100] * 40, None, [0, 1] * 10 + [1, 1] * 10),
    }
    recommendation = recommend_variant(base, tried, done)
    assert recommendation is not None
    assert recommendation.setting == better
    assert "25.0 points more of the known words" in recommendation.reasons[0]
    assert recommend_variant(base, [same, luckier], done) is None


def test_differences_are_paired_question_by_question() -> None:
    done = {**measured(K1, [1] * 4, [1, 0, 1, 0]), **measured(K3, [1] * 4, [0, 0, 0, 0])}
    middle, error = paired_difference(K1, K3, [0, 1, 2, 3], done, lambda each: each.recall) or (0, 0)
    assert middle == 0.5
    assert error == pytest.approx((1 / 3 / 4) ** 0.5)
    assert paired_difference(K1, K3, [0], done, lambda each: each.recall) is None


def test_the_grid_crosses_budgets_ks_and_sizes_and_its_names_are_unique() -> None:
    settings = grid([None, 500], [8, 1], [None, 128])
    assert [setting.name for setting in settings] == [
        "k=1",
        "k=8",
        "k=1, 500 ms",
        "k=8, 500 ms",
        "k=1, chunks of 128",
        "k=8, chunks of 128",
        "k=1, 500 ms, chunks of 128",
        "k=8, 500 ms, chunks of 128",
    ]


def test_variants_change_one_thing_at_a_time_beside_the_base_measured_again() -> None:
    base, *tried = variants(Setting(5, 500), ["pin_last", "evidence_lines"])
    assert base.name == "k=5, 500 ms (again)"
    assert [setting.name for setting in tried[:2]] == ["k=5, 500 ms, pin_last=0", "k=5, 500 ms, pin_last=1"]
    assert len({setting.name for setting in (base, *tried)}) == 7
    assert all(setting.varied for setting in (base, *tried))


def test_a_setting_says_what_the_request_carries_and_what_makes_it_the_default() -> None:
    setting = Setting(5, 500, 128, chunk_order="label", pin_last=0)
    assert setting.extension() == {
        "top_k": 5,
        "ttft_budget_ms": 500,
        "policy": "best_effort",
        "chunk_order": "label",
        "pin_last": 0,
    }
    assert setting.variables() == {
        "HEADSTART_TOP_K": 5,
        "HEADSTART_TTFT_BUDGET_MS": 500,
        "HEADSTART_CHUNK_TOKENS": 128,
        "HEADSTART_CHUNK_OVERLAP_TOKENS": 16,
        "HEADSTART_CHUNK_ORDER": "label",
        "HEADSTART_PIN_LAST": 0,
    }
