"""From a conversation and its candidates to a plan and its prompt; and what a budget makes of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gateway.answers import forecast_wire
from gateway.budgets import BUSY, TOO_SMALL, TOTAL_FIELD, Budget
from gateway.errors import ApiError, ErrorKind
from gateway.messages import Conversation
from gateway.routing import forecast_of
from gateway.serving import Serving
from gateway.turns import Turn, rendered_by
from latency.speed import Forecast, SpeedEstimate
from prompt_builder.companions import NOTHING_KNOWN, Together
from prompt_builder.material import Material
from prompt_builder.openings import Opening
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.types import Dropped, Limits, Plan, Prompt, QuestionTooLong, Transcript
from retrieval.types import Candidates


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is known of a prompt before there are candidates: its transcript measured, and its past rendered."""

    material: Material
    opening: Opening | None


def look_ahead(serving: Serving, transcript: Transcript, limits: Limits, salt: str) -> Ahead:
    """For one plan of the transcript. Takes time with the length of the texts."""
    planner = serving.planner
    material = planner.ahead(transcript, limits)
    front = planner.standing(material, transcript)
    opening = serving.builder.opening(planner.begun(material, front), salt)
    if opening is not None and opening.prompt.token_ids is not None:
        material.take_joined(front, opening.prompt.token_ids)
    return Ahead(material, opening)


def plan_prompt(
    serving: Serving,
    conversation: Conversation,
    candidates: Candidates,
    limits: Limits,
    salt: str,
    outlooks: tuple[Outlook, ...],
    clock: Clock,
    past: Together = NOTHING_KNOWN,
    ahead: Ahead | None = None,
) -> tuple[Plan, Prompt]:
    """Raises ApiError (400) for a question that the window cannot hold. Takes time with the length of the texts."""
    window = limits.window_tokens
    # Tools and messages that are not plain text: the planner does not see them, the engine computes them.
    aside = conversation.extra_tokens(serving.tokenizer)
    if window is not None:
        limits = replace(limits, window_tokens=window - aside)
    if aside and (speed := outlooks[0].speed if outlooks else None) is not None:
        clock = replace(clock, spent_s=clock.spent_s + speed.prefill.per_token_s * aside)
    material, opening = (None, None) if ahead is None else (ahead.material, ahead.opening)
    try:
        rendered = rendered_by(serving.renderer, candidates)
        plan = serving.planner.plan(conversation.transcript, rendered, limits, outlooks, clock, past, material)
    except QuestionTooLong as error:
        message = str(error)
        if aside:
            message += f" ({aside} of {window} tokens are set aside for tools and messages that are not plain text.)"
        raise ApiError(ErrorKind.INVALID, message, param="messages", code="context_length_exceeded") from None
    reason = conversation.inexact_reason
    if reason is None and serving.facts.token_ids_accepted is not True:
        reason = "the engine does not take token ids in chat requests"
    return plan, serving.builder.render(plan, salt, exact=reason is None, reason=reason, opening=opening)


def reordered(turn: Turn, outlook: Outlook, past: Together) -> Turn:
    """A turn that has waited, its chunks in the order for what this replica holds now; itself where nothing changes.

    Takes time with the length of the prompt.
    """
    plan = turn.serving.planner.reordered(turn.plan, turn.prompt, turn.limits, outlook, past)
    if plan is turn.plan:
        return turn
    return replace(turn, plan=plan, prompt=turn.serving.builder.render(plan, turn.context.cache_salt))


