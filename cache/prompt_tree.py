"""What one request's prompts may begin with: stretches of token ids behind each other, each hashed once for all."""

from collections.abc import Container, Sequence
from itertools import takewhile

from cache.blocks import ID_BYTES, are_block_hashes, child_hash, pack_ids, root_hash
from cache.hash_memo import RUN_BLOCKS, HashMemo
from cache.late_hashes import LateHashes


class _Root:
    """What all stretches of a tree have in common; it does not lead back to them."""

    __slots__ = ("_hash", "_salt", "block_size", "memo")

    def __init__(self, block_size: int, salt: str, memo: HashMemo | None) -> None:
        self.block_size = block_size
        self.memo = memo
        self._salt = salt
        self._hash: bytes | None = None

    @property
    def hash(self) -> bytes:
        """Of the empty prompt; made when it is first asked for."""
        if self._hash is None:
            self._hash = root_hash(self.block_size, self._salt)
        return self._hash


class Stretch:
    """Token ids behind those of another stretch. Its `blocks` are those that end in it.

    Blocks are hashed when somebody first asks for them, one after the other, and only as far as that: replicas that
    hold the same beginning cost one hashing together.
    """

    __slots__ = ("_above", "_first", "_hashes", "_ids", "_late", "_packed", "_root", "blocks", "tokens")

    def __init__(self, root: _Root, above: "Stretch | None" = None, ids: Sequence[int] = ()) -> None:
        before: int = 0 if above is None else above.tokens
        self.tokens: int = before + len(ids)
        self._first = before // root.block_size
        self.blocks = self.tokens // root.block_size - self._first
        self._root = root
        self._above = above
        self._ids = ids
        self._packed: bytes | None = None
        self._late: LateHashes | None = None
        self._hashes: list[bytes] = []

    def known(self, hashes: Sequence[bytes]) -> None:
        """The hashes of all its blocks, where somebody has them, or makes them for others too."""
        if isinstance(hashes, LateHashes):
            self._late = hashes
            self._hashes = hashes.made(1)
        else:
            self._hashes = list(hashes)

    def resident_blocks(self, resident: Container[bytes]) -> int:
        """How many of its leading blocks are resident."""
        hashes, count = self._hashes, 0
        while True:
            # Late hashes may grow meanwhile, in another thread.
            known = len(hashes)
            # A list of them is made in half of the time that it takes to count them one by one.
            count += len(list(takewhile(resident.__contains__, hashes[count:known])))
            if count < known or count == self.blocks:
                return count
            self._hash_more()

    def last_hash(self) -> bytes:
        """The hash of the last whole block up to its end, the root's where there is none."""
        if self._above is None:
            return self._root.hash
        if not self.blocks:
            return self._above.last_hash()
        while len(self._hashes) < self.blocks:
            self._hash_more()
        return self._hashes[-1]

    def _hash_more(self) -> None:
        """The next block; or a whole run of blocks where an earlier request has hashed it."""
        hashes, size, memo = self._hashes, self._root.block_size, self._root.memo
        count = len(hashes)
        if self._late is not None:
            # By far the most are found in few steps, and little is hashed that nobody holds.
            self._late.made(2 * count)
            return
        parent = hashes[-1] if count else self._above.last_hash() if self._above is not None else self._root.hash
        whole_run = self.blocks - count >= RUN_BLOCKS and (self._first + count) % RUN_BLOCKS == 0
        if not count and not (whole_run and memo is not None):
            # Most stretches that are not resident differ in their first block: the rest is packed only behind a hit.
            tail = self._tail()
            hashes.append(child_hash(parent, pack_ids([*tail, *self._ids[: size - len(tail)]])))
            return
        if self._packed is None:
            self._packed = pack_ids(self._tail()) + pack_ids(self._ids)
        start, stride = count * size * ID_BYTES, size * ID_BYTES
        if whole_run and memo is not None:
            known = memo.known(parent, self._packed[start : start + RUN_BLOCKS * stride])
            if known is not None:
                hashes += known
                return
        hashes.append(child_hash(parent, self._packed[start : start + stride]))

    def _tail(self) -> Sequence[int]:
        """The ids before its own that are in its first block."""
        above = self._above
        if above is None:
            return ()
        missing = above.tokens % self._root.block_size
        parts: list[Sequence[int]] = []
        while missing and above is not None:
            part = above._ids[-missing:]
            parts.append(part)
            missing -= len(part)
            above = above._above
        return [token_id for part in reversed(parts) for token_id in part]


class PromptTree:
    """The empty prompt under a salt, in an engine's block size. One tree serves all replicas of that block size.

    A stretch is found again by the identity of its ids, which are kept with it. A tree belongs to one request, and to
    one thread at a time. It holds its stretches, and they don't hold it: it goes as soon as its request is over,
    without the garbage collector. `memo`, where there is one, knows the hashes of blocks of earlier requests. Raises
    ValueError for a size that is not positive.
    """

    __slots__ = ("_behind", "_root", "block_size", "salt", "start")

    def __init__(self, block_size: int, salt: str = "", memo: HashMemo | None = None) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.salt = salt
        self._root = _Root(block_size, salt, memo)
        self._behind: dict[tuple[int, int], Stretch] = {}
        self.start = Stretch(self._root)

    def behind(self, stretch: Stretch, ids: Sequence[int]) -> Stretch:
        """The prompt that ends with `stretch`, with these ids at its end."""
        key = (id(stretch), id(ids))
        found = self._behind.get(key)
        if found is None:
            found = Stretch(self._root, stretch, ids)
            if isinstance(ids, tuple):
                # What can change is read anew each time.
                self._behind[key] = found
        return found

    def hashed(self, token_ids: tuple[int, ...], hashes: Sequence[bytes]) -> None:
        """A whole prompt whose `block_hashes` are known: who follows these very ids hashes nothing.

        Hashes of another block size or salt are not taken.
        """
        if are_block_hashes(hashes, token_ids, self.block_size, self.salt):
            self.behind(self.start, token_ids).known(hashes)
