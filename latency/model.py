"""The prefill cost model of a replica."""

import math
from dataclasses import dataclass

UNBOUNDED_TOKENS = 2**31 - 1


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

    def most_uncached(self, seconds: float, cached_tokens: int = 0) -> int:
        """The most uncached tokens that are predicted to take at most `seconds`; -1 when not even none do."""
        left_s = seconds - self.fixed_s
        if left_s < 0:
            return -1
        linear, square = self.per_token_s + self.per_pair_s * cached_tokens, self.per_pair_s / 2
        if (linear <= 0 and square <= 0) or left_s == math.inf:
            return UNBOUNDED_TOKENS
        # The stable form of the quadratic formula: no difference of nearly equal numbers.
        tokens = int(min(2 * left_s / (linear + math.sqrt(linear * linear + 4 * square * left_s)), UNBOUNDED_TOKENS))
        while tokens > 0 and self.predict_s(tokens, cached_tokens) > seconds:
            tokens -= 1
        return tokens


CPU_135M = PrefillModel(fixed_s=0.0266, per_token_s=0.00113, per_pair_s=0.93e-6)
