"""How predictions of cached tokens have met the engine's reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidencyCounts:
    """What was predicted and what the engine said, since the start; `resident_blocks` is of now.

    `over`: the engine had less than predicted; `under`: it had more. `dropped_blocks` were believed resident until
    the engine's report said otherwise. The sums of tokens are over the predictions that were reported on.
    """

    exact: int = 0
    over: int = 0
    under: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    dropped_blocks: int = 0
    evictions: int = 0
    clears: int = 0
    resident_blocks: int = 0

    @property
    def predictions(self) -> int:
        return self.exact + self.over + self.under
