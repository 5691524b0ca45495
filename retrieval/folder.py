"""One process owns a data folder at a time: two would take up each other's unfinished files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrieval.types import RetrievalError


class FolderInUse(RetrievalError):
    """Another process owns the data folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"The data folder {folder} is in use by another process. Stop it, or name another folder.")


@contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the system frees it when the process ends, however it ends. Raises FolderInUse."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(folder) from None
        yield
    finally:
        os.close(descriptor)
