"""The paged KV cache of an engine: chained block hashes, and an eviction queue as the engine keeps it."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Allocation:
    """The blocks of one running request. `tokens` grows as the answer does."""

    tokens: "array[int]"
    parent: int
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    hashed_blocks: int = 0


class BlockPool:
    """Blocks in use are out of the eviction queue; a finished request gives its tail back first.

    Block 0 is never used, so the capacity is `num_blocks` − 1. Only whole blocks of the prompt without its last
    token can hit, because the last token is always computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything, as a new engine. Not for a pool with running requests: see `reset`."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks))
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._blocks_of: dict[int, OrderedDict[int, None]] = {}

    def reset(self) -> bool:
        """Drop all cached blocks; refused (False) while a request holds blocks."""
        if self._references:
            return False
        self.clear()
        return True

    @property
    def used_blocks(self) -> int:
        """Blocks held by running requests."""
        return len(self._references)

    def start(self, prompt: Sequence[int], salt: str = "") -> Allocation | None:
        """Blocks for a prompt; None when too few are free. They can be hit as `extend` says they are computed."""
        allocation = Allocation(array("q", prompt), hash(("root", salt)))
        size, hits = self.block_size, []
        raw, parent = allocation.tokens.tobytes(), allocation.parent
        for index in range((len(prompt) - 1) // size):
            parent = hash((parent, raw[index * size * 8 : (index + 1) * size * 8]))
            same = self._blocks_of.get(parent)
            if same is None:
                break
            hits.append(next(iter(same)))
            allocation.parent = parent
        wanted = -(-len(prompt) // size) - len(hits)
        if wanted > len(self._free) - sum(block in self._free for block in hits):
            return None
        for block in hits:
            self._free.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
        allocation.blocks = hits
        allocation.hashed_blocks = len(hits)
        allocation.cached_tokens = len(hits) * size
        self._take(allocation, wanted)
        return allocation

    def extend(self, allocation: Allocation, computed_tokens: int) -> bool:
        """The request's first `computed_tokens` are computed; False, and nothing changes, when no block is free."""
        wanted = -(-computed_tokens // self.block_size) - len(allocation.blocks)
        if wanted > len(self._free):
            return False
        if wanted > 0:
            self._take(allocation, wanted)
        self._hash_whole_blocks(allocation, computed_tokens)
        return True

    def release(self, allocation: Allocation) -> None:
        """Give the blocks back: hashed ones to the end of the queue, tail first; others to its front."""
        for block in reversed(allocation.blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)
        allocation.blocks = []

    def _take(self, allocation: Allocation, count: int) -> None:
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            evicted = self._hash_of.pop(block, None)
            if evicted is not None:
                self.evictions += 1
                same = self._blocks_of[evicted]
                del same[block]
                if not same:
                    del self._blocks_of[evicted]
            self._references[block] = 1
            allocation.blocks.append(block)

    def _hash_whole_blocks(self, allocation: Allocation, computed_tokens: int) -> None:
        size = self.block_size
        while allocation.hashed_blocks < computed_tokens // size:
            index = allocation.hashed_blocks
            content = allocation.tokens[index * size : (index + 1) * size].tobytes()
            allocation.parent = hash((allocation.parent, content))
            block = allocation.blocks[index]
            self._hash_of[block] = allocation.parent
            self._blocks_of.setdefault(allocation.parent, OrderedDict())[block] = None
            allocation.hashed_blocks += 1
