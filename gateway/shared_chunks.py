"""Which chunks are asked for together, counted over the requests of all gateways."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

from prompt_builder.companions import Companions, Together

Tell = Callable[[bytes, Sequence[tuple[str, int]]], None]


class SharedCompanions(Companions):
    """Counts what this gateway sends and, through `heard`, what others sent; `tell` passes on the former.

    Tenants are told apart by a digest of their key: what is passed on holds no salt.
    """

    tell: Tell | None = None

    def observe(self, key: bytes, chunks: Sequence[tuple[str, int]]) -> None:
        digest = _digest(key)
        super().observe(digest, chunks)
        if self.tell is not None and chunks:
            self.tell(digest, chunks)

    def heard(self, digest: bytes, chunks: Sequence[tuple[str, int]]) -> None:
        super().observe(digest, chunks)

    def awaited(self, key: bytes, labels: Iterable[str]) -> Callable[[], None]:
        return super().awaited(_digest(key), labels)

    def tokens_awaited_twice(self, key: bytes, chunks: Iterable[tuple[str, int]]) -> int:
        return super().tokens_awaited_twice(_digest(key), chunks)

    def of(self, key: bytes) -> Together:
        return super().of(_digest(key))


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()
