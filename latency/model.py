"""The prefill cost model of a replica."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds of prefill: a + b·u + g·u·(c + u/2), with u uncached and c cached prompt tokens.

    The first term is a request's fixed cost, the second the work in the weights, the third attention over
    what is already there. On the packaged model and two cores a = 26.6 ms, b = 1.13 ms, g = 0.93 µs.
    """

    fixed_s: float
    per_token_s: float
    per_pair_s: float

    def predict_s(self, uncached_tokens: int, cached_tokens: int = 0) -> float:
        u, c = uncached_tokens, cached_tokens
        return self.fixed_s + self.per_token_s * u + self.per_pair_s * u * (c + u / 2)


CPU_135M = PrefillModel(fixed_s=0.0266, per_token_s=0.00113, per_pair_s=0.93e-6)
