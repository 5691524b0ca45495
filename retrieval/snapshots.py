"""Arrays in one file, written whole or not at all, and read only if they are what they claim to be."""

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

# Raised whenever the arrays of an index change their meaning.
_MAGIC = b"headstart index 1\n"
_CHECKSUM_BYTES = 16
_LENGTH_BYTES = 4


class UnusableSnapshot(Exception):
    """The file is truncated, foreign, or of another kind; the message says which. It can be made anew."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`generation` is the store's at the time; `kind` names the index that the arrays belong to."""

    store_id: str
    kind: str
    generation: int
    arrays: Mapping[str, NDArray[Any]]


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace `path` atomically: whoever reads it sees the old file or the new one. Raises OSError."""
    arrays = {name: np.ascontiguousarray(array) for name, array in snapshot.arrays.items()}
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    header = orjson.dumps(
        {
            "store_id": snapshot.store_id,
            "kind": snapshot.kind,
            "generation": snapshot.generation,
            "arrays": layout,
        }
    )
    parts: list[bytes | memoryview] = [
        len(header).to_bytes(_LENGTH_BYTES, "big") + header,
        *map(_bytes, arrays.values()),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = path.with_suffix(".tmp")
    with waiting.open("wb") as file:
        file.write(_MAGIC + _checksum(parts))
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    waiting.replace(path)
    # The new name itself is durable only when the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_snapshot(path: Path, store_id: str, kind: str) -> Snapshot | None:
    """The snapshot at `path`, None where there is none. Raises UnusableSnapshot."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableSnapshot(f"cannot be read: {error.strerror}") from error
    if not content.startswith(_MAGIC):
        raise UnusableSnapshot("is no index of this version")
    body = memoryview(content)[len(_MAGIC) + _CHECKSUM_BYTES :]
    # Checked before anything is interpreted: a damaged header can say anything.
    if content[len(_MAGIC) : len(_MAGIC) + _CHECKSUM_BYTES] != _checksum([body]):
        raise UnusableSnapshot("is truncated or damaged")
    start = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
    header = orjson.loads(body[_LENGTH_BYTES:start])
    arrays = _arrays(body, start, header["arrays"])
    found = Snapshot(header["store_id"], header["kind"], header["generation"], arrays)
    if found.store_id != store_id:
        raise UnusableSnapshot(f"belongs to another store, '{found.store_id}'")
    if found.kind != kind:
        raise UnusableSnapshot(f"is of kind '{found.kind}', not '{kind}'")
    return found


def _arrays(body: memoryview, offset: int, layout: list[list[Any]]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, shape in layout:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(body, dtype=np.dtype(dtype), count=count, offset=offset).reshape(shape)
        offset += arrays[name].nbytes
    return arrays


def _checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
