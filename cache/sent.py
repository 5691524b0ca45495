"""What was sent to each replica, for as long as it is remembered: tells what is new from what was lost."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

V = TypeVar("V")

MOST_BLOCKS = 2**18
MOST_PLACES = 2**16
MOST_REPLICAS = 256
SEVERAL = b"several"

Seen = Literal["held", "lost", "meanwhile"]
"""`held`: the replica computed it and has not been cleared since; `lost`: it has been; `meanwhile`: only a request
that was under way at the same time is known to have sent it."""


@dataclass(frozen=True, slots=True)
class Place:
    """An end of a segment in prompts that were sent, found by its `key`: everything before it and nothing behind.

    `followers` is a set of bits: what came next in them, as whoever recorded it numbers these. `content` is the same
    place whatever the salt, `sent` the time of the last such prompt, counted in prompts.
    """

    key: bytes
    followers: int
    content: bytes
    sent: int = 0


class Sent:
    """Blocks and places by replica. Bounded over all replicas: what has not been sent for longest is forgotten.

    About half of `most_blocks` blocks are sure to be remembered, at 80 bytes each. Changes and look-ups belong to one
    thread.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS, most_places: int = MOST_PLACES) -> None:
        self._most_blocks = most_blocks
        self._most_places = most_places
        self._replicas: OrderedDict[str, _Memory] = OrderedDict()
        self._prompts = 0

    def now(self) -> int:
        """The time, counted in prompts that have been recorded."""
        return self._prompts

    def record(
        self, replica: str, epoch: Hashable, blocks: Sequence[bytes], places: Iterable[Place], tenant: bytes
    ) -> None:
        """The replica has computed a prompt: all its blocks, and those of its places that may be new.

        `epoch` is another one whenever the replica lost what it held. `tenant` is a tag that tells tenants apart.
        """
        self._prompts += 1
        memory = self._of(replica, epoch)
        count = len(self._replicas)
        memory.blocks.add(dict.fromkeys(blocks, self._prompts), self._most_blocks // count)
        known: dict[bytes, Place] = {}
        contents: dict[bytes, bytes] = {}
        for place in places:
            # An empty segment ends where it begins.
            before = known.get(place.key) or memory.places.get(place.key)
            followers = place.followers | (before.followers if before is not None else 0)
            known[place.key] = Place(place.key, followers, place.content, self._prompts)
            owner = memory.contents.get(place.content)
            contents[place.content] = tenant if owner in (None, tenant) else SEVERAL
        memory.places.add(known, self._most_places // count)
        memory.contents.add(contents, self._most_places // count)

    def record_foreign(self, replica: str, epoch: Hashable, blocks: Sequence[bytes]) -> None:
        """The replica has computed a prompt that another gateway sent, of which only the blocks are known."""
        self._prompts += 1
        memory = self._of(replica, epoch)
        memory.foreign.add(dict.fromkeys(blocks, self._prompts), self._most_blocks // len(self._replicas))

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._replicas.pop(replica, None)

    def view(self, replica: str, epoch: Hashable, since: int, tenant: bytes) -> "SentView":
        """What had been sent when it was `since`, as a request of the tenant to this replica sees it."""
        here = self._of(replica, epoch)
        return SentView(here, [memory for memory in self._replicas.values() if memory is not here], since, tenant)

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return sum(len(memory.blocks) + len(memory.foreign) for memory in self._replicas.values())

    def _of(self, replica: str, epoch: Hashable) -> "_Memory":
        memory = self._replicas.get(replica)
        if memory is None:
            memory = self._replicas[replica] = _Memory(epoch)
            while len(self._replicas) > MOST_REPLICAS:
                self._replicas.popitem(last=False)
        self._replicas.move_to_end(replica)
        if memory.epoch != epoch:
            memory.epoch, memory.cleared = epoch, self._prompts
        return memory


class SentView:
    """`Sent` at one time, from one replica and tenant."""

    def __init__(self, here: "_Memory", others: Sequence["_Memory"], since: int, tenant: bytes) -> None:
        self._here = here
        self._others = others
        self._since = since
        self._tenant = tenant

    def block(self, key: bytes) -> Seen | None:
        """None: it was never sent to this replica, as far as is remembered."""
        sent = self._here.last_sent(key)
        if sent is None:
            return None
        if sent > self._since:
            return "meanwhile"
        return "held" if sent > self._here.cleared else "lost"

    def elsewhere(self, key: bytes) -> bool:
        """Whether the block was sent to another replica that has not been cleared since."""
        return any(
            other.cleared < sent <= self._since
            for other in self._others
            if (sent := other.last_sent(key)) is not None
        )

    def own(self, key: bytes) -> bool:
        """Whether this gateway itself sent the block to this replica."""
        return self._here.blocks.get(key) is not None

    def place(self, key: bytes) -> Place | None:
        """The place as prompts to any of the replicas had it; None where none did."""
        found = [
            place
            for memory in (self._here, *self._others)
            if (place := memory.places.get(key)) is not None and place.sent <= self._since
        ]
        if not found:
            return None
        followers = 0
        for place in found:
            followers |= place.followers
        return Place(key, followers, found[0].content, found[0].sent)

    def place_meanwhile(self, key: bytes) -> bool:
        """Whether only a request under way at the same time is known to have had the place."""
        return self.place(key) is None and any(
            memory.places.get(key) is not None for memory in (self._here, *self._others)
        )

    def foreign(self, content: bytes) -> bool:
        """Whether another tenant's prompt to this replica had the place with this content."""
        owner = self._here.contents.get(content)
        return owner is not None and owner != self._tenant


class _Recent(Generic[V]):
    """A mapping that forgets: half of what fits is sure to be there. Costs nothing by entry to keep in order."""

    def __init__(self) -> None:
        self._young: dict[bytes, V] = {}
        self._old: dict[bytes, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: bytes) -> V | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def add(self, entries: Mapping[bytes, V], most: int) -> None:
        self._young.update(entries)
        if len(self._young) > most // 2:
            self._old, self._young = self._young, {}


@dataclass(slots=True, eq=False)
class _Memory:
    """One replica's; blocks with the time when they were last sent, contents with the tenant that sent them.

    `foreign` are blocks that other gateways sent.
    """

    epoch: Hashable
    cleared: int = 0
    blocks: _Recent[int] = field(default_factory=_Recent)
    foreign: _Recent[int] = field(default_factory=_Recent)
    places: _Recent[Place] = field(default_factory=_Recent)
    contents: _Recent[bytes] = field(default_factory=_Recent)

    def last_sent(self, key: bytes) -> int | None:
        """When the block was last sent by whatever gateway."""
        times = [sent for sent in (self.blocks.get(key), self.foreign.get(key)) if sent is not None]
        return max(times, default=None)
