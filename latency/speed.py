"""What is known of a replica's speed at one moment, and what it foretells of one request."""

from dataclasses import dataclass
from typing import Literal

from latency.model import PrefillModel

SpeedSource = Literal["kept", "calibrated", "learned"]


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """A fitted prefill model with its spread, and the decode rate.

    `factor` is the conformal quantile of actual / predicted over recent requests: with probability `quantile` a
    prefill takes at most `factor` times its prediction. `token_s` is the time per output token, `safe_token_s` its
    quantile; None until answers have been seen. `source`: kept from an earlier run, from a calibration, or learned
    from requests since. `drifting` while recent requests disagree with the model.
    """

    prefill: PrefillModel
    factor: float
    quantile: float
    samples: int
    source: SpeedSource
    drifting: bool = False
    token_s: float | None = None
    safe_token_s: float | None = None

    def predict_s(self, uncached_tokens: int, cached_tokens: int = 0) -> float:
        """The most likely prefill time, seconds."""
        return self.prefill.predict_s(uncached_tokens, cached_tokens)

    def safe_s(self, uncached_tokens: int, cached_tokens: int = 0) -> float:
        """The prefill time that is kept with probability `quantile`, seconds."""
        return self.factor * self.prefill.predict_s(uncached_tokens, cached_tokens)

    def most_uncached(self, seconds: float, cached_tokens: int = 0) -> int:
        """The most uncached tokens whose `safe_s` is within `seconds`; -1 when not even none are."""
        return self.prefill.most_uncached(seconds / self.factor, cached_tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted TTFT of one prompt on one replica, with its parts. Seconds from the request's arrival.

    `ttft_s` = `gateway_s` + `queue_s` + `prefill_s`; `safe_ttft_s` has the prefill that is kept with probability
    `quantile`. `next_chunk_s` is what one more chunk would have cost, None where none was left out.
    """

    replica: str
    cached_tokens: int
    uncached_tokens: int
    gateway_s: float
    queue_s: float
    prefill_s: float
    safe_prefill_s: float
    quantile: float
    budget_s: float | None = None
    next_chunk_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.gateway_s + self.queue_s + self.prefill_s

    @property
    def safe_ttft_s(self) -> float:
        return self.gateway_s + self.queue_s + self.safe_prefill_s

    @property
    def fits(self) -> bool:
        """Whether the budget is kept with probability `quantile`; True where there is none."""
        return self.budget_s is None or self.safe_ttft_s <= self.budget_s
