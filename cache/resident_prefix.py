"""A prompt that grows piece by piece, followed through the blocks that a replica holds."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from cache.prompt_tree import PromptTree, Stretch

MOST_TRIES = 256
"""Pieces that `resident_path` looks at, at most: a microsecond or two each where nothing is resident."""


@dataclass(frozen=True, slots=True)
class ResidentPrefix:
    """A prompt's beginning and how much of it is resident. Made by `Residency.prefix`.

    `tokens` is its length, `resident_tokens` the leading tokens in resident whole blocks. `stretch` is its last one
    in the request's `tree`, in which blocks are hashed once for all replicas. Once a block has been met that is not
    resident, `broken` says so and nothing is looked up any more. What is read may be a moment old; a tree is
    followed in one thread at a time.
    """

    resident: Container[bytes] = field(compare=False)
    tree: PromptTree = field(compare=False)
    stretch: Stretch = field(compare=False)
    tokens: int = 0
    resident_tokens: int = 0
    broken: bool = False

    @property
    def block_size(self) -> int:
        """In tokens."""
        return self.tree.block_size

    def extended(self, token_ids: Sequence[int]) -> "ResidentPrefix":
        """This prompt with more tokens behind it. Whole blocks are hashed up to the first that is not resident."""
        resident, tree, resident_tokens = self.resident, self.tree, self.resident_tokens
        if self.broken:
            tokens = self.tokens + len(token_ids)
            return ResidentPrefix(resident, tree, self.stretch, tokens, resident_tokens, True)
        stretch = tree.behind(self.stretch, token_ids)
        blocks = stretch.blocks
        found = stretch.resident_blocks(resident) if blocks else 0
        resident_tokens += found * tree.block_size
        return ResidentPrefix(resident, tree, stretch, stretch.tokens, resident_tokens, found < blocks)

    def cached_tokens(self) -> int:
        """What the engine would reuse of a prompt that ends here: the last token is always computed."""
        whole = max(0, self.tokens - 1) // self.block_size * self.block_size
        return min(self.resident_tokens, whole)


def resident_path(
    prefix: ResidentPrefix, pieces: Sequence[Sequence[int]], most_tries: int = MOST_TRIES
) -> tuple[int, ...]:
    """Which pieces, in which order, continue the prefix with the most resident tokens; empty when none does.

    Follows every order that stays resident, depth first, and tries at most `most_tries` extensions: the answer is the
    best within these, which is the best of all unless many orders of the pieces are resident at once. A piece that is
    only partly resident can come last. Of two paths with equally many tokens the shorter one, then the first found.
    """
    search = _PathSearch(pieces, most_tries, prefix.resident_tokens)
    search.follow(prefix, (), sum(map(len, pieces)))
    return search.best


class _PathSearch:
    def __init__(self, pieces: Sequence[Sequence[int]], most_tries: int, resident_tokens: int) -> None:
        self._pieces = pieces
        self._tries_left = most_tries
        self._most_tokens = resident_tokens
        self.best: tuple[int, ...] = ()

    def follow(self, prefix: ResidentPrefix, path: tuple[int, ...], tokens_left: int) -> None:
        """`tokens_left` are those of the pieces that are not in the path: with all of them it gets no deeper."""
        size = prefix.block_size
        if prefix.broken or (prefix.tokens + tokens_left) // size * size <= self._most_tokens:
            return
        steps = []
        for index, piece in enumerate(self._pieces):
            if index in path or not piece:
                continue
            if not self._tries_left:
                break
            self._tries_left -= 1
            step = prefix.extended(piece)
            if step.broken and step.resident_tokens == prefix.resident_tokens:
                continue
            steps.append((step, (*path, index)))
        # Deepest first: should the tries run out, the greedy path has been followed.
        steps.sort(key=lambda step: -step[0].resident_tokens)
        for step, longer in steps:
            if step.resident_tokens > self._most_tokens:
                self._most_tokens, self.best = step.resident_tokens, longer
        for step, longer in steps:
            self.follow(step, longer, tokens_left - len(self._pieces[longer[-1]]))
