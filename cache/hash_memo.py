"""Hashes of blocks that earlier prompts had in the same place, so that only what is new is hashed."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from cache.blocks import ID_BYTES, chained_hashes, child_hash, pack_ids, root_hash
from cache.late_hashes import LateHashes

RUN_BLOCKS = 32
"""Blocks that are remembered together. One digest finds them: 5 times faster than to hash them one by one."""

MOST_RUNS = 8192
"""Runs that are kept: of 32 blocks of 16 tokens 4,000,000 tokens, about 20 MB."""


class HashMemo:
    """Runs of RUN_BLOCKS blocks, found by all that is before them and by their own ids. Usable from any thread.

    Of more than `most_runs` runs the least recently used leave.
    """

    def __init__(self, most_runs: int = MOST_RUNS) -> None:
        self._most_runs = most_runs
        self._runs: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._runs)

    def block_hashes(self, token_ids: Sequence[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
        """As `cache.blocks.block_hashes`."""
        return tuple(self.late_hashes(token_ids, block_size, salt))

    def late_hashes(
        self, token_ids: Sequence[int], block_size: int, salt: str = "", known: Sequence[bytes] = ()
    ) -> LateHashes:
        """The same, for whoever may not need all. `known` are those of leading blocks, where they are at hand."""
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, not {block_size}")
        count, stride = len(token_ids) // block_size, ID_BYTES * block_size

        def more(made: list[bytes], wanted: int) -> None:
            first, last = len(made), min(-(-wanted // RUN_BLOCKS) * RUN_BLOCKS, count)
            parent = made[-1] if made else root_hash(block_size, salt)
            packed = pack_ids(token_ids[first * block_size : last * block_size])
            for start in range(0, len(packed), RUN_BLOCKS * stride):
                blocks = packed[start : start + RUN_BLOCKS * stride]
                whole = len(blocks) == RUN_BLOCKS * stride
                made += self.run(parent, blocks, stride) if whole else chained_hashes(parent, blocks, stride)
                parent = made[-1]

        # Runs begin where they begin in any prompt: behind whole runs.
        return LateHashes(count, more, known[: len(known) // RUN_BLOCKS * RUN_BLOCKS])

    def run(self, parent: bytes, packed: bytes, stride: int) -> tuple[bytes, ...]:
        """The hashes of RUN_BLOCKS blocks of `stride` bytes behind `parent`; made and kept where they are new."""
        key = child_hash(parent, packed)
        known = self._runs.get(key)
        if known is not None:
            with self._lock:
                if key in self._runs:
                    self._runs.move_to_end(key)
            return known
        run = chained_hashes(parent, packed, stride)
        with self._lock:
            self._runs[key] = run
            while len(self._runs) > self._most_runs:
                self._runs.popitem(last=False)
        return run

    def known(self, parent: bytes, packed: bytes) -> tuple[bytes, ...] | None:
        """The hashes of such a run where it is kept; nothing is hashed for it otherwise but its key."""
        return self._runs.get(child_hash(parent, packed))
