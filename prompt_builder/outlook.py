"""A replica as the planner sees it at one moment: how fast, how busy, and what it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from latency.speed import SpeedEstimate


class Prefix(Protocol):
    """A prompt's beginning, followed through the blocks that a replica holds. Immutable; cheap to branch.

    Nothing is hashed any more once the first block that is not resident has been met.
    """

    @property
    def tokens(self) -> int:
        """Length so far."""

    @property
    def resident_tokens(self) -> int:
        """Leading tokens in resident whole blocks."""

    def extended(self, token_ids: Sequence[int]) -> "Prefix": ...

    def cached_tokens(self) -> int:
        """What the engine would reuse of a prompt that ends here: whole blocks of all tokens but the last."""


@dataclass(frozen=True, slots=True)
class NothingHeld:
    """The prefix (a Prefix) on a replica of whose cache nothing is known: none of it is resident."""

    tokens: int = 0
    resident_tokens: int = 0

    def extended(self, token_ids: Sequence[int]) -> "NothingHeld":
        return NothingHeld(self.tokens + len(token_ids))

    def cached_tokens(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """`queue_s` gives the predicted wait in seconds before a prefill of so many seconds would start.

    `prefix` is the empty prompt under the tenant's salt. `speed` None: nothing is known, nothing is predicted.
    `decoding` answers are being decoded, beside which the prefill will run.
    """

    name: str
    speed: SpeedEstimate | None
    queue_s: Callable[[float], float]
    prefix: Prefix
    decoding: int = 0


@dataclass(frozen=True, slots=True)
class Clock:
    """What a plan may take, seconds: the budget counted from the request's arrival, and what is gone of it.

    `spent_s` is the gateway's own time: what has passed, and what planning and rendering are expected to take.
    """

    budget_s: float | None
    spent_s: float
