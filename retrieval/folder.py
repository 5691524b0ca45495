"""Who may use a data folder: one process alone, or the workers of one, of which one does what must be done once."""

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from retrieval.types import RetrievalError

TAKE_OVER_S = 0.5
_LINGERING_S = 20.0


class FolderInUse(RetrievalError):
    """Another process owns the data folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"The data folder {folder} is in use by another process. Stop it, or name another folder.")


class Ownership(Protocol):
    """Whether this process is the one that ingests files and writes indexes."""

    @property
    def owned(self) -> bool: ...

    async def taken(self) -> None:
        """Waits until it is."""


class SoleOwner:
    """A process that has the folder to itself."""

    owned = True

    async def taken(self) -> None:
        return


class SharedOwner:
    """One of several workers. The first to hold the lock is the owner until it ends; then another takes over."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.owned = False

    async def taken(self) -> None:
        while not self.owned:
            self.owned = _locked(self._descriptor, fcntl.LOCK_EX)
            if not self.owned:
                await asyncio.sleep(TAKE_OVER_S)


@contextmanager
def owned_folder(folder: Path) -> Iterator[SoleOwner]:
    """Holds the folder alone; the system frees it when the process ends, however it ends. Raises FolderInUse."""
    with _lock_file(folder, "lock") as alone, _lock_file(folder, "workers") as workers:
        if not (_locked(alone, fcntl.LOCK_EX) and _locked(workers, fcntl.LOCK_EX)):
            raise FolderInUse(folder)
        yield SoleOwner()


@contextmanager
def supervised_folder(folder: Path) -> Iterator[None]:
    """Holds the folder for the workers of this process. Raises FolderInUse.

    Workers that a killed supervisor left behind end within seconds; they are waited for.
    """
    with _lock_file(folder, "lock") as alone, _lock_file(folder, "workers") as workers:
        if not _locked(alone, fcntl.LOCK_EX):
            raise FolderInUse(folder)
        deadline_s = time.monotonic() + _LINGERING_S
        while not _locked(workers, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                raise FolderInUse(folder)
            time.sleep(0.1)
        fcntl.flock(workers, fcntl.LOCK_UN)
        yield


@contextmanager
def shared_folder(folder: Path) -> Iterator[SharedOwner]:
    """For a worker: the folder together with the other workers. Raises FolderInUse when a process has it alone."""
    with _lock_file(folder, "workers") as workers, _lock_file(folder, "owner") as owner:
        if not _locked(workers, fcntl.LOCK_SH):
            raise FolderInUse(folder)
        ownership = SharedOwner(owner)
        ownership.owned = _locked(owner, fcntl.LOCK_EX)
        yield ownership


@contextmanager
def usable_folder(folder: Path, *, shared: bool) -> Iterator[Ownership]:
    """The folder for this process alone, or for a worker together with the others. Raises FolderInUse."""
    if shared:
        with shared_folder(folder) as worker:
            yield worker
    else:
        with owned_folder(folder) as alone:
            yield alone


@contextmanager
def set_up_alone(folder: Path) -> Iterator[None]:
    """Waits its turn: tables are made, and the log is switched on, by one process at a time."""
    with _lock_file(folder, "setup") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def _lock_file(folder: Path, name: str) -> Iterator[int]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False
