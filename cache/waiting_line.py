"""Requests that were sent to an engine and are not known to run there."""

from collections.abc import Container, Iterator, Sequence

from cache.lease import Lease


class WaitingLine:
    """First come, first served. What each of them will compute can be asked for while it waits.

    Bounded by the requests in flight. Changes belong to one thread; what `with_theirs` gave may be asked in any.
    """

    def __init__(self) -> None:
        self._keys: dict[Lease, frozenset[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._keys)

    def __contains__(self, lease: Lease) -> bool:
        return lease in self._keys

    @property
    def first(self) -> Lease:
        return next(iter(self._keys))

    def append(self, lease: Lease) -> None:
        self._keys[lease] = frozenset(lease.hashes)

    def prepend(self, lease: Lease) -> None:
        self._keys = {lease: frozenset(lease.hashes), **self._keys}

    def leave(self, lease: Lease) -> None:
        del self._keys[lease]

    def clear(self) -> None:
        self._keys.clear()

    def up_to(self, lease: Lease) -> Sequence[Lease]:
        """Those before it, and it."""
        line = list(self._keys)
        return line[: line.index(lease) + 1]

    def first_with(self, key: bytes) -> Lease | None:
        """The first whose prompt has this block."""
        return next((lease for lease, keys in self._keys.items() if key in keys), None)

    def with_theirs(self, held: Container[bytes]) -> Container[bytes]:
        """What is held, and their blocks."""
        return _AnyOf((held, *self._keys.values()))


class _AnyOf:
    def __init__(self, parts: tuple[Container[bytes], ...]) -> None:
        self._parts = parts

    def __contains__(self, key: object) -> bool:
        return any(key in part for part in self._parts)
