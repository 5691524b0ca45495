"""Orders of chunks to compare with: a greedy walk down the tree of resident prompts, and what nobody can know."""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache.residency import Residency
from prompt_builder.outlook import Prefix

Chunk = tuple[str, int]
"""Label and tokens."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a question's prompt holds: `front` tokens before its chunks and `tail` behind them."""

    front: int
    chunks: frozenset[Chunk]
    tail: int

    @property
    def tokens(self) -> int:
        return self.front + sum(tokens for _, tokens in self.chunks) + self.tail


@dataclass(slots=True)
class GreedyWalk:
    """Which chunks an engine holds behind which, by labels and tokens, as much as it has room for.

    From the root, the child with the most resident tokens is taken at each step; what continues nothing comes last,
    in the order given.
    """

    residency: Residency
    _lengths: dict[str, int] = field(default_factory=dict)

    def order(self, front: int, chunks: Sequence[Chunk]) -> list[str]:
        """`chunks` are given most relevant first; `front` tokens come before them in every prompt."""
        self._lengths |= dict(chunks)
        prefix: Prefix = self.residency.prefix().extended(_ids("front", front))
        left, ordered = [label for label, _ in chunks], list[str]()
        while left:
            steps = [prefix.extended(_ids(label, self._lengths[label])) for label in left]
            best = max(range(len(left)), key=lambda place: (steps[place].resident_tokens, -place))
            if steps[best].resident_tokens == prefix.resident_tokens:
                break
            prefix = steps[best]
            ordered.append(left.pop(best))
        ordered += left
        self.sent(front, [(label, self._lengths[label]) for label in ordered])
        return ordered

    def sent(self, front: int, chunks: Iterable[Chunk]) -> int:
        """A prompt goes out in this order; the tokens that it finds."""
        ids = [token_id for label, tokens in chunks for token_id in _ids(label, tokens)]
        lease = self.residency.begin([*_ids("front", front), *ids])
        self.residency.generated(lease, ())
        self.residency.end(lease)
        return lease.cached_tokens


def _ids(name: str, tokens: int) -> tuple[int, ...]:
    first = zlib.crc32(name.encode()) >> 12
    return tuple(first * 2048 + place for place in range(tokens))


def uncached_if_all_were_known(prompts: Sequence[Wanted], block_size: int) -> float:
    """Mean uncached tokens with an order that was chosen with all prompts known beforehand, in an unlimited cache.

    Every prompt's chunks are put into one tree, from the root on the chunk first that saves the most tokens among the
    prompts that have come this way. A heuristic, but a good one: no order that is chosen as prompts come has done
    better in these benches.
    """
    orders = dict(_planted(list(enumerate(prompts)), ()))
    walk = GreedyWalk(Residency(block_size, 1 << 20))
    uncached = 0
    for place, prompt in enumerate(prompts):
        cached = walk.sent(prompt.front, orders[place])
        uncached += prompt.tokens - cached
    return uncached / len(prompts)


def uncached_at_any_position(prompts: Sequence[Wanted]) -> float:
    """Mean uncached tokens if a chunk once computed could be reused wherever it stands: no order passes that."""
    seen: set[str] = set()
    uncached = 0
    for prompt in prompts:
        uncached += prompt.tail + sum(tokens for label, tokens in prompt.chunks if label not in seen)
        seen |= {label for label, _ in prompt.chunks}
    return uncached / len(prompts)


def _planted(
    prompts: Sequence[tuple[int, Wanted]], path: tuple[Chunk, ...]
) -> Iterable[tuple[int, tuple[Chunk, ...]]]:
    """The place of each prompt with the order of its chunks, of which those of `path` stand first."""
    left = list(prompts)
    while left:
        counts = Counter(chunk for _, prompt in left for chunk in prompt.chunks.difference(path))
        if not counts:
            yield from ((place, path) for place, _ in left)
            return
        first = max(counts, key=lambda chunk: ((counts[chunk] - 1) * chunk[1], counts[chunk], chunk))
        yield from _planted([(place, prompt) for place, prompt in left if first in prompt.chunks], (*path, first))
        left = [(place, prompt) for place, prompt in left if first not in prompt.chunks]
