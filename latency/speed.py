"""What is known of a replica's speed at one moment, and what it foretells of one request."""

from dataclasses import dataclass
from typing import Literal

from latency.model import PrefillModel, most_within

SpeedSource = Literal["kept", "calibrated", "learned"]


@dataclass(frozen=True, slots=True)
class SizeFactor:
    """The factor for prefills that are predicted to take at most `up_to_s` seconds and more than the class before."""

    up_to_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What n answers being decoded beside a prefill of u uncached tokens add: fixed + n·(per answer + per token·u).

    Seconds. The first part is the wait for the step that is running, the second the answers' own tokens, the third
    what a prefill pays that takes several steps. `factor` is the conformal quantile of actual / predicted beside
    running answers.
    """

    fixed_s: float
    per_answer_s: float
    per_answer_token_s: float
    factor: float

    def extra_s(self, uncached_tokens: int, decoding: int) -> float:
        if decoding <= 0:
            return 0.0
        return self.fixed_s + decoding * (self.per_answer_s + self.per_answer_token_s * uncached_tokens)


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """A fitted prefill model with its spread, and the decode rate.

    `factor` is the conformal quantile of actual / predicted over recent requests: with probability `quantile` a
    prefill takes at most `factor` times its prediction. `size_factors` says the same by size, ascending, the last one
    up to infinity; where it is empty `factor` holds for all. `token_s` is the time per output token, `safe_token_s`
    its quantile; None until answers have been seen. `source`: kept from an earlier run, from a calibration, or
    learned from requests since. `drifting` while recent requests disagree with the model. `beside` is what running
    answers add; None until some have been seen.
    """

    prefill: PrefillModel
    factor: float
    quantile: float
    samples: int
    source: SpeedSource
    drifting: bool = False
    token_s: float | None = None
    safe_token_s: float | None = None
    size_factors: tuple[SizeFactor, ...] = ()
    beside: DecodeLoad | None = None

    def predict_s(self, uncached_tokens: int, cached_tokens: int = 0, *, decoding: int = 0) -> float:
        """The most likely prefill time beside `decoding` running answers, seconds."""
        idle_s = self.prefill.predict_s(uncached_tokens, cached_tokens)
        return idle_s if self.beside is None else idle_s + self.beside.extra_s(uncached_tokens, decoding)

    def safe_s(self, uncached_tokens: int, cached_tokens: int = 0, *, decoding: int = 0) -> float:
        """The prefill time that is kept with probability `quantile`, seconds. Never falls as tokens are added."""
        idle_s = self._covered_s(self.prefill.predict_s(uncached_tokens, cached_tokens))
        if self.beside is None or decoding <= 0:
            return idle_s
        return max(idle_s, self.beside.factor * self.predict_s(uncached_tokens, cached_tokens, decoding=decoding))

    def most_uncached(self, seconds: float, cached_tokens: int = 0, *, decoding: int = 0) -> int:
        """The most uncached tokens whose `safe_s` is within `seconds`; -1 when not even none are."""
        near = self.prefill.most_uncached(seconds / self.factor, cached_tokens)
        return most_within(lambda tokens: self.safe_s(tokens, cached_tokens, decoding=decoding), seconds, near)

    def _covered_s(self, predicted_s: float) -> float:
        """`predicted_s` times its class's factor, and at least what the classes below reach: so it never falls."""
        if not self.size_factors:
            return self.factor * predicted_s
        reached_s = 0.0
        for size in self.size_factors:
            if predicted_s <= size.up_to_s:
                return max(reached_s, size.factor * predicted_s)
            reached_s = max(reached_s, size.factor * size.up_to_s)
        return max(reached_s, self.size_factors[-1].factor * predicted_s)


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
