"""How the prompts of `bench.routing` come to be: passages as a RAG application found them, or in our order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.routed_traffic import BLOCK_TOKENS, Asked
from cache.hash_memo import HashMemo
from cache.prompt_tree import PromptTree
from cache.resident_prefix import ResidentPrefix, resident_path
from gateway.runs import Work
from prompt_builder.companions import Companions
from prompt_builder.order import reuse_order
from prompt_builder.outlook import Outlook, Prefix

KEY = b"one tenant"
# As the planner looks before it plans exactly (`prompt_builder.shortlist`).
_TRIES = 32


class Shown(Protocol):
    """A replica that can be asked what it is like."""

    def outlook(self, tree: PromptTree) -> Outlook: ...


class Writing(Protocol):
    def tree(self, asked: Asked) -> PromptTree:
        """In which all replicas are asked about one request."""

    def held(self, asked: Asked, place: Shown, tree: PromptTree) -> int:
        """Tokens that this replica is believed to hold of the prompt as it would be written for it."""

    def written(self, asked: Asked, place: Shown, tree: PromptTree) -> Work:
        """The prompt for this replica."""

    def sent(self, asked: Asked) -> None:
        """One of the prompts was sent."""


class Retrieved:
    """The same prompt for every replica, made before one was chosen: passages most relevant first."""

    def tree(self, asked: Asked) -> PromptTree:
        tree = PromptTree(BLOCK_TOKENS)
        tree.hashed(asked.ids, asked.hashes)
        return tree

    def held(self, asked: Asked, place: Shown, tree: PromptTree) -> int:
        return place.outlook(tree).prefix.extended(asked.ids).cached_tokens()

    def written(self, asked: Asked, place: Shown, tree: PromptTree) -> Work:
        return Work(len(asked.ids), asked.ids, asked.hashes, None, None)

    def sent(self, asked: Asked) -> None: ...


@dataclass(slots=True)
class Ordered:
    """The gateway's own: passages that continue what the replica holds first, the others as `order` says."""

    companions: Companions = field(default_factory=Companions)
    memo: HashMemo = field(default_factory=HashMemo)

    def tree(self, asked: Asked) -> PromptTree:
        return PromptTree(BLOCK_TOKENS, memo=self.memo)

    def held(self, asked: Asked, place: Shown, tree: PromptTree) -> int:
        prefix: Prefix = place.outlook(tree).prefix.extended(asked.front)
        if isinstance(prefix, ResidentPrefix):
            pieces = [piece.token_ids for piece in asked.passages]
            for at in resident_path(prefix, pieces, _TRIES):
                prefix = prefix.extended(pieces[at])
        return min(prefix.resident_tokens, len(asked.ids) - 1)

    def written(self, asked: Asked, place: Shown, tree: PromptTree) -> Work:
        ids = self.ordered(asked, place.outlook(tree).prefix)
        return Work(len(ids), ids, self.memo.block_hashes(ids, BLOCK_TOKENS), None, None)

    def ordered(self, asked: Asked, nothing: Prefix) -> tuple[int, ...]:
        """`nothing`: the empty prompt on the replica."""
        if len(asked.passages) < 2:
            return asked.ids
        past = self.companions.of(KEY)
        places = reuse_order(asked.passages, nothing.extended(asked.front), past)
        return joined(asked.front, *(asked.passages[place].token_ids for place in places), asked.rest)

    def sent(self, asked: Asked) -> None:
        self.companions.observe(KEY, [(piece.label, piece.tokens) for piece in asked.passages])


def joined(*parts: Sequence[int]) -> tuple[int, ...]:
    ids: list[int] = []
    for part in parts:
        ids += part
    return tuple(ids)
