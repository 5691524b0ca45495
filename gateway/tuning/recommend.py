"""Which setting to take, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tuning.grid import Setting
from gateway.tuning.journal import Measurement
from gateway.tuning.statistics import Done, Summary, paired_difference, shared_questions, summarise

FEW_QUESTIONS = 30
_SURE_ERRORS = 2.0  # standard errors of a paired difference: by chance it is larger in about one of twenty cases


@dataclass(frozen=True, slots=True)
class Wishes:
    """`within`: how much of the best recall may be given up for a smaller TTFT. `attained`: the share of answers
    that must keep a budget for it to be recommended. Shares, 0 to 1."""

    within: float = 0.01
    attained: float = 0.95


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`reasons` are sentences; the first says why this one."""

    setting: Setting
    reasons: tuple[str, ...]

    def wire(self) -> dict[str, Any]:
        return {
            "name": self.setting.name,
            "settings": self.setting.variables(),
            "reasons": list(self.reasons),
        }


def recommend(settings: Sequence[Setting], done: Done, wishes: Wishes) -> Recommendation | None:
    """The smallest p95 TTFT whose quality is within `wishes.within` of the best. None where nothing can be said.

    Quality is the recall of known documents, else the words of known answers. Settings whose budget is not kept
    often enough are out. So are settings whose answers hold fewer words, by more than two standard errors of the
    paired difference, than those of the remaining one with the most: recall by document does not see a wrong
    passage of the right document.
    """
    summaries = [summary for summary in summarise(settings, done) if summary.ttft_p95_ms is not None]
    judged = [summary for summary in summaries if _quality(summary) is not None]
    if not judged:
        return None
    kept = [summary for summary in judged if summary.attainment is None or summary.attainment >= wishes.attained]
    if not kept:
        return None
    best = max(kept, key=lambda summary: (_quality(summary) or 0.0, -(summary.ttft_p95_ms or 0.0)))
    floor = (_quality(best) or 0.0) - wishes.within
    close = [summary for summary in kept if (_quality(summary) or 0.0) >= floor - 1e-9]
    worded = _not_worse_in_words(close, settings, done)
    chosen = min(worded, key=lambda summary: (summary.ttft_p95_ms or 0.0, -(_quality(summary) or 0.0)))
    reasons = [_why(chosen, best, worded, wishes)]
    if len(worded) < len(close):
        reasons.append(
            f"{len(close) - len(worded)} more had the recall, but answers that hold fewer of the known words by more "
            "than chance."
        )
    if len(kept) < len(judged):
        missed = len(judged) - len(kept)
        which = "1 setting with a budget is" if missed == 1 else f"{missed} settings with a budget are"
        reasons.append(f"{which} out: fewer than {wishes.attained:.0%} of the answers kept it.")
    if chosen.questions < FEW_QUESTIONS:
        reasons.append(f"{chosen.questions} questions are few: take this as a hint.")
    return Recommendation(chosen.setting, tuple(reasons))


def recommend_variant(base: Setting, tried: Sequence[Setting], done: Done) -> Recommendation | None:
    """`base` with the one change whose answers hold more of the known words by more than chance; None if none does.

    Each is compared with `base` question by question. With several changes tried, one in twenty passes by luck.
    """
    better = []
    questions = shared_questions([base, *tried], done)
    for setting in tried:
        difference = paired_difference(setting, base, questions, done, _words)
        if difference is not None and difference[0] > _SURE_ERRORS * difference[1]:
            better.append((*difference, setting))
    if not better:
        return None
    gain, error, setting = max(better, key=lambda entry: entry[0])
    reason = (
        f"With {setting.name} the answers hold {100 * gain:.1f} points more of the known words than with {base.name} "
        f"(standard error {100 * error:.1f}, {len(questions)} questions)."
    )
    return Recommendation(setting, (reason,))


def _not_worse_in_words(close: list[Summary], settings: Sequence[Setting], done: Done) -> list[Summary]:
    if any(summary.words is None for summary in close):
        return close
    questions = shared_questions(settings, done)
    most = max(close, key=lambda summary: summary.words or 0.0)
    kept = []
    for summary in close:
        difference = paired_difference(most.setting, summary.setting, questions, done, _words)
        if summary is most or difference is None or difference[0] <= _SURE_ERRORS * difference[1]:
            kept.append(summary)
    return kept


def _why(chosen: Summary, best: Summary, worded: Sequence[Summary], wishes: Wishes) -> str:
    what = "recall" if chosen.recall is not None else "share of answer words"
    ttft_ms = f"{chosen.ttft_p95_ms or 0:,.0f} ms"
    margin = f"{100 * wishes.within:g} point" + ("" if wishes.within == 0.01 else "s")
    said = f"Its {what} of {_quality(chosen) or 0:.1%} is "
    if chosen is best:
        said += "the best"
    else:
        said += f"within {margin} of the best ({_quality(best) or 0:.1%} with {best.setting.name})"
    if len(worded) == 1:
        return f"{said}, and no other is within {margin} of the best; its p95 TTFT is {ttft_ms}."
    return (
        f"{said}, and its p95 TTFT of {ttft_ms} is the smallest of the {len(worded)} settings of which that is true."
    )


def _quality(summary: Summary) -> float | None:
    return summary.recall if summary.recall is not None else summary.words


def _words(measurement: Measurement) -> float | None:
    return measurement.words