def within_total(plan: Plan, budget: Budget, speed: SpeedEstimate | None, window_tokens: int | None) -> Plan:
    """The plan with `max_tokens` that the total budget leaves time for, at the speed that is kept with the quantile.

    At least one token: best effort answers something. An answer that only the window of so many tokens ends stays
    unbounded: an engine refuses to be asked for more than there is room for.
    """
    total_s, forecast = budget.total_s, plan.forecast
    if total_s is None:
        return plan
    token_s = speed.safe_token_s if speed is not None else None
    if forecast is None or token_s is None or token_s <= 0:
        reason = "Nothing is predicted of this prompt (the engine's speed or tokenizer is not known): no bound."
        return replace(plan, dropped=(*plan.dropped, Dropped("max_tokens", "total_budget_ms", reason)))
    left_s = total_s - forecast.safe_ttft_s
    tokens = 1 + int(left_s / token_s) if left_s >= 0 else 1
    most = plan.max_tokens
    if most is None and window_tokens is not None:
        most = window_tokens - forecast.cached_tokens - forecast.uncached_tokens
    if most is not None and most <= tokens:
        return plan
    reason = (
        f"{left_s * 1000:.0f} ms of the total budget of {total_s * 1000:.0f} ms are left for the answer: {tokens} "
        f"tokens at {1 / token_s:.1f} per second."
    )
    cut = Dropped("max_tokens", "not given" if plan.max_tokens is None else str(plan.max_tokens), reason)
    return replace(plan, max_tokens=tokens, dropped=(*plan.dropped, cut))


def refuse_if_late(forecasts: Iterable[Forecast], budget: Budget) -> Forecast | None:
    """The first of the forecasts that keeps a strict budget; the first of all where nothing must be kept.

    Raises ApiError, with the least prediction, where all are predicted to miss it.

    A total budget is missed where it leaves no time for one token. 429 with Retry-After when an idle engine would
    keep the budget, 400 when nothing would. Without a prediction nothing is refused: only what is proven not to fit.
    """
    limits = [(budget.ttft_s, budget.source), (budget.total_s, TOTAL_FIELD)]
    stated = [(limit_s, source) for limit_s, source in limits if limit_s is not None] if budget.strict else []
    missed: list[Forecast] = []
    for forecast in forecasts:
        if all(forecast.safe_ttft_s <= limit_s for limit_s, _ in stated):
            return forecast
        missed.append(forecast)
    if not missed:
        return None
    # A replica that would keep it if it were idle is worth coming again for.
    idle = [each for each in missed if all(each.safe_ttft_s - each.queue_s <= limit_s for limit_s, _ in stated)]
    told = min(idle or missed, key=lambda each: each.safe_ttft_s)
    limit_s, source = next((limit_s, source) for limit_s, source in stated if told.safe_ttft_s > limit_s)
    raise _refusal(told, limit_s, source)


def _refusal(forecast: Forecast, limit_s: float, source: str | None) -> ApiError:
    said = (
        f"{source}: the smallest prompt for this request has {forecast.uncached_tokens} tokens to compute; "
        f"its first token is predicted after {forecast.safe_ttft_s * 1000:.0f} ms (with probability "
        f"{forecast.quantile:g}), later than {limit_s * 1000:.0f} ms"
    )
    if forecast.safe_ttft_s - forecast.queue_s <= limit_s:
        return ApiError(
            ErrorKind.RATE_LIMITED,
            f"{said}, because {forecast.queue_s * 1000:.0f} ms of work are queued before it. Try again later.",
            param=source,
            code=BUSY,
            retry_after_s=forecast.queue_s,
            forecast=forecast_wire(forecast),
        )
    return ApiError(
        ErrorKind.INVALID,
        f"{said}. Raise the budget, shorten the question, or ask for policy 'best_effort'.",
        param=source,
        code=TOO_SMALL,
        forecast=forecast_wire(forecast),
    )


def forecast_plain(prompt: Prompt, outlooks: Sequence[Outlook], clock: Clock) -> tuple[Forecast, ...]:
    """What is predicted of a prompt as it stands, least TTFT first; of replicas whose speed is known."""
    forecasts = []
    for outlook in outlooks:
        cached = 0
        if prompt.token_ids is not None:
            cached = outlook.prefix.extended(prompt.token_ids).cached_tokens()
        forecast = forecast_of(
            outlook, prompt.tokens - cached, cached, gateway_s=clock.spent_s, budget_s=clock.budget_s
        )
        if forecast is not None:
            forecasts.append(forecast)
    return tuple(sorted(forecasts, key=lambda forecast: forecast.ttft_s))


def speed_on(outlooks: Sequence[Outlook], forecast: Forecast | None) -> SpeedEstimate | None:
    """The speed of the replica that a forecast is for."""
    if forecast is None:
        return None
    return next((outlook.speed for outlook in outlooks if outlook.name == forecast.replica), None)
