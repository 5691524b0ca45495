"""The picture of a block cache, corrected by what the engine itself tells of its blocks."""

from collections import OrderedDict
from collections.abc import Iterable

from cache.block_queue import BlockQueue


class ToldBlocks:
    """Where the engine evicted another block than the picture did, the two change places.

    `told` are the contents that the engine says it holds, `gone` those that left the picture and whose removal it has
    not told yet: its events lag behind its requests. Bounded: at most `capacity` of `gone`, and of `told` what the
    feeding side keeps. Until `start` nothing is noted.
    """

    def __init__(self, queue: BlockQueue) -> None:
        self._queue = queue
        self._told: set[bytes] = set()
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    def start(self, keys: Iterable[bytes]) -> None:
        """The engine holds exactly these, the longest held first. What no request holds follows them."""
        self.clear()
        self._queue.on_eviction = self._evicted
        kept = dict.fromkeys(keys)
        self._told.update(kept)
        self._queue.drop_where(lambda block: block.key not in self._told)
        for key in kept:
            self._queue.insert(key, next_evicted=False)

    def start_unknown(self) -> None:
        """What the engine held before is not known; what it tells from now on is."""
        self.clear()
        self._queue.on_eviction = self._evicted

    def stop(self) -> None:
        """Nothing is told any more: what only events told is not believed either."""
        self.clear()
        self._queue.on_eviction = None
        self._queue.drop_where(lambda block: block.told)

    def clear(self) -> None:
        self._told.clear()
        self._gone.clear()

    def stored(self, key: bytes) -> bool:
        """The engine holds it. Whether that is news: neither in the picture nor evicted there since."""
        self._told.add(key)
        return key not in self._queue.resident and key not in self._gone

    def removed(self, key: bytes) -> None:
        """The engine holds it no more."""
        self._told.discard(key)
        if key in self._gone:
            del self._gone[key]
        elif self._queue.drop(key):
            self._restore()

    def recall(self, keys: Iterable[bytes]) -> None:
        """The leading ones that the picture gave up, though the engine still holds them by all that it has told."""
        for key in keys:
            if key in self._queue.resident:
                continue
            if key not in self._gone or key not in self._told:
                return
            del self._gone[key]
            self._queue.insert(key, next_evicted=True)

    def cleared(self) -> None:
        """The engine holds nothing; what running requests hold was sent after that."""
        self.clear()
        self._queue.drop_where(lambda block: True)

    def _restore(self) -> None:
        """Another block was evicted in the place of the latest that the picture gave up: that one is still there."""
        for key in reversed(self._gone):
            if key in self._told and key not in self._queue.resident:
                del self._gone[key]
                self._queue.insert(key, next_evicted=True)
                return

    def _evicted(self, key: bytes) -> None:
        if key in self._queue.resident:
            return
        self._gone[key] = None
        self._gone.move_to_end(key)
        if len(self._gone) > self._queue.capacity:
            self._gone.popitem(last=False)
