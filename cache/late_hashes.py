"""The hashes of a prompt's blocks, made no sooner than somebody asks for them."""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import overload


class LateHashes(Sequence[bytes]):
    """As many hashes as a prompt has whole blocks, made from the front and only as far as they are asked for.

    `count` of them, of which the `known` ones are made; `more` makes the list that it is given at least so long.
    That no replica holds a long prompt is seen from its first block: then the others are hashed when the request is
    on its way. Usable from any thread.
    """

    __slots__ = ("_count", "_lock", "_made", "_more")

    def __init__(self, count: int, more: Callable[[list[bytes], int], None], known: Sequence[bytes] = ()) -> None:
        self._count = count
        self._more: Callable[[list[bytes], int], None] | None = more
        self._made = list(known)
        self._lock = Lock()

    def made(self, count: int) -> list[bytes]:
        """The leading ones that are made, at least `count` where there are as many. It grows; others only read it."""
        count = min(count, self._count)
        if len(self._made) < count:
            with self._lock:
                if self._more is not None and len(self._made) < count:
                    self._more(self._made, count)
                if len(self._made) == self._count:
                    # It holds the prompt.
                    self._more = None
        return self._made

    @property
    def unmade(self) -> int:
        return self._count - len(self._made)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.made(self._count))

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            return self.made(stop)[start:stop:step]
        return self.made(index + 1 if index >= 0 else self._count)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
