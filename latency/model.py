"""The prefill cost model of a replica."""

import math
from collections.abc import Callable
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
        linear, square = self.per_token_s + self.per_pair_s * cached_tokens, self.per_pair_s / 2
        # The stable form of the quadratic formula: no difference of nearly equal numbers.
        divisor = linear + math.sqrt(linear * linear + 4 * square * max(left_s, 0.0))
        near = 2 * left_s / divisor if 0 < left_s < math.inf and divisor > 0 else 0.0
        return most_within(lambda tokens: self.predict_s(tokens, cached_tokens), seconds, near)


def most_within(takes_s: Callable[[int], float], seconds: float, near: float) -> int:
    """The most tokens with `takes_s(tokens)` ≤ `seconds`, at most UNBOUNDED_TOKENS; -1 when not even none fit.

    `takes_s` never falls as tokens are added. `near` is a guess: the search goes outward from it.
    """
    if not takes_s(0) <= seconds:
        return -1
    fits, too_many = 0, UNBOUNDED_TOKENS + 1
    probe, step = int(min(max(near, 1.0), UNBOUNDED_TOKENS)), 1
    while fits < probe < too_many:
        if takes_s(probe) <= seconds:
            fits, probe = probe, probe + step
        else:
            too_many, probe = probe, probe - step
        step *= 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if takes_s(middle) <= seconds:
            fits = middle
        else:
            too_many = middle
    return fits


CPU_135M = PrefillModel(fixed_s=0.0266, per_token_s=0.00113, per_pair_s=0.93e-6)
