"""Copies of a store with other chunk sizes, for as long as they are measured."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from gateway.cli.client import GatewayClient, Refused, Store, StoreFile
from gateway.cli.terminal import CliError
from gateway.tuning.grid import overlap

LEAST_CHUNK_TOKENS = 32
MOST_CHUNK_TOKENS = 4096

_ATTACHED_AT_ONCE = 8
_POLL_S = 0.5
_WAIT_LIMIT_S = 3600.0
_EXPIRES_DAYS = 1  # what a kill leaves behind goes by itself


@asynccontextmanager
async def rechunked(
    client: GatewayClient,
    store: Store,
    files: Sequence[StoreFile],
    chunk_tokens: int,
    run: str,
    done: Callable[[], None],
) -> AsyncIterator[Store]:
    """The files of `store` in a store of their own, cut anew; it is deleted at the end, whatever ends it.

    `done` is called once a file. Raises CliError when a file cannot be ingested again.
    """
    name = f"{store.name[:200]}-tune-{run}-{chunk_tokens}"
    await _remove(client, name)
    scratch = await client.create_store(name, expires_after_days=_EXPIRES_DAYS)
    try:
        await _copy_all(client, scratch.id, files, chunk_tokens, done)
        yield scratch
    finally:
        # A second Ctrl-C must not leave the copy behind.
        await asyncio.shield(asyncio.ensure_future(client.delete_store(scratch.id)))


async def _copy_all(
    client: GatewayClient, store_id: str, files: Sequence[StoreFile], chunk_tokens: int, done: Callable[[], None]
) -> None:
    slots = asyncio.Semaphore(_ATTACHED_AT_ONCE)
    try:
        async with asyncio.TaskGroup() as group:
            for file in files:
                group.create_task(_copy(client, store_id, file, chunk_tokens, slots, done))
    except* CliError as failures:
        raise _first(failures) from None


async def _copy(
    client: GatewayClient,
    store_id: str,
    file: StoreFile,
    chunk_tokens: int,
    slots: asyncio.Semaphore,
    done: Callable[[], None],
) -> None:
    async with slots:
        copy = await client.attach(store_id, file.id, file.attributes, (chunk_tokens, overlap(chunk_tokens)))
        try:
            async with asyncio.timeout(_WAIT_LIMIT_S):
                while copy.status == "in_progress":
                    await asyncio.sleep(_POLL_S)
                    copy = await client.store_file(store_id, file.id)
        except TimeoutError:
            raise CliError(f"{file.filename} was not ingested again within {_WAIT_LIMIT_S:g} s.") from None
    if copy.status != "completed":
        raise CliError(f"{file.filename} cannot be cut into {chunk_tokens} tokens: {copy.error or copy.status}.")
    done()


async def _remove(client: GatewayClient, name: str) -> None:
    """What an earlier, killed part of the same run left."""
    left: Iterable[Store] = [store for store in await client.stores() if store.name == name]
    for store in left:
        try:
            await client.delete_store(store.id)
        except Refused as refusal:
            if refusal.status != 404:
                raise


def _first(failures: BaseExceptionGroup[CliError]) -> CliError:
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, CliError) else CliError(str(first))
