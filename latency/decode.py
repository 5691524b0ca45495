"""The time per output token, from recent answers."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from latency.conformal import conformal_factor

WINDOW = 100
LEAST_ANSWERS = 3
LEAST_TOKENS = 2


class DecodeRate:
    """The last 100 answers' seconds per token after the first: their median, and the conformal quantile."""

    def __init__(self, token_seconds: Iterable[float] = ()) -> None:
        self._token_s = deque(token_seconds, maxlen=WINDOW)

    def observe(self, output_tokens: int, seconds: float) -> None:
        """Answers of fewer than two tokens say nothing about the rate and are passed over."""
        if output_tokens >= LEAST_TOKENS:
            self._token_s.append(seconds / output_tokens)

    @property
    def token_seconds(self) -> tuple[float, ...]:
        return tuple(self._token_s)

    @property
    def token_s(self) -> float | None:
        return float(np.median(self._token_s)) if len(self._token_s) >= LEAST_ANSWERS else None

    def safe_token_s(self, quantile: float) -> float | None:
        token_s = self.token_s
        if token_s is None:
            return None
        return token_s * conformal_factor(np.array(self._token_s) / token_s, quantile)
