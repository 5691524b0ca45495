"""What measurements say of each setting."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.tuning.grid import Setting
from gateway.tuning.journal import Measurement

Done = Mapping[tuple[str, int], Measurement]


@dataclass(frozen=True, slots=True)
class Summary:
    """One setting over the questions that all settings of its round have answered. Milliseconds; shares 0 to 1.

    `recall` and `words` are means over the questions whose documents or answers are known, None where there are
    none; a request that failed counts as 0 in both. `attainment` is the share of requests whose TTFT was within the
    budget, failures counted as misses; `goodput_per_s` those requests per second of the setting's own time, one
    after the other. Both are None without a budget. `cached_share` is of all prompt tokens.
    """

    setting: Setting
    questions: int
    failed: int
    recall: float | None
    words: float | None
    words_error: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None
    attainment: float | None
    goodput_per_s: float | None
    total_p50_ms: float | None
    prompt_tokens: float | None
    cached_share: float | None
    chunks: float | None

    def wire(self) -> dict[str, Any]:
        return {
            "name": self.setting.name,
            "again": self.setting.again,
            **self.setting.wire(),
            **{name: value for name, value in asdict(self).items() if name != "setting"},
        }


def shared_questions(settings: Sequence[Setting], done: Done) -> tuple[int, ...]:
    """The questions that every setting has a measurement of: only these compare."""
    places = [{question for name, question in done if name == setting.name} for setting in settings]
    return tuple(sorted(set.intersection(*places))) if places else ()


def summarise(settings: Sequence[Setting], done: Done) -> tuple[Summary, ...]:
    """One summary a setting, over what all of them have in common; none where that is nothing."""
    questions = shared_questions(settings, done)
    if not questions:
        return ()
    return tuple(_summary(setting, [done[setting.name, question] for question in questions]) for setting in settings)


def of_setting(setting: Setting, questions: Iterable[int], done: Done) -> list[Measurement]:
    return [done[setting.name, question] for question in questions]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))


def paired_difference(
    one: Setting, other: Setting, questions: Sequence[int], done: Done, of: Callable[[Measurement], float | None]
) -> tuple[float, float] | None:
    """Mean of `of(one) - of(other)` question by question, and its standard error; None of fewer than two pairs."""
    pairs = [(of(done[one.name, question]), of(done[other.name, question])) for question in questions]
    differences = [left - right for left, right in pairs if left is not None and right is not None]
    error = standard_error(differences)
    middle = mean(differences)
    return None if error is None or middle is None else (middle, error)


def _summary(setting: Setting, measured: Sequence[Measurement]) -> Summary:
    ttfts = [each.ttft_ms for each in measured if each.ttft_ms is not None and not each.error]
    words = [each.words for each in measured if each.words is not None]
    prompts = [each.prompt_tokens for each in measured if each.prompt_tokens is not None]
    known = [each for each in measured if each.prompt_tokens is not None and each.cached_tokens is not None]
    answered = [each for each in measured if not each.error]
    attainment = goodput = None
    if setting.budget_ms is not None:
        kept = sum(within(each, setting.budget_ms) for each in measured)
        attainment = kept / len(measured)
        spent_s = math.fsum(each.total_ms for each in measured) / 1000
        goodput = kept / spent_s if spent_s > 0 else None
    return Summary(
        setting=setting,
        questions=len(measured),
        failed=len(measured) - len(answered),
        recall=mean([each.recall for each in measured if each.recall is not None]),
        words=mean(words),
        words_error=standard_error(words),
        ttft_p50_ms=quantile(ttfts, 0.5),
        ttft_p95_ms=quantile(ttfts, 0.95),
        ttft_p99_ms=quantile(ttfts, 0.99),
        attainment=attainment,
        goodput_per_s=goodput,
        total_p50_ms=quantile([each.total_ms for each in answered], 0.5),
        prompt_tokens=quantile(prompts, 0.5),
        cached_share=_cached_share(known),
        chunks=mean([float(each.chunks) for each in answered]),
    )


def within(measurement: Measurement, budget_ms: float) -> bool:
    return not measurement.error and measurement.ttft_ms is not None and measurement.ttft_ms <= budget_ms


def _cached_share(known: Sequence[Measurement]) -> float | None:
    prompt = sum(each.prompt_tokens or 0 for each in known)
    return sum(each.cached_tokens or 0 for each in known) / prompt if prompt else None
