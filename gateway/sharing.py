"""What several gateways in front of the same engines tell each other, and what each makes of it."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from cache.journal import Heard, Journal
from cache.journal_entries import Chosen, Malformed, pack, read_batch, read_chosen
from gateway.shared_replica import Followed, SharedReplica, SharingCounts

log = logging.getLogger("headstart.sharing")

_FLUSH_S = 0.005
_TEND_S = 0.2
_NAMES_REMEMBERED = 64


class Chunks(Protocol):
    """Who counts which chunks are asked for together."""

    def heard(self, digest: bytes, chunks: Sequence[tuple[str, int]]) -> None: ...


class Sharing:
    """One journal for all replicas of a gateway; use it with `async with`, in the gateway's event loop.

    `replicas` gives those that are there now. Each is followed from the beginning of what is kept of it, so that a
    gateway that starts late knows what the engine holds; and again when its engine turns out to be another process.
    Without Redis each gateway goes on alone: what others have on the way is forgotten within seconds, and heard again
    afterwards.
    """

    def __init__(
        self,
        redis_url: str,
        replicas: Callable[[], Iterable[Followed]],
        chunks: Chunks | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[Followed, Sequence[bytes]], None] = lambda replica, blocks: None,
    ) -> None:
        """`computed` as of SharedReplica."""
        self._replicas = replicas
        self._computed = computed
        self._chunks = chunks
        self._clock = clock
        self._names = deque([secrets.token_bytes(8)], _NAMES_REMEMBERED)
        self.counts = SharingCounts()
        self.journal = Journal(redis_url, self)
        self._shared: dict[int, SharedReplica] = {}
        self._streams: dict[str, SharedReplica] = {}
        self._chosen_stream = ""
        self._dropped = 0
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Sharing":
        await self.journal.__aenter__()
        self._tend()
        self._tasks = [
            asyncio.create_task(self._flush(), name="sharing-flush"),
            asyncio.create_task(self._watch(), name="sharing-watch"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._write()
        for shared in self._shared.values():
            shared.close()
        await self.journal.__aexit__(kind, error, trace)

    @property
    def gateways(self) -> int:
        """Other gateways that were heard of in the last seconds."""
        return len(set().union(*(shared.gateways() for shared in self._shared.values())))

    @property
    def foreign_runs(self) -> int:
        """Requests of other gateways that are on the way."""
        return sum(shared.foreign_runs for shared in self._shared.values())

    def chosen(self, key: bytes, chunks: Sequence[tuple[str, int]]) -> None:
        """A prompt of this gateway held these chunks; the others count them too."""
        if self._chosen_stream:
            self.journal.append(self._chosen_stream, pack(Chosen(self._names[-1], key, list(chunks))))

    def heard(self, entry: Heard) -> None:
        try:
            if entry.stream == self._chosen_stream:
                self._heard_chosen(entry.data)
                return
            batch = read_batch(entry.data)
            shared = self._streams.get(entry.stream)
            if shared is not None and batch.gateway not in self._names:
                shared.heard(batch, entry.at_s)
        except Malformed as error:
            if not self.counts.malformed:
                log.warning("an entry of another gateway makes no sense and is left out: %s", error)
            self.counts.malformed += 1

    def _heard_chosen(self, data: bytes) -> None:
        chosen = read_chosen(data)
        if chosen.gateway not in self._names and self._chunks is not None:
            self._chunks.heard(chosen.key, chosen.chunks)
            self.counts.applied += 1

    async def _flush(self) -> None:
        while True:
            await self._changed.wait()
            # What happens in the same moment is told in one entry.
            await asyncio.sleep(_FLUSH_S)
            self._changed.clear()
            self._write()

    def _write(self) -> None:
        if self.journal.counts.dropped != self._dropped:
            # Others may miss an end: to them this gateway is gone with all that it had, and a new one is here.
            self._dropped = self.journal.counts.dropped
            self._names.append(secrets.token_bytes(8))
        now_s = self._clock()
        for stream, shared in self._streams.items():
            for batch in shared.to_tell(self._names[-1], now_s):
                self.journal.append(stream, pack(batch))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TEND_S)
            try:
                self._tend()
            except Exception:
                log.exception("what gateways share could not be looked after")

    def _tend(self) -> None:
        """Replicas come, go and are restarted; gateways fall silent."""
        now_s = self._clock()
        present = {id(replica): replica for replica in self._replicas()}
        for gone in self._shared.keys() - present.keys():
            self._leave(self._shared.pop(gone))
        for key, replica in present.items():
            if key not in self._shared:
                self._shared[key] = SharedReplica(replica, self.counts, self._changed.set, computed=self._computed)
                replica.onlooker = self._shared[key]
            shared = self._shared[key]
            stream = stream_of(replica)
            if stream != shared.stream or shared.is_outdated():
                self._leave(shared)
                if stream is not None:
                    shared.begin(stream)
                    self._streams[stream] = shared
                    self.journal.follow(stream)
            shared.tend(now_s)
        self._follow_chosen(present.values())
        if any(shared.is_due(now_s) for shared in self._shared.values()):
            self._changed.set()

    def _leave(self, shared: SharedReplica) -> None:
        if shared.stream is not None:
            self._streams.pop(shared.stream, None)
            self.journal.unfollow(shared.stream)
        shared.close()

    def _follow_chosen(self, replicas: Iterable[Followed]) -> None:
        model = next((replica.facts.model for replica in replicas if replica.facts.model is not None), None)
        if model is None or self._chunks is None or self._chosen_stream:
            return
        self._chosen_stream = f"chosen:{_digest(model)}"
        self.journal.follow(self._chosen_stream)


def stream_of(replica: Followed) -> str | None:
    """The engine's stream: gateways that name the same address and see the same model and block size share it.

    The address is digested: what is in Redis names no host. None until the engine has told its model.
    """
    facts = replica.facts
    if facts.model is None:
        return None
    endpoint = replica.endpoint
    return f"runs:{_digest(f'{endpoint.url}|{endpoint.host}|{facts.model}|{facts.block_size}')}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
