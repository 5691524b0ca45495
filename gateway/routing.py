"""Which replica answers a prompt first, as predicted: pure."""

from collections.abc import Sequence

from gateway.runs import Work
from latency.speed import Forecast
from prompt_builder.outlook import Outlook


def foreseen(work: Work, outlook: Outlook) -> Forecast | None:
    """What is predicted of a prompt as it stands on this replica; None where no speed is known.

    The gateway's own time and the budget are those of the forecast that it comes with.
    """
    cached = 0 if work.token_ids is None else outlook.prefix.extended(work.token_ids).cached_tokens()
    planned = work.forecast
    return forecast_of(
        outlook,
        work.tokens - cached,
        cached,
        gateway_s=0.0 if planned is None else planned.gateway_s,
        budget_s=None if planned is None else planned.budget_s,
    )


def forecast_of(
    outlook: Outlook, uncached: int, cached: int, *, gateway_s: float, budget_s: float | None
) -> Forecast | None:
    speed = outlook.speed
    if speed is None:
        return None
    prefill_s = speed.predict_s(uncached, cached, decoding=outlook.decoding)
    return Forecast(
        replica=outlook.name,
        cached_tokens=cached,
        uncached_tokens=uncached,
        gateway_s=gateway_s,
        queue_s=outlook.queue_s(prefill_s),
        prefill_s=prefill_s,
        safe_prefill_s=speed.safe_s(uncached, cached, decoding=outlook.decoding),
        quantile=speed.quantile,
        budget_s=budget_s,
    )


def least_ttft(forecasts: Sequence[Forecast | None]) -> Forecast | None:
    """The first of the least: the order of the replicas breaks ties. None where nothing is predicted of any."""
    known = [forecast for forecast in forecasts if forecast is not None]
    return min(known, key=lambda forecast: forecast.ttft_s, default=None)
