"""One request on its way to a plan: what it has to choose from, and what a choice is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_builder.budget import Filled, Filling
from prompt_builder.drafts import Draft, Drafts
from prompt_builder.forecast import Means
from prompt_builder.knapsack import Form
from prompt_builder.outlook import Prefix
from prompt_builder.renderings import Horizon
from prompt_builder.types import Dropped, Limits, Plan, Tokenizer, Transcript
from prompt_builder.window import Room, Window


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft on a replica. `price_s` is what it takes, and what it leaves to the turns to come."""

    filled: Filled
    means: Means
    price_s: float = 0.0

    @property
    def draft(self) -> Draft:
        return self.filled.draft


@dataclass(frozen=True, slots=True)
class Request:
    """`wanted` are the most relevant chunks that a request without a budget gets.

    `means` are the replicas of which a prediction can be made; where there are none, `held` is the empty prompt on
    the first replica, None where there is no replica or prompts have no ids. `room` and `window` are None where the
    engine does not tell its window.
    """

    transcript: Transcript
    limits: Limits
    wanted: tuple[Form, ...]
    clashes: tuple[Dropped, ...]
    drafts: Drafts
    window: Window | None
    room: Room | None
    means: tuple[Means, ...]
    held: Prefix | None
    filling: Filling
    tokenizer: Tokenizer

    @property
    def stripped_turns(self) -> int:
        """Leading turns that the conversation's last prompt held without their chunks."""
        transcript = self.transcript
        return self.drafts.material.leading_turns(transcript.stripped - transcript.folded)

    def priced(self, filled: Sequence[tuple[Filled, Means]]) -> list[Choice]:
        """A choice of one needs no price."""
        if len(filled) == 1:
            return [Choice(*filled[0])]
        most = None if self.room is None else self.room.prompt_tokens
        horizon = Horizon(self.drafts, self.wanted, most, self.stripped_turns)
        return [Choice(one, means, horizon.price_s(one.draft, means, one.forecast)) for one, means in filled]

    def finished(self, choice: Choice, dropped: Sequence[Dropped]) -> Plan:
        """The plan with its forecast, and with what one more chunk would have cost."""
        draft, forecast = self.drafts.settled(choice.draft), choice.filled.forecast
        if draft is not choice.draft:
            forecast = choice.means.foresee(draft.front, draft.tail.ids)
        shown = draft.shown
        absent = next((form for form in self.filling.wholes if form.label not in shown), None)
        if absent is not None:
            more = choice.means.forecast(forecast.uncached_tokens + absent.tokens, forecast.cached_tokens)
            forecast = replace(forecast, next_chunk_s=more.ttft_s - forecast.ttft_s)
        return replace(self.drafts.plan(draft, dropped), forecast=forecast)

    def unpriced(self, draft: Draft, dropped: Sequence[Dropped]) -> Plan:
        """The plan of a draft of which nothing can be predicted."""
        if self.held is not None and draft.front.parts is not None:
            draft = self.drafts.behind(draft, self.held.extended(self.drafts.material.joined(draft.front)))
        return self.drafts.plan(self.drafts.settled(draft), dropped)

    def left_out(self, choice: Choice, most_tokens: int) -> list[Dropped]:
        """Why wanted chunks, and evidence, are not in a plan under a budget; least relevant first."""
        draft = choice.draft
        known = draft.shown | {clash.name for clash in draft.clashes}
        dropped = []
        for form in reversed(self.wanted):
            if form.label in known:
                continue
            if draft.tokens + form.tokens > most_tokens and self.window is not None:
                dropped.append(self.window.too_large(form, draft.tokens))
            else:
                dropped.append(Dropped("chunk", form.label, self._too_slow(choice, form.tokens)))
        if draft.shown and not draft.evidence:
            lines = self.drafts.evidence([*draft.chunks, *draft.references])
            if lines and any(chunk.form == "whole" for chunk in (*draft.chunks, *draft.references)):
                tokens = self.tokenizer.count(f"{lines}\n\n")
                dropped.append(Dropped("evidence", "evidence", self._too_slow(choice, tokens)))
        return dropped

    def _too_slow(self, choice: Choice, tokens: int) -> str:
        forecast = choice.filled.forecast
        more = choice.means.forecast(forecast.uncached_tokens + tokens, forecast.cached_tokens)
        cost_ms = (more.safe_ttft_s - forecast.safe_ttft_s) * 1000
        budget_s = forecast.budget_s or 0.0
        left_ms = (budget_s - forecast.safe_ttft_s) * 1000
        if left_ms < 0:
            return (
                f"Would have cost {cost_ms:.0f} ms; the smallest prompt alone exceeds the budget of "
                f"{budget_s * 1000:.0f} ms by {-left_ms:.0f} ms."
            )
        if cost_ms > left_ms:
            return (
                f"Would have cost {cost_ms:.0f} ms; {left_ms:.0f} ms were left of the budget of "
                f"{budget_s * 1000:.0f} ms."
            )
        return (
            f"Would have cost {cost_ms:.0f} ms of the budget of {budget_s * 1000:.0f} ms; what is in the prompt "
            f"instead is worth more."
        )
