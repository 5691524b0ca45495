"""An engine's names of blocks, mapped to ours through what the blocks hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.blocks import ID_BYTES, child_hash, root_hash
from cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KvEvent
from cache.residency import Residency

_LEAST_BOUND = 1024

_News = tuple[bytes, bytes, bytes] | bytes | None
"""For the picture: a block that was stored (its parent, key and packed ids), the key of one removed, or all gone."""


@dataclass(slots=True)
class EventCounts:
    """`unknown_blocks` could not be mapped: their parent or their salt was not told. `collisions` are short hashes
    that named two contents; `foreign_sizes` events whose blocks are of another size than the picture's.
    """

    unknown_blocks: int = 0
    collisions: int = 0
    foreign_sizes: int = 0


class EventBlocks:
    """Feeds a picture with an engine's events; what cannot be mapped for sure is left out, never guessed.

    A block is held as long as any data-parallel rank holds a copy of it: which rank answers a request is the engine's
    choice. Bounded: of each rank, twice as many names as the picture has blocks, the oldest leave.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._most = max(_LEAST_BOUND, 2 * residency.capacity_blocks)
        self._ranks: dict[int, dict[EngineHash, list[bytes]]] = {}
        self._copies: dict[bytes, int] = {}
        self.counts = EventCounts()

    def held(self) -> list[bytes]:
        """Our hashes of the blocks that the engine holds, in the order in which it stored them."""
        return list(self._copies)

    def apply(self, rank: int, events: Iterable[KvEvent], *, silent: bool = False) -> None:
        """One batch: what the engine did in a step.

        `silent` leaves the picture as it is: for events of before, of which only the sum counts.
        """
        news: list[_News] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(self._ranks.setdefault(rank, {}), event, news)
            elif isinstance(event, BlockRemoved):
                names = self._ranks.get(rank, {})
                for name in event.hashes:
                    self._removed(names, name, news)
            elif isinstance(event, AllBlocksCleared):
                self.forget(rank)
                if not self._copies:
                    news.append(None)
        if not silent:
            self._tell(news)

    def forget(self, rank: int) -> None:
        """Nothing is known of the rank's blocks any more. The picture stays as it is."""
        for keys in self._ranks.pop(rank, {}).values():
            for key in keys:
                self._left(key, [])

    def _tell(self, news: Sequence[_News]) -> None:
        # Who has begun to run takes its blocks in the picture first: the removals that it caused are expected then.
        for each in news:
            if isinstance(each, bytes):
                self._residency.removing(each)
        for each in news:
            if isinstance(each, tuple):
                self._residency.storing(each[1])
        for each in news:
            if each is None:
                self._residency.told.cleared()
            elif isinstance(each, tuple):
                self._residency.stored(*each)
            else:
                self._residency.told.removed(each)

    def _stored(self, names: dict[EngineHash, list[bytes]], event: BlockStored, news: list[_News]) -> None:
        size = self._residency.block_size
        if event.block_size != size:
            self.counts.foreign_sizes += 1
            return
        parent = self._parent(names, event)
        if parent is None:
            self.counts.unknown_blocks += len(event.hashes)
            return
        stride = ID_BYTES * size
        for at, name in enumerate(event.hashes):
            packed = event.packed[at * stride : (at + 1) * stride]
            key = child_hash(parent, packed)
            keys = names.setdefault(name, [])
            self.counts.collisions += bool(keys) and key not in keys
            keys.append(key)
            self._copies[key] = self._copies.get(key, 0) + 1
            news.append((parent, key, packed))
            parent = key
        while len(names) > self._most:
            self._removed(names, next(iter(names)), news)

    def _parent(self, names: dict[EngineHash, list[bytes]], event: BlockStored) -> bytes | None:
        if event.salt is None:
            return None
        if event.parent is None:
            return root_hash(event.block_size, event.salt)
        keys = names.get(event.parent, [])
        return keys[0] if keys and keys.count(keys[0]) == len(keys) else None

    def _removed(self, names: dict[EngineHash, list[bytes]], name: EngineHash, news: list[_News]) -> None:
        keys = names.get(name)
        if keys is None:
            return
        # Which of two contents under one name has left is not known: neither is believed any more.
        left = [keys.pop()] if keys.count(keys[0]) == len(keys) else [keys.pop() for _ in range(len(keys))]
        if not keys:
            del names[name]
        for key in left:
            self._left(key, news)

    def _left(self, key: bytes, news: list[_News]) -> None:
        copies = self._copies[key] - 1
        if copies:
            self._copies[key] = copies
            return
        del self._copies[key]
        news.append(key)
