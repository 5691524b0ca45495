"""Ingestion: one file after the other is parsed, chunked, embedded and stored, in the background."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeVar, TypeVarTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from retrieval.database import Database
from retrieval.folder import TAKE_OVER_S, Ownership, SoleOwner
from retrieval.isolation import is_harmless, parse_isolated
from retrieval.parsing import parse
from retrieval.preparation import Prepared, PreparedChunk, prepare
from retrieval.priority import lower_priority
from retrieval.records import FileError, FileStatus, StoreFile
from retrieval.sections import ParseLimits
from retrieval.types import ChunkRenderer, NotFound, UnusableFile

EMBEDDED_AT_ONCE = 64
RENDERED_AT_ONCE = 256
NOTICE_S = 0.1
_BACKGROUND_NICE = 10
_UNUSABLE_TO_OPENAI = {"empty_file": "invalid_file"}

T = TypeVar("T")
A = TypeVarTuple("A")

logger = logging.getLogger(__name__)


class Embedder(Protocol):
    async def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dimension]; computes off the event loop."""


class Ingestor:
    """Owner of the background work; use it as `async with`.

    Entering takes up what a former process left unfinished. The queue holds ids only and is otherwise as long as
    the database's list of files in progress. A file that fails is recorded in its `last_error`, and the queue goes
    on. `on_change` is called on the event loop with a store's id after each commit that changed its chunks.

    Of several workers on one data folder only the one with the `ownership` works; it notices within `NOTICE_S` what
    others attached, and when it ends another takes up the rest.
    """

    def __init__(
        self,
        database: Database,
        embedder: Embedder,
        renderer: ChunkRenderer,
        on_change: Callable[[str], None] | None = None,
        limits: ParseLimits | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        self._database = database
        self._embedder = embedder
        self._renderer = renderer
        self._on_change = on_change
        self._limits = limits or ParseLimits()
        self._ownership = ownership or SoleOwner()
        self._version = -1
        self._executor = ThreadPoolExecutor(1, "ingest", initializer=lower_priority, initargs=(_BACKGROUND_NICE,))
        # A dict as an ordered set: a file that is queued twice is worked on once.
        self._queue: dict[tuple[str, str, str], None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._rerender = True
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._ownership.owned:
            await self._take_up()
            self._tasks = [asyncio.create_task(self._work(), name="ingestion")]
        else:
            self._idle.set()
            self._tasks = [asyncio.create_task(self._take_over(), name="ingestion")]
        if not isinstance(self._ownership, SoleOwner):
            self._tasks.append(asyncio.create_task(self._notice(), name="ingestion-notice"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops after the step in progress; what is unfinished is taken up at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    @property
    def queued(self) -> int:
        """Files that wait, without the one that is being worked on."""
        return len(self._queue)

    def enqueue(self, tenant: str, store_id: str, file_id: str) -> None:
        """Call it on the event loop after the file was attached (status in_progress)."""
        if not self._ownership.owned:
            # The owner finds it in the database.
            return
        self._queue[tenant, store_id, file_id] = None
        self._idle.clear()
        self._wake.set()

    def renderer_changed(self) -> None:
        """Renders stored chunks anew, in the background, where the renderer's fingerprint is another now."""
        self._rerender = True
        if self._ownership.owned:
            self._idle.clear()
            self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether files are queued or being worked on: embedding takes the machine's cores."""
        return not self._idle.is_set()

    async def wait_idle(self) -> None:
        """Returns when nothing is queued and nothing is being worked on."""
        await self._idle.wait()

    async def _take_up(self) -> None:
        """What a former process, or a former owner, left unfinished."""
        for left in await asyncio.to_thread(self._database.recover):
            self.enqueue(left.tenant, left.store_id, left.file_id)
        self._wake.set()

    async def _take_over(self) -> None:
        await self._ownership.taken()
        logger.info("this worker ingests files from now on")
        self._idle.clear()
        while True:
            try:
                await self._take_up()
                break
            except Exception as error:
                logger.error("unfinished files could not be looked for: %s", type(error).__name__)
                await asyncio.sleep(TAKE_OVER_S)
        await self._work()

    async def _notice(self) -> None:
        """Looks for files that other workers attached, whenever anything in the database has changed."""
        while True:
            await self._ownership.taken()
            try:
                version = await asyncio.to_thread(self._database.version)
                if version != self._version:
                    self._version = version
                    for left in await asyncio.to_thread(self._database.store_files.unfinished):
                        self.enqueue(left.tenant, left.store_id, left.file_id)
            except Exception as error:
                logger.error("files that other workers took in could not be looked for: %s", type(error).__name__)
            await asyncio.sleep(NOTICE_S)

    async def _work(self) -> None:
        while True:
            while self._queue:
                key = next(iter(self._queue))
                del self._queue[key]
                try:
                    await self._ingest_and_record(*key)
                except Exception as error:
                    # The database itself failed: the file is still in progress, and taken up at the next start.
                    logger.error("the state of %s could not be recorded: %s", key[2], type(error).__name__)
            if self._rerender:
                self._rerender = False
                try:
                    await self._render_anew()
                except Exception as error:
                    # Stored ids say whose they are, so nothing is wrong until it succeeds; it is only slower.
                    logger.error("stored chunks could not be rendered anew: %s", type(error).__name__)
                continue
            self._wake.clear()
            self._idle.set()
            await self._wake.wait()

    async def _ingest_and_record(self, tenant: str, store_id: str, file_id: str) -> None:
        try:
            claimed = await asyncio.to_thread(self._database.store_files.get, tenant, store_id, file_id)
        except NotFound:
            return
        if claimed.status is not FileStatus.IN_PROGRESS:
            return
        try:
            await self._ingest(claimed)
        except NotFound:
            # Mostly it was deleted, cancelled or attached anew meanwhile, and then this records nothing.
            lost = FileError("server_error", "The file's content is missing from the data folder. Upload it again.")
            await self._fail(claimed, lost)
        except UnusableFile as unusable:
            code = _UNUSABLE_TO_OPENAI.get(unusable.code, unusable.code)
            await self._fail(claimed, FileError(code, str(unusable)))
        except Exception as error:
            # The queue must go on whatever a library raises; names only, the message may hold a tenant's text.
            logger.error("ingestion of %s into %s failed: %s", file_id, store_id, type(error).__name__)
            message = f"The file could not be ingested ({type(error).__name__}). Attach it again to retry."
            await self._fail(claimed, FileError("server_error", message))

    async def _ingest(self, claimed: StoreFile) -> None:
        prepared = await self._prepare(claimed)
        embeddings = await self._embeddings(claimed, prepared.chunks)
        rows = [
            chunk.with_embedding(embeddings[chunk.text_sha256], prepared.fingerprint) for chunk in prepared.chunks
        ]
        await self._in_background(self._database.chunks.replace, claimed, rows)
        if self._on_change is not None:
            self._on_change(claimed.store_id)

    async def _prepare(self, claimed: StoreFile) -> Prepared:
        data = await self._in_background(self._database.files.read, claimed.tenant, claimed.file_id)
        if is_harmless(data):
            parsed = await self._in_background(parse, data, claimed.filename, self._limits)
        else:
            parsed = await parse_isolated(data, claimed.filename, self._limits)
        return await self._in_background(prepare, parsed, self._renderer, claimed.strategy)

    async def _embeddings(
        self, claimed: StoreFile, chunks: Sequence[PreparedChunk]
    ) -> dict[bytes, NDArray[np.float32]]:
        """By content; only what the tenant has in no store yet is computed, and that once."""
        wanted = {chunk.text_sha256: chunk for chunk in chunks}
        known = await self._in_background(self._database.chunks.embeddings_for, claimed.tenant, list(wanted))
        found = dict(known)
        missing = [chunk for digest, chunk in wanted.items() if digest not in found]
        for start in range(0, len(missing), EMBEDDED_AT_ONCE):
            batch = missing[start : start + EMBEDDED_AT_ONCE]
            vectors = await self._embedder.embed_documents([chunk.embedded_text for chunk in batch])
            found.update((chunk.text_sha256, vector) for chunk, vector in zip(batch, vectors, strict=True))
            # A file that was deleted meanwhile is not embedded to its end.
            await asyncio.to_thread(self._database.store_files.get, claimed.tenant, claimed.store_id, claimed.file_id)
        return found

    async def _fail(self, claimed: StoreFile, error: FileError) -> None:
        await asyncio.to_thread(self._database.store_files.fail, claimed, error)

    async def _render_anew(self) -> None:
        fingerprint = self._renderer.fingerprint
        if not self._renderer.render("", "text").token_ids:
            # No tokenizer is known now; the stored ids may be right again when the engine is back.
            return
        row_id = 0
        while not self._rerender:
            row_id = await self._in_background(self._render_some, fingerprint, row_id)
            if row_id == 0:
                return
            # New files first; what is rendered by then is not done again.
            self._rerender = self._rerender or bool(self._queue)

    def _render_some(self, fingerprint: str, after_row_id: int) -> int:
        """Returns the last row id that was rendered, 0 when there is no more to do."""
        old = self._database.chunks.of_other_renderer(fingerprint, after_row_id, RENDERED_AT_ONCE)
        rendered = {chunk.row_id: self._renderer.render(chunk.title, chunk.text) for chunk in old}
        if self._renderer.fingerprint != fingerprint or not old:
            return 0
        self._database.chunks.store_renderings(fingerprint, rendered)
        return old[-1].row_id

    async def _in_background(self, function: Callable[[Unpack[A]], T], *args: *A) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
