"""The outcome of a sweep as values to print, write and draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tuning.grid import Setting
from gateway.tuning.journal import Measurement
from gateway.tuning.recommend import Recommendation
from gateway.tuning.statistics import Summary, of_setting, shared_questions, summarise
from gateway.tuning.sweep import Outcome


@dataclass(frozen=True, slots=True)
class Results:
    """`grid` and `variants` hold one summary a setting; `ttfts_ms` the sorted TTFTs behind each, by its name."""

    store: str
    model: str
    asked: int
    max_tokens: int
    measured: int
    expected: int
    interrupted: bool
    grid: tuple[Summary, ...]
    variants: tuple[Summary, ...]
    recommendation: Recommendation | None
    variant: Recommendation | None
    ttfts_ms: dict[str, list[float]]
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return self.measured == self.expected

    def variables(self) -> dict[str, str | int | float]:
        """What to set, the variant's change included; empty without a recommendation."""
        chosen = self.variant or self.recommendation
        return chosen.setting.variables() if chosen is not None else {}

    def wire(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "model": self.model,
            "questions": self.asked,
            "max_tokens": self.max_tokens,
            "measured": self.measured,
            "expected": self.expected,
            "interrupted": self.interrupted,
            "results": [summary.wire() for summary in self.grid],
            "variants": [summary.wire() for summary in self.variants],
            "recommendation": None if self.recommendation is None else self.recommendation.wire(),
            "variant_recommendation": None if self.variant is None else self.variant.wire(),
            "set": self.variables(),
            "notes": list(self.notes),
        }


def results(outcome: Outcome) -> Results:
    rounds = (outcome.settings, outcome.tried)
    ttfts: dict[str, list[float]] = {}
    for settings in rounds:
        questions = shared_questions(settings, outcome.done)
        for setting in settings:
            measured = of_setting(setting, questions, outcome.done)
            ttfts[setting.name] = sorted(
                each.ttft_ms for each in measured if each.ttft_ms is not None and not each.error
            )
    return Results(
        store=outcome.store.name,
        model=outcome.model,
        asked=len(outcome.order.places),
        max_tokens=outcome.order.max_tokens,
        measured=len(outcome.done),
        expected=outcome.expected,
        interrupted=outcome.interrupted,
        grid=summarise(outcome.settings, outcome.done),
        variants=summarise(outcome.tried, outcome.done),
        recommendation=outcome.recommendation,
        variant=outcome.variant,
        ttfts_ms=ttfts,
        notes=tuple(_notes(outcome)),
    )


def _notes(outcome: Outcome) -> list[str]:
    done = list(outcome.done.values())
    settings = (*outcome.settings, *outcome.tried)
    budgets = {setting.name: setting.budget_ms for setting in settings}
    answered = [each for each in done if not each.error]
    said = [
        f"One question at a time, streamed, temperature 0, at most {outcome.order.max_tokens} answer tokens. TTFT "
        "runs from a request's arrival at the gateway to its first token: retrieval, planning, queue and prefill.",
        "Settings take turns question by question, in a shuffled order. Each has a mark in the system text, so the "
        "prefix cache serves it with what it has sent itself and with nothing of the others; they share the cache's "
        "room.",
    ]
    if outcome.missing:
        named = ", ".join(outcome.missing[:3]) + (", …" if len(outcome.missing) > 3 else "")
        said.append(
            f"{len(outcome.missing)} of the known documents are not in the store and count as misses: {named}."
        )
    failed = [each for each in done if each.error]
    if failed:
        said.append(f"{len(failed)} requests failed and count as misses, the last with: {failed[-1].error}")
    said += _on_budgets(answered, budgets, settings)
    return said


def _on_budgets(
    answered: Sequence[Measurement], budgets: dict[str, float | None], settings: Sequence[Setting]
) -> list[str]:
    said = []
    budgeted = [each for each in answered if budgets.get(each.setting) is not None]
    blind = [each for each in budgeted if each.forecast_ms is None]
    if blind:
        said.append(
            f"For {len(blind)} of {len(budgeted)} answers with a budget the gateway predicted nothing, because it "
            "does not know the engine's speed yet: their budgets changed nothing."
        )
    foretold = [each for each in answered if each.forecast_ms is not None and each.ttft_ms is not None]
    if foretold:
        kept = sum((each.ttft_ms or 0.0) <= (each.forecast_ms or 0.0) for each in foretold)
        said.append(
            f"{kept / len(foretold):.1%} of {len(foretold):,} TTFTs were within the gateway's safe prediction."
        )
    by_default = {each.forecast_budget_ms for each in answered if budgets.get(each.setting) is None} - {None}
    if by_default and any(setting.budget_ms is None for setting in settings):
        stated = ", ".join(f"{budget:g} ms" for budget in sorted(filter(None, by_default)))
        said.append(f"The gateway has a budget of its own ({stated}), which the settings without one were held to.")
    return said
