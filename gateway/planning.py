"""From a conversation and its candidates to a plan and its prompt; and what a budget makes of them."""

from dataclasses import replace

from gateway.answers import forecast_wire
from gateway.budgets import BUSY, TOO_SMALL, Budget
from gateway.errors import ApiError, ErrorKind
from gateway.messages import Conversation
from gateway.serving import Serving
from gateway.turns import rendered_by
from latency.speed import Forecast, SpeedEstimate
from prompt_builder.outlook import Clock, Outlook
from prompt_builder.types import Dropped, Limits, Plan, Prompt, QuestionTooLong
from retrieval.types import Candidates


def plan_prompt(
    serving: Serving,
    conversation: Conversation,
    candidates: Candidates,
    limits: Limits,
    salt: str,
    outlooks: tuple[Outlook, ...],
    clock: Clock,
) -> tuple[Plan, Prompt]:
    """Raises ApiError (400) for a question that the window cannot hold. Takes time with the length of the texts."""
    window = limits.window_tokens
    # Tools and messages that are not plain text: the planner does not see them, the engine computes them.
    aside = conversation.extra_tokens(serving.tokenizer)
    if window is not None:
        limits = replace(limits, window_tokens=window - aside)
    if aside and (speed := outlooks[0].speed if outlooks else None) is not None:
        clock = replace(clock, spent_s=clock.spent_s + speed.prefill.per_token_s * aside)
    try:
        rendered = rendered_by(serving.renderer, candidates)
        plan = serving.planner.plan(conversation.transcript, rendered, limits, outlooks, clock)
    except QuestionTooLong as error:
        message = str(error)
        if aside:
            message += f" ({aside} of {window} tokens are set aside for tools and messages that are not plain text.)"
        raise ApiError(ErrorKind.INVALID, message, param="messages", code="context_length_exceeded") from None
    reason = conversation.inexact_reason
    if reason is None and serving.facts.token_ids_accepted is not True:
        reason = "the engine does not take token ids in chat requests"
    return plan, serving.builder.render(plan, salt, exact=reason is None, reason=reason)


def within_total(plan: Plan, budget: Budget, speed: SpeedEstimate | None) -> Plan:
    """The plan with `max_tokens` that the total budget leaves time for, at the speed that is kept with the quantile.

    At least one token: best effort answers something. Raises ApiError where a strict budget leaves no time for one.
    """
    total_s, forecast = budget.total_s, plan.forecast
    if total_s is None:
        return plan
    token_s = speed.safe_token_s if speed is not None else None
    if forecast is None or token_s is None or token_s <= 0:
        reason = "The engine's speed is not known yet: the total budget does not bound the answer."
        return replace(plan, dropped=(*plan.dropped, Dropped("max_tokens", "total_budget_ms", reason)))
    left_s = total_s - forecast.safe_ttft_s
    tokens = 1 + int(left_s / token_s) if left_s >= 0 else 0
    if tokens < 1 and budget.strict:
        raise ApiError(
            ErrorKind.INVALID,
            f"headstart.total_budget_ms: the first token alone is predicted after {forecast.safe_ttft_s * 1000:.0f} "
            f"ms (with probability {forecast.quantile:g}), later than {total_s * 1000:.0f} ms. Raise the budget.",
            param="headstart.total_budget_ms",
            code=TOO_SMALL,
            forecast=forecast_wire(forecast),
        )
    tokens = max(1, tokens)
    if plan.max_tokens is not None and plan.max_tokens <= tokens:
        return plan
    reason = (
        f"{left_s * 1000:.0f} ms of the total budget of {total_s * 1000:.0f} ms are left for the answer: {tokens} "
        f"tokens at {1 / token_s:.1f} per second."
    )
    cut = Dropped("max_tokens", "not given" if plan.max_tokens is None else str(plan.max_tokens), reason)
    return replace(plan, max_tokens=tokens, dropped=(*plan.dropped, cut))


def refuse_if_late(forecast: Forecast | None, budget: Budget) -> None:
    """Raises ApiError, with the prediction, for a strict budget that is predicted to be missed.

    429 with Retry-After when an idle engine would keep it, 400 when nothing would. Without a prediction nothing is
    refused: only what is proven not to fit.
    """
    if not budget.strict or forecast is None or forecast.fits or budget.ttft_s is None:
        return
    budget_ms = budget.ttft_s * 1000
    said = (
        f"{budget.source}: the smallest prompt for this request has {forecast.uncached_tokens} tokens to compute; "
        f"its first token is predicted after {forecast.safe_ttft_s * 1000:.0f} ms (with probability "
        f"{forecast.quantile:g}), later than {budget_ms:.0f} ms"
    )
    if forecast.safe_ttft_s - forecast.queue_s <= budget.ttft_s:
        raise ApiError(
            ErrorKind.RATE_LIMITED,
            f"{said}, because {forecast.queue_s * 1000:.0f} ms of work are queued before it. Try again later.",
            param=budget.source,
            code=BUSY,
            retry_after_s=forecast.queue_s,
            forecast=forecast_wire(forecast),
        )
    raise ApiError(
        ErrorKind.INVALID,
        f"{said}. Raise the budget, shorten the question, or ask for policy 'best_effort'.",
        param=budget.source,
        code=TOO_SMALL,
        forecast=forecast_wire(forecast),
    )


def forecast_plain(prompt: Prompt, outlook: Outlook, clock: Clock) -> Forecast | None:
    """What is predicted of a prompt as it stands; None where the replica's speed is not known."""
    speed = outlook.speed
    if speed is None:
        return None
    cached = 0
    if prompt.token_ids is not None:
        cached = outlook.prefix.extended(prompt.token_ids).cached_tokens()
    uncached = prompt.tokens - cached
    prefill_s = speed.predict_s(uncached, cached)
    return Forecast(
        replica=outlook.name,
        cached_tokens=cached,
        uncached_tokens=uncached,
        gateway_s=clock.spent_s,
        queue_s=outlook.queue_s(prefill_s),
        prefill_s=prefill_s,
        safe_prefill_s=speed.safe_s(uncached, cached),
        quantile=speed.quantile,
        budget_s=clock.budget_s,
    )
