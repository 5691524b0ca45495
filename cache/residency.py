"""What a replica's KV cache holds, kept by doing here what the engine does with the same requests."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from cache.blocks import are_block_hashes, block_hashes, pack_ids, root_hash
from cache.engine_requests import EngineRequests
from cache.lease import Lease
from cache.prompt_tree import PromptTree
from cache.residency_counts import ResidencyCounts
from cache.resident_prefix import ResidentPrefix, resident_path

__all__ = ["Lease", "Residency", "ResidencyCounts", "ResidentPrefix", "resident_path"]


MOST_UNNAMED = 64
"""Requests that are over and whose answers' blocks events may still name: these come a moment late."""
FIRST_STEP_TOKENS = 2
"""An answer's first token and the one on its way: the events of the step that began it may not have come by then."""
DENIALS = 8
"""So many predicted hits in a row of which the engine reports nothing, and it is taken to reuse no prefixes."""


class Residency:
    """The picture of one replica's prefix cache: least recently used whole blocks, as vLLM keeps them.

    `capacity_blocks` is the engine's `num_gpu_blocks` - 1: it never uses block 0. A request that finds too few free
    blocks waits, first come first served; an answer that finds none sends the latest request back to wait.
    Bounded: a hash for each of the capacity's blocks, and what the unfinished requests hold.

    Changes belong to one thread. Prefixes may be followed in any thread meanwhile: they only ask for membership.
    Raises ValueError for sizes that are not positive.
    """

    def __init__(self, block_size: int, capacity_blocks: int, reuses: bool = True) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self._requests = EngineRequests(block_size, capacity_blocks, reuses, self._grown_unseen)
        self._blocks = self._requests.blocks
        self.told = self._requests.told
        self.steps = self._requests.steps
        self._unnamed: deque[Lease] = deque(maxlen=MOST_UNNAMED)
        self._denied = 0
        self._counts = ResidencyCounts()
        self._engine = 0

    @property
    def reuses(self) -> bool:
        """Whether the engine reuses prefixes at all, as it told or as its reports have shown."""
        return self._requests.reuses

    @property
    def told_all(self) -> bool:
        """Whether the engine's events tell all that it holds; then its reports lead to no conclusions beside them.

        They also tell which requests have begun to run: until then one that was sent to a busy engine waits here.
        """
        return self._requests.told_all

    @told_all.setter
    def told_all(self, told_all: bool) -> None:
        self._requests.told_all = told_all

    @property
    def capacity_blocks(self) -> int:
        return self._blocks.capacity

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds: empty, or with contents that may be evicted."""
        return self._blocks.free

    @property
    def clears(self) -> int:
        """How often all that was held was gone at once: the same as in `counts`, for every request to ask."""
        return self._counts.clears

    def counts(self) -> ResidencyCounts:
        return replace(self._counts, evictions=self._blocks.evictions, resident_blocks=len(self._blocks.resident))

    def prefix(self, salt: str = "", tree: PromptTree | None = None) -> ResidentPrefix:
        """The empty prompt under a salt. Prefixes of several replicas in one `tree` are hashed together.

        A tree of another block size or salt is not used.
        """
        if tree is None or (tree.block_size, tree.salt) != (self.block_size, salt):
            tree = PromptTree(self.block_size, salt)
        resident = self._requests.expected() if self.reuses else ()
        return ResidentPrefix(resident, tree, tree.start)

    def begin(self, token_ids: Sequence[int], salt: str = "", hashes: Sequence[bytes] | None = None) -> Lease:
        """A prompt goes to the engine. Every lease must be ended.

        `hashes` are the prompt's `block_hashes`, where they are at hand. Those of another salt or block size are not
        taken: replicas of one pool may differ in it.
        """
        size, count = self.block_size, len(token_ids)
        if hashes is None or not are_block_hashes(hashes, token_ids, size, salt):
            hashes = block_hashes(token_ids, size, salt)
        return self._begin(count, hashes, root_hash(size, salt), pack_ids(token_ids[count // size * size :]))

    def begin_hashed(self, tokens: int, hashes: Sequence[bytes]) -> Lease:
        """A prompt goes to the engine of which only these are known: its length and the hashes of its whole blocks.

        The ids behind its last whole block stay unknown, and with them the block that its answer completes. Every
        lease must be ended. Raises ValueError where there are not as many hashes as whole blocks.
        """
        size = self.block_size
        if len(hashes) != tokens // size:
            raise ValueError(f"{len(hashes)} hashes are not those of {tokens} tokens in blocks of {size}")
        return self._begin(tokens, hashes, b"", b"" if hashes and tokens % size == 0 else None)

    def generated(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """The answer began, or grew by these tokens: they fill further blocks. The latest is not computed yet."""
        if self._live(lease):
            if token_ids:
                self._requests.runs(lease)
            lease.append(token_ids)
            self._requests.grown(lease)

    def generated_unknown(self, lease: Lease, tokens: int) -> None:
        """The answer grew by so many tokens whose ids are not known: they take blocks that nothing can hit."""
        if self._live(lease):
            self._requests.runs(lease)
            lease.append_unknown(tokens)
            self._requests.grown(lease)

    def answered(self, lease: Lease, tokens: int, token_ids: Sequence[int] | None = None) -> None:
        """The answer has so many tokens by now, however it was told of before; `token_ids` are all of its ids.

        While it runs, the token that the engine is at counts as well: the block for the one before it is taken.

        An answer may also be named after the lease's end: what is not evicted yet can be hit from then on. One token
        more than ids is the end token, which is never computed.
        """
        if lease.engine != self._engine:
            return
        if not lease.ended and tokens > FIRST_STEP_TOKENS:
            self._requests.runs(lease)
        first = lease.known
        if not lease.ended:
            lease.append_unknown(max(0, lease.prompt_tokens + tokens - lease.tokens))
        if token_ids is not None:
            lease.name_answer(token_ids)
        self._requests.name(lease, first)
        if not lease.ended:
            self._requests.grown(lease)

    def stored(self, parent: bytes, key: bytes, packed_block: bytes) -> None:
        """The engine tells that it holds a block: one of a running answer, or of a request that was not seen here."""
        if not self.told.stored(key):
            return
        lease = self._growing(parent, packed_block)
        if lease is None:
            self._blocks.insert(key, next_evicted=False)
            return
        if not lease.ended:
            self._requests.runs(lease)
        first = lease.known
        lease.name_block(key)
        self._requests.name(lease, first)
        if not lease.ended:
            self._requests.grown(lease)

    def removing(self, key: bytes) -> None:
        """The engine is about to tell that it evicted a block.

        A request never evicts what it hits. So one that begins in this step, and has this block in its prompt, came
        too late for it.
        """
        if self._requests.waiting and self._requests.waiting.first_with(key) is not None:
            self.told.removed(key)

    def storing(self, key: bytes) -> None:
        """The engine is about to tell that it holds a block, and what it evicted for it: somebody has begun to run.

        What this picture does not hold can only be computed by a request that has begun since; the first that waits
        for it is taken to be that one, and those that were sent before it have begun before it.
        """
        if self._requests.waiting and key not in self._blocks.resident:
            lease = self._requests.waiting.first_with(key)
            if lease is not None:
                self._requests.runs(lease)

    def ran_unknown(self, tokens: int) -> None:
        """A request whose ids are not known has run and is over: blocks for so many uncached tokens were evicted."""
        self._requests.ran_unknown(tokens)

    def end(self, lease: Lease) -> None:
        """The request is over, answered or abandoned; ending it again, or after `clear`, does nothing.

        One for which neither `generated` nor `reconcile` was called was abandoned before its first token. How much of
        it was computed is not known, so nothing of it is believed to be resident that was not before.
        """
        self.steps.over(lease)
        if not self._live(lease):
            lease.ended = True
            return
        self._requests.leave(lease)
        if lease.ran and lease.known < len(lease.blocks):
            self._unnamed.append(lease)

    def reconcile(self, lease: Lease, cached_tokens: int | None) -> None:
        """The engine's word on a prompt that it computed, once per lease; None, where it gives none, is not counted.

        When it had less than predicted, the first block that it lacked had been evicted, and with it all that was
        released before: these are dropped. The prompt's own blocks stay, for it has just computed them. When it had
        more, nothing is invented.
        """
        if self._live(lease):
            self._requests.runs(lease)
        lease.ran = True
        if cached_tokens is None or lease.reconciled or lease.engine != self._engine:
            return
        lease.reconciled = True
        if cached_tokens:
            self._requests.reuses, self._denied = True, 0
        elif lease.cached_tokens:
            self._denied += 1
            self._requests.reuses = self.reuses and self._denied < DENIALS
        counts, predicted = self._counts, lease.cached_tokens
        lacking = cached_tokens < predicted and not self.told_all
        dropped = self._drop_evicted_before(lease, cached_tokens) if lacking else 0
        self._counts = replace(
            counts,
            exact=counts.exact + (cached_tokens == predicted),
            over=counts.over + (cached_tokens < predicted),
            under=counts.under + (cached_tokens > predicted),
            predicted_tokens=counts.predicted_tokens + predicted,
            reported_tokens=counts.reported_tokens + cached_tokens,
            dropped_blocks=counts.dropped_blocks + dropped,
        )

    def clear(self) -> None:
        """The engine was restarted or its cache reset. Leases of before no longer change anything."""
        self._engine += 1
        self._requests.clear()
        self._unnamed.clear()
        self._counts = replace(self._counts, clears=self._counts.clears + 1)

    def _begin(self, tokens: int, hashes: Sequence[bytes], root: bytes, tail: bytes | None) -> Lease:
        lease = Lease(
            block_size=self.block_size,
            engine=self._engine,
            root=root,
            prompt_tokens=tokens,
            cached_tokens=0,
            hashes=list(hashes),
            known=len(hashes),
            tail=tail,
            tokens=tokens,
        )
        self._requests.enter(lease)
        return lease

    def _live(self, lease: Lease) -> bool:
        return lease.engine == self._engine and not lease.ended

    def _grown_unseen(self, lease: Lease, tokens: int) -> None:
        """Events would tell it better."""
        if not self.told_all and lease in self._requests.running:
            self.answered(lease, tokens)

    def _growing(self, parent: bytes, packed_block: bytes) -> Lease | None:
        """The request whose answer fills this block: one in flight, or one that ended before the event came."""
        leases: list[Lease] = [*self._requests.running, *self._requests.waiting, *reversed(self._unnamed)]
        for lease in leases:
            if lease.parent == parent and packed_block.startswith(lease.tail or b""):
                return lease
        return None

    def _drop_evicted_before(self, lease: Lease, cached_tokens: int) -> int:
        first_missing = cached_tokens // self.block_size
        released = lease.released[first_missing] if lease.released else 0
        return self._blocks.drop_up_to(released)
