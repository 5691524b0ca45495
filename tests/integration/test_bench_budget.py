"""The budget bench on the data sets and the real engine, and the fit that its tables rest on."""

from pathlib import Path

from bench.nearness import Example, calibration, fit, mean_loss
from prompt_builder.nearness import FITTED, overlaps
from prompt_builder.pieces import Cutter
from prompt_builder.sentences import terms_of
from prompt_builder.types import PromptChunk
from retrieval.types import RenderedChunk
from tests.integration.test_benches_quick import assert_verdict, check_of, quick_run
from tests.support.prompts import ByteTokenizer


def example(question: str, body: str, answer: int) -> Example:
    chunk = PromptChunk("k0a1b", "f", "n", "", 0.5, body, RenderedChunk("k0a1b", body, ()))
    pieces = Cutter(ByteTokenizer()).of(chunk)
    overlap, of_sentences = overlaps(terms_of(question), [pieces])
    return Example(pieces, overlap, of_sentences, (answer,), ())


EXAMPLES = [
    example("Where do dogs travel?", "Cats stay home. Dogs travel on deck. Birds fly.", 1),
    example("Who sells tickets?", "The office sells tickets. It rains. It snows a lot here.", 0),
]


def test_a_fit_is_never_worse_than_what_it_started_from() -> None:
    assert mean_loss(EXAMPLES, fit(EXAMPLES, FITTED)) < mean_loss(EXAMPLES, FITTED)


def test_what_is_said_and_what_is_true_are_counted_by_range() -> None:
    buckets = calibration(EXAMPLES, FITTED, (0.0, 0.5, 1.0))
    assert [bucket.count for bucket in buckets] == [4, 2]
    assert [bucket.true for bucket in buckets] == [0.0, 1.0]
    assert all(bucket.low <= bucket.said < bucket.high for bucket in buckets)


def test_no_prompt_of_any_budget_has_more_tokens_than_it_allows(
    tmp_path: Path, shared_data: Path, engine_url: str
) -> None:
    status, output, figures = quick_run("budget", tmp_path, "--engine-url", engine_url, data=shared_data)
    assert_verdict("budget", status, output, figures)
    for language in ("en", "vi"):
        for budget in (200, 300, 500, 900):
            assert check_of(figures, f"XQuAD {language} never above {budget}")["met"]
    assert check_of(figures, "predicted = reported")["met"]
    assert len(figures["tables"][-1]["rows"]) == 7
