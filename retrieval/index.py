"""Derived indexes of all stores: loaded when first searched, refreshed behind searches, snapshotted when quiet."""

import asyncio
import logging
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, Self, TypeVar

from retrieval.database import Database
from retrieval.dense import faiss
from retrieval.folder import Ownership, SoleOwner
from retrieval.priority import lower_priority
from retrieval.snapshots import Snapshot, UnusableSnapshot, read_snapshot, write_snapshot
from retrieval.store_view import StaleRows, StoreView
from retrieval.types import NotFound

log = logging.getLogger("headstart.index")

IndexKind = Literal["flat", "hnsw"]
T = TypeVar("T")

# A search waits this long for rows that were just added; beyond, it answers without them. Deleted rows never answer:
# every result is read from the database.
REFRESH_WAIT_S = 2.0
QUIET_S = 5.0
_BACKGROUND_NICE = 5


class Indexes:
    """Owner of `data_dir/indexes/` and of the views in memory, at most `max_bytes` of them (least recently used go).

    Of several workers on one data folder, each has its views, and the one with the `ownership` writes the files.

    Use it with `async with`, in one event loop. Building is done in background threads and no search waits for a
    lock: a view is immutable, and a refresh publishes the next one.
    """

    def __init__(
        self,
        database: Database,
        data_dir: Path,
        kind: IndexKind = "flat",
        max_bytes: int = 4 * 2**30,
        quiet_s: float = QUIET_S,
        refresh_wait_s: float = REFRESH_WAIT_S,
        ownership: Ownership | None = None,
    ) -> None:
        self._database = database
        self._folder = data_dir / "indexes"
        self._kind = kind
        self._max_bytes = max_bytes
        self._quiet_s = quiet_s
        self._refresh_wait_s = refresh_wait_s
        self._ownership = ownership or SoleOwner()
        self._views: OrderedDict[str, StoreView] = OrderedDict()
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self._saved: dict[str, int] = {}
        self._changed_at: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._saving = asyncio.Lock()
        # More than one thread, so that a small store does not wait for a large one that is being built.
        self._builder = ThreadPoolExecutor(3, "index-build", initializer=_become_background)
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep(), name="index-snapshots")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*self._refreshes.values(), return_exceptions=True)
        await self.save(quiet_s=0)
        await asyncio.to_thread(self._builder.shutdown)

    def counters(self) -> Mapping[str, int]:
        """How often a view was loaded, built, refreshed, saved, evicted, found unusable, or searched while behind."""
        names = ("loaded", "built", "refreshed", "saved", "evicted", "unusable", "searched_behind")
        held = sum(view.held_bytes for view in self._views.values())
        return {**{name: self._counts[name] for name in names}, "stores": len(self._views), "bytes": held}

    async def view(self, store_id: str, generation: int) -> StoreView:
        """The store at `generation` or later; an older view where a refresh takes too long.

        Raises NotFound for a store that is gone. The first view of a store is waited for without a limit.
        """
        deadline = time.monotonic() + self._refresh_wait_s
        while True:
            current = self._views.get(store_id)
            if current is not None and current.generation >= generation:
                self._views.move_to_end(store_id)
                return current
            refresh = self._refreshes.get(store_id)
            if refresh is None:
                refresh = self._start_refresh(store_id)
            # Shielded: others wait for the same refresh, and one that gives up must not end it.
            if current is None:
                await asyncio.shield(refresh)
                continue
            try:
                await asyncio.wait_for(asyncio.shield(refresh), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self._counts["searched_behind"] += 1
                return current

    def refresh_soon(self, store_id: str) -> None:
        """Told that a store changed: bring its view up to date before the next search asks, if it is in memory."""
        if store_id in self._views and store_id not in self._refreshes:
            self._start_refresh(store_id)

    async def save(self, quiet_s: float | None = None) -> None:
        """Write a snapshot of each view that changed and has been quiet for `quiet_s` since."""
        if not self._ownership.owned:
            return
        limit = self._quiet_s if quiet_s is None else quiet_s
        for store_id, view in list(self._views.items()):
            if self._saved.get(store_id) == view.generation:
                continue
            if time.monotonic() - self._changed_at.get(store_id, 0.0) >= limit:
                await self._save(store_id)

    async def sweep(self) -> None:
        """Forget stores that the database no longer has: their views, and their files with the text in them."""
        known = set(await self._in_background(self._database.stores.ids))
        for store_id in [held for held in self._views if held not in known]:
            self._drop(store_id)
        if self._ownership.owned:
            async with self._saving:
                await self._in_background(self._remove_files_except, known)

    async def _keep(self) -> None:
        while True:
            try:
                await self.sweep()
                await self.save()
            except Exception as error:
                # Housekeeping of derived files; names only, the message may hold a tenant's text.
                log.error("indexes could not be swept or saved: %s", type(error).__name__)
            await asyncio.sleep(self._quiet_s)

    async def _refresh(self, store_id: str) -> None:
        before = self._views.get(store_id)
        try:
            if before is None:
                view, self._saved[store_id] = await self._in_background(self._load, store_id)
            else:
                view = await self._in_background(self._advance, before, store_id)
                self._counts["refreshed"] += 1
        except NotFound:
            self._drop(store_id)
            raise
        self._views[store_id] = view
        self._views.move_to_end(store_id)
        self._changed_at[store_id] = time.monotonic()
        while len(self._views) > 1 and sum(held.held_bytes for held in self._views.values()) > self._max_bytes:
            oldest = next(iter(self._views))
            await self._save(oldest)
            self._drop(oldest)
            self._counts["evicted"] += 1

    def _start_refresh(self, store_id: str) -> "asyncio.Task[None]":
        refresh = asyncio.create_task(self._refresh(store_id), name=f"index-refresh-{store_id}")
        self._refreshes[store_id] = refresh
        refresh.add_done_callback(partial(self._refreshed, store_id))
        return refresh

    def _refreshed(self, store_id: str, task: "asyncio.Task[None]") -> None:
        self._refreshes.pop(store_id, None)
        if task.cancelled():
            return
        # Whoever waits has it raised; told here too, because all may have given up waiting.
        error = task.exception()
        if error is not None and not isinstance(error, NotFound):
            log.error("index not refreshed: %s", type(error).__name__, extra={"store_id": store_id})

    async def _save(self, store_id: str) -> None:
        async with self._saving:
            view = self._views.get(store_id)
            if view is None or not self._ownership.owned or self._saved.get(store_id) == view.generation:
                return
            try:
                await self._in_background(self._write, store_id, view)
            except OSError as error:
                # The snapshot only saves time at the next start; the database has everything.
                log.warning("index snapshot not written", extra={"store_id": store_id, "reason": str(error)})
            else:
                self._counts["saved"] += 1
            self._saved[store_id] = view.generation

    def _drop(self, store_id: str) -> None:
        self._views.pop(store_id, None)
        self._saved.pop(store_id, None)
        self._changed_at.pop(store_id, None)

    async def _in_background(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._builder, work, *arguments)

    # What follows runs in a background thread.

    def _load(self, store_id: str) -> tuple[StoreView, int]:
        """The store's current view, and the generation of its snapshot on disk (-1 for none)."""
        try:
            snapshot = read_snapshot(self._path(store_id), store_id, self._kind)
            if snapshot is not None:
                view = self._caught_up(snapshot)
                self._counts["loaded"] += 1
                return view, snapshot.generation
        except UnusableSnapshot as error:
            self._counts["unusable"] += 1
            log.warning("index snapshot %s; rebuilding it from the database", error, extra={"store_id": store_id})
        return self._built(store_id), -1

    def _caught_up(self, snapshot: Snapshot) -> StoreView:
        try:
            view = StoreView.from_arrays(snapshot.kind, snapshot.generation, snapshot.arrays)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UnusableSnapshot("does not fit this version") from error
        changes = self._database.chunks.changes(snapshot.store_id, view.last_row_id)
        if changes.embeddings.shape[1] != view.dense.dimension:
            raise UnusableSnapshot("holds embeddings of another model")
        if changes.generation < snapshot.generation:
            raise UnusableSnapshot("is newer than the database")
        try:
            return view.changed(changes)
        except StaleRows as error:
            raise UnusableSnapshot("misses rows of the database") from error

    def _advance(self, before: StoreView, store_id: str) -> StoreView:
        changes = self._database.chunks.changes(store_id, before.last_row_id)
        if changes.embeddings.shape[1] != before.dense.dimension:
            return self._built(store_id)
        try:
            return before.changed(changes)
        except StaleRows:
            return self._built(store_id)

    def _built(self, store_id: str) -> StoreView:
        changes = self._database.chunks.changes(store_id)
        self._counts["built"] += 1
        return StoreView.empty(self._kind, changes.embeddings.shape[1]).changed(changes)

    def _write(self, store_id: str, view: StoreView) -> None:
        write_snapshot(self._path(store_id), Snapshot(store_id, self._kind, view.generation, view.arrays()))

    def _path(self, store_id: str) -> Path:
        return self._folder / store_id / "snapshot.bin"

    def _remove_files_except(self, known: set[str]) -> None:
        if self._folder.is_dir():
            for folder in self._folder.iterdir():
                if folder.name not in known:
                    shutil.rmtree(folder, ignore_errors=True)


def _become_background() -> None:
    faiss.omp_set_num_threads(1)
    lower_priority(_BACKGROUND_NICE)
