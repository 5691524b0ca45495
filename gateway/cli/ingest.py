"""`headstart ingest`: documents into a vector store, each content once."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.client import GatewayClient, GatewayDown, Store, StoreFile
from gateway.cli.files import Document, content_digest, find_documents
from gateway.cli.options import DEFAULT_URL, ApiKey, Url
from gateway.cli.terminal import FAILURE, CliError, err, out, printable, run

UPLOADS_AT_ONCE = 4
WAIT_LIMIT_S = 1800.0
POLL_FIRST_S = 0.05
POLL_MOST_S = 1.0
PLAIN_EVERY_S = 2.0

Result = Literal["added", "replaced", "unchanged", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one document; `reason` is set when it failed."""

    document: Document
    result: Result
    reason: str = ""


def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files, and folders to search for documents.", metavar="PATH…")],
    store: Annotated[str, typer.Option(help="Name or id of the store; made when there is none of this name.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove older versions of a document (same name, other content).")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Upload documents and wait until they can be searched. What is there already is not sent again."""
    documents = find_documents(paths)
    outcomes = run(_ingest(url, api_key, store, documents, replace))
    report(outcomes, store)
    if any(outcome.result == "failed" for outcome in outcomes):
        raise typer.Exit(FAILURE)


async def _ingest(url: str, api_key: str, name: str, documents: Sequence[Document], replace: bool) -> list[Outcome]:
    async with GatewayClient(url, api_key) as client:
        return await ingest_documents(client, name, documents, out(), replace=replace)


async def ingest_documents(
    client: GatewayClient, name: str, documents: Sequence[Document], console: Console, *, replace: bool = False
) -> list[Outcome]:
    """One outcome per document, in their order. Raises CliError when the gateway cannot be used at all."""
    store = await client.find_store(name) or await client.create_store(name)
    present = await client.store_files(store.id)
    with _Bar(console, len(documents)) as bar:
        return await _Ingestion(client, store, present, replace, bar.advance).run(documents)


class _Ingestion:
    def __init__(
        self,
        client: GatewayClient,
        store: Store,
        present: Sequence[StoreFile],
        replace: bool,
        done: Callable[[], None],
    ) -> None:
        self._client = client
        self._store = store
        self._by_digest = {str(file.attributes.get("sha256", "")): file for file in present}
        self._by_name = _by_name(present)
        self._replace = replace
        self._done = done
        self._slots = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._started: dict[str, asyncio.Lock] = {}

    async def run(self, documents: Sequence[Document]) -> list[Outcome]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(document)) for document in documents]
        except* GatewayDown as down:
            raise down.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, document: Document) -> Outcome:
        async with self._slots:
            try:
                outcome = await self._ingest(document)
            except GatewayDown:
                raise
            except CliError as error:
                outcome = Outcome(document, "failed", error.message)
            except OSError as error:
                outcome = Outcome(document, "failed", f"cannot be read: {error.strerror or error}")
            self._done()
            return outcome

    async def _ingest(self, document: Document) -> Outcome:
        digest = await asyncio.to_thread(content_digest, document.path)
        # Two documents of one content in the same run: the second waits and finds the first's file.
        async with self._started.setdefault(digest, asyncio.Lock()):
            file = self._by_digest.get(digest)
            if file is not None and file.status in ("in_progress", "completed"):
                file = await self._wait(file)
                if file.status == "completed":
                    return Outcome(document, "unchanged")
            if file is not None:
                await self._client.remove(self._store.id, file.id)
            file = await self._add(document, digest)
            self._by_digest[digest] = file
        if file.status != "completed":
            return Outcome(document, "failed", file.error or f"ended as {file.status}")
        if not self._replace:
            return Outcome(document, "added")
        older = [old for old in self._by_name.get(document.name, ()) if old.attributes.get("sha256") != digest]
        for old in older:
            await self._client.remove(self._store.id, old.id)
        return Outcome(document, "replaced" if older else "added")

    async def _add(self, document: Document, digest: str) -> StoreFile:
        file_id = await self._client.upload(document.path, document.name)
        attributes = {"sha256": digest, "path": document.name[-512:]}
        return await self._wait(await self._client.attach(self._store.id, file_id, attributes))

    async def _wait(self, file: StoreFile) -> StoreFile:
        pause_s = POLL_FIRST_S
        try:
            async with asyncio.timeout(WAIT_LIMIT_S):
                while file.status == "in_progress":
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, POLL_MOST_S)
                    file = await self._client.store_file(self._store.id, file.id)
        except TimeoutError:
            raise CliError(f"not finished within {WAIT_LIMIT_S:g} s; the gateway goes on with it") from None
        return file


class _Bar:
    """A progress bar on a terminal; elsewhere a line from time to time."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._count = 0
        self._told_s = time.monotonic()
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("ingesting", total=total)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        self._count += 1
        self._progress.advance(self._task)
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._told_s >= PLAIN_EVERY_S:
            self._told_s = now_s
            self._console.print(f"  ingesting: {self._count} of {self._total} documents")


def report(outcomes: Sequence[Outcome], store: str) -> None:
    """Counts on stdout, each failure with its reason on stderr."""
    counts = {
        result: sum(outcome.result == result for outcome in outcomes)
        for result in ("added", "replaced", "unchanged", "failed")
    }
    said = ", ".join(f"{number} {result}" for result, number in counts.items() if number)
    out().print(f"Store {printable(store)}: {said}.", markup=False, soft_wrap=True)
    for line in failure_lines(outcomes):
        err().print(line, markup=False, soft_wrap=True)


def failure_lines(outcomes: Iterable[Outcome]) -> list[str]:
    return [
        f"failed: {printable(outcome.document.name)}: {printable(outcome.reason)}"
        for outcome in outcomes
        if outcome.result == "failed"
    ]


def _by_name(files: Iterable[StoreFile]) -> Mapping[str, list[StoreFile]]:
    names: dict[str, list[StoreFile]] = {}
    for file in files:
        names.setdefault(str(file.attributes.get("path", "")), []).append(file)
    return names
