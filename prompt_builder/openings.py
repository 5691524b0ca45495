"""Prompts up to their question, rendered: those of long conversations are kept, for the next turn goes on there."""

from dataclasses import dataclass
from threading import Lock

from prompt_builder.types import Plan, Prompt, Role

LEAST_TOKENS = 4096
"""A shorter opening is rendered sooner than it is worth the memory."""
MOST_TOKENS = 1_000_000
"""Of all that are kept, about 18 bytes each beside the texts. Those that were used last stay."""
MOST_OPENINGS = 32


@dataclass(frozen=True, slots=True)
class Opening:
    """All of a prompt before its question's own pieces, rendered under a salt.

    `roles` are those of its messages, `pieces` the scaffolding of these with a question behind them: the last one
    stands behind the question and is not in the `prompt`, which has token ids and the hashes of its own whole blocks.
    """

    plan: Plan
    salt: str
    prompt: Prompt
    roles: tuple[Role, ...]
    pieces: tuple[str, ...]

    def begins(self, plan: Plan, salt: str) -> bool:
        """Whether the prompt of the plan is this one, a question and what stands before that."""
        return self.goes_on(plan, salt) and len(plan.past) == len(self.plan.past)

    def goes_on(self, plan: Plan, salt: str) -> bool:
        """Whether the prompt of the plan begins with this one, but for scaffolding: the past may be longer."""
        own = self.plan
        count = len(own.past)
        # Most others of a tenant differ in their last message: it is looked at first.
        if count > len(plan.past) or (count and own.past[-1].content != plan.past[count - 1].content):
            return False
        return (
            salt == self.salt
            and own.instructed == plan.instructed
            and own.rendering == plan.rendering
            and own.system == plan.system
            and own.summary == plan.summary
            and _as_rendered(own, count) == _as_rendered(plan, count)
        )


class Openings:
    """The openings of the conversations that were used last. Usable from any thread."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_openings: int = MOST_OPENINGS) -> None:
        self._most_tokens = most_tokens
        self._most_openings = most_openings
        self._kept: list[Opening] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """Of all that are kept."""
        return sum(opening.prompt.tokens for opening in self._kept)

    def of(self, plan: Plan, salt: str) -> Opening | None:
        """The longest one that the prompt of the plan goes on from."""
        with self._lock:
            kept = list(self._kept)
        found = [opening for opening in kept if opening.goes_on(plan, salt)]
        return max(found, key=lambda opening: opening.prompt.tokens, default=None)

    def keep(self, made: Opening, instead_of: Opening | None = None) -> Opening:
        """The opening itself, which is the one used last from now on."""
        if made.prompt.tokens >= LEAST_TOKENS:
            with self._lock:
                self._kept = [made, *(kept for kept in self._kept if kept is not instead_of)][: self._most_openings]
                while self.tokens > self._most_tokens:
                    self._kept.pop()
        return made


def _as_rendered(plan: Plan, count: int) -> tuple[object, ...]:
    """The first so many messages, those that are stripped without what stood before them."""
    stripped = min(count, plan.stripped)
    return (*((message.role, message.content) for message in plan.past[:stripped]), *plan.past[stripped:count])
