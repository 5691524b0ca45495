"""A running request as the block cache sees it: contents known block by block, and the blocks that it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.block_queue import UNKNOWN, Block
from cache.blocks import ID_BYTES, child_hash, pack_ids


@dataclass(slots=True, eq=False)
class Lease:
    """Made and changed by `Residency` only; others read `prompt_tokens`, `cached_tokens` and `tokens`.

    `cached_tokens` is what the engine is predicted to report of the prompt; it may change while the request waits for
    free blocks. `hashes` are the contents of the whole blocks of all `tokens`, `root` the parent of the first. The
    first `known` of them are known, the others UNKNOWN; `tail` are the packed ids that follow the known ones, None
    where they are not known. `computed_tokens` are in the cache or about to be. `blocks` are those that it holds with
    their contents, in order (after its end those that it left); `empty` counts those that are not filled yet.
    `released` tells when its hits had last been released, 0 for those in use.
    """

    block_size: int
    engine: int
    root: bytes
    prompt_tokens: int
    cached_tokens: int
    hashes: list[bytes]
    known: int
    tail: bytes | None
    tokens: int
    computed_tokens: int = 0
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

    @property
    def parent(self) -> bytes:
        """What the first block of unknown content follows."""
        return self.hashes[self.known - 1] if self.known else self.root

    def next_block_tokens(self, tokens: int) -> int:
        """With how many answer tokens, the one on its way included, the next block is taken after so many."""
        before = self.prompt_tokens - 2
        return ((before + tokens) // self.block_size + 1) * self.block_size - before

    def append(self, token_ids: Sequence[int]) -> None:
        """Generated tokens. Behind tokens of unknown ids they are unknown too."""
        if self.tail is None or self._known_tokens != self.tokens:
            self.append_unknown(len(token_ids))
            return
        self._extend_known(self.tail + pack_ids(token_ids))
        self.tokens += len(token_ids)

    def append_unknown(self, count: int) -> None:
        """Generated tokens of which only the number is known."""
        self.tokens += count
        self.hashes += [UNKNOWN] * (self.tokens // self.block_size - len(self.hashes))

    def name_answer(self, token_ids: Sequence[int]) -> None:
        """The ids of the whole answer, from its first on; those that are known already are not asked again."""
        if self.tail is None or self._known_tokens - self.prompt_tokens > len(token_ids):
            return
        self._extend_known(self.tail + pack_ids(token_ids[self._known_tokens - self.prompt_tokens :]))
        self.tokens = max(self.tokens, self._known_tokens)

    def name_block(self, key: bytes) -> None:
        """The next block of unknown content is full and holds `key`; the token behind it has been generated."""
        self._set_known(key)
        self.tail = b""
        self.append_unknown(max(0, self.known * self.block_size + 1 - self.tokens))

    @property
    def _known_tokens(self) -> int:
        return self.known * self.block_size + len(self.tail or b"") // ID_BYTES

    def _extend_known(self, packed: bytes) -> None:
        stride, start = ID_BYTES * self.block_size, 0
        while len(packed) - start >= stride:
            self._set_known(child_hash(self.parent, packed[start : start + stride]))
            start += stride
        self.tail = packed[start:]

    def _set_known(self, key: bytes) -> None:
        self.hashes[self.known : self.known + 1] = [key]
        self.known += 1
