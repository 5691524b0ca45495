"""A running request as the block cache sees it: contents known block by block, and the blocks that it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.block_queue import UNKNOWN, Block
from cache.blocks import ID_BYTES, child_hash, pack_ids


@dataclass(slots=True, eq=False)
class Lease:
    """Made and changed by `Residency` only; others read `prompt_tokens`, `cached_tokens` and `tokens`.

    `cached_tokens` is what the engine is predicted to report of the prompt; it may change while the request waits for
    free blocks. `hashes` are the contents of the whole blocks of all `tokens`, `root` the parent of the first, `tail`
    the packed ids behind the last; `computed_tokens` of them are in the cache or about to be. `blocks` are those that
    it holds with their contents, in order; `empty` counts those that are not filled yet. `released` tells when its
    hits had last been released, 0 for those in use.
    """

    block_size: int
    engine: int
    root: bytes
    prompt_tokens: int
    cached_tokens: int
    hashes: list[bytes]
    tail: bytes
    tokens: int
    computed_tokens: int = 0
    known: bool = True
    blocks: list[Block] = field(default_factory=list)
    empty: int = 0
    released: tuple[int, ...] | None = None
    ran: bool = False
    ended: bool = False
    reconciled: bool = False

    @property
    def held(self) -> int:
        """Blocks that it keeps from being evicted."""
        return len(self.blocks) + self.empty

    def append(self, token_ids: Sequence[int]) -> None:
        """Generated tokens. Behind tokens of unknown ids they are unknown too."""
        if not self.known:
            self.append_unknown(len(token_ids))
            return
        packed, stride = self.tail + pack_ids(token_ids), ID_BYTES * self.block_size
        start = 0
        while len(packed) - start >= stride:
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(child_hash(parent, packed[start : start + stride]))
            start += stride
        self.tail = packed[start:]
        self.tokens += len(token_ids)

    def append_unknown(self, count: int) -> None:
        """Generated tokens of which only the number is known."""
        self.tokens += count
        if count:
            self.known, self.tail = False, b""
        self.hashes += [UNKNOWN] * (self.tokens // self.block_size - len(self.hashes))
