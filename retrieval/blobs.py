"""The bytes of uploaded files, one file per id; no name that a client gave is ever part of a path."""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from retrieval.types import StorageFailed

COPY_BYTES = 1 << 20
ABANDONED_S = 3600.0
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class Blobs:
    """A folder of immutable files named by their id. Blocking; usable from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, file_id: str, content: bytes | BinaryIO) -> tuple[int, str]:
        """Stores the content durably or not at all; returns its size in bytes and its SHA-256 in hex.

        Raises StorageFailed.
        """
        target = self._path(file_id)
        temporary = self._folder / f"{file_id}.partial"
        size_bytes, digest = 0, hashlib.sha256()
        try:
            with temporary.open("xb") as file:
                for piece in _pieces(content):
                    file.write(piece)
                    digest.update(piece)
                    size_bytes += len(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageFailed((error.strerror or "the disk failed").lower()) from error
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_folder()
        return size_bytes, digest.hexdigest()

    def open(self, file_id: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        return self._path(file_id).open("rb")

    def remove(self, file_id: str) -> None:
        self._path(file_id).unlink(missing_ok=True)

    def count(self) -> int:
        """Files whose bytes are here, whether or not the database knows them."""
        return sum(1 for _ in self._folder.iterdir())

    def sweep(self, known_ids: set[str], now_s: float | None = None) -> int:
        """Removes what a crash left without a row in the database; returns how many.

        Files younger than an hour stay: another process may be about to add their row.
        """
        oldest_s = (time.time() if now_s is None else now_s) - ABANDONED_S
        removed = 0
        for path in self._folder.iterdir():
            if path.name not in known_ids and path.stat().st_mtime < oldest_s:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _path(self, file_id: str) -> Path:
        if not _FILE_ID.fullmatch(file_id):
            raise ValueError("not a file id that this program made")
        return self._folder / file_id

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _pieces(content: bytes | BinaryIO) -> Iterable[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    while piece := content.read(COPY_BYTES):
        yield piece
