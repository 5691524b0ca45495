"""One system text through its versions: which of its lines keep changing."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from prompt_builder.volatile import NOTHING_KEPT, ChangeKind, Mask, kind_of, matched

WINDOW = 32
"""What has brought nothing new in so many requests is stable."""

LEAST_CHANGES = 3
LEAST_CLOCK_CHANGES = 2
"""So many values never seen before, within WINDOW, make a line volatile; nobody edits a clock by hand."""

_VALUES_KEPT = 32
_TIME_KINDS: frozenset[ChangeKind] = frozenset({"clock", "date"})
_NUMBER_KINDS: frozenset[ChangeKind] = frozenset({"id", "number"})


@dataclass(slots=True)
class Part:
    """A line that has changed, or neighbouring lines whose number changes too (`block`).

    `seen` are hashes of the last _VALUES_KEPT values; `fresh` the requests that brought the last ones that were new.
    `established`: it was volatile once.
    """

    value: str
    lines: int = 1
    block: bool = False
    mask: Mask | None = None
    kinds: set[ChangeKind] = field(default_factory=set)
    seen: dict[int, None] = field(default_factory=dict)
    fresh: deque[int] = field(default_factory=lambda: deque(maxlen=LEAST_CHANGES))
    changes: int = 0
    established: bool = False

    @property
    def kind(self) -> ChangeKind:
        if len(self.kinds) == 1:
            return next(iter(self.kinds))
        if self.kinds <= _TIME_KINDS:
            return "clock"
        return "id" if self.kinds <= _NUMBER_KINDS else "other"

    def take(self, value: str, lines: int, request: int) -> bool:
        """Whether the value is another one."""
        if value == self.value and lines == self.lines:
            return False
        self._remember(self.value)
        if self.block:
            self.mask = NOTHING_KEPT
            self.kinds.add("other")
        else:
            self.kinds.add(kind_of(self.value, value))
            self.mask = Mask.between(self.value, value) if self.mask is None else self.mask.narrowed(value)
        if hash(value) not in self.seen:
            self.fresh.append(request)
        self._remember(value)
        self.value, self.lines = value, lines
        self.changes += 1
        least = LEAST_CLOCK_CHANGES if self.kinds <= _TIME_KINDS else LEAST_CHANGES
        self.established = self.established or sum(request - at < WINDOW for at in self.fresh) >= least
        return True

    def is_volatile(self, request: int) -> bool:
        return self.established and request - self.fresh[-1] < WINDOW

    def _remember(self, value: str) -> None:
        key = hash(value)
        self.seen.pop(key, None)
        self.seen[key] = None
        if len(self.seen) > _VALUES_KEPT:
            del self.seen[next(iter(self.seen))]


@dataclass(frozen=True, slots=True)
class Changing:
    """A changing part of the last version: its first line, from 0."""

    first: int
    part: Part

    @property
    def lines(self) -> range:
        return range(self.first, self.first + self.part.lines)


class Versions:
    """The lines that all versions have had so far, and between them the parts that have changed.

    `last` is the last version, `chars` about how many characters are held. A version costs O(n log n) in its lines,
    one in which only lines change that have changed before O(n), the same version again nothing.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._begin(lines)
        self.requests = 1
        self.changed = 0

    def _begin(self, lines: Sequence[str]) -> None:
        self.last = list(lines)
        self._stable = list(lines)
        # _gaps[i] stands before _stable[i].
        self._gaps: list[list[Part]] = [[] for _ in range(len(lines) + 1)]
        self._places: list[Changing] = []
        self._singles: dict[int, Part] = {}
        self._alike = 0
        self.chars = 2 * sum(map(len, lines))

    def same(self) -> None:
        """The last version came again."""
        self.requests += 1
        self._alike += 1

    def take(self, lines: Sequence[str]) -> None:
        """A version that is not the last one."""
        if self._alike >= WINDOW and not any(place.part.established for place in self._places):
            # What has changed before this was edited, and is stable again.
            self._begin(self.last)
        self.requests += 1
        self.changed += 1
        self._alike = 0
        if not self._changed_again(lines):
            self._compared(lines)
        self.last = list(lines)

    def _changed_again(self, lines: Sequence[str]) -> bool:
        """Whether only lines have changed that had before; their parts have taken the new values then."""
        if len(lines) != len(self.last):
            return False
        changed = [place for place, (old, new) in enumerate(zip(self.last, lines, strict=True)) if old != new]
        if not all(place in self._singles for place in changed):
            return False
        for place in changed:
            self._singles[place].take(lines[place], 1, self.requests)
        return True

    def _compared(self, lines: Sequence[str]) -> None:
        stable: list[str] = []
        gaps: list[list[Part]] = []
        places: list[Changing] = []
        old_at = new_at = 0
        for old, new in [*matched(self._stable, lines), (len(self._stable), len(lines))]:
            parts = self._gaps[old_at]
            if old > old_at:
                parts = list(parts)
                for place in range(old_at, old):
                    parts += [Part(self._stable[place]), *self._gaps[place + 1]]
            if parts or new > new_at:
                parts = _advanced(parts, lines[new_at:new], self.requests)
                first = new_at
                for part in parts:
                    places.append(Changing(first, part))
                    first += part.lines
            gaps.append(parts)
            stable += lines[new : new + 1]
            old_at, new_at = old + 1, new + 1
        self._stable, self._gaps, self._places = stable, gaps, places
        self._singles = {place.first: place.part for place in places if not place.part.block and place.part.lines}
        self.chars = 2 * sum(map(len, lines))

    def volatile(self) -> Iterator[Changing]:
        """Parts of the last version that keep changing."""
        return (place for place in self._places if place.part.is_volatile(self.requests))

    def established(self) -> Iterator[Changing]:
        """Parts of the last version that kept changing once, whether or not they do now."""
        return (place for place in self._places if place.part.established)


def changing_lines(places: Collection[Changing]) -> set[int]:
    return {line for place in places for line in place.lines}


def _advanced(parts: Sequence[Part], lines: Sequence[str], request: int) -> list[Part]:
    """The parts with these lines as their values; parts and lines that cannot be paired become one block."""
    singles = all(part.lines == 1 and not part.block for part in parts)
    if singles and len(parts) == len(lines):
        for part, line in zip(parts, lines, strict=True):
            part.take(line, 1, request)
        return list(parts)
    block = parts[0] if len(parts) == 1 and parts[0].block else _merged(parts)
    block.take("\n".join(lines), len(lines), request)
    return [block]


def _merged(parts: Sequence[Part]) -> Part:
    # Changes of different lines do not add up: each may have been edited once.
    fresh = max((part.fresh for part in parts), key=len, default=deque())
    return Part(
        value="\n".join(part.value for part in parts if part.lines),
        lines=sum(part.lines for part in parts),
        block=True,
        mask=NOTHING_KEPT,
        kinds={"other"},
        fresh=deque(fresh, maxlen=LEAST_CHANGES),
        changes=max((part.changes for part in parts), default=0),
        established=any(part.established for part in parts),
    )
