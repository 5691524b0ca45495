"""The blocks of an engine's KV cache: which contents they hold, and which of them is evicted next."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

UNKNOWN = b""
"""The key of a block whose content is computed but not known here: nothing can hit it."""


@dataclass(slots=True, eq=False)
class Block:
    """A block with content. `references` counts the running requests that use it.

    `released` is the turn in which it last joined the eviction queue: of two blocks in the queue the lower one is
    evicted first. `told` marks one that no request seen here has used: only the engine's word stands for it. One of
    unknown content may stand for as many as `alike` says, released one after the other and the last in this turn.
    """

    key: bytes
    references: int = 1
    released: int = 0
    told: bool = False
    alike: int = 1

    @property
    def first_released(self) -> int:
        """The turn of the first of those that it stands for."""
        return self.released - self.alike + 1


class BlockQueue:
    """What vLLM's block pool does, without the blocks' numbers.

    A free block without content is taken first, then the least recently released one with content. Two blocks may
    hold the same content (the engine does not merge them); the older one is hit. Blocks with content are kept in
    memory, so at most `capacity`; the empty ones are only counted. Not safe for writers in several threads;
    membership of `resident` may be read from any.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self.capacity = capacity
        self.evictions = 0
        self.resident: dict[bytes, Block] = {}
        self._copies: dict[bytes, list[Block]] = {}
        self._queue: OrderedDict[Block, None] = OrderedDict()
        self._queued = 0
        self._empty = capacity
        self._turn = 0
        self.on_eviction: Callable[[bytes], None] | None = None
        """Told the key of each content that left because its block was needed."""

    def clear(self) -> None:
        """As a new engine: nothing is held, nothing is in use."""
        self.resident.clear()
        self._copies.clear()
        self._queue.clear()
        self._queued = 0
        self._empty = self.capacity

    @property
    def free(self) -> int:
        return self._empty + self._queued

    def hits(self, keys: Sequence[bytes]) -> list[Block]:
        """The blocks that hold the leading keys, up to the first that none holds."""
        # A long prompt has thousands: these and `idle` are asked for without a step of Python for each.
        found: Iterator[Any] = takewhile(bool, map(self.resident.get, keys))
        return list(found)

    def idle(self, blocks: Sequence[Block]) -> int:
        """How many of the blocks wait in the queue."""
        return list(map(attrgetter("references"), blocks)).count(0)

    def use(self, blocks: Sequence[Block]) -> None:
        """One more running request uses these blocks: they leave the queue."""
        queue, before = self._queue, len(self._queue)
        for block in blocks:
            if block.references:
                block.references += 1
            else:
                del queue[block]
                block.told = False
                block.references = 1
        # No block that can be hit stands for several.
        self._queued -= before - len(queue)

    def take(self, count: int) -> None:
        """Free blocks for a running request, empty until `fill` says what they hold. `count` must be free."""
        empty = min(count, self._empty)
        self._empty -= empty
        left = count - empty
        self._queued -= left
        self.evictions += left
        queue, resident, copies, on_eviction = self._queue, self.resident, self._copies, self.on_eviction
        while left:
            block, _none = queue.popitem(last=False)
            if block.alike > left:
                block.alike -= left
                queue[block] = None
                queue.move_to_end(block, last=False)
                return
            left -= block.alike
            key = block.key
            if key == UNKNOWN:
                continue
            if key in copies:
                self._forget(block)
            else:
                # As `_forget` does: nearly all, and a long prompt evicts thousands.
                del resident[key]
            if on_eviction is not None:
                on_eviction(key)

    def run_through(self, count: int) -> None:
        """A request of unknown content takes so many free blocks, fills and releases them. `count` must be free."""
        if count <= 0:
            return
        self.take(count)
        self._turn += count
        self._queue[Block(UNKNOWN, references=0, released=self._turn, alike=count)] = None
        self._queued += count

    def fill(self, key: bytes) -> Block:
        """One of the blocks that were taken is computed and holds `key`."""
        block = Block(key)
        if key != UNKNOWN and self.resident.setdefault(key, block) is not block:
            self._copies.setdefault(key, []).append(block)
        return block

    def name(self, block: Block, key: bytes) -> None:
        """What a block of unknown content holds is known after all. One that was evicted since stays so."""
        if key == UNKNOWN or (not block.references and block not in self._queue):
            return
        block.key = key
        if key in self.resident:
            self._copies.setdefault(key, []).append(block)
        else:
            self.resident[key] = block

    def release(self, blocks: Sequence[Block], empty: int) -> None:
        """A request is over: its blocks in prompt order, and the number of those that it took and never filled.

        The tail goes first, so that it is evicted before what it depends on.
        """
        for block in reversed(blocks):
            block.references -= 1
            if not block.references:
                self._turn += 1
                block.released = self._turn
                self._queue[block] = None
                self._queued += 1
        self._empty += empty

    def discard(self, blocks: Sequence[Block]) -> None:
        """A request is over that never computed these blocks: they are empty, unless another request uses them."""
        for block in blocks:
            block.references -= 1
            if not block.references:
                self._forget(block)
                self._empty += 1

    def insert(self, key: bytes, *, next_evicted: bool) -> None:
        """A free block holds `key`, as the engine tells: released just now, or before all others."""
        if not self.free or key == UNKNOWN or key in self.resident:
            return
        self.take(1)
        block = self.fill(key)
        block.told = True
        self.release([block], 0)
        if next_evicted:
            block.released = min(block.released, next(iter(self._queue)).first_released)
            self._queue.move_to_end(block, last=False)

    def drop(self, key: bytes) -> int:
        """The blocks of the queue that hold `key` are empty after all; how many these were."""
        held = [block for block in (self.resident.get(key), *self._copies.get(key, ())) if block is not None]
        return sum(map(self._drop, [block for block in held if not block.references]))

    def drop_where(self, unwanted: Callable[[Block], bool]) -> int:
        """Blocks of the queue of which `unwanted` is true are empty after all; how many these were."""
        return sum(map(self._drop, [block for block in self._queue if unwanted(block)]))

    def drop_up_to(self, released: int) -> int:
        """Blocks of the queue that were released in this turn or before are empty after all; how many these were."""
        dropped = 0
        while self._queue and (block := next(iter(self._queue))).first_released <= released:
            if block.released <= released:
                dropped += self._drop(block)
            else:
                count = released - block.first_released + 1
                block.alike -= count
                self._emptied(count)
                dropped += count
        return dropped

    def _drop(self, block: Block) -> int:
        """A block of the queue is empty; how many it stood for."""
        del self._queue[block]
        self._forget(block)
        self._emptied(block.alike)
        return block.alike

    def _emptied(self, count: int) -> None:
        self._queued -= count
        self._empty += count

    def _forget(self, block: Block) -> None:
        key = block.key
        if key == UNKNOWN:
            return
        copies = self._copies.get(key)
        if copies is None:
            del self.resident[key]
            return
        if self.resident[key] is block:
            self.resident[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]
