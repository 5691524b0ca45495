"""The requests at one engine: those that run in the blocks of its KV cache, and those that wait for them."""

from collections.abc import Callable, Container
from itertools import takewhile
from operator import attrgetter

from cache.block_queue import UNKNOWN, Block, BlockQueue
from cache.decode_steps import DecodeSteps
from cache.lease import Lease
from cache.told_blocks import ToldBlocks
from cache.waiting_line import WaitingLine


class EngineRequests:
    """Admits requests as vLLM's scheduler does, first come first served.

    One that finds too few free blocks waits; an answer that finds none sends the latest request back to wait.
    `grown_unseen` is told how many tokens an answer that comes whole has by now, as it begins a block. Bounded by the
    requests in flight. Leases that are over, or of before `clear`, are not for here.
    """

    def __init__(
        self, block_size: int, capacity_blocks: int, reuses: bool, grown_unseen: Callable[[Lease, int], None]
    ) -> None:
        self.block_size = block_size
        self.reuses = reuses
        self.told_all = False
        """Whether the engine's events tell who has begun to run: until then one sent to a busy engine waits here."""
        self.blocks = BlockQueue(capacity_blocks)
        self.told = ToldBlocks(self.blocks)
        self.steps = DecodeSteps(grown_unseen)
        self.running: dict[Lease, None] = {}
        self.waiting = WaitingLine()

    def clear(self) -> None:
        """As a new engine."""
        self.blocks.clear()
        self.told.clear()
        self.steps.clear()
        self.running.clear()
        self.waiting.clear()

    def expected(self) -> Container[bytes]:
        """What is held, and what requests that wait will have computed before any that is sent now."""
        held: Container[bytes] = self.blocks.resident
        return self.waiting.with_theirs(held) if self.told_all and self.waiting else held

    def enter(self, lease: Lease) -> None:
        """A new one gets its blocks at once or in its turn; until then its cached tokens are foretold."""
        if not self.waiting and not (self.told_all and self.running):
            # One that is admitted at once, as most are, finds out by that.
            if not self._admit(lease):
                self.waiting.append(lease)
                lease.cached_tokens = self._expected_tokens(lease, self.blocks.resident)
            return
        lease.cached_tokens = self._expected_tokens(lease, self.expected())
        self.waiting.append(lease)
        self._admit_waiting()

    def runs(self, lease: Lease) -> None:
        """The engine has shown that the request runs, and so did those before it."""
        if not self.told_all or lease not in self.waiting:
            return
        for earlier in self.waiting.up_to(lease):
            if earlier.released is None:
                self.told.recall(earlier.hashes)
            self._admit(earlier, with_what_is_free=True)
            self.waiting.leave(earlier)

    def grown(self, lease: Lease) -> None:
        """Its answer has the tokens that the lease tells: they fill blocks, and take further ones."""
        lease.ran = True
        if lease not in self.running:
            return
        lease.computed_tokens = max(lease.computed_tokens, lease.tokens - 1)
        missing = self._blocks_of(lease.computed_tokens) - lease.held
        while missing > self.blocks.free:
            latest = next(reversed(self.running))
            self._vacate(latest)
            self.waiting.prepend(latest)
            if latest is lease:
                return
        self._take(lease, missing)

    def name(self, lease: Lease, first: int) -> None:
        """Blocks that it filled before their content was known, from its `first` on."""
        for block, key in zip(lease.blocks[first : lease.known], lease.hashes[first : lease.known], strict=False):
            if block.key == UNKNOWN:
                self.blocks.name(block, key)

    def leave(self, lease: Lease) -> None:
        """It is over. One that never ran leaves nothing resident that was not so before."""
        if lease.ran:
            self.runs(lease)
        lease.ended = True
        if lease not in self.running:
            self.waiting.leave(lease)
            if lease.ran:
                # The engine had room for it earlier than this picture.
                self._admit(lease, with_what_is_free=True)
        if lease in self.running:
            if not lease.ran:
                self._forget_computed(lease)
            self._vacate(lease)
        self._admit_waiting()

    def ran_unknown(self, tokens: int) -> None:
        """One whose ids are not known has run and is over: blocks for so many uncached tokens were evicted."""
        self.blocks.run_through(min(self._blocks_of(tokens), self.blocks.free))

    def _expected_tokens(self, lease: Lease, held: Container[bytes]) -> int:
        if not self.reuses:
            return 0
        whole = max(0, lease.tokens - 1) // self.block_size
        return len(list(takewhile(held.__contains__, lease.hashes[:whole]))) * self.block_size

    def _admit_waiting(self) -> None:
        """Those who find room, in turn; where events tell who runs, only what comes to an idle engine."""
        told = self.told_all and bool(self.running)
        while self.waiting and not told and self._admit(self.waiting.first):
            self.waiting.leave(self.waiting.first)

    def _admit(self, lease: Lease, with_what_is_free: bool = False) -> bool:
        """Hits are marked in use and the rest is taken; False, and nothing is changed, when too little is free.

        A request that was sent back computes all its tokens again; one that is over never computed its last.
        """
        hits = self._hits(lease)
        computed_tokens = max(lease.prompt_tokens, lease.tokens - 1) if with_what_is_free else lease.tokens
        missing = self._blocks_of(computed_tokens) - len(hits)
        idle = self.blocks.idle(hits)
        free = self.blocks.free - idle
        if missing > free:
            if not with_what_is_free:
                return False
            missing = free
        if lease.released is None:
            lease.cached_tokens = len(hits) * self.block_size
            if idle == len(hits):
                lease.released = tuple(map(attrgetter("released"), hits))
            else:
                lease.released = tuple(0 if block.references else block.released for block in hits)
        self.steps.begins(lease)
        self.blocks.use(hits)
        lease.blocks, lease.computed_tokens = hits, computed_tokens
        self.running[lease] = None
        self._take(lease, missing)
        return True

    def _hits(self, lease: Lease) -> list[Block]:
        """Resident blocks at the beginning of its tokens without the last, which is always computed.

        One that has begun unseen may have more tokens by now than it had then.
        """
        tokens = lease.prompt_tokens if lease.released is None else lease.tokens
        whole = max(0, tokens - 1) // self.block_size if self.reuses else 0
        return self.blocks.hits(lease.hashes[:whole])

    def _take(self, lease: Lease, count: int) -> None:
        self.blocks.take(count)
        lease.empty += count
        filled = len(lease.blocks)
        last = min(lease.computed_tokens // self.block_size, filled + lease.empty)
        if filled < last:
            lease.blocks += map(self.blocks.fill, lease.hashes[filled:last])
            lease.empty -= last - filled

    def _vacate(self, lease: Lease) -> None:
        del self.running[lease]
        self.blocks.release(lease.blocks, lease.empty)
        lease.empty = 0
        if not lease.ended:
            lease.blocks = []

    def _forget_computed(self, lease: Lease) -> None:
        hits = len(lease.released or ())
        self.blocks.discard(lease.blocks[hits:])
        del lease.blocks[hits:]

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
